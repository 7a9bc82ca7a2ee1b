//! Normalisation layers.

use ferrospeed_tensor::{Initializer, Operand, Param, Result, Tensor, ops};

use crate::init::Init;

/// Layer norm with weight and bias.
#[derive(Debug, Clone)]
pub struct LayerNorm {
    affine: Option<(Param, Param)>,
    eps: f32,
}

impl LayerNorm {
    /// Over a last dimension of `width`; `affine` gives it weight and bias.
    pub fn new(init: &Init, width: usize, eps: f32, affine: bool) -> LayerNorm {
        let affine = affine.then(|| {
            let weight = init.param("weight", [width], Initializer::Constant(1.0));
            (weight, init.param("bias", [width], Initializer::Constant(0.0)))
        });
        LayerNorm { affine, eps }
    }

    fn operands(&self) -> (Option<Operand>, Option<Operand>) {
        self.affine.as_ref().map(|(weight, bias)| (Operand::from(weight), Operand::from(bias))).unzip()
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

/// RMS norm with weight.
#[derive(Debug, Clone)]
pub struct RmsNorm {
    weight: Param,
    eps: f32,
}

impl RmsNorm {
    /// Over a last dimension of `width`.
    pub fn new(init: &Init, width: usize, eps: f32) -> RmsNorm {
        RmsNorm { weight: init.param("weight", [width], Initializer::Constant(1.0)), eps }
    }

    /// Of the dimension it is over.
    pub fn width(&self) -> usize {
        self.weight.numel()
    }

    /// The normalised input.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        ops::rms_norm(x, Some(Operand::from(&self.weight)), self.eps)
    }

    /// `(x + residual, norm(x + residual))`; without a residual, `x` and its norm.
    pub fn forward_add(&self, x: &Tensor, residual: Option<&Tensor>) -> Result<(Tensor, Tensor)> {
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
    /// RMS norm.
    Rms {
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
            NormConfig::Rms { eps } => Norm::Rms(RmsNorm::new(init, width, eps)),
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
