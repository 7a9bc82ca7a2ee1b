//! Blocking: which task multiplies what, from where.
//!
//! A task is a panel of the result, cut by the shape alone. It goes through `k` in slices that keep a panel
//! of the right operand in the second-level cache; sums wait between slices in
//! a panel of f32. An operand that several tasks share is packed once, before them; one that a single row of tasks
//! uses is packed by the task that needs it and never written to memory.

use std::arch::x86_64::*;
use std::cell::RefCell;

use half::bf16;

use super::{BLOCK, DEPTH, Left, PAIR, PARTS, TILE, Tiles, pack_left, pack_right};
use crate::cpu::activation;
use crate::cpu::aligned::Aligned;
use crate::cpu::gemm::{Epilogue, Operand, Output};
use crate::cpu::parallel::{Shared, Threads};
use crate::cpu::simd::vectorized;
use crate::dtype::{DType, Float};
use crate::error::Result;
use crate::memory::{Category, HostPool};

/// Tile depths per slice of `k`: starting and ending a block of sums costs as much as four of them.
const SLICE: usize = 32;
/// Up to this many rows of the result, tasks span all of them and pack the right operand themselves.
const FEW_ROWS: usize = 1024;
/// Rows of a task's panel where there are more.
const PANEL_ROWS: usize = 512;
/// Columns of a task's panel, at most: the right operand's slice takes half of the second-level cache.
const PANEL_COLUMNS: usize = 512;
/// Rows this far apart share one set of the first-level cache, which cannot hold a block of them: they are copied first.
const ONE_SET: usize = 4096 / size_of::<bf16>();
/// Blocks of lines that one packing task brings into tiles: neighbours share pages.
const PACKED_TOGETHER: usize = 8;

/// A batch of products of one shape.
pub(crate) struct Problem<'a, A, B, O> {
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

/// An operand in tiles: `lines` blocks of 32 rows or columns, each `steps` pairs deep.
struct Packed<'a> {
    tiles: &'a [bf16],
    steps: usize,
}

impl Packed<'_> {
    fn block(&self, block: usize, step: usize) -> &[bf16] {
        &self.tiles[(block * self.steps + step) * PAIR..(block + 1) * self.steps * PAIR]
    }
}

/// Computes all products of `problem`.
pub(crate) fn products<'a, C, A, B, O>(
    threads: &Threads,
    pool: &HostPool,
    problem: &Problem<'_, A, B, O>,
) -> Result<()>
where
    C: Float,
    A: Fn(usize) -> Operand<'a, bf16> + Sync,
    B: Fn(usize) -> Operand<'a, bf16> + Sync,
    O: Fn(usize) -> Output<C> + Sync,
{
    let Problem { m, n, k, batch, .. } = *problem;
    let steps = k.div_ceil(DEPTH);
    let few_rows = m <= FEW_ROWS;
    let in_place = (problem.a)(0).column_stride == 1 && k > 0 && k.is_multiple_of(DEPTH);
    let panel_rows = if few_rows { m } else { PANEL_ROWS };
    // An even number of equal panels, so that two threads end together.
    let panel_columns = n.div_ceil(n.div_ceil(PANEL_COLUMNS).next_multiple_of(2)).next_multiple_of(BLOCK);
    let (down, across) = (m.div_ceil(panel_rows), n.div_ceil(panel_columns));
    let (row_blocks, column_blocks) = (m.div_ceil(BLOCK), n.div_ceil(BLOCK));

    let left = (!in_place).then(|| {
        packed(threads, pool, batch * row_blocks, k, (problem.a)(0).row_stride == 1, |block, range, tiles| {
            pack_left(&(problem.a)(block / row_blocks), range, block % row_blocks * BLOCK, m, tiles);
        })
    });
    let left = left.transpose()?;
    let right = (!few_rows).then(|| {
        packed(
            threads,
            pool,
            batch * column_blocks,
            k,
            (problem.b)(0).column_stride == 1,
            |block, range, tiles| {
                pack_right(
                    &(problem.b)(block / column_blocks),
                    range,
                    block % column_blocks * BLOCK,
                    n,
                    tiles,
                );
            },
        )
    });
    let right = right.transpose()?;
    threads.run(batch * down * across, |task| {
        let (product, panel) = (task / (down * across), task % (down * across));
        let (row0, column0) = (panel % down * panel_rows, panel / down * panel_columns);
        let part = |blocks: usize| product * blocks * steps * PAIR;
        let panel = Panel {
            k,
            rows: [row0, (row0 + panel_rows).min(m)],
            columns: [column0, (column0 + panel_columns).min(n)],
            a: (problem.a)(product),
            b: (problem.b)(product),
            left: left.as_ref().map(|all| Packed { tiles: &all.tiles()[part(row_blocks)..], steps }),
            right: right.as_ref().map(|all| Packed { tiles: &all.tiles()[part(column_blocks)..], steps }),
            epilogue: problem.epilogue,
        };
        WORKSPACE.with_borrow_mut(|workspace| panel.multiply(workspace, &(problem.output)(product)));
    });
    Ok(())
}

