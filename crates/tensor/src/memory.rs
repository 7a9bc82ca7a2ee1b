//! Host memory: aligned blocks, a pool that reuses them, and exact accounting by category.
//!
//! Large blocks dominate training, and giving them back to the system after every op costs a page fault per
//! 4 KiB on the next one. The pool keeps them, bounded by a share of what is in use.

use std::alloc::Layout;
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::Mutex;

use crate::error::{Result, TensorError};

/// What a block of memory is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Category {
    /// Model parameters as the kernels read them.
    Parameters,
    /// Gradients.
    Gradients,
    /// Master weights and optimizer states.
    Optimizer,
    /// Whatever forward leaves for backward, and intermediate results.
    Activations,
    /// Communication and staging buffers, lookup tables.
    Buffers,
}

impl Category {
    /// All of them, in the order reports list them.
    pub const ALL: [Category; 5] = [
        Category::Parameters,
        Category::Gradients,
        Category::Optimizer,
        Category::Activations,
        Category::Buffers,
    ];

    /// The name used in logs and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Category::Parameters => "parameters",
            Category::Gradients => "gradients",
            Category::Optimizer => "optimizer",
            Category::Activations => "activations",
            Category::Buffers => "buffers",
        }
    }

    const fn index(self) -> usize {
        self as usize
    }
}

/// Bytes held now and at most since the last reset, by category.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryUsage {
    current_bytes: [usize; 5],
    peak_bytes: [usize; 5],
    current_total_bytes: usize,
    peak_total_bytes: usize,
}

impl MemoryUsage {
    /// Bytes held now for one category.
    pub fn current(&self, category: Category) -> usize {
        self.current_bytes[category.index()]
    }

    /// The most bytes ever held at once for one category.
    pub fn peak(&self, category: Category) -> usize {
        self.peak_bytes[category.index()]
    }

    /// Bytes held now.
    pub fn current_total(&self) -> usize {
        self.current_total_bytes
    }

    /// The most bytes ever held at once, over all categories together.
    pub fn peak_total(&self) -> usize {
        self.peak_total_bytes
    }

    pub(crate) fn add(&mut self, category: Category, bytes: usize) {
        let index = category.index();
        self.current_bytes[index] += bytes;
        self.peak_bytes[index] = self.peak_bytes[index].max(self.current_bytes[index]);
        self.current_total_bytes += bytes;
        self.peak_total_bytes = self.peak_total_bytes.max(self.current_total_bytes);
    }

    pub(crate) fn subtract(&mut self, category: Category, bytes: usize) {
        self.current_bytes[category.index()] -= bytes;
        self.current_total_bytes -= bytes;
    }

    pub(crate) fn reset_peak(&mut self) {
        self.peak_bytes = self.current_bytes;
        self.peak_total_bytes = self.current_total_bytes;
    }
}

impl std::fmt::Display for MemoryUsage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes held", self.current_total_bytes)?;
        for category in Category::ALL {
            write!(f, ", {} {}", category.name(), self.current(category))?;
        }
        Ok(())
    }
}

/// Alignment of every block: a cache line, and a full AVX-512 register.
const ALIGNMENT_BYTES: usize = 64;
/// Blocks from this size on are aligned for, and advised to use, huge pages.
const HUGE_PAGE_BYTES: usize = 2 << 20;
/// The pool may always keep this much.
const POOL_FLOOR_BYTES: usize = 64 << 20;

struct State {
    usage: MemoryUsage,
    free: BTreeMap<usize, Vec<NonNull<u8>>>,
    pooled_bytes: usize,
}

/// A pooled allocator with accounting. One per device object, so that ranks in one process count apart.
pub(crate) struct HostPool {
    state: Mutex<State>,
}

// SAFETY: the pointers in the free list are owned by the pool alone and only handed out under the lock.
unsafe impl Send for HostPool {}
// SAFETY: as above; all access goes through the mutex.
unsafe impl Sync for HostPool {}

/// A block from the pool; what was asked for and what was taken.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Block {
    pub(crate) pointer: NonNull<u8>,
    pub(crate) capacity_bytes: usize,
}

// SAFETY: a block is an owned range of memory; whoever holds it decides who touches it.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

