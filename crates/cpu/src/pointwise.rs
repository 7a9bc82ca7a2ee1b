//! Elementwise kernels: casts, unary and binary functions, gates, dropout.

use ferrospeed_tensor::backend::{Pointwise, Reductions, Unary};
use ferrospeed_tensor::dtype::{Element, Float};
use ferrospeed_tensor::loops::simd::vectorized;
use ferrospeed_tensor::loops::threads::Threads;
use ferrospeed_tensor::random::{RandomKey, drop_threshold};
use ferrospeed_tensor::{Activation, DType, Out, Result, Tensor, TensorError};
use half::{bf16, f16};

use crate::activation::{self, AT_ONCE};
use crate::math::{activate, activate_derivative, exp, with_activation};
use crate::parallel::{POINTWISE_BLOCK, Shared};
use crate::reduce::{add_parts, add_row, partial_blocks};
use crate::{CpuBackend, float_kernel, read, reduce, write};

/// `y[i] = f(x[i])` over blocks.
fn map<X: Element, Y: Element>(
    threads: &Threads,
    x: &[X],
    y: &mut [Y],
    f: impl Fn(X) -> Y + Sync + Send + Copy,
) {
    let y = Shared::new(y);
    threads.blocks(x.len(), POINTWISE_BLOCK, |range| {
        // SAFETY: blocks are disjoint.
        let y = unsafe { y.range(range.clone()) };
        let x = &x[range];
        vectorized!(|| {
            for (y, &x) in y.iter_mut().zip(x) {
                *y = f(x);
            }
        });
    });
}

/// `x[i] = f(x[i])` over blocks.
fn map_in_place<T: Element>(threads: &Threads, x: &mut [T], f: impl Fn(T) -> T + Sync + Send + Copy) {
    let x = Shared::new(x);
    threads.blocks(x.len(), POINTWISE_BLOCK, |range| {
        // SAFETY: blocks are disjoint.
        let x = unsafe { x.range(range) };
        vectorized!(|| x.iter_mut().for_each(|x| *x = f(*x)));
    });
}

/// `y[i] = f(a[i], b[i])` over blocks.
pub(super) fn map2<A: Element, B: Element, Y: Element>(
    threads: &Threads,
    a: &[A],
    b: &[B],
    y: &mut [Y],
    f: impl Fn(A, B) -> Y + Sync + Send + Copy,
) {
    let y = Shared::new(y);
    threads.blocks(a.len(), POINTWISE_BLOCK, |range| {
        // SAFETY: blocks are disjoint.
        let y = unsafe { y.range(range.clone()) };
        let (a, b) = (&a[range.clone()], &b[range]);
        vectorized!(|| {
            for ((y, &a), &b) in y.iter_mut().zip(a).zip(b) {
                *y = f(a, b);
            }
        });
    });
}

pub(crate) fn fill(threads: &Threads, target: Out<'_>, value: f32) {
    fn typed<T: Element>(threads: &Threads, target: Out<'_>, value: T) {
        let target = Shared::new(write::<T>(target));
        threads.blocks(target.len(), POINTWISE_BLOCK, |range| {
            // SAFETY: blocks are disjoint.
            unsafe { target.range(range) }.fill(value);
        });
    }
    match target.dtype() {
        DType::F32 => typed(threads, target, value),
        DType::BF16 => typed(threads, target, bf16::narrow(value)),
        DType::F16 => typed(threads, target, f16::narrow(value)),
        DType::I64 => typed(threads, target, value as i64),
        DType::I32 => typed(threads, target, value as i32),
        DType::U8 => typed(threads, target, value as u8),
        DType::Bool => typed(threads, target, u8::from(value != 0.0)),
    }
}

