//! The linear layer.

use ferrospeed_tensor::ops::{self, WeightLayout};
use ferrospeed_tensor::{Activation, Initializer, Operand, Param, Result, Tensor};

use crate::init::Init;

/// `y = x·W + b` over the last dimension.
#[derive(Debug, Clone)]
pub struct Linear {
    weight: Param,
    bias: Option<Param>,
    layout: WeightLayout,
}

impl Linear {
    /// A layer with a weight `[outputs, inputs]`, both started uniformly in ±1/√inputs.
    pub fn new(init: &Init, inputs: usize, outputs: usize, bias: bool) -> Linear {
        let start = Initializer::Uniform { bound: 1.0 / (inputs.max(1) as f32).sqrt() };
        Linear {
            weight: init.param("weight", [outputs, inputs], start),
            bias: bias.then(|| init.param("bias", [outputs], start)),
            layout: WeightLayout::OutIn,
        }
    }

    /// A layer with a normal weight in the given layout and a zero bias: what transformers use.
    pub fn normal(
        init: &Init,
        inputs: usize,
        outputs: usize,
        bias: bool,
        layout: WeightLayout,
        std: f32,
    ) -> Linear {
        let shape = match layout {
            WeightLayout::OutIn => [outputs, inputs],
            WeightLayout::InOut => [inputs, outputs],
        };
        Linear {
            weight: init.param("weight", shape, Initializer::Normal { mean: 0.0, std }),
            bias: bias.then(|| init.param("bias", [outputs], Initializer::Constant(0.0))),
            layout,
        }
    }

    /// The weight's handle.
    pub fn weight(&self) -> &Param {
        &self.weight
    }

    /// The bias's handle.
    pub fn bias(&self) -> Option<&Param> {
        self.bias.as_ref()
    }

    /// How the weight is stored.
    pub fn layout(&self) -> WeightLayout {
        self.layout
    }

    /// Both as operands of a fused op.
    pub fn operands(&self) -> (Operand, Option<Operand>) {
        (Operand::from(&self.weight), self.bias.as_ref().map(Operand::from))
    }

    /// `x·W + b`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (weight, bias) = self.operands();
        ops::linear(x, weight, bias, self.layout)
    }

    /// `f(x·W + b)` in one pass.
    pub fn forward_activated(&self, x: &Tensor, activation: Activation) -> Result<Tensor> {
        let (weight, bias) = self.operands();
        ops::linear_activation(x, weight, bias, self.layout, Some(activation))
    }
}
