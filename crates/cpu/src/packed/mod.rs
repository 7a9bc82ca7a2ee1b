//! Products with weights of few bits.
//!
//! Rows are rounded to eight bits, each block of 32 with a scale of its own, so that a block's products are whole numbers, which
//! processors multiply by the dozen. Sixteen columns go on together; what they compute, and that it is the same bits with every
//! kernel and in any company, is in `group.rs`. Many rows go through tiles, where there are such.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod group;
#[cfg(target_arch = "x86_64")]
mod tiles;
#[cfg(target_arch = "x86_64")]
mod vnni;

use ferrospeed_tensor::backend::{PackedLayer, PackedProducts};
use ferrospeed_tensor::dtype::Float;
use ferrospeed_tensor::loops::simd::vectorized;
#[cfg(target_arch = "x86_64")]
use ferrospeed_tensor::loops::simd::{Level, level};
use ferrospeed_tensor::loops::threads::Threads;
use ferrospeed_tensor::packed::{BLOCK, GROUP};
use ferrospeed_tensor::{Activation, PackedWeight, Result, Tensor};
use group::{GroupWeights, Rows, TILE_ROWS, round};

use crate::gemm::{Epilogue, Output, Part};
use crate::parallel::Shared;
use crate::{CpuBackend, float_kernel, read, write};

/// Groups of columns of a task.
const GROUPS: usize = 4;

/// `y = f(x·Wᵀ + b)`.
pub(super) fn product(
    threads: &Threads,
    x: &Tensor,
    layer: PackedLayer<'_>,
    activation: Option<Activation>,
) -> Result<()> {
    let (weight, y) = (layer.weight, layer.y);
    let bias = layer.bias.map(|bias| bias.to_vec_f32()).transpose()?;
    let epilogue = Epilogue { alpha: 1.0, accumulate: false, bias: bias.as_deref(), activation };
    let n = weight.outputs();
    float_kernel!("gemm_packed", x.dtype(), T => {
        let rows = rounded(threads, read::<T>(x), weight);
        let output = Output { c: Shared::new(write::<T>(y)), before: None, offset: 0, row_stride: n };
        threads.blocks(weight.groups(), GROUPS, |groups| {
            let mut sums = vec![0.0f32; groups.len() * rows.count * GROUP];
            let weights = groups.clone().map(|group| {
                let (lines, scales) = weight.group(group);
                GroupWeights { bits: weight.bits(), lines, scales }
            });
            multiply(&weights.collect::<Vec<_>>(), &rows, &mut sums);
            for (group, sums) in groups.zip(sums.chunks_mut((rows.count * GROUP).max(1))) {
                let columns = group * GROUP..((group + 1) * GROUP).min(n);
                epilogue.store(sums, GROUP, Part { rows: 0..rows.count, columns }, &output);
            }
        });
    })
}

/// Rows in eight bits.
fn rounded<T: Float>(threads: &Threads, x: &[T], weight: &PackedWeight) -> Rows {
    let (inputs, zero) = (weight.inputs(), weight.bits().zero());
    let mut rows = Rows::new(x.len() / inputs, inputs / BLOCK);
    let blocks = rows.blocks;
    let (values, scales, offsets) =
        (Shared::new(&mut rows.values), Shared::new(&mut rows.scales), Shared::new(&mut rows.offsets));
    threads.blocks(rows.count, TILE_ROWS, |tile| {
        let places = tile.start * blocks..tile.start * blocks + blocks * TILE_ROWS;
        // SAFETY: each task has a tile of rows of its own.
        let (values, scales, offsets) = unsafe {
            (
                values.range(places.start * BLOCK..places.end * BLOCK),
                scales.range(places.clone()),
                offsets.range(places),
            )
        };
        vectorized!(|| {
            for row in tile.clone() {
                for (block, x) in
                    x[row * inputs..(row + 1) * inputs].as_chunks::<BLOCK>().0.iter().enumerate()
                {
                    let place = block * TILE_ROWS + row - tile.start;
                    let mut wide = [0.0f32; BLOCK];
                    wide.iter_mut().zip(x).for_each(|(wide, x)| *wide = x.widen());
                    let (scale, sum) = round(&wide, &mut values[place * BLOCK..(place + 1) * BLOCK]);
                    (scales[place], offsets[place]) = (scale, -zero * sum);
                }
            }
        });
    });
    rows
}

/// All rows by the columns of some groups; `out` has, for each group, [`GROUP`] values for each row.
fn multiply(groups: &[GroupWeights<'_>], rows: &Rows, out: &mut [f32]) {
    let of_group = rows.count * GROUP;
    if of_group == 0 {
        return;
    }
    let first = in_tiles(groups, rows, out);
    if first < rows.count {
        for (weights, out) in groups.iter().zip(out.chunks_mut(of_group)) {
            multiply_from(first, weights, rows, &mut out[first * GROUP..]);
        }
    }
}

/// Multiplies the rows that tiles are good for, and says how many these are: the first ones.
fn in_tiles(groups: &[GroupWeights<'_>], rows: &Rows, out: &mut [f32]) -> usize {
    #[cfg(target_arch = "x86_64")]
    {
        let taken = tiles::taken(rows);
        let mut room = tiles::Room::default();
        if taken > 0 {
            for (groups, out) in groups.chunks(2).zip(out.chunks_mut(2 * rows.count * GROUP)) {
                // SAFETY: the processor was found to have what it needs.
                unsafe { tiles::multiply(groups, rows, taken, &mut room, out) };
            }
        }
        taken
    }
    #[cfg(not(target_arch = "x86_64"))]
    0
}

/// Rows from `first` on by sixteen columns.
fn multiply_from(first: usize, weights: &GroupWeights<'_>, rows: &Rows, out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    match level() {
        Level::Avx512 if is_x86_feature_detected!("avx512vnni") => {
            // SAFETY: the processor was found to have it.
            return unsafe { vnni::multiply(weights, rows, first, out) };
        }
        Level::Avx512 | Level::Avx2 => {
            // SAFETY: as above.
            return unsafe { avx2::multiply(weights, rows, first, out) };
        }
        Level::Portable => {}
    }
    for (row, out) in out.as_chunks_mut::<GROUP>().0.iter_mut().enumerate() {
        group::plain(weights, rows, first + row, out);
    }
}

impl PackedProducts for CpuBackend {
    fn takes_packed(&self, bits: ferrospeed_tensor::packed::PackedBits) -> bool {
        bits != ferrospeed_tensor::packed::PackedBits::Float8
    }

    fn gemm_packed(
        &self,
        x: &Tensor,
        layers: Vec<PackedLayer<'_>>,
        activation: Option<Activation>,
    ) -> Result<bool> {
        if layers.iter().any(|layer| !self.takes_packed(layer.weight.bits())) {
            return Ok(false);
        }
        layers.into_iter().try_for_each(|layer| product(&self.threads, x, layer, activation))?;
        Ok(true)
    }
}
