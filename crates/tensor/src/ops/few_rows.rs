//! Products of few rows together with what stands before and behind them in a block, where the device has one kernel for it: what
//! decoding gains by. Not recorded on the tape.
//!
//! `None` everywhere: there is no such kernel for these rows or weights, nothing was done, and the layers are to be called one
//! after the other.

use crate::autograd::needs_grad;
use crate::backend::{Activation, FewRows, FewRowsWeight};
use crate::error::{Result, TensorError};
use crate::ops::count_activation;
use crate::ops::linear::{Layer, WeightLayout};
use crate::param::{Operand, Value};
use crate::tensor::Tensor;

/// A weight `[outputs, inputs]` and perhaps a bias.
type Weights = (Operand, Option<Operand>);
/// The gain of a root-mean-square norm, and what is added to the mean square.
type Norm = (Operand, f32);

/// `norm(x)·Wᵀ + b` for several layers.
pub fn normed_linears<const N: usize>(
    x: &Tensor,
    norm: Norm,
    layers: [Weights; N],
) -> Result<Option<[Tensor; N]>> {
    let step = Step { norm: Some(norm), activation: None, is_gated: false, residual: None };
    Ok(step.run(x, layers)?.and_then(|results| results.try_into().ok()))
}

/// `f(norm(x)·W₁ᵀ + b₁) ⊙ (norm(x)·W₂ᵀ + b₂)`.
pub fn normed_gate(
    x: &Tensor,
    norm: Norm,
    [gate, up]: [Weights; 2],
    activation: Activation,
) -> Result<Option<Tensor>> {
    let step = Step { norm: Some(norm), activation: Some(activation), is_gated: true, residual: None };
    Ok(step.run(x, [gate, up])?.and_then(|mut results| results.pop()))
}

/// `residual + (x·Wᵀ + b)`.
pub fn linear_onto(x: &Tensor, layer: Weights, residual: &Tensor) -> Result<Option<Tensor>> {
    let step = Step { norm: None, activation: None, is_gated: false, residual: Some(residual) };
    Ok(step.run(x, [layer])?.and_then(|mut results| results.pop()))
}

/// What stands around the products.
struct Step<'a> {
    norm: Option<Norm>,
    activation: Option<Activation>,
    is_gated: bool,
    residual: Option<&'a Tensor>,
}

impl Step<'_> {
    fn run<const N: usize>(&self, x: &Tensor, layers: [Weights; N]) -> Result<Option<Vec<Tensor>>> {
        const OP: &str = "few_rows";
        let (backend, rows) = (x.device().backend(), x.shape().rows());
        let gain = self.norm.as_ref().map(|(gain, _)| gain);
        let packed: Vec<_> = layers.iter().filter_map(|(weight, _)| weight.packed()).collect();
        let bits = packed.first().map(|weight| weight.bits());
        // Asked before a weight is read: where weights come and go, the layers themselves will read it.
        if rows > backend.most_few_rows(x.dtype(), gain.is_some(), bits) {
            return Ok(None);
        }
        let mut all = Vec::with_capacity(N);
        for (weight, bias) in layers {
            all.push(Layer::new(OP, x.shape(), x.dtype(), weight, bias, WeightLayout::OutIn)?);
        }
        let input = Operand::from(x);
        let operands: Vec<&Operand> =
            all.iter().flat_map(Layer::operands).chain(gain).chain(std::iter::once(&input)).collect();
        let are_alike = packed.is_empty() || packed.len() == N;
        if !are_alike || operands.iter().any(|operand| operand.dtype() != x.dtype()) || needs_grad(&operands)
        {
            return Ok(None);
        }
        if gain.is_some_and(|gain| gain.shape().sizes() != [x.shape().last()]) {
            return Err(TensorError::argument(OP, "the norm's gain is not as wide as the rows"));
        }
        if self.is_gated {
            all[0].expect_alike(OP, &all[1])?;
        }
        let count = if self.is_gated { 1 } else { N };
        let shape_of = |layer: &Layer| x.shape().with_last(layer.outputs);
        if self
            .residual
            .is_some_and(|residual| *residual.shape() != shape_of(&all[0]) || residual.dtype() != x.dtype())
        {
            return Err(TensorError::argument(OP, "the residual is not as the result"));
        }
        let mut results = Vec::with_capacity(count);
        for layer in &all[..count] {
            results.push(Tensor::empty(shape_of(layer), x.dtype(), x.device())?);
        }
        let gain: Option<Value> = gain.map(Operand::read).transpose()?;
        let biases = all.iter().map(|layer| layer.bias.as_ref().map(Operand::read).transpose());
        let biases = biases.collect::<Result<Vec<Option<Value>>>>()?;
        let whole = match packed.is_empty() {
            true => all.iter().map(|layer| layer.weight.read()).collect::<Result<Vec<Value>>>()?,
            false => Vec::new(),
        };
        let weights = whole.iter().map(|weight| FewRowsWeight::Whole(weight));
        let weights = weights.chain(packed.iter().map(|weight| FewRowsWeight::Packed(weight)));
        let done = backend.few_rows(FewRows {
            x,
            norm: gain.as_deref().zip(self.norm.as_ref().map(|(_, eps)| *eps)),
            layers: weights.zip(biases.iter().map(Option::as_deref)).collect(),
            activation: self.activation,
            is_gated: self.is_gated,
            residual: self.residual,
            results: results.iter_mut().map(Tensor::out).collect::<Result<_>>()?,
        })?;
        if !done {
            return Ok(None);
        }
        all.iter().for_each(|layer| layer.count(rows));
        if let Some(activation) = self.activation {
            count_activation(activation, results[0].numel());
        }
        Ok(Some(results))
    }
}
