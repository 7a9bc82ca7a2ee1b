//! Normalisation layers.

use ferrospeed_collective::ops::all_reduce;
use ferrospeed_comm::Group;
use ferrospeed_tensor::{DType, Initializer, Operand, Param, Result, Slice, Tensor, ops};

use crate::init::Init;
use crate::tensor_parallel::Cut;

/// Layer norm with weight and bias, or with fewer of them.
#[derive(Debug, Clone)]
pub struct LayerNorm {
    weight: Option<Param>,
    bias: Option<Param>,
    eps: f32,
}

impl LayerNorm {
    /// Over a last dimension of `width`; `affine` gives it weight and bias.
    pub fn new(init: &Init, width: usize, eps: f32, affine: bool) -> LayerNorm {
        let weight = affine.then(|| init.param("weight", [width], Initializer::Constant(1.0)));
        let bias = affine.then(|| init.param("bias", [width], Initializer::Constant(0.0)));
        LayerNorm { weight, bias, eps }
    }

    /// The same with a weight and no bias.
    pub fn without_bias(init: &Init, width: usize, eps: f32) -> LayerNorm {
        let weight = init.param("weight", [width], Initializer::Constant(1.0));
        LayerNorm { weight: Some(weight), bias: None, eps }
    }

    fn operands(&self) -> (Option<Operand>, Option<Operand>) {
        (self.weight.as_ref().map(Operand::from), self.bias.as_ref().map(Operand::from))
    }

    /// The normalised input.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (weight, bias) = self.operands();
        ops::layer_norm(x, weight, bias, self.eps)
    }

    /// `(x + residual, norm(x + residual))`; without a residual, `x` and its norm.
    pub fn forward_add(&self, x: &Tensor, residual: Option<&Tensor>) -> Result<(Tensor, Tensor)> {
        let (weight, bias) = self.operands();
        ops::add_layer_norm(x, residual.map(Operand::from), weight, bias, self.eps)
    }
}

/// What a norm's weight says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Gain {
    /// By what channels are multiplied.
    Whole,
    /// What that is more than one: a new weight is zero, and decay draws the gain to one.
    BeyondOne,
}

/// RMS norm with weight.
#[derive(Debug, Clone)]
pub struct RmsNorm {
    weight: Param,
    gain: Gain,
    eps: f32,
    /// The ranks that have stretches of what is normalised together.
    across: Option<Group>,
}

impl RmsNorm {
    /// Over a last dimension of `width`; where a layer's outputs are cut so, each rank has its stretch of that dimension.
    pub fn new(init: &Init, width: usize, eps: f32) -> RmsNorm {
        RmsNorm::with_gain(init, width, eps, Gain::Whole)
    }

    /// The same whose weight is what the gain has beyond one (Gemma).
    pub fn beyond_one(init: &Init, width: usize, eps: f32) -> RmsNorm {
        RmsNorm::with_gain(init, width, eps, Gain::BeyondOne)
    }

    fn with_gain(init: &Init, width: usize, eps: f32, gain: Gain) -> RmsNorm {
        let start = Initializer::Constant(if gain == Gain::Whole { 1.0 } else { 0.0 });
        match init.slicing() {
            Some((slices, cut @ Cut::Outputs { .. })) => {
                let weight = init.param_part("weight", [width], 0, cut, slices, start);
                RmsNorm { weight, gain, eps, across: Some(slices.group().clone()) }
            }
            _ => RmsNorm { weight: init.param("weight", [width], start), gain, eps, across: None },
        }
    }

    /// Gain and what is added to the mean square, for ops that normalise on their way; `None` where ranks do it together, or the
    /// weight is not the gain.
    pub(crate) fn operands(&self) -> Option<(Operand, f32)> {
        let is_plain = self.across.is_none() && self.gain == Gain::Whole;
        is_plain.then(|| (Operand::from(&self.weight), self.eps))
    }

    /// Of the dimension it is over; where that is cut, of this rank's stretch.
    pub fn width(&self) -> usize {
        self.weight.numel()
    }

