//! Bringing operands into tiles with AVX-512.
//!
//! A packed operand is a row of pairs of tiles along `k`: for each depth of 32, a tile for the first 16 rows (or
//! columns) of the block and one for the second. Whatever lies outside the matrix is zero.

use std::arch::x86_64::*;

use ferrospeed_tensor::dtype::Element;
use half::bf16;

use super::{BLOCK, DEPTH, PAIR, TILE};
use crate::avx512::transposed;
use crate::gemm::Operand;

/// What tiles multiply: bf16 values as they are, or f32 values in pieces.
pub(crate) trait Factor: Element {
    /// bf16 values that stand for one.
    const PIECES: usize;

    /// Packs rows `row..row + 32` (zeros from `end` on), `span` of `k`, of a left operand. Says whether tiles can stand for
    /// all of these values; if not, what is packed means nothing.
    fn pack_left(
        a: &Operand<'_, Self>,
        span: [usize; 2],
        row: usize,
        end: usize,
        packed: &mut [bf16],
    ) -> bool;

    /// Packs columns `column..column + 32` (zeros from `end` on), `span` of `k`, of a right operand, and says the same.
    fn pack_right(
        b: &Operand<'_, Self>,
        span: [usize; 2],
        column: usize,
        end: usize,
        packed: &mut [bf16],
    ) -> bool;
}

impl Factor for bf16 {
    const PIECES: usize = 1;

    fn pack_left(
        a: &Operand<'_, bf16>,
        span: [usize; 2],
        row: usize,
        end: usize,
        packed: &mut [bf16],
    ) -> bool {
        check(a, row, end, span, packed, |a, row, k| a.index(row, k));
        // SAFETY: only called where AMX is, which implies AVX-512; `check` has proved the bounds.
        unsafe {
            if a.column_stride == 1 {
                pack_in_order(a.elements, a.row_stride, span, row, end, packed);
            } else {
                pack_pairs(a.elements, a.column_stride, span, row, end, true, packed);
            }
        }
        true
    }

    fn pack_right(
        b: &Operand<'_, bf16>,
        span: [usize; 2],
        column: usize,
        end: usize,
        packed: &mut [bf16],
    ) -> bool {
        check(b, column, end, span, packed, |b, column, k| b.index(k, column));
        // SAFETY: as above.
        unsafe {
            if b.column_stride == 1 {
                pack_pairs(b.elements, b.row_stride, span, column, end, false, packed);
            } else {
                pack_turned(b.elements, b.column_stride, span, column, end, packed);
            }
        }
        true
    }
}

/// What the packers read and write lies inside the slices.
pub(super) fn check<T: Factor>(
    operand: &Operand<'_, T>,
    line: usize,
    end: usize,
    [k0, k1]: [usize; 2],
    packed: &[bf16],
    index: impl Fn(&Operand<'_, T>, usize, usize) -> usize,
) {
    assert!(operand.row_stride == 1 || operand.column_stride == 1);
    assert!(line < end && packed.len() >= (k1 - k0).div_ceil(DEPTH) * T::PIECES * PAIR);
    let last_line = end.min(line + BLOCK) - 1;
    assert!(k1 <= k0 || index(operand, last_line, k1 - 1) < operand.elements.len());
}

/// Asks for what lies two lines of the cache further along memory, which is packed soon: 32 lines that go on at once are more
/// than the processor keeps track of by itself. Of weights that no cache holds a third more are packed in the same time; half
/// or twice the distance gain less.
#[inline(always)]
pub(super) fn ask_beyond<T>(from: *const T) {
    const DISTANCE_BYTES: usize = 128;
    // SAFETY: asking for memory touches nothing.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(from.wrapping_byte_add(DISTANCE_BYTES).cast()) };
}

/// The first `count` lanes (at most 32).
fn first_lanes(count: usize) -> u32 {
    if count >= 32 { u32::MAX } else { (1u32 << count) - 1 }
}

/// Lines of consecutive `k` stay lines.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn pack_in_order(
    elements: &[bf16],
    stride: usize,
    [k0, k1]: [usize; 2],
    line: usize,
    end: usize,
    packed: &mut [bf16],
) {
    let lines = (end - line).min(BLOCK);
    for (step, k) in (k0..k1).step_by(DEPTH).enumerate() {
        let mask = first_lanes(k1 - k);
        for i in 0..BLOCK {
            // SAFETY: `check` covers the lines below `lines` and `k` below `k1`; masked lanes are not read.
            unsafe {
                let value = if i < lines {
                    load(mask, elements.as_ptr().add((line + i) * stride + k))
                } else {
                    _mm512_setzero_si512()
                };
                _mm512_storeu_si512(packed.as_mut_ptr().add(step * PAIR + i * DEPTH).cast(), value);
            }
        }
    }
}

