//! Elementwise functions, comparisons, casts, dropout.

use crate::autograd::{Saved, needs_grad, rebuild_with, record};
use crate::backend::{Activation, Binary, Comparison, Unary};
use crate::dtype::DType;
use crate::error::{Result, TensorError};
use crate::ops::{count_activation, expect_float, expect_same_dtype};
use crate::out::Out;
use crate::param::Operand;
use crate::random::RandomKey;
use crate::shape::Shape;
use crate::tensor::Tensor;

fn unary(name: &'static str, op: Unary, x: Operand) -> Result<Tensor> {
    expect_float(name, "the operand", x.dtype())?;
    let y = {
        let x = x.read()?;
        let mut y = Tensor::empty(*x.shape(), x.dtype(), x.device())?;
        if let Unary::Activation(activation) = op {
            count_activation(activation, y.numel());
        }
        x.device().backend().unary(op, &x, y.out()?)?;
        y
    };
    if !needs_grad(&[&x]) {
        return Ok(y);
    }
    let saved = x.saved();
    Ok(record(name, &[&x], y, move |dy| {
        let x = saved.read()?;
        let mut dx = Tensor::empty(*x.shape(), x.dtype(), x.device())?;
        if let Unary::Activation(activation) = op {
            count_activation(activation, 2 * dx.numel());
        }
        x.device().backend().unary_backward(op, &x, &dy, dx.out()?)?;
        Ok(vec![Some(dx)])
    }))
}

