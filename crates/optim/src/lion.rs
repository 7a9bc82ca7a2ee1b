//! Lion (Chen et al.: "Symbolic discovery of optimization algorithms", 2023). Where the update is exactly zero the
//! weight only decays, as in the paper.

use crate::GroupOptions;
use crate::stretch::{Rule, Stretch, run};

/// Lion has no fixed options.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lion;

struct Update {
    lr: f32,
    shrink: f32,
    beta1: f32,
    beta2: f32,
    /// One less the betas, rounded after the subtraction.
    rest1: f32,
    rest2: f32,
}

impl Rule<1> for Update {
    #[inline(always)]
    fn update(&self, weight: f32, gradient: f32, [m]: &mut [f32; 1]) -> f32 {
        let direction = self.beta1 * *m + self.rest1 * gradient;
        *m = self.beta2 * *m + self.rest2 * gradient;
        let up = if direction > 0.0 { self.lr } else { 0.0 };
        let down = if direction < 0.0 { self.lr } else { 0.0 };
        weight * self.shrink - up + down
    }
}

impl Lion {
    pub(crate) fn step(&self, options: &GroupOptions, stretch: &mut Stretch<'_>) {
        let [beta1, beta2] = options.betas;
        let shrink = (1.0 - options.lr * options.weight_decay) as f32;
        let rule = Update {
            lr: options.lr as f32,
            shrink,
            beta1: beta1 as f32,
            beta2: beta2 as f32,
            rest1: (1.0 - beta1) as f32,
            rest2: (1.0 - beta2) as f32,
        };
        run(stretch, &rule);
    }
}
