//! Room on a disk for what does not fit memory.

use std::ffi::CString;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::buffer::ALIGNMENT;
use crate::error::{IoError, Result};
use crate::file::OpenFile;
use crate::sums::Sums;

/// A file without a name: all its room is taken when it is made, and given back when the last clone goes or the process
/// ends, however it ends. Clones are the same file.
#[derive(Clone, Debug)]
pub struct SwapFile {
    open: OpenFile,
}

impl std::ops::Deref for SwapFile {
    type Target = OpenFile;

    fn deref(&self) -> &OpenFile {
        &self.open
    }
}

impl SwapFile {
    /// Makes one in a folder, which is made too where it is missing.
    pub fn create(folder: &Path, bytes: u64) -> Result<SwapFile> {
        let bytes = bytes.next_multiple_of(ALIGNMENT as u64);
        let fail = |why| IoError::Swap { folder: folder.to_path_buf(), bytes, why };
        std::fs::create_dir_all(folder).map_err(fail)?;
        let free = free_bytes(folder).map_err(fail)?;
        if free < bytes {
            return Err(IoError::Room { folder: folder.to_path_buf(), needed: bytes, free });
        }
        // The system would end the process with a signal.
        let longest = longest_file();
        if longest < bytes {
            return Err(IoError::TooLong { folder: folder.to_path_buf(), needed: bytes, longest });
        }
        // Past the page cache where the file system can.
        let (file, direct) = match open_nameless(folder, libc::O_DIRECT) {
            Ok(file) => (file, true),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                (open_nameless(folder, 0).map_err(fail)?, false)
            }
            Err(error) => return Err(fail(error)),
        };
        // A full disk is an error now, and not in the middle of a step.
        // SAFETY: a call on an open file.
        match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, bytes.max(1) as libc::off_t) } {
            0 => {}
            code => return Err(fail(std::io::Error::from_raw_os_error(code))),
        }
        Ok(SwapFile { open: OpenFile::of(file, folder, bytes, direct, Some(Sums::default())) })
    }

    /// Whatever a stretch holds is right from here on, until it is written again: for who replaces it because it is lost.
    pub fn expect_anything(&self, offset: u64, length: usize) {
        if let Some(sums) = self.open.sums() {
            sums.forget(offset, length);
        }
    }
}

/// Opens a file that has no name in a folder.
fn open_nameless(folder: &Path, flags: libc::c_int) -> std::io::Result<File> {
    let path = CString::new(folder.as_os_str().as_bytes())?;
    let flags = libc::O_TMPFILE | libc::O_RDWR | libc::O_CLOEXEC | flags;
    // SAFETY: a call with a string that ends in zero.
    let descriptor = unsafe { libc::open(path.as_ptr(), flags, 0o600) };
    if descriptor < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: just opened, and nobody else's.
    Ok(unsafe { File::from_raw_fd(descriptor) })
}

/// The largest file that this process may make (`ulimit -f`).
fn longest_file() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: a call with room for the answer, which stays as it is where the call fails.
    unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) };
    limit.rlim_cur
}

/// How much room a folder's disk has for this user.
pub fn free_bytes(folder: &Path) -> std::io::Result<u64> {
    let path = CString::new(folder.as_os_str().as_bytes())?;
    let mut answer = std::mem::MaybeUninit::<libc::statvfs>::zeroed();
    // SAFETY: a string that ends in zero, and room for the answer.
    if unsafe { libc::statvfs(path.as_ptr(), answer.as_mut_ptr()) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the call filled it.
    let answer = unsafe { answer.assume_init() };
    Ok(answer.f_bavail * answer.f_frsize)
}
