//! The updates that a step has queued: which tiles are still to come.
//!
//! A step whose states are elsewhere returns when it knows what to do; a thread then works tile by tile, in the order in
//! which the next forward reads. Whoever wants to read a parameter waits for its tiles, whoever changes state or gradients
//! for all of them. Nobody holds the lock of the store meanwhile.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::error::{Result, ZeroError};

/// How long a tile may take: longer than a disk is waited for.
const TILE_DEADLINE: Duration = Duration::from_secs(900);

/// Elements of this rank's part of a share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tile {
    pub(crate) share: usize,
    pub(crate) range: Range<usize>,
}

impl Tile {
    fn meets(&self, other: &Tile) -> bool {
        self.share == other.share && self.range.start < other.range.end && other.range.start < self.range.end
    }
}

#[derive(Default)]
struct Queued {
    /// What is to come.
    tiles: Vec<Tile>,
    is_running: bool,
    /// Why it ended early, until somebody is told.
    failure: Option<ZeroError>,
}

#[derive(Default)]
struct Shared {
    queued: Mutex<Queued>,
    changed: Condvar,
    /// Whether a step has failed halfway, and nothing was loaded since.
    half_stepped: AtomicBool,
    /// Whether anything is queued: most reads look no further.
    is_running: AtomicBool,
}

/// What is queued. Clones are the same.
#[derive(Clone, Default)]
pub(crate) struct Updates {
    shared: Arc<Shared>,
}

/// A thread that works on what is queued. However it ends, nobody waits for it any more.
pub(crate) struct Running {
    updates: Updates,
    outcome: Result<()>,
}

impl Updates {
    fn lock(&self) -> MutexGuard<'_, Queued> {
        self.shared.queued.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes what is to come. Whatever was queued before is done.
    pub(crate) fn begin(&self, tiles: Vec<Tile>) -> Running {
        *self.lock() = Queued { tiles, is_running: true, failure: None };
        self.shared.is_running.store(true, Ordering::Release);
        let fault = ZeroError::Request("the thread that updates offloaded state ended by a fault".into());
        Running { updates: self.clone(), outcome: Err(fault) }
    }

    /// Waits until a stretch is updated.
    pub(crate) fn wait_for(&self, wanted: &Tile) -> Result<()> {
        if self.shared.is_running.load(Ordering::Acquire) {
            self.wait_while(|queued| queued.tiles.iter().any(|tile| tile.meets(wanted)))?;
        }
        self.check("reading a parameter")
    }

    /// Waits until everything is.
    pub(crate) fn settle(&self, call: &'static str) -> Result<()> {
        self.wait_while(|_| true)?;
        self.check(call)
    }

    /// Waits until nobody works on it any more, whatever came of it.
    pub(crate) fn wait_for_end(&self) {
        if self.shared.is_running.load(Ordering::Acquire) {
            // What it failed of is told to whoever asks for a result.
            let _ = self.wait_while(|_| true);
        }
    }

    fn wait_while(&self, is_wanted: impl Fn(&Queued) -> bool) -> Result<()> {
        let mut queued = self.lock();
        while queued.is_running && is_wanted(&queued) {
            let before = queued.tiles.len();
            let waits =
                |queued: &mut Queued| queued.is_running && is_wanted(queued) && queued.tiles.len() == before;
            let waited = self.shared.changed.wait_timeout_while(queued, TILE_DEADLINE, waits);
            let (guard, outcome) = waited.unwrap_or_else(PoisonError::into_inner);
            if outcome.timed_out() {
                let seconds = TILE_DEADLINE.as_secs();
                let why =
                    format!("no tile of offloaded state was updated for {seconds} s; is the disk dead?");
                return Err(ZeroError::Request(why));
            }
            queued = guard;
        }
        Ok(())
    }

    /// Notes whether a step has failed halfway.
    pub(crate) fn set_half_stepped(&self, half_stepped: bool) {
        self.shared.half_stepped.store(half_stepped, Ordering::Release);
        if !half_stepped {
            self.lock().failure = None;
        }
    }

    /// Refuses to work with weights of which a step has changed only a part; the first to ask is told why it did.
    pub(crate) fn check(&self, call: &'static str) -> Result<()> {
        if !self.shared.half_stepped.load(Ordering::Acquire) {
            return Ok(());
        }
        Err(self.lock().failure.take().unwrap_or(ZeroError::HalfStepped { call }))
    }
}

impl Running {
    /// Notes that a tile can be read.
    pub(crate) fn done(&self, tile: &Tile) {
        let mut queued = self.updates.lock();
        queued.tiles.retain(|other| other != tile);
        self.updates.shared.changed.notify_all();
    }

    /// Notes how it ended.
    pub(crate) fn end(mut self, outcome: Result<()>) {
        self.outcome = outcome;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let shared = &self.updates.shared;
        let mut queued = self.updates.lock();
        if let Err(error) = std::mem::replace(&mut self.outcome, Ok(())) {
            shared.half_stepped.store(true, Ordering::Release);
            queued.failure = Some(error);
        }
        queued.is_running = false;
        shared.is_running.store(false, Ordering::Release);
        shared.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tile(share: usize, range: Range<usize>) -> Tile {
        Tile { share, range }
    }

    #[test]
    fn a_reader_waits_for_its_own_tiles_only() {
        let updates = Updates::default();
        let running = updates.begin(vec![tile(0, 0..8), tile(0, 8..16), tile(1, 0..8)]);
        running.done(&tile(0, 0..8));
        updates.wait_for(&tile(0, 0..8)).unwrap();
        updates.wait_for(&tile(2, 0..100)).unwrap();
        let reader = {
            let updates = updates.clone();
            std::thread::spawn(move || updates.wait_for(&tile(0, 4..9)))
        };
        running.done(&tile(0, 8..16));
        reader.join().unwrap().unwrap();
        running.end(Ok(()));
        updates.settle("step").unwrap();
        updates.wait_for(&tile(1, 0..8)).unwrap();
    }

    #[test]
    fn a_thread_that_ends_by_a_fault_keeps_nobody_and_spoils_the_weights_until_they_are_loaded() {
        let updates = Updates::default();
        drop(updates.begin(vec![tile(0, 0..8)]));
        let told = updates.wait_for(&tile(0, 0..8)).unwrap_err().to_string();
        assert!(told.contains("by a fault"), "{told}");
        let again = updates.settle("step").unwrap_err().to_string();
        assert!(again.contains("part old and part new"), "{again}");
        updates.set_half_stepped(false);
        updates.settle("step").unwrap();
    }
}
