//! The launcher's signals, counted by a handler and read by the supervisor: SIGINT, SIGTERM and SIGHUP, which end a
//! job, and SIGUSR2, which only its ranks understand.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

use crate::error::LaunchError;

const WATCHED: [Signal; 4] = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, RELAYED];

/// Passed on, and nothing else: what it means is the ranks' business.
pub(super) const RELAYED: Signal = Signal::SIGUSR2;

static RECEIVED: [AtomicU32; WATCHED.len()] = [const { AtomicU32::new(0) }; WATCHED.len()];
static TAKEN: AtomicBool = AtomicBool::new(false);

extern "C" fn note_signal(number: libc::c_int) {
    for (signal, count) in WATCHED.iter().zip(&RECEIVED) {
        if *signal as libc::c_int == number {
            count.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// Whether this process ignores a signal, as one under `nohup` does SIGHUP.
pub fn is_ignored(signal: i32) -> bool {
    // SAFETY: all its bits may be zero, and without a new action the call only writes the present one there.
    unsafe {
        let mut present: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &raw mut present) == 0
            && present.sa_sigaction == libc::SIG_IGN
    }
}

/// The signals of this process, watched until dropped. One at a time per process.
#[derive(Debug)]
pub(super) struct SignalWatch {
    before: Vec<(Signal, SigAction)>,
}

impl SignalWatch {
    pub(super) fn install() -> Result<Self, LaunchError> {
        if TAKEN.swap(true, Ordering::SeqCst) {
            return Err(LaunchError::SignalsTaken);
        }
        RECEIVED.iter().for_each(|count| count.store(0, Ordering::SeqCst));
        let action = SigAction::new(SigHandler::Handler(note_signal), SaFlags::SA_RESTART, SigSet::empty());
        let mut watch = SignalWatch { before: Vec::new() };
        for signal in WATCHED {
            // SAFETY: the handler only adds to an atomic, which is async-signal-safe.
            let before = unsafe { sigaction(signal, &action) }
                .map_err(|error| LaunchError::System { action: "watch signals", source: error.into() })?;
            watch.before.push((signal, before));
            // Under nohup and in shell background jobs a signal is ignored on purpose: leave it so.
            if matches!(before.handler(), SigHandler::SigIgn) {
                // SAFETY: restores the action that was there before.
                let _ = unsafe { sigaction(signal, &before) };
            }
        }
        Ok(watch)
    }

    /// A signal that came since the last call.
    pub(super) fn take(&self) -> Option<i32> {
        let hit = |count: &AtomicU32| {
            count.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |seen| seen.checked_sub(1)).is_ok()
        };
        WATCHED.iter().zip(&RECEIVED).find(|(_, count)| hit(count)).map(|(signal, _)| *signal as i32)
    }

    /// Counts a signal that came before the watch began.
    pub(super) fn add(&self, signal: i32) {
        note_signal(signal);
    }
}

impl Drop for SignalWatch {
    fn drop(&mut self) {
        for (signal, before) in &self.before {
            // SAFETY: restores the action that was there before.
            let _ = unsafe { sigaction(*signal, before) };
        }
        TAKEN.store(false, Ordering::SeqCst);
    }
}
