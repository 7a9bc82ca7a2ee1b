//! LAMB (You et al.: "Large batch optimization for deep learning", 2020).
//!
//! Each parameter's update is scaled by ‖weights‖ / ‖update‖. A parameter may be spread over ranks, so a step is two
//! passes with the exchange of norms between them: [`Lamb::direction`] leaves the update in a buffer, the caller
//! finds both norms of each whole parameter (see [`crate::norm`]), [`Lamb::apply`] moves the weights.

use crate::GroupOptions;
use crate::stretch::{Copy16, Gradient, Rule, Stretch, run};

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

struct Direction {
    beta1: f32,
    beta2: f32,
    /// One less the betas, rounded after the subtraction.
    rest1: f32,
    rest2: f32,
    eps: f32,
    eps_inside: bool,
    decay: f32,
}

/// States are the moments and the buffer for the update; the weight stays.
impl Rule<3> for Direction {
    #[inline(always)]
    fn update(&self, weight: f32, gradient: f32, [m, v, direction]: &mut [f32; 3]) -> f32 {
        *m = self.beta1 * *m + self.rest1 * gradient;
        *v = self.beta2 * *v + self.rest2 * gradient * gradient;
        let denominator = if self.eps_inside { (*v + self.eps).sqrt() } else { v.sqrt() + self.eps };
        *direction = *m / denominator + self.decay * weight;
        weight
    }
}

struct Apply {
    step_size: f32,
}

impl Rule<0> for Apply {
    #[inline(always)]
    fn update(&self, weight: f32, direction: f32, _: &mut [f32; 0]) -> f32 {
        weight - self.step_size * direction
    }
}

impl Lamb {
    /// The first pass: updates the moments and leaves the update of each weight in the third state.
    pub fn direction(&self, options: &GroupOptions, stretch: &mut Stretch<'_>) {
        let rule = Direction {
            beta1: options.betas[0] as f32,
            beta2: options.betas[1] as f32,
            rest1: (1.0 - options.betas[0]) as f32,
            rest2: (1.0 - options.betas[1]) as f32,
            eps: self.eps as f32,
            eps_inside: self.eps_inside_sqrt,
            decay: options.weight_decay as f32,
        };
        let copy = std::mem::replace(&mut stretch.copy, Copy16::None);
        run(stretch, &rule);
        stretch.copy = copy;
    }

    /// The ratio for a parameter with these norms.
    pub fn coefficient(&self, weight_norm: f64, update_norm: f64) -> f64 {
        if weight_norm == 0.0 || update_norm == 0.0 {
            return 1.0;
        }
        (weight_norm / update_norm).clamp(self.min_coeff, self.max_coeff)
    }

    /// The second pass over one parameter's part: `direction` is the stretch's gradient.
    pub fn apply(&self, options: &GroupOptions, step: u64, coefficient: f64, stretch: &mut Stretch<'_>) {
        let correction = if self.bias_correction {
            let [beta1, beta2] = options.betas;
            let step = i32::try_from(step).unwrap_or(i32::MAX);
            (1.0 - beta2.powi(step)).sqrt() / (1.0 - beta1.powi(step))
        } else {
            1.0
        };
        debug_assert!(matches!(stretch.gradient, Gradient::F32(_)) && stretch.gradient_factor == 1.0);
        run(stretch, &Apply { step_size: (options.lr * correction * coefficient) as f32 });
    }
}
