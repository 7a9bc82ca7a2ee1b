//! Optimizers that exchange momentum at one bit per value instead of gradients.
//!
//! They begin as plain training does, with averaged gradients. Once the second moment has settled it is frozen, and from
//! then on every rank goes on with its own, unreduced gradient: what ranks exchange is the momentum, compressed, with what
//! is lost fed back (Tang et al.: "1-bit Adam", 2021; Li et al.: "1-bit LAMB", 2022; Lu et al.: "0/1 Adam", 2022).
//! [`OneBit::takes_local_gradients`] says which kind of gradient a step wants.
//!
//! Nothing here knows of ranks: an [`Exchange`] is handed in, which leaves values as they are where there is one rank.
//! Every rule works on whole parameters, in blocks that stay in the cache while all that is to be done with them is done: as
//! [`Values`] they are given to the exchange and taken from it. No moment is corrected for its start at zero. A weight whose
//! second moment is zero when it is frozen has never had a gradient; it stays where it is, since a sign is never zero and
//! would be divided by next to nothing.
//!
//! [`OneBit::step`] is the step on the host. Where a device steps, passes of its own ([`ferrospeed_tensor::backend::OneBitPass`])
//! follow the same [`OneBit::phase`] and the same ratios.

mod adam;
mod lamb;
mod zero_one;

pub use adam::OneBitAdam;
pub use lamb::{OneBitLamb, Ratio};
pub use zero_one::ZeroOneAdam;

use std::ops::Range;

use ferrospeed_config::OneBit as Configured;
use ferrospeed_tensor::Device;
use ferrospeed_tensor::dtype::Float;
use ferrospeed_tensor::loops::ahead::{TOGETHER, ask_ahead};
use ferrospeed_tensor::loops::simd::vectorized;

use crate::{Copy16, Gradient, GroupOptions};

/// Elements that are worked on at once.
const BLOCK: usize = 2048;

/// A tensor whose values are averaged over ranks, given and taken in blocks of any length. No block is taken before it was
/// given.
pub trait Values: Send {
    /// How many there are.
    fn numel(&self) -> usize;
    /// Writes those from `start` on.
    fn give(&mut self, start: usize, block: &mut [f32]);
    /// Takes the averages of those from `start` on.
    fn take(&mut self, start: usize, block: &[f32]);
}

/// What carries values between ranks.
pub trait Exchange {
    /// What can go wrong.
    type Error;

    /// Elements of a tensor with those that make it even.
    fn padded(&self, numel: usize) -> usize;

    /// Makes the values of some tensors the average over ranks, compressed, all in one exchange. What is lost is fed back
    /// into the next call for the same tensor. Tensors come in the order of their numbers.
    fn average(&mut self, tensors: Vec<(usize, &mut dyn Values)>) -> Result<(), Self::Error>;

    /// Forgets what was lost so far.
    fn forget(&mut self);
}

/// One whole parameter in a step; all slices have one length.
#[derive(Debug)]
pub struct Whole<'a> {
    /// f32 master weights.
    pub weights: &'a mut [f32],
    /// Their gradient: averaged, or this rank's own.
    pub gradient: Gradient<'a>,
    /// Multiplies the gradient first: one over the loss scale, times the clipping factor.
    pub gradient_factor: f32,
    /// The states in the order of [`OneBit::state_names`].
    pub states: Vec<&'a mut [f32]>,
    /// Where the 16-bit copy of the new weights goes.
    pub copy: Copy16<'a>,
    /// The options of its group.
    pub options: GroupOptions,
}

/// All elements, block by block.
fn blocks(numel: usize) -> impl Iterator<Item = Range<usize>> {
    (0..numel).step_by(BLOCK).map(move |start| start..(start + BLOCK).min(numel))
}

