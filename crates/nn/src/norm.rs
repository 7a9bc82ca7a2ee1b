//! Normalisation layers.

use ferrospeed_collective::ops::all_reduce;
use ferrospeed_comm::Group;
use ferrospeed_tensor::{DType, Initializer, Operand, Param, Result, Slice, Tensor, ops};

use crate::init::Init;
use crate::tensor_parallel::Cut;

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
    /// The ranks that have stretches of what is normalised together.
    across: Option<Group>,
}

impl RmsNorm {
    /// Over a last dimension of `width`; where a layer's outputs are cut so, each rank has its stretch of that dimension.
    pub fn new(init: &Init, width: usize, eps: f32) -> RmsNorm {
        let ones = Initializer::Constant(1.0);
        match init.slicing() {
            Some((slices, cut @ Cut::Outputs { .. })) => {
                let weight = init.param_part("weight", [width], 0, cut, slices, ones);
                RmsNorm { weight, eps, across: Some(slices.group().clone()) }
            }
            _ => RmsNorm { weight: init.param("weight", [width], ones), eps, across: None },
        }
    }

    /// Gain and what is added to the mean square, for ops that normalise on their way; `None` where ranks do it together.
    pub(crate) fn operands(&self) -> Option<(Operand, f32)> {
        self.across.is_none().then(|| (Operand::from(&self.weight), self.eps))
    }

    /// Of the dimension it is over; where that is cut, of this rank's stretch.
    pub fn width(&self) -> usize {
        self.weight.numel()
    }

    /// The normalised input.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match &self.across {
            Some(group) => self.forward_across(x, group),
            None => ops::rms_norm(x, Some(Operand::from(&self.weight)), self.eps),
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
        ops::mul(&ops::cast(&normed, x.dtype())?, &self.weight)
    }

    /// `(x + residual, norm(x + residual))`; without a residual, `x` and its norm.
    pub fn forward_add(&self, x: &Tensor, residual: Option<&Tensor>) -> Result<(Tensor, Tensor)> {
        if self.across.is_some() {
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
