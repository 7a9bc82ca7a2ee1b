//! State that must not change for a while, because somebody reads it.
//!
//! A checkpoint in the background reads weights and optimizer states while forward and backward go on; both only read
//! them. What would change them says so and waits, and whoever holds them takes a copy of the rest and lets go. The wait
//! ends in any case: a thread that fails or panics lets go of its [`Hold`] as it ends.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

#[derive(Debug, Default)]
struct Count {
    holding: usize,
    waiting: usize,
}

/// Who holds the state, and who waits to change it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Holds {
    shared: Arc<(Mutex<Count>, Condvar)>,
}

/// Whoever has this reads state that does not change.
pub(crate) struct Hold {
    holds: Holds,
}

impl Holds {
    fn lock(&self) -> MutexGuard<'_, Count> {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn take(&self) -> Hold {
        self.lock().holding += 1;
        Hold { holds: self.clone() }
    }

    /// Waits until nobody holds the state.
    pub(crate) fn wait_for_none(&self) {
        let mut count = self.lock();
        count.waiting += 1;
        let changed = &self.shared.1;
        let mut count =
            changed.wait_while(count, |count| count.holding > 0).unwrap_or_else(PoisonError::into_inner);
        count.waiting -= 1;
    }
}

impl Hold {
    /// Whether somebody waits to change the state.
    pub(crate) fn is_waited_for(&self) -> bool {
        self.holds.lock().waiting > 0
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.holds.lock().holding -= 1;
        self.holds.shared.1.notify_all();
    }
}
