//! Kernels for this machine's processor. Start reading at [`CpuBackend`]; each kernel family has its file.
//!
//! Every kernel gives the same bits with any number of threads: see [`threads`]. What
//! depends on the instruction set: see [`simd`].
//!
//! ```
//! use ferrospeed_tensor::{DType, Tensor, ops};
//!
//! # fn main() -> ferrospeed_tensor::Result<()> {
//! let device = ferrospeed_cpu::device();
//! let x = Tensor::full([2, 3], 0.5, DType::F32, &device)?;
//! assert_eq!(ops::sum(&x)?.item()?, 3.0);
//! # Ok(())
//! # }
//! ```

#![deny(clippy::mut_from_ref)]

mod activation;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "tiles and wide registers use the rest"))]
mod aligned;
#[cfg(target_arch = "x86_64")]
mod amx;
mod arena;
mod attention;
#[cfg(target_arch = "x86_64")]
mod attention_amx;
mod attention_mask;
mod attention_paged;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod broadcast;
mod gemm;
mod grouped;
mod image;
mod layout;
mod loss;
mod loss_parts;
mod math;
mod norm;
mod one_row;
mod packed;
mod parallel;
mod permute;
mod pointwise;
mod pool;
mod reduce;
mod rows_alone;
mod screen;
mod widened;

use std::sync::OnceLock;

use ferrospeed_tensor::backend::*;
use ferrospeed_tensor::dtype::Element;
use ferrospeed_tensor::loops::simd;
use ferrospeed_tensor::loops::threads::{self, Threads};
use ferrospeed_tensor::memory::MemoryUsage;
use ferrospeed_tensor::{Category, Out, Result, Tensor, TensorError};

use pool::{Block, HostPool};

/// Binds `$T` to the Rust type of a float dtype and gives `Ok($body)`, or the error for any other dtype.
macro_rules! float_kernel {
    ($op:expr, $dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            ferrospeed_tensor::DType::F32 => {
                type $T = f32;
                Ok($body)
            }
            ferrospeed_tensor::DType::BF16 => {
                type $T = half::bf16;
                Ok($body)
            }
            ferrospeed_tensor::DType::F16 => {
                type $T = half::f16;
                Ok($body)
            }
            dtype => Err(ferrospeed_tensor::TensorError::BadDType {
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
            ferrospeed_tensor::DType::F32 => {
                type $T = f32;
                $body
            }
            ferrospeed_tensor::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            ferrospeed_tensor::DType::F16 => {
                type $T = half::f16;
                $body
            }
            ferrospeed_tensor::DType::I64 => {
                type $T = i64;
                $body
            }
            ferrospeed_tensor::DType::I32 => {
                type $T = i32;
                $body
            }
            ferrospeed_tensor::DType::U8 | ferrospeed_tensor::DType::Bool => {
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

/// The device with the threads that the whole process shares, one object per process.
pub fn device() -> Device {
    static SHARED: OnceLock<Device> = OnceLock::new();
    SHARED.get_or_init(|| Device::new(CpuBackend::over(threads::shared().clone()))).clone()
}

/// A device of its own, with its own threads, pool and accounting.
pub fn with_threads(count: usize) -> Device {
    Device::new(CpuBackend::over(Threads::new(count)))
}

/// Whether products of this process copy operands into tiles: where AMX is there and `FERROSPEED_CPU_KERNELS` permits it.
pub fn multiplies_in_tiles() -> bool {
    #[cfg(target_arch = "x86_64")]
    return amx::available();
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

/// Whether the processor multiplies pairs of bf16.
fn multiplies_pairs() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx512bf16");
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
    /// A backend with a memory pool of its own, over some threads.
    pub fn over(threads: Threads) -> CpuBackend {
        CpuBackend { pool: HostPool::new(), threads }
    }
}

impl Memory for CpuBackend {
    fn name(&self) -> String {
        format!("cpu with {} threads", self.threads.count())
    }
    fn kernels(&self) -> String {
        let name = match simd::level() {
            _ if multiplies_in_tiles() => "amx",
            simd::Level::Avx512 if simd::wants_pairs() && multiplies_pairs() => "avx512_bf16",
            simd::Level::Avx512 => "avx512",
            simd::Level::Avx2 => "avx2",
            simd::Level::Portable => "portable",
        };
        name.to_owned()
    }
    fn host(&self) -> Option<&Device> {
        None
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

impl FewRowsProducts for CpuBackend {}

impl Updates for CpuBackend {}

impl Integers for CpuBackend {}

impl OneBit for CpuBackend {}

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

#[cfg(test)]
extern crate self as ferrospeed_cpu;
#[cfg(test)]
#[path = "../tests/it/main.rs"]
mod it;
