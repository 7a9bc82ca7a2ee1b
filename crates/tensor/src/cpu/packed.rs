//! Products with weights of few bits.
//!
//! A block's bytes are widened in registers and multiplied by several rows; its scale multiplies the block's sums. Rows never
//! know of each other: each element is summed block by block over the same lanes, however many rows there are.

use half::f16;

use crate::backend::Activation;
use crate::cpu::gemm::{Epilogue, Output};
use crate::cpu::parallel::{Shared, Threads};
use crate::cpu::simd::{LANES, fold, vectorized};
use crate::cpu::{float_kernel, read, write};
use crate::dtype::Float;
use crate::error::Result;
use crate::packed::{BLOCK, PackedBits, PackedWeight};
use crate::tensor::Tensor;

/// Rows that share a block in registers.
const ROWS: usize = 4;
/// Rows that go by while some columns stay in the cache.
const ROW_BLOCK: usize = 32;
/// Columns of a task.
const COLUMNS: usize = 32;

/// `y = f(x·Wᵀ + b)`.
pub(super) fn product(
    threads: &Threads,
    x: &Tensor,
    weight: &PackedWeight,
    bias: Option<&Tensor>,
    activation: Option<Activation>,
    y: &Tensor,
) -> Result<()> {
    let bias = bias.map(|bias| bias.to_vec_f32()).transpose()?;
    let epilogue = Epilogue { alpha: 1.0, accumulate: false, bias: bias.as_deref(), activation };
    let (n, k) = (weight.outputs(), weight.inputs());
    float_kernel!("gemm_packed", x.dtype(), T => {
        let rows: Vec<f32> = read::<T>(x).iter().map(|value| value.widen()).collect();
        let m = rows.len() / k;
        let output = Output { c: Shared::new(write::<T>(y)), before: None, offset: 0, row_stride: n };
        threads.blocks(n, COLUMNS, |columns| {
            let mut sums = [0.0f32; ROW_BLOCK * COLUMNS];
            for first in (0..m).step_by(ROW_BLOCK) {
                let height = ROW_BLOCK.min(m - first);
                let block = &rows[first * k..(first + height) * k];
                for (place, column) in columns.clone().enumerate() {
                    let (values, scales) = weight.row(column);
                    match weight.bits() {
                        PackedBits::Eight => vectorized!(|| lines(block, k, values, scales, eight, place, &mut sums)),
                        PackedBits::Four => vectorized!(|| lines(block, k, values, scales, four, place, &mut sums)),
                    }
                }
                for (row, sums) in sums.chunks_mut(COLUMNS).take(height).enumerate() {
                    // SAFETY: these columns belong to this task alone.
                    let (c, before) = unsafe { output.row(first + row, columns.clone()) };
                    vectorized!(|| epilogue.store(&mut sums[..columns.len()], columns.start, c, before));
                }
            }
        });
    })
}

/// One column of some rows.
#[inline(always)]
fn lines<const BYTES: usize>(
    block: &[f32],
    k: usize,
    values: &[u8],
    scales: &[f16],
    widen: impl Fn(&[u8; BYTES]) -> [[f32; LANES]; 2] + Copy,
    place: usize,
    sums: &mut [f32],
) {
    let values = values.as_chunks::<BYTES>().0;
    let count = block.len() / k;
    let row = |index: usize| block[index * k..(index + 1) * k].as_chunks::<BLOCK>().0;
    let whole = count / ROWS * ROWS;
    for first in (0..whole).step_by(ROWS) {
        let rows: [&[[f32; BLOCK]]; ROWS] = std::array::from_fn(|i| row(first + i));
        for (i, sum) in dots(&rows, values, scales, widen).into_iter().enumerate() {
            sums[(first + i) * COLUMNS + place] = sum;
        }
    }
    for index in whole..count {
        [sums[index * COLUMNS + place]] = dots(&[row(index)], values, scales, widen);
    }
}

#[inline(always)]
fn dots<const R: usize, const BYTES: usize>(
    rows: &[&[[f32; BLOCK]]; R],
    values: &[[u8; BYTES]],
    scales: &[f16],
    widen: impl Fn(&[u8; BYTES]) -> [[f32; LANES]; 2],
) -> [f32; R] {
    let mut lanes = [[0.0f32; LANES]; R];
    let blocks = values.len();
    // Cut to one length that the loop shares, so that it needs no checks.
    let (rows, scales) = (rows.map(|row| &row[..blocks]), &scales[..blocks]);
    for block in 0..blocks {
        let [low, high] = widen(&values[block]);
        let scale = scale(scales[block]);
        for row in 0..R {
            let x = &rows[row][block];
            for lane in 0..LANES {
                lanes[row][lane] += (x[lane] * low[lane] + x[lane + LANES] * high[lane]) * scale;
            }
        }
    }
    lanes.map(|lanes| fold(lanes, |a, b| a + b))
}

#[inline(always)]
fn eight(values: &[u8; BLOCK]) -> [[f32; LANES]; 2] {
    let mut wide = [[0.0f32; LANES]; 2];
    for lane in 0..LANES {
        wide[0][lane] = f32::from(values[lane] as i8);
        wide[1][lane] = f32::from(values[lane + LANES] as i8);
    }
    wide
}

#[inline(always)]
fn four(values: &[u8; BLOCK / 2]) -> [[f32; LANES]; 2] {
    let mut wide = [[0.0f32; LANES]; 2];
    for lane in 0..LANES {
        wide[0][lane] = (i32::from(values[lane] & 15) - 8) as f32;
        wide[1][lane] = (i32::from(values[lane] >> 4) - 8) as f32;
    }
    wide
}

/// A finite scale in full, without a call: the exponent is moved by a multiplication, which is exact.
#[inline(always)]
fn scale(scale: f16) -> f32 {
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
}
