//! Products of one row, as decoding makes them.
//!
//! Such a product is bound by reading its right operand, usually a weight, which is used once. Packing it into tiles,
//! which pays when many rows share it, costs several times the arithmetic. So it is read where it lies, in the order in
//! which it lies: `by_rows` when its rows are consecutive (`x·W` of an `[in, out]` weight), `by_columns` when its columns
//! are (`x·Wᵀ` of an `[out, in]` one, which in f32 with AVX-512 goes to `avx512::dots` instead).
//!
//! Sums are plain f32 in an order that only the shapes decide: the same bits with any number of threads and on any
//! instruction set.

use crate::backend::Gemm;
use crate::cpu::float_kernel;
use crate::cpu::gemm::{Epilogue, Operand, Output};
use crate::cpu::parallel::{Shared, Threads};
use crate::cpu::simd::{LANES, fold, vectorized};
use crate::dtype::Float;
use crate::error::Result;

/// Columns of one task of `by_rows`: enough for long consecutive reads.
const ROW_BLOCK: usize = 1024;
/// Rows of one task of `by_rows`, at least; and at most this many tasks one below the other.
const DEPTH: usize = 128;
const MAX_PARTS: usize = 8;
/// Columns of one task of `by_columns`: each is a row of memory.
const COLUMN_BLOCK: usize = 64;

/// The product of one row and one matrix.
pub(crate) fn product<C: Float>(
    threads: &Threads,
    gemm: &Gemm<'_>,
    epilogue: &Epilogue<'_>,
    output: &Output<C>,
) -> Result<()> {
    float_kernel!("gemm", gemm.a.tensor.dtype(), T => {
        let (a, b) = (Operand::<T>::new(&gemm.a, 0), Operand::<T>::new(&gemm.b, 0));
        let row: Vec<f32> = (0..gemm.k).map(|i| a.elements[a.index(0, i)].widen()).collect();
        match b.column_stride {
            1 => by_rows(threads, gemm.n, &row, &b, epilogue, output),
            _ => by_columns(threads, gemm.n, &row, &b, epilogue, output),
        }
    })
}

/// Each task adds up some rows of `b` over a block of columns; the parts are then added in order.
fn by_rows<T: Float, C: Float>(
    threads: &Threads,
    n: usize,
    row: &[f32],
    b: &Operand<'_, T>,
    epilogue: &Epilogue<'_>,
    output: &Output<C>,
) {
    let k = row.len();
    let depth = k.div_ceil(MAX_PARTS).max(DEPTH).next_multiple_of(4);
    let (parts, blocks) = (k.div_ceil(depth), n.div_ceil(ROW_BLOCK));
    let mut sums = vec![0.0f32; parts * n];
    let shared = Shared::new(&mut sums);
    threads.run(parts * blocks, |task| {
        let (part, block) = (task / blocks, task % blocks);
        let columns = block * ROW_BLOCK..((block + 1) * ROW_BLOCK).min(n);
        // SAFETY: each task has its own part and columns.
        let sums = unsafe { shared.range(part * n + columns.start..part * n + columns.end) };
        let first = part * depth;
        for (four, factors) in row[first..(first + depth).min(k)].chunks(4).enumerate() {
            let line = |p: usize| {
                let start = b.index(first + 4 * four + p, columns.start);
                &b.elements[start..start + columns.len()]
            };
            match *factors {
                [w, x, y, z] => {
                    let lines = [line(0), line(1), line(2), line(3)];
                    vectorized!(|| add_four(sums, lines, [w, x, y, z]));
                }
                _ => {
                    for (p, factor) in factors.iter().enumerate() {
                        let line = line(p);
                        vectorized!(|| sums
                            .iter_mut()
                            .zip(line)
                            .for_each(|(sum, b)| *sum += factor * b.widen()));
                    }
                }
            }
        }
    });
    threads.blocks(n, ROW_BLOCK, |columns| {
        let mut total = vec![0.0f32; columns.len()];
        for part in 0..parts {
            // SAFETY: the tasks above are done, and these columns belong to this task alone.
            let sums = unsafe { shared.range(part * n + columns.start..part * n + columns.end) };
            total.iter_mut().zip(&*sums).for_each(|(total, sum)| *total += sum);
        }
        // SAFETY: as above.
        let (c, before) = unsafe { output.row(0, columns.clone()) };
        vectorized!(|| epilogue.store(&mut total, columns.start, c, before));
    });
}

/// `sums += Σ factor · line` over four lines at once, so that `sums` is read and written a quarter as often.
#[inline(always)]
fn add_four<T: Float>(sums: &mut [f32], lines: [&[T]; 4], f: [f32; 4]) {
    let length = sums.len();
    let [w, x, y, z] = lines.map(|line| &line[..length]);
    for i in 0..length {
        sums[i] += (f[0] * w[i].widen() + f[1] * x[i].widen()) + (f[2] * y[i].widen() + f[3] * z[i].widen());
    }
}

/// Each task makes some columns, each a dot product with consecutive memory.
fn by_columns<T: Float, C: Float>(
    threads: &Threads,
    n: usize,
    row: &[f32],
    b: &Operand<'_, T>,
    epilogue: &Epilogue<'_>,
    output: &Output<C>,
) {
    threads.blocks(n, COLUMN_BLOCK, |columns| {
        let mut sums = [0.0f32; COLUMN_BLOCK];
        for (sum, column) in sums.iter_mut().zip(columns.clone()) {
            let start = if row.is_empty() { 0 } else { b.index(0, column) };
            let column = &b.elements[start..start + row.len()];
            *sum = vectorized!(|| dot(row, column));
        }
        // SAFETY: these columns belong to this task alone.
        let (c, before) = unsafe { output.row(0, columns.clone()) };
        vectorized!(|| epilogue.store(&mut sums[..columns.len()], columns.start, c, before));
    });
}

/// Partial sums of a dot product: four registers of sixteen, so that additions need not wait for each other.
const DOT_LANES: usize = 4 * LANES;

/// The sum of products, in an order that only the length decides.
#[inline(always)]
fn dot<T: Float>(a: &[f32], b: &[T]) -> f32 {
    let mut lanes = [0.0f32; DOT_LANES];
    let (mut left, mut right) = (a.chunks_exact(DOT_LANES), b.chunks_exact(DOT_LANES));
    for (a, b) in (&mut left).zip(&mut right) {
        for lane in 0..DOT_LANES {
            lanes[lane] += a[lane] * b[lane].widen();
        }
    }
    for (lane, (a, b)) in lanes.iter_mut().zip(left.remainder().iter().zip(right.remainder())) {
        *lane += a * b.widen();
    }
    let mut folded = [0.0f32; LANES];
    for lane in 0..LANES {
        let [second, third, fourth] = [1, 2, 3].map(|register| lanes[lane + register * LANES]);
        folded[lane] = (lanes[lane] + second) + (third + fourth);
    }
    fold(folded, |a, b| a + b)
}
