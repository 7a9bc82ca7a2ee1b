//! Blocking: which task multiplies what, from where.
//!
//! A task is a panel of the result, cut by the shape alone. It goes through `k` in slices that keep a panel
//! of the right operand in the second-level cache; sums wait between slices in
//! a panel of f32. An operand that several tasks share is packed once, before them; one that a single row of tasks
//! uses is packed by the task that needs it and never written to memory.

use std::arch::x86_64::*;
use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use ferrospeed_tensor::dtype::Float;
use ferrospeed_tensor::loops::simd::vectorized;
use ferrospeed_tensor::loops::threads::Threads;
use ferrospeed_tensor::{Category, DType, Result};
use half::bf16;

use super::{BLOCK, DEPTH, Factor, Left, PAIR, PARTS, TILE, Tiles};
use crate::activation;
use crate::aligned::Aligned;
use crate::gemm::{Epilogue, Operand, Output, Part};
use crate::parallel::Shared;
use crate::pool::HostPool;

/// How large the parts are that a product is cut into.
struct Blocking {
    /// Tile depths of a slice of `k`, at most: starting and ending a block of sums costs as much as four tiles of bf16.
    slice: usize,
    /// Up to this many rows of the result, tasks span all of them.
    few_rows: usize,
    /// Rows of a task's panel where there are more.
    panel_rows: usize,
    /// Columns of a task's panel, at most: the right operand's slice takes half of the second-level cache.
    panel_columns: usize,
    /// Whether a right operand that several rows of tasks need is packed as a whole before them.
    shares_right: bool,
}

const fn blocking<T: Factor>() -> Blocking {
    match T::PIECES {
        1 => Blocking { slice: 32, few_rows: 1024, panel_rows: 512, panel_columns: 512, shares_right: true },
        // Six times the work for what is packed, which takes three times the room.
        _ => Blocking { slice: 24, few_rows: 1024, panel_rows: 512, panel_columns: 256, shares_right: false },
    }
}

/// Rows this far apart share one set of the first-level cache, which cannot hold a block of them: they are copied first.
const ONE_SET: usize = 4096 / size_of::<bf16>();
/// Blocks of lines that one packing task brings into tiles, at most: neighbours share pages.
const PACKED_TOGETHER: usize = 8;

/// A batch of products of one shape.
pub(crate) struct Problem<'a, A, B, O, I> {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) batch: usize,
    /// The left operand of each product.
    pub(crate) a: A,
    /// The right operand of each product.
    pub(crate) b: B,
    pub(crate) epilogue: &'a Epilogue<'a>,
    /// Where each product goes.
    pub(crate) output: O,
    /// Computes some rows and columns of a product whose values tiles cannot stand for.
    pub(crate) instead: I,
}

/// What a task needs besides its operands; kept by its thread.
#[derive(Default)]
struct Workspace {
    left: Aligned<bf16>,
    right: Aligned<bf16>,
    sums: Aligned<f32>,
}

thread_local! {
    static WORKSPACE: RefCell<Workspace> = RefCell::default();
}

/// An operand in tiles: blocks of 32 rows or columns, each `steps` depths of `depth` elements.
struct Packed<'a> {
    tiles: &'a [bf16],
    steps: usize,
    depth: usize,
}

impl<'a> Packed<'a> {
    fn new<T: Factor>(tiles: &'a [bf16], steps: usize) -> Self {
        Packed { tiles, steps, depth: T::PIECES * PAIR }
    }

    fn block(&self, block: usize, step: usize) -> &[bf16] {
        &self.tiles[(block * self.steps + step) * self.depth..(block + 1) * self.steps * self.depth]
    }
}

