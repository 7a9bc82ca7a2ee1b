//! Stochastic gradient descent with momentum, optionally Nesterov's.

use crate::GroupOptions;
use crate::stretch::{Rule, Stretch, run};

/// SGD's fixed options. Momentum is `betas[0]` of the group.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sgd {
    /// Weakens the gradient that enters the momentum.
    pub dampening: f64,
    /// Whether the update looks one step ahead.
    pub nesterov: bool,
}

struct Plain {
    lr: f32,
    decay: f32,
}

impl Rule<0> for Plain {
    #[inline(always)]
    fn update(&self, weight: f32, gradient: f32, _: &mut [f32; 0]) -> f32 {
        weight - self.lr * (gradient + self.decay * weight)
    }
}

struct Momentum {
    lr: f32,
    decay: f32,
    momentum: f32,
    /// Share of the gradient that enters the buffer; all of it on the first step.
    entering: f32,
    nesterov: bool,
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
    pub(crate) fn step(&self, options: &GroupOptions, step: u64, stretch: &mut Stretch<'_>) {
        let (lr, decay, momentum) = (options.lr as f32, options.weight_decay as f32, options.betas[0] as f32);
        if momentum == 0.0 {
            return run(stretch, &Plain { lr, decay });
        }
        let entering = if step <= 1 { 1.0 } else { 1.0 - self.dampening as f32 };
        run(stretch, &Momentum { lr, decay, momentum, entering, nesterov: self.nesterov });
    }
}
