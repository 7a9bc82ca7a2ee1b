//! Registered memory: segments that every rank of the host has mapped.
//!
//! Each rank allocates its own segment and maps those of its peers. A byte range is named to a peer by (segment,
//! offset); which of this rank's addresses are registered is found by address. A rank that drops its segment gives the
//! pages back at once; the address range disappears when all ranks have dropped theirs, so a peer that is a little
//! behind never reads through a dangling mapping.
//!
//! A *shared* segment is one for all ranks of the host: every rank maps the same pages, and what one writes all have.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use crate::error::Result;
use crate::region::Region;
use crate::sys::SharedMemory;

const PAGE: usize = 4096;

/// Memory from [`Group::allocate`](crate::Group::allocate) or [`Group::allocate_shared`](crate::Group::allocate_shared),
/// which the group's ranks on the host have mapped.
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
    /// Whether there was ever a shared segment; most jobs have none.
    any_shared: AtomicBool,
    /// Whether there was ever a segment without huge pages.
    any_small_pages: AtomicBool,
}

#[derive(Default)]
struct Segments {
    /// By start address, those of this rank's segments that are in use.
    own: BTreeMap<usize, Own>,
    mapped: HashMap<u64, Mapped>,
}

struct Own {
    id: u64,
    bytes: usize,
    is_shared: bool,
    /// The world ranks that have it mapped.
    ranks: Vec<usize>,
}

enum Mapped {
    /// A segment of each rank, by world rank; the own one is among them.
    PerRank { memories: HashMap<usize, SharedMemory>, own_rank: usize },
    /// The segment that all ranks have in common.
    Shared(SharedMemory),
}

/// Bytes to map for `bytes` of user memory: whole pages, and one more that holds the marks.
pub(crate) fn mapped_bytes(bytes: usize) -> usize {
    bytes.next_multiple_of(PAGE) + PAGE
}

/// Words in the last page of every segment, which all ranks see.
#[repr(C)]
struct Marks {
    /// Set by the owner when it has released the segment.
    released: AtomicU32,
    /// Set by the owner, before peers map the segment, where its pages are not huge.
    small_pages: AtomicU32,
}

fn marks(memory: &SharedMemory) -> &Marks {
    // SAFETY: the last page of every segment holds nothing but these words, aligned to the page.
    unsafe { &*memory.base().add(memory.bytes() - PAGE).cast::<Marks>() }
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
        if memories.values().any(|memory| marks(memory).small_pages.load(Ordering::Acquire) != 0) {
            self.any_small_pages.store(true, Ordering::Release);
        }
        let ranks = memories.keys().copied().collect();
        self.add_mapped(id, bytes, base, ranks, Mapped::PerRank { memories, own_rank })
    }

    /// Adds a segment that these ranks have in common.
    pub(crate) fn add_shared(
        self: &Arc<Self>,
        id: u64,
        bytes: usize,
        memory: SharedMemory,
        ranks: Vec<usize>,
    ) -> Registered {
        self.any_shared.store(true, Ordering::Release);
        self.add_mapped(id, bytes, memory.base(), ranks, Mapped::Shared(memory))
    }

    fn add_mapped(
        self: &Arc<Self>,
        id: u64,
        bytes: usize,
        base: *mut u8,
        ranks: Vec<usize>,
        mapped: Mapped,
    ) -> Registered {
        let mut segments = self.segments.write().unwrap_or_else(PoisonError::into_inner);
        let is_shared = matches!(mapped, Mapped::Shared(_));
        segments.own.insert(base as usize, Own { id, bytes, is_shared, ranks });
        segments.mapped.insert(id, mapped);
        segments.unmap_abandoned();
        Registered { inner: Arc::new(Allocation { id, bytes, base, table: Arc::clone(self) }) }
    }

    fn release(&self, id: u64) {
        let mut segments = self.segments.write().unwrap_or_else(PoisonError::into_inner);
        let start = match segments.mapped.get(&id) {
            Some(Mapped::PerRank { memories, own_rank }) => memories.get(own_rank).map(|own| {
                own.discard_pages();
                marks(own).released.store(1, Ordering::Release);
                own.base() as usize
            }),
            // Peers have mappings of their own, and the pages last as long as any of them.
            Some(Mapped::Shared(memory)) => Some(memory.base() as usize),
            None => None,
        };
        if let Some(start) = start {
            segments.own.remove(&start);
        }
        if matches!(segments.mapped.get(&id), Some(Mapped::Shared(_))) {
            segments.mapped.remove(&id);
        }
        segments.unmap_abandoned();
    }

    /// The name of a region for these peers, when it lies in memory of this rank that all of them have mapped.
    pub(crate) fn locate(&self, region: &Region, peers: &[usize]) -> Option<SharedRange> {
        self.find(region, |own| peers.iter().all(|peer| own.ranks.contains(peer)))
    }

    /// The name of a region that lies in memory which these ranks have in common.
    pub(crate) fn locate_shared(&self, region: &Region, peers: &[usize]) -> Option<SharedRange> {
        if !self.any_shared.load(Ordering::Acquire) {
            return None;
        }
        self.find(region, |own| own.is_shared && peers.iter().all(|peer| own.ranks.contains(peer)))
    }

    /// Whether a region lies in memory that other ranks have in common with this one.
    pub(crate) fn is_shared(&self, region: &Region) -> bool {
        self.any_shared.load(Ordering::Acquire) && self.find(region, |own| own.is_shared).is_some()
    }

    fn find(&self, region: &Region, fits: impl Fn(&Own) -> bool) -> Option<SharedRange> {
        let start = region.as_ptr() as usize;
        let segments = self.segments.read().unwrap_or_else(PoisonError::into_inner);
        let (base, own) = segments.own.range(..=start).next_back()?;
        let inside = start + region.len() <= base + own.bytes;
        (inside && fits(own)).then_some(SharedRange { segment: own.id, offset: (start - base) as u64 })
    }

    /// Whether mapping a stretch of a peer's segment again costs little: measured, 12 µs for 2 MiB in a virtual machine.
    pub(crate) fn has_huge_pages(&self) -> bool {
        !self.any_small_pages.load(Ordering::Acquire)
    }

    /// This rank's address of `bytes` of a peer's segment; `None` when the peer named something that is not there.
    pub(crate) fn resolve(&self, world_rank: usize, range: SharedRange, bytes: usize) -> Option<*mut u8> {
        let segments = self.segments.read().unwrap_or_else(PoisonError::into_inner);
        let memory = match segments.mapped.get(&range.segment)? {
            Mapped::PerRank { memories, .. } => memories.get(&world_rank)?,
            Mapped::Shared(memory) => memory,
        };
        let offset = usize::try_from(range.offset).ok()?;
        let end = offset.checked_add(bytes)?;
        (end <= memory.bytes() - PAGE).then(|| memory.base().wrapping_add(offset))
    }
}

impl Segments {
    /// Unmaps what every rank has released.
    fn unmap_abandoned(&mut self) {
        self.mapped.retain(|_, mapped| match mapped {
            Mapped::PerRank { memories, .. } => {
                memories.values().any(|memory| marks(memory).released.load(Ordering::Acquire) == 0)
            }
            Mapped::Shared(_) => true,
        });
    }
}

/// Creates this rank's segment, with the descriptor that peers open.
pub(crate) fn create(bytes: usize) -> Result<(SharedMemory, std::os::fd::OwnedFd)> {
    let (memory, descriptor) = SharedMemory::create(mapped_bytes(bytes))?;
    if !memory.prepare_pages() {
        marks(&memory).small_pages.store(1, Ordering::Release);
    }
    Ok((memory, descriptor))
}
