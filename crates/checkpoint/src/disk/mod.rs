//! Large transfers past the system's cache, beside the caller's own work.
//!
//! State is written once and read once. Through the cache every byte is copied once more by the processor and takes the
//! place of something that training needs, so whole pages go straight between the disk and the buffers here
//! (`O_DIRECT`), and a thread moves them while the caller fills or checks others. A file system that cannot do this is
//! used in the ordinary way. Memory is bounded: three or four buffers of [`BUFFER_BYTES`] per stream.

mod input;
mod output;

pub(crate) use input::{Stretch, Window, open, read};
pub(crate) use output::write;

use std::fs::File;

use nix::fcntl::{FcntlArg, OFlag, fcntl};

use crate::manifest::BLOCK_BYTES;

/// What memory, offset and length of a transfer past the cache must be a multiple of, on every disk in use.
const PAGE: usize = 4096;
/// Room for two blocks, and what alignment costs.
const BUFFER_BYTES: usize = 2 * BLOCK_BYTES as usize + 2 * PAGE;

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
