//! Sixteen columns with AVX-512 and its products of bytes (VNNI): a line is read once for several rows.

use std::arch::x86_64::*;

use ferrospeed_tensor::PackedBits;
use ferrospeed_tensor::packed::{BLOCK, GROUP, LINE};

use super::group::{GroupWeights, Rows, TILE_ROWS};

/// Rows that share a line, at most.
const MOST_ROWS: usize = 8;
/// How far ahead weights are asked for.
const AHEAD_BYTES: usize = 3072;

/// Rows from `start`, the first of a tile, on by sixteen columns; `out` has [`GROUP`] values for each row.
///
/// # Safety
/// The processor has AVX-512 (F, BW, VL) and VNNI.
pub(super) unsafe fn multiply(weights: &GroupWeights<'_>, rows: &Rows, start: usize, out: &mut [f32]) {
    type Kernel = unsafe fn(&GroupWeights<'_>, &Rows, usize, &mut [f32]);
    macro_rules! kernels {
        ($four:literal) => {
            [
                block::<1, $four>,
                block::<2, $four>,
                block::<3, $four>,
                block::<4, $four>,
                block::<5, $four>,
                block::<6, $four>,
                block::<7, $four>,
                block::<8, $four>,
            ]
        };
    }
    const KERNELS: [[Kernel; MOST_ROWS]; 2] = [kernels!(false), kernels!(true)];
    let kernels = &KERNELS[usize::from(weights.bits == PackedBits::Four)];
    for (index, out) in out.chunks_mut(MOST_ROWS * GROUP).enumerate() {
        // SAFETY: passed on to the caller.
        unsafe { kernels[out.len() / GROUP - 1](weights, rows, start + index * MOST_ROWS, out) };
    }
}

/// Rows `first..first + ROWS`, which lie in one tile.
///
/// # Safety
/// As [`multiply`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn block<const ROWS: usize, const FOUR: bool>(
    weights: &GroupWeights<'_>,
    rows: &Rows,
    first: usize,
    out: &mut [f32],
) {
    let (blocks, lines) = (weights.blocks(), weights.bits.lines());
    assert!(FOUR == (weights.bits == PackedBits::Four) && out.len() == ROWS * GROUP);
    assert!(weights.lines.len() == blocks * lines * LINE && rows.blocks == blocks);
    assert!(first % TILE_ROWS + ROWS <= TILE_ROWS && first + ROWS <= rows.count);
    let start = rows.place(first, 0);
    let x = rows.values[start * BLOCK..].as_ptr();
    let (x_scales, offsets) = (rows.scales[start..].as_ptr(), rows.offsets[start..].as_ptr());
    let mut totals = [_mm512_setzero_ps(); ROWS];
    let nibble = _mm512_set1_epi8(15);
    for block in 0..blocks {
        // SAFETY: rows hold `blocks` blocks from `start` on, [`TILE_ROWS`] apart, and weights as many, as was asserted; asking
        // for memory touches nothing.
        unsafe {
            let place = block * TILE_ROWS;
            let line = weights.lines.as_ptr().add(block * lines * LINE);
            let mut sums = [_mm512_setzero_si512(); ROWS];
            for (row, sum) in sums.iter_mut().enumerate() {
                *sum = _mm512_set1_epi32(*offsets.add(place + row));
            }
            let mut add = |values: __m512i, four: usize| {
                for (row, sum) in sums.iter_mut().enumerate() {
                    let four = x.add((place + row) * BLOCK + 4 * four).cast::<i32>().read_unaligned();
                    *sum = _mm512_dpbusd_epi32(*sum, values, _mm512_set1_epi32(four));
                }
            };
            for four in 0..lines {
                let line = line.add(four * LINE);
                _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(AHEAD_BYTES).cast());
                let values = _mm512_loadu_si512(line.cast());
                if FOUR {
                    add(_mm512_and_si512(values, nibble), four);
                    add(_mm512_and_si512(_mm512_srli_epi16::<4>(values), nibble), four + lines);
                } else {
                    add(values, four);
                }
            }
            let scales = weights.scales.as_ptr().add(block * GROUP);
            let scales = _mm512_cvtph_ps(_mm256_loadu_si256(scales.cast()));
            for (row, total) in totals.iter_mut().enumerate() {
                let scale = _mm512_mul_ps(scales, _mm512_set1_ps(*x_scales.add(place + row)));
                *total = _mm512_add_ps(*total, _mm512_mul_ps(_mm512_cvtepi32_ps(sums[row]), scale));
            }
        }
    }
    for (out, total) in out.chunks_mut(GROUP).zip(totals) {
        // SAFETY: sixteen values.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), total) };
    }
}
