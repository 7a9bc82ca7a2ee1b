//! Rows by group: counting sort, moving rows there and back, and products group by group through the product kernels.

use ferrospeed_tensor::backend::{
    Gemm, Grouped, GroupedGemm, GroupedOuter, Matrix, MatrixOut, Products, RoutedRows,
};
use ferrospeed_tensor::dtype::Float;
use ferrospeed_tensor::loops::simd::{self, vectorized};
use ferrospeed_tensor::{Activation, DType, Out, Result, Tensor, TensorError};

use crate::activation::{self, AT_ONCE};
use crate::parallel::{Shared, row_block};
use crate::{CpuBackend, float_kernel, layout, pointwise, read, reduce, write};

impl Grouped for CpuBackend {
    fn grouped_gemm(&self, mut grouped: GroupedGemm<'_>) -> Result<()> {
        let threads = &self.threads;
        let (rows, k, n) = (grouped.a.shape().rows(), grouped.a.shape().last(), grouped.c.shape().last());
        let ranges = ranges("grouped product", grouped.counts, rows)?;
        for (group, range) in ranges.iter().enumerate().filter(|(_, range)| !range.is_empty()) {
            let a = Matrix { offset: range.start * k, ..Matrix::whole(grouped.a) };
            let bias = grouped.bias.get(group).map(|bias| bias.tensor.slice(bias.offset, [n])).transpose()?;
            let mut product = Gemm::plain(range.len(), n, k, a, grouped.b[group], grouped.c.again());
            product.c.offset = range.start * n;
            product.bias = bias.as_ref();
            self.gemm(product)?;
        }
        let end = ranges.last().map_or(0, |range| range.end);
        if end < rows {
            pointwise::fill(threads, grouped.c.part(end * n, [rows - end, n])?.out(), 0.0);
        }
        Ok(())
    }

    fn grouped_outer(&self, grouped: GroupedOuter<'_>) -> Result<()> {
        let threads = &self.threads;
        let (rows, m, n) =
            (grouped.left.shape().rows(), grouped.left.shape().last(), grouped.right.shape().last());
        for (range, target) in ranges("grouped product", grouped.counts, rows)?.iter().zip(grouped.c) {
            let Some(target) = target else { continue };
            if range.is_empty() {
                pointwise::fill(threads, target.part([m, n])?.out(), 0.0);
                continue;
            }
            let left = Matrix { offset: range.start * m, ..Matrix::transposed(grouped.left) };
            let right = Matrix { offset: range.start * n, ..Matrix::whole(grouped.right) };
            let mut target = target.part([m, n])?;
            self.gemm(Gemm::plain(m, n, range.len(), left, right, target.out()))?;
        }
        Ok(())
    }

    /// The sum of each group's rows, for those that have a place for it.
    fn grouped_sums(&self, counts: &Tensor, x: &Tensor, targets: Vec<Option<MatrixOut<'_>>>) -> Result<()> {
        let threads = &self.threads;
        let (rows, width) = (x.shape().rows(), x.shape().last());
        debug_assert_eq!(counts.dtype(), DType::I64);
        for (range, target) in ranges("grouped sum", counts, rows)?.iter().zip(targets) {
            let Some(target) = target else { continue };
            let mut target = target.part([width])?;
            match range.is_empty() {
                true => pointwise::fill(threads, target.out(), 0.0),
                false => reduce::sum_rows(
                    threads,
                    &x.slice(range.start * width, [range.len(), width])?,
                    target.out(),
                )?,
            }
        }
        Ok(())
    }

