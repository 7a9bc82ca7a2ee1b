//! Reads and writes under way.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

use crate::buffer::{ALIGNMENT, Buffer};
use crate::error::{IoError, Result};
use crate::file::OpenFile;
use crate::layer::{Layer, System};
use crate::spans::{IoSpan, Spans};
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
    /// Whether requests enter the kernel one by one, and not as many at once as there are.
    pub single_submit: bool,
    /// How long a transfer may take. A disk that needs longer is taken for dead.
    pub deadline: Duration,
}

impl Default for QueueOptions {
    fn default() -> Self {
        QueueOptions {
            block_bytes: 1 << 20,
            depth: 32,
            threads: 4,
            uring: true,
            single_submit: false,
            deadline: Duration::from_secs(300),
        }
    }
}

/// The kernel moves less than this in one request.
const LARGEST_BLOCK: usize = 1 << 30;

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
    /// Kept open until the request ends.
    pub(crate) file: OpenFile,
    pub(crate) offset: u64,
    pub(crate) address: usize,
    pub(crate) length: usize,
    /// How many bytes before these have been moved.
    pub(crate) moved: usize,
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
            moved: self.moved + done,
            ..self.clone()
        }
    }

    /// Says that it has ended, and compares what was read with what was written there. No lock is held meanwhile.
    pub(crate) fn end(&self, outcome: std::result::Result<(), i32>) {
        let (offset, length) = (self.offset - self.moved as u64, self.moved + self.length);
        // SAFETY: the operation that made the request owns the memory until the request has ended, and the disk is done.
        let bytes = unsafe { std::slice::from_raw_parts((self.address - self.moved) as *const u8, length) };
        let outcome = match (self.file.sums(), self.way, outcome) {
            (Some(sums), Way::Write, Ok(())) => {
                sums.note(offset, bytes);
                Ok(())
            }
            (Some(sums), Way::Write, failed) => {
                sums.forget(offset, length);
                failed
            }
            (Some(sums), Way::Read, Ok(())) if !sums.agree(offset, bytes) => Err(DAMAGED),
            (_, _, outcome) => outcome,
        };
        self.done.end(offset, length, outcome);
    }

    /// Whether it is through when so many bytes were moved: of a file's last page, no more than there are.
    pub(crate) fn is_through(&self, moved: usize) -> bool {
        let at_end = moved > 0 && self.offset + moved as u64 >= self.file.len();
        moved == self.length || self.way == Way::Read && at_end
    }
}

/// The code of a read that gives other bytes than were written. File systems that notice it themselves say the same.
const DAMAGED: i32 = libc::EBADMSG;

/// How far a transfer is.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    state: Mutex<Open>,
    changed: Condvar,
    traced: Option<Traced>,
}

/// Where the end of a transfer is noted too, and what it is.
#[derive(Debug)]
struct Traced {
    spans: Arc<Spans>,
    way: Way,
    bytes: u64,
    begin: Instant,
}

#[derive(Debug, Default)]
struct Open {
    requests: usize,
    failure: Option<(u64, usize, i32)>,
}

impl Progress {
    fn end(&self, offset: u64, length: usize, outcome: std::result::Result<(), i32>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.requests -= 1;
        if let Err(code) = outcome {
            state.failure.get_or_insert((offset, length, code));
        }
        if state.requests == 0 {
            if let Some(Traced { spans, way, bytes, begin }) = &self.traced {
                spans.add(*way == Way::Read, *bytes, *begin);
            }
            self.changed.notify_all();
        }
    }

    fn wait(&self, deadline: Duration) -> End {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let state = self.changed.wait_timeout_while(state, deadline, |state| state.requests > 0);
        let (state, _) = state.unwrap_or_else(PoisonError::into_inner);
        match state.failure {
            _ if state.requests > 0 => End::Stuck,
            Some((offset, length, code)) => End::Failed { offset, length, code },
            None => End::Done,
        }
    }
}

/// How a transfer ended.
enum End {
    Done,
    Failed {
        offset: u64,
        length: usize,
        code: i32,
    },
    /// It has not: the disk still has its memory.
    Stuck,
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
    spans: Arc<Spans>,
}

/// Moves buffers to and from files, beside its caller. Clones are the same queue.
#[derive(Clone)]
pub struct Queue {
    inner: Arc<Inner>,
}

/// That threads do the work is said once, whatever number of queues there is.
static SAID: Once = Once::new();

impl Queue {
    /// The options that a queue takes in the place of these: whole pages, and bounds on what is open at once.
    pub fn possible(options: QueueOptions) -> QueueOptions {
        QueueOptions {
            block_bytes: options.block_bytes.clamp(1, LARGEST_BLOCK).next_multiple_of(ALIGNMENT),
            depth: options.depth.clamp(1, 4096),
            threads: options.threads.clamp(1, 64),
            ..options
        }
    }

    /// Opens a queue with the nearest options that are possible.
    pub fn new(options: QueueOptions) -> Queue {
        let options = Queue::possible(options);
        let ring = options.uring.then(|| Ring::open(options.depth, options.single_submit));
        let threads = || Carrier::Threads(Threads::start(options.threads, Arc::new(System)));
        let (carrier, why_threads) = match ring {
            Some(Ok(ring)) => (Carrier::Ring(ring), None),
            Some(Err(error)) => {
                let why = format!(
                    "io_uring is not permitted here ({error}): the sysctl kernel.io_uring_disabled or a seccomp filter says so"
                );
                SAID.call_once(|| tracing::warn!("fast files are read and written by threads: {why}"));
                (threads(), Some(why))
            }
            None => (threads(), Some("io_uring was not asked for".to_owned())),
        };
        Queue::of(carrier, why_threads, options)
    }

