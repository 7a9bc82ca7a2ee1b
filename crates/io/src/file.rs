//! A file that a queue reads and writes.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::buffer::ALIGNMENT;
use crate::sums::Sums;

/// An open file. Clones are the same one.
#[derive(Clone, Debug)]
pub struct OpenFile {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    file: File,
    place: PathBuf,
    bytes: u64,
    direct: AtomicBool,
    /// What it should hold, where that is known.
    sums: Option<Sums>,
}

impl OpenFile {
    /// A file that is read, as it was opened: past the page cache or through it. Its last page need not be full.
    pub fn to_read(file: File, path: &Path) -> std::io::Result<OpenFile> {
        let bytes = file.metadata()?.len();
        let direct = flags(&file)? & libc::O_DIRECT != 0;
        Ok(OpenFile::of(file, path, bytes, direct, None))
    }

    /// A file that grows as it is written, through the page cache until [`OpenFile::set_direct`] says otherwise.
    pub fn to_write(file: File, path: &Path) -> OpenFile {
        OpenFile::of(file, path, u64::MAX, false, None)
    }

    pub(crate) fn of(file: File, place: &Path, bytes: u64, direct: bool, sums: Option<Sums>) -> OpenFile {
        let (place, direct) = (place.to_path_buf(), AtomicBool::new(direct));
        OpenFile { inner: Arc::new(Inner { file, place, bytes, direct, sums }) }
    }

    /// How large it is.
    pub fn len(&self) -> u64 {
        self.inner.bytes
    }

    /// Whether it has no room.
    pub fn is_empty(&self) -> bool {
        self.inner.bytes == 0
    }

    /// Where it is: its path, or the folder of one without a name.
    pub fn place(&self) -> &Path {
        &self.inner.place
    }

    /// Whether transfers go past the page cache.
    pub fn is_direct(&self) -> bool {
        self.inner.direct.load(Ordering::Relaxed)
    }

    /// Lets transfers go past the page cache, or no more; returns whether the file system does as it is told. Some refuse
    /// only when they are written to: see [`refuses_direct`].
    pub fn set_direct(&self, direct: bool) -> bool {
        let Ok(flags) = flags(&self.inner.file) else { return false };
        let flags = if direct { flags | libc::O_DIRECT } else { flags & !libc::O_DIRECT };
        // SAFETY: a call on an open file.
        let done = unsafe { libc::fcntl(self.inner.file.as_raw_fd(), libc::F_SETFL, flags) } == 0;
        if done {
            self.inner.direct.store(direct, Ordering::Relaxed);
        }
        done
    }

    /// The file itself, for what is no transfer.
    pub fn file(&self) -> &File {
        &self.inner.file
    }

    /// Up to where transfers may go: whole pages.
    pub(crate) fn room(&self) -> u64 {
        self.inner.bytes.checked_next_multiple_of(ALIGNMENT as u64).unwrap_or(u64::MAX)
    }

    pub(crate) fn sums(&self) -> Option<&Sums> {
        self.inner.sums.as_ref()
    }
}

fn flags(file: &File) -> std::io::Result<libc::c_int> {
    // SAFETY: a call on an open file.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) } {
        -1 => Err(std::io::Error::last_os_error()),
        flags => Ok(flags),
    }
}

/// Whether an error says that a transfer cannot go past the page cache.
pub fn refuses_direct(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::InvalidInput
}
