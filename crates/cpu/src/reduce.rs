//! Reductions, softmax, running sums, top-k.

use ferrospeed_tensor::backend::{Reduction, Reductions};
use ferrospeed_tensor::dtype::Float;
use ferrospeed_tensor::loops::simd::{max, sum_by, vectorized};
use ferrospeed_tensor::loops::threads::Threads;
use ferrospeed_tensor::{Out, Result, Tensor};

use crate::math::exp;
use crate::parallel::{Shared, row_block};
use crate::{CpuBackend, float_kernel, read, write};

/// How rows are cut for sums over rows: at most 16 parts, by the number of rows alone. (parts, rows per part)
pub(crate) fn partial_blocks(rows: usize) -> (usize, usize) {
    let block_rows = rows.div_ceil(16).max(32);
    (rows.div_ceil(block_rows), block_rows)
}

/// Sums `[rows, width]` over rows.
pub(crate) fn sum_rows(threads: &Threads, x: &Tensor, y: Out<'_>) -> Result<()> {
    let width = y.numel();
    let rows = x.numel().checked_div(width).unwrap_or(0);
    float_kernel!("sum_rows", x.dtype(), T => {
        let x_rn = read::<T>(x);
        let (blocks, block_rows) = partial_blocks(rows);
        let mut partial = vec![0.0f32; blocks * width];
        let parts = Shared::new(&mut partial);
        threads.run(blocks, |block| vectorized!(|| {
            // SAFETY: each block has its own part.
            let sums = unsafe { parts.range(block * width..(block + 1) * width) };
            for r in block * block_rows..((block + 1) * block_rows).min(rows) {
                add_row(sums, &x_rn[r * width..(r + 1) * width]);
            }
        }));
        add_parts(&partial, y)
    })?
}

/// Adds a row to the sums of a part.
#[inline(always)]
pub(crate) fn add_row<T: Float>(sums: &mut [f32], row: &[T]) {
    for (sum, value) in sums.iter_mut().zip(row) {
        *sum += value.widen();
    }
}

/// The sums of all parts, in order, each `y` long.
pub(crate) fn add_parts(parts: &[f32], y: Out<'_>) -> Result<()> {
    let width = y.numel();
    float_kernel!("sum_rows", y.dtype(), Y => {
        for (i, target) in write::<Y>(y).iter_mut().enumerate() {
            *target = Y::narrow(parts.iter().skip(i).step_by(width).fold(0.0, |sum, part| sum + part));
        }
    })
}

impl Reductions for CpuBackend {
    fn sum_rows(&self, x: &Tensor, target: Out<'_>) -> Result<()> {
        sum_rows(&self.threads, x, target)
    }

    fn top_k(&self, x: &Tensor, k: usize, values: Out<'_>, indices: Out<'_>) -> Result<()> {
        let (rows, width) = (x.shape().rows(), x.shape().last());
        let indices = write::<i64>(indices);
        float_kernel!("top_k", x.dtype(), T => {
            let (x, values) = (read::<T>(x), write::<T>(values));
            let mut order: Vec<usize> = Vec::with_capacity(width);
            for r in 0..rows {
                let row = &x[r * width..(r + 1) * width];
                // NaN counts as largest, so that it is seen rather than hidden.
                let before = |&a: &usize, &b: &usize| row[b].widen().total_cmp(&row[a].widen()).then(a.cmp(&b));
                order.clear();
                order.extend(0..width);
                if k > 0 && k < width {
                    order.select_nth_unstable_by(k - 1, before);
                }
                order.truncate(k);
                order.sort_unstable_by(before);
                for (j, &index) in order.iter().enumerate() {
                    values[r * k + j] = row[index];
                    indices[r * k + j] = index as i64;
                }
            }
        })
    }

