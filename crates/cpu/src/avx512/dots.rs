//! Few rows times columns that are consecutive in memory (`x·Wᵀ` of an `[out, in]` weight): dot products, read in place.
//!
//! Such a product is bound by reading its right operand. Packing it, which pays where many rows share it, costs more than
//! the product; here each of its lines is read once and multiplied by all rows. Those are brought into f32 first, since they are
//! read again for every few columns.

use std::arch::x86_64::*;
use std::ops::Range;

use super::finish::finish;
use super::lanes::Lanes;
use super::{LANES, first_lanes};
use crate::gemm::{Epilogue, Operand, Output};

/// Rows of a block of dot products, at most.
const BLOCK_ROWS: usize = 8;
/// Columns of a block of dot products, at most: with eight rows 24 sums, and few loads for each multiplication.
const BLOCK_COLUMNS: usize = 3;
/// Elements of the left operand in a slice of `k`, at most: a third of the first-level cache.
const SLICE: usize = 4096;

/// Whether these rows and operands are for dot products.
pub(super) fn suits<T>(a: &Operand<'_, T>, b: &Operand<'_, T>, rows: usize) -> bool {
    rows <= BLOCK_ROWS && a.column_stride == 1 && b.row_stride == 1 && b.column_stride > 1
}

/// Computes some rows and columns of a product on this thread. They belong to the caller.
pub(super) fn multiply<T: Lanes>(
    a: &Operand<'_, T>,
    b: &Operand<'_, T>,
    rows: Range<usize>,
    columns: Range<usize>,
    k: usize,
    epilogue: &Epilogue<'_>,
    output: &Output<f32>,
) {
    assert!((1..=BLOCK_ROWS).contains(&rows.len()));
    assert!(a.column_stride == 1 && b.row_stride == 1 && output.reaches(rows.end, columns.end));
    assert!(k == 0 || a.index(rows.end - 1, k - 1) < a.elements.len());
    assert!(k == 0 || b.index(k - 1, columns.end - 1) < b.elements.len());
    let slices = (k * rows.len()).div_ceil(SLICE).max(1);
    let depth = k.div_ceil(slices);
    let mut wide = [0.0f32; SLICE + BLOCK_ROWS];
    for slice in 0..slices {
        let span = [slice * depth, ((slice + 1) * depth).min(k)];
        let depth = span[1] - span[0];
        for (i, row) in rows.clone().enumerate() {
            let from = a.elements.get(a.index(row, span[0])..).unwrap_or_default();
            wide[i * depth..(i + 1) * depth]
                .iter_mut()
                .zip(from)
                .for_each(|(wide, value)| *wide = value.widen());
        }
        for column in columns.clone().step_by(BLOCK_COLUMNS) {
            let block = Block {
                left: wide.as_ptr(),
                left_stride: depth,
                right: b.elements.as_ptr().wrapping_add(b.index(span[0], column)),
                right_stride: b.column_stride,
                depth,
                target: output
                    .c
                    .pointer()
                    .wrapping_add(output.offset + rows.start * output.row_stride + column),
                target_stride: output.row_stride,
                rows: rows.len(),
                columns: BLOCK_COLUMNS.min(columns.end - column),
                alpha: epilogue.alpha,
                add: slice > 0 || epilogue.accumulate,
            };
            // SAFETY: operands and target reach that far, as was asserted; the target belongs to the caller; these
            // kernels are only used where AVX-512 is.
            unsafe { block.multiply() };
        }
    }
    if epilogue.finishes(output) {
        // SAFETY: as above.
        unsafe { finish(epilogue, output, rows, columns) };
    }
}

/// Some rows and columns: what is multiplied, and where the result goes.
struct Block<T> {
    left: *const f32,
    left_stride: usize,
    right: *const T,
    right_stride: usize,
    depth: usize,
    target: *mut f32,
    target_stride: usize,
    rows: usize,
    columns: usize,
    alpha: f32,
    add: bool,
}

impl<T: Lanes> Block<T> {
    /// `target = [target +] alpha · left · right`.
    ///
    /// # Safety
    /// The processor has AVX-512. The operands hold this many rows and columns of `depth` values, and the target's rows and
    /// columns belong to the caller. There are 1 to [`BLOCK_ROWS`] rows and 1 to [`BLOCK_COLUMNS`] columns.
    unsafe fn multiply(&self) {
        macro_rules! kernels {
            ($($rows:literal)*) => { [$([block::<T, $rows, 1>, block::<T, $rows, 2>, block::<T, $rows, 3>]),*] };
        }
        let kernels: [[unsafe fn(&Block<T>); BLOCK_COLUMNS]; BLOCK_ROWS] = kernels!(1 2 3 4 5 6 7 8);
        // SAFETY: passed on to the caller.
        unsafe { kernels[self.rows - 1][self.columns - 1](self) }
    }
}

/// [`Block::multiply`] for a block of this size.
///
/// # Safety
/// As there.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn block<T: Lanes, const ROWS: usize, const COLUMNS: usize>(block: &Block<T>) {
    let mut sums = [[_mm512_setzero_ps(); COLUMNS]; ROWS];
    for k in (0..block.depth).step_by(LANES) {
        let lanes = first_lanes(block.depth - k);
        let mut lines = [_mm512_setzero_ps(); COLUMNS];
        // SAFETY: both operands hold `depth` values of each row and column; masked lanes are not read.
        unsafe {
            for (column, line) in lines.iter_mut().enumerate() {
                *line = T::load(lanes, block.right.add(column * block.right_stride + k));
            }
            for (row, sums) in sums.iter_mut().enumerate() {
                let factor = _mm512_maskz_loadu_ps(lanes, block.left.add(row * block.left_stride + k));
                for (sum, line) in sums.iter_mut().zip(lines) {
                    *sum = _mm512_fmadd_ps(factor, line, *sum);
                }
            }
        }
    }
    for (row, sums) in sums.into_iter().enumerate() {
        for (column, sum) in sums.into_iter().enumerate() {
            let value = block.alpha * _mm512_reduce_add_ps(sum);
            // SAFETY: only the block's own rows and columns are touched.
            unsafe {
                let place = block.target.add(row * block.target_stride + column);
                *place = if block.add { *place + value } else { value };
            }
        }
    }
}
