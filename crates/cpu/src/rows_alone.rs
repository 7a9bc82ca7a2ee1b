//! Products of several rows, each with the bits that `one_row` gives it.
//!
//! The weight is read once for several rows: a tile of rows and columns keeps its sums in registers while `k` goes by. Every
//! element is summed over the same lanes in the same order as in a product of one row.

use ferrospeed_tensor::Result;
use ferrospeed_tensor::backend::Gemm;
use ferrospeed_tensor::dtype::Float;
use ferrospeed_tensor::loops::simd::{LANES, fold, vectorized};
use ferrospeed_tensor::loops::threads::Threads;

use crate::float_kernel;
use crate::gemm::{AnyOutput, Epilogue, Operand, Part};
use crate::one_row::{self, Depths, add_lines};
use crate::parallel::Shared;

/// Rows and columns of a tile of sums: sixteen registers.
const TILE: usize = 4;
/// Rows that go by while a block of columns stays in the cache.
const ROW_BLOCK: usize = 32;
/// Columns of a task.
const COLUMN_BLOCK: usize = 64;

/// The product of any number of rows and one matrix.
pub(crate) fn product(threads: &Threads, gemm: &Gemm<'_>, epilogue: &Epilogue<'_>) -> Result<()> {
    if gemm.m == 1 {
        return one_row::product(threads, gemm, epilogue);
    }
    float_kernel!("gemm", gemm.a.tensor.dtype(), T => {
        let (a, b) = (Operand::<T>::new(&gemm.a, 0), Operand::<T>::new(&gemm.b, 0));
        let (m, k) = (gemm.m, gemm.k);
        let mut rows = vec![0.0f32; m * k];
        let shared = Shared::new(&mut rows);
        threads.blocks(m, ROW_BLOCK, |block| {
            // SAFETY: each task has its own rows.
            let wide = unsafe { shared.range(block.start * k..block.end * k) };
            vectorized!(|| {
                for (row, wide) in block.clone().zip(wide.chunks_mut(k.max(1))) {
                    for (column, value) in wide.iter_mut().enumerate() {
                        *value = a.elements[a.index(row, column)].widen();
                    }
                }
            });
        });
        match b.column_stride {
            1 => by_rows(threads, &rows, &b, gemm, epilogue),
            _ => by_columns(threads, &rows, &b, gemm, epilogue),
        }
    })
}

fn by_columns<T: Float>(
    threads: &Threads,
    rows: &[f32],
    b: &Operand<'_, T>,
    gemm: &Gemm<'_>,
    epilogue: &Epilogue<'_>,
) {
    let (m, n, k, output) = (gemm.m, gemm.n, gemm.k, AnyOutput::of(gemm, 0));
    threads.blocks(n, COLUMN_BLOCK, |columns| {
        let line = |column: usize| {
            let start = if k == 0 { 0 } else { b.index(0, columns.start + column) };
            &b.elements[start..start + k]
        };
        let (width, whole) = (columns.len(), columns.len() / TILE * TILE);
        let mut sums = [0.0f32; ROW_BLOCK * COLUMN_BLOCK];
        for first in (0..m).step_by(ROW_BLOCK) {
            let height = ROW_BLOCK.min(m - first);
            let block = &rows[first * k..(first + height) * k];
            for column in (0..whole).step_by(TILE) {
                let lines: [&[T]; TILE] = std::array::from_fn(|i| line(column + i));
                vectorized!(|| tiles(block, [height, k], &lines, column, &mut sums));
            }
            for column in whole..width {
                vectorized!(|| tiles(block, [height, k], &[line(column)], column, &mut sums));
            }
            let part = Part { rows: first..first + height, columns: columns.clone() };
            epilogue.store_any(&mut sums, COLUMN_BLOCK, part, &output);
        }
    });
}

