//! Products of few rows, and of weights of few bits.

use crate::backend::{Activation, Memory};
use crate::dtype::DType;
use crate::error::Result;
use crate::out::Out;
use crate::packed::{PackedBits, PackedWeight};
use crate::tensor::Tensor;

/// A product of few rows, with what stands before and behind it in a block of a model.
#[derive(Debug)]
pub struct FewRows<'a> {
    /// `[rows, inputs]`.
    pub x: &'a Tensor,
    /// The gain `[inputs]` of a root-mean-square norm of `x` that comes first, and what is added to the mean square.
    pub norm: Option<(&'a Tensor, f32)>,
    /// Weights `[outputs, inputs]`, each with perhaps a bias.
    pub layers: Vec<(FewRowsWeight<'a>, Option<&'a Tensor>)>,
    /// Applied to the results; of a gated pair, to that of the first, the gate.
    pub activation: Option<Activation>,
    /// Whether there are two layers with one result, their product.
    pub is_gated: bool,
    /// What the only result is added to.
    pub residual: Option<&'a Tensor>,
    /// Where the results go.
    pub results: Vec<Out<'a>>,
}

/// A weight `[outputs, inputs]` of a product of few rows.
#[derive(Debug, Clone, Copy)]
pub enum FewRowsWeight<'a> {
    /// In the type of the rows.
    Whole(&'a Tensor),
    /// In few bits.
    Packed(&'a PackedWeight),
}

/// A weight of few bits, and where its product goes.
#[derive(Debug)]
pub struct PackedLayer<'a> {
    /// `[outputs, inputs]`.
    pub weight: &'a PackedWeight,
    /// A value for each output.
    pub bias: Option<&'a Tensor>,
    /// The result.
    pub y: Out<'a>,
}

/// Products of few rows with what stands before and behind them, as decoding makes them.
pub trait FewRowsProducts: Memory {
    /// The most rows that [`FewRowsProducts::few_rows`] may take of a type, with a norm or without, by weights of that type or of few bits.
    fn most_few_rows(&self, _dtype: DType, _normed: bool, _bits: Option<PackedBits>) -> usize {
        0
    }
    /// Products of few rows as one kernel. `false`: the device has none for it, and nothing was done.
    fn few_rows(&self, _step: FewRows<'_>) -> Result<bool> {
        Ok(false)
    }
}

/// Products with weights of few bits.
pub trait PackedProducts: Memory {
    /// Whether [`PackedProducts::gemm_packed`] takes weights of such bits.
    fn takes_packed(&self, _bits: PackedBits) -> bool {
        false
    }
    /// `y = f(x·Wᵀ + b)` with each of some weights of few bits. `false`: the device has no kernel for it, and nothing was done.
    fn gemm_packed(
        &self,
        _x: &Tensor,
        _layers: Vec<PackedLayer<'_>>,
        _activation: Option<Activation>,
    ) -> Result<bool> {
        Ok(false)
    }
}
