//! Layer norm and RMS norm, alone or behind a residual sum.
//!
//! What is normalised is kept for backward anyway. Where rows are wide the result is not kept beside it but computed again
//! for the products behind it: a pass over memory is nothing there beside a product.

use crate::autograd::{needs_grad, rebuild_with, record_many};
use crate::backend::NormKind;
use crate::dtype::DType;
use crate::error::{Result, TensorError};
use crate::ops::{expect_float, expect_same_dtype, gradient_like};
use crate::param::{Operand, Value};
use crate::profile;
use crate::tensor::Tensor;

/// `(x - mean)/√(variance + eps) · weight + bias` over the last dimension.
pub fn layer_norm(
    x: impl Into<Operand>,
    weight: Option<Operand>,
    bias: Option<Operand>,
    eps: f32,
) -> Result<Tensor> {
    Ok(norm(NormKind::Layer, x.into(), Sum::None, weight, bias, eps)?.1)
}

/// `x/√(mean(x²) + eps) · weight` over the last dimension.
pub fn rms_norm(x: impl Into<Operand>, weight: Option<Operand>, eps: f32) -> Result<Tensor> {
    Ok(norm(NormKind::Rms, x.into(), Sum::None, weight, None, eps)?.1)
}

/// `(x + residual, layer_norm(x + residual))` in one pass, and one pass back.
///
/// Without a residual the first result is `x`: whoever goes on with it instead of `x` has both gradients joined in that
/// one pass, to the same bits as with a residual.
pub fn add_layer_norm(
    x: impl Into<Operand>,
    residual: Option<Operand>,
    weight: Option<Operand>,
    bias: Option<Operand>,
    eps: f32,
) -> Result<(Tensor, Tensor)> {
    norm(NormKind::Layer, x.into(), Sum::With(residual), weight, bias, eps)
}

/// `(x + residual, rms_norm(x + residual))` in one pass, and one pass back; see [`add_layer_norm`].
pub fn add_rms_norm(
    x: impl Into<Operand>,
    residual: Option<Operand>,
    weight: Option<Operand>,
    eps: f32,
) -> Result<(Tensor, Tensor)> {
    norm(NormKind::Rms, x.into(), Sum::With(residual), weight, None, eps)
}

/// Rows from this width on are normalised again in backward. A step of a transformer this wide takes 0.6 % longer for it
/// and keeps a sixth less between forward and backward.
pub const REBUILT_WIDTH: usize = 2048;

/// What comes out beside the normalised input.
enum Sum {
    None,
    /// The input with this added, where there is something to add.
    With(Option<Operand>),
}

fn norm(
    kind: NormKind,
    x: Operand,
    sum: Sum,
    weight: Option<Operand>,
    bias: Option<Operand>,
    eps: f32,
) -> Result<(Tensor, Tensor)> {
    let class = match kind {
        NormKind::Layer => "LayerNorm",
        NormKind::Rms => "RMSNorm",
    };
    let (owner, shape) = (weight.clone(), *x.shape());
    let sizes = || format!("({},), eps={eps:e}, elementwise_affine=True", shape.last());
    profile::in_module_of(owner.as_ref(), class, sizes, || recorded_norm(kind, x, sum, weight, bias, eps))
}

/// Counts one pass over `elements`.
fn count_norm(kind: NormKind, has_weight: bool, elements: usize) {
    let per_element = match kind {
        NormKind::Layer => 4 + usize::from(has_weight),
        // No mean is taken.
        NormKind::Rms => 3 + usize::from(has_weight),
    };
    profile::count(0, per_element * elements);
}

