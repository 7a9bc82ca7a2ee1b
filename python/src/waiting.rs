//! Waiting without Python's lock, and interrupts meanwhile.
//!
//! Python notes an interrupt and raises it when the call that runs returns. One that waits for other ranks may not return for as
//! long as its deadline, so a thread watches: a call that was under way when the interrupt came and still is a while later ends
//! the process, and the other ranks are told by that who left.

use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use pyo3::Python;
use signal_hook::consts::SIGINT;
use signal_hook::iterator::Signals;

/// How long a call may go on after an interrupt: most end by themselves.
const PATIENCE: Duration = Duration::from_secs(2);
/// What shells say of a program that an interrupt ended.
const INTERRUPTED: i32 = 130;

/// Calls that have begun, and those that have ended.
static BEGUN: AtomicU64 = AtomicU64::new(0);
static ENDED: AtomicU64 = AtomicU64::new(0);

struct Call;

impl Call {
    fn begin() -> Call {
        BEGUN.fetch_add(1, Ordering::SeqCst);
        Call
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        ENDED.fetch_add(1, Ordering::SeqCst);
    }
}

/// Does something that may wait, without Python's lock.
pub(crate) fn detached<R: Send>(py: Python<'_>, work: impl FnOnce() -> R + Send) -> R {
    let _call = Call::begin();
    py.detach(work)
}

/// Begins to watch for interrupts, once. Python's own handler is called as before.
pub(crate) fn watch_interrupts() {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        let Ok(mut signals) = Signals::new([SIGINT]) else { return };
        let watch = move || {
            for _ in signals.forever() {
                let (begun, ended) = (BEGUN.load(Ordering::SeqCst), ENDED.load(Ordering::SeqCst));
                std::thread::sleep(PATIENCE);
                let same = BEGUN.load(Ordering::SeqCst) == begun && ENDED.load(Ordering::SeqCst) == ended;
                if begun != ended && same {
                    eprintln!("ferrospeed: interrupted while it waited for other ranks or a step");
                    // SAFETY: nothing of this process is needed any more; its exit handlers may wait for the call that hangs.
                    unsafe { libc::_exit(INTERRUPTED) };
                }
            }
        };
        // Without the thread an interrupt waits for the call, as it does without this.
        let _ = std::thread::Builder::new().name("interrupts".into()).spawn(watch);
    });
}