/// Computes all products of `problem`.
pub(crate) fn products<'a, T, C, A, B, O, I>(
    threads: &Threads,
    pool: &HostPool,
    problem: &Problem<'_, A, B, O, I>,
) -> Result<()>
where
    T: Factor,
    C: Float,
    A: Fn(usize) -> Operand<'a, T> + Sync,
    B: Fn(usize) -> Operand<'a, T> + Sync,
    O: Fn(usize) -> Output<C> + Sync,
    I: Fn(usize, Range<usize>, Range<usize>) + Sync,
{
    let Problem { m, n, k, batch, .. } = *problem;
    let Blocking { few_rows, panel_rows, panel_columns, shares_right, .. } = blocking::<T>();
    let steps = k.div_ceil(DEPTH);
    let in_place = T::PIECES == 1 && (problem.a)(0).column_stride == 1 && k > 0 && k.is_multiple_of(DEPTH);
    let panel_rows = if m <= few_rows { m } else { panel_rows };
    // Equal panels, an even number of them where two threads are to end together. Those of f32 must not depend on threads, since
    // whole panels take another way where tiles cannot stand for their values.
    let together = if T::PIECES == 1 { threads.count().min(2) } else { 2 };
    let panels = n.div_ceil(panel_columns).next_multiple_of(together);
    let panel_columns = n.div_ceil(panels).next_multiple_of(BLOCK);
    let (down, across) = (m.div_ceil(panel_rows), n.div_ceil(panel_columns));
    let (row_blocks, column_blocks) = (m.div_ceil(BLOCK), n.div_ceil(BLOCK));

    let left = (!in_place).then(|| {
        let across_memory = (problem.a)(0).row_stride == 1;
        packed::<T>(threads, pool, batch * row_blocks, k, across_memory, |block, span, tiles| {
            T::pack_left(&(problem.a)(block / row_blocks), span, block % row_blocks * BLOCK, m, tiles)
        })
    });
    let left = left.transpose()?;
    let right = (shares_right && down > 1).then(|| {
        let across_memory = (problem.b)(0).column_stride == 1;
        packed::<T>(threads, pool, batch * column_blocks, k, across_memory, |block, span, tiles| {
            T::pack_right(&(problem.b)(block / column_blocks), span, block % column_blocks * BLOCK, n, tiles)
        })
    });
    let right = right.transpose()?;
    let packed_well = [&left, &right].into_iter().flatten().all(|scratch| scratch.stands_for_all);
    threads.run(batch * down * across, |task| {
        let (product, panel) = (task / (down * across), task % (down * across));
        let (row0, column0) = (panel % down * panel_rows, panel / down * panel_columns);
        let part = |blocks: usize| product * blocks * steps * T::PIECES * PAIR;
        let panel = Panel {
            k,
            rows: [row0, (row0 + panel_rows).min(m)],
            columns: [column0, (column0 + panel_columns).min(n)],
            a: (problem.a)(product),
            b: (problem.b)(product),
            left: left.as_ref().map(|all| Packed::new::<T>(&all.tiles()[part(row_blocks)..], steps)),
            right: right.as_ref().map(|all| Packed::new::<T>(&all.tiles()[part(column_blocks)..], steps)),
            epilogue: problem.epilogue,
        };
        let multiplied = packed_well
            && WORKSPACE.with_borrow_mut(|workspace| panel.multiply(workspace, &(problem.output)(product)));
        if !multiplied {
            let ([row0, row1], [column0, column1]) = (panel.rows, panel.columns);
            (problem.instead)(product, row0..row1, column0..column1);
        }
    });
    Ok(())
}

/// Packed tiles in the device's pool, given back when dropped.
struct Scratch<'a> {
    tiles: Shared<bf16>,
    stands_for_all: bool,
    block: crate::pool::Block,
    pool: &'a HostPool,
}

impl Scratch<'_> {
    /// All tiles, once packing is over.
    fn tiles(&self) -> &[bf16] {
        // SAFETY: `packed` has returned, so nobody writes any more.
        unsafe { self.tiles.range(0..self.tiles.len()) }
    }
}

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        self.pool.free(self.block, Category::Buffers);
    }
}

/// Packs `blocks` blocks of lines, several tasks at once.
fn packed<'p, T: Factor>(
    threads: &Threads,
    pool: &'p HostPool,
    blocks: usize,
    k: usize,
    across_memory: bool,
    pack: impl Fn(usize, [usize; 2], &mut [bf16]) -> bool + Sync + Send,
) -> Result<Scratch<'p>> {
    let part = k.div_ceil(DEPTH) * T::PIECES * PAIR;
    let length = blocks * part;
    let block = pool.take(2 * length, Category::Buffers)?;
    // SAFETY: the block is ours, aligned, and holds `length` elements; any bit pattern is a bf16.
    let tiles =
        Shared::new(unsafe { std::slice::from_raw_parts_mut(block.pointer.as_ptr().cast::<bf16>(), length) });
    let stands_for_all = AtomicBool::new(true);
    // An expert's rows are few blocks, of which no thread is to take all.
    let together = PACKED_TOGETHER.min(blocks.div_ceil(threads.count()));
    threads.blocks(blocks, together, |range| {
        // SAFETY: each block is packed by one task.
        let tiles = unsafe { tiles.range(range.start * part..range.end * part) };
        let all = pack_blocks::<T>(range.len(), part, [0, k], across_memory, tiles, |block, span, tiles| {
            pack(range.start + block, span, tiles)
        });
        stands_for_all.fetch_and(all, Ordering::Relaxed);
    });
    Ok(Scratch { tiles, stands_for_all: stands_for_all.into_inner(), block, pool })
}

