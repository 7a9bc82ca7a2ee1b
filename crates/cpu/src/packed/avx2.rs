//! Sixteen columns with AVX2: products of bytes in pairs, which saturate; no weight and value are so large that they do.

use std::arch::x86_64::*;

use ferrospeed_tensor::PackedBits;
use ferrospeed_tensor::packed::{BLOCK, GROUP, LINE};

use super::group::{GroupWeights, Rows, TILE_ROWS, scale};

/// Rows that share a line, at most.
const MOST_ROWS: usize = 2;

/// Rows from `start`, the first of a tile, on by sixteen columns; `out` has [`GROUP`] values for each row.
///
/// # Safety
/// The processor has AVX2.
pub(super) unsafe fn multiply(weights: &GroupWeights<'_>, rows: &Rows, start: usize, out: &mut [f32]) {
    for (index, out) in out.chunks_mut(MOST_ROWS * GROUP).enumerate() {
        let first = start + index * MOST_ROWS;
        // SAFETY: passed on to the caller.
        unsafe {
            match (out.len() / GROUP, weights.bits) {
                (1, PackedBits::Four) => block::<1, true>(weights, rows, first, out),
                (1, _) => block::<1, false>(weights, rows, first, out),
                (_, PackedBits::Four) => block::<2, true>(weights, rows, first, out),
                (_, _) => block::<2, false>(weights, rows, first, out),
            }
        }
    }
}

/// Rows `first..first + ROWS`, which lie in one tile.
///
/// # Safety
/// As [`multiply`].
#[target_feature(enable = "avx2")]
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
    let (nibble, zero, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi8(-128), _mm256_set1_epi16(1));
    let mut totals = [[_mm256_setzero_ps(); 2]; ROWS];
    for block in 0..blocks {
        let place = block * TILE_ROWS;
        // SAFETY: rows hold `blocks` blocks from `start` on, [`TILE_ROWS`] apart, and weights as many, as was asserted.
        unsafe {
            let line = weights.lines.as_ptr().add(block * lines * LINE);
            let mut sums = [[_mm256_setzero_si256(); 2]; ROWS];
            for four in 0..BLOCK / 4 {
                for half in 0..2 {
                    let values = _mm256_loadu_si256(line.add(four % lines * LINE + 32 * half).cast());
                    for (row, sums) in sums.iter_mut().enumerate() {
                        let x = x.add((place + row) * BLOCK + 4 * four).cast::<i32>().read_unaligned();
                        let x = _mm256_set1_epi32(x);
                        sums[half] = if FOUR {
                            // Eight pairs of at most 15 · 127 stay below 2¹⁵.
                            let shifted = if four < lines { values } else { _mm256_srli_epi16::<4>(values) };
                            let values = _mm256_and_si256(shifted, nibble);
                            _mm256_add_epi16(sums[half], _mm256_maddubs_epi16(values, x))
                        } else {
                            // The weight's sign goes to the other factor: 128 · 127 twice stays below 2¹⁵.
                            let signed = _mm256_xor_si256(values, zero);
                            let pairs =
                                _mm256_maddubs_epi16(_mm256_abs_epi8(signed), _mm256_sign_epi8(x, signed));
                            _mm256_add_epi32(sums[half], _mm256_madd_epi16(pairs, ones))
                        };
                    }
                }
            }
            let mut scales = [0.0f32; GROUP];
            for (wide, narrow) in scales.iter_mut().zip(&weights.scales[block * GROUP..(block + 1) * GROUP]) {
                *wide = scale(*narrow);
            }
            for (row, totals) in totals.iter_mut().enumerate() {
                let x_scale = _mm256_set1_ps(rows.scales[start + place + row]);
                // Signed weights need no offset.
                let offset = _mm256_set1_epi32(if FOUR { rows.offsets[start + place + row] } else { 0 });
                for (half, total) in totals.iter_mut().enumerate() {
                    let sum = sums[row][half];
                    let sum = if FOUR { _mm256_madd_epi16(sum, ones) } else { sum };
                    let sum = _mm256_cvtepi32_ps(_mm256_add_epi32(sum, offset));
                    let scale = _mm256_mul_ps(_mm256_loadu_ps(scales.as_ptr().add(8 * half)), x_scale);
                    *total = _mm256_add_ps(*total, _mm256_mul_ps(sum, scale));
                }
            }
        }
    }
    for (out, totals) in out.chunks_mut(GROUP).zip(totals) {
        // SAFETY: sixteen values.
        unsafe {
            _mm256_storeu_ps(out.as_mut_ptr(), totals[0]);
            _mm256_storeu_ps(out.as_mut_ptr().add(8), totals[1]);
        }
    }
}
