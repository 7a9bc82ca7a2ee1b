//! Products of rows that are sorted by group with the weight of each group.
//!
//! A group without rows costs nothing in forward. In backward its weight gets a gradient of zeros, so that ranks whose
//! groups are filled differently still do the same things together.

use crate::autograd::{Saved, for_later, needs_grad, put_off, record};
use crate::backend::{Device, GroupedGemm, GroupedOuter, Matrix, MatrixOut};
use crate::dtype::DType;
use crate::error::{Result, TensorError};
use crate::ops::linear::WeightLayout;
use crate::ops::{expect_same_dtype, gradient_like};
use crate::param::{Operand, Value};
use crate::profile;
use crate::shape::Shape;
use crate::tensor::Tensor;

/// The weights (or the biases) of all groups, alike in shape.
#[derive(Debug, Clone)]
pub enum GroupWeights {
    /// One for each.
    Each(Vec<Operand>),
    /// One for all, with the groups along its first dimension.
    Stacked(Operand),
}

impl GroupWeights {
    /// How many groups there are.
    pub fn groups(&self) -> usize {
        match self {
            GroupWeights::Each(each) => each.len(),
            GroupWeights::Stacked(all) => all.shape().sizes().first().copied().unwrap_or(0),
        }
    }

    fn operands(&self) -> &[Operand] {
        match self {
            GroupWeights::Each(each) => each,
            GroupWeights::Stacked(all) => std::slice::from_ref(all),
        }
    }

    /// The shape of one group's; an error where they differ.
    fn shape(&self, what: &'static str) -> Result<Shape> {
        match self {
            GroupWeights::Each(each) => {
                let first = each.first().map(|first| *first.shape());
                let first = first.ok_or_else(|| TensorError::argument(OP, format!("{what} of no group")))?;
                match each.iter().find(|other| *other.shape() != first) {
                    Some(other) => {
                        Err(TensorError::ShapeMismatch { op: OP, left: first, right: *other.shape() })
                    }
                    None => Ok(first),
                }
            }
            GroupWeights::Stacked(all) if all.shape().dims() > 1 => Ok(Shape::new(&all.shape().sizes()[1..])),
            GroupWeights::Stacked(all) => {
                Err(TensorError::shape(OP, what, *all.shape(), "the groups along its first dimension"))
            }
        }
    }

    fn read(&self) -> Result<Vec<Value>> {
        self.operands().iter().map(Operand::read).collect()
    }

    fn saved(&self) -> GroupWeights {
        match self {
            GroupWeights::Each(each) => GroupWeights::Each(each.iter().map(Operand::saved).collect()),
            GroupWeights::Stacked(all) => GroupWeights::Stacked(all.saved()),
        }
    }

    /// Whether each operand wants a gradient. Asked before they are saved: a saved tensor has lost its history.
    fn wanted(&self) -> Vec<bool> {
        self.operands().iter().map(Operand::requires_grad).collect()
    }

    /// Each group's matrix, or vector, in what was read of (or made for) the operands.
    fn of_groups<'a>(&self, values: &[&'a Tensor], transposed: bool) -> Vec<Matrix<'a>> {
        match self {
            GroupWeights::Each(_) => {
                values.iter().map(|value| Matrix { transposed, ..Matrix::whole(value) }).collect()
            }
            GroupWeights::Stacked(all) => {
                let groups = self.groups();
                let size = all.shape().numel() / groups.max(1);
                let of = |group| Matrix { transposed, offset: group * size, ..Matrix::whole(values[0]) };
                (0..groups).map(of).collect()
            }
        }
    }

    /// Memory for the gradients that are wanted, and each group's place in it.
    fn gradients(&self, wanted: &[bool], dtype: DType, device: &Device) -> Result<Vec<Option<Tensor>>> {
        let room = |(operand, &wanted): (&Operand, &bool)| {
            wanted.then(|| gradient_like(operand, *operand.shape(), dtype, device)).transpose()
        };
        self.operands().iter().zip(wanted).map(room).collect()
    }

    fn places<'a>(&self, gradients: &'a mut [Option<Tensor>]) -> Result<Vec<Option<MatrixOut<'a>>>> {
        let mut outs = gradients.iter_mut().map(|gradient| gradient.as_mut().map(Tensor::out).transpose());
        match self {
            GroupWeights::Each(_) => outs.map(|out| Ok(out?.map(MatrixOut::whole))).collect(),
            GroupWeights::Stacked(_) => Ok(match outs.next().transpose()?.flatten() {
                Some(out) => MatrixOut::each(out, self.groups()).into_iter().map(Some).collect(),
                None => (0..self.groups()).map(|_| None).collect(),
            }),
        }
    }
}