/// Some columns of all rows of a block.
#[inline(always)]
fn tiles<T: Float, const COLUMNS: usize>(
    block: &[f32],
    [count, k]: [usize; 2],
    lines: &[&[T]; COLUMNS],
    column: usize,
    sums: &mut [f32],
) {
    let row = |index: usize| &block[index * k..(index + 1) * k];
    let whole = count / TILE * TILE;
    for first in (0..whole).step_by(TILE) {
        let rows: [&[f32]; TILE] = std::array::from_fn(|i| row(first + i));
        for (i, dots) in tile(&rows, lines).into_iter().enumerate() {
            sums[(first + i) * COLUMN_BLOCK + column..][..COLUMNS].copy_from_slice(&dots);
        }
    }
    for index in whole..count {
        let [dots] = tile(&[row(index)], lines);
        sums[index * COLUMN_BLOCK + column..][..COLUMNS].copy_from_slice(&dots);
    }
}

/// Every row with every line, each in the order of `one_row::dots`.
#[inline(always)]
fn tile<T: Float, const ROWS: usize, const COLUMNS: usize>(
    rows: &[&[f32]; ROWS],
    lines: &[&[T]; COLUMNS],
) -> [[f32; COLUMNS]; ROWS] {
    let mut lanes = [[[0.0f32; LANES]; COLUMNS]; ROWS];
    let length = rows[0].len();
    let (rows, lines) = (
        rows.map(|row| row[..length].as_chunks::<LANES>()),
        lines.map(|line| line[..length].as_chunks::<LANES>()),
    );
    // Cut to one length that the loop shares, so that it needs no checks.
    let registers = length / LANES;
    let (whole_rows, whole_lines) =
        (rows.map(|(whole, _)| &whole[..registers]), lines.map(|(whole, _)| &whole[..registers]));
    for register in 0..registers {
        for column in 0..COLUMNS {
            let mut wide = [0.0f32; LANES];
            for lane in 0..LANES {
                wide[lane] = whole_lines[column][register][lane].widen();
            }
            for row in 0..ROWS {
                for lane in 0..LANES {
                    lanes[row][column][lane] += whole_rows[row][register][lane] * wide[lane];
                }
            }
        }
    }
    for (lanes, (_, row)) in lanes.iter_mut().zip(rows) {
        for (lanes, (_, line)) in lanes.iter_mut().zip(lines) {
            for (lane, (a, b)) in lanes.iter_mut().zip(row.iter().zip(line)) {
                *lane += a * b.widen();
            }
        }
    }
    lanes.map(|lanes| lanes.map(|lanes| fold(lanes, |a, b| a + b)))
}

/// Each task adds up some rows of `b` for a block of columns, for several rows of the product at a time.
fn by_rows<T: Float>(
    threads: &Threads,
    rows: &[f32],
    b: &Operand<'_, T>,
    gemm: &Gemm<'_>,
    epilogue: &Epilogue<'_>,
) {
    let (m, n, k, output) = (gemm.m, gemm.n, gemm.k, AnyOutput::of(gemm, 0));
    let depths = Depths::of(k);
    threads.blocks(n, COLUMN_BLOCK, |columns| {
        let width = columns.len();
        let line = |place: usize| {
            let start = b.index(place, columns.start);
            &b.elements[start..start + width]
        };
        for first in (0..m).step_by(ROW_BLOCK) {
            let height = ROW_BLOCK.min(m - first);
            let mut totals = [0.0f32; ROW_BLOCK * COLUMN_BLOCK];
            for part in depths.parts() {
                let mut sums = [0.0f32; ROW_BLOCK * COLUMN_BLOCK];
                depths.groups(part, |places| {
                    for (row, sums) in sums.chunks_mut(COLUMN_BLOCK).take(height).enumerate() {
                        let factors = &rows[(first + row) * k..][places.clone()];
                        match <&[f32; one_row::ROWS_AT_ONCE]>::try_from(factors) {
                            Ok(factors) => {
                                let lines = std::array::from_fn(|i| line(places.start + i));
                                vectorized!(|| add_lines(&mut sums[..width], &lines, factors));
                            }
                            Err(_) => vectorized!(|| add_lines(
                                &mut sums[..width],
                                &[line(places.start)],
                                &[factors[0]]
                            )),
                        }
                    }
                });
                totals.iter_mut().zip(&sums).for_each(|(total, sum)| *total += sum);
            }
            let part = Part { rows: first..first + height, columns: columns.clone() };
            epilogue.store_any(&mut totals, COLUMN_BLOCK, part, &output);
        }
    });
}
