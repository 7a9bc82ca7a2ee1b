//! 16-bit products on processors without vectors of 512 bits: operands are widened once, multiplied in f32 and rounded once.
//!
//! Very few rows are bound by reading the right operand, and writing it anew would take longer than the product: where its
//! columns are consecutive they go to `rows_alone.rs`, which widens what it reads.

use ferrospeed_tensor::backend::{Gemm, Matrix};
use ferrospeed_tensor::dtype::Float;
use ferrospeed_tensor::loops::simd::vectorized;
use ferrospeed_tensor::loops::threads::Threads;
use ferrospeed_tensor::{Category, Result};

use crate::gemm::{AnyOutput, Epilogue, Operand, Part, through_scratch, tiles};
use crate::parallel::Shared;
use crate::pool::{Block, HostPool};
use crate::{read, rows_alone};

/// Rows that do not pay for a wide copy of the right operand, at most.
const FEW_ROWS: usize = 4;
/// Lines that a task widens.
const LINES: usize = 16;

/// Computes a batch of products.
pub(super) fn products<T: Float>(
    threads: &Threads,
    pool: &HostPool,
    gemm: &Gemm<'_>,
    epilogue: &Epilogue<'_>,
) -> Result<()> {
    if gemm.batch == 1 && gemm.m <= FEW_ROWS && gemm.b.transposed {
        return rows_alone::product(threads, gemm, epilogue);
    }
    let a = Wide::of::<T>(threads, pool, &gemm.a, [gemm.m, gemm.k], gemm.batch)?;
    let b = Wide::of::<T>(threads, pool, &gemm.b, [gemm.k, gemm.n], gemm.batch)?;
    tiles(threads, gemm, |batch, rows, columns| {
        through_scratch(
            &a.operand(batch),
            &b.operand(batch),
            Part { rows, columns },
            gemm.k,
            epilogue,
            &AnyOutput::of(gemm, batch),
        );
    });
    Ok(())
}

/// An f32 copy of a batch of matrices, in the order in which they are stored but without gaps.
struct Wide<'a> {
    block: Block,
    pool: &'a HostPool,
    /// Rows as stored and values of each.
    stored: [usize; 2],
    products: usize,
    transposed: bool,
}

impl<'a> Wide<'a> {
    fn of<T: Float>(
        threads: &Threads,
        pool: &'a HostPool,
        matrix: &Matrix<'_>,
        [rows, columns]: [usize; 2],
        batch: usize,
    ) -> Result<Wide<'a>> {
        let stored = if matrix.transposed { [columns, rows] } else { [rows, columns] };
        // One matrix may serve all products.
        let products = if matrix.batch_stride == 0 { 1 } else { batch };
        let count = products * stored[0] * stored[1];
        let block = pool.take((4 * count).max(4), Category::Buffers)?;
        let wide = Wide { block, pool, stored, products, transposed: matrix.transposed };
        // SAFETY: the block has room for as many f32 and belongs to this object.
        let target = Shared::new(unsafe { std::slice::from_raw_parts_mut(wide.pointer(), count) });
        let from = &read::<T>(matrix.tensor)[matrix.offset..];
        threads.blocks(products * stored[0], LINES, |lines| {
            for line in lines {
                let (product, row) = (line / stored[0], line % stored[0]);
                let start = product * matrix.batch_stride + row * matrix.row_stride;
                // SAFETY: each line is one task's.
                let target = unsafe { target.range(line * stored[1]..(line + 1) * stored[1]) };
                vectorized!(|| {
                    for (wide, value) in target.iter_mut().zip(&from[start..start + stored[1]]) {
                        *wide = value.widen();
                    }
                });
            }
        });
        Ok(wide)
    }

    fn pointer(&self) -> *mut f32 {
        self.block.pointer.as_ptr().cast()
    }

    fn operand(&self, product: usize) -> Operand<'_, f32> {
        let [rows, columns] = self.stored;
        let count = rows * columns;
        // SAFETY: `of` has filled as many values for each product.
        let all = unsafe { std::slice::from_raw_parts(self.pointer(), self.products * count) };
        let (row_stride, column_stride) = if self.transposed { (1, columns) } else { (columns, 1) };
        let first = if self.products == 1 { 0 } else { product * count };
        Operand { elements: &all[first..], row_stride, column_stride }
    }
}

impl Drop for Wide<'_> {
    fn drop(&mut self) {
        self.pool.free(self.block, Category::Buffers);
    }
}
