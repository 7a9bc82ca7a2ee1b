//! One layer's adapter: what it adds to the layer's product.

use std::cell::Cell;

use ferrospeed_collective::ops::all_reduce;
use ferrospeed_tensor::ops::{self, WeightLayout};
use ferrospeed_tensor::{DType, Initializer, Operand, Param, Result, Tensor, autograd};

use super::request::TrainedBiases;
use crate::Mode;
use crate::init::Init;
use crate::tensor_parallel::{Cut, Slices};

thread_local! {
    static MODE: Cell<Mode> = const { Cell::new(Mode::Evaluate) };
}

/// Runs layers whose `forward` is not told whether it trains. Only the dropout of adapters asks.
pub fn in_mode<R>(mode: Mode, work: impl FnOnce() -> R) -> R {
    struct Before(Mode);
    impl Drop for Before {
        fn drop(&mut self) {
            MODE.set(self.0);
        }
    }
    let _before = Before(MODE.replace(mode));
    work()
}

/// `s·(x·Aᵀ)·Bᵀ`, and where it has magnitudes, the lengths of the sum's rows.
#[derive(Debug, Clone)]
pub(crate) struct Adapter {
    /// `[rank, inputs]`.
    a: Param,
    /// `[outputs, rank]`.
    b: Param,
    /// The length of each output's weights.
    magnitude: Option<Param>,
    factor: f32,
    dropout: f32,
    trained_biases: TrainedBiases,
    /// The ranks that have the other inputs of each output.
    inputs_over: Option<Slices>,
}

impl Adapter {
    /// That of the layer made here, where it is meant to have one. Where outputs are cut, `A` is whole on all ranks and `B` is
    /// cut likewise; where inputs are, it is the other way round, and the sum over ranks comes behind both products.
    pub(crate) fn of(init: &Init, inputs: usize, outputs: usize) -> Option<Adapter> {
        let (adapters, rank, factor) = init.adapter()?;
        let [name_a, name_b] = ["lora_A.weight", "lora_B.weight"];
        let start = Initializer::Uniform { bound: 1.0 / (inputs.max(1) as f32).sqrt() };
        let zero = Initializer::Constant(0.0);
        let of_outputs =
            |init: &Init| init.param("lora_magnitude_vector", [outputs], Initializer::Constant(1.0));
        let shared = || init.cut(Cut::Shared);
        let (a, b, magnitude, inputs_over) = match init.slicing() {
            Some((slices, cut @ (Cut::Outputs { .. } | Cut::Heads { .. }))) => {
                let a = shared().param(name_a, [rank, inputs], start);
                let b = init.param_part(name_b, [outputs, rank], 0, cut, slices, zero);
                let one = Initializer::Constant(1.0);
                let magnitude = || init.param_part("lora_magnitude_vector", [outputs], 0, cut, slices, one);
                (a, b, adapters.magnitudes.then(magnitude), None)
            }
            Some((slices, cut @ Cut::Inputs { .. })) => {
                let a = init.param_part(name_a, [rank, inputs], 1, cut, slices, start);
                let b = shared().param(name_b, [outputs, rank], zero);
                (a, b, adapters.magnitudes.then(|| of_outputs(&shared())), Some(slices.clone()))
            }
            _ => {
                let (a, b) =
                    (init.param(name_a, [rank, inputs], start), init.param(name_b, [outputs, rank], zero));
                (a, b, adapters.magnitudes.then(|| of_outputs(init)), None)
            }
        };
        [&a, &b].into_iter().chain(&magnitude).for_each(|param| param.set_trainable(true));
        let (dropout, trained_biases) = (adapters.dropout, adapters.biases);
        Some(Adapter { a, b, magnitude, factor, dropout, trained_biases, inputs_over })
    }

    /// Which biases were asked to be trained.
    pub(crate) fn trained_biases(&self) -> TrainedBiases {
        self.trained_biases
    }

    /// `x·W` (and `b`) with what the adapter makes of it. Of inputs that are cut, this rank's summand, to which no bias is
    /// added yet.
    pub(crate) fn applied(
        &self,
        x: &Tensor,
        weight: &Operand,
        bias: Option<Operand>,
        layout: WeightLayout,
    ) -> Result<Tensor> {
        let seen = MODE.get().dropout(x, self.dropout)?;
        let low = ops::linear(&seen, &self.a, None, WeightLayout::OutIn)?;
        // The narrow one of the two products is multiplied.
        let low = ops::affine(&low, self.factor, 0.0)?;
        let change = ops::linear(&low, &self.b, None, WeightLayout::OutIn)?;
        let Some(magnitude) = &self.magnitude else {
            return ops::add(&ops::linear(x, weight, bias, layout)?, &change);
        };
        let product = ops::linear(x, weight, None, layout)?;
        let drops = MODE.get() == Mode::Train && self.dropout > 0.0;
        let of_seen = if drops { ops::linear(&seen, weight, None, layout)? } else { product.clone() };
        let longer =
            ops::mul(&ops::add(&of_seen, &change)?, &self.longer(magnitude, weight, layout, x.dtype())?)?;
        let sum = ops::add(&ops::add(&product, &change)?, &longer)?;
        match bias {
            Some(bias) => ops::add(&sum, bias),
            None => Ok(sum),
        }
    }

    /// By how much of itself each output is to be longer: its magnitude over the length of its weights, less one. The length
    /// counts as a constant in backward ("DoRA", section 4.3).
    fn longer(
        &self,
        magnitude: &Param,
        weight: &Operand,
        layout: WeightLayout,
        dtype: DType,
    ) -> Result<Tensor> {
        let length = autograd::no_grad(|| -> Result<Tensor> {
            let (weight, change) = match layout {
                WeightLayout::OutIn => (weight.clone(), ops::matmul(&self.b, &self.a)?),
                WeightLayout::InOut => {
                    let [a, b] = [ops::transpose(&self.a, 0, 1)?, ops::transpose(&self.b, 0, 1)?];
                    (weight.clone(), ops::matmul(&a, &b)?)
                }
            };
            let change = ops::affine(&ops::cast(&change, DType::F32)?, self.factor, 0.0)?;
            let whole = ops::add(&ops::cast(weight, DType::F32)?, &change)?;
            let inputs = if layout == WeightLayout::OutIn { 1 } else { 0 };
            let squares = ops::sum_dim(&ops::square(&whole)?, inputs)?;
            let squares = match &self.inputs_over {
                Some(slices) => all_reduce(&squares, slices.group())?,
                None => squares,
            };
            // As wide as magnitudes are read: what is as long as at the start must come out as 1.
            ops::cast(&ops::cast(&ops::sqrt(&squares)?, dtype)?, DType::F32)
        })?;
        let outputs = length.numel();
        let length = length.view([outputs])?;
        let ratio = ops::div(&ops::cast(magnitude, DType::F32)?, &length)?;
        ops::cast(&ops::affine(&ratio, 1.0, -1.0)?, dtype)
    }
}