/// Packs `count` blocks of lines, each to `part` elements, and says whether they stand for all values. Where lines of `k` lie
/// across memory, all blocks go on together, so that memory is read in the order in which it lies.
fn pack_blocks<T: Factor>(
    count: usize,
    part: usize,
    [k0, k1]: [usize; 2],
    across_memory: bool,
    tiles: &mut [bf16],
    pack: impl Fn(usize, [usize; 2], &mut [bf16]) -> bool,
) -> bool {
    let stride = if across_memory { DEPTH } else { (k1 - k0).max(1) };
    let mut stands_for_all = true;
    for k in (k0..k1).step_by(stride) {
        let step = (k - k0) / DEPTH;
        for (block, tiles) in tiles.chunks_mut(part).take(count).enumerate() {
            stands_for_all &= pack(block, [k, (k + stride).min(k1)], &mut tiles[step * T::PIECES * PAIR..]);
        }
    }
    stands_for_all
}

/// One task: `rows × columns` of one product.
struct Panel<'a, T> {
    k: usize,
    rows: [usize; 2],
    columns: [usize; 2],
    a: Operand<'a, T>,
    b: Operand<'a, T>,
    left: Option<Packed<'a>>,
    right: Option<Packed<'a>>,
    epilogue: &'a Epilogue<'a>,
}

