//! Elementwise kernels whose operands differ in shape.

use std::ops::Range;

use ferrospeed_tensor::backend::{Binary, Broadcasts, Comparison};
use ferrospeed_tensor::dtype::{Element, Float};
use ferrospeed_tensor::loops::simd::vectorized;
use ferrospeed_tensor::loops::threads::Threads;
use ferrospeed_tensor::{DType, Out, Result, Shape, Tensor};
use half::{bf16, f16};

use crate::parallel::{Shared, row_block};
use crate::pointwise::map2;
use crate::{CpuBackend, float_kernel, read, write};

/// Element strides of `from` seen as `to`: 0 along broadcast dimensions.
fn broadcast_strides(from: &Shape, to: &Shape) -> Vec<usize> {
    let missing = to.dims() - from.dims();
    let own = from.strides();
    (0..to.dims())
        .map(|dim| if dim < missing || from[dim - missing] == 1 { 0 } else { own[dim - missing] })
        .collect()
}

/// Walks some rows (last dimension) of a broadcast: `row(output start, a start, b start, …)`.
#[inline(always)]
fn broadcast_rows<const N: usize>(
    shape: &Shape,
    rows: Range<usize>,
    strides: [&[usize]; N],
    mut row: impl FnMut(usize, [usize; N]),
) {
    let dims = shape.dims();
    let width = shape.last();
    for index in rows {
        let mut rest = index;
        let mut starts = [0; N];
        for dim in (0..dims.saturating_sub(1)).rev() {
            let position = rest % shape[dim];
            rest /= shape[dim];
            for (start, stride) in starts.iter_mut().zip(&strides) {
                *start += position * stride[dim];
            }
        }
        row(index * width, starts);
    }
}

fn last_stride(strides: &[usize]) -> usize {
    strides.last().copied().unwrap_or(0)
}

fn broadcast2<A: Element, B: Element, Y: Element>(
    threads: &Threads,
    a: &Tensor,
    b: &Tensor,
    y: Out<'_>,
    f: impl Fn(A, B) -> Y + Sync + Send + Copy,
) {
    let shape = y.shape();
    let (left, right) = (read::<A>(a), read::<B>(b));
    if a.shape() == shape && b.shape() == shape {
        return map2(threads, left, right, write::<Y>(y), f);
    }
    let (a_strides, b_strides) = (broadcast_strides(a.shape(), shape), broadcast_strides(b.shape(), shape));
    let width = shape.last();
    let (a_step, b_step) = (last_stride(&a_strides), last_stride(&b_strides));
    let output = Shared::<Y>::of(&y);
    threads.blocks(shape.rows(), row_block(width), |rows| {
        vectorized!(|| {
            broadcast_rows(shape, rows.clone(), [&a_strides, &b_strides], |start, [a, b]| {
                // SAFETY: every row is one task's.
                let output = unsafe { output.range(start..start + width) };
                // A row of an operand is a row, or one value: each case is a loop that becomes vectors.
                match (a_step, b_step) {
                    (0, 0) => output.fill(f(left[a], right[b])),
                    (0, _) => {
                        let (a, right) = (left[a], &right[b..b + width]);
                        output.iter_mut().zip(right).for_each(|(y, &b)| *y = f(a, b));
                    }
                    (_, 0) => {
                        let (left, b) = (&left[a..a + width], right[b]);
                        output.iter_mut().zip(left).for_each(|(y, &a)| *y = f(a, b));
                    }
                    _ => {
                        let both = left[a..a + width].iter().zip(&right[b..b + width]);
                        output.iter_mut().zip(both).for_each(|(y, (&a, &b))| *y = f(a, b));
                    }
                }
            });
        });
    });
}

