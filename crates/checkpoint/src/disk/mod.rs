//! Large transfers past the system's cache, beside the caller's own work.
//!
//! State is written once and read once. Through the cache every byte is copied once more by the processor and takes the
//! place of something that training needs, so whole pages go straight between the disk and the buffers here
//! (`O_DIRECT`), and a thread moves them while the caller fills or checks others. A file system that cannot do this is
//! used in the ordinary way. Memory is bounded: [`BUFFERS`] buffers of [`BUFFER_BYTES`] per stream.

mod input;
mod output;

pub(crate) use input::{Stretch, Window, open, read};
pub(crate) use output::write;

use std::fs::File;
use std::ops::Range;

use nix::fcntl::{FcntlArg, OFlag, fcntl};

use crate::manifest::BLOCK_BYTES;

/// What memory, offset and length of a transfer past the cache must be a multiple of, on every disk in use.
const PAGE: usize = 4096;
/// How many buffers a stream has: one is filled or checked, one waits, one is on its way.
const BUFFERS: usize = 3;
/// Room for two blocks, and what alignment costs.
const BUFFER_BYTES: usize = 2 * BLOCK_BYTES as usize + 2 * PAGE;
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

    /// Part of the content, which is made that long if it is shorter.
    fn part_mut(&mut self, part: Range<usize>) -> &mut [u8] {
        if self.memory.len() < self.start + part.end {
            self.memory.resize(self.start + part.end, 0);
        }
        &mut self.memory[self.start + part.start..self.start + part.end]
    }
}

/// Says whether a file is written and read past the cache; returns whether the file system does as it is told.
fn set_direct(file: &File, direct: bool) -> bool {
    let Ok(bits) = fcntl(file, FcntlArg::F_GETFL) else { return false };
    let mut flags = OFlag::from_bits_truncate(bits);
    flags.set(OFlag::O_DIRECT, direct);
    fcntl(file, FcntlArg::F_SETFL(flags)).is_ok()
}

/// Whether an error says that this transfer cannot go past the cache.
fn refuses_direct(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::InvalidInput
}