/// Packed tiles in the device's pool, given back when dropped.
struct Scratch<'a> {
    tiles: Shared<bf16>,
    block: crate::memory::Block,
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
fn packed<'p>(
    threads: &Threads,
    pool: &'p HostPool,
    blocks: usize,
    k: usize,
    across_memory: bool,
    pack: impl Fn(usize, [usize; 2], &mut [bf16]) + Sync + Send,
) -> Result<Scratch<'p>> {
    let part = k.div_ceil(DEPTH) * PAIR;
    let length = blocks * part;
    let block = pool.take(2 * length, Category::Buffers)?;
    // SAFETY: the block is ours, aligned, and holds `length` elements; any bit pattern is a bf16.
    let tiles =
        Shared::new(unsafe { std::slice::from_raw_parts_mut(block.pointer.as_ptr().cast::<bf16>(), length) });
    threads.blocks(blocks, PACKED_TOGETHER, |range| {
        // SAFETY: each block is packed by one task.
        let tiles = unsafe { tiles.range(range.start * part..range.end * part) };
        pack_blocks(range.len(), part, [0, k], across_memory, tiles, |block, span, tiles| {
            pack(range.start + block, span, tiles);
        });
    });
    Ok(Scratch { tiles, block, pool })
}

/// Packs `count` blocks of lines, each to `part` elements. Where lines of `k` lie across memory, all blocks go on
/// together, so that memory is read in the order in which it lies.
fn pack_blocks(
    count: usize,
    part: usize,
    [k0, k1]: [usize; 2],
    across_memory: bool,
    tiles: &mut [bf16],
    pack: impl Fn(usize, [usize; 2], &mut [bf16]),
) {
    let stride = if across_memory { DEPTH } else { (k1 - k0).max(1) };
    for k in (k0..k1).step_by(stride) {
        let step = (k - k0) / DEPTH;
        for (block, tiles) in tiles.chunks_mut(part).take(count).enumerate() {
            pack(block, [k, (k + stride).min(k1)], &mut tiles[step * PAIR..]);
        }
    }
}

/// One task: `rows × columns` of one product.
struct Panel<'a> {
    k: usize,
    rows: [usize; 2],
    columns: [usize; 2],
    a: Operand<'a, bf16>,
    b: Operand<'a, bf16>,
    left: Option<Packed<'a>>,
    right: Option<Packed<'a>>,
    epilogue: &'a Epilogue<'a>,
}

