//! A file written as a stream: the caller appends, and full buffers are on their way to the disk meanwhile.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::path::Path;

use ferrospeed_io::{Buffer, OpenFile, Operation, Queue, refuses_direct};

use super::{BUFFER_BYTES, PAGE, cause};
use crate::error::{CheckpointError, Result};
use crate::fs::FileSystem;
use crate::manifest::BLOCK_BYTES;

/// How many buffers a stream has: one is filled, the others are on their way.
const BUFFERS: usize = 3;
/// Transfers are at least this large, where there is as much to move.
const TRANSFER_BYTES: usize = BLOCK_BYTES as usize;

/// Memory whose content starts at a multiple of [`PAGE`].
struct Filled {
    memory: Vec<u8>,
    start: usize,
}

impl Filled {
    fn new() -> Filled {
        let mut memory: Vec<u8> = Vec::with_capacity(BUFFER_BYTES + PAGE);
        let start = memory.as_ptr().align_offset(PAGE).min(PAGE);
        memory.resize(start, 0);
        Filled { memory, start }
    }

    fn content(&self) -> &[u8] {
        &self.memory[self.start..]
    }
}

/// What is on its way, and where the content of its memory starts.
struct OnItsWay {
    operation: Operation,
    start: usize,
}

/// Where the content of a file is appended.
pub(crate) struct Output<'a> {
    fs: &'a dyn FileSystem,
    path: &'a Path,
    file: File,
    /// The same file for the queue, which a small one needs not.
    open: Option<(Queue, OpenFile)>,
    current: Filled,
    on_their_way: VecDeque<OnItsWay>,
    /// Bytes that were handed over.
    offset: u64,
}

impl Output<'_> {
    /// Lets `append` add at most a block, lets `look` look at it, and hands over what has come together.
    pub(crate) fn append<T>(
        &mut self,
        append: impl FnOnce(&mut Vec<u8>) -> Result<()>,
        look: impl FnOnce(&[u8]) -> Result<T>,
    ) -> Result<T> {
        let before = self.current.memory.len();
        append(&mut self.current.memory)?;
        let seen = look(&self.current.memory[before..])?;
        if self.current.content().len() >= TRANSFER_BYTES {
            self.hand_over()?;
        }
        Ok(seen)
    }

    fn failed(&self, source: std::io::Error) -> CheckpointError {
        CheckpointError::io("write", self.path)(source)
    }

    /// Gives the whole pages away; what is beyond them starts the next buffer.
    fn hand_over(&mut self) -> Result<()> {
        let bytes = self.current.content().len() / PAGE * PAGE;
        let mut next = if self.on_their_way.len() + 1 < BUFFERS { Filled::new() } else { self.take_back()? };
        next.memory.truncate(next.start);
        next.memory.extend_from_slice(&self.current.content()[bytes..]);
        if self.open.is_none() {
            self.open = Some((self.fs.queue(), self.open_for_queue()?));
        }
        let Some((queue, open)) = &self.open else { return Ok(()) };
        let Filled { memory, start } = std::mem::replace(&mut self.current, next);
        let buffer = Buffer::given(memory, start);
        let operation = buffer.and_then(|buffer| queue.write(open, self.offset, buffer, bytes));
        let operation = operation.map_err(|error| self.failed(cause(error)))?;
        self.on_their_way.push_back(OnItsWay { operation, start });
        self.offset += bytes as u64;
        Ok(())
    }

    /// Finds out whether the file system writes past the cache, with the first page: some say so only then.
    fn open_for_queue(&mut self) -> Result<OpenFile> {
        let open = OpenFile::to_write(self.file.try_clone().map_err(|error| self.failed(error))?, self.path);
        if open.set_direct(true) {
            match self.fs.write(&mut self.file, &self.current.content()[..PAGE]) {
                Err(error) if refuses_direct(&error) => drop(open.set_direct(false)),
                outcome => outcome.map_err(|error| self.failed(error))?,
            }
        }
        Ok(open)
    }

    /// Waits for the earliest buffer that is on its way.
    fn take_back(&mut self) -> Result<Filled> {
        let Some(OnItsWay { operation, start }) = self.on_their_way.pop_front() else {
            return Ok(Filled::new());
        };
        let buffer = operation.wait().map_err(|error| self.failed(cause(error)))?;
        Ok(buffer.into_given().map_or_else(Filled::new, |memory| Filled { memory, start }))
    }

    /// Writes what is left, and brings the file to the disk.
    fn finish(mut self) -> Result<()> {
        while !self.on_their_way.is_empty() {
            self.take_back()?;
        }
        if let Some((_, open)) = &self.open {
            open.set_direct(false);
        }
        self.file.seek(SeekFrom::Start(self.offset)).map_err(|error| self.failed(error))?;
        self.fs.write(&mut self.file, self.current.content()).map_err(|error| self.failed(error))?;
        self.fs.sync_file(&self.file).map_err(CheckpointError::io("sync", self.path))
    }
}

/// Writes what `fill` appends to a new, empty file, and brings it to the disk. If `fill` fails, the file is left cut short.
pub(crate) fn write<T>(
    fs: &dyn FileSystem,
    path: &Path,
    file: File,
    fill: impl FnOnce(&mut Output<'_>) -> Result<T>,
) -> Result<T> {
    let (current, on_their_way) = (Filled::new(), VecDeque::new());
    let mut output = Output { fs, path, file, open: None, current, on_their_way, offset: 0 };
    let value = fill(&mut output)?;
    output.finish().map(|()| value)
}
