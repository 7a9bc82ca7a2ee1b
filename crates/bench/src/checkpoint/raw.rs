//! What the disk itself gives: large writes and an `fsync`, large reads, and nothing else.
//!
//! Both ways are tried, through the system's cache and past it; which is faster depends on the disk and on what else the
//! processors do.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::fcntl::{OFlag, PosixFadviseAdvice, posix_fadvise};

const BLOCK_BYTES: usize = 4 << 20;
/// What transfers past the cache are aligned to.
const PAGE: usize = 4096;

/// How the disk is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Cached,
    Direct,
}

fn open(path: &Path, way: Way, options: &mut OpenOptions) -> std::io::Result<File> {
    if way == Way::Direct {
        options.custom_flags(OFlag::O_DIRECT.bits());
    }
    options.open(path)
}

/// A block, and where in it the content starts.
fn block() -> (Vec<u8>, usize) {
    let block: Vec<u8> =
        (0..(BLOCK_BYTES + PAGE) as u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let start = block.as_ptr().align_offset(PAGE).min(PAGE);
    (block, start)
}

/// Writes a file of whole blocks and brings it to the disk.
pub(super) fn write(path: &Path, bytes: usize, way: Way) -> std::io::Result<()> {
    let (block, start) = block();
    let mut file = open(path, way, OpenOptions::new().write(true).create(true).truncate(true))?;
    for _ in 0..bytes.div_ceil(BLOCK_BYTES) {
        file.write_all(&block[start..start + BLOCK_BYTES])?;
    }
    file.sync_all()
}

/// Reads a file of whole blocks.
pub(super) fn read(path: &Path, way: Way) -> std::io::Result<()> {
    let (mut block, start) = block();
    let mut file = open(path, way, OpenOptions::new().read(true))?;
    while file.read(&mut block[start..start + BLOCK_BYTES])? > 0 {}
    Ok(())
}

/// Asks the system to drop what it keeps in memory of the files below a folder; they have been synced.
pub(super) fn forget(dir: &Path) -> std::io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            forget(&path)?;
        } else {
            posix_fadvise(&File::open(&path)?, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?;
        }
    }
    Ok(())
}
