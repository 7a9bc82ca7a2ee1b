//! Stochastic gradient descent with momentum, optionally Nesterov's.

use ferrospeed_tensor::backend::Update;

use crate::GroupOptions;
use crate::stretch::Rule;

/// SGD's fixed options. Momentum is `betas[0]` of the group.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sgd {
    /// Weakens the gradient that enters the momentum.
    pub dampening: f64,
    /// Whether the update looks one step ahead.
    pub nesterov: bool,
}

/// The host's form of [`Update::Sgd`] without momentum.
pub(crate) struct Plain {
    pub(crate) lr: f32,
    pub(crate) decay: f32,
}

impl Rule<0> for Plain {
    #[inline(always)]
    fn update(&self, weight: f32, gradient: f32, _: &mut [f32; 0]) -> f32 {
        weight - self.lr * (gradient + self.decay * weight)
    }
}

/// The host's form of [`Update::Sgd`] with momentum.
pub(crate) struct Momentum {
    pub(crate) lr: f32,
    pub(crate) decay: f32,
    pub(crate) momentum: f32,
    pub(crate) entering: f32,
    pub(crate) nesterov: bool,
}

impl Rule<1> for Momentum {
    #[inline(always)]
    fn update(&self, weight: f32, gradient: f32, [buffer]: &mut [f32; 1]) -> f32 {
        let gradient = gradient + self.decay * weight;
        *buffer = self.momentum * *buffer + self.entering * gradient;
        let direction = if self.nesterov { gradient + self.momentum * *buffer } else { *buffer };
        weight - self.lr * direction
    }
}

impl Sgd {
    pub(crate) fn update(&self, options: &GroupOptions, step: u64) -> Update {
        Update::Sgd {
            lr: options.lr as f32,
            decay: options.weight_decay as f32,
            momentum: options.betas[0] as f32,
            // All of the gradient enters on the first step.
            entering: if step <= 1 { 1.0 } else { 1.0 - self.dampening as f32 },
            nesterov: self.nesterov,
        }
    }
}