impl Whole<'_> {
    fn numel(&self) -> usize {
        self.weights.len()
    }

    /// Some weights with their states.
    fn parts<const STATES: usize>(&mut self, range: Range<usize>) -> (&mut [f32], [&mut [f32]; STATES]) {
        let mut states = self.states.iter_mut();
        let state = |_| &mut states.next().expect("the number was checked")[range.clone()];
        let states = std::array::from_fn(state);
        (&mut self.weights[range], states)
    }

    /// The gradient from `start` on, unscaled and clipped.
    fn read_gradient(&self, start: usize, out: &mut [f32]) {
        let (range, factor) = (start..start + out.len(), self.gradient_factor);
        match self.gradient {
            Gradient::F32(values) => widen(&values[range], factor, out),
            Gradient::Bf16(values) => widen(&values[range], factor, out),
            Gradient::F16(values) => widen(&values[range], factor, out),
        }
    }

    /// The momentum from `start` on with its gradient blended in, times `scale`; the one that is kept stays as it is.
    fn read_momentum(&self, start: usize, scale: f32, out: &mut [f32]) {
        self.read_gradient(start, out);
        let beta = self.options.betas[0];
        let (beta, rest) = (beta as f32, (1.0 - beta) as f32);
        let m = &self.states[0][start..start + out.len()];
        vectorized!(|| for (out, m) in out.chunks_mut(TOGETHER).zip(m.chunks(TOGETHER)) {
            ask_ahead::<f32, TOGETHER>(m, 0);
            out.iter_mut().zip(m).for_each(|(out, m)| *out = (beta * m + rest * *out) * scale);
        });
    }

    /// Brings the 16-bit copy of some weights up to date.
    fn round(&mut self, range: Range<usize>) {
        match &mut self.copy {
            Copy16::None => {}
            Copy16::Bf16(copy) => narrow(&self.weights[range.clone()], &mut copy[range]),
            Copy16::F16(copy) => narrow(&self.weights[range.clone()], &mut copy[range]),
        }
    }
}

fn widen<T: Float>(values: &[T], factor: f32, out: &mut [f32]) {
    vectorized!(|| for (out, values) in out.chunks_mut(TOGETHER).zip(values.chunks(TOGETHER)) {
        ask_ahead::<T, TOGETHER>(values, 0);
        out.iter_mut().zip(values).for_each(|(out, value)| *out = value.widen() * factor);
    });
}

fn narrow<T: Float>(values: &[f32], out: &mut [T]) {
    vectorized!(|| for (out, values) in out.chunks_mut(TOGETHER).zip(values.chunks(TOGETHER)) {
        ask_ahead::<T, TOGETHER>(out, 0);
        out.iter_mut().zip(values).for_each(|(out, &value)| *out = T::narrow(value));
    });
}

/// What a rule remembers beside its states. All of it begins empty, and may be emptied between steps: a run then goes on
/// from what the states say.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Memory {
    /// 0/1 Adam: how far each parameter has gone since ranks last met, by element.
    travelled: Vec<Vec<f32>>,
    /// The sum of learning rates since then, by parameter.
    rates: Vec<f64>,
    /// 1-bit LAMB: the ratios of each parameter. Part of a checkpoint.
    pub ratios: Vec<Ratio>,
    /// The momenta of all parameters end to end.
    fused: Vec<f32>,
}

impl Memory {
    /// How far this rank's parameters have gone since ranks last met, each with the sum of rates since then; nothing while ranks do
    /// not part. Weights stay apart from then on: that a rank goes back before it takes the common way is rounded.
    pub fn ways(&self) -> Option<(&[Vec<f32>], &[f64])> {
        (!self.rates.is_empty()).then_some((&self.travelled, &self.rates))
    }

    /// Goes on from such ways.
    pub fn set_ways(&mut self, travelled: Vec<Vec<f32>>, rates: Vec<f64>) {
        (self.travelled, self.rates) = (travelled, rates);
    }

    /// What lies beyond the last of `numel` momenta end to end.
    pub fn beyond(&self, numel: usize) -> &[f32] {
        self.fused.get(numel..).unwrap_or_default()
    }

    /// Goes on with it.
    pub fn set_beyond(&mut self, numel: usize, beyond: &[f32]) {
        self.fused = vec![0.0; numel];
        self.fused.extend_from_slice(beyond);
    }
}

/// What a step of a rule does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// A plain step with averaged gradients; all others take this rank's own.
    Averaged {
        /// Whether the second moment stays from here on.
        freezes: bool,
    },
    /// Momenta are averaged compressed (1-bit Adam and 1-bit LAMB).
    Momentum,
    /// Gradients are averaged compressed (0/1 Adam, between two updates of the second moment).
    Gradient,
    /// A step on this rank's own way (0/1 Adam).
    Way {
        /// Whether it is the first, before which what was lost is forgotten.
        begins: bool,
        /// Whether ranks meet at its end.
        meets: bool,
    },
}

/// A rule with its fixed options.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum OneBit {
    /// 1-bit Adam.
    Adam(OneBitAdam),
    /// 0/1 Adam.
    ZeroOne(ZeroOneAdam),
    /// 1-bit LAMB.
    Lamb(OneBitLamb),
}

