//! Experts whose parameters lie stacked in one tensor each, with biases, and whose gates stay within bounds: gpt-oss's.

use ferrospeed_tensor::ops::{self, GroupWeights, WeightLayout};
use ferrospeed_tensor::{Activation, Initializer, Operand, Result, Tensor};

use crate::init::Init;

/// `down((clip(up) + 1) · quick_gelu(min(gate, limit)))` of every expert, where gate and up are neighbours in one layer's outputs.
#[derive(Clone)]
pub struct StackedExperts {
    gate_up: [GroupWeights; 2],
    down: [GroupWeights; 2],
    limit: f32,
}

impl StackedExperts {
    /// Weights `[experts, inputs, outputs]` and biases `[experts, outputs]`, made at `init`.
    pub fn new(
        init: &Init,
        experts: usize,
        width: usize,
        inner: usize,
        limit: f32,
        std: f32,
    ) -> StackedExperts {
        let weights = |name: &str, inputs: usize, outputs: usize| {
            let start = Initializer::Normal { mean: 0.0, std };
            let weight = init.param(name, [experts, inputs, outputs], start);
            let zero = Initializer::Constant(0.0);
            let bias = init.param(&format!("{name}_bias"), [experts, outputs], zero);
            [weight, bias].map(|param| GroupWeights::Stacked(Operand::from(&param)))
        };
        let gate_up = weights("gate_up_proj", width, 2 * inner);
        StackedExperts { gate_up, down: weights("down_proj", inner, width), limit }
    }

    /// What they make of rows that are sorted by expert.
    pub(super) fn forward(&self, rows: &Tensor, counts: &Tensor) -> Result<Tensor> {
        let [weights, biases] = &self.gate_up;
        let both = ops::grouped_linear(rows, counts, weights, Some(biases), WeightLayout::InOut)?;
        let (count, inner) = (both.sizes()[0], both.shape().last() / 2);
        let pairs = ops::split(&ops::reshape(&both, [count, inner, 2])?, 2, &[1, 1])?;
        let bound = |limit: f32| Tensor::full([], limit, rows.dtype(), rows.device());
        let (low, high) = (bound(-self.limit)?, bound(self.limit)?);
        let flat = |part: &Tensor| ops::reshape(part, [count, inner]);
        let gate = ops::minimum(&flat(&pairs[0])?, &high)?;
        let up = ops::minimum(&ops::maximum(&flat(&pairs[1])?, &low)?, &high)?;
        let product = ops::gated(Activation::QuickGelu, &gate, &ops::affine(&up, 1.0, 1.0)?)?;
        let [weights, biases] = &self.down;
        ops::grouped_linear(&product, counts, weights, Some(biases), WeightLayout::InOut)
    }
}
