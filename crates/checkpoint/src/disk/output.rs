//! A file written as a stream: the caller appends, a thread writes.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};

use super::{BUFFER_BYTES, PAGE, refuses_direct, set_direct};
use crate::error::{CheckpointError, Result};
use crate::fs::FileSystem;
use crate::manifest::BLOCK_BYTES;

/// How many buffers a stream has: one is filled, one waits, one is on its way.
const BUFFERS: usize = 3;
/// Transfers are at least this large, where there is as much to move.
const TRANSFER_BYTES: usize = BLOCK_BYTES as usize;

/// Memory whose content starts at a multiple of [`PAGE`].
struct Buffer {
    memory: Vec<u8>,
    start: usize,
}

impl Buffer {
    fn new() -> Buffer {
        let mut memory: Vec<u8> = Vec::with_capacity(BUFFER_BYTES + PAGE);
        let start = memory.as_ptr().align_offset(PAGE).min(PAGE);
        memory.resize(start, 0);
        Buffer { memory, start }
    }

    fn content(&self) -> &[u8] {
        &self.memory[self.start..]
    }
}

/// A full buffer on its way to the disk.
struct Full {
    buffer: Buffer,
    /// How much of it is written: whole pages, unless it is the last.
    bytes: usize,
    is_last: bool,
}

/// Where the content of a file is appended.
pub(crate) struct Output {
    current: Buffer,
    made: usize,
    full: SyncSender<Full>,
    empty: Receiver<Buffer>,
}

impl Output {
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

    /// Gives the whole pages away; what is beyond them starts the next buffer.
    fn hand_over(&mut self) -> Result<()> {
        let bytes = self.current.content().len() / PAGE * PAGE;
        let mut next = match self.empty.try_recv() {
            Ok(buffer) => buffer,
            Err(_) if self.made < BUFFERS => {
                self.made += 1;
                Buffer::new()
            }
            Err(_) => self.empty.recv().map_err(|_| writer_ended())?,
        };
        next.memory.truncate(next.start);
        next.memory.extend_from_slice(&self.current.content()[bytes..]);
        let buffer = std::mem::replace(&mut self.current, next);
        self.full.send(Full { buffer, bytes, is_last: false }).map_err(|_| writer_ended())
    }

    fn finish(self) -> Result<()> {
        let bytes = self.current.content().len();
        self.full.send(Full { buffer: self.current, bytes, is_last: true }).map_err(|_| writer_ended())
    }
}

/// What a stream says whose thread has failed; the thread's own error is what the caller of [`write`] sees.
fn writer_ended() -> CheckpointError {
    CheckpointError::Request("the thread that writes the file has ended".into())
}

/// Writes what `fill` appends to a new, empty file, and brings it to the disk. If `fill` fails, the file is left cut short.
pub(crate) fn write<T>(
    fs: &dyn FileSystem,
    path: &Path,
    file: File,
    fill: impl FnOnce(&mut Output) -> Result<T>,
) -> Result<T> {
    let (full, to_write) = sync_channel(1);
    let (written, empty) = channel();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| write_all(fs, path, file, to_write, written));
        let mut output = Output { current: Buffer::new(), made: 1, full, empty };
        let filled = fill(&mut output).and_then(|value| output.finish().map(|()| value));
        match writer.join() {
            Ok(outcome) => outcome.and(filled),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

fn write_all(
    fs: &dyn FileSystem,
    path: &Path,
    mut file: File,
    full: Receiver<Full>,
    empty: Sender<Buffer>,
) -> Result<()> {
    let failed = |error| CheckpointError::io("write", path)(error);
    let mut direct = false;
    let mut offset = 0;
    for Full { buffer, bytes, is_last } in full {
        let content = &buffer.content()[..bytes];
        let (pages, rest) = content.split_at(bytes / PAGE * PAGE);
        if offset == 0 {
            // A small file never leaves the ordinary way.
            direct = !is_last && set_direct(&file, true);
        }
        match fs.write(&mut file, pages) {
            Err(error) if direct && refuses_direct(&error) => {
                direct = false;
                set_direct(&file, false);
                file.seek(SeekFrom::Start(offset)).map_err(failed)?;
                fs.write(&mut file, pages).map_err(failed)?;
            }
            outcome => outcome.map_err(failed)?,
        }
        offset += bytes as u64;
        if is_last {
            set_direct(&file, false);
            fs.write(&mut file, rest).map_err(failed)?;
            return fs.sync_file(&file).map_err(CheckpointError::io("sync", path));
        }
        // The caller may have all the buffers it needs.
        let _ = empty.send(buffer);
    }
    // Whoever fills has failed and says why.
    Ok(())
}