    /// Slots by group, in order within each. A slot whose group is the number of groups goes nowhere.
    fn sort_groups(&self, ids: &Tensor, counts: Out<'_>, order: Out<'_>, place: Out<'_>) -> Result<()> {
        let groups = counts.numel();
        let ids = layout::checked_indices("sort_groups", ids, groups + 1)?;
        let (counts, order, place) = (write::<i64>(counts), write::<i64>(order), write::<i64>(place));
        let mut starts = vec![0usize; groups + 2];
        ids.iter().for_each(|&id| starts[id + 1] += 1);
        counts.iter_mut().zip(&starts[1..]).for_each(|(count, &rows)| *count = rows as i64);
        for group in 0..=groups {
            starts[group + 1] += starts[group];
        }
        order.fill(-1);
        for (slot, &id) in ids.iter().enumerate() {
            place[slot] = if id == groups { -1 } else { starts[id] as i64 };
            if id < groups {
                order[starts[id]] = slot as i64;
                starts[id] += 1;
            }
        }
        Ok(())
    }

    /// `y[row] = x[token of row]`, zero where there is none.
    fn spread_rows(&self, x: &Tensor, rows: &RoutedRows<'_>, y: Out<'_>) -> Result<()> {
        let threads = &self.threads;
        let (width, chosen) = (y.shape().last(), rows.chosen);
        let order = read::<i64>(rows.order);
        float_kernel!("spread_rows", x.dtype(), T => {
            let (x, y) = (read::<T>(x), Shared::new(write::<T>(y)));
            threads.blocks(order.len(), row_block(width), |range| for row in range {
                // SAFETY: rows are disjoint.
                let target = unsafe { y.range(row * width..(row + 1) * width) };
                match usize::try_from(order[row]) {
                    Ok(slot) => target.copy_from_slice(&x[slot / chosen * width..(slot / chosen + 1) * width]),
                    Err(_) => target.fill(T::narrow(0.0)),
                }
            });
        })
    }

    /// `y[token] = Σ weight[slot] · x[place of slot]` over the token's slots in order, in f32.
    fn collect_rows(
        &self,
        x: &Tensor,
        rows: &RoutedRows<'_>,
        weights: Option<&Tensor>,
        y: Out<'_>,
    ) -> Result<()> {
        let threads = &self.threads;
        let (width, chosen) = (y.shape().last(), rows.chosen);
        let (place, weights) = (read::<i64>(rows.place), weights.map(read::<f32>));
        float_kernel!("collect_rows", x.dtype(), T => {
            let (x, y) = (read::<T>(x), Shared::new(write::<T>(y)));
            threads.blocks(place.len() / chosen, row_block(width * chosen), |range| vectorized!(|| {
                let mut sums = vec![0.0f32; width];
                for token in range {
                    sums.fill(0.0);
                    for slot in token * chosen..(token + 1) * chosen {
                        let Ok(row) = usize::try_from(place[slot]) else { continue };
                        let weight = weights.map_or(1.0, |weights| weights[slot]);
                        let row = &x[row * width..(row + 1) * width];
                        sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += weight * value.widen());
                    }
                    // SAFETY: rows are disjoint.
                    let target = unsafe { y.range(token * width..(token + 1) * width) };
                    target.iter_mut().zip(&sums).for_each(|(target, &sum)| *target = T::narrow(sum));
                }
            }));
        })
    }

    /// Gradients of `collect_rows` with weights.
    fn collect_rows_backward(
        &self,
        inputs: [&Tensor; 3],
        rows: &RoutedRows<'_>,
        dx: Out<'_>,
        dweights: Out<'_>,
    ) -> Result<()> {
        let threads = &self.threads;
        let [x, weights, dy] = inputs;
        let (width, chosen) = (x.shape().last(), rows.chosen);
        let (order, place) = (read::<i64>(rows.order), read::<i64>(rows.place));
        let (weights, dweights) = (read::<f32>(weights), write::<f32>(dweights));
        // A slot that goes nowhere has no row below that would write its weight's gradient.
        dweights
            .iter_mut()
            .zip(place)
            .filter(|(_, place)| **place < 0)
            .for_each(|(gradient, _)| *gradient = 0.0);
        let dweights = Shared::new(dweights);
        float_kernel!("collect_rows", x.dtype(), T => {
            let (x, dy, dx) = (read::<T>(x), read::<T>(dy), Shared::new(write::<T>(dx)));
            threads.blocks(order.len(), row_block(width), |range| vectorized!(|| {
                let mut wide = [vec![0.0f32; width], vec![0.0f32; width]];
                for row in range {
                    // SAFETY: rows are disjoint.
                    let target = unsafe { dx.range(row * width..(row + 1) * width) };
                    let Ok(slot) = usize::try_from(order[row]) else {
                        target.fill(T::narrow(0.0));
                        continue;
                    };
                    let from = &dy[slot / chosen * width..(slot / chosen + 1) * width];
                    let [of_y, of_x] = &mut wide;
                    of_y.iter_mut().zip(from).for_each(|(wide, value)| *wide = value.widen());
                    of_x.iter_mut().zip(&x[row * width..]).for_each(|(wide, value)| *wide = value.widen());
                    target.iter_mut().zip(&*of_y).for_each(|(target, &dy)| *target = T::narrow(weights[slot] * dy));
                    // SAFETY: each slot has one row.
                    let own = unsafe { dweights.range(slot..slot + 1) };
                    own[0] = simd::dot(of_x, of_y);
                }
            }));
        })
    }

    fn weighted_gated_backward(
        &self,
        activation: Activation,
        rows: &RoutedRows<'_>,
        weights: &Tensor,
        values: [Out<'_>; 3],
        mut dweights: Out<'_>,
    ) -> Result<()> {
        let threads = &self.threads;
        let [gate, up, dy] = values;
        let width = gate.shape().last();
        let (order, weights) = (read::<i64>(rows.order), read::<f32>(weights));
        // Some slots have no row.
        pointwise::fill(threads, dweights.again(), 0.0);
        let dweights = Shared::new(write::<f32>(dweights));
        float_kernel!("weighted_gated_backward", gate.dtype(), T => {
            let values = [gate, up, dy].map(|values| Shared::new(write::<T>(values)));
            threads.blocks(order.len(), row_block(width), |range| {
                for row in range {
                    let Ok(slot) = usize::try_from(order[row]) else { continue };
                    // SAFETY: rows are disjoint, and so are the three tensors.
                    let values = unsafe { values.each_ref().map(|values| values.range(row * width..(row + 1) * width)) };
                    // SAFETY: each slot has one row.
                    let own = unsafe { dweights.range(slot..slot + 1) };
                    own[0] = weighted_row(activation, weights[slot], values);
                }
            });
        })
    }
}