    /// A queue over another way to files than the system's: for tests of what happens when a disk fails.
    pub fn over(layer: Arc<dyn Layer>, options: QueueOptions) -> Queue {
        let carrier = Carrier::Threads(Threads::start(options.threads.clamp(1, 64), layer));
        Queue::of(carrier, Some("another layer was asked for".to_owned()), options)
    }

    fn of(carrier: Carrier, why_threads: Option<String>, options: QueueOptions) -> Queue {
        let counter = || AtomicU64::new(0);
        let (read, written, waited_ns) = (counter(), counter(), counter());
        let spans = Arc::default();
        Queue { inner: Arc::new(Inner { carrier, why_threads, options, read, written, waited_ns, spans }) }
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

    /// Notes when each transfer that begins from now on runs: so many at most.
    pub fn keep_spans(&self, most: usize) {
        self.inner.spans.keep(most);
    }

    /// What was noted; nothing more is.
    pub fn take_spans(&self) -> Vec<IoSpan> {
        self.inner.spans.take()
    }

    /// Begins to fill a buffer's first `length` bytes from a place in a file.
    pub fn read(&self, file: &OpenFile, offset: u64, buffer: Buffer, length: usize) -> Result<Operation> {
        self.inner.read.fetch_add(length as u64, Ordering::Relaxed);
        self.start(Way::Read, file, offset, buffer, length)
    }

    /// Begins to write a buffer's first `length` bytes to a place in a file.
    pub fn write(&self, file: &OpenFile, offset: u64, buffer: Buffer, length: usize) -> Result<Operation> {
        self.inner.written.fetch_add(length as u64, Ordering::Relaxed);
        self.start(Way::Write, file, offset, buffer, length)
    }

    fn start(
        &self,
        way: Way,
        file: &OpenFile,
        offset: u64,
        buffer: Buffer,
        length: usize,
    ) -> Result<Operation> {
        let length = length.next_multiple_of(ALIGNMENT);
        let fits =
            length <= buffer.len() && offset.checked_add(length as u64).is_some_and(|end| end <= file.room());
        if !fits || !offset.is_multiple_of(ALIGNMENT as u64) {
            return Err(IoError::Request(format!(
                "{length} bytes at {offset} do not fit a buffer of {} and a file of {}, or do not begin at a multiple of {ALIGNMENT}",
                buffer.len(),
                file.len()
            )));
        }
        let spans = &self.inner.spans;
        let traced = spans.is_on().then(|| Traced {
            spans: Arc::clone(spans),
            way,
            bytes: length as u64,
            begin: Instant::now(),
        });
        let progress = Arc::new(Progress { traced, ..Progress::default() });
        let block = self.inner.options.block_bytes;
        progress.state.lock().unwrap_or_else(PoisonError::into_inner).requests = length.div_ceil(block);
        let requests = (0..length).step_by(block).map(|start| Request {
            way,
            file: file.clone(),
            offset: offset + start as u64,
            address: buffer.address().as_ptr() as usize + start,
            length: block.min(length - start),
            moved: 0,
            done: Arc::clone(&progress),
        });
        match &self.inner.carrier {
            Carrier::Ring(ring) => ring.submit(requests),
            Carrier::Threads(threads) => requests.for_each(|request| threads.submit(request)),
        }
        Ok(Operation {
            progress,
            buffer: Some(buffer),
            way,
            offset,
            length,
            file: file.clone(),
            queue: self.clone(),
        })
    }
}

/// A transfer under way. Dropping it waits for its end: the disk may be using its memory.
pub struct Operation {
    progress: Arc<Progress>,
    buffer: Option<Buffer>,
    way: Way,
    offset: u64,
    length: usize,
    file: OpenFile,
    queue: Queue,
}

impl Operation {
    /// Waits until it is done, and gives the buffer back.
    pub fn wait(mut self) -> Result<Buffer> {
        let begin = Instant::now();
        let end = self.progress.wait(self.queue.inner.options.deadline);
        let waited = u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.queue.inner.waited_ns.fetch_add(waited, Ordering::Relaxed);
        let buffer = self.buffer.take();
        let (offset, length, why) = match (end, buffer) {
            (End::Done, Some(buffer)) => return Ok(buffer),
            (End::Stuck, buffer) => {
                // The disk may write to it at any time, so nobody else may ever have it.
                std::mem::forget(buffer);
                let why = std::io::Error::from_raw_os_error(libc::ETIMEDOUT);
                (self.offset, self.length, why)
            }
            (End::Failed { offset, length, code: DAMAGED }, _) => {
                return Err(IoError::Damaged { folder: self.file.place().to_path_buf(), offset, length });
            }
            (End::Failed { offset, length, code }, _) => {
                (offset, length, std::io::Error::from_raw_os_error(code))
            }
            (End::Done, None) => (self.offset, self.length, std::io::Error::from_raw_os_error(libc::EIO)),
        };
        let what = if self.way == Way::Read { "read" } else { "write" };
        Err(IoError::Transfer { what, file: self.file.place().to_path_buf(), offset, length, why })
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take()
            && matches!(self.progress.wait(self.queue.inner.options.deadline), End::Stuck)
        {
            std::mem::forget(buffer);
        }
    }
}
