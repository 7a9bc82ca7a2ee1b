//! One record per step, one per validation.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};

/// What happened in one step. Numbers are written in full, so that two runs can be compared bit for bit.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    /// Which step, from 1.
    pub step: u64,
    /// The mean loss over ranks and micro-batches. One that is no number is written as `null` and read as NaN.
    #[serde(deserialize_with = "null_as_nan")]
    pub loss: f32,
    /// The learning rate of the first group in this step.
    pub lr: f64,
    /// The norm of the averaged gradient before clipping; absent when the step was skipped.
    pub grad_norm: Option<f64>,
    /// Tokens seen by all ranks so far.
    pub tokens: u64,
    /// Tokens per second of all ranks in this step.
    pub tokens_per_s: f64,
    /// How long the step took.
    pub step_ms: f64,
    /// Of that, forward.
    pub forward_ms: f64,
    /// Of that, backward with the wait for reductions.
    pub backward_ms: f64,
    /// Of that, the optimizer with the wait for gathers.
    pub optimizer_ms: f64,
    /// Floating-point operations per second of all ranks, by the model's formula.
    pub flops_per_s: f64,
    /// Bytes held at most during the step on rank 0, by category.
    pub memory_bytes: BTreeMap<String, u64>,
    /// Whether nothing was updated because a gradient was not a number.
    pub skipped: bool,
    /// What the loss was multiplied by.
    pub loss_scale: f64,
}

/// What a validation found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EvalRecord {
    /// After which step.
    pub step: u64,
    /// The mean loss. One that is no number is written as `null` and read as NaN.
    #[serde(deserialize_with = "null_as_nan")]
    pub loss: f32,
    /// Over how many tokens.
    pub tokens: u64,
}

/// JSON has no NaN and no infinity: a run that diverged must still be readable.
fn null_as_nan<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f32, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f32::NAN))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_diverged_loss_survives_the_log() {
        let text = serde_json::to_string(&EvalRecord { step: 1, loss: f32::INFINITY, tokens: 2 }).unwrap();
        assert_eq!(text, r#"{"step":1,"loss":null,"tokens":2}"#);
        let read: EvalRecord = serde_json::from_str(&text).unwrap();
        assert!(read.loss.is_nan());
        assert!(serde_json::from_str::<EvalRecord>(r#"{"step":1,"tokens":2}"#).is_err());
    }
}
