//! The key-value store through which ranks find each other: who maps what, who listens where.
//!
//! Ranks of one process share a [`MemoryStore`]; processes talk to the store that rank 0 keeps
//! (see [`rendezvous`](crate::rendezvous)). Values are small; bulk data never passes through here.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::error::Result;
use crate::state::JobState;

/// Where ranks leave small values for each other.
pub(crate) trait Store: Send + Sync {
    /// Sets a key, once or again.
    fn set(&self, key: &str, value: Vec<u8>) -> Result<()>;
    /// Waits for a key; `None` when the deadline passes first. Fails when the job fails meanwhile.
    fn wait(&self, key: &str, deadline: Instant, state: &JobState) -> Result<Option<Vec<u8>>>;
    /// Removes a key that nobody will ask for again.
    fn remove(&self, key: &str) -> Result<()>;
}

/// How often a wait looks whether the job has failed.
pub(crate) const HEALTH_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// The store of ranks that are threads of one process.
#[derive(Default)]
pub(crate) struct MemoryStore {
    values: Mutex<HashMap<String, Vec<u8>>>,
    changed: Condvar,
}

impl Store for MemoryStore {
    fn set(&self, key: &str, value: Vec<u8>) -> Result<()> {
        self.values.lock().unwrap_or_else(PoisonError::into_inner).insert(key.to_owned(), value);
        self.changed.notify_all();
        Ok(())
    }

    fn wait(&self, key: &str, deadline: Instant, state: &JobState) -> Result<Option<Vec<u8>>> {
        let mut values = self.values.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(value) = values.get(key) {
                return Ok(Some(value.clone()));
            }
            state.check(u64::MAX)?;
            let now = Instant::now();
            if now >= deadline {
                return Ok(None);
            }
            let pause = HEALTH_CHECK_INTERVAL.min(deadline - now);
            values = self.changed.wait_timeout(values, pause).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn remove(&self, key: &str) -> Result<()> {
        self.values.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
        Ok(())
    }
}