/// Lines of consecutive `k` become columns of pairs.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn pack_turned(
    elements: &[bf16],
    stride: usize,
    [k0, k1]: [usize; 2],
    line: usize,
    end: usize,
    packed: &mut [bf16],
) {
    for (step, k) in (k0..k1).step_by(DEPTH).enumerate() {
        let mask = first_lanes(k1 - k);
        for half in 0..2 {
            let mut lines = [_mm512_setzero_si512(); TILE];
            let first = line + half * TILE;
            for (i, value) in lines.iter_mut().enumerate() {
                if first + i < end {
                    // SAFETY: as in `pack_in_order`.
                    *value = unsafe { load(mask, elements.as_ptr().add((first + i) * stride + k)) };
                }
            }
            // SAFETY: `packed` holds this pair of tiles.
            unsafe {
                store_tile(transposed(lines), packed.as_mut_ptr().add(step * PAIR + half * TILE * DEPTH))
            };
        }
    }
}

/// Rows of `k` with consecutive lines are paired; a left operand's pairs are then turned into lines.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn pack_pairs(
    elements: &[bf16],
    stride: usize,
    [k0, k1]: [usize; 2],
    line: usize,
    end: usize,
    turn: bool,
    packed: &mut [bf16],
) {
    let mask = first_lanes(end - line);
    // Interleaving works on quarters of a register, so their halves are put in order first.
    let order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
    for (step, k) in (k0..k1).step_by(DEPTH).enumerate() {
        let row = |k: usize| {
            let mask = if k < k1 { mask } else { 0 };
            // SAFETY: as in `pack_in_order`.
            let row = unsafe { load(mask, elements.as_ptr().wrapping_add(k * stride + line)) };
            _mm512_permutexvar_epi64(order, row)
        };
        let pairs: [_; TILE] = std::array::from_fn(|p| (row(k + 2 * p), row(k + 2 * p + 1)));
        let halves = [
            pairs.map(|(even, odd)| _mm512_unpacklo_epi16(even, odd)),
            pairs.map(|(even, odd)| _mm512_unpackhi_epi16(even, odd)),
        ];
        for (half, tile) in halves.into_iter().enumerate() {
            let tile = if turn { transposed(tile) } else { tile };
            // SAFETY: `packed` holds this pair of tiles.
            unsafe { store_tile(tile, packed.as_mut_ptr().add(step * PAIR + half * TILE * DEPTH)) };
        }
    }
}

/// Some of 32 values, the rest zeros; asks for what follows them.
///
/// # Safety
/// These values may be read.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
unsafe fn load(mask: u32, from: *const bf16) -> __m512i {
    ask_beyond(from);
    // SAFETY: passed on to the caller.
    unsafe { _mm512_maskz_loadu_epi16(mask, from.cast()) }
}

#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn store_tile(tile: [__m512i; TILE], target: *mut bf16) {
    for (i, line) in tile.into_iter().enumerate() {
        // SAFETY: the caller's tile holds 16 lines.
        unsafe { _mm512_storeu_si512(target.add(i * DEPTH).cast(), line) };
    }
}