impl HostPool {
    pub(crate) fn new() -> Self {
        HostPool {
            state: Mutex::new(State {
                usage: MemoryUsage::default(),
                free: BTreeMap::new(),
                pooled_bytes: 0,
            }),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// A block of at least `bytes`, content undefined; `None` when the system refuses.
    pub(crate) fn allocate(&self, bytes: usize, category: Category) -> Option<Block> {
        let capacity_bytes = rounded(bytes)?;
        let mut state = self.lock();
        // A cached block may be a quarter larger than needed, but only where it is given back soon: what stays for
        // the whole run takes just what it needs.
        let slack_bytes = if category == Category::Activations { capacity_bytes / 4 } else { 0 };
        let fitting =
            state.free.range(capacity_bytes..=capacity_bytes + slack_bytes).next().map(|(&size, _)| size);
        let block = match fitting {
            Some(size) => {
                let list = state.free.get_mut(&size).expect("the key was just found");
                let pointer = list.pop().expect("empty lists are removed");
                if list.is_empty() {
                    state.free.remove(&size);
                }
                state.pooled_bytes -= size;
                Block { pointer, capacity_bytes: size }
            }
            None => {
                // SAFETY: the layout has a non-zero size.
                let pointer = NonNull::new(unsafe { std::alloc::alloc(layout(capacity_bytes)) })?;
                advise_huge_pages(pointer, capacity_bytes);
                Block { pointer, capacity_bytes }
            }
        };
        state.usage.add(category, block.capacity_bytes);
        Some(block)
    }

    /// The same with an error that says what is held.
    pub(crate) fn take(&self, bytes: usize, category: Category) -> Result<Block> {
        self.allocate(bytes, category).ok_or_else(|| TensorError::OutOfMemory {
            bytes,
            category: category.name(),
            held: self.usage().to_string(),
        })
    }

    pub(crate) fn free(&self, block: Block, category: Category) {
        let mut state = self.lock();
        state.usage.subtract(category, block.capacity_bytes);
        state.free.entry(block.capacity_bytes).or_default().push(block.pointer);
        state.pooled_bytes += block.capacity_bytes;
        // Between steps only model state is in use, and activations of about its size wait for the next one.
        let limit_bytes = POOL_FLOOR_BYTES + state.usage.current_total_bytes / 2;
        while state.pooled_bytes > limit_bytes {
            state.release_largest();
        }
    }

    pub(crate) fn count_external(&self, bytes: usize, category: Category) {
        self.lock().usage.add(category, bytes);
    }

    pub(crate) fn uncount_external(&self, bytes: usize, category: Category) {
        self.lock().usage.subtract(category, bytes);
    }

    pub(crate) fn usage(&self) -> MemoryUsage {
        self.lock().usage
    }

    pub(crate) fn reset_peak(&self) {
        self.lock().usage.reset_peak();
    }
}

impl State {
    fn release_largest(&mut self) {
        let Some(mut entry) = self.free.last_entry() else { return };
        let size = *entry.key();
        if let Some(pointer) = entry.get_mut().pop() {
            // SAFETY: the block came from `alloc` with this very layout and nobody else holds it.
            unsafe { std::alloc::dealloc(pointer.as_ptr(), layout(size)) };
            self.pooled_bytes -= size;
        }
        if entry.get().is_empty() {
            entry.remove();
        }
    }
}

impl Drop for HostPool {
    fn drop(&mut self) {
        let mut state = self.lock();
        while !state.free.is_empty() {
            state.release_largest();
        }
    }
}

fn rounded(bytes: usize) -> Option<usize> {
    bytes.max(1).checked_next_multiple_of(ALIGNMENT_BYTES).filter(|&size| size <= isize::MAX as usize / 2)
}

fn layout(bytes: usize) -> Layout {
    let alignment = if bytes >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { ALIGNMENT_BYTES };
    Layout::from_size_align(bytes, alignment).expect("rounded sizes make valid layouts")
}

fn advise_huge_pages(pointer: NonNull<u8>, bytes: usize) {
    #[cfg(target_os = "linux")]
    if bytes >= HUGE_PAGE_BYTES {
        // SAFETY: the range was just allocated by us; the advice changes no content.
        unsafe { libc::madvise(pointer.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
    }
    let _ = (pointer, bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_reused_and_counted() {
        let pool = HostPool::new();
        let block = pool.allocate(1000, Category::Gradients).unwrap();
        assert_eq!(block.pointer.as_ptr() as usize % ALIGNMENT_BYTES, 0);
        assert_eq!(pool.usage().current(Category::Gradients), 1024);
        pool.free(block, Category::Gradients);
        let again = pool.allocate(900, Category::Activations).unwrap();
        assert_eq!(again.pointer, block.pointer);
        assert_eq!(pool.usage().current(Category::Gradients), 0);
        assert_eq!(pool.usage().peak(Category::Gradients), 1024);
        assert_eq!(pool.usage().current_total(), 1024);
        pool.free(again, Category::Activations);
    }

    #[test]
    fn the_pool_gives_memory_back_when_little_is_in_use() {
        let pool = HostPool::new();
        let blocks: Vec<_> = (0..4).map(|_| pool.allocate(64 << 20, Category::Buffers).unwrap()).collect();
        for block in blocks {
            pool.free(block, Category::Buffers);
        }
        assert!(pool.lock().pooled_bytes <= POOL_FLOOR_BYTES);
    }

    #[test]
    fn an_absurd_request_is_refused() {
        assert!(HostPool::new().allocate(usize::MAX - 3, Category::Buffers).is_none());
    }
}
