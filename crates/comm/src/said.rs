//! What a configuration asked to be told by name: times of phases, a profile, memory, the engine's state, what ranks said.
//!
//! It goes to the program's log. A program that keeps none, because it installed no subscriber of `tracing`, has it on its
//! standard output, as DeepSpeed's users do; [`print_what_was_asked_for`] turns that off.

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

use tracing::subscriber::NoSubscriber;

/// The target of log lines that a configuration asked for by name: programs that hide what is merely interesting still
/// show these.
pub const ASKED_FOR: &str = "ferrospeed::asked_for";

static PRINTS: AtomicBool = AtomicBool::new(true);

/// Whether what a configuration asked for is printed where the program keeps no log. It is, until a program says otherwise.
pub fn print_what_was_asked_for(prints: bool) {
    PRINTS.store(prints, Ordering::Relaxed);
}

/// Tells what a configuration asked for.
pub fn tell(text: &str) {
    let has_log = tracing::dispatcher::get_default(|log| !log.is::<NoSubscriber>());
    if has_log {
        tracing::info!(target: ASKED_FOR, "{text}");
    } else if PRINTS.load(Ordering::Relaxed) {
        // Whoever does not read it any more is no reason to stop.
        let _ = writeln!(std::io::stdout().lock(), "{text}");
    }
}
