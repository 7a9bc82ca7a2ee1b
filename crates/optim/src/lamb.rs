//! LAMB (You et al.: "Large batch optimization for deep learning", 2020).
//!
//! Each parameter's update is scaled by ‖weights‖ / ‖update‖. A parameter may be spread over ranks, so a step is two
//! passes with the exchange of norms between them: [`Lamb::direction`] leaves the update in a buffer, the caller
//! finds both norms of each whole parameter (see [`crate::norm`]), [`Lamb::apply`] moves the weights. Who has no room for
//! the updates of all weights finds those of some again with [`Lamb::direction_again`].

use ferrospeed_tensor::backend::Update;

use crate::GroupOptions;
use crate::stretch::{Rule, Stretch, run};

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
        *direction = direction_of(weight, *m, *v, self.eps, self.eps_inside, self.decay);
        weight
    }
}

/// The update of a weight, before it is scaled.
#[inline(always)]
fn direction_of(weight: f32, m: f32, v: f32, eps: f32, eps_inside: bool, decay: f32) -> f32 {
    let denominator = if eps_inside { (v + eps).sqrt() } else { v.sqrt() + eps };
    m / denominator + decay * weight
}

/// What [`Direction`] left, from the moments that it left. What a stretch calls its gradient are the weights here, and its
/// weights are where the direction goes.
struct Again {
    eps: f32,
    eps_inside: bool,
    decay: f32,
}

impl Rule<2> for Again {
    #[inline(always)]
    fn update(&self, _: f32, weight: f32, [m, v]: &mut [f32; 2]) -> f32 {
        direction_of(weight, *m, *v, self.eps, self.eps_inside, self.decay)
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

    /// Finds what the first pass has found, when it has left the moments and the weights are as they were: the stretch's
    /// gradient are the weights, with a factor of one, and its weights become the direction.
    pub fn direction_again(&self, options: &GroupOptions, stretch: &mut Stretch<'_>) {
        let decay = options.weight_decay as f32;
        run(stretch, &Again { eps: self.eps as f32, eps_inside: self.eps_inside_sqrt, decay });
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

#[cfg(test)]
mod tests {

    use super::*;
    use crate::{Copy16, Gradient};

    #[test]
    fn a_direction_is_found_again_to_the_bit() {
        let device = ferrospeed_cpu::with_threads(1);
        for eps_inside_sqrt in [false, true] {
            let lamb =
                Lamb { eps: 1e-8, eps_inside_sqrt, bias_correction: true, max_coeff: 10.0, min_coeff: 0.01 };
            let options = GroupOptions { lr: 0.1, weight_decay: 0.01, betas: [0.9, 0.999] };
            let number = |i: usize| ((i * 7919 % 1013) as f32 - 506.0) / 37.0;
            let mut weights: Vec<f32> = (0..1000).map(number).collect();
            let gradient: Vec<f32> = (0..1000).map(|i| number(i + 77) / 3.0).collect();
            let (mut m, mut v) = (vec![0.0; 1000], vec![0.0; 1000]);
            let (mut first, mut again) = (vec![0.0; 1000], vec![0.0; 1000]);
            Stretch {
                weights: &mut weights,
                gradient: Gradient::F32(&gradient),
                gradient_factor: 0.7,
                states: vec![&mut m, &mut v, &mut first],
                copy: Copy16::None,
                device: &device,
            }
            .apply(&lamb.direction(&options));
            let mut stretch = Stretch {
                weights: &mut again,
                gradient: Gradient::F32(&weights),
                gradient_factor: 1.0,
                states: vec![&mut m, &mut v],
                copy: Copy16::None,
                device: &device,
            };
            lamb.direction_again(&options, &mut stretch);
            assert!(first.iter().zip(&again).all(|(a, b)| a.to_bits() == b.to_bits()));
            assert!(first.iter().any(|value| *value != 0.0));
        }
    }
}
