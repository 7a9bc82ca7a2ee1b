//! Lion (Chen et al.: "Symbolic discovery of optimization algorithms", 2023). Where the update is exactly zero the
//! weight only decays, as in the paper.

use ferrospeed_tensor::backend::Update;

use crate::GroupOptions;
use crate::stretch::Rule;

/// Lion has no fixed options.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lion;

/// The host's form of [`Update::Lion`].
pub(crate) struct Sign {
    pub(crate) lr: f32,
    pub(crate) shrink: f32,
    pub(crate) betas: [f32; 2],
    pub(crate) rest: [f32; 2],
}

impl Rule<1> for Sign {
    #[inline(always)]
    fn update(&self, weight: f32, gradient: f32, [m]: &mut [f32; 1]) -> f32 {
        let direction = self.betas[0] * *m + self.rest[0] * gradient;
        *m = self.betas[1] * *m + self.rest[1] * gradient;
        let up = if direction > 0.0 { self.lr } else { 0.0 };
        let down = if direction < 0.0 { self.lr } else { 0.0 };
        weight * self.shrink - up + down
    }
}

impl Lion {
    pub(crate) fn update(&self, options: &GroupOptions) -> Update {
        Update::Lion {
            lr: options.lr as f32,
            shrink: (1.0 - options.lr * options.weight_decay) as f32,
            betas: options.betas.map(|beta| beta as f32),
            rest: options.rest(),
        }
    }
}
