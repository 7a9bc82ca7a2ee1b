//! Waiting: a short spin that yields, then a futex, always with an eye on the deadline and on the health of the job.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::LocalCarrier;
use crate::backend::Ticket;
use crate::error::{Error, Result};
use crate::store::HEALTH_CHECK_INTERVAL;
use crate::sys::{futex_wait, futex_wake_all};

/// A counter in shared memory that others wait on, alone on its cache lines.
#[repr(C, align(128))]
pub(super) struct Counter {
    value: AtomicU32,
    waiters: AtomicU32,
}

impl Counter {
    pub(super) fn load(&self) -> u32 {
        self.value.load(Ordering::Acquire)
    }

    /// Moves the counter and wakes who waits. Only its owner calls this.
    pub(super) fn advance(&self, by: u32) -> u32 {
        let next = self.value.load(Ordering::Relaxed).wrapping_add(by);
        // Sequentially consistent with the waiter's announcement: either we see it, or it sees the new value.
        self.value.store(next, Ordering::SeqCst);
        if self.waiters.load(Ordering::SeqCst) > 0 {
            futex_wake_all(&self.value);
        }
        next
    }

    /// Whether the counter has come to `target`, on a circle of 2³² steps.
    pub(super) fn reached(&self, target: u32) -> bool {
        self.load().wrapping_sub(target) as i32 >= 0
    }

    fn sleep_until_change(&self, target: u32, pause: Duration) {
        self.waiters.fetch_add(1, Ordering::SeqCst);
        let seen = self.value.load(Ordering::SeqCst);
        if (seen.wrapping_sub(target) as i32) < 0 {
            futex_wait(&self.value, seen, pause);
        }
        self.waiters.fetch_sub(1, Ordering::SeqCst);
    }
}

/// How long a rank looks out for others before it sleeps.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patience {
    pub(crate) limit: Duration,
    /// Looks between two offers of the core to who else wants it.
    pub(crate) looks: u32,
}

/// Why a wait ended without what it waited for.
pub(super) enum Interrupted {
    Failed(Error),
    DeadlinePassed,
}

impl LocalCarrier {
    /// Waits until `counter`, which belongs to the rank `owner`, reaches `target`.
    pub(super) fn wait_for(
        &self,
        counter: &Counter,
        target: u32,
        owner: usize,
        deadline: Instant,
    ) -> std::result::Result<(), Interrupted> {
        if counter.reached(target) {
            return Ok(());
        }
        let Patience { limit, looks } = self.patience;
        let spin_end = Instant::now() + limit;
        loop {
            for _ in 0..looks {
                if counter.reached(target) {
                    return Ok(());
                }
                std::hint::spin_loop();
            }
            if Instant::now() >= spin_end {
                break;
            }
            // Where the awaited rank shares this core, only yielding lets it arrive; else this returns at once.
            std::thread::yield_now();
        }
        let membership = &self.membership;
        loop {
            // The order matters: a rank that stepped and then left has stepped.
            let left = membership.state.has_left(membership.ranks[owner]);
            let health = membership.state.check(membership.group_id);
            if counter.reached(target) {
                return Ok(());
            }
            health.map_err(Interrupted::Failed)?;
            if left {
                return Err(Interrupted::Failed(membership.state.left_error(membership.ranks[owner])));
            }
            let now = Instant::now();
            if now >= deadline {
                return Err(Interrupted::DeadlinePassed);
            }
            counter.sleep_until_change(target, HEALTH_CHECK_INTERVAL.min(deadline - now));
        }
    }

    /// One step of an operation: everybody arrives before anybody goes on.
    pub(super) fn step(&self, ticket: &Ticket) -> Result<()> {
        self.step_described(|| ticket.describe(), ticket.started, ticket.deadline)
    }

    /// A step outside numbered operations.
    pub(super) fn step_together(&self, what: &str, started: Instant, deadline: Instant) -> Result<()> {
        self.step_described(|| what.to_owned(), started, deadline)
    }

    fn step_described(
        &self,
        describe: impl Fn() -> String,
        started: Instant,
        deadline: Instant,
    ) -> Result<()> {
        let target = self.layout.step(self.membership.me).advance(1);
        for rank in 0..self.membership.size() {
            match self.wait_for(self.layout.step(rank), target, rank, deadline) {
                Ok(()) => {}
                Err(Interrupted::Failed(error)) => return Err(error),
                Err(Interrupted::DeadlinePassed) => {
                    let missing = self.missing(target);
                    return Err(Error::Deadline {
                        operation: describe(),
                        waited: started.elapsed(),
                        missing,
                    });
                }
            }
        }
        Ok(())
    }

    /// One phrase for each rank that has not come to `target`.
    fn missing(&self, target: u32) -> Vec<String> {
        let absent = (0..self.membership.size()).filter(|rank| !self.layout.step(*rank).reached(target));
        absent
            .map(|rank| {
                let (seen, site) = self.layout.last_posted(rank);
                let last = seen.map_or_else(|| "none".to_owned(), |seen| seen.describe(&site));
                let name = self.membership.state.name(self.membership.ranks[rank]);
                format!("{name} (its last operation in this group: {last})")
            })
            .collect()
    }
}
