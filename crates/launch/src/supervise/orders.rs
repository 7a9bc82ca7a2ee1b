//! What another thread of the launcher asks of a job that runs: an agent's, whose coordinator ends a round.
//!
//! An order is no signal of a person's: two of them do not end anybody's patience, and one that asks ranks to save is not hurried
//! by a signal that asks the same.

use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// What the ranks of a job are to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Order {
    /// Save and leave: SIGTERM, and the time that a forwarded signal grants.
    Leave,
    /// End at once, for what they work on is lost: SIGTERM, and SIGKILL a moment later.
    End,
}

/// Orders on their way to a supervisor, and the signals that it has seen.
#[derive(Debug, Clone, Default)]
pub struct Orders(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    given: Mutex<Option<Order>>,
    heard: AtomicI32,
}

impl Orders {
    /// Gives an order; of two that wait, the stronger one stays.
    pub fn give(&self, order: Order) {
        let mut given = self.0.given.lock().unwrap_or_else(PoisonError::into_inner);
        *given = (*given).max(Some(order));
    }

    /// Takes back what was given to a job that is over.
    pub fn forget(&self) {
        let _ = self.take();
    }

    /// The first signal that came to this process since a supervisor listens.
    pub fn heard(&self) -> Option<i32> {
        Some(self.0.heard.load(Ordering::SeqCst)).filter(|signal| *signal != 0)
    }

    pub(super) fn take(&self) -> Option<Order> {
        self.0.given.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    pub(super) fn hear(&self, signal: i32) {
        // The first one says why; whoever comes second finds that it was said.
        let _ = self.0.heard.compare_exchange(0, signal, Ordering::SeqCst, Ordering::SeqCst);
    }
}
