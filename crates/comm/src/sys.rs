//! System facilities: anonymous shared memory, futexes, and the signal that asks for a dump.
//!
//! Shared memory is a `memfd`: it has no name in any file system, so nothing is left behind when its processes are
//! killed. A peer opens it through `/proc/PID/fd/FD`, which the kernel allows to the same user only. The file is
//! sealed against shrinking, so a mapping can never fault.

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::error::{Error, Result};

const PAGE: usize = 4096;
pub(crate) const HUGE_PAGE: usize = 2 << 20;
/// Makes pages huge at once, whatever the settings for doing so by and by (Linux 6.1).
const MADV_COLLAPSE: libc::c_int = 25;

/// A mapped piece of shared memory, unmapped on drop.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    base: *mut u8,
    bytes: usize,
}

// SAFETY: the mapping is plain memory, valid in every thread until drop; who may touch which part of it, and when, is
// the contract of the modules that hand out its addresses.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Creates `bytes` of zeroed memory, and the descriptor through which peers map it.
    pub(crate) fn create(bytes: usize) -> Result<(Self, OwnedFd)> {
        let what = || format!("allocating {bytes} bytes of shared memory");
        // SAFETY: the name is a valid C string; the returned descriptor is checked and then owned here alone.
        let descriptor = unsafe {
            let raw = libc::memfd_create(c"ferrospeed".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
            if raw < 0 {
                return Err(Error::io(what(), std::io::Error::last_os_error()));
            }
            OwnedFd::from_raw_fd(raw)
        };
        let file = File::from(descriptor);
        file.set_len(bytes as u64).map_err(|error| match error.raw_os_error() {
            Some(libc::EFBIG) => {
                Error::io(what() + " (`ulimit -f` bounds it as it does files: raise that limit)", error)
            }
            _ => Error::io(what(), error),
        })?;
        // SAFETY: a plain system call on a descriptor that we own.
        let sealed = unsafe {
            libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SHRINK | libc::F_SEAL_GROW)
        };
        if sealed != 0 {
            return Err(Error::io("sealing shared memory", std::io::Error::last_os_error()));
        }
        let memory = Self::map(&file, bytes)?;
        Ok((memory, OwnedFd::from(file)))
    }

    /// Maps memory that the process `pid` holds open as `descriptor`.
    pub(crate) fn open(pid: u32, descriptor: i32, bytes: usize) -> Result<Self> {
        let path = format!("/proc/{pid}/fd/{descriptor}");
        let what = || format!("mapping the shared memory of process {pid} ({path})");
        let file =
            File::options().read(true).write(true).open(&path).map_err(|error| Error::io(what(), error))?;
        let actual = file.metadata().map_err(|error| Error::io(what(), error))?.len();
        if actual != bytes as u64 {
            let problem = format!("it holds {actual} bytes, not the {bytes} announced");
            return Err(Error::io(what(), std::io::Error::other(problem)));
        }
        Self::map(&file, bytes)
    }

    fn map(file: &File, bytes: usize) -> Result<Self> {
        let failed = || {
            let error = std::io::Error::last_os_error();
            Error::io(format!("mapping {bytes} bytes of shared memory"), error)
        };
        // Huge pages need an address that is aligned like them, which only a reservation of more room has for sure.
        let spare = if bytes >= HUGE_PAGE { HUGE_PAGE } else { 0 };
        let mapped = bytes.max(1).next_multiple_of(PAGE);
        let anywhere = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: fresh addresses, which belong to nobody else from here on; the result is checked.
        let room =
            unsafe { libc::mmap(std::ptr::null_mut(), mapped + spare, libc::PROT_NONE, anywhere, -1, 0) };
        if room == libc::MAP_FAILED {
            return Err(failed());
        }
        let ahead = if spare == 0 { 0 } else { room.cast::<u8>().align_offset(HUGE_PAGE).min(spare) };
        let place = room.wrapping_byte_add(ahead);
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
        // SAFETY: a shared mapping of a file that cannot shrink, inside the room that is ours; the result is checked.
        let base = unsafe { libc::mmap(place, mapped, access, flags, file.as_raw_fd(), 0) };
        let outcome = if base == libc::MAP_FAILED { Err(failed()) } else { Ok(()) };
        // SAFETY: what is left of the room before and after the mapping, or all of it where there is none; advice about
        // our own mapping, which a kernel without huge pages for shared memory refuses harmlessly.
        unsafe {
            if ahead > 0 {
                libc::munmap(room, ahead);
            }
            if spare > ahead {
                libc::munmap(place.wrapping_byte_add(mapped), spare - ahead);
            }
            match outcome {
                Ok(()) => libc::madvise(place, mapped, libc::MADV_HUGEPAGE),
                Err(_) => libc::munmap(place, mapped),
            };
        }
        outcome.map(|()| SharedMemory { base: base.cast(), bytes })
    }

    /// Gives all of it physical pages now, huge ones where the system lets shared memory have them; says whether it did.
    ///
    /// Peers that map the memory afterwards find them. A system without them hands out small ones as they are touched.
    pub(crate) fn prepare_pages(&self) -> bool {
        for start in (0..self.bytes / HUGE_PAGE).map(|page| page * HUGE_PAGE) {
            // SAFETY: inside our mapping, which nobody else has yet; a write of what is there already. A stretch of
            // which no page exists cannot be made huge.
            unsafe { self.base.add(start).write_volatile(0) };
        }
        // SAFETY: advice about our own mapping, whose contents it keeps.
        unsafe { libc::madvise(self.base.cast(), self.bytes / HUGE_PAGE * HUGE_PAGE, MADV_COLLAPSE) == 0 }
    }

    pub(crate) fn base(&self) -> *mut u8 {
        self.base
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Gives the physical pages back while the mapping stays; later reads see zeros.
    pub(crate) fn discard_pages(&self) {
        // SAFETY: our own mapping, whose contents the caller has declared dead.
        unsafe { libc::madvise(self.base.cast(), self.bytes, libc::MADV_REMOVE) };
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: mapped in `map` with this length, unmapped once.
        unsafe { libc::munmap(self.base.cast(), self.bytes.max(1)) };
    }
}

