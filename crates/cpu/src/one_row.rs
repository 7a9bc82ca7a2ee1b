//! Products of one row, as decoding makes them.
//!
//! Such a product is bound by reading its right operand, usually a weight, which is used once. Packing it into tiles,
//! which pays when many rows share it, costs several times the arithmetic. So it is read where it lies, in the order in
//! which it lies: `by_rows` when its rows are consecutive (`x·W` of an `[in, out]` weight), `by_columns` when its columns
//! are (`x·Wᵀ` of an `[out, in]` one). Several lines, each in a place of its own, are read side by side: the processor
//! fetches ahead in each of them by itself, and one line alone does not fill the way to memory.
//!
//! Sums are plain f32 in an order that only the shapes decide: the same bits with any number of threads and on any
//! instruction set.

use ferrospeed_tensor::Result;
use ferrospeed_tensor::backend::Gemm;
use ferrospeed_tensor::dtype::Float;
use ferrospeed_tensor::loops::simd::{LANES, fold, vectorized};
use ferrospeed_tensor::loops::threads::Threads;

use crate::float_kernel;
use crate::gemm::{AnyOutput, Epilogue, Operand, Part};
use crate::parallel::Shared;

/// Columns of one task of `by_rows`, at most: enough for long consecutive reads.
const ROW_BLOCK: usize = 2048;
/// Rows that `by_rows` reads at once.
pub(crate) const ROWS_AT_ONCE: usize = 16;
/// Rows of one task of `by_rows`, at least; and at most this many tasks one below the other.
const DEPTH: usize = 128;
const MAX_PARTS: usize = 8;
/// Columns, each a row of memory, that `by_columns` reads at once, and how many follow each other in each place.
const COLUMNS_AT_ONCE: usize = 8;
const COLUMNS_IN_TURN: usize = 8;
/// Columns of one task of `by_columns`.
const COLUMN_BLOCK: usize = COLUMNS_AT_ONCE * COLUMNS_IN_TURN;

/// The product of one row and one matrix.
pub(crate) fn product(threads: &Threads, gemm: &Gemm<'_>, epilogue: &Epilogue<'_>) -> Result<()> {
    float_kernel!("gemm", gemm.a.tensor.dtype(), T => {
        let (a, b) = (Operand::<T>::new(&gemm.a, 0), Operand::<T>::new(&gemm.b, 0));
        let row: Vec<f32> = (0..gemm.k).map(|i| a.elements[a.index(0, i)].widen()).collect();
        match b.column_stride {
            1 => by_rows(threads, &row, &b, gemm, epilogue),
            _ => by_columns(threads, &row, &b, gemm, epilogue),
        }
    })
}

/// How `by_rows` groups the sums over `k`: in parts, each in groups of [`ROWS_AT_ONCE`] and a rest one by one.
#[derive(Clone, Copy)]
pub(crate) struct Depths {
    k: usize,
    depth: usize,
}

impl Depths {
    pub(crate) fn of(k: usize) -> Depths {
        Depths { k, depth: k.div_ceil(MAX_PARTS).max(DEPTH).next_multiple_of(ROWS_AT_ONCE) }
    }

    pub(crate) fn parts(self) -> std::ops::Range<usize> {
        0..self.k.div_ceil(self.depth)
    }

    /// Calls `add` with every group of a part, in order.
    pub(crate) fn groups(self, part: usize, mut add: impl FnMut(std::ops::Range<usize>)) {
        let (mut place, end) = (part * self.depth, ((part + 1) * self.depth).min(self.k));
        while place + ROWS_AT_ONCE <= end {
            add(place..place + ROWS_AT_ONCE);
            place += ROWS_AT_ONCE;
        }
        (place..end).for_each(|place| add(place..place + 1));
    }
}

/// Each task adds up some rows of `b` over a block of columns; the parts are then added in order.
fn by_rows<T: Float>(
    threads: &Threads,
    row: &[f32],
    b: &Operand<'_, T>,
    gemm: &Gemm<'_>,
    epilogue: &Epilogue<'_>,
) {
    let (n, depths, output) = (gemm.n, Depths::of(row.len()), AnyOutput::of(gemm, 0));
    let (parts, blocks) = (depths.parts().len(), n.div_ceil(ROW_BLOCK));
    let width = n.div_ceil(blocks).next_multiple_of(LANES);
    let mut sums = vec![0.0f32; parts * n];
    let shared = Shared::new(&mut sums);
    threads.run(parts * blocks, |task| {
        let (part, block) = (task / blocks, task % blocks);
        let columns = (block * width).min(n)..((block + 1) * width).min(n);
        // SAFETY: each task has its own part and columns.
        let sums = unsafe { shared.range(part * n + columns.start..part * n + columns.end) };
        let line = |place: usize| {
            let start = b.index(place, columns.start);
            &b.elements[start..start + columns.len()]
        };
        depths.groups(part, |places| match <&[f32; ROWS_AT_ONCE]>::try_from(&row[places.clone()]) {
            Ok(factors) => {
                let lines: [&[T]; ROWS_AT_ONCE] = std::array::from_fn(|i| line(places.start + i));
                vectorized!(|| add_lines(sums, &lines, factors));
            }
            Err(_) => vectorized!(|| add_lines(sums, &[line(places.start)], &[row[places.start]])),
        });
    });
    threads.blocks(n, ROW_BLOCK, |columns| {
        let mut total = vec![0.0f32; columns.len()];
        for part in 0..parts {
            // SAFETY: the tasks above are done, and these columns belong to this task alone.
            let sums = unsafe { shared.range(part * n + columns.start..part * n + columns.end) };
            total.iter_mut().zip(&*sums).for_each(|(total, sum)| *total += sum);
        }
        epilogue.store_any(&mut total, columns.len(), Part { rows: 0..1, columns }, &output);
    });
}

