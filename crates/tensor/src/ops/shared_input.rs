//! Layers that share their input: several products of one tensor, and the gated perceptron as one node.
//!
//! The gradients of a shared input are added inside the products that make them, which spares a pass over the whole of it
//! for each layer but the first.

use crate::autograd::{Own, Saved, needs_grad, record, record_many};
use crate::backend::Activation;
use crate::error::Result;
use crate::ops::count_activation;
use crate::ops::linear::{Layer, WeightLayout};
use crate::param::Operand;
use crate::profile;
use crate::tensor::Tensor;

/// A weight and perhaps a bias.
type Weights = (Operand, Option<Operand>);

/// `x·W + b` over the last dimension for several layers, which share a weight layout.
pub fn linears<const N: usize>(
    x: impl Into<Operand>,
    layers: [Weights; N],
    layout: WeightLayout,
) -> Result<[Tensor; N]> {
    let x = x.into();
    let mut all = Vec::with_capacity(N);
    for (weight, bias) in layers {
        all.push(Layer::new("linears", x.shape(), x.dtype(), weight, bias, layout)?);
    }
    let all: [Layer; N] = all.try_into().unwrap_or_else(|_| unreachable!("one of each"));
    let mut operands = vec![&x];
    operands.extend(all.iter().flat_map(Layer::operands));
    let recording = needs_grad(&operands);
    let results = Layer::forward_all(all.each_ref(), &*x.read()?)?;
    if !recording {
        return Ok(results);
    }
    let (saved_x, saved) = (Saved::of(&x), all.iter().map(Layer::saved).collect::<Vec<_>>());
    let results = record_many("linears", &operands, results.into(), move |gradients| {
        let x = saved_x.read()?;
        let (mut dx, mut of_weights) = (None, Vec::with_capacity(2 * N));
        for (layer, dy) in saved.iter().zip(gradients) {
            let (dweight, dbias) = match &dy {
                Some(dy) => layer.weight_gradients(&x, dy)?,
                None => (None, None),
            };
            of_weights.push(dweight);
            of_weights.extend(layer.bias.is_some().then_some(dbias));
            match (&dy, &mut dx) {
                (Some(dy), None) => dx = Some(layer.input_gradient(dy, x.shape())?),
                (Some(dy), Some(dx)) => layer.add_input_gradient(dy, dx.out()?)?,
                (None, _) => {}
            }
        }
        of_weights.insert(0, dx);
        Ok(of_weights)
    });
    Ok(results.try_into().unwrap_or_else(|_| unreachable!("one result per layer")))
}

/// `(f(x·W₁ + b₁) ⊙ (x·W₂ + b₂))·W₃ + b₃` as one node: gate, up and down.
///
/// It saves the input, the gate before `f` and what is gated. Their product, which three separate layers would save too, is
/// computed again in backward, in the pass that takes the gradients, unless the device has room for rows so wide.
pub fn gated_mlp(
    x: impl Into<Operand>,
    [gate, up, down]: [Weights; 3],
    layout: WeightLayout,
    activation: Activation,
) -> Result<Tensor> {
    const OP: &str = "gated_mlp";
    let x = x.into();
    let gate = Layer::new(OP, x.shape(), x.dtype(), gate.0, gate.1, layout)?;
    let up = Layer::new(OP, x.shape(), x.dtype(), up.0, up.1, layout)?;
    let hidden_shape = x.shape().with_last(gate.outputs);
    gate.expect_alike(OP, &up)?;
    let down = Layer::new(OP, &hidden_shape, x.dtype(), down.0, down.1, layout)?;
    let mut operands = vec![&x];
    operands.extend([&gate, &up, &down].into_iter().flat_map(Layer::operands));
    let recording = needs_grad(&operands);
    let input = x.read()?;
    let [g, u] = Layer::forward_all([&gate, &up], &input)?;
    let mut hidden = Tensor::empty(hidden_shape, x.dtype(), input.device())?;
    let backend = input.device().backend();
    count_activation(activation, hidden.numel());
    backend.gated(activation, &g, &u, hidden.out()?)?;
    let y = down.forward(&hidden, None, None)?;
    if !recording {
        return Ok(y);
    }
    let kept = (gate.outputs <= backend.kept_activation_width()).then_some(hidden);
    let saved_x = Saved::of(&x);
    let [saved_gate, saved_up, saved_down] = [&gate, &up, &down].map(Layer::saved);
    let (g, u) = (Own::new(g), Own::new(u));
    Ok(record(OP, &operands, y, move |dy| {
        let (mut g, mut u) = (g.take()?, u.take()?);
        let mut dhidden = saved_down.input_gradient(&dy, g.shape())?;
        // All three are this node's own: gradients take the places of the values, and the gradient of the product, which
        // is done with, that of the product where it was not kept.
        count_activation(activation, 2 * dhidden.numel());
        if kept.is_none() {
            profile::during(profile::Pass::Recomputation, || count_activation(activation, dhidden.numel()));
        }
        dy.device().backend().gated_backward_in_place(
            activation,
            g.out()?,
            u.out()?,
            dhidden.out()?,
            kept.is_none(),
        )?;
        let hidden = kept.clone().unwrap_or(dhidden);
        let (ddown, ddown_bias) = saved_down.weight_gradients(&hidden, &dy)?;
        drop(hidden);
        let x = saved_x.read()?;
        let (dgate, dgate_bias) = saved_gate.weight_gradients(&x, &g)?;
        let (dup, dup_bias) = saved_up.weight_gradients(&x, &u)?;
        let mut dx = saved_gate.input_gradient(&g, x.shape())?;
        saved_up.add_input_gradient(&u, dx.out()?)?;
        let mut gradients = vec![Some(dx)];
        let layers =
            [(&saved_gate, dgate, dgate_bias), (&saved_up, dup, dup_bias), (&saved_down, ddown, ddown_bias)];
        for (layer, dweight, dbias) in layers {
            gradients.push(dweight);
            gradients.extend(layer.bias.is_some().then_some(dbias));
        }
        Ok(gradients)
    }))
}