    /// The normalised input.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match (&self.across, self.gain) {
            (Some(group), _) => self.forward_across(x, group),
            (None, Gain::Whole) => ops::rms_norm(x, Some(Operand::from(&self.weight)), self.eps),
            (None, Gain::BeyondOne) => {
                // One more than a small number is no number of a small type: all of it is done in f32.
                let gain = Operand::from(self.wide_gain()?);
                let normed = ops::rms_norm(ops::cast(x, DType::F32)?, Some(gain), self.eps)?;
                ops::cast(&normed, x.dtype())
            }
        }
    }

    /// The gain in f32.
    fn wide_gain(&self) -> Result<Tensor> {
        let weight = ops::cast(&self.weight, DType::F32)?;
        match self.gain {
            Gain::Whole => Ok(weight),
            Gain::BeyondOne => ops::affine(&weight, 1.0, 1.0),
        }
    }

    /// Ranks sum the squares of their stretches, one number per row. Each uses the sum for its own stretch alone, so in backward
    /// their gradients of it are summed.
    fn forward_across(&self, x: &Tensor, group: &Group) -> Result<Tensor> {
        let dim = x.shape().dims() - 1;
        let wide = ops::cast(x, DType::F32)?;
        // What several ranks hold alike each of them brings.
        let brought = self.weight.whole_shape().numel() * self.weight.slice().map_or(1, Slice::holders);
        let own = ops::affine(&ops::sum_dim(&ops::square(&wide)?, dim)?, 1.0 / brought as f32, 0.0)?;
        let mut rows = x.sizes().to_vec();
        rows[dim] = 1;
        let squares = ops::reshape(&all_reduce(&own, group)?, &rows)?;
        let normed = ops::div(&wide, &ops::sqrt(&ops::affine(&squares, 1.0, self.eps)?)?)?;
        match self.gain {
            Gain::Whole => ops::mul(&ops::cast(&normed, x.dtype())?, &self.weight),
            Gain::BeyondOne => ops::cast(&ops::mul(&normed, &self.wide_gain()?)?, x.dtype()),
        }
    }

    /// `(x + residual, norm(x + residual))`; without a residual, `x` and its norm.
    pub fn forward_add(&self, x: &Tensor, residual: Option<&Tensor>) -> Result<(Tensor, Tensor)> {
        if self.across.is_some() || self.gain != Gain::Whole {
            let sum = residual.map_or_else(|| Ok(x.clone()), |residual| ops::add(x, residual))?;
            return Ok((sum.clone(), self.forward(&sum)?));
        }
        ops::add_rms_norm(x, residual.map(Operand::from), Some(Operand::from(&self.weight)), self.eps)
    }
}

/// Which norm a model uses.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum NormConfig {
    /// Layer norm; `affine` gives it weight and bias.
    Layer {
        /// Added to the variance.
        eps: f32,
        /// Whether it has weight and bias.
        affine: bool,
    },
    /// Layer norm with a weight and no bias.
    LayerWithoutBias {
        /// Added to the variance.
        eps: f32,
    },
    /// RMS norm.
    Rms {
        /// Added to the mean square.
        eps: f32,
    },
    /// RMS norm whose weight is what the gain has beyond one.
    RmsBeyondOne {
        /// Added to the mean square.
        eps: f32,
    },
}

/// Either norm.
#[derive(Debug, Clone)]
pub enum Norm {
    /// Layer norm.
    Layer(LayerNorm),
    /// RMS norm.
    Rms(RmsNorm),
}

impl Norm {
    /// The norm that `config` names.
    pub fn new(init: &Init, width: usize, config: NormConfig) -> Norm {
        match config {
            NormConfig::Layer { eps, affine } => Norm::Layer(LayerNorm::new(init, width, eps, affine)),
            NormConfig::LayerWithoutBias { eps } => Norm::Layer(LayerNorm::without_bias(init, width, eps)),
            NormConfig::Rms { eps } => Norm::Rms(RmsNorm::new(init, width, eps)),
            NormConfig::RmsBeyondOne { eps } => Norm::Rms(RmsNorm::beyond_one(init, width, eps)),
        }
    }

    /// What [`ops::normed_linears`] and its kin take, where it is such a norm.
    pub(crate) fn of_few_rows(&self) -> Option<(Operand, f32)> {
        match self {
            Norm::Rms(norm) => norm.operands(),
            Norm::Layer(_) => None,
        }
    }

    /// The normalised input.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Norm::Layer(norm) => norm.forward(x),
            Norm::Rms(norm) => norm.forward(x),
        }
    }

    /// `(x + residual, norm(x + residual))`; without a residual, `x` and its norm.
    pub fn forward_add(&self, x: &Tensor, residual: Option<&Tensor>) -> Result<(Tensor, Tensor)> {
        match self {
            Norm::Layer(norm) => norm.forward_add(x, residual),
            Norm::Rms(norm) => norm.forward_add(x, residual),
        }
    }
}
