//! What a device can do at most, measured: the yardstick for what a run does.
//!
//! A square matrix product, a copy and a sum over ranks, each repeated for a few hundredths of a second, of which the best
//! counts. Measured and not looked up, it holds for this machine and its clock; one that is busy with something else at that
//! moment shows less.

use std::time::{Duration, Instant};

use ferrospeed_comm::{Error as CommError, ReduceOp, World};
pub use ferrospeed_observe::roofline::Peak;
use ferrospeed_tensor::backend::{Gemm, Matrix};
use ferrospeed_tensor::{DType, Device, Result, Tensor};

/// How long each is repeated.
const BUDGET: Duration = Duration::from_millis(60);
const LEAST_RUNS: u32 = 3;
/// Short enough to be done many times within the budget: on a busy machine only the best says what is possible.
const CPU_SIZE: usize = 512;
const GPU_SIZE: usize = 4096;
/// More than caches hold.
const COPIED_BYTES: usize = 128 << 20;
/// For ranks that all measure at once, and whose memory is planned for something else.
const SMALL_COPY_BYTES: usize = 16 << 20;
/// What ranks exchange to see what their links carry.
const EXCHANGED_BYTES: usize = 4 << 20;
const EXCHANGES: usize = 4;

/// Both peaks of a device, products in this type.
pub fn measure_peak(device: &Device, dtype: DType) -> Result<Peak> {
    let bytes_per_s = copied_bytes_per_s(device, COPIED_BYTES)?;
    Ok(Peak { flops_per_s: product_flops_per_s(device, dtype)?, bytes_per_s })
}

/// The same where many ranks measure together: with copies that leave their memory to the run, and that large caches hold.
pub fn measure_small_peak(device: &Device, dtype: DType) -> Result<Peak> {
    let bytes_per_s = copied_bytes_per_s(device, SMALL_COPY_BYTES)?;
    Ok(Peak { flops_per_s: product_flops_per_s(device, dtype)?, bytes_per_s })
}

/// Bytes per second that each rank sends in a sum over all of them, while all send; none where a rank is alone. All ranks call
/// it together.
pub fn sent_bytes_per_s(world: &World) -> Result<Option<f64>, CommError> {
    let group = world.group();
    if group.size() == 1 {
        return Ok(None);
    }
    let mut values = vec![1.0f32; EXCHANGED_BYTES / DType::F32.size_bytes()];
    let mut best_s = f64::INFINITY;
    for _ in 0..EXCHANGES {
        group.barrier()?;
        let start = Instant::now();
        group.all_reduce(&mut values, ReduceOp::Avg)?;
        best_s = best_s.min(start.elapsed().as_secs_f64());
    }
    let mut slowest = [best_s];
    group.all_reduce(&mut slowest, ReduceOp::Max)?;
    let ranks = group.size() as f64;
    Ok(Some(2.0 * (ranks - 1.0) / ranks * EXCHANGED_BYTES as f64 / slowest[0].max(f64::MIN_POSITIVE)))
}

/// Floating-point operations per second of a product.
pub fn product_flops_per_s(device: &Device, dtype: DType) -> Result<f64> {
    let size = if device.backend().is_host() { CPU_SIZE } else { GPU_SIZE };
    // Zeros would do, but some processors are faster on them.
    let values: Vec<f32> = (0..size * size).map(|index| ((index * 31) % 17) as f32 * 0.1 - 0.8).collect();
    let matrix = || Tensor::from_f32(&values, [size, size], dtype, device);
    let (a, b) = (matrix()?, matrix()?);
    let mut out = Tensor::empty([size, size], dtype, device)?;
    let best_s = best_seconds(device, || {
        let (a, b) = (Matrix::whole(&a), Matrix::whole(&b));
        device.backend().gemm(Gemm::plain(size, size, size, a, b, out.out()?))
    })?;
    Ok(2.0 * (size as f64).powi(3) / best_s)
}

/// Bytes per second that a copy reads and writes.
fn copied_bytes_per_s(device: &Device, bytes: usize) -> Result<f64> {
    let numel = bytes / DType::F32.size_bytes();
    let (from, mut to) =
        (Tensor::zeros([numel], DType::F32, device)?, Tensor::zeros([numel], DType::F32, device)?);
    let best_s = best_seconds(device, || device.backend().copy(&from, to.out()?))?;
    Ok(2.0 * bytes as f64 / best_s)
}

fn best_seconds(device: &Device, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut timed = || -> Result<f64> {
        let start = Instant::now();
        work()?;
        device.backend().synchronize()?;
        Ok(start.elapsed().as_secs_f64())
    };
    timed()?;
    let start = Instant::now();
    let mut best_s = f64::INFINITY;
    for run in 0.. {
        if run >= LEAST_RUNS && start.elapsed() >= BUDGET {
            break;
        }
        best_s = best_s.min(timed()?);
    }
    Ok(best_s.max(f64::MIN_POSITIVE))
}
