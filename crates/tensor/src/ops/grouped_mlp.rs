//! The gated perceptrons of all groups as one node: the experts of a mixture.

use crate::autograd::{Own, Saved, needs_grad, record};
use crate::backend::Activation;
use crate::error::{Result, TensorError};
use crate::ops::count_activation;
use crate::ops::grouped::{GroupedLayer, Product};
use crate::param::Operand;
use crate::profile;
use crate::tensor::Tensor;

/// `(f(x·W₁ + b₁) ⊙ (x·W₂ + b₂))·W₃ + b₃` with the gate, up and down of each row's group; `x` and `counts` as in
/// [`grouped_linear`](crate::ops::grouped_linear).
///
/// It saves the gate before `f` and what is gated, over which backward writes their gradients; their product, which separate
/// layers would save too, comes out of that pass again, to the same bits.
pub fn grouped_gated_mlp(
    x: impl Into<Operand>,
    counts: &Tensor,
    [gate, up, down]: [GroupedLayer<'_>; 3],
    activation: Activation,
) -> Result<Tensor> {
    const OP: &str = "grouped_gated_mlp";
    let x = x.into();
    let [gate, up] = [&gate, &up].map(|layer| Product::new(x.shape(), x.dtype(), counts, layer));
    let (gate, up) = (gate?, up?);
    let inner = x.shape().with_last(gate.outputs);
    if up.outputs != gate.outputs {
        let right = x.shape().with_last(up.outputs);
        return Err(TensorError::ShapeMismatch { op: OP, left: inner, right });
    }
    let down = Product::new(&inner, x.dtype(), counts, &down)?;
    let (g, u, y) = {
        let x = x.read()?;
        let (g, u) = (gate.forward(&x)?, up.forward(&x)?);
        let mut hidden = Tensor::empty(inner, x.dtype(), x.device())?;
        count_activation(activation, hidden.numel());
        x.device().backend().gated(activation, &g, &u, hidden.out()?)?;
        let y = down.forward(&hidden)?;
        (g, u, y)
    };
    let mut operands = vec![&x];
    operands.extend([&gate, &up, &down].into_iter().flat_map(Product::operands));
    if !needs_grad(&operands) {
        return Ok(y);
    }
    let saved_x = Saved::of(&x);
    let [saved_gate, saved_up, saved_down] = [&gate, &up, &down].map(Product::saved);
    let (g, u) = (Own::new(g), Own::new(u));
    Ok(record(OP, &operands, y, move |dy| {
        let (mut g, mut u) = (g.take()?, u.take()?);
        // All three are this node's own: gradients take the places of the values, and the gradient of the product becomes
        // the product.
        let mut hidden = saved_down.input_gradient(&dy, g.shape())?;
        count_activation(activation, 2 * hidden.numel());
        profile::during(profile::Pass::Recomputation, || count_activation(activation, hidden.numel()));
        let (gate_out, up_out) = (g.out()?, u.out()?);
        dy.device().backend().gated_backward_in_place(activation, gate_out, up_out, hidden.out()?, true)?;
        let of_down = saved_down.gradients(&hidden, &dy)?;
        drop((hidden, dy));
        let x = saved_x.read()?;
        let of_gate = saved_gate.gradients(&x, &g)?;
        let of_up = saved_up.gradients(&x, &u)?;
        let mut dx = saved_gate.input_gradient(&g, x.shape())?;
        drop(g);
        let by_up = saved_up.input_gradient(&u, x.shape())?;
        drop(u);
        dx.device().clone().backend().add_assign(dx.out()?, &by_up)?;
        Ok(std::iter::once(Some(dx)).chain(of_gate).chain(of_up).chain(of_down).collect())
    }))
}
