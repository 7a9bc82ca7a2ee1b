//! A rank that waits for others, and has nothing to save yet: a signal ends it at once, and nothing of it stays.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ferrospeed_train::StopRequests;
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::failure::Failure;

/// How soon it ends.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// While this lives, what signals ask for is the end of the process.
#[derive(Debug)]
pub(super) struct Waiting(Arc<AtomicBool>);

impl Waiting {
    pub(super) fn until_signals(requests: &StopRequests) -> Result<Waiting, Failure> {
        let is_over = Arc::new(AtomicBool::new(false));
        let (over, requests) = (Arc::clone(&is_over), requests.clone());
        let watching = move || {
            let asked = [(&requests.leave, SIGTERM), (&requests.finish, SIGINT)];
            while !over.load(Ordering::SeqCst) {
                if let Some((_, signal)) = asked.iter().find(|(request, _)| request.load(Ordering::SeqCst)) {
                    ferrospeed_comm::leave_meetings();
                    // Whoever started this rank sees that a signal ended it.
                    let _ = signal_hook::low_level::emulate_default_handler(*signal);
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
