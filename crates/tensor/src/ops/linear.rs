//! Products with weights, and the two-layer perceptron as one node.

use std::sync::Arc;

use crate::autograd::{Own, Saved, for_later, needs_grad, put_off, record};
use crate::backend::{Activation, Backend, Gemm, Matrix, PackedLayer};
use crate::error::{Result, TensorError};
use crate::ops::{count_activation, expect_same_dtype, gradient_like};
use crate::out::Out;
use crate::packed::PackedWeight;
use crate::param::{Operand, Value};
use crate::profile;
use crate::rows_alone::are_rows_alone;
use crate::shape::Shape;
use crate::tensor::Tensor;

/// How a weight matrix is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightLayout {
    /// `[out, in]`: the usual linear layer, `y = x·Wᵀ`.
    OutIn,
    /// `[in, out]`: GPT-2's, `y = x·W`.
    InOut,
}

impl WeightLayout {
    /// (inputs, outputs) of a weight of this shape.
    pub(super) fn features(self, op: &'static str, weight: &Shape) -> Result<(usize, usize)> {
        match (self, weight.sizes()) {
            (WeightLayout::OutIn, &[out, inputs]) | (WeightLayout::InOut, &[inputs, out]) => {
                Ok((inputs, out))
            }
            _ => Err(TensorError::shape(op, "the weight", *weight, "two dimensions")),
        }
    }

    /// The weight as the right operand of `x · W`.
    fn forward(self, weight: &Tensor) -> Matrix<'_> {
        Matrix { transposed: self == WeightLayout::OutIn, ..Matrix::whole(weight) }
    }

    /// The weight as the right operand of `dy · Wᵀ`.
    fn backward(self, weight: &Tensor) -> Matrix<'_> {
        Matrix { transposed: self == WeightLayout::InOut, ..Matrix::whole(weight) }
    }
}

/// Weights `[outputs, inputs]` that lie behind each other as one, where a product with it is worth taking apart. Not in training:
/// where a store keeps weights must not show in the bits.
fn joined_weights(
    layers: &[&Layer],
    weights: &[&Tensor],
    rows: usize,
    backend: &dyn Backend,
) -> Option<Tensor> {
    let [more_than, most] = backend.joined_rows()?;
    let alike = layers.iter().all(|layer| layer.bias.is_none() && layer.layout == WeightLayout::OutIn);
    if !are_rows_alone() || !alike || layers.len() > 3 || rows <= more_than || rows > most {
        return None;
    }
    let outputs: usize = layers.iter().map(|layer| layer.outputs).sum();
    Tensor::joined(weights)?.view([outputs, layers.first()?.inputs]).ok()
}

/// One weighted layer: what forward and backward of ops with weights share.
#[derive(Clone)]
pub(super) struct Layer {
    pub(super) weight: Operand,
    pub(super) bias: Option<Operand>,
    layout: WeightLayout,
    inputs: usize,
    pub(super) outputs: usize,
    /// Whether weight and bias want gradients. Asked before they are saved: a saved tensor has lost its history.
    pub(super) wanted: [bool; 2],
}

impl Layer {
    pub(super) fn new(
        op: &'static str,
        x: &Shape,
        x_dtype: crate::DType,
        weight: Operand,
        bias: Option<Operand>,
        layout: WeightLayout,
    ) -> Result<Layer> {
        let (inputs, outputs) = layout.features(op, weight.shape())?;
        if x.dims() == 0 || x.last() != inputs {
            return Err(TensorError::ShapeMismatch { op, left: *x, right: *weight.shape() });
        }
        expect_same_dtype(op, "the weight", weight.dtype(), x_dtype)?;
        if let Some(bias) = &bias {
            if bias.shape().sizes() != [outputs] {
                return Err(TensorError::shape(op, "the bias", *bias.shape(), format!("[{outputs}]")));
            }
            expect_same_dtype(op, "the bias", bias.dtype(), x_dtype)?;
        }
        let wanted = [weight.requires_grad(), bias.as_ref().is_some_and(Operand::requires_grad)];
        Ok(Layer { weight, bias, layout, inputs, outputs, wanted })
    }