pub(crate) fn cast(threads: &Threads, x: &Tensor, y: Out<'_>) {
    fn to_float<X: Element>(
        threads: &Threads,
        x: &Tensor,
        y: Out<'_>,
        widen: impl Fn(X) -> f32 + Sync + Send + Copy,
    ) {
        let x = read::<X>(x);
        match y.dtype() {
            DType::F32 => map(threads, x, write::<f32>(y), widen),
            DType::BF16 => map(threads, x, write::<bf16>(y), move |v| bf16::narrow(widen(v))),
            DType::F16 => map(threads, x, write::<f16>(y), move |v| f16::narrow(widen(v))),
            DType::I64 => map(threads, x, write::<i64>(y), move |v| widen(v) as i64),
            DType::I32 => map(threads, x, write::<i32>(y), move |v| widen(v) as i32),
            DType::U8 => map(threads, x, write::<u8>(y), move |v| widen(v) as u8),
            DType::Bool => map(threads, x, write::<u8>(y), move |v| u8::from(widen(v) != 0.0)),
        }
    }
    match (x.dtype(), y.dtype()) {
        // Between integers f32 would lose digits.
        (DType::I64, DType::I32) => map(threads, read::<i64>(x), write::<i32>(y), |v| v as i32),
        (DType::I32, DType::I64) => map(threads, read::<i32>(x), write::<i64>(y), i64::from),
        (DType::I64, DType::I64) => write::<i64>(y).copy_from_slice(read::<i64>(x)),
        (DType::F32, _) => to_float(threads, x, y, |v: f32| v),
        (DType::BF16, _) => to_float(threads, x, y, |v: bf16| v.widen()),
        (DType::F16, _) => to_float(threads, x, y, |v: f16| v.widen()),
        (DType::I64, _) => to_float(threads, x, y, |v: i64| v as f32),
        (DType::I32, _) => to_float(threads, x, y, |v: i32| v as f32),
        (DType::U8 | DType::Bool, _) => to_float(threads, x, y, |v: u8| f32::from(v)),
    }
}

/// Calls `$apply` with a closure of one f32 for each function, so that each is compiled as a loop of its own.
macro_rules! with_unary {
    ($op:expr, $apply:ident) => {
        match $op {
            Unary::Activation(activation) => with_activation!(activation, KIND => $apply!(|x: f32| activate(KIND, x))),
            Unary::Neg => $apply!(|x: f32| -x),
            Unary::Exp => $apply!(|x: f32| exp(x)),
            Unary::Log => $apply!(|x: f32| x.ln()),
            Unary::Sqrt => $apply!(|x: f32| x.sqrt()),
            Unary::Square => $apply!(|x: f32| x * x),
            Unary::Abs => $apply!(|x: f32| x.abs()),
            Unary::Reciprocal => $apply!(|x: f32| 1.0 / x),
            Unary::Affine { scale, shift } => $apply!(move |x: f32| scale * x + shift),
            Unary::Power(n) => $apply!(move |x: f32| x.powf(n)),
        }
    };
}

impl Pointwise for CpuBackend {
    fn activation_backward(
        &self,
        activation: Activation,
        x: &Tensor,
        dy: &Tensor,
        dx: Out<'_>,
    ) -> Result<()> {
        unary_backward(&self.threads, Unary::Activation(activation), x, dy, dx)
    }

    /// `before` becomes `f(before)`, `gradient` is multiplied by `f'(before)`, in one pass over both.
    fn activation_backward_in_place(
        &self,
        activation: Activation,
        before: Out<'_>,
        gradient: Out<'_>,
    ) -> Result<()> {
        let threads = &self.threads;
        float_kernel!("activation_backward", before.dtype(), T => {
            let (before, gradient) = (Shared::new(write::<T>(before)), Shared::new(write::<T>(gradient)));
            threads.blocks(before.len(), POINTWISE_BLOCK, |range| {
                // SAFETY: blocks are disjoint.
                let (before, gradient) = unsafe { (before.range(range.clone()), gradient.range(range)) };
                activation::backward_in_place(activation, before, gradient);
            });
        })
    }

    fn activation_backward_sums(
        &self,
        activation: Activation,
        before: Out<'_>,
        mut gradient: Out<'_>,
        rebuilds: bool,
        sums: Option<Out<'_>>,
    ) -> Result<()> {
        // Sums are taken in parts, by the number of rows alone: where those are fewer than threads, one after the other.
        let parts = reduce::partial_blocks(before.shape().rows()).0;
        let sums = match sums {
            Some(sums) if rebuilds && parts >= self.threads.count() => {
                return activation_backward_sums(&self.threads, activation, before, gradient, sums);
            }
            sums => sums,
        };
        if rebuilds {
            self.activation_backward_in_place(activation, before, gradient.again())?;
        } else {
            gradient_in_place(&self.threads, activation, before.into_tensor(), gradient.again())?;
        }
        sums.map_or(Ok(()), |sums| self.sum_rows(gradient.into_tensor(), sums))
    }

