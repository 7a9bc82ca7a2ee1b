//! Registered memory: segments that every rank of the host has mapped.
//!
//! Each rank allocates its own segment and maps those of its peers. A byte range is named to a peer by (segment,
//! offset); which of this rank's addresses are registered is found by address. A rank that drops its segment gives the
//! pages back at once; the address range disappears when all ranks have dropped theirs, so a peer that is a little
//! behind never reads through a dangling mapping.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use crate::error::Result;
use crate::region::Region;
use crate::sys::SharedMemory;

const PAGE: usize = 4096;

/// Memory from [`World::allocate`](crate::World::allocate), which peers on the host have mapped.
///
/// Clones share the memory; it is freed when the last clone, and the last [`Region`] made of it, is dropped.
#[derive(Clone)]
pub struct Registered {
    inner: Arc<Allocation>,
}

struct Allocation {
    id: u64,
    bytes: usize,
    base: *mut u8,
    table: Arc<SegmentTable>,
}

// SAFETY: an address of shared memory and a reference to the table that keeps it mapped; accesses go through regions.
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

impl Registered {
    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.inner.bytes
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.inner.bytes == 0
    }

    /// The first byte; aligned to a page.
    pub fn as_ptr(&self) -> *mut u8 {
        self.inner.base
    }

    /// All of it as a region.
    pub fn region(&self) -> Region {
        let owner: Arc<dyn std::any::Any + Send + Sync> = self.inner.clone();
        // SAFETY: the mapping lives as long as the allocation that owns the region.
        unsafe { Region::from_raw(self.inner.base, self.inner.bytes, owner) }
    }
}

impl std::fmt::Debug for Registered {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Registered(#{}, {} bytes)", self.inner.id, self.inner.bytes)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.table.release(self.id);
    }
}

/// A byte range in a form that peers understand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SharedRange {
    pub(crate) segment: u64,
    pub(crate) offset: u64,
}

/// The segments of one rank and its mappings of the peers' segments.
#[derive(Default)]
pub(crate) struct SegmentTable {
    segments: RwLock<Segments>,
}

#[derive(Default)]
struct Segments {
    /// Start address of each of this rank's own segments that is in use: (segment, bytes).
    own: BTreeMap<usize, (u64, usize)>,
    mapped: HashMap<u64, Mapped>,
}

struct Mapped {
    /// By world rank. The own segment is among them.
    memories: HashMap<usize, SharedMemory>,
    own_rank: usize,
}

/// Bytes to map for `bytes` of user memory: whole pages, and one more that holds the release mark.
pub(crate) fn mapped_bytes(bytes: usize) -> usize {
    bytes.next_multiple_of(PAGE) + PAGE
}

fn release_mark(memory: &SharedMemory) -> &AtomicU32 {
    // SAFETY: the last page of every segment holds nothing but this word, aligned to the page.
    unsafe { &*memory.base().add(memory.bytes() - PAGE).cast::<AtomicU32>() }
}

impl SegmentTable {
    /// Adds a segment that is mapped on all ranks of the host.
    pub(crate) fn add(
        self: &Arc<Self>,
        id: u64,
        own_rank: usize,
        bytes: usize,
        memories: HashMap<usize, SharedMemory>,
    ) -> Registered {
        let base = memories[&own_rank].base();
        let mut segments = self.segments.write().unwrap_or_else(PoisonError::into_inner);
        segments.own.insert(base as usize, (id, bytes));
        segments.mapped.insert(id, Mapped { memories, own_rank });
        segments.unmap_abandoned();
        Registered { inner: Arc::new(Allocation { id, bytes, base, table: Arc::clone(self) }) }
    }

    fn release(&self, id: u64) {
        let mut segments = self.segments.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(mapped) = segments.mapped.get(&id)
            && let Some(own) = mapped.memories.get(&mapped.own_rank)
        {
            let start = own.base() as usize;
            own.discard_pages();
            release_mark(own).store(1, Ordering::Release);
            segments.own.remove(&start);
        }
        segments.unmap_abandoned();
    }

    /// The name of a region for peers, when it lies in this rank's registered memory.
    pub(crate) fn locate(&self, region: &Region) -> Option<SharedRange> {
        let start = region.as_ptr() as usize;
        let segments = self.segments.read().unwrap_or_else(PoisonError::into_inner);
        let (base, (id, bytes)) = segments.own.range(..=start).next_back()?;
        let inside = start + region.len() <= base + bytes;
        inside.then(|| SharedRange { segment: *id, offset: (start - base) as u64 })
    }

    /// This rank's address of `bytes` of a peer's segment; `None` when the peer named something that is not there.
    pub(crate) fn resolve(&self, world_rank: usize, range: SharedRange, bytes: usize) -> Option<*mut u8> {
        let segments = self.segments.read().unwrap_or_else(PoisonError::into_inner);
        let memory = segments.mapped.get(&range.segment)?.memories.get(&world_rank)?;
        let offset = usize::try_from(range.offset).ok()?;
        let end = offset.checked_add(bytes)?;
        (end <= memory.bytes() - PAGE).then(|| memory.base().wrapping_add(offset))
    }
}

impl Segments {
    /// Unmaps what every rank has released.
    fn unmap_abandoned(&mut self) {
        self.mapped.retain(|_, mapped| {
            mapped.memories.values().any(|memory| release_mark(memory).load(Ordering::Acquire) == 0)
        });
    }
}

/// Creates this rank's segment, with the descriptor that peers open.
pub(crate) fn create(bytes: usize) -> Result<(SharedMemory, std::os::fd::OwnedFd)> {
    SharedMemory::create(mapped_bytes(bytes))
}
