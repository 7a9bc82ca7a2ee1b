//! How fast an optimizer step moves memory, beside how fast this memory moves at all.

use std::time::Instant;

use ferrospeed_tensor::loops::ahead::ask_ahead;
use ferrospeed_tensor::loops::simd::vectorized;
use ferrospeed_tensor::{Category, DType, Device, Result, Tensor, TensorError};

use crate::adam::Adam;
use crate::stretch::{Copy16, Gradient, Stretch};
use crate::{GroupOptions, Optimizer};

/// Seconds of one pass over memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PassTimes {
    /// The fastest pass.
    pub best_s: f64,
    /// The one in the middle.
    pub median_s: f64,
}

impl PassTimes {
    fn of(mut seconds: Vec<f64>) -> PassTimes {
        seconds.sort_by(f64::total_cmp);
        PassTimes { best_s: seconds[0], median_s: seconds[seconds.len() / 2] }
    }
}

/// What was measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamSpeed {
    /// Weights updated per pass.
    pub numel: usize,
    /// The update.
    pub update: PassTimes,
    /// The plainest pass over the same buffers: every f32 scaled in place.
    pub scale: PassTimes,
}

impl AdamSpeed {
    /// Bytes that the best update read and wrote per second.
    pub fn bytes_per_s(&self) -> f64 {
        ADAM_BYTES_PER_ELEMENT * self.numel as f64 / self.update.best_s
    }

    /// Bytes that the best scaling read and wrote per second.
    pub fn memory_bytes_per_s(&self) -> f64 {
        SCALE_BYTES_PER_ELEMENT * self.numel as f64 / self.scale.best_s
    }

    /// How near the update comes to the memory's speed.
    pub fn share_of_memory_speed(&self) -> f64 {
        self.bytes_per_s() / self.memory_bytes_per_s()
    }
}

/// Weight, gradient and two moments are read; weight, moments and the bf16 copy are written.
const ADAM_BYTES_PER_ELEMENT: f64 = 4.0 * 4.0 + 3.0 * 4.0 + 2.0;
/// Weight, gradient and moments, each read and written.
const SCALE_BYTES_PER_ELEMENT: f64 = 4.0 * 2.0 * 4.0;

/// Runs AdamW with f32 gradients and a bf16 copy over `numel` weights on the device's threads, and in turn with it the
/// plain pass, `rounds` times each after one to warm up, in memory as an engine takes it. Needs 18 bytes per weight;
/// what fits the caches says nothing about memory.
pub fn adam(numel: usize, rounds: usize, device: &Device) -> Result<AdamSpeed> {
    if numel == 0 || rounds == 0 {
        return Err(TensorError::argument("bench", "it takes at least one weight and one round"));
    }
    let buffer = |value: f32, dtype: DType| {
        let mut buffer = Tensor::empty_in([numel], dtype, device, Category::Optimizer)?;
        // Every page is written once before the clock runs.
        device.backend().fill(buffer.out()?, value)?;
        Ok::<Tensor, TensorError>(buffer)
    };
    let [weights, gradient] = [buffer(0.5, DType::F32)?, buffer(0.01, DType::F32)?];
    let [first, second] = [buffer(1e-3, DType::F32)?, buffer(1e-6, DType::F32)?];
    let copy = buffer(1.0, DType::BF16)?;
    // SAFETY: the five tensors were made here and are five buffers; nobody else knows them, and each is borrowed once.
    let (weights, gradient, first, second, copy) = unsafe {
        (weights.host_mut()?, gradient.host_mut()?, first.host_mut()?, second.host_mut()?, copy.host_mut()?)
    };
    let optimizer = Optimizer::Adam(Adam { eps: 1e-8, bias_correction: true, decoupled: true });
    let options = GroupOptions { lr: 1e-3, weight_decay: 0.01, betas: [0.9, 0.999] };
    let (mut updates, mut scales) = (Vec::new(), Vec::new());
    for round in 0..=rounds {
        let began = Instant::now();
        let mut stretch = Stretch {
            weights: &mut *weights,
            gradient: Gradient::F32(gradient),
            gradient_factor: 1.0,
            states: vec![&mut *first, &mut *second],
            copy: Copy16::Bf16(&mut *copy),
            device,
        };
        stretch.apply(&optimizer.update(&options, round as u64 + 1));
        let update_s = began.elapsed().as_secs_f64();
        let began = Instant::now();
        scale_in_place([&mut *weights, &mut *gradient, &mut *first, &mut *second], device);
        if round > 0 {
            updates.push(update_s);
            scales.push(began.elapsed().as_secs_f64());
        }
    }
    Ok(AdamSpeed { numel, update: PassTimes::of(updates), scale: PassTimes::of(scales) })
}

/// What the memory gives: the same arrays as the update's, read and written side by side in the same way.
fn scale_in_place(arrays: [&mut [f32]; 4], device: &Device) {
    const BLOCK: usize = 32 * 1024;
    const LANES: usize = 64;
    let mut parts = arrays.map(|array| array.chunks_mut(BLOCK));
    let blocks: Vec<_> = std::iter::from_fn(|| {
        let [a, b, c, d] = &mut parts;
        Some(std::sync::Mutex::new([a.next()?, b.next()?, c.next()?, d.next()?]))
    })
    .collect();
    device.backend().parallel(blocks.len(), &|index| {
        let mut block = blocks[index].lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        vectorized!(|| {
            for start in (0..block[0].len()).step_by(LANES) {
                for array in block.iter_mut() {
                    ask_ahead::<f32, LANES>(array, start);
                    let end = (start + LANES).min(array.len());
                    array[start..end].iter_mut().for_each(|value| *value *= 1.000_001);
                }
            }
        });
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_adam_step_reports_a_share_of_the_memory_speed() {
        let speed = adam(1 << 20, 3, &ferrospeed_cpu::device()).unwrap();
        assert!(speed.update.best_s > 0.0 && speed.update.best_s <= speed.update.median_s);
        assert!(speed.share_of_memory_speed() > 0.0 && speed.share_of_memory_speed().is_finite());
    }
}