    fn gated(&self, activation: Activation, gate: &Tensor, up: &Tensor, y: Out<'_>) -> Result<()> {
        let threads = &self.threads;
        float_kernel!("gated", gate.dtype(), T => {
            let (gate, up, y) = (read::<T>(gate), read::<T>(up), Shared::new(write::<T>(y)));
            threads.blocks(gate.len(), POINTWISE_BLOCK, |range| {
                // SAFETY: blocks are disjoint.
                let y = unsafe { y.range(range.clone()) };
                let (gate, up) = (gate[range.clone()].chunks(AT_ONCE), up[range].chunks(AT_ONCE));
                for ((gate, up), y) in gate.zip(up).zip(y.chunks_mut(AT_ONCE)) {
                    let mut f = [0.0; AT_ONCE];
                    activation::values(activation, gate, &mut f[..gate.len()]);
                    vectorized!(|| {
                        for ((y, up), f) in y.iter_mut().zip(up).zip(&f) {
                            *y = T::narrow(f * up.widen());
                        }
                    });
                }
            });
        })
    }

    fn gated_backward_in_place(
        &self,
        activation: Activation,
        gate: Out<'_>,
        up: Out<'_>,
        dy: Out<'_>,
        rebuilds: bool,
    ) -> Result<()> {
        let threads = &self.threads;
        float_kernel!("gated_backward_in_place", gate.dtype(), T => {
            let [gate, up, dy] = [gate, up, dy].map(|tensor| Shared::new(write::<T>(tensor)));
            threads.blocks(gate.len(), POINTWISE_BLOCK, |range| {
                for start in range.clone().step_by(AT_ONCE) {
                    let part = start..(start + AT_ONCE).min(range.end);
                    // SAFETY: blocks are disjoint, and so are the three tensors.
                    let [gate, up, dy] = unsafe { [&gate, &up, &dy].map(|tensor| tensor.range(part.clone())) };
                    let (mut f, mut d) = ([0.0; AT_ONCE], [0.0; AT_ONCE]);
                    let (f, d) = (&mut f[..gate.len()], &mut d[..gate.len()]);
                    activation::values_and_derivatives(activation, gate, f, d);
                    vectorized!(|| {
                        for i in 0..gate.len() {
                            let (u, gradient) = (up[i].widen(), dy[i].widen());
                            gate[i] = T::narrow(gradient * u * d[i]);
                            up[i] = T::narrow(gradient * f[i]);
                            if rebuilds {
                                dy[i] = T::narrow(f[i] * u);
                            }
                        }
                    });
                }
            });
        })
    }

    fn gated_backward(
        &self,
        activation: Activation,
        gate: &Tensor,
        up: &Tensor,
        dy: &Tensor,
        dgate: Out<'_>,
        dup: Out<'_>,
    ) -> Result<()> {
        let threads = &self.threads;
        float_kernel!("gated_backward", gate.dtype(), T => {
            let (gate, up, dy) = (read::<T>(gate), read::<T>(up), read::<T>(dy));
            let (dgate, dup) = (Shared::new(write::<T>(dgate)), Shared::new(write::<T>(dup)));
            threads.blocks(gate.len(), POINTWISE_BLOCK, |range| {
                for start in range.clone().step_by(AT_ONCE) {
                    let part = start..(start + AT_ONCE).min(range.end);
                    // SAFETY: blocks are disjoint.
                    let (dgate, dup) = unsafe { (dgate.range(part.clone()), dup.range(part.clone())) };
                    let (gate, up, dy) = (&gate[part.clone()], &up[part.clone()], &dy[part]);
                    let (mut f, mut d) = ([0.0; AT_ONCE], [0.0; AT_ONCE]);
                    let (f, d) = (&mut f[..gate.len()], &mut d[..gate.len()]);
                    activation::values_and_derivatives(activation, gate, f, d);
                    vectorized!(|| {
                        for i in 0..up.len() {
                            let (u, dy) = (up[i].widen(), dy[i].widen());
                            dgate[i] = T::narrow(dy * u * d[i]);
                            dup[i] = T::narrow(dy * f[i]);
                        }
                    });
                }
            });
        })
    }

    fn scale_in_place(&self, target: Out<'_>, factor: &Tensor) -> Result<()> {
        let threads = &self.threads;
        let factor = read::<f32>(factor)[0];
        match factor == 1.0 {
            true => Ok(()),
            false => unary_in_place(threads, Unary::Affine { scale: factor, shift: 0.0 }, target),
        }
    }