    /// An error unless another layer has as many outputs.
    pub(super) fn expect_alike(&self, op: &'static str, other: &Layer) -> Result<()> {
        if self.outputs == other.outputs {
            return Ok(());
        }
        Err(TensorError::ShapeMismatch { op, left: *self.weight.shape(), right: *other.weight.shape() })
    }

    /// Weight and bias, in the order of their gradients.
    pub(super) fn operands(&self) -> impl Iterator<Item = &Operand> {
        std::iter::once(&self.weight).chain(&self.bias)
    }

    pub(super) fn saved(&self) -> Layer {
        Layer { weight: self.weight.saved(), bias: self.bias.as_ref().map(Operand::saved), ..self.clone() }
    }

    /// Runs `work` as the layer's own, for whoever counts what layers do.
    fn as_module<R>(&self, work: impl FnOnce() -> R) -> R {
        let sizes = || {
            let bias = if self.bias.is_some() { "True" } else { "False" };
            format!("in_features={}, out_features={}, bias={bias}", self.inputs, self.outputs)
        };
        profile::in_module_of(Some(&self.weight), "Linear", sizes, work)
    }

    /// Counts the product of so many rows, for whoever does.
    pub(super) fn count(&self, rows: usize) {
        self.as_module(|| profile::count_product(1, rows, self.outputs, self.inputs));
    }

    /// Weight and bias.
    pub(super) fn read(&self) -> Result<(Value, Option<Value>)> {
        let bias = self.bias.as_ref().map(Operand::read).transpose()?;
        Ok((self.weight.read()?, bias))
    }

    pub(super) fn forward(
        &self,
        x: &Tensor,
        activation: Option<Activation>,
        before: Option<&mut Tensor>,
    ) -> Result<Tensor> {
        self.as_module(|| self.run(x, activation, before))
    }

    /// The results of layers with the same input, which a device may compute at once.
    pub(super) fn forward_all<const N: usize>(layers: [&Layer; N], x: &Tensor) -> Result<[Tensor; N]> {
        let backend = x.device().backend();
        let mut results = Vec::with_capacity(N);
        let packed: Vec<_> = layers.iter().filter_map(|layer| layer.weight.packed()).collect();
        if let Some(results) = Layer::forward_packed(layers, &packed, x)? {
            return Ok(results);
        }
        if backend.is_host() || !packed.is_empty() {
            for layer in layers {
                results.push(layer.forward(x, None, None)?);
            }
        } else {
            let rows = x.shape().rows();
            let mut values = Vec::with_capacity(N);
            for layer in layers {
                layer.count(rows);
                values.push(layer.read()?);
                results.push(Tensor::empty(x.shape().with_last(layer.outputs), x.dtype(), x.device())?);
            }
            let weights: Vec<&Tensor> = values.iter().map(|(weight, _)| &**weight).collect();
            let whole = joined_weights(&layers, &weights, rows, backend);
            if let Some(whole) = whole {
                let (outputs, inputs) = (whole.sizes()[0], whole.sizes()[1]);
                let mut y = Tensor::empty(x.shape().with_last(outputs), x.dtype(), x.device())?;
                let right = WeightLayout::OutIn.forward(&whole);
                backend.gemm(Gemm::plain(rows, outputs, inputs, Matrix::whole(x), right, y.out()?))?;
                let parts = results.iter_mut().map(Tensor::out).collect::<Result<Vec<_>>>()?;
                backend.split_columns(&y, parts)?;
                return Ok(results.try_into().unwrap_or_else(|_| unreachable!("one result per layer")));
            }
            let mut products = Vec::with_capacity(N);
            for ((layer, (weight, bias)), result) in layers.iter().zip(&values).zip(&mut results) {
                let (left, right) = (Matrix::whole(x), layer.layout.forward(weight));
                let product = Gemm::plain(rows, layer.outputs, layer.inputs, left, right, result.out()?);
                products.push(Gemm { bias: bias.as_deref(), ..product });
            }
            backend.gemms(products)?;
        }
        Ok(results.try_into().unwrap_or_else(|_| unreachable!("one result per layer")))
    }

