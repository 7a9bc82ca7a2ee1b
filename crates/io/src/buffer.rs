//! Memory that a disk can read and write without a copy by the kernel.

use std::alloc::{Layout, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::Once;

use crate::error::{IoError, Result};

/// Where buffers begin, and what lengths and places in files are multiples of, for transfers past the page cache.
pub const ALIGNMENT: usize = 4096;

/// Memory at a multiple of [`ALIGNMENT`], whose length is one too. It comes zeroed from the system and goes back to it, so
/// that tiles which many threads have had in turn leave no holes in their heaps, or it is the caller's.
pub struct Buffer {
    address: NonNull<u8>,
    bytes: usize,
    owner: Owner,
}

/// Whose memory it is.
enum Owner {
    /// Mapped for the buffer: so many bytes from there on.
    Mapped { from: NonNull<u8>, bytes: usize, is_locked: bool },
    /// The caller's.
    Given(Vec<u8>),
}

/// What huge pages are aligned to.
const HUGE_PAGE: usize = 2 << 20;

/// That memory cannot be locked is said once, whatever number of buffers there is.
static SAID: Once = Once::new();

// SAFETY: it owns its memory alone.
unsafe impl Send for Buffer {}
// SAFETY: shared access only reads.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// At least this many bytes. Large ones lie in huge pages where the system has them: a transfer is then a handful of
    /// contiguous stretches for the disk instead of one per page, which are pinned and listed one by one.
    pub fn new(bytes: usize) -> Buffer {
        let bytes = bytes.max(1).next_multiple_of(ALIGNMENT);
        let is_large = bytes >= HUGE_PAGE;
        let mapped = if is_large { bytes + HUGE_PAGE - ALIGNMENT } else { bytes };
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: new memory at a place that the system chooses.
        let from = unsafe { libc::mmap(std::ptr::null_mut(), mapped, access, kind, -1, 0) };
        let Some(from) = NonNull::new(from.cast::<u8>()).filter(|_| from != libc::MAP_FAILED) else {
            handle_alloc_error(Buffer::layout(mapped))
        };
        let owner = Owner::Mapped { from, bytes: mapped, is_locked: false };
        if !is_large {
            return Buffer { address: from, bytes, owner };
        }
        // SAFETY: the mapping has room for the buffer from the first huge page on, which begins at most this far in.
        let address = unsafe { from.add(from.align_offset(HUGE_PAGE)) };
        // SAFETY: advice on memory that was just mapped. Where the system has no huge pages, small ones do.
        unsafe { libc::madvise(address.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
        Buffer { address, bytes, owner }
    }

    /// Memory of the caller's from a byte on that is at a multiple of [`ALIGNMENT`], in whole pages.
    /// [`Buffer::into_given`] gives it back.
    pub fn given(mut memory: Vec<u8>, start: usize) -> Result<Buffer> {
        let bytes = memory.len().saturating_sub(start) / ALIGNMENT * ALIGNMENT;
        let address = memory.as_mut_ptr().wrapping_add(start);
        match NonNull::new(address).filter(|_| (address as usize).is_multiple_of(ALIGNMENT) && bytes > 0) {
            Some(address) => Ok(Buffer { address, bytes, owner: Owner::Given(memory) }),
            None => {
                let why = format!("a buffer needs whole pages from a multiple of {ALIGNMENT} on");
                Err(IoError::Request(why))
            }
        }
    }

    /// What [`Buffer::given`] was given; `None` of another buffer.
    pub fn into_given(mut self) -> Option<Vec<u8>> {
        match &mut self.owner {
            Owner::Given(memory) => Some(std::mem::take(memory)),
            Owner::Mapped { .. } => None,
        }
    }

    /// The same as a new one, and the system keeps it in memory for good (page-locked). Where it refuses, that is said once,
    /// and the buffer is an ordinary one.
    pub fn locked(bytes: usize) -> Buffer {
        let mut buffer = Buffer::new(bytes);
        // SAFETY: a call on memory that it owns.
        let locks = unsafe { libc::mlock(buffer.address.as_ptr().cast(), buffer.bytes) } == 0;
        if let Owner::Mapped { is_locked, .. } = &mut buffer.owner {
            *is_locked = locks;
        }
        if !locks {
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
        matches!(self.owner, Owner::Mapped { is_locked: true, .. })
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
        if let Owner::Mapped { from, bytes, .. } = &self.owner {
            // SAFETY: mapped with this length; the lock goes with it.
            unsafe { libc::munmap(from.as_ptr().cast(), *bytes) };
        }
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} bytes)", self.bytes)
    }
}