impl Broadcasts for CpuBackend {
    fn binary(&self, op: Binary, a: &Tensor, b: &Tensor, y: Out<'_>) -> Result<()> {
        let threads = &self.threads;
        float_kernel!("binary", a.dtype(), T => {
            macro_rules! apply { ($f:expr) => { broadcast2(threads, a, b, y, |a: T, b: T| { let f: fn(f32, f32) -> f32 = $f; T::narrow(f(a.widen(), b.widen())) }) }; }
            match op {
                Binary::Add => apply!(|a, b| a + b),
                Binary::Sub => apply!(|a, b| a - b),
                Binary::Mul => apply!(|a, b| a * b),
                Binary::Div => apply!(|a, b| a / b),
                Binary::Max => apply!(|a, b| if a > b { a } else { b }),
                Binary::Min => apply!(|a, b| if a < b { a } else { b }),
            }
        })
    }

    fn compare(&self, op: Comparison, a: &Tensor, b: &Tensor, y: Out<'_>) -> Result<()> {
        let threads = &self.threads;
        pub(super) fn typed<T: Element + PartialOrd>(
            threads: &Threads,
            op: Comparison,
            a: &Tensor,
            b: &Tensor,
            y: Out<'_>,
        ) {
            match op {
                Comparison::Equal => broadcast2(threads, a, b, y, |a: T, b: T| u8::from(a == b)),
                Comparison::Less => broadcast2(threads, a, b, y, |a: T, b: T| u8::from(a < b)),
                Comparison::LessEqual => broadcast2(threads, a, b, y, |a: T, b: T| u8::from(a <= b)),
            }
        }
        match a.dtype() {
            DType::F32 => typed::<f32>(threads, op, a, b, y),
            DType::BF16 => typed::<bf16>(threads, op, a, b, y),
            DType::F16 => typed::<f16>(threads, op, a, b, y),
            DType::I64 => typed::<i64>(threads, op, a, b, y),
            DType::I32 => typed::<i32>(threads, op, a, b, y),
            DType::U8 | DType::Bool => typed::<u8>(threads, op, a, b, y),
        }
        Ok(())
    }

    fn select(&self, condition: &Tensor, a: &Tensor, b: &Tensor, y: Out<'_>) -> Result<()> {
        let shape = y.shape();
        let strides = [condition, a, b].map(|operand| broadcast_strides(operand.shape(), shape));
        let [c_step, a_step, b_step] = [0, 1, 2].map(|i| last_stride(&strides[i]));
        let width = shape.last();
        float_kernel!("select", a.dtype(), T => {
            let (c, left, right, output) = (read::<u8>(condition), read::<T>(a), read::<T>(b), write::<T>(y));
            let all = [&strides[0][..], &strides[1], &strides[2]];
            broadcast_rows(shape, 0..shape.rows(), all, |start, [c_start, a_start, b_start]| {
                for i in 0..width {
                    output[start + i] =
                        if c[c_start + i * c_step] != 0 { left[a_start + i * a_step] } else { right[b_start + i * b_step] };
                }
            });
        })
    }

    /// Sums `x` down to `y`'s shape, in row order, in f32.
    fn sum_to(&self, x: &Tensor, y: Out<'_>) -> Result<()> {
        let strides = broadcast_strides(y.shape(), x.shape());
        let step = last_stride(&strides);
        let width = x.shape().last();
        float_kernel!("sum_to", x.dtype(), T => {
            let (input, output) = (read::<T>(x), write::<T>(y));
            let mut sums = vec![0.0f32; output.len()];
            vectorized!(|| {
                broadcast_rows(x.shape(), 0..x.shape().rows(), [&strides], |start, [y_start]| {
                    let input = &input[start..start + width];
                    if step == 0 {
                        let mut sum = 0.0;
                        input.iter().for_each(|value| sum += value.widen());
                        sums[y_start] += sum;
                    } else {
                        let sums = sums[y_start..y_start + width].iter_mut();
                        sums.zip(input).for_each(|(sum, value)| *sum += value.widen());
                    }
                });
            });
            for (output, sum) in output.iter_mut().zip(sums) {
                *output = T::narrow(sum);
            }
        })
    }
}
