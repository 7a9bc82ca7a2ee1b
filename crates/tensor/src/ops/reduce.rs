//! Sums, means, extrema, softmax, running sums.

use crate::autograd::{needs_grad, record};
use crate::backend::Reduction;
use crate::error::Result;
use crate::ops::shape::around;
use crate::ops::{affine, expect_float, reshape};
use crate::param::Operand;
use crate::profile;
use crate::shape::Shape;
use crate::tensor::Tensor;

fn without(shape: &Shape, dim: usize) -> Shape {
    let mut sizes = shape.sizes().to_vec();
    sizes.remove(dim);
    Shape::new(&sizes)
}

fn reduce(op: Reduction, x: &Tensor, dim: usize) -> Result<Tensor> {
    let (outer, size, inner) = around("reduce", x.shape(), dim)?;
    let mut y = Tensor::empty(without(x.shape(), dim), x.dtype(), x.device())?;
    x.device().backend().reduce(op, x, outer, size, inner, y.out()?)?;
    Ok(y)
}

/// Sums dimension `dim` away.
pub fn sum_dim(x: impl Into<Operand>, dim: usize) -> Result<Tensor> {
    let x = x.into();
    expect_float("sum_dim", "the operand", x.dtype())?;
    let y = reduce(Reduction::Sum, &*x.read()?, dim)?;
    if !needs_grad(&[&x]) {
        return Ok(y);
    }
    let shape = *x.shape();
    Ok(record("sum_dim", &[&x], y, move |dy| {
        let mut kept = shape.sizes().to_vec();
        kept[dim] = 1;
        // Adding to zeros of the full shape broadcasts the gradient back.
        let zeros = Tensor::zeros(shape, dy.dtype(), dy.device())?;
        Ok(vec![Some(crate::ops::add(&zeros, &dy.view(&kept)?)?)])
    }))
}

/// The sum of all elements, as a scalar.
pub fn sum(x: impl Into<Operand>) -> Result<Tensor> {
    let x = x.into();
    let count = x.shape().numel();
    sum_dim(&reshape(x, [count])?, 0)
}

/// The mean of all elements, as a scalar.
pub fn mean(x: impl Into<Operand>) -> Result<Tensor> {
    let x = x.into();
    let count = x.shape().numel().max(1);
    affine(&sum(x)?, 1.0 / count as f32, 0.0)
}

/// The mean over dimension `dim`.
pub fn mean_dim(x: impl Into<Operand>, dim: usize) -> Result<Tensor> {
    let x = x.into();
    let (_, size, _) = around("mean_dim", x.shape(), dim)?;
    affine(&sum_dim(x, dim)?, 1.0 / size.max(1) as f32, 0.0)
}

/// The largest values over dimension `dim`; not recorded (use `top_k` and `gather` for a gradient).
pub fn max(x: &Tensor, dim: usize) -> Result<Tensor> {
    expect_float("max", "the operand", x.dtype())?;
    reduce(Reduction::Max, x, dim)
}

/// The smallest values over dimension `dim`; not recorded.
pub fn min(x: &Tensor, dim: usize) -> Result<Tensor> {
    expect_float("min", "the operand", x.dtype())?;
    reduce(Reduction::Min, x, dim)
}

fn any_softmax(name: &'static str, x: Operand, log: bool) -> Result<Tensor> {
    expect_float(name, "the operand", x.dtype())?;
    let y = {
        let x = x.read()?;
        let mut y = Tensor::empty(*x.shape(), x.dtype(), x.device())?;
        profile::count(0, y.numel());
        x.device().backend().softmax(&x, y.out()?, log)?;
        y
    };
    if !needs_grad(&[&x]) {
        return Ok(y);
    }
    let kept = y.detach();
    Ok(record(name, &[&x], y, move |dy| {
        let mut dx = Tensor::empty(*kept.shape(), kept.dtype(), kept.device())?;
        profile::count(0, 2 * kept.numel());
        kept.device().backend().softmax_backward(&kept, &dy, dx.out()?, log)?;
        Ok(vec![Some(dx)])
    }))
}

/// Softmax over the last dimension.
pub fn softmax(x: impl Into<Operand>) -> Result<Tensor> {
    any_softmax("softmax", x.into(), false)
}

/// The logarithm of the softmax over the last dimension.
pub fn log_softmax(x: impl Into<Operand>) -> Result<Tensor> {
    any_softmax("log_softmax", x.into(), true)
}

/// Running sums along the last dimension.
pub fn cumsum(x: impl Into<Operand>) -> Result<Tensor> {
    fn run(x: &Tensor, reverse: bool) -> Result<Tensor> {
        let mut y = Tensor::empty(*x.shape(), x.dtype(), x.device())?;
        x.device().backend().cumsum(x, y.out()?, reverse)?;
        Ok(y)
    }
    let x = x.into();
    expect_float("cumsum", "the operand", x.dtype())?;
    let y = run(&*x.read()?, false)?;
    if !needs_grad(&[&x]) {
        return Ok(y);
    }
    Ok(record("cumsum", &[&x], y, move |dy| Ok(vec![Some(run(&dy, true)?)])))
}
