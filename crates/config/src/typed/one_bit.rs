//! Optimizers that exchange momentum at one bit per value, with their parameters.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::Reader;

/// What all of them have, and which it is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OneBit {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the two moments.
    pub betas: [f64; 2],
    /// Added to the denominator.
    pub eps: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// Which.
    pub rule: OneBitRule,
}

/// The rules.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum OneBitRule {
    /// 1-bit Adam.
    Adam {
        /// The last step with averaged gradients.
        freeze_step: u64,
    },
    /// 0/1 Adam.
    ZeroOne(ZeroOneAdam),
    /// 1-bit LAMB.
    Lamb(OneBitLamb),
}

/// Parameters of 0/1 Adam.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct ZeroOneAdam {
    /// The step after which the second moment stays as it is.
    pub var_freeze_step: u64,
    /// Updates before the second moment's interval doubles.
    pub var_update_scaler: u64,
    /// Steps before the interval of local steps doubles.
    pub local_step_scaler: u64,
    /// The longest interval of local steps.
    pub local_step_clipper: u64,
}

/// Parameters of 1-bit LAMB.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct OneBitLamb {
    /// The last step with averaged gradients.
    pub freeze_step: u64,
    /// Largest trust ratio.
    pub max_coeff: f64,
    /// Smallest trust ratio.
    pub min_coeff: f64,
    /// Decay of the averaged trust ratio.
    pub coeff_beta: f64,
    /// Largest correction of the frozen trust ratio.
    pub factor_max: f64,
    /// Smallest correction of the frozen trust ratio.
    pub factor_min: f64,
    /// Largest change of the correction per step.
    pub factor_threshold: f64,
}

impl OneBit {
    /// Values per parameter that its state holds. (0/1 Adam counts the way of its local steps.)
    pub(super) fn states_per_parameter(&self) -> u64 {
        match self.rule {
            OneBitRule::Adam { .. } => 2,
            OneBitRule::ZeroOne(_) | OneBitRule::Lamb(_) => 3,
        }
    }
}

/// The configured optimizer, if it is one of these.
pub(super) fn optimizer(name: &str, full: &Map<String, Value>) -> Result<Option<OneBit>, String> {
    let read = Reader(full);
    let params = "optimizer.params";
    let rule = match name {
        "OneBitAdam" => OneBitRule::Adam { freeze_step: read.get("optimizer.params.freeze_step")? },
        "ZeroOneAdam" => OneBitRule::ZeroOne(read.get(params)?),
        "OneBitLamb" => OneBitRule::Lamb(read.get(params)?),
        _ => return Ok(None),
    };
    Ok(Some(OneBit {
        lr: read.get("optimizer.params.lr")?,
        betas: read.get("optimizer.params.betas")?,
        eps: read.get("optimizer.params.eps")?,
        weight_decay: read.get("optimizer.params.weight_decay")?,
        rule,
    }))
}