impl Panel<'_> {
    fn multiply<C: Float>(&self, workspace: &mut Workspace, output: &Output<C>) {
        let ([row0, row1], [column0, column1]) = (self.rows, self.columns);
        let steps = self.k.div_ceil(DEPTH);
        let slices = steps.div_ceil(SLICE).max(1);
        // Equal slices: a thin last one would pay for its sums with little work.
        let slice_steps = steps.div_ceil(slices);
        let (down, across) = ((row1 - row0).div_ceil(BLOCK), (column1 - column0).div_ceil(BLOCK));
        // A block's sums wait for the next slice, or while the next block is multiplied.
        let places = if slices > 1 { down * across } else { 2 };
        let sums = Shared::new(workspace.sums.at_least(places * BLOCK * BLOCK));
        let right = workspace.right.at_least(across * slice_steps * PAIR);
        let left = workspace.left.at_least(slice_steps * PAIR);
        let tiles = Tiles::configure();
        let mut finished = None;
        for slice in 0..slices {
            let (step0, step1) = (slice * slice_steps, ((slice + 1) * slice_steps).min(steps));
            let (k0, k1) = (step0 * DEPTH, (step1 * DEPTH).min(self.k));
            let depth = step1 - step0;
            if self.right.is_none() {
                let across_memory = self.b.column_stride == 1;
                pack_blocks(
                    across,
                    slice_steps * PAIR,
                    [k0, k1],
                    across_memory,
                    right,
                    |block, span, tiles| {
                        pack_right(&self.b, span, column0 + block * BLOCK, column1, tiles);
                    },
                );
            }
            for down_block in 0..down {
                let row = row0 + down_block * BLOCK;
                let a = match &self.left {
                    Some(packed) => Left::packed(packed.block(row / BLOCK, step0)),
                    None if row + BLOCK <= row1 && !self.a.row_stride.is_multiple_of(ONE_SET) => {
                        let start = self.a.index(row, k0);
                        assert!(self.a.elements.len() > self.a.index(row + BLOCK - 1, k1 - 1));
                        Left::in_place(&self.a.elements[start..], self.a.row_stride)
                    }
                    None => {
                        pack_left(&self.a, [k0, k1], row, row1, left);
                        Left::packed(left)
                    }
                };
                for block in 0..across {
                    let column = column0 + block * BLOCK;
                    let b = match &self.right {
                        Some(packed) => packed.block(column / BLOCK, step0),
                        None => &right[block * slice_steps * PAIR..],
                    };
                    assert!(b.len() >= depth * PAIR);
                    let index = down_block * across + block;
                    let start = index % places * BLOCK * BLOCK;
                    // SAFETY: the block that is being stored has another place.
                    let own = unsafe { sums.range(start..start + BLOCK * BLOCK) };
                    let before: Option<Finished<'_>> = finished.take();
                    // SAFETY: `a` and `b` reach `depth` steps, as was asserted; `own` is a whole block of ours.
                    unsafe {
                        tiles.multiply_beside(a, b.as_ptr(), depth, own.as_mut_ptr(), slice > 0, |part| {
                            if let Some(before) = &before {
                                self.store(before, part, output);
                            }
                        });
                    }
                    if slice + 1 == slices {
                        finished = Some(Finished { sums: own, row, column });
                    }
                }
            }
        }
        if let Some(last) = finished {
            (0..PARTS).for_each(|part| self.store(&last, part, output));
        }
    }

    /// Stores one of [`PARTS`] parts of a block's rows.
    #[inline(always)]
    fn store<C: Float>(&self, block: &Finished<'_>, part: usize, output: &Output<C>) {
        const ROWS: usize = BLOCK / PARTS;
        let width = BLOCK.min(self.columns[1] - block.column);
        let rows = part * ROWS..((part + 1) * ROWS).min(self.rows[1] - block.row);
        if C::DTYPE == DType::BF16 && width == BLOCK && self.epilogue.is_fresh() {
            let bias = self.epilogue.bias.map_or(&[0.0; BLOCK][..], |bias| &bias[block.column..][..BLOCK]);
            let table = self.epilogue.activation.and_then(activation::table::<C>);
            // SAFETY: this task alone writes these rows and columns; AMX implies AVX512_BF16.
            return unsafe { store_rounded(block, rows, bias, table, output) };
        }
        vectorized!(|| {
            for r in rows.clone() {
                let mut sums = [0.0f32; BLOCK];
                sums.copy_from_slice(&block.sums[r * BLOCK..][..BLOCK]);
                // SAFETY: this task alone writes these rows and columns.
                let (c, before) = unsafe { output.row(block.row + r, block.column..block.column + width) };
                self.epilogue.store(&mut sums[..width], block.column, c, before);
            }
        });
    }
}

/// A block whose sums are complete, to be stored while the next one is multiplied.
struct Finished<'a> {
    sums: &'a [f32],
    row: usize,
    column: usize,
}

/// Stores some rows of a block as bf16, which `C` is: with the bias, and the activation where there is a table of it. The
/// rounding instruction takes denormals for zero, as the one that made the sums does.
///
/// # Safety
/// No other task touches these rows and columns of the output. The processor has AVX512_BF16.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn store_rounded<C: Float>(
    block: &Finished<'_>,
    rows: std::ops::Range<usize>,
    bias: &[f32],
    table: Option<&activation::Table>,
    output: &Output<C>,
) {
    assert!(
        block.sums.len() >= rows.end * BLOCK && bias.len() == BLOCK && size_of::<C>() == size_of::<bf16>()
    );
    for r in rows {
        // SAFETY: passed on to the caller.
        let (c, before) = unsafe { output.row(block.row + r, block.column..block.column + BLOCK) };
        let half = |first: usize| {
            // SAFETY: both halves lie inside the rows, as was asserted.
            unsafe {
                _mm512_add_ps(
                    _mm512_loadu_ps(block.sums.as_ptr().add(r * BLOCK + first)),
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
