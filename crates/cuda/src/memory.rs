//! Device memory from the driver's stream-ordered pool, with the same accounting as the host's.
//!
//! The pool keeps what is freed and may remap it, so pieces of different sizes do not fragment it. Since all work is on
//! one stream, memory freed by one op can serve the next although the first has not run yet. Small blocks are kept by
//! size in front of the pool: decoding takes hundreds per token, and each call of the driver costs a microsecond.

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::Mutex;

use cudarc::driver::result as cu;
use cudarc::driver::sys;
use ferrospeed_tensor::backend::RawBlock;
use ferrospeed_tensor::memory::MemoryUsage;
use ferrospeed_tensor::{Category, Result, TensorError};

use crate::driver::{Checked, Driver};

/// Alignment of every block: what the widest loads and cuBLASLt's fastest kernels like.
const ALIGNMENT_BYTES: usize = 256;

/// Blocks up to this size are kept in front of the driver's pool,
const SMALL_BYTES: usize = 1 << 20;
/// up to this much in all.
const KEPT_BYTES: usize = 64 << 20;

/// The pool of one device.
pub(crate) struct DevicePool {
    pool: sys::CUmemoryPool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    usage: MemoryUsage,
    /// Free small blocks by size.
    small: HashMap<usize, Vec<u64>>,
    small_bytes: usize,
    /// Where memory comes from while work is recorded.
    arena: Option<Arena>,
}

/// Memory that belongs to recorded work. What the work frees serves it again, and nobody else.
#[derive(Default)]
pub(crate) struct Arena {
    /// All blocks with their sizes.
    blocks: HashMap<u64, usize>,
    unused: HashMap<usize, Vec<u64>>,
    /// Blocks of others that were freed meanwhile: the stream cannot free them while it records.
    freed_of_others: Vec<u64>,
}

impl Arena {
    fn allocate(&mut self, capacity_bytes: usize) -> Result<u64, cu::DriverError> {
        if let Some(address) = self.unused.get_mut(&capacity_bytes).and_then(Vec::pop) {
            return Ok(address);
        }
        // SAFETY: a plain allocation, given back by `end_arena`.
        let address = unsafe { cu::malloc_sync(capacity_bytes) }?;
        self.blocks.insert(address, capacity_bytes);
        Ok(address)
    }

    fn take_back(&mut self, address: u64, capacity_bytes: usize) {
        if self.blocks.contains_key(&address) {
            self.unused.entry(capacity_bytes).or_default().push(address);
        } else {
            self.freed_of_others.push(address);
        }
    }

    /// Whether nothing of it is in use.
    pub(crate) fn is_free(&self) -> bool {
        self.unused.values().map(Vec::len).sum::<usize>() == self.blocks.len()
    }

    fn size_bytes(&self) -> usize {
        self.blocks.values().sum()
    }
}

// SAFETY: the pool's handle may be used from any thread.
unsafe impl Send for DevicePool {}
// SAFETY: as above; the accounting is behind a mutex.
unsafe impl Sync for DevicePool {}