fn recorded_norm(
    kind: NormKind,
    x: Operand,
    sum: Sum,
    weight: Option<Operand>,
    bias: Option<Operand>,
    eps: f32,
) -> Result<(Tensor, Tensor)> {
    const OP: &str = "norm";
    let (gives_sum, residual) = match sum {
        Sum::None => (false, None),
        Sum::With(residual) => (true, residual),
    };
    let shape = *x.shape();
    expect_float(OP, "the input", x.dtype())?;
    if shape.dims() == 0 {
        return Err(TensorError::shape(OP, "the input", shape, "at least one dimension"));
    }
    for (what, operand) in [("the weight", &weight), ("the bias", &bias)] {
        let Some(operand) = operand else { continue };
        expect_same_dtype(OP, what, operand.dtype(), x.dtype())?;
        if operand.shape().sizes() != [shape.last()] {
            return Err(TensorError::shape(OP, what, *operand.shape(), format!("[{}]", shape.last())));
        }
    }
    if let Some(residual) = &residual
        && *residual.shape() != shape
    {
        return Err(TensorError::ShapeMismatch { op: OP, left: shape, right: *residual.shape() });
    }

    let input = x.read()?;
    let device = input.device().clone();
    let statistics = || Tensor::empty([shape.rows()], DType::F32, &device);
    let (mut mean, mut rstd) = (statistics()?, statistics()?);
    let mut y = Tensor::empty(shape, x.dtype(), &device)?;
    let residual_value: Option<Value> = residual.as_ref().map(Operand::read).transpose()?;
    let mut sum = match residual {
        Some(_) => Some(Tensor::empty(shape, x.dtype(), &device)?),
        None => None,
    };
    {
        let weight: Option<Value> = weight.as_ref().map(Operand::read).transpose()?;
        let bias: Option<Value> = bias.as_ref().map(Operand::read).transpose()?;
        count_norm(kind, weight.is_some(), shape.numel());
        let sum = sum.as_mut().map(Tensor::out).transpose()?;
        let pair = residual_value.as_deref().zip(sum);
        device.backend().norm(
            kind,
            eps,
            &input,
            pair,
            weight.as_deref(),
            bias.as_deref(),
            y.out()?,
            mean.out()?,
            rstd.out()?,
        )?;
    }
    let mut operands = vec![&x];
    operands.extend(&residual);
    operands.extend(&weight);
    operands.extend(&bias);
    let normalised = sum.clone().unwrap_or_else(|| input.detach());
    if !needs_grad(&operands) {
        return Ok((normalised, y));
    }

    let saved_x = match &sum {
        Some(sum) => Operand::Tensor(sum.clone()),
        None => x.saved(),
    };
    let (saved_weight, saved_bias) = (weight.as_ref().map(Operand::saved), bias.as_ref().map(Operand::saved));
    let has_residual = residual.is_some();
    let again = (saved_x.clone(), saved_weight.clone(), saved_bias.clone());
    let backward = move |mut gradients: Vec<Option<Tensor>>| {
        let (dsum, dy) =
            if gives_sum { (gradients.remove(0), gradients.remove(0)) } else { (None, gradients.remove(0)) };
        let x = saved_x.read()?;
        let mut results = Vec::new();
        let (mut dweight, mut dbias) = (None, None);
        let dx = match dy {
            Some(dy) => {
                let backend = dy.device().backend();
                let weight: Option<Value> = saved_weight.as_ref().map(Operand::read).transpose()?;
                let like = |operand: &Option<Operand>| -> Result<Option<Tensor>> {
                    match operand {
                        Some(operand) if operand.requires_grad() || matches!(operand, Operand::Tensor(_)) => {
                            Ok(Some(gradient_like(operand, *operand.shape(), dy.dtype(), dy.device())?))
                        }
                        _ => Ok(None),
                    }
                };
                (dweight, dbias) = (like(&saved_weight)?, like(&saved_bias)?);
                let mut dx = Tensor::empty(*x.shape(), x.dtype(), x.device())?;
                count_norm(kind, weight.is_some(), 2 * x.numel());
                backend.norm_backward(
                    kind,
                    &x,
                    weight.as_deref(),
                    &mean,
                    &rstd,
                    &dy,
                    dsum.as_ref(),
                    dx.out()?,
                    dweight.as_mut().map(Tensor::out).transpose()?,
                    dbias.as_mut().map(Tensor::out).transpose()?,
                )?;
                Some(dx)
            }
            None => dsum,
        };
        results.push(dx.clone());
        results.extend(has_residual.then_some(dx));
        results.extend(saved_weight.is_some().then_some(dweight));
        results.extend(saved_bias.is_some().then_some(dbias));
        Ok(results)
    };
    let outputs = if gives_sum { vec![normalised, y] } else { vec![y] };
    let mut recorded = record_many(OP, &operands, outputs, backward);
    let y = recorded.pop().expect("the normalised result is last");
    if shape.last() >= REBUILT_WIDTH {
        let (x, weight, bias) = again;
        rebuild_with(&y, move || {
            let x = x.read()?;
            let weight: Option<Value> = weight.as_ref().map(Operand::read).transpose()?;
            let bias: Option<Value> = bias.as_ref().map(Operand::read).transpose()?;
            let like_rows = || Tensor::empty([shape.rows()], DType::F32, x.device());
            let (mut y, mut mean, mut rstd) =
                (Tensor::empty(shape, x.dtype(), x.device())?, like_rows()?, like_rows()?);
            let (weight, bias) = (weight.as_deref(), bias.as_deref());
            count_norm(kind, weight.is_some(), x.numel());
            x.device().backend().norm(
                kind,
                eps,
                &x,
                None,
                weight,
                bias,
                y.out()?,
                mean.out()?,
                rstd.out()?,
            )?;
            Ok(y)
        });
    }
    let sum = recorded.pop().unwrap_or_else(|| input.detach());
    Ok((sum, y))
}
