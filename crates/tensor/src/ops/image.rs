//! Convolution and pooling over `[batch, channels, height, width]`.

use crate::autograd::{needs_grad, record};
use crate::backend::Window2d;
use crate::dtype::DType;
use crate::error::{Result, TensorError};
use crate::ops::{WeightLayout, linear, mean_dim, permute, reshape};
use crate::param::Operand;
use crate::profile;
use crate::tensor::Tensor;

/// Patches as rows, recorded.
fn patches(x: &Tensor, window: Window2d) -> Result<Tensor> {
    let [out_h, out_w] = window.output_size("conv2d", x.shape())?;
    let shape = *x.shape();
    let mut columns = Tensor::empty(
        [shape[0] * out_h * out_w, shape[1] * window.kernel[0] * window.kernel[1]],
        x.dtype(),
        x.device(),
    )?;
    x.device().backend().image_to_columns(x, &window, columns.out()?)?;
    let x = Operand::from(x);
    if !needs_grad(&[&x]) {
        return Ok(columns);
    }
    Ok(record("patches", &[&x], columns, move |dcolumns| {
        let mut dx = Tensor::empty(shape, dcolumns.dtype(), dcolumns.device())?;
        dcolumns.device().backend().columns_to_image(&dcolumns, &window, dx.out()?)?;
        Ok(vec![Some(dx)])
    }))
}

/// Convolution of `x` with `weight [out, in, kh, kw]`.
pub fn conv2d(
    x: &Tensor,
    weight: impl Into<Operand>,
    bias: Option<Operand>,
    stride: [usize; 2],
    padding: [usize; 2],
) -> Result<Tensor> {
    let weight = weight.into();
    let &[out, channels, kh, kw] = weight.shape().sizes() else {
        return Err(TensorError::shape("conv2d", "the weight", *weight.shape(), "[out, in, height, width]"));
    };
    if x.shape().dims() != 4 || x.shape()[1] != channels {
        return Err(TensorError::ShapeMismatch { op: "conv2d", left: *x.shape(), right: *weight.shape() });
    }
    let window = Window2d { kernel: [kh, kw], stride, padding };
    let [out_h, out_w] = window.output_size("conv2d", x.shape())?;
    let sizes =
        || format!("{channels}, {out}, kernel_size=({kh}, {kw}), stride=({}, {})", stride[0], stride[1]);
    let owner = weight.clone();
    profile::in_module_of(Some(&owner), "Conv2d", sizes, || {
        if bias.is_some() {
            profile::count(0, out * x.shape()[0] * out_h * out_w);
        }
        let flat_weight = reshape(weight, [out, channels * kh * kw])?;
        let rows = linear(&patches(x, window)?, &flat_weight, bias, WeightLayout::OutIn)?;
        permute(&reshape(&rows, [x.shape()[0], out_h, out_w, out])?, &[0, 3, 1, 2])
    })
}

/// The largest value of each window.
pub fn max_pool2d(x: &Tensor, window: Window2d) -> Result<Tensor> {
    let [out_h, out_w] = window.output_size("max_pool2d", x.shape())?;
    let shape = *x.shape();
    let mut y = Tensor::empty([shape[0], shape[1], out_h, out_w], x.dtype(), x.device())?;
    let mut indices = Tensor::empty(*y.shape(), DType::I64, x.device())?;
    profile::count(0, x.numel());
    x.device().backend().max_pool2d(x, &window, y.out()?, indices.out()?)?;
    let x = Operand::from(x);
    if !needs_grad(&[&x]) {
        return Ok(y);
    }
    Ok(record("max_pool2d", &[&x], y, move |dy| {
        let mut dx = Tensor::empty([1, shape.numel()], dy.dtype(), dy.device())?;
        let count = dy.numel();
        dy.device().backend().scatter_add(&dy.view([1, count])?, &indices.view([1, count])?, dx.out()?)?;
        Ok(vec![Some(dx.view(shape)?)])
    }))
}

/// The mean of each window; padding counts as zeros.
pub fn avg_pool2d(x: &Tensor, window: Window2d) -> Result<Tensor> {
    let [out_h, out_w] = window.output_size("avg_pool2d", x.shape())?;
    let (batch, channels) = (x.shape()[0], x.shape()[1]);
    profile::count(0, x.numel());
    let rows = patches(x, window)?;
    let per_channel =
        reshape(&rows, [batch * out_h * out_w * channels, window.kernel[0] * window.kernel[1]])?;
    let means = mean_dim(&per_channel, 1)?;
    permute(&reshape(&means, [batch, out_h, out_w, channels])?, &[0, 3, 1, 2])
}
