//! A rank that waits for others, and has nothing to save yet: a signal ends it, and nothing of it stays.
//!
//! Who started the rank sees that a signal ended it. Our own launcher signals all its ranks, which are about to meet: they are
//! given time to do so, and then end as a run does that is told to stop. Where one of them never comes, the others give the
//! launcher the code that it would be given then.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ferrospeed_command::Failure;
use ferrospeed_train::{Ending, StopRequests};
use signal_hook::consts::{SIGINT, SIGTERM};

use super::train::exit_code;

/// How soon it ends.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// How long ranks of our own launcher have to meet after a signal.
const PATIENCE: Duration = Duration::from_secs(3);

/// While this lives, what signals ask for is the end of the process.
#[derive(Debug)]
pub(super) struct Waiting(Arc<AtomicBool>);

impl Waiting {
    /// `is_ours`: whether our own launcher started this rank.
    pub(super) fn until_signals(requests: &StopRequests, is_ours: bool) -> Result<Waiting, Failure> {
        let is_over = Arc::new(AtomicBool::new(false));
        let (over, requests) = (Arc::clone(&is_over), requests.clone());
        let watching = move || {
            let asked =
                [(&requests.leave, SIGTERM, Ending::Left), (&requests.finish, SIGINT, Ending::Stopped)];
            let mut first_told = None;
            while !over.load(Ordering::SeqCst) {
                let told = asked.iter().find(|(request, ..)| request.load(Ordering::SeqCst));
                if let Some((_, signal, ending)) = told {
                    let since: Instant = *first_told.get_or_insert_with(Instant::now);
                    if !is_ours {
                        ferrospeed_comm::leave_meetings();
                        let _ = signal_hook::low_level::emulate_default_handler(*signal);
                    } else if since.elapsed() > PATIENCE {
                        ferrospeed_comm::leave_meetings();
                        std::process::exit(exit_code(*ending).into());
                    }
                }
                std::thread::sleep(LOOK_EVERY);
            }
        };
        let spawned = std::thread::Builder::new().name("waiting".into()).spawn(watching);
        spawned.map_err(|error| Failure::Run(format!("cannot watch for signals: {error}")))?;
        Ok(Waiting(is_over))
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}