impl<T: Factor> Panel<'_, T> {
    /// Computes the panel, or says that tiles cannot stand for all values of the right operand. Nothing is stored then: a panel
    /// is stored as its last slice is multiplied, which is packed before.
    fn multiply<C: Float>(&self, workspace: &mut Workspace, output: &Output<C>) -> bool {
        let ([row0, row1], [column0, column1]) = (self.rows, self.columns);
        let steps = self.k.div_ceil(DEPTH);
        let slices = steps.div_ceil(blocking::<T>().slice).max(1);
        // Equal slices: a thin last one would pay for its sums with little work.
        let slice_steps = steps.div_ceil(slices);
        let (down, across) = ((row1 - row0).div_ceil(BLOCK), (column1 - column0).div_ceil(BLOCK));
        // A block's sums wait for those of the next slice, and while the next block is multiplied.
        let waiting = if slices > 1 { down * across } else { 0 };
        let sums = Sums(Shared::new(workspace.sums.at_least((waiting + 2) * BLOCK * BLOCK)));
        let part = slice_steps * T::PIECES * PAIR;
        let right = workspace.right.at_least(across * part);
        let left = workspace.left.at_least(part);
        let tiles = Tiles::configure();
        let mut multiplied: Option<Multiplied> = None;
        let mut turn = 0;
        for slice in 0..slices {
            let (step0, step1) = (slice * slice_steps, ((slice + 1) * slice_steps).min(steps));
            let (k0, k1) = (step0 * DEPTH, (step1 * DEPTH).min(self.k));
            let depth = step1 - step0;
            if self.right.is_none() {
                let across_memory = self.b.column_stride == 1;
                let pack = |block: usize, span: [usize; 2], tiles: &mut [bf16]| {
                    T::pack_right(&self.b, span, column0 + block * BLOCK, column1, tiles)
                };
                if !pack_blocks::<T>(across, part, [k0, k1], across_memory, right, pack) {
                    return false;
                }
            }
            for down_block in 0..down {
                let row = row0 + down_block * BLOCK;
                let mut a = self.left_rows(row, k0);
                if self.left.is_none() {
                    if row + BLOCK <= row1 && !self.a.row_stride.is_multiple_of(ONE_SET) {
                        assert!(self.a.elements.len() > self.a.index(row + BLOCK - 1, k1 - 1));
                    } else {
                        // In place or not, these are values that tiles hold as they are.
                        T::pack_left(&self.a, [k0, k1], row, row1, left);
                        a = Left::packed::<T>(left);
                    }
                }
                let next = (down_block + 1 < down).then(|| self.left_rows(row + BLOCK, k0));
                for block in 0..across {
                    let column = column0 + block * BLOCK;
                    let b = match &self.right {
                        Some(packed) => packed.block(column / BLOCK, step0),
                        None => &right[block * part..],
                    };
                    assert!(b.len() >= depth * T::PIECES * PAIR);
                    let index = down_block * across + block;
                    let complete = slice + 1 == slices;
                    // bf16 values go on from the sums before. f32 values begin anew, and sums are added, so that a small
                    // piece is not rounded to the last place of a large sum.
                    let adds = T::PIECES > 1 && slice > 0;
                    turn = 1 - turn;
                    let place = if adds || complete { waiting + turn } else { index };
                    let goes_on = slice > 0 && !adds;
                    let (own, earlier) = (sums.start(place), goes_on.then(|| sums.start(index).cast_const()));
                    let other = multiplied.take();
                    let a = next.as_ref().map_or(a, |next| a.asking::<T>(next, block));
                    // SAFETY: `a` and `b` reach `depth` steps, as was asserted; `own` and `earlier` are whole blocks of ours,
                    // and what is being finished is in other places.
                    unsafe {
                        tiles.multiply_beside::<T>(a, b.as_ptr(), depth, earlier, own, |part| {
                            if let Some(other) = &other {
                                self.finish(other, part, &sums, output);
                            }
                            if T::PIECES > 1 && complete {
                                ask(output, row, column, part);
                            }
                            if goes_on {
                                sums.ask(index + 1, part);
                            }
                        });
                    }
                    let earlier = adds.then_some(index);
                    multiplied =
                        (complete || adds).then_some(Multiplied { place, earlier, complete, row, column });
                }
            }
        }
        if let Some(last) = multiplied {
            (0..PARTS).for_each(|part| self.finish(&last, part, &sums, output));
        }
        true
    }

    /// Where 32 rows of the left operand lie, from `k0` on.
    fn left_rows(&self, row: usize, k0: usize) -> Left {
        match &self.left {
            Some(packed) => Left::packed::<T>(packed.block(row / BLOCK, k0 / DEPTH)),
            None => Left::in_place(&self.a.elements[self.a.index(row, k0)..], self.a.row_stride),
        }
    }

    /// Adds and stores one of [`PARTS`] parts of a block's rows.
    #[inline(always)]
    fn finish<C: Float>(&self, block: &Multiplied, part: usize, sums: &Sums, output: &Output<C>) {
        const ROWS: usize = BLOCK / PARTS;
        // SAFETY: nothing else refers to these places now.
        let (own, earlier) =
            unsafe { (sums.block(block.place), block.earlier.map(|place| sums.block(place))) };
        if let Some(earlier) = earlier {
            let values = part * ROWS * BLOCK..(part + 1) * ROWS * BLOCK;
            let (own, earlier) = (&mut own[values.clone()], &mut earlier[values]);
            let (to, from) = if block.complete { (own, earlier) } else { (earlier, own) };
            vectorized!(|| to.iter_mut().zip(from.iter()).for_each(|(to, from)| *to += from));
        }
        if !block.complete {
            return;
        }
        let width = BLOCK.min(self.columns[1] - block.column);
        let rows = part * ROWS..((part + 1) * ROWS).min(self.rows[1] - block.row);
        if C::DTYPE == DType::BF16 && width == BLOCK && self.epilogue.is_fresh() {
            let bias = self.epilogue.bias.map_or(&[0.0; BLOCK][..], |bias| &bias[block.column..][..BLOCK]);
            let table = self.epilogue.activation.and_then(activation::table::<C>);
            // SAFETY: this task alone writes these rows and columns; AMX implies AVX512_BF16.
            return unsafe { store_rounded(own, block, rows, bias, table, output) };
        }
        // The last parts of a block of few rows have none.
        let sums = &mut own[rows.start.min(rows.end) * BLOCK..rows.end * BLOCK];
        let part = Part {
            rows: block.row + rows.start..block.row + rows.end,
            columns: block.column..block.column + width,
        };
        self.epilogue.store(sums, BLOCK, part, output);
    }
}

