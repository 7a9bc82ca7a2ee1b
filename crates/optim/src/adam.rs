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
        *m = self.beta1 * *m + (1.0 - self.beta1) * gradient;
        *v = self.beta2 * *v + (1.0 - self.beta2) * gradient * gradient;
        let denominator = v.sqrt() * self.inverse_root_correction + self.eps;
        weight - self.step_size * (*m / denominator)
    }
}

impl Adam {
    pub(crate) fn step(&self, options: &GroupOptions, step: u64, stretch: &mut Stretch<'_>) {
        let [beta1, beta2] = options.betas;
        let correction = |beta: f64| if self.bias_correction { 1.0 - beta.powi(step as i32) } else { 1.0 };
        let common = |decay: f64| (decay as f32, (options.lr / correction(beta1)) as f32);
        let (beta1_f32, beta2_f32, eps) = (beta1 as f32, beta2 as f32, self.eps as f32);
        let inverse_root_correction = (1.0 / correction(beta2).sqrt()) as f32;
        if self.decoupled {
            let (decay, step_size) = common(options.lr * options.weight_decay);
            let rule = Update::<true> {
                beta1: beta1_f32,
                beta2: beta2_f32,
                eps,
                decay,
                step_size,
                inverse_root_correction,
            };
            run(stretch, &rule);
        } else {
            let (decay, step_size) = common(options.weight_decay);
            let rule = Update::<false> {
                beta1: beta1_f32,
                beta2: beta2_f32,
                eps,
                decay,
                step_size,
                inverse_root_correction,
            };
            run(stretch, &rule);
        }
    }
}
