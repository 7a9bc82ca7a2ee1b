//! Blocking: which task multiplies what, and in which order.
//!
//! A task is a panel of the result. It goes through `k` in slices: the right operand's slice is
//! packed into the second-level cache and stays there while all rows of the panel go by, 14 at a time; these rows of the left
//! operand are packed into the first-level cache and stay there while all columns go by. Sums wait between slices in the
//! result itself, or, where that is of 16 bits, in a panel of their own. Few rows read an f32 right operand in place.

use std::cell::RefCell;
use std::ops::Range;

use ferrospeed_tensor::DType;
use ferrospeed_tensor::backend::Gemm;
use ferrospeed_tensor::loops::threads::Threads;

use super::finish::finish;
use super::lanes::{Lanes, Wide, Words};
use super::pack::{SLACK, pack_left, pack_right, words};
use super::{BLOCK_COLUMNS, BLOCK_ROWS, Block, LANES, PART, dots};
use crate::aligned::Aligned;
use crate::gemm::{AnyOutput, Epilogue, Operand, Output, Part};
use crate::parallel::Shared;

/// Words along `k` of a slice, at most: 14 rows of it take half of the first-level cache.
const SLICE: usize = 384;
/// Rows of a panel, at most: each packs the right operand anew.
const PANEL_ROWS: usize = 1024;
/// Rows of a panel that read the right operand in place, at most.
const FEW_ROWS: usize = 64;
/// Columns of a panel, at most: a slice of the right operand takes about half of the second-level cache.
const PANEL_COLUMNS: usize = 768;

/// Rows and columns of a panel below which it is not cut any further.
const LEAST: usize = 128;

/// What a task packs its operands into; kept by its thread.
#[derive(Default)]
struct Workspace {
    left: Aligned<f32>,
    right: Aligned<f32>,
}

thread_local! {
    static WORKSPACE: RefCell<Workspace> = RefCell::default();
    /// The sums of a panel whose result is of 16 bits.
    static SUMS: RefCell<Aligned<f32>> = RefCell::default();
}

/// Computes a batch of products of 16-bit operands.
pub(crate) fn products_16_bit<W: Words>(threads: &Threads, gemm: &Gemm<'_>, epilogue: &Epilogue<'_>) {
    let plain = Epilogue { alpha: 1.0, accumulate: false, bias: None, activation: None };
    panels(threads, gemm, |product, rows, columns| {
        let (a, b) = (Operand::<W::Element>::new(&gemm.a, product), Operand::new(&gemm.b, product));
        let a = Operand { elements: a.elements.get(a.index(rows.start, 0)..).unwrap_or_default(), ..a };
        let b = Operand { elements: b.elements.get(b.index(0, columns.start)..).unwrap_or_default(), ..b };
        SUMS.with_borrow_mut(|sums| {
            let (height, width) = (rows.len(), columns.len());
            let sums = sums.at_least(height * width);
            let panel = Output { c: Shared::new(sums), before: None, offset: 0, row_stride: width };
            multiply::<W>(&a, &b, 0..height, 0..width, gemm.k, &plain, &panel);
            epilogue.store_any(sums, width, Part { rows, columns }, &AnyOutput::of(gemm, product));
        });
    });
}

/// Computes a batch of products.
pub(crate) fn products(
    threads: &Threads,
    gemm: &Gemm<'_>,
    epilogue: &Epilogue<'_>,
    output: impl Fn(usize) -> Output<f32> + Send + Sync,
) {
    panels(threads, gemm, |product, rows, columns| {
        let (a, b) = (Operand::<f32>::new(&gemm.a, product), Operand::new(&gemm.b, product));
        multiply::<Wide<f32>>(&a, &b, rows, columns, gemm.k, epilogue, &output(product));
    });
}

/// Runs `task(product, rows, columns)` for every panel of every product.
fn panels(
    threads: &Threads,
    gemm: &Gemm<'_>,
    task: impl Fn(usize, Range<usize>, Range<usize>) + Send + Sync,
) {
    let (m, n) = (gemm.m, gemm.n);
    let [panel_rows, panel_columns] = panel(m, n, gemm.batch, threads.count());
    let (down, across) = (m.div_ceil(panel_rows), n.div_ceil(panel_columns));
    threads.run(gemm.batch * down * across, |index| {
        let (product, panel) = (index / (down * across), index % (down * across));
        let (row, column) = (panel % down * panel_rows, panel / down * panel_columns);
        task(product, row..(row + panel_rows).min(m), column..(column + panel_columns).min(n));
    });
}

/// Rows and columns of a panel: as large as the caches allow, or as many panels as keep all threads busy to the end. Where
/// panels begin and end changes no element's sum, so the number of threads may decide it.
fn panel(m: usize, n: usize, batch: usize, threads: usize) -> [usize; 2] {
    let (mut down, mut across) = (m.div_ceil(PANEL_ROWS), n.div_ceil(PANEL_COLUMNS));
    let size =
        |down: usize, across: usize| [m.div_ceil(down), n.div_ceil(across).next_multiple_of(BLOCK_COLUMNS)];
    let panels = |down: usize, across: usize| batch * down * across;
    while !panels(down, across).is_multiple_of(threads) && panels(down, across) < 4 * threads {
        match size(down, across) {
            [rows, columns] if columns >= rows.max(2 * LEAST) => across += 1,
            [rows, _] if rows >= 2 * LEAST => down += 1,
            [_, columns] if columns >= 2 * LEAST => across += 1,
            _ => break,
        }
    }
    size(down, across)
}

