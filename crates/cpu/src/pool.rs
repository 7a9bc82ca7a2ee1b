//! Host memory: aligned blocks, and a pool that reuses them.
//!
//! Large blocks dominate training, and giving them back to the system after every op costs page faults on the next
//! one. They are cut from an arena that keeps its pages, bounded by what was ever in use and a share of what is.

use std::alloc::Layout;
use std::ptr::NonNull;
use std::sync::Mutex;

use ferrospeed_tensor::memory::MemoryUsage;
use ferrospeed_tensor::{Category, Result, TensorError};

use crate::arena::Arena;

/// Alignment of every block: a cache line, and a full AVX-512 register.
const ALIGNMENT_BYTES: usize = 64;
/// Blocks below this size come from the system's allocator, which is made for them.
const LARGE_BYTES: usize = 32 << 10;
/// Free memory of this much may always stay resident.
const SLACK_BYTES: usize = 32 << 20;

struct State {
    usage: MemoryUsage,
    arena: Arena,
    /// Bytes of the arena in use, and the most there ever were.
    large_bytes: usize,
    most_large_bytes: usize,
}

/// A pooled allocator with accounting. One per device object, so that ranks in one process count apart.
pub(crate) struct HostPool {
    state: Mutex<State>,
}

// SAFETY: the arena's ranges are owned by the pool alone and only handed out under the lock.
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
                arena: Arena::default(),
                large_bytes: 0,
                most_large_bytes: 0,
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
        let pointer = if capacity_bytes < LARGE_BYTES {
            // SAFETY: the layout has a non-zero size.
            NonNull::new(unsafe { std::alloc::alloc(layout(capacity_bytes)) })?
        } else {
            state.take_large(capacity_bytes)?
        };
        state.usage.add(category, capacity_bytes);
        Some(Block { pointer, capacity_bytes })
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
        if block.capacity_bytes < LARGE_BYTES {
            // SAFETY: the block came from `alloc` with this very layout and nobody else holds it.
            unsafe { std::alloc::dealloc(block.pointer.as_ptr(), layout(block.capacity_bytes)) };
        } else {
            state.give_large(block);
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
    fn take_large(&mut self, bytes: usize) -> Option<NonNull<u8>> {
        let warm_bytes = self.arena.warm_bytes();
        let pointer = self.arena.take(bytes)?;
        self.large_bytes += bytes;
        self.most_large_bytes = self.most_large_bytes.max(self.large_bytes);
        if self.arena.warm_bytes() >= warm_bytes {
            // New pages, though free ones are resident: these go where more would be resident than was ever in use.
            self.limit_warm(self.most_large_bytes - self.large_bytes + self.most_large_bytes / 16);
        }
        Some(pointer)
    }

    fn give_large(&mut self, block: Block) {
        self.arena.give(block.pointer, block.capacity_bytes);
        self.large_bytes -= block.capacity_bytes;
        // Between steps only model state is in use, and room for activations of its size waits for the next one.
        self.limit_warm(self.large_bytes);
    }

    fn limit_warm(&mut self, limit_bytes: usize) {
        let excess_bytes = self.arena.warm_bytes().saturating_sub(limit_bytes + SLACK_BYTES);
        if excess_bytes > 0 {
            self.arena.cool(excess_bytes);
        }
    }
}

fn rounded(bytes: usize) -> Option<usize> {
    bytes.max(1).checked_next_multiple_of(ALIGNMENT_BYTES).filter(|&size| size <= isize::MAX as usize / 2)
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, ALIGNMENT_BYTES).expect("rounded sizes make valid layouts")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_reused_and_counted() {
        let pool = HostPool::new();
        let block = pool.allocate(100_000, Category::Gradients).unwrap();
        assert_eq!(block.pointer.as_ptr() as usize % ALIGNMENT_BYTES, 0);
        assert_eq!(pool.usage().current(Category::Gradients), 100_032);
        pool.free(block, Category::Gradients);
        let again = pool.allocate(90_000, Category::Activations).unwrap();
        assert_eq!(again.pointer, block.pointer);
        assert_eq!(pool.usage().current(Category::Gradients), 0);
        assert_eq!(pool.usage().peak(Category::Gradients), 100_032);
        assert_eq!(pool.usage().current_total(), 90_048);
        pool.free(again, Category::Activations);
        let small = pool.allocate(1000, Category::Buffers).unwrap();
        assert_eq!((small.capacity_bytes, pool.usage().current_total()), (1024, 1024));
        pool.free(small, Category::Buffers);
    }

    #[test]
    fn the_pool_gives_memory_back_when_little_is_in_use() {
        let pool = HostPool::new();
        let blocks: Vec<_> = (0..4).map(|_| pool.allocate(64 << 20, Category::Buffers).unwrap()).collect();
        for block in blocks {
            pool.free(block, Category::Buffers);
        }
        assert!(pool.lock().arena.warm_bytes() <= SLACK_BYTES + ALIGNMENT_BYTES);
    }

    #[test]
    fn what_one_size_leaves_another_takes() {
        let pool = HostPool::new();
        let resident = || {
            let state = pool.lock();
            state.large_bytes + state.arena.warm_bytes()
        };
        let state = pool.allocate(256 << 20, Category::Optimizer).unwrap();
        for _ in 0..4 {
            let activations: Vec<_> = (0..16)
                .map(|i| pool.allocate((8 << 20) + i * 4096, Category::Activations).unwrap())
                .collect();
            let mut gradients = Vec::new();
            for block in activations.into_iter().rev() {
                pool.free(block, Category::Activations);
                gradients.push(pool.allocate(6 << 20, Category::Gradients).unwrap());
            }
            gradients.into_iter().for_each(|block| pool.free(block, Category::Gradients));
            assert!(resident() <= (256 + 130 + 32 + 16) << 20, "{}", resident());
        }
        pool.free(state, Category::Optimizer);
    }

    #[test]
    fn an_absurd_request_is_refused() {
        assert!(HostPool::new().allocate(usize::MAX - 3, Category::Buffers).is_none());
    }
}
