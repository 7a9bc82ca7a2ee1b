//! Bringing operands into the order in which a block of sums reads them.
//!
//! Packed values are f32, whatever the operands are. A packed left operand is one value for each of a block's rows, for each `k` in turn. A packed right operand is a
//! row of strips of 32 columns (16 where no more are left), each with one line for each `k`; columns outside the matrix are
//! zero.

use std::arch::x86_64::*;

use super::lanes::Lanes;
use super::{BLOCK_COLUMNS, BLOCK_ROWS, LANES, first_lanes, transposed};
use crate::cpu::gemm::Operand;

/// What [`pack_left`] may write behind the packed operand.
pub(super) const SLACK: usize = LANES;
/// Steps of `k` that all strips go on together where lines lie across memory.
const TOGETHER: usize = 8;

/// Packs `rows` rows from `row` on, `k` from `k0` to `k1`.
pub(super) fn pack_left<T: Lanes>(
    a: &Operand<'_, T>,
    [k0, k1]: [usize; 2],
    row: usize,
    rows: usize,
    packed: &mut [f32],
) {
    assert!(a.row_stride == 1 || a.column_stride == 1);
    assert!((1..=BLOCK_ROWS).contains(&rows) && k0 <= k1 && packed.len() >= (k1 - k0) * rows + SLACK);
    assert!(k0 == k1 || a.index(row + rows - 1, k1 - 1) < a.elements.len());
    // SAFETY: only called where AVX-512 is; what is read and written lies inside the slices, as was asserted.
    unsafe {
        if a.column_stride == 1 {
            left_turned(a, [k0, k1], row, rows, packed.as_mut_ptr());
        } else {
            left_in_order(a, [k0, k1], row, rows, packed.as_mut_ptr());
        }
    }
}

/// Rows of consecutive `k` become columns. Whole registers are stored, the next one over what is too much.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn left_turned<T: Lanes>(
    a: &Operand<'_, T>,
    [k0, k1]: [usize; 2],
    row: usize,
    rows: usize,
    packed: *mut f32,
) {
    for k in (k0..k1).step_by(LANES) {
        let count = LANES.min(k1 - k);
        let lanes = first_lanes(count);
        let mut lines = [_mm512_setzero_si512(); LANES];
        for (i, line) in lines.iter_mut().enumerate().take(rows) {
            // SAFETY: `pack_left` covers these rows and `k` below `k1`; masked lanes are not read.
            *line =
                unsafe { _mm512_castps_si512(T::load(lanes, a.elements.as_ptr().add(a.index(row + i, k)))) };
        }
        for (i, line) in transposed(lines).into_iter().enumerate().take(count) {
            // SAFETY: the last store ends less than `SLACK` behind the packed operand.
            unsafe { _mm512_storeu_si512(packed.add((k - k0 + i) * rows).cast(), line) };
        }
    }
}

/// Rows lie side by side already.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn left_in_order<T: Lanes>(
    a: &Operand<'_, T>,
    [k0, k1]: [usize; 2],
    row: usize,
    rows: usize,
    packed: *mut f32,
) {
    let lanes = first_lanes(rows);
    for k in k0..k1 {
        // SAFETY: as in `left_turned`.
        unsafe {
            let line = T::load(lanes, a.elements.as_ptr().add(a.index(row, k)));
            _mm512_storeu_ps(packed.add((k - k0) * rows), line);
        }
    }
}

/// Packs columns `column0..column1`, `k` from `k0` to `k1`.
pub(super) fn pack_right<T: Lanes>(
    b: &Operand<'_, T>,
    [k0, k1]: [usize; 2],
    [column0, column1]: [usize; 2],
    packed: &mut [f32],
) {
    assert!(b.row_stride == 1 || b.column_stride == 1);
    assert!(column0 < column1 && k0 <= k1);
    assert!(packed.len() >= (k1 - k0) * (column1 - column0).next_multiple_of(LANES));
    assert!(k0 == k1 || b.index(k1 - 1, column1 - 1) < b.elements.len());
    let depth = k1 - k0;
    // SAFETY: only called where AVX-512 is; what is read and written lies inside the slices, as was asserted.
    unsafe {
        if b.column_stride == 1 {
            // In the order in which memory lies, across all strips.
            for k in (k0..k1).step_by(TOGETHER) {
                let end = (k + TOGETHER).min(k1);
                for column in (column0..column1).step_by(BLOCK_COLUMNS) {
                    let strip = packed.as_mut_ptr().add((column - column0) * depth);
                    right_in_order(b, [k, end], [column, column1], k - k0, strip);
                }
            }
        } else {
            for column in (column0..column1).step_by(BLOCK_COLUMNS) {
                let strip = packed.as_mut_ptr().add((column - column0) * depth);
                right_turned(b, [k0, k1], [column, column1], strip);
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
unsafe fn right_in_order<T: Lanes>(
    b: &Operand<'_, T>,
    [k0, k1]: [usize; 2],
    columns: [usize; 2],
    first: usize,
    strip: *mut f32,
) {
    let width = strip_width(columns);
    for (i, k) in (k0..k1).enumerate() {
        for register in (0..width).step_by(LANES) {
            let lanes = first_lanes(columns[1] - columns[0] - register);
            // SAFETY: `pack_right` covers these columns and `k` below `k1`; masked lanes are not read.
            unsafe {
                let from = b.elements.as_ptr().add(b.index(k, columns[0] + register));
                _mm512_storeu_ps(strip.add((first + i) * width + register), T::load(lanes, from));
            }
        }
    }
}

/// Columns of consecutive `k` become lines.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
unsafe fn right_turned<T: Lanes>(
    b: &Operand<'_, T>,
    [k0, k1]: [usize; 2],
    columns: [usize; 2],
    strip: *mut f32,
) {
    let width = strip_width(columns);
    for k in (k0..k1).step_by(LANES) {
        let count = LANES.min(k1 - k);
        let lanes = first_lanes(count);
        for register in (0..width).step_by(LANES) {
            let first = columns[0] + register;
            let mut lines = [_mm512_setzero_si512(); LANES];
            for (i, line) in lines.iter_mut().enumerate().take(columns[1] - first) {
                // SAFETY: as in `right_in_order`.
                *line = unsafe {
                    _mm512_castps_si512(T::load(lanes, b.elements.as_ptr().add(b.index(k, first + i))))
                };
            }
            for (i, line) in transposed(lines).into_iter().enumerate().take(count) {
                // SAFETY: the strip has `k1 - k0` lines of `width`.
                unsafe { _mm512_storeu_si512(strip.add((k - k0 + i) * width + register).cast(), line) };
            }
        }
    }
}
