//! The linear layer.

use ferrospeed_tensor::ops::{self, WeightLayout};
use ferrospeed_tensor::{Activation, Initializer, Operand, Param, Result, Tensor};

use crate::activation_bits::{input_of, is_in_few_bits};
use crate::adapter::{Adapter, TrainedBiases};
use crate::init::Init;
use crate::tensor_parallel::{Cut, Slices};

/// `y = x·W + b` over the last dimension.
///
/// Where its [`Init`] says how it is cut, this rank holds a slice: of its outputs, or of its inputs, and then the ranks'
/// results are summed and the bias is added once. Where it is adapted, the product has a change of low rank beside it.
#[derive(Debug, Clone)]
pub struct Linear {
    weight: Param,
    bias: Option<Param>,
    layout: WeightLayout,
    /// The ranks whose results are summed.
    summed: Option<Slices>,
    adapter: Option<Adapter>,
}

impl Linear {
    /// A layer with a weight `[outputs, inputs]`, both started uniformly in ±1/√inputs.
    pub fn new(init: &Init, inputs: usize, outputs: usize, bias: bool) -> Linear {
        let start = Initializer::Uniform { bound: 1.0 / (inputs.max(1) as f32).sqrt() };
        let weight = init.param("weight", [outputs, inputs], start);
        let bias = bias.then(|| init.param("bias", [outputs], start));
        Linear { weight, bias, layout: WeightLayout::OutIn, summed: None, adapter: None }
            .adapted(init, inputs, outputs)
    }

    /// With the adapter that it is meant to have.
    fn adapted(self, init: &Init, inputs: usize, outputs: usize) -> Linear {
        let adapter = Adapter::of(init, inputs, outputs);
        if let (Some(bias), Some(TrainedBiases::OfAdapted)) =
            (&self.bias, adapter.as_ref().map(Adapter::trained_biases))
        {
            bias.set_trainable(true);
        }
        Linear { adapter, ..self }
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
        let start = Initializer::Normal { mean: 0.0, std };
        let zero = Initializer::Constant(0.0);
        let (shape, [of_outputs, of_inputs]) = match layout {
            WeightLayout::OutIn => ([outputs, inputs], [0, 1]),
            WeightLayout::InOut => ([inputs, outputs], [1, 0]),
        };
        let (weight, cut_bias, summed) = match init.slicing() {
            Some((slices, cut @ (Cut::Outputs { .. } | Cut::Heads { .. }))) => {
                let weight = init.param_part("weight", shape, of_outputs, cut, slices, start);
                let cut_bias = bias.then(|| init.param_part("bias", [outputs], 0, cut, slices, zero));
                (weight, cut_bias, None)
            }
            Some((slices, cut @ Cut::Inputs { .. })) => {
                let weight = init.param_part("weight", shape, of_inputs, cut, slices, start);
                (weight, None, Some(slices.clone()))
            }
            _ => (init.param("weight", shape, start), None, None),
        };
        let weight = if layout == WeightLayout::InOut { weight.as_inputs_first() } else { weight };
        let bias = bias.then(|| cut_bias.unwrap_or_else(|| init.param("bias", [outputs], zero)));
        Linear { weight, bias, layout, summed, adapter: None }.adapted(init, inputs, outputs)
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

    /// The ranks whose results are summed, where its inputs are cut.
    pub fn summed_over(&self) -> Option<&Slices> {
        self.summed.as_ref()
    }

    /// Its input as it sees it, for who multiplies by [`Linear::operands`]: in few bits, where a pass has it so.
    pub fn input(&self, x: &Tensor) -> Result<Tensor> {
        input_of(&self.weight, x)
    }

    /// Whether no kernel that does more than its product may take it, since that is not all it does: its input is changed
    /// before, or an adapter changes the result.
    pub(crate) fn stands_alone(&self) -> bool {
        is_in_few_bits(&self.weight) || self.adapter.is_some()
    }

    /// Both as operands of a fused op, whose result goes through [`Linear::finish`]; a bias that comes behind a sum is left
    /// to that.
    pub fn operands(&self) -> (Operand, Option<Operand>) {
        let bias = self.bias.as_ref().filter(|_| self.summed.is_none());
        (Operand::from(&self.weight), bias.map(Operand::from))
    }

    /// What is left to do behind the product: where inputs are cut, the sum over ranks, and the bias.
    pub fn finish(&self, product: Tensor) -> Result<Tensor> {
        let Some(slices) = &self.summed else { return Ok(product) };
        let sum = slices.leave(&product)?;
        match &self.bias {
            Some(bias) => ops::add(&sum, bias),
            None => Ok(sum),
        }
    }

    /// `x·W + b` and what its adapter adds, for [`Linear::finish`]: where inputs are cut, this rank's summand.
    pub(crate) fn product(&self, x: &Tensor) -> Result<Tensor> {
        let ((weight, bias), x) = (self.operands(), self.input(x)?);
        match &self.adapter {
            Some(adapter) => adapter.applied(&x, &weight, bias, self.layout),
            None => ops::linear(&x, weight, bias, self.layout),
        }
    }

    /// `x·W + b`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.finish(self.product(x)?)
    }

    /// `f(x·W + b)` in one pass.
    pub fn forward_activated(&self, x: &Tensor, activation: Activation) -> Result<Tensor> {
        if self.summed.is_some() || self.adapter.is_some() {
            return ops::activate(&self.forward(x)?, activation);
        }
        let (weight, bias) = self.operands();
        ops::linear_activation(&self.input(x)?, weight, bias, self.layout, Some(activation))
    }
}
