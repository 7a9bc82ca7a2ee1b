//! How fast an optimizer step moves memory, beside how fast this memory moves at all.

use std::time::{Duration, Instant};

use ferrospeed_tensor::Device;
use ferrospeed_tensor::cpu::simd::vectorized;
use half::bf16;

use crate::adam::Adam;
use crate::stretch::{Copy16, Gradient, Stretch};
use crate::{GroupOptions, Optimizer};

/// What was measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamSpeed {
    /// Weights updated per pass.
    pub numel: usize,
    /// Time per weight.
    pub ns_per_element: f64,
    /// Bytes the update reads and writes per second.
    pub bytes_per_s: f64,
    /// Bytes per second of the plainest pass over the same buffers: every f32 scaled in place.
    pub memory_bytes_per_s: f64,
}

impl AdamSpeed {
    /// How near the update comes to the memory's speed.
    pub fn share_of_memory_speed(&self) -> f64 {
        self.bytes_per_s / self.memory_bytes_per_s
    }
}

/// Weight, gradient and two moments are read; weight, moments and the bf16 copy are written.
const ADAM_BYTES_PER_ELEMENT: f64 = 4.0 * 4.0 + 3.0 * 4.0 + 2.0;
/// Weight, gradient and moments, each read and written.
const SCALE_BYTES_PER_ELEMENT: f64 = 4.0 * 2.0 * 4.0;
const ROUNDS: u32 = 5;

fn best(mut round: impl FnMut()) -> Duration {
    round();
    (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            round();
            start.elapsed()
        })
        .min()
        .unwrap_or(Duration::MAX)
}

/// Runs AdamW with f32 gradients and a bf16 copy over `numel` weights on the device's threads. Needs 18 bytes each;
/// what fits the caches says nothing about memory.
pub fn adam(numel: usize, device: &Device) -> AdamSpeed {
    let numel = numel.max(1);
    let mut gradient = vec![0.01f32; numel];
    let mut weights = vec![0.5f32; numel];
    let mut moments = [vec![0.0f32; numel], vec![0.0f32; numel]];
    let mut copy = vec![bf16::ZERO; numel];
    let optimizer = Optimizer::Adam(Adam { eps: 1e-8, bias_correction: true, decoupled: true });
    let options = GroupOptions { lr: 1e-3, weight_decay: 0.01, betas: [0.9, 0.999] };
    let mut step = 0;
    let update = best(|| {
        step += 1;
        let mut stretch = Stretch {
            weights: &mut weights,
            gradient: Gradient::F32(&gradient),
            gradient_factor: 1.0,
            states: moments.iter_mut().map(Vec::as_mut_slice).collect(),
            copy: Copy16::Bf16(&mut copy),
            device,
        };
        stretch.apply(&optimizer.update(&options, step));
    });
    let [first, second] = &mut moments;
    let scale = best(|| {
        for buffer in [&mut weights, &mut gradient, &mut *first, &mut *second] {
            scale_in_place(buffer, device);
        }
    });
    AdamSpeed {
        numel,
        ns_per_element: update.as_secs_f64() * 1e9 / numel as f64,
        bytes_per_s: ADAM_BYTES_PER_ELEMENT * numel as f64 / update.as_secs_f64(),
        memory_bytes_per_s: SCALE_BYTES_PER_ELEMENT * numel as f64 / scale.as_secs_f64(),
    }
}

fn scale_in_place(values: &mut [f32], device: &Device) {
    let blocks: Vec<_> = values.chunks_mut(256 * 1024).map(std::sync::Mutex::new).collect();
    device.backend().parallel(blocks.len(), &|index| {
        let mut block = blocks[index].lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        vectorized!(|| block.iter_mut().for_each(|value| *value *= 1.000_001));
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_adam_step_reports_a_share_of_the_memory_speed() {
        let speed = adam(1 << 20, &Device::cpu());
        eprintln!("{speed:?}, {:.0} % of the memory's speed", 100.0 * speed.share_of_memory_speed());
        assert!(speed.bytes_per_s > 0.0 && speed.memory_bytes_per_s.is_finite());
    }
}
