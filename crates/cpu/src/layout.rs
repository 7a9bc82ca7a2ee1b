//! Kernels that move elements: strided copies, indexing, embedding.

use ferrospeed_tensor::backend::Rows;
use ferrospeed_tensor::dtype::Float;
use ferrospeed_tensor::loops::simd::vectorized;
use ferrospeed_tensor::{DType, Out, Result, Tensor, TensorError};

use crate::parallel::{Shared, row_block};
use crate::{CpuBackend, any_kernel, float_kernel, read, write};

pub(crate) fn copy_blocks(
    source: &Tensor,
    source_offset: usize,
    source_stride: usize,
    target: Out<'_>,
    target_offset: usize,
    target_stride: usize,
    rows: usize,
    width: usize,
) {
    any_kernel!(source.dtype(), T => {
        let (source, target) = (read::<T>(source), write::<T>(target));
        for r in 0..rows {
            let from = source_offset + r * source_stride;
            let to = target_offset + r * target_stride;
            target[to..to + width].copy_from_slice(&source[from..from + width]);
        }
    });
}

/// Index values, checked against the dimension they index.
pub(crate) fn checked_indices(op: &'static str, indices: &Tensor, limit: usize) -> Result<Vec<usize>> {
    let check = |(position, index): (usize, i64)| {
        usize::try_from(index).ok().filter(|&index| index < limit).ok_or(TensorError::IndexOutOfRange {
            op,
            index,
            position,
            limit,
        })
    };
    match indices.dtype() {
        DType::I64 => read::<i64>(indices).iter().copied().enumerate().map(check).collect(),
        DType::I32 => read::<i32>(indices).iter().map(|&i| i64::from(i)).enumerate().map(check).collect(),
        DType::U8 => read::<u8>(indices).iter().map(|&i| i64::from(i)).enumerate().map(check).collect(),
        dtype => Err(TensorError::BadDType { op, what: "the indices", dtype, expected: "an integer type" }),
    }
}

impl Rows for CpuBackend {
    fn embedding(&self, table: &Tensor, ids: &Tensor, out: Out<'_>) -> Result<()> {
        let threads = &self.threads;
        let width = table.shape().last();
        let ids = checked_indices("embedding", ids, table.shape()[0])?;
        any_kernel!(table.dtype(), T => {
            let (table, out) = (read::<T>(table), Shared::new(write::<T>(out)));
            threads.blocks(ids.len(), row_block(width), |range| {
                for position in range {
                    let id = ids[position];
                    // SAFETY: rows are disjoint.
                    let target = unsafe { out.range(position * width..(position + 1) * width) };
                    target.copy_from_slice(&table[id * width..(id + 1) * width]);
                }
            });
        });
        Ok(())
    }

    /// Positions are grouped by id and summed in order, so the result does not depend on threads, and each row of the
    /// table is written once.
    fn embedding_backward(&self, ids: &Tensor, dout: &Tensor, mut dtable: Out<'_>) -> Result<()> {
        let threads = &self.threads;
        let (size, width) = (dtable.shape()[0], dtable.shape().last());
        let ids = checked_indices("embedding_backward", ids, size)?;
        let mut order: Vec<usize> = (0..ids.len()).collect();
        order.sort_by_key(|&position| ids[position]);
        let mut groups: Vec<std::ops::Range<usize>> = Vec::new();
        for i in 0..order.len() {
            match groups.last_mut() {
                Some(group) if ids[order[group.start]] == ids[order[i]] => group.end = i + 1,
                _ => groups.push(i..i + 1),
            }
        }
        float_kernel!("embedding_backward", dout.dtype(), T => {
            crate::pointwise::fill(threads, dtable.again(), 0.0);
            let (dout, dtable) = (read::<T>(dout), Shared::new(write::<T>(dtable)));
            threads.blocks(groups.len(), row_block(width), |range| vectorized!(|| {
                let mut sums = vec![0.0f32; width];
                for group in &groups[range] {
                    sums.fill(0.0);
                    for &position in &order[group.clone()] {
                        for (sum, value) in sums.iter_mut().zip(&dout[position * width..(position + 1) * width]) {
                            *sum += value.widen();
                        }
                    }
                    let id = ids[order[group.start]];
                    // SAFETY: each id has one group.
                    let row = unsafe { dtable.range(id * width..(id + 1) * width) };
                    row.iter_mut().zip(&sums).for_each(|(row, &sum)| *row = T::narrow(sum));
                }
            }));
        })
    }

