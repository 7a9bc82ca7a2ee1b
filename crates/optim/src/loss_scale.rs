//! Loss scaling: keeps small half-precision gradients from vanishing (Micikevicius et al., "Mixed precision
//! training", 2018).
//!
//! The loss is multiplied by [`LossScaler::scale`], the gradients are divided by *the same* scale, then
//! [`LossScaler::update`] is told whether they overflowed. A static scale never moves. A dynamic one halves on overflow,
//! once its patience (`hysteresis`) is used up, doubles after a window without, and is an error at its floor.
//!
//! Scales are powers of two unless the user says otherwise, so scaling and unscaling lose nothing.

use ferrospeed_config::{LossScale, Precision};
use serde::{Deserialize, Serialize};

use crate::error::{OptimError, Result};

/// How a dynamic scale moves.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Policy {
    /// The scale of the first step.
    pub initial: f64,
    /// What the scale is multiplied and divided by.
    pub factor: f64,
    /// Steps without overflow before it grows.
    pub window: u64,
    /// It never falls below this: an overflow there is an error.
    pub minimum: f64,
    /// Overflows that are tolerated before it falls; 1 tolerates none.
    pub hysteresis: u64,
    /// Whether every step without overflow restores the tolerance, not only growth.
    pub consecutive_hysteresis: bool,
}

/// What of a scaler is saved.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum LossScalerState {
    /// A scale that never moves.
    Static {
        /// The scale.
        scale: f64,
    },
    /// A scale that moves.
    Dynamic {
        /// The scale.
        scale: f64,
        /// Updates so far.
        iteration: u64,
        /// The update that last saw an overflow, counting from 0; −1 for none.
        last_overflow_iteration: i64,
        /// Overflows that are still tolerated, plus one.
        hysteresis_left: u64,
    },
}

/// A loss scale and what moves it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossScaler {
    state: LossScalerState,
    /// `None` for a scale that never moves.
    policy: Option<Policy>,
}

impl LossScaler {
    /// A scale that never moves; 1 for fp32 and bf16.
    pub fn fixed(scale: f64) -> LossScaler {
        LossScaler { state: LossScalerState::Static { scale }, policy: None }
    }

    /// A scale that moves.
    pub fn dynamic(policy: Policy) -> LossScaler {
        let state = LossScalerState::Dynamic {
            scale: policy.initial,
            iteration: 0,
            last_overflow_iteration: -1,
            hysteresis_left: policy.hysteresis,
        };
        LossScaler { state, policy: Some(policy) }
    }

    /// The configured scaler.
    pub fn from_config(precision: Precision) -> LossScaler {
        match precision {
            Precision::Fp32 | Precision::Bf16 { .. } => LossScaler::fixed(1.0),
            Precision::Fp16 { loss_scale: LossScale::Static(scale), .. } => LossScaler::fixed(scale),
            Precision::Fp16 {
                loss_scale:
                    LossScale::Dynamic { initial_power, window, hysteresis, consecutive_hysteresis, minimum },
                ..
            } => LossScaler::dynamic(Policy {
                initial: 2f64.powi(initial_power as i32),
                factor: 2.0,
                window,
                minimum,
                hysteresis,
                consecutive_hysteresis,
            }),
        }
    }

    /// What the loss of this step is multiplied by.
    pub fn scale(&self) -> f64 {
        match self.state {
            LossScalerState::Static { scale } | LossScalerState::Dynamic { scale, .. } => scale,
        }
    }

    /// Whether the scale moves.
    pub fn is_dynamic(&self) -> bool {
        self.policy.is_some()
    }

    /// Overflows that are still tolerated before the scale falls, plus one; `None` for a scale that never moves.
    pub fn hysteresis_left(&self) -> Option<u64> {
        match self.state {
            LossScalerState::Static { .. } => None,
            LossScalerState::Dynamic { hysteresis_left, .. } => Some(hysteresis_left),
        }
    }

    /// Learns whether the gradients of this step overflowed. Every step counts, skipped or not.
    ///
    /// An overflow at the minimum is an error; the state is then as before.
    pub fn update(&mut self, overflow: bool) -> Result<()> {
        let (
            Some(policy),
            LossScalerState::Dynamic { scale, iteration, last_overflow_iteration, hysteresis_left },
        ) = (self.policy, &mut self.state)
        else {
            return Ok(());
        };
        let clean_steps = i128::from(*iteration) - i128::from(*last_overflow_iteration);
        if overflow {
            if *hysteresis_left > 1 {
                *hysteresis_left -= 1;
            } else if *scale <= policy.minimum {
                return Err(OptimError::LossScaleFloor { step: *iteration + 1, scale: *scale });
            } else {
                *scale = (*scale / policy.factor).max(policy.minimum);
            }
            *last_overflow_iteration = *iteration as i64;
        } else {
            let window = i128::from(policy.window.max(1));
            let grows = clean_steps % window == 0;
            if policy.consecutive_hysteresis || grows {
                *hysteresis_left = policy.hysteresis;
            }
            if grows {
                *scale = (*scale * policy.factor).min(f64::MAX);
            }
        }
        *iteration += 1;
        Ok(())
    }

    /// Sets the scale by hand. A dynamic scale moves on from there.
    pub fn set_scale(&mut self, new: f64) -> Result<()> {
        check_scale(new)?;
        match &mut self.state {
            LossScalerState::Static { scale } | LossScalerState::Dynamic { scale, .. } => *scale = new,
        }
        Ok(())
    }

    /// The state, to be saved.
    pub fn state(&self) -> LossScalerState {
        self.state
    }

    /// Continues where a saved scaler stood, and says whether it did: a scaler of the other kind (static, dynamic)
    /// leaves this one as configured.
    pub fn load(&mut self, state: LossScalerState) -> Result<bool> {
        match (self.policy, state) {
            (
                Some(policy),
                LossScalerState::Dynamic { scale, iteration, last_overflow_iteration, hysteresis_left },
            ) => {
                check_scale(scale)?;
                if last_overflow_iteration < -1
                    || i128::from(last_overflow_iteration) >= i128::from(iteration.max(1))
                {
                    return Err(OptimError::Value {
                        what: "last_overflow_iteration of a saved loss scaler",
                        value: last_overflow_iteration.to_string(),
                        why: "it is -1 for none, or one of the updates so far",
                    });
                }
                // Another configuration may tolerate fewer overflows than the one that was saved.
                let hysteresis_left = hysteresis_left.clamp(1, policy.hysteresis.max(1));
                self.state =
                    LossScalerState::Dynamic { scale, iteration, last_overflow_iteration, hysteresis_left };
                Ok(true)
            }
            (None, LossScalerState::Static { scale }) => {
                check_scale(scale)?;
                Ok(scale == self.scale())
            }
            _ => Ok(false),
        }
    }
}

fn check_scale(scale: f64) -> Result<()> {
    if scale.is_finite() && scale > 0.0 {
        return Ok(());
    }
    Err(OptimError::Value {
        what: "the loss scale",
        value: scale.to_string(),
        why: "it is a positive number",
    })
}
