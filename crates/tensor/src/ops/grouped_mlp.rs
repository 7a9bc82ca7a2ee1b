//! The gated perceptrons of all groups as one node: the experts of a mixture, alone or with the way to them and back.
//!
//! A node keeps the gate before its activation and what is gated, over which backward writes their gradients; their product,
//! which separate layers would keep too, comes out of that pass again, to the same bits.

use crate::autograd::{Own, Saved, needs_grad, record};
use crate::backend::Activation;
use crate::dtype::DType;
use crate::error::{Result, TensorError};
use crate::ops::count_activation;
use crate::ops::grouped::{GroupedLayer, Product};
use crate::ops::routes::Routes;
use crate::param::Operand;
use crate::profile;
use crate::shape::Shape;
use crate::tensor::Tensor;

/// Gate, up and down of all groups.
struct Perceptrons {
    gate: Product,
    up: Product,
    down: Product,
    activation: Activation,
}

/// What forward makes on its way.
struct Inner {
    gate: Tensor,
    up: Tensor,
    result: Tensor,
}

impl Perceptrons {
    fn new(
        (x, dtype): (&Shape, DType),
        counts: &Tensor,
        [gate, up, down]: [GroupedLayer<'_>; 3],
        activation: Activation,
    ) -> Result<Perceptrons> {
        let (gate, up) = (Product::new(x, dtype, counts, &gate)?, Product::new(x, dtype, counts, &up)?);
        let inner = x.with_last(gate.outputs);
        if up.outputs != gate.outputs {
            let right = x.with_last(up.outputs);
            return Err(TensorError::ShapeMismatch { op: "gated perceptrons", left: inner, right });
        }
        let down = Product::new(&inner, dtype, counts, &down)?;
        Ok(Perceptrons { gate, up, down, activation })
    }

    fn operands(&self) -> impl Iterator<Item = &Operand> {
        [&self.gate, &self.up, &self.down].into_iter().flat_map(Product::operands)
    }

    fn saved(&self) -> Perceptrons {
        let [gate, up, down] = [&self.gate, &self.up, &self.down].map(Product::saved);
        Perceptrons { gate, up, down, activation: self.activation }
    }

    fn forward(&self, x: &Tensor) -> Result<Inner> {
        let (gate, up) = (self.gate.forward(x)?, self.up.forward(x)?);
        let mut product = Tensor::empty(*gate.shape(), x.dtype(), x.device())?;
        count_activation(self.activation, product.numel());
        x.device().backend().gated(self.activation, &gate, &up, product.out()?)?;
        let result = self.down.forward(&product)?;
        Ok(Inner { gate, up, result })
    }

    /// Counts what the pass over gate and up does in backward.
    fn count_backward(&self, elements: usize) {
        count_activation(self.activation, 2 * elements);
        profile::during(profile::Pass::Recomputation, || count_activation(self.activation, elements));
    }

    /// From the gradients of gate and up those of the input `x`, and of their operands.
    fn outward(&self, x: &Tensor, gate: Tensor, up: Tensor) -> Result<(Tensor, Vec<Option<Tensor>>)> {
        let mut of_operands = self.gate.gradients(x, &gate)?;
        of_operands.extend(self.up.gradients(x, &up)?);
        let mut dx = self.gate.input_gradient(&gate, x.shape())?;
        drop(gate);
        let by_up = self.up.input_gradient(&up, x.shape())?;
        drop(up);
        x.device().backend().add_assign(dx.out()?, &by_up)?;
        Ok((dx, of_operands))
    }
}

/// `(f(x·W₁ + b₁) ⊙ (x·W₂ + b₂))·W₃ + b₃` with the gate, up and down of each row's group; `x` and `counts` as in
/// [`grouped_linear`](crate::ops::grouped_linear).
pub fn grouped_gated_mlp(
    x: impl Into<Operand>,
    counts: &Tensor,
    layers: [GroupedLayer<'_>; 3],
    activation: Activation,
) -> Result<Tensor> {
    let x = x.into();
    let perceptrons = Perceptrons::new((x.shape(), x.dtype()), counts, layers, activation)?;
    let Inner { gate, up, result } = perceptrons.forward(&*x.read()?)?;
    let operands: Vec<&Operand> = std::iter::once(&x).chain(perceptrons.operands()).collect();
    if !needs_grad(&operands) {
        return Ok(result);
    }
    let (saved_x, saved) = (Saved::of(&x), perceptrons.saved());
    let (gate, up) = (Own::new(gate), Own::new(up));
    Ok(record("grouped_gated_mlp", &operands, result, move |dy| {
        let (mut gate, mut up) = (gate.take()?, up.take()?);
        let mut product = saved.down.input_gradient(&dy, gate.shape())?;
        saved.count_backward(product.numel());
        let backend = dy.device().backend();
        backend.gated_backward_in_place(activation, gate.out()?, up.out()?, product.out()?, true)?;
        let of_down = saved.down.gradients(&product, &dy)?;
        drop((product, dy));
        let (dx, of_others) = saved.outward(&*saved_x.read()?, gate, up)?;
        Ok(std::iter::once(Some(dx)).chain(of_others).chain(of_down).collect())
    }))
}

/// What [`Routes::spread`], [`grouped_gated_mlp`] and [`Routes::collect`] make of the tokens `x [tokens, width]` and the weights of
/// their choices, by layers whose last has no bias.
///
/// It keeps nothing of its own but gate and up. The gradient of a weight is the product of a group's result with the gradient of
/// the sum. Taken through the last layer that is the product of what goes into that layer with its gradient, both of which
/// backward has: so no group's result is kept.
pub fn routed_gated_mlp(
    x: impl Into<Operand>,
    weights: impl Into<Operand>,
    routes: &Routes,
    layers: [GroupedLayer<'_>; 3],
    activation: Activation,
) -> Result<Tensor> {
    const OP: &str = "routed_gated_mlp";
    let (x, weights) = (x.into(), weights.into());
    routes.expect_tokens(OP, &x)?;
    routes.expect_weights(OP, &weights)?;
    if layers[2].biases.is_some() {
        return Err(TensorError::argument(
            OP,
            "the last layer has a bias, which the weights' gradients miss",
        ));
    }
    let rows = Shape::from([routes.rows(), x.shape().last()]);
    let perceptrons = Perceptrons::new((&rows, x.dtype()), routes.counts(), layers, activation)?;
    let Inner { gate, up, result } = perceptrons.forward(&routes.copied(&*x.read()?)?)?;
    let y = routes.summed(&result, Some(&*weights.read()?))?;
    drop(result);
    let operands: Vec<&Operand> = [&x, &weights].into_iter().chain(perceptrons.operands()).collect();
    if !needs_grad(&operands) {
        return Ok(y);
    }
    let (saved_x, saved_weights, saved) = (Saved::of(&x), weights.saved(), perceptrons.saved());
    let (gate, up, routes) = (Own::new(gate), Own::new(up), routes.clone());
    Ok(record(OP, &operands, y, move |dy| {
        let (mut gate, mut up, weights) = (gate.take()?, up.take()?, saved_weights.read()?);
        let dy_rows = routes.copied(&dy)?;
        drop(dy);
        let mut product = saved.down.input_gradient(&dy_rows, gate.shape())?;
        saved.count_backward(product.numel());
        let mut dweights = Tensor::empty(*weights.shape(), DType::F32, weights.device())?;
        let values = [gate.out()?, up.out()?, product.out()?];
        let backend = weights.device().backend();
        backend.weighted_gated_backward(activation, &routes.routed(), &weights, values, dweights.out()?)?;
        let of_down = saved.down.gradients(&product, &dy_rows)?;
        drop((product, dy_rows));
        let rows = routes.copied(&*saved_x.read()?)?;
        let (drows, of_others) = saved.outward(&rows, gate, up)?;
        drop(rows);
        let dx = routes.summed(&drows, None)?;
        Ok([Some(dx), Some(dweights)].into_iter().chain(of_others).chain(of_down).collect())
    }))
}