impl OneBit {
    pub(crate) fn from_config(configured: &Configured) -> (OneBit, GroupOptions) {
        let (lr, weight_decay, betas) = (configured.lr, configured.weight_decay, configured.betas);
        let rule = match configured.rule {
            ferrospeed_config::OneBitRule::Adam { freeze_step } => {
                OneBit::Adam(OneBitAdam { eps: configured.eps, freeze_step })
            }
            ferrospeed_config::OneBitRule::ZeroOne(rule) => OneBit::ZeroOne(ZeroOneAdam {
                eps: configured.eps,
                var_freeze_step: rule.var_freeze_step,
                var_update_scaler: rule.var_update_scaler,
                local_step_scaler: rule.local_step_scaler,
                local_step_clipper: rule.local_step_clipper,
            }),
            ferrospeed_config::OneBitRule::Lamb(rule) => OneBit::Lamb(OneBitLamb {
                eps: configured.eps,
                freeze_step: rule.freeze_step,
                max_coeff: rule.max_coeff,
                min_coeff: rule.min_coeff,
                coeff_beta: rule.coeff_beta,
                factor_max: rule.factor_max,
                factor_min: rule.factor_min,
                factor_threshold: rule.factor_threshold,
            }),
        };
        (rule, GroupOptions { lr, weight_decay, betas })
    }

    /// Its name in checkpoints.
    pub fn name(&self) -> &'static str {
        match self {
            OneBit::Adam(_) => "onebitadam",
            OneBit::ZeroOne(_) => "zerooneadam",
            OneBit::Lamb(_) => "onebitlamb",
        }
    }

    /// The names of its states.
    pub fn state_names(&self) -> &'static [&'static str] {
        match self {
            OneBit::Adam(_) | OneBit::ZeroOne(_) => &["exp_avg", "exp_avg_sq"],
            OneBit::Lamb(_) => &["exp_avg", "exp_avg_sq", "exp_avg_sq_fresh"],
        }
    }

    /// What a step does. `step` counts from 1.
    pub fn phase(&self, step: u64) -> Phase {
        let step = counted(step);
        match self {
            OneBit::Adam(OneBitAdam { freeze_step, .. }) | OneBit::Lamb(OneBitLamb { freeze_step, .. }) => {
                match step > *freeze_step {
                    true => Phase::Momentum,
                    false => Phase::Averaged { freezes: step == *freeze_step },
                }
            }
            OneBit::ZeroOne(rule) => rule.phase(step),
        }
    }

    /// Whether a step wants this rank's own gradient instead of the average. `step` counts from 1.
    pub fn takes_local_gradients(&self, step: u64) -> bool {
        !matches!(self.phase(step), Phase::Averaged { .. })
    }

    /// One step of all parameters, on the threads of a device; `step` counts from 1. All ranks call it together, with the
    /// same parameters.
    ///
    /// # Panics
    /// When slices differ in length or number: a bug of the caller.
    pub fn step<X: Exchange>(
        &self,
        device: &Device,
        memory: &mut Memory,
        params: &mut [Whole<'_>],
        step: u64,
        exchange: &mut X,
    ) -> Result<(), X::Error> {
        let states = self.state_names().len();
        for whole in params.iter() {
            assert_eq!(whole.states.len(), states, "states of {}", self.name());
            let gradient = whole.gradient.len();
            let copy = match &whole.copy {
                Copy16::None => whole.numel(),
                Copy16::Bf16(copy) => copy.len(),
                Copy16::F16(copy) => copy.len(),
            };
            let mut lengths = whole.states.iter().map(|state| state.len()).chain([gradient, copy]);
            assert!(lengths.all(|length| length == whole.numel()), "lengths");
        }
        let phase = self.phase(step);
        match self {
            OneBit::Adam(rule) => rule.step(device, params, phase, exchange),
            OneBit::ZeroOne(rule) => rule.step(device, memory, params, phase, exchange),
            OneBit::Lamb(rule) => rule.step(device, memory, params, phase, exchange),
        }
    }
}

/// Steps as the rules count them: the call that makes their buffers is the first, so that `freeze_step` F means F − 1
/// steps of plain training.
fn counted(step: u64) -> u64 {
    step.saturating_add(1)
}

/// `average ← β average + (1 − β) value`.
fn blend(average: &mut [f32], values: &[f32], beta: f64) {
    let (beta, rest) = (beta as f32, (1.0 - beta) as f32);
    vectorized!(|| for (average, values) in average.chunks_mut(TOGETHER).zip(values.chunks(TOGETHER)) {
        ask_ahead::<f32, TOGETHER>(average, 0);
        let both = average.iter_mut().zip(values);
        both.for_each(|(average, value)| *average = beta * *average + rest * value);
    });
}

