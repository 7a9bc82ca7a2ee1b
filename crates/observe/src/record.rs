//! One record per step, one per validation.

use std::collections::BTreeMap;

use crate::routing::LayerRouting;
use serde::{Deserialize, Deserializer, Serialize};

/// What happened in one step. Numbers are written in full, so that two runs can be compared bit for bit; one that is
/// NaN or infinite is written as `null` and read as NaN, for JSON has neither and a diverged run must be readable.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct StepRecord {
    /// Which step, from 1.
    pub step: u64,
    /// The mean loss over the micro-batches of all ranks that have something to predict; not a number where none has.
    #[serde(deserialize_with = "null_as_nan")]
    pub loss: f32,
    /// Whether no micro-batch had anything to predict, so that there is no loss.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub no_targets: bool,
    /// The learning rate of the first group in this step.
    #[serde(deserialize_with = "null_as_nan")]
    pub lr: f64,
    /// The norm of the averaged gradient before clipping; absent when the step was skipped.
    pub grad_norm: Option<f64>,
    /// Tokens seen by all ranks so far.
    pub tokens: u64,
    /// Tokens per second of all ranks in this step.
    #[serde(deserialize_with = "null_as_nan")]
    pub tokens_per_s: f64,
    /// How long the step took.
    #[serde(deserialize_with = "null_as_nan")]
    pub step_ms: f64,
    /// Of that, forward.
    #[serde(deserialize_with = "null_as_nan")]
    pub forward_ms: f64,
    /// Of that, backward with the wait for reductions.
    #[serde(deserialize_with = "null_as_nan")]
    pub backward_ms: f64,
    /// Of that, the optimizer with the wait for gathers.
    #[serde(deserialize_with = "null_as_nan")]
    pub optimizer_ms: f64,
    /// Floating-point operations per second of all ranks, by the model's formula.
    #[serde(deserialize_with = "null_as_nan")]
    pub flops_per_s: f64,
    /// Bytes held at most during the step on rank 0, by category, and under `total` by all of them together.
    pub memory_bytes: BTreeMap<String, u64>,
    /// Whether nothing was updated because a gradient was not a number.
    pub skipped: bool,
    /// What the loss was multiplied by.
    #[serde(deserialize_with = "null_as_nan")]
    pub loss_scale: f64,
    /// Of a mixture of experts: where its routers sent tokens.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routing: Vec<LayerRouting>,
    /// Where there are several ranks: what each of them did meanwhile, in their order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranks: Vec<RankTimes>,
    /// Where there are several ranks, and it changed: what each of them held at most, as in `memory_bytes`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rank_memory_bytes: Vec<BTreeMap<String, u64>>,
    /// Where it was asked for: the norm of the averaged gradient of each layer, before clipping.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layer_norms: Vec<(String, f64)>,
    /// What the objective says besides the loss, such as rewards of answers, over all ranks.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub measures: BTreeMap<String, f64>,
}

impl StepRecord {
    /// The loss, of a step that has one.
    pub fn measured_loss(&self) -> Option<f32> {
        (!self.no_targets).then_some(self.loss)
    }
}

/// What one rank did in a step.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct RankTimes {
    /// Forward.
    pub forward_ms: f64,
    /// Backward, without the wait.
    pub backward_ms: f64,
    /// The wait for reductions after backward: for slower ranks, and for the link.
    pub wait_ms: f64,
    /// The optimizer, with the wait for gathers.
    pub optimizer_ms: f64,
}

/// What a validation found.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct EvalRecord {
    /// After which step.
    pub step: u64,
    /// The mean loss. One that is no number is written as `null` and read as NaN.
    #[serde(deserialize_with = "null_as_nan")]
    pub loss: f32,
    /// Over how many tokens.
    pub tokens: u64,
    /// What the objective says besides the loss.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub measures: BTreeMap<String, f64>,
}

pub(crate) fn null_as_nan<'de, D, F>(deserializer: D) -> Result<F, D::Error>
where
    D: Deserializer<'de>,
    F: Deserialize<'de> + From<f32>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_else(|| f32::NAN.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_of_numbers_that_json_lacks_reads_back() {
        let record = StepRecord {
            step: 1,
            loss: f32::NAN,
            no_targets: true,
            lr: f64::NAN,
            grad_norm: Some(f64::NAN),
            tokens: 0,
            tokens_per_s: f64::INFINITY,
            step_ms: 0.0,
            forward_ms: 0.0,
            backward_ms: 0.0,
            optimizer_ms: 0.1 + 0.2,
            flops_per_s: f64::INFINITY,
            memory_bytes: BTreeMap::new(),
            skipped: true,
            loss_scale: f64::INFINITY,
            routing: Vec::new(),
            ranks: Vec::new(),
            rank_memory_bytes: Vec::new(),
            layer_norms: Vec::new(),
            measures: BTreeMap::new(),
        };
        let read: StepRecord = serde_json::from_str(&serde_json::to_string(&record).unwrap()).unwrap();
        assert!(
            read.loss.is_nan() && read.lr.is_nan() && read.flops_per_s.is_nan() && read.loss_scale.is_nan()
        );
        assert_eq!((read.grad_norm, read.measured_loss()), (None, None));
        assert_eq!(read.optimizer_ms.to_bits(), record.optimizer_ms.to_bits());
    }

    #[test]
    fn a_diverged_loss_survives_the_log() {
        let text = serde_json::to_string(&EvalRecord {
            step: 1,
            loss: f32::INFINITY,
            tokens: 2,
            ..EvalRecord::default()
        })
        .unwrap();
        assert_eq!(text, r#"{"step":1,"loss":null,"tokens":2}"#);
        let read: EvalRecord = serde_json::from_str(&text).unwrap();
        assert!(read.loss.is_nan());
        assert!(serde_json::from_str::<EvalRecord>(r#"{"step":1,"tokens":2}"#).is_err());
    }
}