    fn reduce(
        &self,
        op: Reduction,
        x: &Tensor,
        outer: usize,
        size: usize,
        inner: usize,
        y: Out<'_>,
    ) -> Result<()> {
        let threads = &self.threads;
        float_kernel!("reduce", x.dtype(), T => {
            let (input, output) = (read::<T>(x), Shared::new(write::<T>(y)));
            threads.blocks(outer, row_block(size * inner), |range| vectorized!(|| {
                let mut row = vec![0.0f32; size];
                for o in range {
                    for i in 0..inner {
                        for (s, value) in row.iter_mut().enumerate() {
                            *value = input[(o * size + s) * inner + i].widen();
                        }
                        let reduced = match op {
                            Reduction::Sum => sum_by(&row, |_, v| v),
                            Reduction::Max => max(&row),
                            Reduction::Min => row.iter().copied().fold(f32::INFINITY, f32::min),
                        };
                        // SAFETY: each (outer, inner) pair is written once.
                        unsafe { output.range(o * inner + i..o * inner + i + 1)[0] = T::narrow(reduced) };
                    }
                }
            }));
        })
    }

    fn softmax(&self, x: &Tensor, y: Out<'_>, log: bool) -> Result<()> {
        let threads = &self.threads;
        let (rows, width) = (x.shape().rows(), x.shape().last());
        float_kernel!("softmax", x.dtype(), T => {
            let (input, output) = (read::<T>(x), Shared::new(write::<T>(y)));
            threads.blocks(rows, row_block(width), |range| vectorized!(|| {
                let mut row = vec![0.0f32; width];
                for r in range {
                    for (value, x) in row.iter_mut().zip(&input[r * width..(r + 1) * width]) {
                        *value = x.widen();
                    }
                    let largest = max(&row);
                    // A row of minus infinities has no largest finite value to subtract.
                    let shift = if largest == f32::NEG_INFINITY { 0.0 } else { largest };
                    let total = sum_by(&row, |_, v| exp(v - shift));
                    // SAFETY: rows are disjoint.
                    let output = unsafe { output.range(r * width..(r + 1) * width) };
                    if log {
                        let offset = shift + total.ln();
                        output.iter_mut().zip(&row).for_each(|(y, v)| *y = T::narrow(v - offset));
                    } else {
                        output.iter_mut().zip(&row).for_each(|(y, v)| *y = T::narrow(exp(v - shift) / total));
                    }
                }
            }));
        })
    }

    fn softmax_backward(&self, y: &Tensor, dy: &Tensor, dx: Out<'_>, log: bool) -> Result<()> {
        let threads = &self.threads;
        let (rows, width) = (y.shape().rows(), y.shape().last());
        float_kernel!("softmax_backward", y.dtype(), T => {
            let (y, dy, dx) = (read::<T>(y), read::<T>(dy), Shared::new(write::<T>(dx)));
            threads.blocks(rows, row_block(width), |range| vectorized!(|| {
                let mut gradient = vec![0.0f32; width];
                for r in range {
                    let span = r * width..(r + 1) * width;
                    let y = &y[span.clone()];
                    for (g, d) in gradient.iter_mut().zip(&dy[span.clone()]) {
                        *g = d.widen();
                    }
                    // SAFETY: rows are disjoint.
                    let dx = unsafe { dx.range(span) };
                    if log {
                        let total = sum_by(&gradient, |_, g| g);
                        for i in 0..width {
                            dx[i] = T::narrow(gradient[i] - exp(y[i].widen()) * total);
                        }
                    } else {
                        let total = sum_by(&gradient, |i, g| g * y[i].widen());
                        for i in 0..width {
                            dx[i] = T::narrow(y[i].widen() * (gradient[i] - total));
                        }
                    }
                }
            }));
        })
    }

    fn cumsum(&self, x: &Tensor, y: Out<'_>, reverse: bool) -> Result<()> {
        let (rows, width) = (x.shape().rows(), x.shape().last());
        float_kernel!("cumsum", x.dtype(), T => {
            let (x, y) = (read::<T>(x), write::<T>(y));
            for r in 0..rows {
                let mut sum = 0.0;
                for step in 0..width {
                    let i = r * width + if reverse { width - 1 - step } else { step };
                    sum += x[i].widen();
                    y[i] = T::narrow(sum);
                }
            }
        })
    }
}
