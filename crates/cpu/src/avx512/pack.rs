//! Bringing operands into the order in which a block of sums reads them.
//!
//! A packed left operand is one word ([`Words`]) for each of a block's rows, for each `k`, or each two, in turn. A packed right
//! operand is a row of strips of 32 columns (16 where no more are left), each with one line for each word along `k`; columns
//! outside the matrix are zero, and so is the second half of a last word where `k` is odd.

use std::arch::x86_64::*;

use super::lanes::Words;
use super::{BLOCK_COLUMNS, BLOCK_ROWS, LANES, first_lanes, transposed};
use crate::gemm::Operand;

/// What [`pack_left`] may write behind the packed operand.
pub(super) const SLACK: usize = LANES;
/// Steps of `k` that all strips go on together where lines lie across memory.
const TOGETHER: usize = 8;

/// Words along `k` from `k0` to `k1`.
pub(super) fn words<W: Words>(k0: usize, k1: usize) -> usize {
    (k1 - k0).div_ceil(W::VALUES)
}

/// Packs `rows` rows from `row` on, `k` from `k0` to `k1`.
pub(super) fn pack_left<W: Words>(
    a: &Operand<'_, W::Element>,
    [k0, k1]: [usize; 2],
    row: usize,
    rows: usize,
    packed: &mut [f32],
) {
    assert!(a.row_stride == 1 || a.column_stride == 1);
    assert!(
        (1..=BLOCK_ROWS).contains(&rows) && k0 <= k1 && packed.len() >= words::<W>(k0, k1) * rows + SLACK
    );
    assert!(k0 == k1 || a.index(row + rows - 1, k1 - 1) < a.elements.len());
    // SAFETY: only called where AVX-512 is; what is read and written lies inside the slices, as was asserted.
    unsafe {
        if a.column_stride == 1 {
            left_turned::<W>(a, [k0, k1], row, rows, packed.as_mut_ptr());
        } else {
            left_in_order::<W>(a, [k0, k1], row, rows, packed.as_mut_ptr());
        }
    }
}

/// Rows of consecutive `k` become columns. Whole registers are stored, the next one over what is too much.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn left_turned<W: Words>(
    a: &Operand<'_, W::Element>,
    [k0, k1]: [usize; 2],
    row: usize,
    rows: usize,
    packed: *mut f32,
) {
    for k in (k0..k1).step_by(LANES * W::VALUES) {
        let count = (LANES * W::VALUES).min(k1 - k);
        let mut lines = [_mm512_setzero_si512(); LANES];
        for (i, line) in lines.iter_mut().enumerate().take(rows) {
            // SAFETY: `pack_left` covers these rows and `k` below `k1`; masked lanes are not read.
            *line =
                unsafe { _mm512_castps_si512(W::along(a.elements.as_ptr().add(a.index(row + i, k)), count)) };
        }
        for (i, line) in transposed(lines).into_iter().enumerate().take(count.div_ceil(W::VALUES)) {
            // SAFETY: the last store ends less than `SLACK` behind the packed operand.
            unsafe { _mm512_storeu_si512(packed.add(((k - k0) / W::VALUES + i) * rows).cast(), line) };
        }
    }
}

/// Rows lie side by side already.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn left_in_order<W: Words>(
    a: &Operand<'_, W::Element>,
    [k0, k1]: [usize; 2],
    row: usize,
    rows: usize,
    packed: *mut f32,
) {
    let lanes = first_lanes(rows);
    for (i, k) in (k0..k1).step_by(W::VALUES).enumerate() {
        let stride = (k + 1 < k1).then_some(a.column_stride);
        // SAFETY: as in `left_turned`.
        unsafe {
            let line = W::across(lanes, a.elements.as_ptr().add(a.index(row, k)), stride);
            _mm512_storeu_ps(packed.add(i * rows), line);
        }
    }
}

/// Packs columns `column0..column1`, `k` from `k0` to `k1`.
pub(super) fn pack_right<W: Words>(
    b: &Operand<'_, W::Element>,
    [k0, k1]: [usize; 2],
    [column0, column1]: [usize; 2],
    packed: &mut [f32],
) {
    assert!(b.row_stride == 1 || b.column_stride == 1);
    assert!(column0 < column1 && k0 <= k1);
    assert!(packed.len() >= words::<W>(k0, k1) * (column1 - column0).next_multiple_of(LANES));
    assert!(k0 == k1 || b.index(k1 - 1, column1 - 1) < b.elements.len());
    let depth = words::<W>(k0, k1);
    // SAFETY: only called where AVX-512 is; what is read and written lies inside the slices, as was asserted.
    unsafe {
        if b.column_stride == 1 {
            // In the order in which memory lies, across all strips.
            for k in (k0..k1).step_by(TOGETHER) {
                let end = (k + TOGETHER).min(k1);
                for column in (column0..column1).step_by(BLOCK_COLUMNS) {
                    let strip = packed.as_mut_ptr().add((column - column0) * depth);
                    right_in_order::<W>(b, [k, end], [column, column1], (k - k0) / W::VALUES, strip);
                }
            }
        } else {
            for column in (column0..column1).step_by(BLOCK_COLUMNS) {
                let strip = packed.as_mut_ptr().add((column - column0) * depth);
                right_turned::<W>(b, [k0, k1], [column, column1], strip);
            }
        }
    }
}

/// Columns of a strip as they are stored: whole registers.
fn strip_width(columns: [usize; 2]) -> usize {
    BLOCK_COLUMNS.min((columns[1] - columns[0]).next_multiple_of(LANES))
}

/// Lines of columns stay lines.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
unsafe fn right_in_order<W: Words>(
    b: &Operand<'_, W::Element>,
    [k0, k1]: [usize; 2],
    columns: [usize; 2],
    first: usize,
    strip: *mut f32,
) {
    let width = strip_width(columns);
    for (i, k) in (k0..k1).step_by(W::VALUES).enumerate() {
        let stride = (k + 1 < k1).then_some(b.row_stride);
        for register in (0..width).step_by(LANES) {
            let lanes = first_lanes(columns[1] - columns[0] - register);
            // SAFETY: `pack_right` covers these columns and `k` below `k1`; masked lanes are not read.
            unsafe {
                let from = b.elements.as_ptr().add(b.index(k, columns[0] + register));
                _mm512_storeu_ps(strip.add((first + i) * width + register), W::across(lanes, from, stride));
            }
        }
    }
}

/// Columns of consecutive `k` become lines.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
unsafe fn right_turned<W: Words>(
    b: &Operand<'_, W::Element>,
    [k0, k1]: [usize; 2],
    columns: [usize; 2],
    strip: *mut f32,
) {
    let width = strip_width(columns);
    for k in (k0..k1).step_by(LANES * W::VALUES) {
        let count = (LANES * W::VALUES).min(k1 - k);
        for register in (0..width).step_by(LANES) {
            let first = columns[0] + register;
            let mut lines = [_mm512_setzero_si512(); LANES];
            for (i, line) in lines.iter_mut().enumerate().take(columns[1] - first) {
                // SAFETY: as in `right_in_order`.
                *line = unsafe {
                    _mm512_castps_si512(W::along(b.elements.as_ptr().add(b.index(k, first + i)), count))
                };
            }
            for (i, line) in transposed(lines).into_iter().enumerate().take(count.div_ceil(W::VALUES)) {
                let at = (k - k0) / W::VALUES + i;
                // SAFETY: the strip has a line of `width` for each word along `k`.
                unsafe { _mm512_storeu_si512(strip.add(at * width + register).cast(), line) };
            }
        }
    }
}