const OP: &str = "grouped_linear";

/// One layer of all groups.
#[derive(Debug, Clone, Copy)]
pub struct GroupedLayer<'a> {
    /// A matrix for each.
    pub weights: &'a GroupWeights,
    /// A vector for each, or none.
    pub biases: Option<&'a GroupWeights>,
    /// How the matrices lie.
    pub layout: WeightLayout,
}

/// What forward and backward share.
#[derive(Clone)]
pub(super) struct Product {
    weights: GroupWeights,
    biases: Option<GroupWeights>,
    counts: Tensor,
    layout: WeightLayout,
    inputs: usize,
    pub(super) outputs: usize,
    /// Whether each weight and each bias wants a gradient.
    wanted: [Vec<bool>; 2],
}

impl Product {
    /// Of rows `[rows, inputs]` of this shape and type; an error where something does not fit.
    pub(super) fn new(x: &Shape, dtype: DType, counts: &Tensor, layer: &GroupedLayer<'_>) -> Result<Product> {
        let &GroupedLayer { weights, biases, layout } = layer;
        let weight = weights.shape("the weights")?;
        let (inputs, outputs) = layout.features(OP, &weight)?;
        if x.dims() != 2 || x.last() != inputs {
            return Err(TensorError::ShapeMismatch { op: OP, left: *x, right: weight });
        }
        let groups = weights.groups();
        expect_same_dtype(OP, "the counts", counts.dtype(), DType::I64)?;
        if counts.sizes() != [groups] {
            return Err(TensorError::shape(OP, "the counts", *counts.shape(), format!("[{groups}]")));
        }
        if let Some(biases) = biases
            && (biases.groups() != groups || biases.shape("the biases")?.sizes() != [outputs])
        {
            let what = format!("{} biases for {groups} groups of {outputs} outputs", biases.groups());
            return Err(TensorError::argument(OP, what));
        }
        let product = Product {
            weights: weights.clone(),
            biases: biases.cloned(),
            counts: counts.detach(),
            layout,
            inputs,
            outputs,
            wanted: [weights.wanted(), biases.map(GroupWeights::wanted).unwrap_or_default()],
        };
        product
            .operands()
            .try_for_each(|operand| expect_same_dtype(OP, "a weight", operand.dtype(), dtype))?;
        Ok(product)
    }

    /// Weights, then biases.
    pub(super) fn operands(&self) -> impl Iterator<Item = &Operand> {
        self.weights.operands().iter().chain(self.biases.iter().flat_map(|biases| biases.operands()))
    }

    pub(super) fn saved(&self) -> Product {
        let biases = self.biases.as_ref().map(GroupWeights::saved);
        Product { weights: self.weights.saved(), biases, ..self.clone() }
    }

