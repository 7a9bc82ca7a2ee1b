//! LAMB (You et al.: "Large batch optimization for deep learning", 2020).
//!
//! Each parameter's update is scaled by ‖weights‖ / ‖update‖. A parameter may be spread over ranks, so a step is two
//! passes with the exchange of norms between them: [`Lamb::direction`] leaves the update in a buffer, the caller
//! finds both norms of each whole parameter (see [`crate::norm`]), [`Lamb::apply`] moves the weights.

use ferrospeed_tensor::backend::Update;

use crate::GroupOptions;
use crate::stretch::Rule;

/// LAMB's fixed options.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lamb {
    /// Added to the denominator.
    pub eps: f64,
    /// Whether it is added under the root.
    pub eps_inside_sqrt: bool,
    /// Whether moments are corrected for their start at zero.
    pub bias_correction: bool,
    /// The largest ratio.
    pub max_coeff: f64,
    /// The smallest ratio.
    pub min_coeff: f64,
}

/// The host's form of [`Update::LambDirection`]: states are the moments and the buffer for the update; the weight stays.
pub(crate) struct Direction {
    pub(crate) betas: [f32; 2],
    pub(crate) rest: [f32; 2],
    pub(crate) eps: f32,
    pub(crate) eps_inside: bool,
    pub(crate) decay: f32,
}

impl Rule<3> for Direction {
    #[inline(always)]
    fn update(&self, weight: f32, gradient: f32, [m, v, direction]: &mut [f32; 3]) -> f32 {
        *m = self.betas[0] * *m + self.rest[0] * gradient;
        *v = self.betas[1] * *v + self.rest[1] * gradient * gradient;
        let denominator = if self.eps_inside { (*v + self.eps).sqrt() } else { v.sqrt() + self.eps };
        *direction = *m / denominator + self.decay * weight;
        weight
    }
}

/// The host's form of [`Update::LambApply`].
pub(crate) struct Apply {
    pub(crate) step_size: f32,
}

impl Rule<0> for Apply {
    #[inline(always)]
    fn update(&self, weight: f32, direction: f32, _: &mut [f32; 0]) -> f32 {
        weight - self.step_size * direction
    }
}

impl Lamb {
    /// The first pass: updates the moments and leaves the update of each weight in the third state. Weights and their
    /// 16-bit copy stay as they are.
    pub fn direction(&self, options: &GroupOptions) -> Update {
        Update::LambDirection {
            betas: options.betas.map(|beta| beta as f32),
            rest: options.rest(),
            eps: self.eps as f32,
            eps_inside_sqrt: self.eps_inside_sqrt,
            decay: options.weight_decay as f32,
        }
    }

    /// The ratio for a parameter with these norms.
    pub fn coefficient(&self, weight_norm: f64, update_norm: f64) -> f64 {
        if weight_norm == 0.0 || update_norm == 0.0 {
            return 1.0;
        }
        (weight_norm / update_norm).clamp(self.min_coeff, self.max_coeff)
    }

    /// The second pass over one parameter's part, whose gradient is the direction.
    pub fn apply(&self, options: &GroupOptions, step: u64, coefficient: f64) -> Update {
        let correction = if self.bias_correction {
            let [beta1, beta2] = options.betas;
            let step = i32::try_from(step).unwrap_or(i32::MAX);
            (1.0 - beta2.powi(step)).sqrt() / (1.0 - beta1.powi(step))
        } else {
            1.0
        };
        Update::LambApply { step_size: (options.lr * correction * coefficient) as f32 }
    }
}
