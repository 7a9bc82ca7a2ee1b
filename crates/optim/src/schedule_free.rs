//! Schedule-Free AdamW (Defazio, Yang, Mehta, Mishchenko, Khaled, Cutkosky: "The road less scheduled", 2024, algorithm 1).
//!
//! Three sequences: z takes steps, x is the mean of all z, weighted by the squares of their rates, and y lies between them.
//! Gradients are taken at y, which is what weights are during training; x is what a model is in the end
//! ([`ScheduleFree::average`]). There is no schedule but a warm-up, and no end that must be known.
//!
//! The state is how far z is ahead of y, which is zero before the first step as states are, so that x and z follow from weights
//! and state. What depends on the step alone (the rate, the share of z that enters the mean) is computed anew in each step.

use crate::GroupOptions;
use crate::stretch::{Rule, Stretch, run};

/// The fixed options.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScheduleFree {
    /// Added to the denominator.
    pub eps: f64,
    /// Steps over which the rate grows.
    pub warmup_steps: u64,
}

/// The names of its states.
pub const STATES: &[&str] = &["z_ahead", "exp_avg_sq"];

impl ScheduleFree {
    /// The share of the full rate that a step has, counting from 1: the root corrects the second moment's start at zero.
    fn share(&self, beta: f64, step: u64) -> f64 {
        let warm = if step < self.warmup_steps { step as f64 / self.warmup_steps as f64 } else { 1.0 };
        warm * (1.0 - beta.powf(step as f64)).sqrt()
    }

    /// What of the mean is the new z: the square of its rate over the sum of all. Only shares of the rate count, so a rate that is
    /// the same in all steps is none of it.
    fn entering(&self, beta: f64, step: u64) -> f64 {
        let warm: f64 = (1..=step.min(self.warmup_steps)).map(|step| self.share(beta, step).powi(2)).sum();
        // From there on, the sum of 1 − β^i.
        let full = step.saturating_sub(self.warmup_steps) as f64;
        let (first, last) = (self.warmup_steps as f64 + 1.0, step as f64 + 1.0);
        let decayed =
            if full > 0.0 && beta > 0.0 { (beta.powf(first) - beta.powf(last)) / (1.0 - beta) } else { 0.0 };
        self.share(beta, step).powi(2) / (warm + full - decayed)
    }

    /// One step over a stretch; `step` counts from 1.
    pub(crate) fn apply(&self, stretch: &mut Stretch<'_>, options: &GroupOptions, step: u64) {
        let [beta1, beta2] = options.betas;
        let step_size = options.lr * self.share(beta2, step);
        run(
            stretch,
            &Between {
                beta: beta1 as f32,
                rest: (1.0 - beta1) as f32,
                behind: behind(beta1),
                betas: [beta2 as f32, (1.0 - beta2) as f32],
                eps: self.eps as f32,
                step_size: step_size as f32,
                decay: options.weight_decay as f32,
                entering: self.entering(beta2, step) as f32,
            },
        );
    }

    /// The mean x of some weights, from the weights as they are trained and how far z is ahead of them.
    pub fn average(options: &GroupOptions, weights: &mut [f32], ahead: &[f32]) {
        let behind = behind(options.betas[0]);
        weights.iter_mut().zip(ahead).for_each(|(weight, ahead)| *weight -= behind * ahead);
    }
}

/// How far x is behind y, in units of what z is ahead.
fn behind(beta: f64) -> f32 {
    ((1.0 - beta) / beta) as f32
}

struct Between {
    beta: f32,
    rest: f32,
    behind: f32,
    betas: [f32; 2],
    eps: f32,
    step_size: f32,
    decay: f32,
    entering: f32,
}

impl Rule<2> for Between {
    #[inline(always)]
    fn update(&self, weight: f32, gradient: f32, [ahead, square]: &mut [f32; 2]) -> f32 {
        *square = self.betas[0] * *square + self.betas[1] * gradient * gradient;
        let (z, x) = (weight + *ahead, weight - self.behind * *ahead);
        let z = z - self.step_size * (gradient / (square.sqrt() + self.eps) + self.decay * weight);
        let x = x + self.entering * (z - x);
        let y = self.rest * z + self.beta * x;
        *ahead = z - y;
        y
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Copy16, Gradient};

    /// The algorithm as the paper writes it, in f64, with all three sequences.
    fn paper(options: &GroupOptions, free: &ScheduleFree, steps: u64, first: f64) -> [f64; 3] {
        let [beta1, beta2] = options.betas;
        let (mut z, mut x, mut v, mut squares) = (first, first, 0.0, 0.0);
        for t in 1..=steps {
            let y = (1.0 - beta1) * z + beta1 * x;
            let g = gradient(y);
            v = beta2 * v + (1.0 - beta2) * g * g;
            let warm =
                if free.warmup_steps > 0 { (t as f64 / free.warmup_steps as f64).min(1.0) } else { 1.0 };
            let rate = options.lr * (1.0 - beta2.powf(t as f64)).sqrt() * warm;
            z -= rate * g / (v.sqrt() + free.eps) + rate * options.weight_decay * y;
            squares += rate * rate;
            let c = rate * rate / squares;
            x = (1.0 - c) * x + c * z;
        }
        [x, (1.0 - beta1) * z + beta1 * x, z]
    }

    fn gradient(y: f64) -> f64 {
        2.0 * (y - 0.3) + (5.0 * y).sin()
    }

    #[test]
    fn sixty_steps_are_the_papers() {
        let device = ferrospeed_cpu::with_threads(1);
        for warmup_steps in [0, 1, 7] {
            let free = ScheduleFree { eps: 1e-8, warmup_steps };
            let options = GroupOptions { lr: 0.02, weight_decay: 0.1, betas: [0.9, 0.99] };
            let (mut weights, mut ahead, mut square) = ([0.9f32, -0.4], [0.0; 2], [0.0; 2]);
            for step in 1..=60 {
                let gradients = weights.map(|weight| gradient(f64::from(weight)) as f32);
                let mut stretch = Stretch {
                    weights: &mut weights,
                    gradient: Gradient::F32(&gradients),
                    gradient_factor: 1.0,
                    states: vec![&mut ahead, &mut square],
                    copy: Copy16::None,
                    device: &device,
                };
                free.apply(&mut stretch, &options, step);
            }
            let mut average = weights;
            ScheduleFree::average(&options, &mut average, &ahead);
            for (index, first) in [0.9, -0.4].into_iter().enumerate() {
                let [x, y, z] = paper(&options, &free, 60, first);
                let got = [average[index], weights[index], weights[index] + ahead[index]].map(f64::from);
                for (got, want) in got.into_iter().zip([x, y, z]) {
                    assert!((got - want).abs() < 1e-5, "warm-up {warmup_steps}: {got}, not {want}");
                }
            }
        }
    }
}