    /// Those of the operands that are wanted, unless they come later.
    pub(super) fn gradients(&self, x: &Tensor, dy: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let mut gradients = self.weight_gradients(x, dy, &self.wanted[0])?;
        gradients.extend(self.bias_gradients(dy, &self.wanted[1])?);
        Ok(gradients)
    }

    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut y = Tensor::empty(x.shape().with_last(self.outputs), x.dtype(), x.device())?;
        let (weights, biases) =
            (self.weights.read()?, self.biases.as_ref().map(GroupWeights::read).transpose()?);
        let weights: Vec<&Tensor> = weights.iter().map(|value| &**value).collect();
        let bias = match (&self.biases, &biases) {
            (Some(of), Some(values)) => {
                of.of_groups(&values.iter().map(|value| &**value).collect::<Vec<&Tensor>>(), false)
            }
            _ => Vec::new(),
        };
        profile::count_product(1, x.shape().rows(), self.outputs, self.inputs);
        x.device().backend().grouped_gemm(GroupedGemm {
            counts: &self.counts,
            a: x,
            b: &self.weights.of_groups(&weights, self.layout == WeightLayout::OutIn),
            bias: &bias,
            c: y.out()?,
        })?;
        Ok(y)
    }

    pub(super) fn input_gradient(&self, dy: &Tensor, x: &Shape) -> Result<Tensor> {
        let mut dx = Tensor::empty(*x, dy.dtype(), dy.device())?;
        let weights = self.weights.read()?;
        let weights: Vec<&Tensor> = weights.iter().map(|value| &**value).collect();
        profile::count_product(1, x.rows(), self.inputs, self.outputs);
        dy.device().backend().grouped_gemm(GroupedGemm {
            counts: &self.counts,
            a: dy,
            b: &self.weights.of_groups(&weights, self.layout == WeightLayout::InOut),
            bias: &[],
            c: dx.out()?,
        })?;
        Ok(dx)
    }

    /// The gradients of the weights that are wanted, unless they come later.
    fn weight_gradients(&self, x: &Tensor, dy: &Tensor, wanted: &[bool]) -> Result<Vec<Option<Tensor>>> {
        let operands = self.weights.operands().iter().zip(wanted);
        let Some(params) = for_later(operands.filter_map(|(operand, wanted)| wanted.then_some(operand)))
        else {
            return self.weight_gradients_now(x, dy, wanted);
        };
        let (product, x, dy, of) = (self.clone(), x.clone(), dy.clone(), wanted.to_vec());
        put_off(params, move || {
            Ok(product.weight_gradients_now(&x, &dy, &of)?.into_iter().flatten().collect())
        })?;
        Ok(vec![None; wanted.len()])
    }

    fn weight_gradients_now(&self, x: &Tensor, dy: &Tensor, wanted: &[bool]) -> Result<Vec<Option<Tensor>>> {
        let mut gradients = self.weights.gradients(wanted, dy.dtype(), dy.device())?;
        let (left, right) = match self.layout {
            WeightLayout::OutIn => (dy, x),
            WeightLayout::InOut => (x, dy),
        };
        if wanted.contains(&true) {
            profile::count_product(1, self.outputs, self.inputs, x.shape().rows());
            let c = self.weights.places(&mut gradients)?;
            dy.device().backend().grouped_outer(GroupedOuter { counts: &self.counts, left, right, c })?;
        }
        Ok(gradients)
    }

    fn bias_gradients(&self, dy: &Tensor, wanted: &[bool]) -> Result<Vec<Option<Tensor>>> {
        let Some(biases) = &self.biases else { return Ok(Vec::new()) };
        let mut gradients = biases.gradients(wanted, dy.dtype(), dy.device())?;
        if wanted.contains(&true) {
            dy.device().backend().grouped_sums(&self.counts, dy, biases.places(&mut gradients)?)?;
        }
        Ok(gradients)
    }
}

/// `y[rows of g] = x[rows of g]·W[g] + b[g]`: the rows of `x [rows, inputs]` are sorted by group, `counts [groups]`, `I64`
/// in the memory of the device, says how many each has. Rows behind the last group give zeros.
pub fn grouped_linear(
    x: impl Into<Operand>,
    counts: &Tensor,
    weights: &GroupWeights,
    biases: Option<&GroupWeights>,
    layout: WeightLayout,
) -> Result<Tensor> {
    let x = x.into();
    let product = Product::new(x.shape(), x.dtype(), counts, &GroupedLayer { weights, biases, layout })?;
    let y = product.forward(&*x.read()?)?;
    let operands: Vec<&Operand> = std::iter::once(&x).chain(product.operands()).collect();
    if !needs_grad(&operands) {
        return Ok(y);
    }
    let (saved, saved_x) = (product.saved(), Saved::of(&x));
    Ok(record(OP, &operands, y, move |dy| {
        let x = saved_x.read()?;
        let of_operands = saved.gradients(&x, &dy)?;
        let dx = saved.input_gradient(&dy, x.shape())?;
        Ok(std::iter::once(Some(dx)).chain(of_operands).collect())
    }))
}
