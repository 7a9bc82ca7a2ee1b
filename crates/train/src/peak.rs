//! What the ranks could compute at most: the yardstick for what they do.
//!
//! A square matrix product in the run's own type, on every rank at once, for a few hundredths of a second; the best of
//! its runs counts. It is measured and not looked up, so it holds for this machine, its clock and its number of ranks; a
//! machine that is busy with something else at that moment shows a lower peak, and the run a higher share of it.

use std::time::{Duration, Instant};

use ferrospeed_comm::ReduceOp;
use ferrospeed_engine::Engine;
use ferrospeed_tensor::Tensor;
use ferrospeed_tensor::backend::{Gemm, Matrix};

use crate::error::Result;

/// How long the product is repeated.
const BUDGET: Duration = Duration::from_millis(60);
const LEAST_RUNS: u32 = 3;
/// Short enough to be done many times within the budget: on a busy machine only the best says what is possible.
const CPU_SIZE: usize = 512;
const GPU_SIZE: usize = 4096;

/// Floating-point operations per second of all ranks together. All ranks call it together.
pub(crate) fn measure(engine: &Engine) -> Result<f64> {
    let device = engine.device();
    let size = if device.backend().is_host() { CPU_SIZE } else { GPU_SIZE };
    let dtype = engine.store().dtype();
    // Zeros would do, but some processors are faster on them.
    let values: Vec<f32> = (0..size * size).map(|index| ((index * 31) % 17) as f32 * 0.1 - 0.8).collect();
    let (a, b) = (
        Tensor::from_f32(&values, [size, size], dtype, device)?,
        Tensor::from_f32(&values, [size, size], dtype, device)?,
    );
    let out = Tensor::empty([size, size], dtype, device)?;
    let product = || -> Result<f64> {
        let start = Instant::now();
        device.backend().gemm(&Gemm::plain(size, size, size, Matrix::whole(&a), Matrix::whole(&b), &out))?;
        device.backend().synchronize()?;
        Ok(start.elapsed().as_secs_f64())
    };
    engine.world().group().barrier()?;
    product()?;
    let start = Instant::now();
    let mut best_s = f64::INFINITY;
    for run in 0.. {
        if run >= LEAST_RUNS && start.elapsed() >= BUDGET {
            break;
        }
        best_s = best_s.min(product()?);
    }
    let mut flops_per_s = [2.0 * (size as f64).powi(3) / best_s];
    engine.world().group().all_reduce(&mut flops_per_s, ReduceOp::Sum)?;
    Ok(flops_per_s[0])
}
