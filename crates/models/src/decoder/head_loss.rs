//! The loss of logits that are more than the product of a head: capped ones, and those of a head with a bias.

use ferrospeed_tensor::backend::{Binary, LossGradient, Unary};
use ferrospeed_tensor::ops::{self, RowLoss, WeightLayout};
use ferrospeed_tensor::{Activation, DType, Device, Operand, Out, Tensor, TensorError};

use super::Decoder;
use crate::error::Result;

impl Decoder {
    /// The mean loss of hidden states `[rows, width]`. A chunk of logits is held at a time, but where the head has a bias, whose
    /// gradient needs all of them.
    pub(super) fn head_loss(
        &self,
        hidden: &Tensor,
        targets: &Tensor,
        losses: impl RowLoss,
    ) -> Result<Tensor> {
        let losses = Capped { losses, cap: self.config.head.cap };
        let Some(bias) = &self.head_bias else {
            return Ok(ops::linear_cross_entropy(hidden, &self.head, WeightLayout::OutIn, targets, losses)?);
        };
        let logits = ops::linear(hidden, &self.head, Some(Operand::from(bias)), WeightLayout::OutIn)?;
        Ok(ops::cross_entropy(&logits, targets, losses)?)
    }
}

/// Losses of logits `cap·tanh(x/cap)`, told of `x`.
struct Capped<L> {
    losses: L,
    cap: Option<f32>,
}

impl<L: RowLoss> RowLoss for Capped<L> {
    fn ignore_index(&self) -> i64 {
        self.losses.ignore_index()
    }

    fn classes(&self, own: usize) -> usize {
        self.losses.classes(own)
    }

    fn columns(&self, device: &Device, classes: usize) -> usize {
        self.losses.columns(device, classes)
    }

    fn rows(
        &self,
        logits: &mut Tensor,
        classes: usize,
        targets: &Tensor,
        losses: Out<'_>,
        gradient: LossGradient<'_>,
    ) -> Result<(), TensorError> {
        let Some(cap) = self.cap else {
            return self.losses.rows(logits, classes, targets, losses, gradient);
        };
        let device = logits.device().clone();
        let backend = device.backend();
        // Their own tensor, of their type: `tanh(x/cap)`.
        let share = ops::activate(&ops::affine(logits.detach(), 1.0 / cap, 0.0)?, Activation::Tanh)?;
        backend.unary(Unary::Affine { scale: cap, shift: 0.0 }, &share, logits.out()?)?;
        if matches!(gradient, LossGradient::Nowhere) {
            return self.losses.rows(logits, classes, targets, losses, gradient);
        }
        self.losses.rows(logits, classes, targets, losses, LossGradient::OverLogits)?;
        // A logit gains `1 - tanh²` of what goes in.
        let slope = ops::affine(&ops::square(&ops::cast(&share, DType::F32)?)?, -1.0, 1.0)?;
        drop(share);
        let wide = ops::cast(logits.detach(), DType::F32)?;
        let mut scaled = Tensor::empty(*logits.shape(), DType::F32, &device)?;
        backend.binary(Binary::Mul, &wide, &slope, scaled.out()?)?;
        drop(wide);
        match gradient {
            LossGradient::Into(out) => backend.cast(&scaled, out),
            _ => backend.cast(&scaled, logits.out()?),
        }
    }
}
