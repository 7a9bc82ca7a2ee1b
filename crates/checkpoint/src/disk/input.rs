//! Stretches of files, read ahead of the caller.
//!
//! [`AHEAD`] transfers are under way at a time, so that the disk has the next ones while an answer is being delivered.

use std::collections::VecDeque;
use std::fs::OpenOptions;
use std::path::Path;

use ferrospeed_io::{Buffer, IoError, OpenFile, Operation, Queue, refuses_direct};
use nix::fcntl::OFlag;

use super::{BUFFER_BYTES, PAGE, cause};
use crate::error::{CheckpointError, Result};
use crate::manifest::BLOCK_BYTES;

/// A stretch of a file that is wanted, and what its reader knows it by.
#[derive(Debug, Clone)]
pub(crate) struct Stretch<T> {
    /// Index of the file.
    pub(crate) file: usize,
    /// Where it starts in the file.
    pub(crate) start: u64,
    /// At most a block.
    pub(crate) bytes: u64,
    pub(crate) known_by: T,
}

/// Stretches that lie together in a file and are read at once.
pub(crate) struct Window<T> {
    pub(crate) stretches: Vec<Stretch<T>>,
}

/// Bytes between two stretches that are rather read than jumped over.
const GAP_BYTES: u64 = 64 << 10;
/// Windows that are under way at a time, beside the one that is taken apart.
const AHEAD: usize = 3;

impl<T> Window<T> {
    /// Puts stretches together that follow one another in a file, in the order in which they are wanted.
    pub(crate) fn gather(stretches: impl IntoIterator<Item = Stretch<T>>) -> Vec<Window<T>> {
        let mut windows: Vec<Window<T>> = Vec::new();
        for next in stretches {
            match windows.last_mut() {
                Some(window) if window.takes(&next) => window.stretches.push(next),
                _ => windows.push(Window { stretches: vec![next] }),
            }
        }
        windows
    }

    fn takes(&self, next: &Stretch<T>) -> bool {
        let (start, end) = (self.start(), self.end());
        next.file == self.stretches[0].file
            && (end..=end + GAP_BYTES).contains(&next.start)
            && next.start + next.bytes - start <= 2 * BLOCK_BYTES
    }

    fn start(&self) -> u64 {
        self.stretches.first().map_or(0, |first| first.start)
    }

    fn end(&self) -> u64 {
        self.stretches.last().map_or(0, |last| last.start + last.bytes)
    }
}

/// Opens a file to be read past the cache, or through it where the file system cannot do otherwise.
pub(crate) fn open(path: &Path, direct: bool) -> std::io::Result<OpenFile> {
    let mut options = OpenOptions::new();
    options.read(true);
    if direct {
        match ferrospeed_files::open_with(path, &options, OFlag::O_DIRECT.bits()) {
            Err(error) if refuses_direct(&error) => {}
            outcome => return OpenFile::to_read(outcome?, path),
        }
    }
    OpenFile::to_read(ferrospeed_files::open_with(path, &options, 0)?, path)
}

/// A window on its way.
struct Coming<'f> {
    file: &'f OpenFile,
    /// From which page on, and how many bytes.
    origin: u64,
    bytes: usize,
    /// Whether it goes past the cache.
    is_direct: bool,
    operation: Operation,
}

impl<'f> Coming<'f> {
    fn ask(
        queue: &Queue,
        file: &'f OpenFile,
        (origin, bytes): (u64, usize),
        buffer: Buffer,
    ) -> std::result::Result<Coming<'f>, IoError> {
        let is_direct = file.is_direct();
        let operation = queue.read(file, origin, buffer, bytes)?;
        Ok(Coming { file, origin, bytes, is_direct, operation })
    }

    fn wait(self, queue: &Queue) -> std::io::Result<Buffer> {
        let Coming { file, origin, bytes, is_direct, operation } = self;
        match operation.wait().map_err(cause) {
            // Others may be under way that are refused as well, and ask once more as this one does.
            Err(error) if refuses_direct(&error) && is_direct => {
                file.set_direct(false);
                let again = Coming::ask(queue, file, (origin, bytes), Buffer::new(BUFFER_BYTES));
                again.and_then(|coming| coming.operation.wait()).map_err(cause)
            }
            outcome => outcome,
        }
    }
}

/// Reads windows and gives `take` every stretch of them, in order.
pub(crate) fn read<'f, T>(
    queue: &Queue,
    windows: &[Window<T>],
    file: &dyn Fn(&Stretch<T>) -> Result<&'f OpenFile>,
    failed: &dyn Fn(&Stretch<T>, std::io::Error) -> CheckpointError,
    take: &mut dyn FnMut(&Stretch<T>, &mut [u8]) -> Result<()>,
) -> Result<()> {
    let mut coming: VecDeque<Coming<'f>> = VecDeque::new();
    let mut spare: Vec<Buffer> = Vec::new();
    let mut to_ask = windows.iter();
    for window in windows {
        while coming.len() <= AHEAD
            && let Some(next) = to_ask.next()
        {
            let first = &next.stretches[0];
            let origin = next.start() / PAGE as u64 * PAGE as u64;
            let buffer = spare.pop().unwrap_or_else(|| Buffer::new(BUFFER_BYTES));
            let wanted = (origin, (next.end() - origin) as usize);
            let asked = Coming::ask(queue, file(first)?, wanted, buffer);
            coming.push_back(asked.map_err(|error| failed(first, cause(error)))?);
        }
        let Some(next) = coming.pop_front() else { break };
        let origin = next.origin;
        let mut buffer = next.wait(queue).map_err(|error| failed(&window.stretches[0], error))?;
        for stretch in &window.stretches {
            let from = (stretch.start - origin) as usize;
            take(stretch, &mut buffer.bytes_mut()[from..from + stretch.bytes as usize])?;
        }
        spare.push(buffer);
    }
    Ok(())
}