/// Computes some rows and columns of a product on this thread. They belong to the caller.
pub(crate) fn multiply<W: Words>(
    a: &Operand<'_, W::Element>,
    b: &Operand<'_, W::Element>,
    rows: Range<usize>,
    columns: Range<usize>,
    k: usize,
    epilogue: &Epilogue<'_>,
    output: &Output<f32>,
) {
    if rows.is_empty() || columns.is_empty() {
        return;
    }
    if dots::suits(a, b, rows.len()) {
        return dots::multiply(a, b, rows, columns, k, epilogue, output);
    }
    assert!(output.reaches(rows.end, columns.end));
    assert!(k == 0 || b.index(k - 1, columns.end - 1) < b.elements.len());
    // Equal slices: a thin last one would pay for its sums with little work.
    let slices = k.div_ceil(SLICE * W::VALUES).max(1);
    let step = k.div_ceil(slices).next_multiple_of(W::VALUES);
    let finishes = epilogue.finishes(output);
    let packed_from = packed_from(b, rows.len(), &columns);
    WORKSPACE.with_borrow_mut(|workspace| {
        let depth = words::<W>(0, step);
        let right = workspace.right.at_least(depth * (columns.end - packed_from).next_multiple_of(LANES));
        let left = workspace.left.at_least(depth * BLOCK_ROWS + SLACK);
        for slice in 0..slices {
            let span = [(slice * step).min(k), ((slice + 1) * step).min(k)];
            let depth = words::<W>(span[0], span[1]);
            if packed_from < columns.end {
                pack_right::<W>(b, span, [packed_from, columns.end], right);
            }
            for row in rows.clone().step_by(BLOCK_ROWS) {
                let height = BLOCK_ROWS.min(rows.end - row);
                pack_left::<W>(a, span, row, height, left);
                let after = (row + BLOCK_ROWS).min(rows.end);
                let next = after..(after + BLOCK_ROWS).min(rows.end);
                for (index, column) in columns.clone().step_by(BLOCK_COLUMNS).enumerate() {
                    let width = BLOCK_COLUMNS.min(columns.end - column);
                    let (ahead, ahead_bytes) = ahead(a, span, next.clone(), index);
                    let (right, right_stride) = match column.checked_sub(packed_from) {
                        Some(before) => (right[before * depth..].as_ptr(), width.next_multiple_of(LANES)),
                        // Read in place, which only f32 is.
                        None => {
                            (b.elements.as_ptr().wrapping_add(b.index(span[0], column)).cast(), b.row_stride)
                        }
                    };
                    let block = Block {
                        left: left.as_ptr(),
                        right,
                        right_stride,
                        depth,
                        target: output
                            .c
                            .pointer()
                            .wrapping_add(output.offset + row * output.row_stride + column),
                        target_stride: output.row_stride,
                        rows: height,
                        columns: width,
                        alpha: epilogue.alpha,
                        ahead,
                        ahead_bytes,
                        add: slice > 0 || epilogue.accumulate,
                    };
                    // SAFETY: both operands were packed for this slice; the target lies inside the result, as was
                    // asserted, and belongs to the caller; these kernels are only used where AVX-512 is.
                    unsafe {
                        block.multiply::<W>();
                        if finishes && slice + 1 == slices {
                            finish(epilogue, output, row..row + height, column..column + width);
                        }
                    }
                }
            }
        }
    });
}

/// The first column of the right operand that is packed. Few rows do not pay for that: they read it in place, except for a
/// last strip that is no whole number of registers.
fn packed_from<T: Lanes>(b: &Operand<'_, T>, rows: usize, columns: &Range<usize>) -> usize {
    if rows > FEW_ROWS || b.column_stride != 1 || T::DTYPE != DType::F32 {
        columns.start
    } else if columns.len().is_multiple_of(LANES) {
        columns.end
    } else {
        columns.start + columns.len() / BLOCK_COLUMNS * BLOCK_COLUMNS
    }
}

/// Where the rows that are packed next lie, from which a block asks for its share, and how far apart its lines are.
fn ahead<T: Lanes>(
    a: &Operand<'_, T>,
    [k0, k1]: [usize; 2],
    rows: Range<usize>,
    block: usize,
) -> (*const u8, usize) {
    let (row, k, stride) = if a.column_stride == 1 {
        (rows.start + block, k0, PART)
    } else {
        (rows.end.saturating_sub(1), k0 + block * (k1 - k0).div_ceil(PART), a.column_stride)
    };
    if row >= rows.end || row < rows.start || k >= k1 {
        return (a.elements.as_ptr().cast(), 0);
    }
    (a.elements.as_ptr().wrapping_add(a.index(row, k)).cast(), stride * size_of::<T>())
}
