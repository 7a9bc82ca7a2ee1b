//! Threads that help with a row of tasks, and wait awake for the next one.
//!
//! Kernels follow each other within microseconds, and many take less than a sleeping thread needs to wake up (some
//! fifty microseconds, more in a virtual machine). So a helper that has run out of work looks out for more for a while
//! before it sleeps. The caller takes tasks like the helpers do and waits only for those that have taken one: a helper that
//! the system has put aside delays nobody.
//!
//! A row of tasks inside a task, or beside another thread's, is done by its caller alone.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Looks for work before a helper gives its processor to whoever waits for one.
const EAGER_LOOKS: usize = 2_000;
/// Looks, each after others had the processor, before it sleeps.
const PATIENT_LOOKS: usize = 200;

/// A row of tasks that is being done.
struct Row<'a> {
    task: &'a (dyn Fn(usize) + Sync),
    count: usize,
    next: AtomicUsize,
    /// What the first task that failed said.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl Row<'_> {
    /// Does tasks until none are left.
    fn work(&self) {
        let result = catch_unwind(AssertUnwindSafe(|| {
            loop {
                let index = self.next.fetch_add(1, Ordering::Relaxed);
                if index >= self.count {
                    return;
                }
                (self.task)(index);
            }
        }));
        if let Err(panic) = result {
            // Whatever is left need not be done.
            self.next.store(self.count, Ordering::Relaxed);
            lock(&self.panic).get_or_insert(panic);
        }
    }
}

/// A row of tasks as the helpers see it. Only followed by those that are counted in `helping`, for which the caller waits.
#[derive(Clone, Copy)]
struct Offer(*const Row<'static>);

// SAFETY: what it points to may be shared: the task is `Sync`, the rest are atomics and a mutex.
unsafe impl Send for Offer {}

#[derive(Default)]
struct State {
    offer: Option<Offer>,
    /// How many there have been.
    offers: usize,
    asleep: usize,
    stop: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    wake: Condvar,
    /// How many offers there have been, to be looked at without the lock.
    offers: AtomicUsize,
    /// Helpers that have taken the offer up.
    helping: AtomicUsize,
}

/// A caller's helpers.
pub(crate) struct Crew {
    shared: Arc<Shared>,
    /// Held by the one whose row is being done.
    busy: Mutex<()>,
    helpers: usize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Crew {
    /// As many helpers as the system gives, at most `helpers`.
    pub(crate) fn new(helpers: usize) -> Crew {
        let shared = Arc::new(Shared::default());
        let started = (0..helpers).map_while(|index| {
            let shared = Arc::clone(&shared);
            let name = format!("ferrospeed-cpu-{}", index + 1);
            std::thread::Builder::new().name(name).spawn(move || shared.help()).ok()
        });
        let helpers = started.count();
        Crew { shared, busy: Mutex::new(()), helpers }
    }

    pub(crate) fn helpers(&self) -> usize {
        self.helpers
    }

    /// Runs `task(0)`, …, `task(count - 1)`, in any order.
    pub(crate) fn run(&self, count: usize, task: &(dyn Fn(usize) + Sync)) {
        let Ok(busy) = self.busy.try_lock() else {
            return (0..count).for_each(task);
        };
        let row = Row { task, count, next: AtomicUsize::new(0), panic: Mutex::new(None) };
        let shared = &*self.shared;
        {
            let mut state = lock(&shared.state);
            state.offer = Some(Offer((&raw const row).cast()));
            state.offers += 1;
            shared.offers.store(state.offers, Ordering::Release);
            if state.asleep > 0 {
                shared.wake.notify_all();
            }
        }
        row.work();
        lock(&shared.state).offer = None;
        // From here on nobody takes the row up. `work` does not unwind, so this is always reached.
        let mut looks = 0;
        while shared.helping.load(Ordering::Acquire) > 0 {
            look_away(&mut looks);
        }
        drop(busy);
        if let Some(panic) = row.panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
            resume_unwind(panic);
        }
    }
}

/// Waits a moment: eagerly at first, then for whoever needs the processor.
fn look_away(looks: &mut usize) {
    *looks += 1;
    if *looks < EAGER_LOOKS {
        std::hint::spin_loop();
    } else {
        std::thread::yield_now();
    }
}

impl Shared {
    fn help(&self) {
        let mut seen = 0;
        while let Some(offer) = self.wait(&mut seen) {
            // SAFETY: `wait` has counted this thread in `helping` while the offer stood, so the row lives until it is
            // counted out again.
            unsafe { (*offer.0).work() };
            self.helping.fetch_sub(1, Ordering::Release);
        }
    }

    /// Waits for an offer that was not seen before and takes it up; none when the crew is dismissed.
    fn wait(&self, seen: &mut usize) -> Option<Offer> {
        loop {
            let mut looks = 0;
            while self.offers.load(Ordering::Acquire) == *seen && looks < EAGER_LOOKS + PATIENT_LOOKS {
                look_away(&mut looks);
            }
            let mut state = lock(&self.state);
            while state.offers == *seen && !state.stop {
                state.asleep += 1;
                state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.asleep -= 1;
            }
            if state.stop {
                return None;
            }
            *seen = state.offers;
            // One that is over already leaves none.
            if let Some(offer) = state.offer {
                self.helping.fetch_add(1, Ordering::Relaxed);
                return Some(offer);
            }
        }
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        lock(&self.shared.state).stop = true;
        self.shared.wake.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_is_done_once() {
        let crew = Crew::new(3);
        for count in [0, 1, 2, 7, 1000] {
            let done: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
            crew.run(count, &|index| {
                done[index].fetch_add(1, Ordering::Relaxed);
            });
            assert!(done.iter().all(|done| done.load(Ordering::Relaxed) == 1), "{count} tasks");
        }
    }

    #[test]
    fn helpers_take_part() {
        // Each task waits for the other: with one thread neither would end.
        let crew = Crew::new(1);
        let barrier = std::sync::Barrier::new(2);
        for _ in 0..100 {
            crew.run(2, &|_| {
                barrier.wait();
            });
        }
    }

    #[test]
    fn tasks_inside_tasks_and_callers_at_once_are_all_done() {
        let crew = Crew::new(2);
        let total = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        crew.run(4, &|_| {
                            crew.run(5, &|_| {
                                total.fetch_add(1, Ordering::Relaxed);
                            });
                        });
                    }
                });
            }
        });
        assert_eq!(total.into_inner(), 3 * 50 * 4 * 5);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_crew_goes_on() {
        let crew = Crew::new(2);
        let run = AssertUnwindSafe(|| crew.run(100, &|index| assert!(index != 50, "task fifty")));
        let panic = catch_unwind(run).unwrap_err();
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"task fifty"));
        let done = AtomicUsize::new(0);
        crew.run(100, &|_| {
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(done.into_inner(), 100);
    }
}
