//! Adam (Kingma, Ba, 2015) and AdamW (Loshchilov, Hutter, 2019).

use crate::GroupOptions;
use crate::stretch::{Rule, Stretch, run};

/// Adam's fixed options.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adam {
    /// Added to the denominator.
    pub eps: f64,
    /// Whether moments are corrected for their start at zero.
    pub bias_correction: bool,
    /// Whether weights decay directly (AdamW) instead of through the gradient.
    pub decoupled: bool,
}

struct Update<const DECOUPLED: bool> {
    beta1: f32,
    beta2: f32,
    /// One less the betas, rounded after the subtraction: 1 − 0.999 in f32 is off in the fifth digit.
    rest1: f32,
    rest2: f32,
    eps: f32,
    decay: f32,
    step_size: f32,
    inverse_root_correction: f32,
}

impl<const DECOUPLED: bool> Rule<2> for Update<DECOUPLED> {
    #[inline(always)]
    fn update(&self, weight: f32, gradient: f32, [m, v]: &mut [f32; 2]) -> f32 {
        let (weight, gradient) = if DECOUPLED {
            (weight - self.decay * weight, gradient)
        } else {
            (weight, gradient + self.decay * weight)
        };
        *m = self.beta1 * *m + self.rest1 * gradient;
        *v = self.beta2 * *v + self.rest2 * gradient * gradient;
        let denominator = v.sqrt() * self.inverse_root_correction + self.eps;
        weight - self.step_size * (*m / denominator)
    }
}

impl Adam {
    pub(crate) fn step(&self, options: &GroupOptions, step: u64, stretch: &mut Stretch<'_>) {
        if self.decoupled {
            run(stretch, &self.rule::<true>(options, step, options.lr * options.weight_decay));
        } else {
            run(stretch, &self.rule::<false>(options, step, options.weight_decay));
        }
    }

    fn rule<const DECOUPLED: bool>(
        &self,
        options: &GroupOptions,
        step: u64,
        decay: f64,
    ) -> Update<DECOUPLED> {
        let [beta1, beta2] = options.betas;
        let step = i32::try_from(step).unwrap_or(i32::MAX);
        let correction = |beta: f64| if self.bias_correction { 1.0 - beta.powi(step) } else { 1.0 };
        Update {
            beta1: beta1 as f32,
            beta2: beta2 as f32,
            rest1: (1.0 - beta1) as f32,
            rest2: (1.0 - beta2) as f32,
            eps: self.eps as f32,
            decay: decay as f32,
            step_size: (options.lr / correction(beta1)) as f32,
            inverse_root_correction: (1.0 / correction(beta2).sqrt()) as f32,
        }
    }
}
