//! The optimizer's step on a device: magnitudes, norms, and the passes over weights and states.

use crate::backend::Memory;
use crate::error::Result;
use crate::out::Out;
use crate::tensor::Tensor;

/// How gradients are clipped: they are divided by `loss_scale`, and by as much as their norm exceeds `limit`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Clipping {
    /// What the loss was multiplied by.
    pub loss_scale: f64,
    /// The largest norm.
    pub limit: Option<f64>,
}

impl Clipping {
    /// What gradients of this norm, taken with the loss scale in them, are multiplied by.
    pub fn factor(&self, scaled_norm: f64) -> f32 {
        let norm = scaled_norm / self.loss_scale;
        let clip = self.limit.map_or(1.0, |limit| (limit / (norm + 1e-6)).min(1.0));
        (clip / self.loss_scale) as f32
    }
}

/// What [`Updates::clipped_updates`] has measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measured {
    /// The largest magnitude; infinity or NaN where there is one, and then nothing was updated.
    pub largest: f32,
    /// The sum of squares on the grid of that magnitude: the power of two that brings its square to between 2⁵⁰ and 2⁵².
    pub squares: i128,
}

/// A sum of which a device keeps the low 32 bits of each number and the others apart.
pub fn sum_of_words([low, high]: [u64; 2]) -> i128 {
    (i128::from(high) << 32) + i128::from(low)
}

/// What an optimizer does to each element; the numbers of one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Update {
    /// Adam, or AdamW where `decoupled`. States: both moments.
    Adam {
        /// Whether weights decay directly instead of through the gradient.
        decoupled: bool,
        /// Decay rates of the moments.
        betas: [f32; 2],
        /// One less the rates.
        rest: [f32; 2],
        /// Added to the denominator.
        eps: f32,
        /// Weight decay; with `decoupled`, times the learning rate.
        decay: f32,
        /// The learning rate, corrected for the first moment's start at zero.
        step_size: f32,
        /// The root of one over the second moment's correction.
        inverse_root_correction: f32,
    },
    /// Gradient descent. State: the momentum, where there is one.
    Sgd {
        /// Learning rate.
        lr: f32,
        /// Weight decay.
        decay: f32,
        /// How much of the buffer stays.
        momentum: f32,
        /// The share of the gradient that enters it.
        entering: f32,
        /// Whether the update looks one step ahead.
        nesterov: bool,
    },
    /// Adagrad. State: the sum of squares.
    Adagrad {
        /// Learning rate.
        lr: f32,
        /// Weight decay.
        decay: f32,
        /// Added to the denominator.
        eps: f32,
    },
    /// Lion. State: the moment.
    Lion {
        /// Learning rate.
        lr: f32,
        /// What is left of a weight after decay.
        shrink: f32,
        /// Decay rates.
        betas: [f32; 2],
        /// One less the rates.
        rest: [f32; 2],
    },
    /// LAMB's first pass. States: both moments, and where the direction goes.
    LambDirection {
        /// Decay rates of the moments.
        betas: [f32; 2],
        /// One less the rates.
        rest: [f32; 2],
        /// Added to the denominator.
        eps: f32,
        /// Whether under the root.
        eps_inside_sqrt: bool,
        /// Weight decay.
        decay: f32,
    },
    /// LAMB's second pass; the gradient is the direction. No states.
    LambApply {
        /// Multiplies the direction.
        step_size: f32,
    },
}

/// What [`Updates::update`] reads and writes: flat tensors of one length, in memory that is not the host's, so that no
/// reference of the program leads there (see [`Out::of_device`](crate::Out::of_device)).
#[derive(Debug, Clone)]
pub struct UpdateOperands {
    /// f32 master weights.
    pub weights: Tensor,
    /// Their gradient.
    pub gradient: Tensor,
    /// The optimizer's f32 states.
    pub states: Vec<Tensor>,
    /// Where the rounded copy of the new weights goes.
    pub copy: Option<Tensor>,
}

/// Optimizer steps of a device.
pub trait Updates: Memory {
    /// One optimizer step over flat tensors of this device, with gradients times `gradient_factor`; the pieces are alike in
    /// their types. Devices whose memory is the host's leave it to the optimizer's own loops.
    fn update(&self, _update: &Update, _gradient_factor: f32, _pieces: &[UpdateOperands]) -> Result<()> {
        Err(self.left_to_the_host("optimizer step"))
    }
    /// The largest magnitude in tensors of one type; infinity or NaN when there is one. Waits.
    fn largest_magnitude(&self, _pieces: &[&Tensor]) -> Result<f32> {
        Err(self.left_to_the_host("gradient norm"))
    }
    /// The sum of `x²·grid`, each rounded to the nearest integer first, so that the sum has no order. Waits.
    fn sum_of_squares(&self, _pieces: &[&Tensor], _grid: f64) -> Result<i128> {
        Err(self.left_to_the_host("gradient norm"))
    }
    /// Adds tensors of one type to what `measures` tells of others: the largest magnitude of all, as bits, then of each grid
    /// the sum that [`sum_of_squares`](Updates::sum_of_squares) gives, in two words (see [`sum_of_words`]). Does not wait.
    fn measure_more(&self, _pieces: &[&Tensor], _grids: &[f64], _measures: Out<'_>) -> Result<()> {
        Err(self.left_to_the_host("gradient norm"))
    }
    /// Measures `gradients`, of one type, and does `updates` with them clipped, without the host in between. Where a gradient
    /// is not finite nothing is updated. Waits only for what it measures, while the updates still run. `None` where the
    /// three above have to be called one by one.
    fn clipped_updates(
        &self,
        _clipping: Clipping,
        _gradients: &[&Tensor],
        _updates: &[(Update, Vec<UpdateOperands>)],
    ) -> Result<Option<Measured>> {
        Ok(None)
    }
}
