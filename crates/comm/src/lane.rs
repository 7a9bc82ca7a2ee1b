//! Lanes: operations of one group that run one after the other, in the order they were started.
//!
//! A group has one lane for its collectives and one per peer and direction for messages, so that a send never waits
//! behind an unrelated receive and groups never wait for each other. A blocking call runs on the caller's thread. An
//! asynchronous one is run by the lane's progress thread, or by whoever waits for it, whoever comes first: so an operation
//! that is waited for at once costs no change of threads. The thread is started by the first asynchronous operation and
//! ends with the lane.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crate::error::{Error, Result};

/// An operation in flight.
///
/// Dropping it does not cancel the operation: the memory stays borrowed until it is done.
#[must_use = "an operation that nobody waits for may still be in flight, and its error is lost"]
#[derive(Debug, Clone)]
pub struct Work {
    outcome: Arc<Outcome>,
    lane: Option<Arc<Shared>>,
}

#[derive(Debug, Default)]
struct Outcome {
    result: Mutex<Option<Result<()>>>,
    done: Condvar,
}

impl Work {
    fn pending(lane: Option<Arc<Shared>>) -> Self {
        Work { outcome: Arc::default(), lane }
    }

    pub(crate) fn finished(result: Result<()>) -> Self {
        let work = Work::pending(None);
        work.complete(result);
        work
    }

    fn complete(&self, result: Result<()>) {
        *self.outcome.result.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
        self.outcome.done.notify_all();
    }

    /// Waits until the operation is done. The operation's own deadline bounds the wait.
    pub fn wait(&self) -> Result<()> {
        while !self.is_done() && self.lane.as_ref().is_some_and(|lane| lane.run_next()) {}
        let mut result = self.outcome.result.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(result) = result.as_ref() {
                return result.clone();
            }
            result = self.outcome.done.wait(result).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Whether the operation is done, successfully or not.
    pub fn is_done(&self) -> bool {
        self.outcome.result.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }
}

/// Waits for every operation of a list; the first error wins, after all are done.
pub fn wait_all(works: impl IntoIterator<Item = Work>) -> Result<()> {
    works.into_iter().map(|work| work.wait()).fold(Ok(()), Result::and)
}

type Job = Box<dyn FnOnce() -> Result<()> + Send>;

/// One lane. Dropping it lets its thread finish what is queued and end.
pub(crate) struct Lane {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<(Job, Work)>,
    busy: bool,
    thread_started: bool,
    closed: bool,
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs the first queued job, unless there is none or another thread is at work.
    fn run_next(&self) -> bool {
        let mut state = self.lock();
        if state.busy {
            return false;
        }
        let Some((job, work)) = state.queue.pop_front() else { return false };
        state.busy = true;
        drop(state);
        let result = run_guarded(job);
        self.lock().busy = false;
        work.complete(result);
        self.changed.notify_all();
        true
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Lane")
    }
}

impl Lane {
    pub(crate) fn new() -> Self {
        Lane { shared: Arc::new(Shared { state: Mutex::default(), changed: Condvar::new() }) }
    }

    /// Runs `job` after everything queued before it, and waits for it.
    pub(crate) fn run(&self, job: impl FnOnce() -> Result<()> + Send) -> Result<()> {
        let mut state = self.shared.lock();
        while state.busy || !state.queue.is_empty() {
            state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.busy = true;
        drop(state);
        let result = run_guarded(job);
        self.shared.lock().busy = false;
        self.shared.changed.notify_all();
        result
    }

    /// Queues `job` for the progress thread.
    pub(crate) fn start(&self, job: impl FnOnce() -> Result<()> + Send + 'static) -> Work {
        let work = Work::pending(Some(Arc::clone(&self.shared)));
        let mut state = self.shared.lock();
        if !state.thread_started {
            let shared = Arc::clone(&self.shared);
            let spawned =
                std::thread::Builder::new().name("comm-progress".into()).spawn(move || progress(&shared));
            if let Err(error) = spawned {
                return Work::finished(Err(Error::io("starting a progress thread", error)));
            }
            state.thread_started = true;
        }
        state.queue.push_back((Box::new(job), work.clone()));
        drop(state);
        self.shared.changed.notify_all();
        work
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.changed.notify_all();
    }
}

fn progress(shared: &Shared) {
    loop {
        let mut state = shared.lock();
        while state.busy || state.queue.is_empty() {
            if state.closed && state.queue.is_empty() {
                return;
            }
            state = shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        shared.run_next();
    }
}

/// Turns a panic of a job into an error, so that whoever waits for it is told.
fn run_guarded(job: impl FnOnce() -> Result<()>) -> Result<()> {
    catch_unwind(AssertUnwindSafe(job)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        let problem = format!("a bug: an operation panicked: {}", text.unwrap_or_default());
        Err(Error::Backend { backend: "progress", problem })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_keeps_the_order_of_blocking_and_asynchronous_work() {
        let lane = Lane::new();
        let log = Arc::new(Mutex::new(Vec::new()));
        let mut works = Vec::new();
        for index in 0..50 {
            let sink = Arc::clone(&log);
            works.push(lane.start(move || {
                sink.lock().unwrap().push(index);
                Ok(())
            }));
        }
        lane.run(|| {
            log.lock().unwrap().push(50);
            Ok(())
        })
        .unwrap();
        assert!(works.iter().all(Work::is_done));
        wait_all(works).unwrap();
        assert_eq!(*log.lock().unwrap(), (0..=50).collect::<Vec<_>>());
    }

    #[test]
    fn a_panicking_operation_is_reported_to_its_waiter() {
        let error = Lane::new().start(|| panic!("boom")).wait().unwrap_err();
        assert!(error.to_string().contains("boom"));
    }
}
