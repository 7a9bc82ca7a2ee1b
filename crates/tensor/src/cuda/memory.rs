//! Device memory from the driver's stream-ordered pool, with the same accounting as the host's.
//!
//! The pool keeps what is freed and may remap it, so pieces of different sizes do not fragment it. Since all work is on
//! one stream, memory freed by one op can serve the next although the first has not run yet.

use std::ptr::NonNull;
use std::sync::Mutex;

use cudarc::driver::result as cu;
use cudarc::driver::sys;

use crate::backend::RawBlock;
use crate::cuda::driver::{Checked, Driver};
use crate::error::{Result, TensorError};
use crate::memory::{Category, MemoryUsage};

/// Alignment of every block: what the widest loads and cuBLASLt's fastest kernels like.
const ALIGNMENT_BYTES: usize = 256;

/// The pool of one device.
pub(crate) struct DevicePool {
    pool: sys::CUmemoryPool,
    usage: Mutex<MemoryUsage>,
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
        Ok(DevicePool { pool, usage: Mutex::default() })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, MemoryUsage> {
        self.usage.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
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
        // SAFETY: the stream is the driver's own.
        let allocate = || unsafe { cu::malloc_async(driver.stream(), capacity_bytes) };
        let address = match allocate() {
            Ok(address) => address,
            Err(_) => {
                // What other sizes hold in the pool may be enough, once the work that used it is done.
                driver.synchronize()?;
                // SAFETY: the pool is the device's own; trimming gives back what nobody uses.
                unsafe { cu::mem_pool::trim_to(self.pool, 0) }.during("trim the memory pool")?;
                allocate().map_err(|_| out_of_memory())?
            }
        };
        self.lock().add(category, capacity_bytes);
        let address = NonNull::new(address as *mut u8).expect("the driver gives no address zero");
        Ok(RawBlock { address, capacity_bytes })
    }

    pub(crate) fn free(&self, driver: &Driver, block: RawBlock, category: Category) {
        self.lock().subtract(category, block.capacity_bytes);
        if driver.bind().is_ok() {
            // SAFETY: the block came from `allocate`, and what was submitted before still finds it. A failure means that
            // the device is gone, and the memory with it.
            let _ = unsafe { cu::free_async(block.address.as_ptr() as sys::CUdeviceptr, driver.stream()) };
        }
    }

    pub(crate) fn count_external(&self, bytes: usize, category: Category) {
        self.lock().add(category, bytes);
    }

    pub(crate) fn uncount_external(&self, bytes: usize, category: Category) {
        self.lock().subtract(category, bytes);
    }

    pub(crate) fn usage(&self) -> MemoryUsage {
        *self.lock()
    }

    pub(crate) fn reset_peak(&self) {
        self.lock().reset_peak();
    }
}
