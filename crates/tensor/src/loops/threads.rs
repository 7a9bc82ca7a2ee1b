//! Work on several threads with results that do not depend on how many there are.
//!
//! A loop cuts its work into tasks by its shapes alone and writes each task's result to its own place. Which
//! thread runs a task, and how many threads there are, then changes nothing but the time.

use std::sync::{Arc, OnceLock};

use super::crew::Crew;

/// Threads to use when nobody says: `FERROSPEED_THREADS` or `OMP_NUM_THREADS`, else the cores we may run on.
pub fn default_threads() -> usize {
    ["FERROSPEED_THREADS", "OMP_NUM_THREADS"]
        .iter()
        .filter_map(|name| std::env::var(name).ok()?.parse().ok())
        .find(|&count: &usize| count > 0)
        .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// Those that a whole process shares, as many as [`default_threads`] says.
pub fn shared() -> &'static Threads {
    static SHARED: OnceLock<Threads> = OnceLock::new();
    SHARED.get_or_init(|| Threads::new(default_threads()))
}

/// How many threads work: the caller's, and those that help it.
#[derive(Clone)]
pub struct Threads {
    crew: Option<Arc<Crew>>,
}

impl Threads {
    /// This many, the caller's included; fewer where the system gives no more.
    pub fn new(count: usize) -> Self {
        Threads { crew: (count > 1).then(|| Arc::new(Crew::new(count - 1))) }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        1 + self.crew.as_ref().map_or(0, |crew| crew.helpers())
    }

    /// Runs `task(0)`, …, `task(count - 1)`, in any order, at once where there are threads.
    pub fn run(&self, count: usize, task: impl Fn(usize) + Send + Sync) {
        match &self.crew {
            Some(crew) if count > 1 => crew.run(count, &task),
            _ => (0..count).for_each(task),
        }
    }

    /// Cuts `0..length` into blocks of `block` and runs `task` on each range.
    pub fn blocks(&self, length: usize, block: usize, task: impl Fn(std::ops::Range<usize>) + Send + Sync) {
        let block = block.max(1);
        self.run(length.div_ceil(block), |index| task(index * block..((index + 1) * block).min(length)));
    }
}
