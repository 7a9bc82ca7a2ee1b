//! The number format of training.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::Reader;

/// A floating-point format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DataType {
    /// 32 bits.
    Fp32,
    /// 16 bits with 5 of exponent.
    Fp16,
    /// 16 bits with 8 of exponent.
    Bf16,
}

/// The number format of weights and activations. Master weights are fp32 unless fp16 says otherwise.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Precision {
    /// Everything in fp32.
    Fp32,
    /// bfloat16.
    Bf16 {
        /// Add each gradient to the fp32 buffer as it is produced.
        immediate_grad_update: bool,
    },
    /// Half precision with a scaled loss.
    Fp16 {
        /// How the loss is scaled.
        loss_scale: LossScale,
        /// Cast inputs to half precision.
        auto_cast: bool,
        /// Keep master weights and gradients in half precision.
        half_master_weights: bool,
    },
}

/// How the loss is scaled in half precision.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LossScale {
    /// By a constant.
    Static(f64),
    /// By what has not overflowed lately.
    Dynamic {
        /// The scale starts at two to this power.
        initial_power: u32,
        /// Steps without overflow before it doubles.
        window: u64,
        /// Overflows before it halves.
        hysteresis: u64,
        /// Refill the hysteresis at every step without overflow.
        consecutive_hysteresis: bool,
        /// It never falls below this.
        minimum: f64,
    },
}

impl Precision {
    /// The format of weights and activations.
    pub fn data_type(self) -> DataType {
        match self {
            Precision::Fp32 => DataType::Fp32,
            Precision::Bf16 { .. } => DataType::Bf16,
            Precision::Fp16 { .. } => DataType::Fp16,
        }
    }
}

impl DataType {
    /// Bytes per element.
    pub fn bytes(self) -> u64 {
        match self {
            DataType::Fp32 => 4,
            DataType::Fp16 | DataType::Bf16 => 2,
        }
    }
}

pub(super) fn build(full: &Map<String, Value>) -> Result<Precision, String> {
    let read = Reader(full);
    if read.get("bf16.enabled")? {
        return Ok(Precision::Bf16 { immediate_grad_update: read.get("bf16.immediate_grad_update")? });
    }
    if !read.get::<bool>("fp16.enabled")? {
        return Ok(Precision::Fp32);
    }
    let scale: f64 = read.get("fp16.loss_scale")?;
    let loss_scale = if scale > 0.0 {
        LossScale::Static(scale)
    } else {
        LossScale::Dynamic {
            initial_power: read.get("fp16.initial_scale_power")?,
            window: read.get("fp16.loss_scale_window")?,
            hysteresis: read.get("fp16.hysteresis")?,
            consecutive_hysteresis: read.get("fp16.consecutive_hysteresis")?,
            minimum: read.get("fp16.min_loss_scale")?,
        }
    };
    Ok(Precision::Fp16 {
        loss_scale,
        auto_cast: read.get("fp16.auto_cast")?,
        half_master_weights: read.get("fp16.fp16_master_weights_and_grads")?,
    })
}