/// `sums += Σ factor · line` over several lines at once, so that `sums` is seldom read and written.
#[inline(always)]
pub(crate) fn add_lines<T: Float, const LINES: usize>(
    sums: &mut [f32],
    lines: &[&[T]; LINES],
    factors: &[f32; LINES],
) {
    let length = sums.len();
    let lines = lines.map(|line| &line[..length]);
    for i in 0..length {
        // Two chains, so that additions need not wait for each other.
        let mut chains = [sums[i], 0.0];
        for p in 0..LINES {
            chains[p % 2] += factors[p] * lines[p][i].widen();
        }
        sums[i] = chains[0] + chains[1];
    }
}

/// Each task makes some columns, each a dot product with consecutive memory.
fn by_columns<T: Float>(
    threads: &Threads,
    row: &[f32],
    b: &Operand<'_, T>,
    gemm: &Gemm<'_>,
    epilogue: &Epilogue<'_>,
) {
    let output = AnyOutput::of(gemm, 0);
    threads.blocks(gemm.n, COLUMN_BLOCK, |columns| {
        let mut sums = [0.0f32; COLUMN_BLOCK];
        let line = |column: usize| {
            let start = if row.is_empty() { 0 } else { b.index(0, columns.start + column) };
            &b.elements[start..start + row.len()]
        };
        if columns.len() == COLUMN_BLOCK {
            for turn in 0..COLUMNS_IN_TURN {
                let lines: [&[T]; COLUMNS_AT_ONCE] =
                    std::array::from_fn(|i| line(i * COLUMNS_IN_TURN + turn));
                let dots = vectorized!(|| dots(row, &lines, T::widen));
                for (i, dot) in dots.into_iter().enumerate() {
                    sums[i * COLUMNS_IN_TURN + turn] = dot;
                }
            }
        } else {
            for (column, sum) in sums[..columns.len()].iter_mut().enumerate() {
                [*sum] = vectorized!(|| dots(row, &[line(column)], T::widen));
            }
        }
        epilogue.store_any(&mut sums, COLUMN_BLOCK, Part { rows: 0..1, columns }, &output);
    });
}

/// The products of `row` with some rows of `matrix`, which are as long: the bits that [`product`] gives those columns when
/// it multiplies by all of `matrix`, transposed, and rounds to `T`.
pub(crate) fn rows_at<T: Float>(threads: &Threads, row: &[f32], matrix: &[T], places: &[usize]) -> Vec<f32> {
    let line = |place: usize| &matrix[place * row.len()..][..row.len()];
    let mut products = vec![0.0f32; places.len()];
    let shared = Shared::new(&mut products);
    threads.blocks(places.len(), COLUMNS_AT_ONCE, |block| {
        // SAFETY: each task has its own block.
        let products = unsafe { shared.range(block.clone()) };
        match <[usize; COLUMNS_AT_ONCE]>::try_from(&places[block.clone()]) {
            Ok(places) => {
                let lines = places.map(line);
                products.copy_from_slice(&vectorized!(|| dots(row, &lines, T::widen)));
            }
            Err(_) => {
                for (product, &place) in products.iter_mut().zip(&places[block]) {
                    [*product] = vectorized!(|| dots(row, &[line(place)], T::widen));
                }
            }
        }
        products.iter_mut().for_each(|product| *product = T::narrow(*product).widen());
    });
    products
}

/// The sum of products with each line, in an order that only the length decides.
#[inline(always)]
pub(crate) fn dots<T: Copy, const LINES: usize>(
    row: &[f32],
    lines: &[&[T]; LINES],
    widen: impl Fn(T) -> f32,
) -> [f32; LINES] {
    let mut lanes = [[0.0f32; LANES]; LINES];
    let (registers, rest) = row.as_chunks::<LANES>();
    let lines = lines.map(|line| line[..row.len()].as_chunks::<LANES>());
    // Cut to one length that the loop shares, so that it needs no checks.
    let whole = lines.map(|(whole, _)| &whole[..registers.len()]);
    for (register, row) in registers.iter().enumerate() {
        for (lanes, line) in lanes.iter_mut().zip(whole) {
            for lane in 0..LANES {
                lanes[lane] += row[lane] * widen(line[register][lane]);
            }
        }
    }
    for (lanes, (_, line)) in lanes.iter_mut().zip(lines) {
        for (lane, (a, b)) in lanes.iter_mut().zip(rest.iter().zip(line)) {
            *lane += a * widen(*b);
        }
    }
    lanes.map(|lanes| fold(lanes, |a, b| a + b))
}