    /// The same with weights of few bits; `None` where the device has no kernel for it, or not all of them are such.
    fn forward_packed<const N: usize>(
        layers: [&Layer; N],
        packed: &[Arc<PackedWeight>],
        x: &Tensor,
    ) -> Result<Option<[Tensor; N]>> {
        let backend = x.device().backend();
        if packed.len() != N || packed.iter().any(|weight| !backend.takes_packed(weight.bits())) {
            return Ok(None);
        }
        let (mut biases, mut results) = (Vec::with_capacity(N), Vec::<Tensor>::with_capacity(N));
        for layer in layers {
            layer.count(x.shape().rows());
            biases.push(layer.bias.as_ref().map(Operand::read).transpose()?);
            results.push(Tensor::empty(x.shape().with_last(layer.outputs), x.dtype(), x.device())?);
        }
        let products = (packed.iter().zip(&biases).zip(&mut results))
            .map(|((weight, bias), y)| Ok(PackedLayer { weight, bias: bias.as_deref(), y: y.out()? }))
            .collect::<Result<Vec<_>>>()?;
        let done = backend.gemm_packed(x, products, None)?;
        Ok(if done { results.try_into().ok() } else { None })
    }

    fn run(&self, x: &Tensor, activation: Option<Activation>, before: Option<&mut Tensor>) -> Result<Tensor> {
        let mut y = Tensor::empty(x.shape().with_last(self.outputs), x.dtype(), x.device())?;
        self.write(x, activation, before, y.out()?)?;
        Ok(y)
    }

    /// The result for rows `x` of a larger input, in its place.
    pub(super) fn forward_into(&self, x: &Tensor, y: Out<'_>) -> Result<()> {
        self.as_module(|| self.write(x, None, None, y))
    }

    fn write(
        &self,
        x: &Tensor,
        activation: Option<Activation>,
        before: Option<&mut Tensor>,
        mut y: Out<'_>,
    ) -> Result<()> {
        let bias: Option<Value> = self.bias.as_ref().map(Operand::read).transpose()?;
        let rows = x.shape().rows();
        profile::count_product(1, rows, self.outputs, self.inputs);
        if let Some(activation) = activation {
            count_activation(activation, y.numel());
        }
        if let (Some(packed), None) = (self.weight.packed(), &before) {
            let layer = PackedLayer { weight: &packed, bias: bias.as_deref(), y: y.again() };
            if x.device().backend().gemm_packed(x, vec![layer], activation)? {
                return Ok(());
            }
        }
        let weight = self.weight.read()?;
        let (left, right) = (Matrix::whole(x), self.layout.forward(&weight));
        x.device().backend().gemm(Gemm {
            bias: bias.as_deref(),
            activation,
            before_activation: before.map(Tensor::out).transpose()?,
            ..Gemm::plain(rows, self.outputs, self.inputs, left, right, y)
        })
    }

    /// The gradient of the layer's input.
    pub(super) fn input_gradient(&self, dy: &Tensor, x_shape: &Shape) -> Result<Tensor> {
        let mut dx = Tensor::empty(*x_shape, dy.dtype(), dy.device())?;
        self.as_module(|| self.write_input_gradient(dy, dx.out()?, false))?;
        Ok(dx)
    }

    /// Adds the gradient of the layer's input to that of other layers.
    pub(super) fn add_input_gradient(&self, dy: &Tensor, dx: Out<'_>) -> Result<()> {
        self.as_module(|| self.write_input_gradient(dy, dx, true))
    }

    pub(super) fn write_input_gradient(&self, dy: &Tensor, dx: Out<'_>, accumulate: bool) -> Result<()> {
        let weight = self.weight.read()?;
        let rows = dx.shape().rows();
        let (dy_matrix, w) = (Matrix::whole(dy), self.layout.backward(&weight));
        profile::count_product(1, rows, self.inputs, self.outputs);
        let product = Gemm::plain(rows, self.inputs, self.outputs, dy_matrix, w, dx);
        dy.device().backend().gemm(Gemm { accumulate, ..product })
    }

