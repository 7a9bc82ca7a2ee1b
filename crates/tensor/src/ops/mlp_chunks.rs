//! The perceptrons of transformer blocks over a chunk of tokens at a time, so that what they hold inside grows with the chunk
//! and not with the sequence.
//!
//! Only the input is saved. Backward computes the inner values of one chunk after the other again, and is done with each
//! before the next. (Bekman, Rajbhandari, Wyatt, Rasley, Ruwase, He, Tang, Yao: "Arctic Long Sequence Training", 2025,
//! arXiv 2506.13996, section 3.1.1.) Rows of a product do not see each other, so results are those of the whole; gradients of
//! weights are sums over tokens, taken chunk by chunk in order, in f32, and rounded once.

use crate::autograd::{Saved, needs_grad, record};
use crate::backend::{Activation, with_category};
use crate::dtype::DType;
use crate::error::{Result, TensorError};
use crate::memory::Category;
use crate::ops::linear::{Layer, WeightLayout};
use crate::ops::{concat, count_activation, gradient_like, split};
use crate::param::Operand;
use crate::profile::{self, Pass};
use crate::shape::Shape;
use crate::tensor::Tensor;

const OP: &str = "mlp_in_chunks";

/// A weight and perhaps a bias.
pub type LayerOperands = (Operand, Option<Operand>);

/// What a perceptron makes of its input, before it is projected down.
#[derive(Debug, Clone)]
pub enum Inwards<L = LayerOperands> {
    /// `f(up)`.
    Up(L),
    /// `f(gate) · up`.
    Gated {
        /// What goes through the activation.
        gate: L,
        /// What it multiplies.
        up: L,
    },
    /// The same where one layer makes both, all of the gate before all of up.
    Packed(L),
}

/// The weights of a perceptron.
#[derive(Debug, Clone)]
pub struct MlpWeights {
    /// From the input to the inner values.
    pub inwards: Inwards,
    /// From the inner values to the result.
    pub down: LayerOperands,
}

/// [`mlp`](crate::ops::mlp), or with a gate [`gated_mlp`](crate::ops::gated_mlp), over at most `chunk` rows at a time.
pub fn mlp_in_chunks(
    x: impl Into<Operand>,
    weights: MlpWeights,
    layout: WeightLayout,
    activation: Activation,
    chunk: usize,
) -> Result<Tensor> {
    let x = x.into();
    if chunk == 0 {
        return Err(TensorError::argument(OP, "chunks of no rows"));
    }
    let layer = |of: LayerOperands, shape: &Shape| Layer::new(OP, shape, x.dtype(), of.0, of.1, layout);
    let (inwards, inner) = match weights.inwards {
        Inwards::Up(up) => {
            let up = layer(up, x.shape())?;
            let inner = up.outputs;
            (Inwards::Up(up), inner)
        }
        Inwards::Gated { gate, up } => {
            let (gate, up) = (layer(gate, x.shape())?, layer(up, x.shape())?);
            gate.expect_alike(OP, &up)?;
            let inner = up.outputs;
            (Inwards::Gated { gate, up }, inner)
        }
        Inwards::Packed(both) => {
            let both = layer(both, x.shape())?;
            if !both.outputs.is_multiple_of(2) {
                let why = format!("a layer of {} outputs cannot be half a gate", both.outputs);
                return Err(TensorError::argument(OP, why));
            }
            let inner = both.outputs / 2;
            (Inwards::Packed(both), inner)
        }
    };
    let down = layer(weights.down, &x.shape().with_last(inner))?;
    let chunks = Chunks { inwards, inner, down, activation, rows: x.shape().rows(), chunk };
    let mut operands = vec![&x];
    operands.extend(chunks.layers().flat_map(Layer::operands));
    let y = chunks.forward(&*x.read()?)?;
    if !needs_grad(&operands) {
        return Ok(y);
    }
    let (saved_x, saved) = (Saved::of(&x), chunks.saved());
    Ok(record(OP, &operands, y, move |dy| saved.backward(&*saved_x.read()?, &dy)))
}

