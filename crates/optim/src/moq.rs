//! Mixture-of-quantization training: weights are rounded to fewer and fewer bits while training goes on.
//!
//! [`BitSchedule`] says how many bits a step has, [`quantize`] rounds values to them and back ("fake quantisation").

use crate::error::{OptimError, Result};

/// How values are laid on a grid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Grid {
    /// Around zero.
    Symmetric,
    /// From the smallest to the largest value; 3 bits at least.
    Asymmetric,
}

/// Rounds each of `groups` equal groups of values to `bits` bits, ties to even, and back. One bit keeps signs, two bits
/// keep signs and zero; both are symmetric.
pub fn quantize(values: &mut [f32], bits: u32, grid: Grid, groups: usize) -> Result<()> {
    let refuse = |what, value: String, why| Err(OptimError::Value { what, value, why });
    if !(1..=16).contains(&bits) {
        return refuse("the number of bits", bits.to_string(), "it lies in 1 to 16");
    }
    if bits < 3 && grid == Grid::Asymmetric {
        return refuse("the number of bits", bits.to_string(), "asymmetric quantisation needs 3 at least");
    }
    if groups == 0 || !values.len().is_multiple_of(groups) {
        return refuse("the number of groups", groups.to_string(), "it divides the number of values");
    }
    for group in values.chunks_mut((values.len() / groups).max(1)) {
        match (bits, grid) {
            (1, _) => binary(group),
            (2, _) => ternary(group),
            (_, Grid::Symmetric) => symmetric(group, bits),
            (_, Grid::Asymmetric) => asymmetric(group, bits),
        }
    }
    Ok(())
}

fn mean_magnitude(values: impl Iterator<Item = f32>) -> f32 {
    let (sum, count) = values.fold((0.0f32, 0u32), |(sum, count), value| (sum + value.abs(), count + 1));
    if count == 0 { 0.0 } else { sum / count as f32 }
}

fn binary(group: &mut [f32]) {
    let size = mean_magnitude(group.iter().copied());
    for value in group {
        *value = if *value == 0.0 { 0.0 } else { size.copysign(*value) };
    }
}

fn ternary(group: &mut [f32]) {
    let threshold = 0.7 * mean_magnitude(group.iter().copied());
    let size = mean_magnitude(group.iter().copied().filter(|value| value.abs() > threshold));
    for value in group {
        *value = if value.abs() > threshold { size.copysign(*value) } else { 0.0 };
    }
}

fn symmetric(group: &mut [f32], bits: u32) {
    let largest = group.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    let step = 2.0 * largest / 2f32.powi(bits as i32);
    if step == 0.0 {
        return;
    }
    let half = 2f32.powi(bits as i32 - 1);
    for value in group {
        *value = (*value / step).round_ties_even().clamp(-half, half - 1.0) * step;
    }
}

fn asymmetric(group: &mut [f32], bits: u32) {
    let (min, max) = group
        .iter()
        .fold((f32::INFINITY, f32::NEG_INFINITY), |(min, max), &value| (min.min(value), max.max(value)));
    let levels = 2f32.powi(bits as i32);
    let step = (max - min) / levels;
    if step == 0.0 || !step.is_finite() {
        return;
    }
    let zero = (min / step).round_ties_even() * step;
    for value in group {
        *value = ((*value - zero) / step).round_ties_even().clamp(0.0, levels - 1.0) * step + zero;
    }
}

/// How the bits of one parameter fall.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BitSchedule {
    /// Bits now.
    pub bits: u32,
    /// Bits in the end.
    pub target: u32,
    /// The step at which the next bit goes; it doubles each time.
    pub period: u64,
    /// How much of the unrounded value is mixed in, from 1 to 0; fixed at 1 without mixing.
    pub ratio: f64,
    /// How much that falls per step, where values are mixed.
    pub mixing: Option<f64>,
    steps: u64,
}

impl BitSchedule {
    /// From `start` bits to `target`, the first one less after `period` steps. Refuses to start below the target.
    pub fn new(start: u32, target: u32, period: u64, mixing: Option<f64>) -> Result<BitSchedule> {
        if start < target {
            return Err(OptimError::Value {
                what: "start_bits",
                value: start.to_string(),
                why: "quantisation goes down to target_bits, it cannot start below",
            });
        }
        Ok(BitSchedule { bits: start, target, period, ratio: 1.0, mixing, steps: 0 })
    }

    /// An optimizer step. Parameters whose loss bends more wait longer: `eigenvalue` is theirs, from 0 to 1.
    pub fn step(&mut self, eigenvalue: Option<f64>) {
        self.steps += 1;
        if let Some(change) = self.mixing {
            self.ratio = (self.ratio - change).max(0.0);
        }
        if self.bits > self.target && self.steps >= self.period {
            let factor = eigenvalue.map_or(1, |eigenvalue| 1 + (4.0 * eigenvalue).floor().max(0.0) as u64);
            self.ratio = 1.0;
            self.period = self.period.saturating_mul(2).saturating_mul(factor);
            self.bits -= 1;
        }
    }

    /// Rounds values to the bits of now, with as much of the unrounded ones mixed in as [`BitSchedule::ratio`] says.
    pub fn quantize(&self, values: &mut [f32], grid: Grid, groups: usize) -> Result<()> {
        let Some(_) = self.mixing else { return quantize(values, self.bits, grid, groups) };
        let before = values.to_vec();
        quantize(values, self.bits, grid, groups)?;
        let kept = self.ratio as f32;
        for (value, before) in values.iter_mut().zip(before) {
            *value = kept * before + (1.0 - kept) * *value;
        }
        Ok(())
    }
}