/// Blocks of sums of one panel.
struct Sums(Shared<f32>);

impl Sums {
    /// # Safety
    /// No other slice of this place is in use.
    #[expect(clippy::mut_from_ref, reason = "places are apart")]
    unsafe fn block(&self, place: usize) -> &mut [f32] {
        // SAFETY: passed on to the caller.
        unsafe { self.0.range(place * BLOCK * BLOCK..(place + 1) * BLOCK * BLOCK) }
    }

    fn start(&self, place: usize) -> *mut f32 {
        self.0.pointer().wrapping_add(place * BLOCK * BLOCK)
    }

    /// Asks for one of [`PARTS`] parts of a block.
    #[inline(always)]
    fn ask(&self, place: usize, part: usize) {
        const LINES: usize = BLOCK * BLOCK * size_of::<f32>() / 64;
        for line in part * LINES / PARTS..(part + 1) * LINES / PARTS {
            // SAFETY: asking for memory touches nothing.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.start(place).wrapping_byte_add(64 * line).cast()) };
        }
    }
}

/// A block that was multiplied, to be finished while the next one is.
struct Multiplied {
    place: usize,
    /// Where the sums of earlier slices are, which these are to be added to.
    earlier: Option<usize>,
    /// Whether this was the last slice.
    complete: bool,
    row: usize,
    column: usize,
}

/// Asks for the rows of the result that one of [`PARTS`] parts of a block goes to.
#[inline(always)]
fn ask<C>(output: &Output<C>, row: usize, column: usize, part: usize) {
    const ROWS: usize = BLOCK / PARTS;
    for row in row + part * ROWS..row + (part + 1) * ROWS {
        let start = output.c.pointer().wrapping_add(output.offset + row * output.row_stride + column);
        for line in 0..BLOCK * size_of::<C>() / 64 {
            // SAFETY: asking for memory touches nothing.
            unsafe { _mm_prefetch::<_MM_HINT_ET0>(start.wrapping_byte_add(64 * line).cast()) };
        }
    }
}

/// Stores some rows of a block as bf16, which `C` is: with the bias, and the activation where there is a table of it. The
/// rounding instruction takes denormals for zero, as the one that made the sums does.
///
/// # Safety
/// No other task touches these rows and columns of the output. The processor has AVX512_BF16.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn store_rounded<C: Float>(
    sums: &[f32],
    block: &Multiplied,
    rows: std::ops::Range<usize>,
    bias: &[f32],
    table: Option<&activation::Table>,
    output: &Output<C>,
) {
    assert!(sums.len() >= rows.end * BLOCK && bias.len() == BLOCK && size_of::<C>() == size_of::<bf16>());
    for r in rows {
        // SAFETY: passed on to the caller.
        let (c, before) = unsafe { output.row(block.row + r, block.column..block.column + BLOCK) };
        let half = |first: usize| {
            // SAFETY: both halves lie inside the rows, as was asserted.
            unsafe {
                _mm512_add_ps(
                    _mm512_loadu_ps(sums.as_ptr().add(r * BLOCK + first)),
                    _mm512_loadu_ps(bias.as_ptr().add(first)),
                )
            }
        };
        let mut line = rounded(half(0), half(TILE));
        if let Some(before) = before {
            // SAFETY: a row of the output is as long.
            unsafe { _mm512_storeu_si512(before.as_mut_ptr().cast(), line) };
        }
        if let Some(table) = table {
            let half = |half| activation::wide::results(&table.values, half);
            line = rounded(half(_mm512_castsi512_si256(line)), half(_mm512_extracti64x4_epi64::<1>(line)));
        }
        // SAFETY: as above.
        unsafe { _mm512_storeu_si512(c.as_mut_ptr().cast(), line) };
    }
}

/// Two halves of a row, rounded to bf16.
#[target_feature(enable = "avx512f,avx512bf16")]
#[inline]
fn rounded(low: __m512, high: __m512) -> __m512i {
    // SAFETY: the same 512 bits under another name.
    unsafe { std::mem::transmute(_mm512_cvtne2ps_pbh(high, low)) }
}