    /// Room for the gradient of the bias, where it is wanted.
    fn bias_gradient_like(&self, dy: &Tensor) -> Result<Option<Tensor>> {
        match &self.bias {
            Some(bias) if self.wanted[1] => {
                gradient_like(bias, *bias.shape(), dy.dtype(), dy.device()).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// The gradients of weight and bias, where they are wanted, unless they come later.
    pub(super) fn weight_gradients(
        &self,
        x: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let wanted =
            self.operands().zip(self.wanted).filter_map(|(operand, wanted)| wanted.then_some(operand));
        if let Some(params) = for_later(wanted) {
            let (layer, x, dy) = (self.clone(), x.clone(), dy.clone());
            put_off(params, move || {
                let (dweight, dbias) = layer.weight_gradients_now(&x, &dy)?;
                Ok(dweight.into_iter().chain(dbias).collect())
            })?;
            return Ok((None, None));
        }
        self.weight_gradients_now(x, dy)
    }

    fn weight_gradients_now(&self, x: &Tensor, dy: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        self.as_module(|| {
            let mut dbias = self.bias_gradient_like(dy)?;
            if let Some(dbias) = &mut dbias {
                dy.device().backend().sum_rows(dy, dbias.out()?)?;
            }
            Ok((self.weight_gradient_now(x, dy)?, dbias))
        })
    }

    /// The gradient of the weight alone, where it is wanted, unless it comes later.
    fn weight_gradient(&self, x: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        if let Some(params) = for_later(std::iter::once(&self.weight).filter(|_| self.wanted[0])) {
            let (layer, x, dy) = (self.clone(), x.clone(), dy.clone());
            put_off(params, move || Ok(layer.weight_gradient_now(&x, &dy)?.into_iter().collect()))?;
            return Ok(None);
        }
        self.weight_gradient_now(x, dy)
    }

    fn weight_gradient_now(&self, x: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        if !self.wanted[0] {
            return Ok(None);
        }
        let mut dweight = gradient_like(&self.weight, *self.weight.shape(), dy.dtype(), dy.device())?;
        self.write_weight_gradient(x, dy, dweight.out()?, false)?;
        Ok(Some(dweight))
    }

    /// The gradient of the weight in its place, or added to what is there.
    pub(super) fn write_weight_gradient(
        &self,
        x: &Tensor,
        dy: &Tensor,
        dweight: Out<'_>,
        accumulate: bool,
    ) -> Result<()> {
        let (left, right, m, n) = match self.layout {
            WeightLayout::OutIn => (dy, x, self.outputs, self.inputs),
            WeightLayout::InOut => (x, dy, self.inputs, self.outputs),
        };
        let (left, right) = (Matrix::transposed(left), Matrix::whole(right));
        let rows = x.shape().rows();
        self.as_module(|| {
            profile::count_product(1, m, n, rows);
            let product = Gemm::plain(m, n, rows, left, right, dweight);
            dy.device().backend().gemm(Gemm { accumulate, ..product })
        })
    }
}

/// `x·W + b` over the last dimension.
pub fn linear(
    x: impl Into<Operand>,
    weight: impl Into<Operand>,
    bias: Option<Operand>,
    layout: WeightLayout,
) -> Result<Tensor> {
    linear_activation(x, weight, bias, layout, None)
}

/// `f(x·W + b)`; backward keeps the value before `f`.
pub fn linear_activation(
    x: impl Into<Operand>,
    weight: impl Into<Operand>,
    bias: Option<Operand>,
    layout: WeightLayout,
    activation: Option<Activation>,
) -> Result<Tensor> {
    let (x, weight) = (x.into(), weight.into());
    let layer = Layer::new("linear", x.shape(), x.dtype(), weight, bias, layout)?;
    layer.as_module(|| recorded_linear(&x, &layer, activation))
}

fn recorded_linear(x: &Operand, layer: &Layer, activation: Option<Activation>) -> Result<Tensor> {
    let mut operands = vec![x, &layer.weight];
    operands.extend(&layer.bias);
    let recording = needs_grad(&operands);
    let input = x.read()?;
    let mut before = match activation {
        Some(_) if recording => {
            Some(Tensor::empty(x.shape().with_last(layer.outputs), x.dtype(), input.device())?)
        }
        _ => None,
    };
    let y = layer.forward(&input, activation, before.as_mut())?;
    if !recording {
        return Ok(y);
    }
    let (saved_x, saved) = (Saved::of(x), layer.saved());
    Ok(record("linear", &operands, y, move |dy| {
        let dy = match (activation, &before) {
            (Some(activation), Some(before)) => activation_gradient(activation, before, dy)?,
            _ => dy,
        };
        let x = saved_x.read()?;
        let (dweight, dbias) = saved.weight_gradients(&x, &dy)?;
        // A saved tensor has lost its history; whether its gradient is wanted the tape knows by the edge.
        let dx = Some(saved.input_gradient(&dy, x.shape())?);
        let mut gradients = vec![dx, dweight];
        gradients.extend(saved.bias.is_some().then_some(dbias));
        Ok(gradients)
    }))
}

fn activation_gradient(activation: Activation, before: &Tensor, dy: Tensor) -> Result<Tensor> {
    let mut dx = Tensor::empty(*dy.shape(), dy.dtype(), dy.device())?;
    count_activation(activation, 2 * dx.numel());
    dy.device().backend().activation_backward(activation, before, &dy, dx.out()?)?;
    Ok(dx)
}

/// `f(x·W₁ + b₁)·W₂ + b₂` as one node.
///
/// It saves the input and the value before `f`. The value after `f`, which two separate layers would save too, is
/// computed again in backward, in the pass that takes the gradient of `f`, unless the device has room for rows so wide.
pub fn mlp(
    x: impl Into<Operand>,
    up: (Operand, Option<Operand>),
    down: (Operand, Option<Operand>),
    layout: WeightLayout,
    activation: Activation,
) -> Result<Tensor> {
    let x = x.into();
    let up = Layer::new("mlp", x.shape(), x.dtype(), up.0, up.1, layout)?;
    let hidden_shape = x.shape().with_last(up.outputs);
    let down = Layer::new("mlp", &hidden_shape, x.dtype(), down.0, down.1, layout)?;
    let mut operands = vec![&x, &up.weight];
    operands.extend(&up.bias);
    operands.push(&down.weight);
    operands.extend(&down.bias);
    let recording = needs_grad(&operands);
    let input = x.read()?;
    let mut before =
        if recording { Some(Tensor::empty(hidden_shape, x.dtype(), input.device())?) } else { None };
    let hidden = up.forward(&input, Some(activation), before.as_mut())?;
    let y = down.forward(&hidden, None, None)?;
    let Some(before) = before else { return Ok(y) };
    let is_kept = up.outputs <= input.device().backend().kept_activation_width();
    let kept = is_kept.then_some(hidden);
    let (saved_x, saved_up, saved_down) = (Saved::of(&x), up.saved(), down.saved());
    let before = Own::new(before);
    Ok(record("mlp", &operands, y, move |dy| {
        let mut before = before.take()?;
        let mut dbefore = saved_down.input_gradient(&dy, before.shape())?;
        // Both tensors are this node's own: the gradient goes through `f` where it lies, and `before` becomes the value
        // after `f` where that was not kept.
        let mut dup_bias = saved_up.bias_gradient_like(&dbefore)?;
        saved_up.as_module(|| count_activation(activation, 2 * dbefore.numel()));
        if kept.is_none() {
            let again = || count_activation(activation, before.numel());
            profile::during(profile::Pass::Recomputation, || saved_up.as_module(again));
        }
        dy.device().backend().activation_backward_sums(
            activation,
            before.out()?,
            dbefore.out()?,
            kept.is_none(),
            dup_bias.as_mut().map(Tensor::out).transpose()?,
        )?;
        let after = kept.clone().unwrap_or(before);
        let (ddown, ddown_bias) = saved_down.weight_gradients(&after, &dy)?;
        drop(after);
        let x = saved_x.read()?;
        let dup = saved_up.weight_gradient(&x, &dbefore)?;
        let dx = saved_up.input_gradient(&dbefore, x.shape())?;
        let mut gradients = vec![Some(dx), dup];
        gradients.extend(saved_up.bias.is_some().then_some(dup_bias));
        gradients.push(ddown);
        gradients.extend(saved_down.bias.is_some().then_some(ddown_bias));
        Ok(gradients)
    }))
}
