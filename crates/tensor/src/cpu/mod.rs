//! The CPU backend. Start reading at [`CpuBackend`]; each kernel family has its file.
//!
//! Every kernel gives the same bits with any number of threads: see `parallel`. What depends on the instruction
//! set: see `simd`.

mod activation;
pub mod ahead;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "tiles and wide registers use the rest"))]
mod aligned;
#[cfg(target_arch = "x86_64")]
mod amx;
mod attention;
#[cfg(target_arch = "x86_64")]
mod attention_amx;
mod attention_mask;
mod attention_paged;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod broadcast;
mod crew;
mod gemm;
mod grouped;
mod image;
mod layout;
mod loss;
mod loss_parts;
mod math;
mod norm;
mod one_row;
mod operations;
mod packed;
mod parallel;
pub mod past_cache;
mod permute;
mod pointwise;
pub mod quantize;
mod reduce;
mod rows_alone;
mod screen;
pub mod simd;
mod widened;

use crate::backend::*;
use crate::dtype::{DType, Element};
use crate::error::{Result, TensorError};
use crate::memory::{Block, Category, HostPool, MemoryUsage};
use crate::out::Out;
use crate::pages::PagedSpec;
use crate::random::RandomKey;
use crate::tensor::Tensor;
use parallel::Threads;

/// Binds `$T` to the Rust type of a float dtype and gives `Ok($body)`, or the error for any other dtype.
macro_rules! float_kernel {
    ($op:expr, $dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::dtype::DType::F32 => {
                type $T = f32;
                Ok($body)
            }
            $crate::dtype::DType::BF16 => {
                type $T = half::bf16;
                Ok($body)
            }
            $crate::dtype::DType::F16 => {
                type $T = half::f16;
                Ok($body)
            }
            dtype => Err($crate::error::TensorError::BadDType {
                op: $op,
                what: "the operand",
                dtype,
                expected: "a float type",
            }),
        }
    };
}
pub(crate) use float_kernel;

/// Binds `$T` to a type of the dtype's size, for kernels that only move bytes.
macro_rules! any_kernel {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::dtype::DType::F32 => {
                type $T = f32;
                $body
            }
            $crate::dtype::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            $crate::dtype::DType::F16 => {
                type $T = half::f16;
                $body
            }
            $crate::dtype::DType::I64 => {
                type $T = i64;
                $body
            }
            $crate::dtype::DType::I32 => {
                type $T = i32;
                $body
            }
            $crate::dtype::DType::U8 | $crate::dtype::DType::Bool => {
                type $T = u8;
                $body
            }
        }
    };
}
pub(crate) use any_kernel;

/// A kernel's input.
///
/// # Panics
/// When the op above let a wrong type through, which is a bug of ours.
pub(crate) fn read<T: Element>(tensor: &Tensor) -> &[T] {
    tensor.host::<T>().unwrap_or_else(|error| panic!("{error}"))
}

/// A kernel's output.
///
/// # Panics
/// When the op above let a wrong type through, which is a bug of ours.
pub(crate) fn write<T: Element>(out: Out<'_>) -> &mut [T] {
    out.into_host().unwrap_or_else(|error| panic!("{error}"))
}

/// Threads to use when nobody says: `FERROSPEED_THREADS` or `OMP_NUM_THREADS`, else the cores we may run on.
pub fn default_threads() -> usize {
    ["FERROSPEED_THREADS", "OMP_NUM_THREADS"]
        .iter()
        .filter_map(|name| std::env::var(name).ok()?.parse().ok())
        .find(|&count: &usize| count > 0)
        .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// Whether products of this process copy operands into tiles: where AMX is there and `FERROSPEED_CPU_KERNELS` permits it.
pub fn multiplies_in_tiles() -> bool {
    #[cfg(target_arch = "x86_64")]
    return amx::available();
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

/// Whether products of 16-bit operands copy both into f32 first: where vectors have less than 512 bits.
pub fn widens_operands() -> bool {
    simd::level() < simd::Level::Avx512
}

/// Kernels on this machine's processor.
pub struct CpuBackend {
    pool: HostPool,
    threads: Threads,
}

impl CpuBackend {
    /// A backend with its own memory pool and threads.
    pub fn new(threads: usize) -> CpuBackend {
        CpuBackend { pool: HostPool::new(), threads: Threads::new(threads) }
    }
}

impl Memory for CpuBackend {
    fn name(&self) -> String {
        format!("cpu with {} threads", self.threads.count())
    }
    fn is_host(&self) -> bool {
        true
    }
    fn allocate(&self, bytes: usize, category: Category) -> Result<RawBlock> {
        let block = self.pool.take(bytes, category)?;
        Ok(RawBlock { address: block.pointer, capacity_bytes: block.capacity_bytes })
    }
    fn free(&self, block: RawBlock, category: Category) {
        self.pool.free(Block { pointer: block.address, capacity_bytes: block.capacity_bytes }, category);
    }
    fn count_external(&self, bytes: usize, category: Category) {
        self.pool.count_external(bytes, category);
    }
    fn uncount_external(&self, bytes: usize, category: Category) {
        self.pool.uncount_external(bytes, category);
    }
    fn memory_usage(&self) -> MemoryUsage {
        self.pool.usage()
    }
    fn reset_peak_memory(&self) {
        self.pool.reset_peak();
    }
}

impl Work for CpuBackend {
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
    fn parallel(&self, count: usize, task: &(dyn Fn(usize) + Send + Sync)) {
        self.threads.run(count, task);
    }
}

impl Copies for CpuBackend {
    fn copy_from_host(&self, source: &[u8], target: Out<'_>) -> Result<()> {
        if source.len() != target.size_bytes() {
            return Err(TensorError::argument(
                "copy_from_host",
                format!("{} bytes do not fill {target:?}", source.len()),
            ));
        }
        // SAFETY: the target holds exactly these bytes, and nobody else sees them, so neither does the caller's slice.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), target.address().as_ptr(), source.len()) };
        Ok(())
    }
    fn copy_to_host(&self, source: &Tensor, target: &mut [u8]) -> Result<()> {
        if target.len() != source.size_bytes() {
            return Err(TensorError::argument(
                "copy_to_host",
                format!("{source:?} does not fill {} bytes", target.len()),
            ));
        }
        // SAFETY: as above, the other way round.
        unsafe {
            std::ptr::copy_nonoverlapping(source.address().as_ptr(), target.as_mut_ptr(), target.len())
        };
        Ok(())
    }
    fn copy(&self, source: &Tensor, target: Out<'_>) -> Result<()> {
        if source.dtype() != target.dtype() || source.numel() != target.numel() {
            return Err(TensorError::ShapeMismatch {
                op: "copy",
                left: *source.shape(),
                right: *target.shape(),
            });
        }
        // SAFETY: both hold size_bytes; `copy` allows overlap.
        unsafe { std::ptr::copy(source.address().as_ptr(), target.address().as_ptr(), source.size_bytes()) };
        Ok(())
    }
    fn fill(&self, target: Out<'_>, value: f32) -> Result<()> {
        pointwise::fill(&self.threads, target, value);
        Ok(())
    }
    fn cast(&self, source: &Tensor, target: Out<'_>) -> Result<()> {
        pointwise::cast(&self.threads, source, target);
        Ok(())
    }
}
