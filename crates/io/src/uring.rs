//! Reads and writes through `io_uring`: callers put requests into the ring, and one thread takes out what is done.
//!
//! The kernel lets several threads enter one ring. Requests are put in under a lock; only the one thread reads results. What
//! the ring has no room for waits in a list and follows when something is done. A request for nothing at all wakes the
//! thread when the ring is to close.

use std::collections::VecDeque;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use io_uring::{IoUring, opcode, squeue, types};

use crate::queue::{Request, Way};

/// What the request that closes the ring is known by.
const CLOSE: u64 = u64::MAX;

pub(crate) struct Ring {
    shared: Arc<Shared>,
    collector: Option<JoinHandle<()>>,
}

struct Shared {
    ring: IoUring,
    /// Whether the kernel is entered for each request.
    single_submit: bool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// What is at the disk, by its number in the ring.
    under_way: Vec<Option<Request>>,
    free: Vec<usize>,
    waiting: VecDeque<Request>,
    /// The kernel takes no more: whatever comes fails.
    is_broken: bool,
}

impl Ring {
    /// A ring for this many requests at once.
    pub(crate) fn open(depth: usize, single_submit: bool) -> std::io::Result<Ring> {
        // One place more, for the request that closes it.
        let ring = IoUring::new(u32::try_from(depth + 1).unwrap_or(u32::MAX).next_power_of_two())?;
        let state = State {
            under_way: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
            waiting: VecDeque::new(),
            is_broken: false,
        };
        let shared = Arc::new(Shared { ring, single_submit, state: Mutex::new(state) });
        let for_collector = Arc::clone(&shared);
        let collector =
            std::thread::Builder::new().name("io_uring".to_owned()).spawn(move || for_collector.collect())?;
        Ok(Ring { shared, collector: Some(collector) })
    }

    pub(crate) fn submit(&self, requests: impl Iterator<Item = Request>) {
        let mut state = self.shared.lock();
        state.waiting.extend(requests);
        self.shared.push_waiting(&mut state);
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        let closing = opcode::Nop::new().build().user_data(CLOSE);
        let mut state = self.shared.lock();
        self.shared.push(&state, &closing);
        self.shared.enter_kernel(&mut state);
        let is_broken = state.is_broken;
        drop(state);
        // Nothing wakes the thread of a ring that takes nothing.
        if let Some(collector) = self.collector.take().filter(|_| !is_broken) {
            let _ = collector.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts one entry into the ring, which has a place for each number and one more.
    fn push(&self, _held: &MutexGuard<'_, State>, entry: &squeue::Entry) -> bool {
        // SAFETY: the lock makes this the only user of the submission side; entries name memory that their operation owns
        // and a file that their request keeps open until they end.
        unsafe { self.ring.submission_shared().push(entry) }.is_ok()
    }

    /// Tells the kernel of what was put in. Where it is busy, whoever takes results out tells it again.
    fn enter_kernel(&self, state: &mut MutexGuard<'_, State>) {
        match self.enter(|| self.ring.submit()) {
            Ok(_) => {}
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY)) => {}
            Err(_) => self.give_up(state),
        }
    }

    /// Enters the kernel, again where a signal came between.
    fn enter(&self, call: impl Fn() -> std::io::Result<usize>) -> std::io::Result<usize> {
        loop {
            match call() {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                other => return other,
            }
        }
    }

    /// Sends as many requests off as the ring has room for.
    fn push_waiting(&self, state: &mut MutexGuard<'_, State>) {
        if state.is_broken {
            return self.give_up(state);
        }
        let mut pushed = 0;
        while !state.free.is_empty()
            && let Some(request) = state.waiting.pop_front()
        {
            let Some(number) = state.free.pop() else { break };
            let (file, length) = (types::Fd(request.file.file().as_raw_fd()), request.length as u32);
            let entry = match request.way {
                Way::Read => {
                    opcode::Read::new(file, request.address as *mut u8, length).offset(request.offset).build()
                }
                Way::Write => opcode::Write::new(file, request.address as *const u8, length)
                    .offset(request.offset)
                    .build(),
            };
            // Through the page cache the kernel would copy before it comes back.
            let kind = if request.file.is_direct() { squeue::Flags::empty() } else { squeue::Flags::ASYNC };
            if !self.push(state, &entry.flags(kind).user_data(number as u64)) {
                // The kernel has not looked at what was put in yet.
                state.free.push(number);
                state.waiting.push_front(request);
                break;
            }
            state.under_way[number] = Some(request);
            pushed += 1;
            if self.single_submit {
                self.enter_kernel(state);
            }
        }
        if pushed > 0 && !self.single_submit {
            self.enter_kernel(state);
        }
    }

    /// Takes out what is done until the ring closes.
    fn collect(&self) {
        loop {
            match self.enter(|| self.ring.submit_and_wait(1)) {
                Ok(_) => {}
                Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY)) => {}
                Err(_) => return self.give_up(&mut self.lock()),
            }
            // SAFETY: this thread is the only one that reads results.
            let results: Vec<(u64, i32)> = unsafe { self.ring.completion_shared() }
                .map(|entry| (entry.user_data(), entry.result()))
                .collect();
            let mut state = self.lock();
            let mut closes = false;
            let mut ended = Vec::new();
            for (number, result) in results {
                if number == CLOSE {
                    closes = true;
                    continue;
                }
                let number = number as usize;
                let Some(request) = state.under_way[number].take() else { continue };
                state.free.push(number);
                match usize::try_from(result) {
                    Ok(moved) if request.is_through(moved) => ended.push((request, Ok(()))),
                    Ok(0) => ended.push((request, Err(libc::EIO))),
                    // The kernel may stop early; the rest is asked for anew.
                    Ok(moved) => state.waiting.push_front(request.rest(moved)),
                    Err(_) if -result == libc::EINTR || -result == libc::EAGAIN => {
                        state.waiting.push_front(request);
                    }
                    Err(_) => ended.push((request, Err(-result))),
                }
            }
            self.push_waiting(&mut state);
            drop(state);
            ended.into_iter().for_each(|(request, outcome)| request.end(outcome));
            // Operations hold the queue, so nothing is under way when it closes.
            if closes {
                return;
            }
        }
    }

    /// The kernel takes the ring away: what waits fails. What is under way may still be written to, so its operation keeps
    /// it until the deadline.
    fn give_up(&self, state: &mut MutexGuard<'_, State>) {
        state.is_broken = true;
        for request in std::mem::take(&mut state.waiting) {
            request.end(Err(libc::EIO));
        }
    }
}