/// Takes whole huge pages of shared memory out of this process's resident memory. They keep their contents, which whoever
/// touches them finds again.
///
/// # Safety
/// The range lies in a mapping of [`SharedMemory`].
pub(crate) unsafe fn forget_view(start: *mut u8, bytes: usize) {
    let ahead = start.align_offset(HUGE_PAGE);
    let whole = bytes.saturating_sub(ahead) / HUGE_PAGE * HUGE_PAGE;
    if whole > 0 {
        // SAFETY: the caller's contract; pages of a shared mapping belong to the file, which loses nothing.
        unsafe { libc::madvise(start.wrapping_add(ahead).cast(), whole, libc::MADV_DONTNEED) };
    }
}

/// Sleeps until `word` no longer holds `expected`, a wake, or `timeout`, whichever is first; may also wake early.
pub(crate) fn futex_wait(word: &AtomicU32, expected: u32, timeout: Duration) {
    let timeout =
        libc::timespec { tv_sec: timeout.as_secs() as libc::time_t, tv_nsec: timeout.subsec_nanos().into() };
    // SAFETY: the word outlives the call; every outcome (woken, changed, timed out, interrupted) is a return.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, expected, &timeout, 0, 0);
    }
}

/// Wakes every process and thread that waits on `word`.
pub(crate) fn futex_wake_all(word: &AtomicU32) {
    // SAFETY: the kernel only uses the address as a key.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX, 0, 0, 0);
    }
}

/// How often SIGUSR1 has arrived.
static DUMP_REQUESTS: AtomicU32 = AtomicU32::new(0);

extern "C" fn note_dump_request(_signal: libc::c_int) {
    DUMP_REQUESTS.fetch_add(1, Ordering::Relaxed);
}

/// Counts SIGUSR1 from now on, unless the program already handles it itself.
pub(crate) fn watch_dump_signal() {
    // SAFETY: reads and sets the disposition of one signal; the handler does nothing but an atomic addition.
    unsafe {
        let mut current: libc::sigaction = std::mem::zeroed();
        let known = libc::sigaction(libc::SIGUSR1, std::ptr::null(), &mut current) == 0;
        if known && current.sa_sigaction == libc::SIG_DFL {
            let mut ours: libc::sigaction = std::mem::zeroed();
            ours.sa_sigaction = note_dump_request as extern "C" fn(libc::c_int) as usize;
            ours.sa_flags = libc::SA_RESTART;
            libc::sigaction(libc::SIGUSR1, &ours, std::ptr::null_mut());
        }
    }
}

/// How often SIGUSR1 has arrived since [`watch_dump_signal`].
pub(crate) fn dump_requests() -> u32 {
    DUMP_REQUESTS.load(Ordering::Relaxed)
}
