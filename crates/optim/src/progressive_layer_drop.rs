//! Progressive layer dropping (Zhang, He, "Accelerating training of transformer-based language models with
//! progressive layer dropping", 2020): the share of layers that a step keeps, falling from 1 to `theta`.

use crate::error::{OptimError, Result};

/// How the share falls.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ProgressiveLayerDrop {
    theta: f64,
    gamma: f64,
}

impl ProgressiveLayerDrop {
    /// Falls towards `theta` (0 to 1) at the rate `gamma` (0 or more).
    pub fn new(theta: f64, gamma: f64) -> Result<ProgressiveLayerDrop> {
        if !(0.0..=1.0).contains(&theta) {
            return Err(OptimError::Value {
                what: "progressive_layer_drop.theta",
                value: theta.to_string(),
                why: "it is a share of layers, from 0 to 1",
            });
        }
        if !(gamma.is_finite() && gamma >= 0.0) {
            return Err(OptimError::Value {
                what: "progressive_layer_drop.gamma",
                value: gamma.to_string(),
                why: "it is a rate, 0 or more",
            });
        }
        Ok(ProgressiveLayerDrop { theta, gamma })
    }

    /// The probability to keep a layer at an optimizer step; 1 at step 0.
    pub fn keep_probability(&self, step: u64) -> f64 {
        (1.0 - self.theta) * (-self.gamma * step as f64).exp() + self.theta
    }
}