impl DevicePool {
    pub(crate) fn new(driver: &Driver) -> Result<DevicePool> {
        driver.bind()?;
        // SAFETY: the device is open; the attribute takes a 64-bit number of bytes.
        let pool = unsafe {
            let pool = cu::device::get_default_mem_pool(driver.device()).during("open the memory pool")?;
            let mut keep_all = u64::MAX;
            let attribute = sys::CUmemPool_attribute_enum::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            cu::mem_pool::set_attribute(pool, attribute, std::ptr::from_mut(&mut keep_all).cast())
                .during("set up the memory pool")?;
            pool
        };
        Ok(DevicePool { pool, state: Mutex::default() })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(crate) fn allocate(&self, driver: &Driver, bytes: usize, category: Category) -> Result<RawBlock> {
        driver.bind()?;
        let out_of_memory = || {
            let (free_bytes, total_bytes) = cu::mem_get_info().unwrap_or((0, 0));
            let held = format!("{}; the device has {free_bytes} of {total_bytes} bytes free", self.usage());
            TensorError::OutOfMemory { bytes, category: category.name(), held }
        };
        let Some(capacity_bytes) = bytes.max(1).checked_next_multiple_of(ALIGNMENT_BYTES) else {
            return Err(out_of_memory());
        };
        let block = |address: u64| RawBlock {
            address: NonNull::new(address as *mut u8).expect("the driver gives no address zero"),
            capacity_bytes,
        };
        if let Some(address) = self.take(capacity_bytes, category).map_err(|_| out_of_memory())? {
            return Ok(block(address));
        }
        // SAFETY: the stream is the driver's own.
        let allocate = || unsafe { cu::malloc_async(driver.stream(), capacity_bytes) };
        let address = match allocate() {
            Ok(address) => address,
            Err(_) => {
                // What other sizes hold in the pool may be enough, once the work that used it is done.
                self.release_small(driver);
                driver.synchronize()?;
                // SAFETY: the pool is the device's own; trimming gives back what nobody uses.
                unsafe { cu::mem_pool::trim_to(self.pool, 0) }.during("trim the memory pool")?;
                allocate().map_err(|_| out_of_memory())?
            }
        };
        self.lock().usage.add(category, capacity_bytes);
        Ok(block(address))
    }

    /// A block from the arena of a recording, or one that was kept.
    fn take(&self, capacity_bytes: usize, category: Category) -> Result<Option<u64>, cu::DriverError> {
        let state = &mut *self.lock();
        let address = match &mut state.arena {
            Some(arena) => Some(arena.allocate(capacity_bytes)?),
            None => state.small.get_mut(&capacity_bytes).and_then(Vec::pop),
        };
        if address.is_some() {
            if state.arena.is_none() {
                state.small_bytes -= capacity_bytes;
            }
            state.usage.add(category, capacity_bytes);
        }
        Ok(address)
    }

    pub(crate) fn free(&self, driver: &Driver, block: RawBlock, category: Category) {
        let address = block.address.as_ptr() as sys::CUdeviceptr;
        let mut state = self.lock();
        state.usage.subtract(category, block.capacity_bytes);
        if let Some(arena) = &mut state.arena {
            arena.take_back(address, block.capacity_bytes);
            return;
        }
        if block.capacity_bytes <= SMALL_BYTES && state.small_bytes + block.capacity_bytes <= KEPT_BYTES {
            state.small_bytes += block.capacity_bytes;
            state.small.entry(block.capacity_bytes).or_default().push(address);
            return;
        }
        drop(state);
        give_back(driver, address);
    }

    /// From now on memory comes from an arena.
    pub(crate) fn begin_recording(&self) {
        self.lock().arena = Some(Arena::default());
    }

    /// The arena of the recording that ends. Its memory counts as buffers until [`DevicePool::end_arena`].
    pub(crate) fn end_recording(&self, driver: &Driver) -> Arena {
        let mut state = self.lock();
        let mut arena = state.arena.take().unwrap_or_default();
        state.usage.add(Category::Buffers, arena.size_bytes());
        drop(state);
        arena.freed_of_others.drain(..).for_each(|address| give_back(driver, address));
        arena
    }

    /// Gives an arena's memory back; nothing that uses it may be under way.
    pub(crate) fn end_arena(&self, driver: &Driver, arena: Arena) {
        self.lock().usage.subtract(Category::Buffers, arena.size_bytes());
        if driver.synchronize().is_ok() {
            for address in arena.blocks.into_keys() {
                // SAFETY: the arena allocated the block. A failure means that the device is gone.
                let _ = unsafe { cu::free_sync(address) };
            }
        }
    }

    /// Gives the kept blocks back to the driver.
    pub(crate) fn release_small(&self, driver: &Driver) {
        let mut state = self.lock();
        state.small_bytes = 0;
        state.small.drain().flat_map(|(_, blocks)| blocks).for_each(|address| give_back(driver, address));
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

fn give_back(driver: &Driver, address: sys::CUdeviceptr) {
    if driver.bind().is_ok() {
        // SAFETY: the block came from the pool, and what was submitted before still finds it. A failure means that the
        // device is gone, and the memory with it.
        let _ = unsafe { cu::free_async(address, driver.stream()) };
    }
}
