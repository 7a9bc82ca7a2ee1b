//! Adagrad (Duchi, Hazan, Singer, 2011). The decayed gradient is used throughout.

use crate::GroupOptions;
use crate::stretch::{Rule, Stretch, run};

/// Adagrad's fixed options.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adagrad {
    /// Added to the denominator.
    pub eps: f64,
}

struct Update {
    lr: f32,
    decay: f32,
    eps: f32,
}

impl Rule<1> for Update {
    #[inline(always)]
    fn update(&self, weight: f32, gradient: f32, [sum]: &mut [f32; 1]) -> f32 {
        let gradient = gradient + self.decay * weight;
        *sum += gradient * gradient;
        weight - self.lr * gradient / (sum.sqrt() + self.eps)
    }
}

impl Adagrad {
    pub(crate) fn step(&self, options: &GroupOptions, stretch: &mut Stretch<'_>) {
        run(
            stretch,
            &Update { lr: options.lr as f32, decay: options.weight_decay as f32, eps: self.eps as f32 },
        );
    }
}
