//! Random layer-token dropping (Yao et al., "Random-LTD", 2022): how many tokens the middle layers keep at a step, and
//! how many tokens all layers have seen.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{OptimError, Result};
use crate::pace::Growth;

/// What is fixed about token dropping.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RandomLtd {
    /// Tokens the dropping layers keep.
    pub kept: Growth,
    /// Layers of the model.
    pub layers: u64,
    /// Layers that drop tokens.
    pub dropping_layers: u64,
    /// Sequences per optimizer step.
    pub global_batch: u64,
}

#[derive(Deserialize)]
struct Section {
    total_layer_num: u64,
    random_ltd_layer_num: u64,
    global_batch_size: u64,
    random_ltd_schedule: Schedule,
    layer_token_lr_schedule: Option<LearningRate>,
}

#[derive(Deserialize)]
struct Schedule {
    min_value: u64,
    max_value: u64,
    schedule_type: String,
    schedule_config: Steps,
}

#[derive(Deserialize)]
struct Steps {
    require_steps: u64,
    seq_per_step: u64,
}

#[derive(Deserialize)]
struct LearningRate {
    #[serde(default)]
    enabled: bool,
}

impl RandomLtd {
    /// From the `random_ltd` section, to which the engine adds `global_batch_size`.
    pub fn from_section(section: &Value) -> Result<RandomLtd> {
        let fault = |why: String| OptimError::Section { section: "random_ltd", why };
        let read: Section =
            serde_json::from_value(section.clone()).map_err(|error| fault(error.to_string()))?;
        let schedule = read.random_ltd_schedule;
        if schedule.schedule_type != "fixed_linear" {
            return Err(fault(format!(
                "unknown schedule_type '{}': there is fixed_linear",
                schedule.schedule_type
            )));
        }
        if read.layer_token_lr_schedule.is_some_and(|rate| rate.enabled) {
            return Err(fault("layer_token_lr_schedule is not available: turn it off".into()));
        }
        if read.random_ltd_layer_num > read.total_layer_num {
            return Err(fault(format!(
                "{} of {} layers cannot drop tokens",
                read.random_ltd_layer_num, read.total_layer_num
            )));
        }
        let kept = Growth {
            min: schedule.min_value,
            max: schedule.max_value,
            steps: schedule.schedule_config.require_steps,
            multiple: schedule.schedule_config.seq_per_step,
            root_degree: 1.0,
        };
        if let Some((what, why)) = kept.flaw() {
            return Err(fault(format!("random_ltd_schedule: {what} is wrong: {why}")));
        }
        Ok(RandomLtd {
            kept,
            layers: read.total_layer_num,
            dropping_layers: read.random_ltd_layer_num,
            global_batch: read.global_batch_size,
        })
    }

    /// Tokens that all layers see in a step whose dropping layers keep `kept` tokens.
    pub fn layer_tokens(&self, kept: u64) -> u64 {
        let whole = self.kept.max.saturating_mul(self.layers - self.dropping_layers);
        self.global_batch.saturating_mul(kept.saturating_mul(self.dropping_layers).saturating_add(whole))
    }
}

/// What of the schedule is saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RandomLtdState {
    /// The step that was counted last; −1 before any.
    pub current_step: i64,
    /// Tokens kept.
    pub current_value: u64,
    /// Tokens that all layers have seen.
    pub consumed_layer_tokens: u64,
}

/// The schedule and where it stands.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RandomLtdScheduler {
    fixed: RandomLtd,
    state: RandomLtdState,
}

impl RandomLtdScheduler {
    /// At the start.
    pub fn new(fixed: RandomLtd) -> RandomLtdScheduler {
        let state =
            RandomLtdState { current_step: -1, current_value: fixed.kept.min, consumed_layer_tokens: 0 };
        RandomLtdScheduler { fixed, state }
    }

    /// Moves to a step and gives the tokens kept. A step is counted once, however often it is asked for; once nothing
    /// is dropped any more, that stays so.
    pub fn update(&mut self, step: u64) -> u64 {
        let state = &mut self.state;
        if state.current_value < self.fixed.kept.max {
            state.current_value = self.fixed.kept.at(step);
        }
        let step = i64::try_from(step).unwrap_or(i64::MAX);
        if state.current_step != step {
            let tokens = self.fixed.layer_tokens(state.current_value);
            state.consumed_layer_tokens = state.consumed_layer_tokens.saturating_add(tokens);
            state.current_step = step;
        }
        state.current_value
    }

    /// To be saved; what was last counted.
    pub fn state(&self) -> RandomLtdState {
        self.state
    }

    /// Continues where a saved one stood.
    pub fn load(&mut self, state: RandomLtdState) {
        self.state = state;
    }
}