macro_rules! unary_ops {
    ($($(#[$doc:meta])* $name:ident => $op:expr;)*) => {$(
        $(#[$doc])*
        pub fn $name(x: impl Into<Operand>) -> Result<Tensor> {
            unary(stringify!($name), $op, x.into())
        }
    )*};
}

unary_ops! {
    /// `-x`
    neg => Unary::Neg;
    /// `eˣ`
    exp => Unary::Exp;
    /// Natural logarithm.
    log => Unary::Log;
    /// Square root.
    sqrt => Unary::Sqrt;
    /// `x²`
    square => Unary::Square;
    /// `|x|`
    abs => Unary::Abs;
    /// `1/x`
    reciprocal => Unary::Reciprocal;
    /// `max(x, 0)`
    relu => Unary::Activation(Activation::Relu);
    /// Hyperbolic tangent.
    tanh => Unary::Activation(Activation::Tanh);
    /// Logistic function.
    sigmoid => Unary::Activation(Activation::Sigmoid);
    /// `x·sigmoid(x)`
    silu => Unary::Activation(Activation::Silu);
    /// GELU by the error function.
    gelu => Unary::Activation(Activation::GeluErf);
    /// GELU by the tanh approximation.
    gelu_tanh => Unary::Activation(Activation::GeluTanh);
}

/// Any of the activations.
pub fn activate(x: impl Into<Operand>, activation: Activation) -> Result<Tensor> {
    unary("activate", Unary::Activation(activation), x.into())
}

/// `scale·x + shift`
pub fn affine(x: impl Into<Operand>, scale: f32, shift: f32) -> Result<Tensor> {
    unary("affine", Unary::Affine { scale, shift }, x.into())
}

/// `xⁿ`
pub fn power(x: impl Into<Operand>, n: f32) -> Result<Tensor> {
    unary("power", Unary::Power(n), x.into())
}

/// Sums a gradient down to the shape of a broadcast operand.
fn reduced(gradient: Tensor, shape: &Shape) -> Result<Tensor> {
    if gradient.shape() == shape {
        return Ok(gradient);
    }
    let mut target = Tensor::empty(*shape, gradient.dtype(), gradient.device())?;
    gradient.device().backend().sum_to(&gradient, target.out()?)?;
    Ok(target)
}

fn binary(name: &'static str, op: Binary, a: Operand, b: Operand) -> Result<Tensor> {
    expect_float(name, "the left operand", a.dtype())?;
    expect_same_dtype(name, "the right operand", b.dtype(), a.dtype())?;
    let shape = Shape::broadcast(name, a.shape(), b.shape())?;
    let y = {
        let (a, b) = (a.read()?, b.read()?);
        let mut y = Tensor::empty(shape, a.dtype(), a.device())?;
        a.device().backend().binary(op, &a, &b, y.out()?)?;
        y
    };
    if !needs_grad(&[&a, &b]) {
        return Ok(y);
    }
    let (left_shape, right_shape) = (*a.shape(), *b.shape());
    let (saved_a, saved_b) = match op {
        // Sums need no values to go back.
        Binary::Add | Binary::Sub => (None, None),
        _ => (Some(a.saved()), Some(b.saved())),
    };
    Ok(record(name, &[&a, &b], y, move |dy| {
        let (da, db) = match (&saved_a, &saved_b) {
            (Some(a), Some(b)) => binary_gradients(op, &*a.read()?, &*b.read()?, &dy)?,
            _ => {
                let db = if op == Binary::Sub { neg(&dy)? } else { dy.clone() };
                (dy, db)
            }
        };
        Ok(vec![Some(reduced(da, &left_shape)?), Some(reduced(db, &right_shape)?)])
    }))
}

/// Gradients before broadcasting is undone. Runs unrecorded, inside backward.
fn binary_gradients(op: Binary, a: &Tensor, b: &Tensor, dy: &Tensor) -> Result<(Tensor, Tensor)> {
    Ok(match op {
        Binary::Mul => (mul(dy, b)?, mul(dy, a)?),
        Binary::Div => {
            let da = div(dy, b)?;
            let db = neg(&div(&mul(&da, a)?, b)?)?;
            (da, db)
        }
        Binary::Max | Binary::Min => {
            // Ties go to the left, as the kernels choose it.
            let right_wins = if op == Binary::Max {
                compare(Comparison::Less, a, b)?
            } else {
                compare(Comparison::Less, b, a)?
            };
            let zero = Tensor::zeros([], dy.dtype(), dy.device())?;
            (select(&right_wins, &zero, dy)?, select(&right_wins, dy, &zero)?)
        }
        Binary::Add | Binary::Sub => unreachable!("sums are handled by the caller"),
    })
}

macro_rules! binary_ops {
    ($($(#[$doc:meta])* $name:ident => $op:expr;)*) => {$(
        $(#[$doc])*
        pub fn $name(a: impl Into<Operand>, b: impl Into<Operand>) -> Result<Tensor> {
            binary(stringify!($name), $op, a.into(), b.into())
        }
    )*};
}

binary_ops! {
    /// `a + b` with broadcasting.
    add => Binary::Add;
    /// `a - b` with broadcasting.
    sub => Binary::Sub;
    /// `a · b` with broadcasting.
    mul => Binary::Mul;
    /// `a / b` with broadcasting.
    div => Binary::Div;
    /// `max(a, b)` with broadcasting.
    maximum => Binary::Max;
    /// `min(a, b)` with broadcasting.
    minimum => Binary::Min;
}

/// A comparison with broadcasting; the result is `Bool` and carries no gradient.
pub fn compare(op: Comparison, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    expect_same_dtype("compare", "the right operand", b.dtype(), a.dtype())?;
    let shape = Shape::broadcast("compare", a.shape(), b.shape())?;
    let mut y = Tensor::empty(shape, DType::Bool, a.device())?;
    a.device().backend().compare(op, a, b, y.out()?)?;
    Ok(y)
}

/// `condition ? a : b` with broadcasting.
pub fn select(condition: &Tensor, a: impl Into<Operand>, b: impl Into<Operand>) -> Result<Tensor> {
    const OP: &str = "select";
    let (a, b) = (a.into(), b.into());
    expect_float(OP, "the operands", a.dtype())?;
    expect_same_dtype(OP, "the right operand", b.dtype(), a.dtype())?;
    if !matches!(condition.dtype(), DType::Bool | DType::U8) {
        return Err(TensorError::BadDType {
            op: OP,
            what: "the condition",
            dtype: condition.dtype(),
            expected: "bool",
        });
    }
    let shape = Shape::broadcast(OP, condition.shape(), &Shape::broadcast(OP, a.shape(), b.shape())?)?;
    let y = {
        let (a, b) = (a.read()?, b.read()?);
        let mut y = Tensor::empty(shape, a.dtype(), a.device())?;
        a.device().backend().select(condition, &a, &b, y.out()?)?;
        y
    };
    if !needs_grad(&[&a, &b]) {
        return Ok(y);
    }
    let condition = condition.detach();
    let (left_shape, right_shape) = (*a.shape(), *b.shape());
    Ok(record(OP, &[&a, &b], y, move |dy| {
        let zero = Tensor::zeros([], dy.dtype(), dy.device())?;
        let (da, db) = (select(&condition, &dy, &zero)?, select(&condition, &zero, &dy)?);
        Ok(vec![Some(reduced(da, &left_shape)?), Some(reduced(db, &right_shape)?)])
    }))
}

/// `activation(gate) · up`: SwiGLU, GeGLU and their kin.
pub fn gated(activation: Activation, gate: impl Into<Operand>, up: impl Into<Operand>) -> Result<Tensor> {
    let (gate, up) = (gate.into(), up.into());
    expect_float("gated", "the gate", gate.dtype())?;
    expect_same_dtype("gated", "up", up.dtype(), gate.dtype())?;
    if gate.shape() != up.shape() {
        return Err(TensorError::ShapeMismatch { op: "gated", left: *gate.shape(), right: *up.shape() });
    }
    let y = {
        let (gate, up) = (gate.read()?, up.read()?);
        let mut y = Tensor::empty(*gate.shape(), gate.dtype(), gate.device())?;
        count_activation(activation, y.numel());
        gate.device().backend().gated(activation, &gate, &up, y.out()?)?;
        y
    };
    if !needs_grad(&[&gate, &up]) {
        return Ok(y);
    }
    let (saved_gate, saved_up) = (gate.saved(), up.saved());
    Ok(record("gated", &[&gate, &up], y, move |dy| {
        let (gate, up) = (saved_gate.read()?, saved_up.read()?);
        let mut dgate = Tensor::empty(*dy.shape(), dy.dtype(), dy.device())?;
        let mut dup = Tensor::empty(*dy.shape(), dy.dtype(), dy.device())?;
        count_activation(activation, 2 * dy.numel());
        dy.device().backend().gated_backward(activation, &gate, &up, &dy, dgate.out()?, dup.out()?)?;
        Ok(vec![Some(dgate), Some(dup)])
    }))
}

/// As [`cast`], of something that is kept for backward anyway: an op that saves the result keeps nothing, and backward converts
/// again.
pub fn cast_of_kept(x: impl Into<Operand>, dtype: DType) -> Result<Tensor> {
    let x = x.into();
    let y = cast(x.clone(), dtype)?;
    if x.dtype() != dtype && y.requires_grad() {
        let saved = Saved::of(&x);
        rebuild_with(&y, move || cast(saved.read()?.detach(), dtype));
    }
    Ok(y)
}

/// Converts the element type; gradients are converted back.
pub fn cast(x: impl Into<Operand>, dtype: DType) -> Result<Tensor> {
    fn convert(x: &Tensor, dtype: DType) -> Result<Tensor> {
        let mut y = Tensor::empty(*x.shape(), dtype, x.device())?;
        x.device().backend().cast(x, y.out()?)?;
        Ok(y)
    }
    let x = x.into();
    let from = x.dtype();
    if let Operand::Tensor(tensor) = &x
        && from == dtype
    {
        return Ok(tensor.clone());
    }
    let y = convert(&*x.read()?, dtype)?;
    if !dtype.is_float() || !needs_grad(&[&x]) {
        return Ok(y);
    }
    Ok(record("cast", &[&x], y, move |dy| Ok(vec![Some(convert(&dy, from)?)])))
}

/// Zeroes elements with probability `p` and scales the rest by `1/(1-p)`, with this thread's next random key.
pub fn dropout(x: impl Into<Operand>, p: f32) -> Result<Tensor> {
    dropped(x.into(), p, move |x, y, key| x.device().backend().dropout(x, y, p, key))
}

/// The same for rows of a larger tensor, so that they lose what they would lose in the whole: row `i` begins at element
/// `starts[i]` of it.
pub fn dropout_rows(x: impl Into<Operand>, p: f32, starts: Vec<u64>) -> Result<Tensor> {
    let x = x.into();
    if starts.is_empty() || !x.shape().numel().is_multiple_of(starts.len()) {
        let what = format!("{} cannot be cut into {} rows", x.shape(), starts.len());
        return Err(TensorError::argument("dropout_rows", what));
    }
    dropped(x, p, move |x, y, key| x.device().backend().dropout_rows(x, y, p, key, &starts))
}

fn dropped(
    x: Operand,
    p: f32,
    draw: impl Fn(&Tensor, Out<'_>, RandomKey) -> Result<()> + Send + 'static,
) -> Result<Tensor> {
    expect_float("dropout", "the operand", x.dtype())?;
    if !(0.0..1.0).contains(&p) {
        return Err(TensorError::argument("dropout", format!("probability {p} is outside 0..1")));
    }
    if p == 0.0
        && let Operand::Tensor(x) = &x
    {
        return Ok(x.clone());
    }
    let key = crate::random::next_key();
    let apply = move |x: &Tensor| -> Result<Tensor> {
        let mut y = Tensor::empty(*x.shape(), x.dtype(), x.device())?;
        draw(x, y.out()?, key)?;
        Ok(y)
    };
    let y = apply(&*x.read()?)?;
    if !needs_grad(&[&x]) {
        return Ok(y);
    }
    // The mask is a function of the key: drawing it again costs less than keeping it.
    Ok(record("dropout", &[&x], y, move |dy| Ok(vec![Some(apply(&dy)?)])))
}
