//! Adam (Kingma, Ba, 2015) and AdamW (Loshchilov, Hutter, 2019).

use ferrospeed_tensor::backend::Update;

use crate::GroupOptions;
use crate::stretch::Rule;

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

/// The host's form of [`Update::Adam`].
pub(crate) struct Moments<const DECOUPLED: bool> {
    pub(crate) betas: [f32; 2],
    pub(crate) rest: [f32; 2],
    pub(crate) eps: f32,
    pub(crate) decay: f32,
    pub(crate) step_size: f32,
    pub(crate) inverse_root_correction: f32,
}

impl<const DECOUPLED: bool> Rule<2> for Moments<DECOUPLED> {
    #[inline(always)]
    fn update(&self, weight: f32, gradient: f32, [m, v]: &mut [f32; 2]) -> f32 {
        let (weight, gradient) = if DECOUPLED {
            (weight - self.decay * weight, gradient)
        } else {
            (weight, gradient + self.decay * weight)
        };
        *m = self.betas[0] * *m + self.rest[0] * gradient;
        *v = self.betas[1] * *v + self.rest[1] * gradient * gradient;
        let denominator = v.sqrt() * self.inverse_root_correction + self.eps;
        weight - self.step_size * (*m / denominator)
    }
}

impl Adam {
    pub(crate) fn update(&self, options: &GroupOptions, step: u64) -> Update {
        let [beta1, beta2] = options.betas;
        let step = i32::try_from(step).unwrap_or(i32::MAX);
        let correction = |beta: f64| if self.bias_correction { 1.0 - beta.powi(step) } else { 1.0 };
        let decay = if self.decoupled { options.lr * options.weight_decay } else { options.weight_decay };
        Update::Adam {
            decoupled: self.decoupled,
            betas: options.betas.map(|beta| beta as f32),
            rest: options.rest(),
            eps: self.eps as f32,
            decay: decay as f32,
            step_size: (options.lr / correction(beta1)) as f32,
            inverse_root_correction: (1.0 / correction(beta2).sqrt()) as f32,
        }
    }
}