/// The gradient of the row's weight.
fn weighted_row<T: Float>(activation: Activation, weight: f32, [gate, up, dy]: [&mut [T]; 3]) -> f32 {
    let mut sum = 0.0;
    for ((gate, up), dy) in gate.chunks_mut(AT_ONCE).zip(up.chunks_mut(AT_ONCE)).zip(dy.chunks_mut(AT_ONCE)) {
        let mut buffers = [[0.0; AT_ONCE]; 4];
        let [f, d, gated, wide] = buffers.each_mut().map(|buffer| &mut buffer[..gate.len()]);
        activation::values_and_derivatives(activation, gate, f, d);
        vectorized!(|| {
            for i in 0..gate.len() {
                let u = up[i].widen();
                wide[i] = dy[i].widen();
                gated[i] = f[i] * u;
                gate[i] = T::narrow(weight * wide[i] * u * d[i]);
                up[i] = T::narrow(weight * wide[i] * f[i]);
                dy[i] = T::narrow(weight * gated[i]);
            }
            sum += simd::dot(gated, wide);
        });
    }
    sum
}

/// The rows of each group; an error where they are more than there are.
fn ranges(op: &'static str, counts: &Tensor, rows: usize) -> Result<Vec<std::ops::Range<usize>>> {
    let mut end = 0usize;
    let mut next = |&count: &i64| {
        let start = end;
        end = usize::try_from(count)
            .ok()
            .and_then(|count| start.checked_add(count))
            .filter(|&end| end <= rows)?;
        Some(start..end)
    };
    let found: Option<Vec<_>> = read::<i64>(counts).iter().map(&mut next).collect();
    found.ok_or_else(|| TensorError::argument(op, format!("the counts are not of {rows} rows")))
}
