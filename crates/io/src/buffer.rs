//! Memory that a disk can read and write without a copy by the kernel.

use std::alloc::{Layout, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::Once;

/// Where buffers begin, and what lengths and places in files are multiples of, for transfers past the page cache.
pub const ALIGNMENT: usize = 4096;

/// Zeroed memory at a multiple of [`ALIGNMENT`], whose length is one too. It comes from the system and goes back to it, so
/// that tiles which many threads have had in turn leave no holes in their heaps.
pub struct Buffer {
    address: NonNull<u8>,
    bytes: usize,
    is_locked: bool,
}

/// That memory cannot be locked is said once, whatever number of buffers there is.
static SAID: Once = Once::new();

// SAFETY: it owns its memory alone.
unsafe impl Send for Buffer {}
// SAFETY: shared access only reads.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// At least this many bytes.
    pub fn new(bytes: usize) -> Buffer {
        let bytes = bytes.max(1).next_multiple_of(ALIGNMENT);
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: new memory at a place that the system chooses.
        let address = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, kind, -1, 0) };
        match NonNull::new(address.cast()).filter(|_| address != libc::MAP_FAILED) {
            Some(address) => Buffer { address, bytes, is_locked: false },
            None => handle_alloc_error(Buffer::layout(bytes)),
        }
    }

    /// The same, and the system keeps it in memory for good (page-locked). Where it refuses, that is said once, and the
    /// buffer is an ordinary one.
    pub fn locked(bytes: usize) -> Buffer {
        let mut buffer = Buffer::new(bytes);
        // SAFETY: a call on memory that it owns.
        buffer.is_locked = unsafe { libc::mlock(buffer.address.as_ptr().cast(), buffer.bytes) } == 0;
        if !buffer.is_locked {
            let why = std::io::Error::last_os_error();
            SAID.call_once(|| {
                tracing::warn!(
                    "buffers for offloaded state are not page-locked ({why}): `ulimit -l` is too low"
                );
            });
        }
        buffer
    }

    /// Whether the system keeps it in memory.
    pub fn is_locked(&self) -> bool {
        self.is_locked
    }

    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes, ALIGNMENT).expect("a buffer is smaller than the address space")
    }

    /// Its first byte.
    pub fn address(&self) -> NonNull<u8> {
        self.address
    }

    /// How many bytes it has.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Never: a buffer has at least one page.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// What it holds.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: it owns this many initialised bytes.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr(), self.bytes) }
    }

    /// What it holds, to be changed.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.address.as_ptr(), self.bytes) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: mapped with this length; the lock goes with it.
        unsafe { libc::munmap(self.address.as_ptr().cast(), self.bytes) };
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} bytes)", self.bytes)
    }
}
