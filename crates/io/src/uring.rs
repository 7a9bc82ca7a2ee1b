//! Reads and writes through `io_uring`: callers put requests into the ring, and one thread takes out what is done.
//!
//! The kernel lets several threads enter one ring. Requests are put in under a lock; only the one thread reads results. What
//! the ring has no room for waits in a list and follows when something is done. A request for nothing at all wakes the
//! thread when the ring is to close.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use io_uring::{IoUring, opcode, squeue, types};

use crate::queue::{Request, Way};
use crate::threads::transfer;

/// What the request that closes the ring is known by.
const CLOSE: u64 = u64::MAX;

pub(crate) struct Ring {
    shared: Arc<Shared>,
    collector: Option<JoinHandle<()>>,
}

struct Shared {
    ring: IoUring,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// What is at the disk, by its number in the ring.
    under_way: Vec<Option<Request>>,
    free: Vec<usize>,
    waiting: VecDeque<Request>,
}

impl Ring {
    /// A ring for this many requests at once.
    pub(crate) fn open(depth: usize) -> std::io::Result<Ring> {
        // One place more, for the request that closes it.
        let ring = IoUring::new(u32::try_from(depth + 1).unwrap_or(u32::MAX).next_power_of_two())?;
        let state = State {
            under_way: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
            waiting: VecDeque::new(),
        };
        let shared = Arc::new(Shared { ring, state: Mutex::new(state) });
        let for_collector = Arc::clone(&shared);
        let collector =
            std::thread::Builder::new().name("io_uring".to_owned()).spawn(move || for_collector.collect())?;
        Ok(Ring { shared, collector: Some(collector) })
    }

    pub(crate) fn submit(&self, request: Request) {
        let mut state = self.shared.lock();
        state.waiting.push_back(request);
        self.shared.push_waiting(&mut state);
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        let closing = opcode::Nop::new().build().user_data(CLOSE);
        let state = self.shared.lock();
        self.shared.push(&state, &closing);
        drop(state);
        if let Some(collector) = self.collector.take() {
            let _ = collector.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts one entry into the ring and tells the kernel. Whether it could.
    fn push(&self, _held: &MutexGuard<'_, State>, entry: &squeue::Entry) -> bool {
        // SAFETY: the lock makes this the only user of the submission side; entries name memory that their operation owns
        // and a file that it keeps open until they end.
        let pushed = unsafe { self.ring.submission_shared().push(entry) }.is_ok();
        pushed && self.enter(|| self.ring.submit()).is_ok()
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
        while !state.free.is_empty()
            && let Some(request) = state.waiting.pop_front()
        {
            let Some(number) = state.free.pop() else { return };
            let (file, length) = (types::Fd(request.file), request.length as u32);
            let entry = match request.way {
                Way::Read => {
                    opcode::Read::new(file, request.address as *mut u8, length).offset(request.offset).build()
                }
                Way::Write => opcode::Write::new(file, request.address as *const u8, length)
                    .offset(request.offset)
                    .build(),
            };
            state.under_way[number] = Some(request);
            if !self.push(state, &entry.user_data(number as u64)) {
                // The ring takes no more: this request goes the plain way.
                state.free.push(number);
                if let Some(request) = state.under_way[number].take() {
                    let outcome = transfer(&request);
                    request.done.end(&request, outcome);
                }
            }
        }
    }

    /// Takes out what is done until the ring closes.
    fn collect(&self) {
        loop {
            if self.enter(|| self.ring.submit_and_wait(1)).is_err() {
                return self.give_up();
            }
            // SAFETY: this thread is the only one that reads results.
            let results: Vec<(u64, i32)> = unsafe { self.ring.completion_shared() }
                .map(|entry| (entry.user_data(), entry.result()))
                .collect();
            let mut state = self.lock();
            let mut closes = false;
            for (number, result) in results {
                if number == CLOSE {
                    closes = true;
                    continue;
                }
                let number = number as usize;
                let Some(request) = state.under_way[number].take() else { continue };
                state.free.push(number);
                match usize::try_from(result) {
                    Ok(moved) if moved == request.length => request.done.end(&request, Ok(())),
                    Ok(0) => request.done.end(&request, Err(libc::EIO)),
                    // The kernel may stop early; the rest is asked for anew.
                    Ok(moved) => state.waiting.push_front(request.rest(moved)),
                    Err(_) if -result == libc::EINTR || -result == libc::EAGAIN => {
                        state.waiting.push_front(request);
                    }
                    Err(_) => request.done.end(&request, Err(-result)),
                }
            }
            self.push_waiting(&mut state);
            // Operations hold the queue, so nothing is under way when it closes.
            if closes {
                return;
            }
        }
    }

    /// The kernel takes the ring away: whatever is under way fails.
    fn give_up(&self) {
        let mut state = self.lock();
        let waiting = std::mem::take(&mut state.waiting);
        let under_way: Vec<Request> = state.under_way.iter_mut().filter_map(Option::take).collect();
        for request in under_way.into_iter().chain(waiting) {
            request.done.end(&request, Err(libc::EIO));
        }
    }
}
