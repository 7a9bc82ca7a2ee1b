//! Reads and writes under way.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::buffer::{ALIGNMENT, Buffer};
use crate::error::{IoError, Result};
use crate::swap::SwapFile;
use crate::threads::Threads;
use crate::uring::Ring;

/// How a queue works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueOptions {
    /// Bytes of one request to the disk; longer transfers are cut.
    pub block_bytes: usize,
    /// Requests at the disk at once.
    pub depth: usize,
    /// Threads, where threads do the work.
    pub threads: usize,
    /// Whether `io_uring` is used where the kernel permits it.
    pub uring: bool,
}

impl Default for QueueOptions {
    fn default() -> Self {
        QueueOptions { block_bytes: 1 << 20, depth: 32, threads: 4, uring: true }
    }
}

/// How many bytes went which way, and how long they were waited for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes read.
    pub read: u64,
    /// Bytes written.
    pub written: u64,
    /// How long callers waited.
    pub waited: Duration,
}

/// Which way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    Read,
    Write,
}

/// One request to the disk: a stretch of a buffer and a place in a file.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) way: Way,
    pub(crate) file: RawFd,
    pub(crate) offset: u64,
    pub(crate) address: usize,
    pub(crate) length: usize,
    /// Where its end is noted.
    pub(crate) done: Arc<Progress>,
}

impl Request {
    /// What is left after `done` bytes.
    pub(crate) fn rest(&self, done: usize) -> Request {
        Request {
            offset: self.offset + done as u64,
            address: self.address + done,
            length: self.length - done,
            ..self.clone()
        }
    }
}

/// How far a transfer is.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    state: Mutex<Open>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Open {
    requests: usize,
    failure: Option<(u64, usize, i32)>,
}

impl Progress {
    pub(crate) fn end(&self, request: &Request, outcome: std::result::Result<(), i32>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.requests -= 1;
        if let Err(code) = outcome {
            state.failure.get_or_insert((request.offset, request.length, code));
        }
        if state.requests == 0 {
            self.changed.notify_all();
        }
    }

    fn wait(&self) -> Option<(u64, usize, i32)> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let state = self.changed.wait_while(state, |state| state.requests > 0);
        state.unwrap_or_else(PoisonError::into_inner).failure
    }
}

enum Carrier {
    Ring(Ring),
    Threads(Threads),
}

struct Inner {
    carrier: Carrier,
    why_threads: Option<String>,
    options: QueueOptions,
    read: AtomicU64,
    written: AtomicU64,
    waited_ns: AtomicU64,
}

/// Moves buffers to and from files, beside its caller. Clones are the same queue.
#[derive(Clone)]
pub struct Queue {
    inner: Arc<Inner>,
}

impl Queue {
    /// Opens a queue.
    pub fn new(options: QueueOptions) -> Queue {
        let options = QueueOptions {
            block_bytes: options.block_bytes.max(1).next_multiple_of(ALIGNMENT),
            depth: options.depth.clamp(1, 4096),
            threads: options.threads.clamp(1, 64),
            ..options
        };
        let (carrier, why_threads) = match options.uring.then(|| Ring::open(options.depth)) {
            Some(Ok(ring)) => (Carrier::Ring(ring), None),
            Some(Err(error)) => {
                let why = format!(
                    "io_uring is not permitted here ({error}): the sysctl kernel.io_uring_disabled or a seccomp filter says so"
                );
                (Carrier::Threads(Threads::start(options.threads)), Some(why))
            }
            None => {
                let why = "io_uring was not asked for".to_owned();
                (Carrier::Threads(Threads::start(options.threads)), Some(why))
            }
        };
        let counter = || AtomicU64::new(0);
        let (read, written, waited_ns) = (counter(), counter(), counter());
        Queue { inner: Arc::new(Inner { carrier, why_threads, options, read, written, waited_ns }) }
    }

    /// Why threads do the work; `None` where `io_uring` does.
    pub fn why_threads(&self) -> Option<&str> {
        self.inner.why_threads.as_deref()
    }

    /// What has gone through it so far.
    pub fn traffic(&self) -> Traffic {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Traffic {
            read: of(&self.inner.read),
            written: of(&self.inner.written),
            waited: Duration::from_nanos(of(&self.inner.waited_ns)),
        }
    }

    /// Begins to fill a buffer's first `length` bytes from a place in a file.
    pub fn read(&self, file: &SwapFile, offset: u64, buffer: Buffer, length: usize) -> Result<Operation> {
        self.inner.read.fetch_add(length as u64, Ordering::Relaxed);
        self.start(Way::Read, file, offset, buffer, length)
    }

    /// Begins to write a buffer's first `length` bytes to a place in a file.
    pub fn write(&self, file: &SwapFile, offset: u64, buffer: Buffer, length: usize) -> Result<Operation> {
        self.inner.written.fetch_add(length as u64, Ordering::Relaxed);
        self.start(Way::Write, file, offset, buffer, length)
    }

    fn start(
        &self,
        way: Way,
        file: &SwapFile,
        offset: u64,
        buffer: Buffer,
        length: usize,
    ) -> Result<Operation> {
        let length = length.next_multiple_of(ALIGNMENT);
        let fits =
            length <= buffer.len() && offset.checked_add(length as u64).is_some_and(|end| end <= file.len());
        if !fits || !offset.is_multiple_of(ALIGNMENT as u64) {
            return Err(IoError::Request(format!(
                "{length} bytes at {offset} do not fit a buffer of {} and a file of {}, or do not begin at a multiple of {ALIGNMENT}",
                buffer.len(),
                file.len()
            )));
        }
        let progress = Arc::new(Progress::default());
        let block = self.inner.options.block_bytes;
        progress.state.lock().unwrap_or_else(PoisonError::into_inner).requests = length.div_ceil(block);
        for start in (0..length).step_by(block) {
            let request = Request {
                way,
                file: file.descriptor(),
                offset: offset + start as u64,
                address: buffer.address().as_ptr() as usize + start,
                length: block.min(length - start),
                done: Arc::clone(&progress),
            };
            match &self.inner.carrier {
                Carrier::Ring(ring) => ring.submit(request),
                Carrier::Threads(threads) => threads.submit(request),
            }
        }
        Ok(Operation { progress, buffer: Some(buffer), way, file: file.clone(), queue: self.clone() })
    }
}

/// A transfer under way. Dropping it waits for its end: the disk may be using its memory.
pub struct Operation {
    progress: Arc<Progress>,
    buffer: Option<Buffer>,
    way: Way,
    /// Kept open while the disk works on it.
    file: SwapFile,
    queue: Queue,
}

impl Operation {
    /// Waits until it is done, and gives the buffer back.
    pub fn wait(mut self) -> Result<Buffer> {
        let begin = Instant::now();
        let failure = self.progress.wait();
        let waited = u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.queue.inner.waited_ns.fetch_add(waited, Ordering::Relaxed);
        let buffer = self.buffer.take();
        match (failure, buffer) {
            (None, Some(buffer)) => Ok(buffer),
            (failure, _) => {
                let (offset, length, code) = failure.unwrap_or((0, 0, libc::EIO));
                Err(IoError::Transfer {
                    what: if self.way == Way::Read { "read" } else { "write" },
                    file: self.file.place().to_path_buf(),
                    offset,
                    length,
                    why: std::io::Error::from_raw_os_error(code),
                })
            }
        }
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        if self.buffer.is_some() {
            self.progress.wait();
        }
    }
}
