//! Learning-rate schedules with their parameters.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::{Reader, TorchSchedule, torch};

/// The schedule and its parameters.
#[derive(Debug, Clone, PartialEq)]
pub enum Scheduler {
    /// A rate that grows, to find where training breaks.
    LrRangeTest(LrRangeTest),
    /// Up, down, and decay.
    OneCycle(OneCycle),
    /// Up, then constant.
    WarmupLr(WarmupLr),
    /// Up, then down in a line.
    WarmupDecayLr(WarmupDecayLr),
    /// Up, then down along a cosine.
    WarmupCosineLr(WarmupCosineLr),
    /// One of the framework's.
    Torch(TorchSchedule),
    /// Accepted, but nothing runs it yet.
    NotYet {
        /// Its canonical name.
        name: String,
        /// Its parameters, as they are given.
        params: Map<String, Value>,
    },
}

/// One number for all parameter groups, or one for each.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(untagged)]
pub enum PerGroup {
    /// For all.
    All(f64),
    /// For each.
    Each(Vec<f64>),
}

/// The shape of a warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WarmupType {
    /// Steep at first.
    Log,
    /// Straight.
    Linear,
}

/// Parameters of `LRRangeTest`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub struct LrRangeTest {
    /// Learning rate at the start.
    pub lr_range_test_min_lr: PerGroup,
    /// Steps per interval.
    pub lr_range_test_step_size: u64,
    /// Growth per interval.
    pub lr_range_test_step_rate: f64,
    /// Grow in stairs.
    pub lr_range_test_staircase: bool,
    /// Where the schedule stands at the start.
    pub last_batch_iteration: i64,
}

/// Parameters of `OneCycle`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct OneCycle {
    /// Learning rate at both ends.
    pub cycle_min_lr: f64,
    /// Learning rate at the middle.
    pub cycle_max_lr: f64,
    /// Decay after the cycle.
    pub decay_lr_rate: f64,
    /// Steps of the rising half.
    pub cycle_first_step_size: u64,
    /// Steps of the falling half; `None` means as many.
    pub cycle_second_step_size: Option<u64>,
    /// Steps per decay interval.
    pub decay_step_size: u64,
    /// Cycle the momentum as well.
    pub cycle_momentum: bool,
    /// Momentum at the middle.
    pub cycle_min_mom: f64,
    /// Momentum at the ends.
    pub cycle_max_mom: f64,
    /// Growth of the momentum after the cycle.
    pub decay_mom_rate: f64,
    /// Where the schedule stands at the start.
    pub last_batch_iteration: i64,
}

/// Parameters of `WarmupLR`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct WarmupLr {
    /// Learning rate at the start.
    pub warmup_min_lr: PerGroup,
    /// Learning rate after the warm-up; `None` is that of each group.
    pub warmup_max_lr: Option<PerGroup>,
    /// Steps of warm-up.
    pub warmup_num_steps: u64,
    /// Its shape.
    pub warmup_type: WarmupType,
    /// Where the schedule stands at the start.
    pub last_batch_iteration: i64,
}

/// Parameters of `WarmupDecayLR`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct WarmupDecayLr {
    /// Steps of the whole schedule.
    pub total_num_steps: u64,
    /// Learning rate at the start and at the end.
    pub warmup_min_lr: PerGroup,
    /// Learning rate after the warm-up.
    pub warmup_max_lr: PerGroup,
    /// Steps of warm-up.
    pub warmup_num_steps: u64,
    /// Its shape.
    pub warmup_type: WarmupType,
    /// Where the schedule stands at the start.
    pub last_batch_iteration: i64,
}

/// Parameters of `WarmupCosineLR`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct WarmupCosineLr {
    /// Steps of the whole schedule.
    pub total_num_steps: u64,
    /// Start of the warm-up, as a share of the learning rate.
    pub warmup_min_ratio: f64,
    /// Steps of warm-up.
    pub warmup_num_steps: u64,
    /// End of the decay, as a share of the learning rate.
    pub cos_min_ratio: f64,
    /// Shape of the warm-up.
    pub warmup_type: WarmupType,
    /// Where the schedule stands at the start.
    pub last_batch_iteration: i64,
}

pub(super) fn build(full: &Map<String, Value>) -> Result<Option<Scheduler>, String> {
    let read = Reader(full);
    let Some(name) = read.get::<Option<String>>("scheduler.type")? else { return Ok(None) };
    let params = "scheduler.params";
    if let Some(found) = torch::schedule(&name, full)? {
        return Ok(Some(Scheduler::Torch(found)));
    }
    Ok(Some(match name.as_str() {
        "LRRangeTest" => Scheduler::LrRangeTest(read.get(params)?),
        "OneCycle" => Scheduler::OneCycle(read.get(params)?),
        "WarmupLR" => Scheduler::WarmupLr(read.get(params)?),
        "WarmupDecayLR" => Scheduler::WarmupDecayLr(read.get(params)?),
        "WarmupCosineLR" => Scheduler::WarmupCosineLr(read.get(params)?),
        _ => Scheduler::NotYet { name, params: read.get::<Option<_>>(params)?.unwrap_or_default() },
    }))
}
