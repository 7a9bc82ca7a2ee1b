//! Sixteen columns of a product with few bits: what kernels are given, and the plain one that says what they compute.
//!
//! Weights lie in lines of 64 bytes: four neighbours along the inputs for each of sixteen columns, so that a line is what one
//! instruction multiplies by four values of a row. Values are unsigned, above `PackedBits::zero`; rows are whole numbers of
//! eight bits with a scale for each block. The sum of a block is exact; blocks are added in order, in f32, without fused
//! operations. So every kernel gives the same bits, for any number of rows.

use ferrospeed_tensor::PackedBits;
use ferrospeed_tensor::packed::{BLOCK, GROUP, LINE};
use half::f16;

use crate::aligned::Aligned;

/// Rows that lie together.
pub(super) const TILE_ROWS: usize = 16;

/// Sixteen columns of a weight.
#[derive(Clone, Copy)]
pub(super) struct GroupWeights<'a> {
    pub(super) bits: PackedBits,
    /// Line by line.
    pub(super) lines: &'a [u8],
    /// Sixteen for each block.
    pub(super) scales: &'a [f16],
}

impl GroupWeights<'_> {
    pub(super) fn blocks(&self) -> usize {
        self.scales.len() / GROUP
    }

    /// The value, for a block of columns, of four neighbours along the inputs, as a line of bytes.
    #[inline(always)]
    fn line(&self, block: usize, four: usize) -> [u8; LINE] {
        let lines = self.bits.lines();
        let start = (block * lines + four % lines) * LINE;
        let mut line = [0; LINE];
        line.copy_from_slice(&self.lines[start..start + LINE]);
        match self.bits {
            PackedBits::Eight | PackedBits::Float8 => line,
            PackedBits::Four if four < lines => line.map(|byte| byte & 15),
            PackedBits::Four => line.map(|byte| byte >> 4),
        }
    }
}

/// Rows in eight bits: tiles of [`TILE_ROWS`] rows, block by block.
pub(super) struct Rows {
    pub(super) count: usize,
    pub(super) blocks: usize,
    /// `[tile][block][row][32]`.
    pub(super) values: Aligned<i8>,
    /// `[tile][block][row]`.
    pub(super) scales: Vec<f32>,
    /// What the values of a block add up to, times what stands for a weight of zero, taken from nothing: `[tile][block][row]`.
    pub(super) offsets: Vec<i32>,
}

impl Rows {
    pub(super) fn new(count: usize, blocks: usize) -> Rows {
        let all = count.next_multiple_of(TILE_ROWS) * blocks;
        let mut values = Aligned::default();
        values.resize(all * BLOCK);
        Rows { count, blocks, values, scales: vec![0.0; all], offsets: vec![0; all] }
    }

    /// The place of a row's block among scales and offsets.
    #[inline(always)]
    pub(super) fn place(&self, row: usize, block: usize) -> usize {
        (row / TILE_ROWS * self.blocks + block) * TILE_ROWS + row % TILE_ROWS
    }
}

/// Rounds a block to eight bits; gives its scale and the sum of its values. What is not finite makes the scale so too.
#[inline(always)]
pub(super) fn round(block: &[f32; BLOCK], values: &mut [i8]) -> (f32, i32) {
    let mut largest = 0.0f32;
    let mut finite = true;
    for value in block {
        let magnitude = value.abs();
        largest = if magnitude > largest { magnitude } else { largest };
        finite &= magnitude < f32::INFINITY;
    }
    let inverse = if largest > 0.0 && finite { 127.0 / largest } else { 0.0 };
    let mut sum = 0;
    for (value, x) in values.iter_mut().zip(block) {
        let steps = (x * inverse).clamp(-127.0, 127.0);
        // Adding and taking away this rounds to the nearest whole number, ties to even, without a call.
        const WHOLE: f32 = 12_582_912.0;
        *value = ((steps + WHOLE) - WHOLE) as i8;
        sum += i32::from(*value);
    }
    (if finite { largest / 127.0 } else { f32::NAN }, sum)
}

/// One row by sixteen columns, plainly.
#[inline(always)]
pub(super) fn plain(weights: &GroupWeights<'_>, rows: &Rows, row: usize, out: &mut [f32; GROUP]) {
    *out = [0.0; GROUP];
    for block in 0..weights.blocks() {
        let place = rows.place(row, block);
        let values = &rows.values[place * BLOCK..(place + 1) * BLOCK];
        let mut sums = [rows.offsets[place]; GROUP];
        for four in 0..BLOCK / 4 {
            let line = weights.line(block, four);
            for (column, sum) in sums.iter_mut().enumerate() {
                for i in 0..4 {
                    *sum += i32::from(line[4 * column + i]) * i32::from(values[4 * four + i]);
                }
            }
        }
        let scales = &weights.scales[block * GROUP..(block + 1) * GROUP];
        for column in 0..GROUP {
            out[column] += sums[column] as f32 * (scale(scales[column]) * rows.scales[place]);
        }
    }
}

/// A finite scale in full, without a call: the exponent is moved by a multiplication, which is exact.
#[inline(always)]
pub(super) fn scale(scale: f16) -> f32 {
    let bits = u32::from(scale.to_bits());
    let magnitude = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
    f32::from_bits(magnitude.to_bits() | (bits & 0x8000) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_are_widened_exactly() {
        for bits in (0..=u16::MAX).filter(|bits| bits & 0x7c00 != 0x7c00) {
            let half = f16::from_bits(bits);
            assert_eq!(scale(half).to_bits(), half.to_f32().to_bits(), "{half}");
        }
    }

    #[test]
    fn a_block_is_rounded_to_whole_steps_and_what_is_not_finite_is_told() {
        let mut block = [0.0f32; BLOCK];
        let mut values = [0i8; BLOCK];
        assert_eq!(round(&block, &mut values), (0.0, 0));
        (block[0], block[1], block[2]) = (-2.0, 1.0, 2.0 / 127.0);
        let (step, sum) = round(&block, &mut values);
        assert_eq!((step, values[0], values[1], values[2], sum), (2.0 / 127.0, -127, 64, 1, -62));
        block[5] = f32::INFINITY;
        assert!(round(&block, &mut values).0.is_nan());
        block[5] = f32::NAN;
        assert!(round(&block, &mut values).0.is_nan());
    }
}