/// A perceptron and how its rows are cut.
struct Chunks {
    inwards: Inwards<Layer>,
    /// How many values are projected down.
    inner: usize,
    down: Layer,
    activation: Activation,
    rows: usize,
    chunk: usize,
}

/// The gradients of a layer's weight and bias while chunks add to them.
struct Sums {
    /// In f32; the gradient itself where that is its type.
    weight: Option<Tensor>,
    /// `[chunks, outputs]` in f32: one sum for each.
    bias: Option<Tensor>,
}

impl Chunks {
    /// In the order of their gradients.
    fn layers(&self) -> impl Iterator<Item = &Layer> {
        let second = match &self.inwards {
            Inwards::Gated { up, .. } => Some(up),
            Inwards::Up(_) | Inwards::Packed(_) => None,
        };
        [self.first()].into_iter().chain(second).chain([&self.down])
    }

    fn first(&self) -> &Layer {
        match &self.inwards {
            Inwards::Up(layer) | Inwards::Packed(layer) | Inwards::Gated { gate: layer, .. } => layer,
        }
    }

    fn saved(&self) -> Chunks {
        let inwards = match &self.inwards {
            Inwards::Up(up) => Inwards::Up(up.saved()),
            Inwards::Gated { gate, up } => Inwards::Gated { gate: gate.saved(), up: up.saved() },
            Inwards::Packed(both) => Inwards::Packed(both.saved()),
        };
        Chunks { inwards, down: self.down.saved(), ..*self }
    }

    /// The gate and what it multiplies, where there is one.
    fn halves(&self, x: &Tensor) -> Result<Option<[Tensor; 2]>> {
        match &self.inwards {
            Inwards::Up(_) => Ok(None),
            Inwards::Gated { gate, up } => Layer::forward_all([gate, up], x).map(Some),
            Inwards::Packed(both) => {
                let parts = split(&both.forward(x, None, None)?, 1, &[self.inner; 2])?;
                Ok(parts.try_into().ok())
            }
        }
    }

    fn count(&self) -> usize {
        self.rows.div_ceil(self.chunk)
    }

    /// The rows of a chunk in a tensor of all.
    fn of(&self, tensor: &Tensor, index: usize) -> Result<Tensor> {
        let (width, start) = (tensor.shape().last(), index * self.chunk);
        tensor.slice(start * width, [self.chunk.min(self.rows - start), width])
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut y = Tensor::empty(x.shape().with_last(self.down.outputs), x.dtype(), x.device())?;
        for index in 0..self.count() {
            let x = self.of(x, index)?;
            let hidden = match self.halves(&x)? {
                None => self.first().forward(&x, Some(self.activation), None)?,
                Some([g, u]) => {
                    let mut hidden = Tensor::empty(*g.shape(), g.dtype(), g.device())?;
                    count_activation(self.activation, hidden.numel());
                    x.device().backend().gated(self.activation, &g, &u, hidden.out()?)?;
                    hidden
                }
            };
            let start = index * self.chunk * self.down.outputs;
            let mut part = y.out()?.part(start, hidden.shape().with_last(self.down.outputs))?;
            self.down.forward_into(&hidden, part.out())?;
        }
        Ok(y)
    }