    /// `target = source · factor`, rounded once to the target's type.
    fn scale_by(&self, source: &Tensor, factor: &Tensor, target: Out<'_>) -> Result<()> {
        let threads = &self.threads;
        let factor = read::<f32>(factor)[0];
        if factor == 1.0 {
            cast(threads, source, target);
            return Ok(());
        }
        float_kernel!("scale_by", source.dtype(), S => {
            let source = read::<S>(source);
            float_kernel!("scale_by", target.dtype(), T => {
                // Zero is added, as in place: a negative zero becomes the usual one.
                map(threads, source, write::<T>(target), move |v: S| T::narrow(factor * v.widen() + 0.0))
            })
        })?
    }

    fn dropout(&self, x: &Tensor, y: Out<'_>, p: f32, key: RandomKey) -> Result<()> {
        let threads = &self.threads;
        let scale = 1.0 / (1.0 - p);
        let threshold = drop_threshold(p);
        float_kernel!("dropout", x.dtype(), T => {
            let (x, y) = (read::<T>(x), Shared::new(write::<T>(y)));
            threads.blocks(x.len(), POINTWISE_BLOCK, |range| {
                // SAFETY: blocks are disjoint.
                let y = unsafe { y.range(range.clone()) };
                let first_block = (range.start / 4) as u64;
                let x = &x[range];
                vectorized!(|| {
                    for (block, (y, x)) in y.chunks_mut(4).zip(x.chunks(4)).enumerate() {
                        let words = key.block(first_block + block as u64);
                        for (lane, (y, x)) in y.iter_mut().zip(x).enumerate() {
                            let kept = if words[lane] >= threshold { x.widen() * scale } else { 0.0 };
                            *y = T::narrow(kept);
                        }
                    }
                });
            })
        })
    }

    fn dropout_rows(&self, x: &Tensor, y: Out<'_>, p: f32, key: RandomKey, starts: &[u64]) -> Result<()> {
        let threads = &self.threads;
        let (threshold, scale) = (drop_threshold(p), 1.0 / (1.0 - p));
        let width = x.numel() / starts.len().max(1);
        float_kernel!("dropout_rows", x.dtype(), T => {
            let (x, y) = (read::<T>(x), Shared::new(write::<T>(y)));
            threads.run(starts.len(), |row| {
                let range = row * width..(row + 1) * width;
                // SAFETY: each row is written by one task.
                let y = unsafe { y.range(range.clone()) };
                let mut words = key.block(starts[row] / 4);
                for (position, (y, x)) in (starts[row]..).zip(y.iter_mut().zip(&x[range])) {
                    let lane = (position % 4) as usize;
                    if lane == 0 {
                        words = key.block(position / 4);
                    }
                    *y = T::narrow(if words[lane] >= threshold { x.widen() * scale } else { 0.0 });
                }
            });
        })
    }

    fn unary(&self, op: Unary, x: &Tensor, y: Out<'_>) -> Result<()> {
        let threads = &self.threads;
        float_kernel!("unary", x.dtype(), T => {
            let (input, output) = (read::<T>(x), write::<T>(y));
            macro_rules! apply { ($f:expr) => {{ let f = $f; map(threads, input, output, move |v: T| T::narrow(f(v.widen()))) }}; }
            with_unary!(op, apply)
        })
    }

    fn unary_in_place(&self, op: Unary, x: Out<'_>) -> Result<()> {
        unary_in_place(&self.threads, op, x)
    }

    fn unary_backward(&self, op: Unary, x: &Tensor, dy: &Tensor, dx: Out<'_>) -> Result<()> {
        unary_backward(&self.threads, op, x, dy, dx)
    }

    fn add_assign(&self, target: Out<'_>, source: &Tensor) -> Result<()> {
        let threads = &self.threads;
        if target.shape() != source.shape() {
            return Err(TensorError::ShapeMismatch {
                op: "add_assign",
                left: *target.shape(),
                right: *source.shape(),
            });
        }
        float_kernel!("add_assign", source.dtype(), S => {
            let source = read::<S>(source);
            float_kernel!("add_assign", target.dtype(), T => {
                let target = Shared::new(write::<T>(target));
                threads.blocks(source.len(), POINTWISE_BLOCK, |range| {
                    // SAFETY: blocks are disjoint.
                    let target = unsafe { target.range(range.clone()) };
                    let source = &source[range];
                    vectorized!(|| {
                        for (t, s) in target.iter_mut().zip(source) {
                            *t = T::narrow(t.widen() + s.widen());
                        }
                    });
                })
            })
        })?
    }
}