/// The same with squares.
fn blend_squares(average: &mut [f32], values: &[f32], beta: f64) {
    let (beta, rest) = (beta as f32, (1.0 - beta) as f32);
    vectorized!(|| for (average, values) in average.chunks_mut(TOGETHER).zip(values.chunks(TOGETHER)) {
        ask_ahead::<f32, TOGETHER>(average, 0);
        let both = average.iter_mut().zip(values);
        both.for_each(|(average, value)| *average = beta * *average + rest * value * value);
    });
}

/// An averaged value, but nothing where a weight never had a gradient.
#[inline(always)]
fn known(averaged: f32, variance: f32) -> f32 {
    if variance == 0.0 { 0.0 } else { averaged }
}

/// How momentum moves weights.
#[derive(Clone, Copy)]
struct Pace {
    lr: f32,
    decay: f32,
    eps: f32,
}

impl Pace {
    fn of(options: &GroupOptions, eps: f64) -> Pace {
        Pace { lr: options.lr as f32, decay: options.weight_decay as f32, eps: eps as f32 }
    }

    /// By how much a weight becomes less.
    #[inline(always)]
    fn step(self, weight: f32, m: f32, v: f32) -> f32 {
        self.lr * (m / (v.sqrt() + self.eps) + self.decay * weight)
    }
}

/// Moves weights by their momentum, which is in the cache as the second moment is.
fn walk(weights: &mut [f32], m: &[f32], v: &[f32], pace: Pace) {
    let moments = m.chunks(TOGETHER).zip(v.chunks(TOGETHER));
    vectorized!(|| for (weights, (m, v)) in weights.chunks_mut(TOGETHER).zip(moments) {
        ask_ahead::<f32, TOGETHER>(weights, 0);
        let all = weights.iter_mut().zip(m).zip(v);
        all.for_each(|((weight, m), v)| *weight -= pace.step(*weight, *m, *v));
    });
}

/// The norm of values that come in turn.
#[derive(Default)]
struct Norm(f64);

impl Norm {
    fn add(&mut self, values: &[f32]) {
        values.iter().for_each(|&value| self.0 += f64::from(value) * f64::from(value));
    }

    fn get(&self) -> f64 {
        self.0.sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Signs of one size, which are never zero.
    struct Signs;

    impl Exchange for Signs {
        type Error = std::convert::Infallible;

        fn padded(&self, numel: usize) -> usize {
            numel
        }

        fn average(&mut self, tensors: Vec<(usize, &mut dyn Values)>) -> Result<(), Self::Error> {
            for (_, tensor) in tensors {
                let mut values = vec![0.0; tensor.numel()];
                tensor.give(0, &mut values);
                let size = values.iter().map(|value| value.abs()).sum::<f32>() / values.len() as f32;
                values.iter_mut().for_each(|value| *value = if *value >= 0.0 { size } else { -size });
                tensor.take(0, &values);
            }
            Ok(())
        }

        fn forget(&mut self) {}
    }

    #[test]
    fn a_weight_that_never_had_a_gradient_stays_where_it_is() {
        let lamb = OneBitLamb {
            eps: 1e-8,
            freeze_step: 4,
            max_coeff: 10.0,
            min_coeff: 0.01,
            coeff_beta: 0.9,
            factor_max: 4.0,
            factor_min: 0.5,
            factor_threshold: 0.1,
        };
        let zero_one = ZeroOneAdam {
            eps: 1e-8,
            var_freeze_step: 4,
            var_update_scaler: 1,
            local_step_scaler: 2,
            local_step_clipper: 2,
        };
        let adam = OneBitAdam { eps: 1e-8, freeze_step: 4 };
        for rule in [OneBit::Adam(adam), OneBit::ZeroOne(zero_one), OneBit::Lamb(lamb)] {
            let (mut weights, mut memory) = (vec![0.5f32; 2], Memory::default());
            let mut states = vec![vec![0.0f32; 2]; rule.state_names().len()];
            for step in 1..12 {
                let mut params = [Whole {
                    weights: &mut weights,
                    gradient: Gradient::F32(&[0.3, 0.0]),
                    gradient_factor: 1.0,
                    states: states.iter_mut().map(|state| &mut state[..]).collect(),
                    copy: Copy16::None,
                    options: GroupOptions { lr: 0.01, weight_decay: 0.0, betas: [0.9, 0.999] },
                }];
                rule.step(&ferrospeed_cpu::device(), &mut memory, &mut params, step, &mut Signs).unwrap();
            }
            assert!(weights[0] < 0.5 && weights[0].is_finite(), "{}: {weights:?}", rule.name());
            assert_eq!(weights[1], 0.5, "{}", rule.name());
        }
    }
}