    fn backward(&self, x: &Tensor, dy: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let mut dx = Tensor::empty(*x.shape(), dy.dtype(), dy.device())?;
        let mut sums = self.layers().map(|layer| self.sums(layer, dy)).collect::<Result<Vec<Sums>>>()?;
        for index in 0..self.count() {
            let (x, dy) = (self.of(x, index)?, self.of(dy, index)?);
            let mut part = dx.out()?.part(index * self.chunk * x.shape().last(), *x.shape())?;
            // Of the inner layers, and the value that is projected down.
            let (inner, hidden) = self.inner_gradients(&x, &dy)?;
            let pairs = inner.iter().map(|gradient| (&x, gradient)).chain([(&hidden, &dy)]);
            for ((layer, sums), (input, gradient)) in self.layers().zip(&mut sums).zip(pairs) {
                sums.add(layer, input, gradient, index)?;
            }
            for (number, (layer, gradient)) in self.layers().zip(&inner).enumerate() {
                layer.write_input_gradient(gradient, part.out(), number > 0)?;
            }
        }
        let mut gradients = vec![Some(dx)];
        for (layer, sums) in self.layers().zip(sums) {
            gradients.extend(sums.finish(layer, dy)?);
        }
        Ok(gradients)
    }

    /// The gradients of what the layers before the activation give, and the value behind it.
    fn inner_gradients(&self, x: &Tensor, dy: &Tensor) -> Result<(Vec<Tensor>, Tensor)> {
        let (backend, activation) = (x.device().backend(), self.activation);
        let mut dhidden = self.down.input_gradient(dy, &dy.shape().with_last(self.inner))?;
        count_activation(activation, 2 * dhidden.numel());
        profile::during(Pass::Recomputation, || count_activation(activation, dhidden.numel()));
        let Some([mut g, mut u]) = profile::during(Pass::Recomputation, || self.halves(x))? else {
            let again = || self.first().forward(x, None, None);
            let mut before = profile::during(Pass::Recomputation, again)?;
            backend.activation_backward_in_place(activation, before.out()?, dhidden.out()?)?;
            return Ok((vec![dhidden], before));
        };
        backend.gated_backward_in_place(activation, g.out()?, u.out()?, dhidden.out()?, true)?;
        let gradients = match self.inwards {
            Inwards::Packed(_) => vec![concat(&[g, u], 1)?],
            _ => vec![g, u],
        };
        Ok((gradients, dhidden))
    }

    fn sums(&self, layer: &Layer, dy: &Tensor) -> Result<Sums> {
        let room = |shape: Shape| {
            with_category(Category::Gradients, || Tensor::empty(shape, DType::F32, dy.device()))
        };
        let weight = || match dy.dtype() {
            DType::F32 => gradient_like(&layer.weight, *layer.weight.shape(), DType::F32, dy.device()),
            _ => room(*layer.weight.shape()),
        };
        let bias = || room([self.count(), layer.outputs].into());
        Ok(Sums {
            weight: layer.wanted[0].then(weight).transpose()?,
            bias: layer.wanted[1].then(bias).transpose()?,
        })
    }
}

impl Sums {
    fn add(&mut self, layer: &Layer, input: &Tensor, gradient: &Tensor, index: usize) -> Result<()> {
        if let Some(weight) = &mut self.weight {
            layer.write_weight_gradient(input, gradient, weight.out()?, index > 0)?;
        }
        if let Some(bias) = &mut self.bias {
            let mut part = bias.out()?.part(index * layer.outputs, [layer.outputs])?;
            gradient.device().backend().sum_rows(gradient, part.out())?;
        }
        Ok(())
    }

    /// The gradients of weight and, where there is one, bias.
    fn finish(self, layer: &Layer, dy: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let backend = dy.device().backend();
        let room = |operand: &Operand| gradient_like(operand, *operand.shape(), dy.dtype(), dy.device());
        let weight = match self.weight {
            Some(sum) if sum.dtype() == dy.dtype() => Some(sum),
            Some(sum) => {
                let mut gradient = room(&layer.weight)?;
                backend.cast(&sum, gradient.out()?)?;
                Some(gradient)
            }
            None => None,
        };
        let bias = match (&layer.bias, self.bias) {
            (Some(bias), Some(sums)) => {
                let mut gradient = room(bias)?;
                backend.sum_rows(&sums, gradient.out()?)?;
                Some(gradient)
            }
            _ => None,
        };
        let mut gradients = vec![weight];
        gradients.extend(layer.bias.is_some().then_some(bias));
        Ok(gradients)
    }
}
