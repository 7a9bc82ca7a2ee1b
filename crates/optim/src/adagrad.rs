//! Adagrad (Duchi, Hazan, Singer, 2011). The decayed gradient is used throughout.

use ferrospeed_tensor::backend::Update;

use crate::GroupOptions;
use crate::stretch::Rule;

/// Adagrad's fixed options.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adagrad {
    /// Added to the denominator.
    pub eps: f64,
}

/// The host's form of [`Update::Adagrad`].
pub(crate) struct Squares {
    pub(crate) lr: f32,
    pub(crate) decay: f32,
    pub(crate) eps: f32,
}

impl Rule<1> for Squares {
    #[inline(always)]
    fn update(&self, weight: f32, gradient: f32, [sum]: &mut [f32; 1]) -> f32 {
        let gradient = gradient + self.decay * weight;
        *sum += gradient * gradient;
        weight - self.lr * gradient / (sum.sqrt() + self.eps)
    }
}

impl Adagrad {
    pub(crate) fn update(&self, options: &GroupOptions) -> Update {
        Update::Adagrad { lr: options.lr as f32, decay: options.weight_decay as f32, eps: self.eps as f32 }
    }
}
