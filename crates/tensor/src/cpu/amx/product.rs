//! Blocking: which task multiplies what, from where.
//!
//! A task is a panel of the result, cut by the shape alone. It goes through `k` in slices that keep a panel
//! of the right operand in the second-level cache; sums wait between slices in
//! a panel of f32. An operand that several tasks share is packed once, before them; one that a single row of tasks
//! uses is packed by the task that needs it and never written to memory.

use std::cell::RefCell;

use half::bf16;

use super::{BLOCK, DEPTH, Left, PAIR, Tiles, pack_left, pack_right};
use crate::cpu::gemm::{Epilogue, Operand, Output};
use crate::cpu::parallel::{Shared, Threads};
use crate::cpu::simd::vectorized;
use crate::dtype::Float;
use crate::error::Result;
use crate::memory::{Category, HostPool};

/// Tile depths per slice of `k`: starting and ending a block of sums costs as much as four of them.
const SLICE: usize = 32;
/// Up to this many rows of the result, tasks span all of them and pack the right operand themselves.
const FEW_ROWS: usize = 512;
/// Rows of a task's panel where there are more.
const PANEL_ROWS: usize = 256;
/// Columns of a task's panel.
const PANEL_COLUMNS: usize = 256;
/// The same where tasks span all rows.
const NARROW_COLUMNS: usize = 128;
/// Blocks of lines that one packing task brings into tiles: neighbours share pages.
const PACKED_TOGETHER: usize = 4;

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
    left: Vec<bf16>,
    right: Vec<bf16>,
    sums: Vec<f32>,
}

thread_local! {
    static WORKSPACE: RefCell<Workspace> = RefCell::default();
}

fn at_least<T: Clone + Default>(buffer: &mut Vec<T>, length: usize) -> &mut [T] {
    if buffer.len() < length {
        buffer.resize(length, T::default());
    }
    &mut buffer[..length]
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
    let (panel_rows, panel_columns) =
        if few_rows { (m, NARROW_COLUMNS) } else { (PANEL_ROWS, PANEL_COLUMNS) };
    let (down, across) = (m.div_ceil(panel_rows), n.div_ceil(panel_columns));
    let (row_blocks, column_blocks) = (m.div_ceil(BLOCK), n.div_ceil(BLOCK));

    let left = (!in_place).then(|| {
        packed(threads, pool, batch * row_blocks, steps, |block, tiles| {
            pack_left(&(problem.a)(block / row_blocks), [0, k], block % row_blocks * BLOCK, m, tiles);
        })
    });
    let left = left.transpose()?;
    let right = (!few_rows).then(|| {
        packed(threads, pool, batch * column_blocks, steps, |block, tiles| {
            pack_right(&(problem.b)(block / column_blocks), [0, k], block % column_blocks * BLOCK, n, tiles);
        })
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
    steps: usize,
    pack: impl Fn(usize, &mut [bf16]) + Sync + Send,
) -> Result<Scratch<'p>> {
    let length = blocks * steps * PAIR;
    let block = pool.take(2 * length, Category::Buffers)?;
    // SAFETY: the block is ours, aligned, and holds `length` elements; any bit pattern is a bf16.
    let tiles =
        Shared::new(unsafe { std::slice::from_raw_parts_mut(block.pointer.as_ptr().cast::<bf16>(), length) });
    threads.blocks(blocks, PACKED_TOGETHER, |range| {
        for block in range {
            // SAFETY: each block is packed by one task.
            pack(block, unsafe { tiles.range(block * steps * PAIR..(block + 1) * steps * PAIR) });
        }
    });
    Ok(Scratch { tiles, block, pool })
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
        let sums = at_least(&mut workspace.sums, down * across * BLOCK * BLOCK);
        let right = at_least(&mut workspace.right, across * slice_steps * PAIR);
        let left = at_least(&mut workspace.left, slice_steps * PAIR);
        let tiles = Tiles::configure();
        for slice in 0..slices {
            let (step0, step1) = (slice * slice_steps, ((slice + 1) * slice_steps).min(steps));
            let (k0, k1) = (step0 * DEPTH, (step1 * DEPTH).min(self.k));
            let depth = step1 - step0;
            if self.right.is_none() {
                for block in 0..across {
                    let target = &mut right[block * slice_steps * PAIR..(block + 1) * slice_steps * PAIR];
                    pack_right(&self.b, [k0, k1], column0 + block * BLOCK, column1, target);
                }
            }
            for down_block in 0..down {
                let row = row0 + down_block * BLOCK;
                let a = match &self.left {
                    Some(packed) => Left::packed(packed.block(row / BLOCK, step0)),
                    None if row + BLOCK <= row1 => {
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
                    let target = (down_block * across + block) * BLOCK * BLOCK;
                    let sums = &mut sums[target..target + BLOCK * BLOCK];
                    assert!(b.len() >= depth * PAIR);
                    // SAFETY: `a` and `b` reach `depth` steps, as was asserted; `sums` is a whole block of ours.
                    unsafe { tiles.multiply(a, b.as_ptr(), depth, sums.as_mut_ptr(), BLOCK, slice > 0) };
                    if slice + 1 == slices {
                        self.store(sums, row, column, output);
                    }
                }
            }
        }
    }

    fn store<C: Float>(&self, sums: &mut [f32], row: usize, column: usize, output: &Output<C>) {
        let width = BLOCK.min(self.columns[1] - column);
        vectorized!(|| {
            for r in 0..BLOCK.min(self.rows[1] - row) {
                // SAFETY: this task alone writes these rows and columns.
                let (c, before) = unsafe { output.row(row + r, column..column + width) };
                self.epilogue.store(&mut sums[r * BLOCK..r * BLOCK + width], column, c, before);
            }
        });
    }
}