pub(crate) fn unary_in_place(threads: &Threads, op: Unary, x: Out<'_>) -> Result<()> {
    float_kernel!("unary", x.dtype(), T => {
        let x = write::<T>(x);
        macro_rules! apply { ($f:expr) => {{ let f = $f; map_in_place(threads, x, move |v: T| T::narrow(f(v.widen()))) }}; }
        with_unary!(op, apply)
    })
}

pub(crate) fn unary_backward(
    threads: &Threads,
    op: Unary,
    x: &Tensor,
    dy: &Tensor,
    dx: Out<'_>,
) -> Result<()> {
    float_kernel!("unary_backward", x.dtype(), T => {
        let (input, gradient, output) = (read::<T>(x), read::<T>(dy), write::<T>(dx));
        macro_rules! apply { ($f:expr) => {{ let f = $f; map2(threads, input, gradient, output, move |x: T, dy: T| T::narrow(dy.widen() * f(x.widen()))) }}; }
        match op {
            Unary::Activation(activation) => with_activation!(activation, KIND => apply!(|x: f32| activate_derivative(KIND, x))),
            Unary::Neg => apply!(|_x: f32| -1.0),
            Unary::Exp => apply!(|x: f32| exp(x)),
            Unary::Log => apply!(|x: f32| 1.0 / x),
            Unary::Sqrt => apply!(|x: f32| 0.5 / x.sqrt()),
            Unary::Square => apply!(|x: f32| 2.0 * x),
            Unary::Abs => apply!(|x: f32| if x > 0.0 { 1.0 } else if x < 0.0 { -1.0 } else { 0.0 }),
            Unary::Reciprocal => apply!(|x: f32| -1.0 / (x * x)),
            Unary::Affine { scale, .. } => apply!(move |_x: f32| scale),
            Unary::Power(n) => apply!(move |x: f32| n * x.powf(n - 1.0)),
        }
    })
}

/// `gradient` is multiplied by `f'(before)`.
pub(crate) fn gradient_in_place(
    threads: &Threads,
    activation: Activation,
    before: &Tensor,
    gradient: Out<'_>,
) -> Result<()> {
    float_kernel!("activation_backward", before.dtype(), T => {
        let (before, gradient) = (read::<T>(before), Shared::new(write::<T>(gradient)));
        threads.blocks(before.len(), POINTWISE_BLOCK, |range| {
            // SAFETY: blocks are disjoint.
            let gradient = unsafe { gradient.range(range.clone()) };
            let before = &before[range];
            vectorized!(|| with_activation!(activation, KIND => {
                for (gradient, before) in gradient.iter_mut().zip(before) {
                    *gradient = T::narrow(gradient.widen() * activate_derivative(KIND, before.widen()));
                }
            }));
        });
    })
}

/// The same for whole rows, of which the new gradients are summed over all rows while they are near.
pub(crate) fn activation_backward_sums(
    threads: &Threads,
    activation: Activation,
    before: Out<'_>,
    gradient: Out<'_>,
    sums: Out<'_>,
) -> Result<()> {
    let (rows, width) = (before.shape().rows(), before.shape().last());
    float_kernel!("activation_backward", before.dtype(), T => {
        let (before, gradient) = (Shared::new(write::<T>(before)), Shared::new(write::<T>(gradient)));
        let (blocks, block_rows) = partial_blocks(rows);
        let mut partial = vec![0.0f32; blocks * width];
        let parts = Shared::new(&mut partial);
        threads.run(blocks, |block| {
            // SAFETY: each block has its own part.
            let part = unsafe { parts.range(block * width..(block + 1) * width) };
            for r in block * block_rows..((block + 1) * block_rows).min(rows) {
                let row = r * width..(r + 1) * width;
                // SAFETY: rows are disjoint.
                let (before, gradient) = unsafe { (before.range(row.clone()), gradient.range(row)) };
                activation::backward_in_place(activation, before, gradient);
                vectorized!(|| add_row(part, gradient));
            }
        });
        add_parts(&partial, sums)
    })?
}