    fn copy_blocks(
        &self,
        source: &Tensor,
        source_offset: usize,
        source_stride: usize,
        target: Out<'_>,
        target_offset: usize,
        target_stride: usize,
        rows: usize,
        width: usize,
    ) -> Result<()> {
        copy_blocks(source, source_offset, source_stride, target, target_offset, target_stride, rows, width);
        Ok(())
    }

    fn index_select(
        &self,
        x: &Tensor,
        indices: &Tensor,
        outer: usize,
        size: usize,
        inner: usize,
        y: Out<'_>,
    ) -> Result<()> {
        let indices = checked_indices("index_select", indices, size)?;
        any_kernel!(x.dtype(), T => {
            let (x, y) = (read::<T>(x), write::<T>(y));
            for o in 0..outer {
                for (position, &index) in indices.iter().enumerate() {
                    let (from, to) = ((o * size + index) * inner, (o * indices.len() + position) * inner);
                    y[to..to + inner].copy_from_slice(&x[from..from + inner]);
                }
            }
        });
        Ok(())
    }

    fn index_add(
        &self,
        dy: &Tensor,
        indices: &Tensor,
        outer: usize,
        size: usize,
        inner: usize,
        dx: Out<'_>,
    ) -> Result<()> {
        let indices = checked_indices("index_add", indices, size)?;
        float_kernel!("index_add", dy.dtype(), T => {
            let (dy, dx) = (read::<T>(dy), write::<T>(dx));
            let mut sums = vec![0.0f32; size * inner];
            for o in 0..outer {
                sums.fill(0.0);
                for (position, &index) in indices.iter().enumerate() {
                    let from = (o * indices.len() + position) * inner;
                    for (sum, value) in sums[index * inner..(index + 1) * inner].iter_mut().zip(&dy[from..from + inner]) {
                        *sum += value.widen();
                    }
                }
                let target = &mut dx[o * size * inner..(o + 1) * size * inner];
                target.iter_mut().zip(&sums).for_each(|(target, &sum)| *target = T::narrow(sum));
            }
        })
    }

    fn gather(&self, x: &Tensor, indices: &Tensor, y: Out<'_>) -> Result<()> {
        let (rows, width, picked) = (x.shape().rows(), x.shape().last(), indices.shape().last());
        let indices = checked_indices("gather", indices, width)?;
        any_kernel!(x.dtype(), T => {
            let (x, y) = (read::<T>(x), write::<T>(y));
            for r in 0..rows {
                for j in 0..picked {
                    y[r * picked + j] = x[r * width + indices[r * picked + j]];
                }
            }
        });
        Ok(())
    }

    fn scatter_add(&self, dy: &Tensor, indices: &Tensor, dx: Out<'_>) -> Result<()> {
        let (rows, width, picked) = (dx.shape().rows(), dx.shape().last(), indices.shape().last());
        let indices = checked_indices("scatter_add", indices, width)?;
        float_kernel!("scatter_add", dy.dtype(), T => {
            let (dy, dx) = (read::<T>(dy), write::<T>(dx));
            let mut sums = vec![0.0f32; width];
            for r in 0..rows {
                sums.fill(0.0);
                for j in 0..picked {
                    sums[indices[r * picked + j]] += dy[r * picked + j].widen();
                }
                dx[r * width..(r + 1) * width].iter_mut().zip(&sums).for_each(|(dx, &sum)| *dx = T::narrow(sum));
            }
        })
    }
}
