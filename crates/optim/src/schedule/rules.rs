//! The formulas of the configured schedules.
//!
//! All arithmetic is f64. Iterations below zero, before the first step, take the value that the schedule starts with.

use ferrospeed_config::{
    LrRangeTest, OneCycle, PerGroup, WarmupCosineLr, WarmupDecayLr, WarmupLr, WarmupType,
};

use super::{Rates, Schedule};
use crate::GroupOptions;

pub(super) fn of_group(value: &PerGroup, group: usize) -> f64 {
    match value {
        PerGroup::All(value) => *value,
        PerGroup::Each(list) => list[group],
    }
}

/// Smith, "Cyclical learning rates for training neural networks", 2017, section 3.3.
impl Schedule for LrRangeTest {
    fn rates(&self, iteration: i64, group: usize, _: &GroupOptions) -> Rates {
        let interval = (iteration as f64 + 1.0) / self.lr_range_test_step_size as f64;
        let interval = if self.lr_range_test_staircase { interval.floor() } else { interval };
        let growth = 1.0 + self.lr_range_test_step_rate * interval;
        Rates::lr(of_group(&self.lr_range_test_min_lr, group) * growth)
    }
}

/// Smith, "A disciplined approach to neural network hyper-parameters", 2018: one cycle of rate and momentum against
/// each other, then decay. A momentum that grows with `decay_mom_rate` may reach 1; that is the user's choice.
impl Schedule for OneCycle {
    fn rates(&self, iteration: i64, _: usize, _: &GroupOptions) -> Rates {
        let first = self.cycle_first_step_size as f64;
        let second = self.cycle_second_step_size.unwrap_or(self.cycle_first_step_size) as f64;
        let total = first + second;
        let (lr, momentum) = if (iteration as f64) < total {
            let cycles = 1.0 + (iteration as f64 + 1.0) / total;
            let position = cycles - cycles.floor();
            let rise = first / total;
            let height = if position <= rise { position / rise } else { (position - 1.0) / (rise - 1.0) };
            (
                self.cycle_min_lr + (self.cycle_max_lr - self.cycle_min_lr) * height,
                self.cycle_max_mom - (self.cycle_max_mom - self.cycle_min_mom) * height,
            )
        } else if self.decay_step_size == 0 {
            (self.cycle_min_lr, self.cycle_max_mom)
        } else {
            let intervals = (iteration as f64 - total + 1.0) / self.decay_step_size as f64;
            (
                self.cycle_min_lr / (1.0 + self.decay_lr_rate * intervals),
                self.cycle_max_mom * (1.0 + self.decay_mom_rate * intervals),
            )
        };
        Rates { lr, momentum: self.cycle_momentum.then_some(momentum) }
    }
}

/// How far a warm-up has come, from 0 to 1; `None` when it is over. A warm-up takes at least two steps.
fn warmup(iteration: i64, steps: u64, shape: WarmupType) -> Option<f64> {
    let steps = steps.max(2) as f64;
    let iteration = iteration.max(0) as f64;
    (iteration < steps).then(|| match shape {
        WarmupType::Log => (iteration + 1.0).ln() / steps.ln(),
        WarmupType::Linear => iteration / steps,
    })
}

fn between(min: f64, max: f64, share: f64) -> f64 {
    min + (max - min) * share
}

impl Schedule for WarmupLr {
    fn rates(&self, iteration: i64, group: usize, base: &GroupOptions) -> Rates {
        let share = warmup(iteration, self.warmup_num_steps, self.warmup_type).unwrap_or(1.0);
        let highest = self.warmup_max_lr.as_ref().map_or(base.lr, |rates| of_group(rates, group));
        Rates::lr(between(of_group(&self.warmup_min_lr, group), highest, share))
    }
}

impl Schedule for WarmupDecayLr {
    fn rates(&self, iteration: i64, group: usize, _: &GroupOptions) -> Rates {
        let share = warmup(iteration, self.warmup_num_steps, self.warmup_type).unwrap_or_else(|| {
            let total = self.total_num_steps as f64;
            let falling = (total - self.warmup_num_steps.max(2) as f64).max(1.0);
            ((total - iteration as f64) / falling).max(0.0)
        });
        Rates::lr(between(of_group(&self.warmup_min_lr, group), of_group(&self.warmup_max_lr, group), share))
    }
}

/// Loshchilov, Hutter, "SGDR", 2017, without restarts: after the last step the rate stays at its end.
impl Schedule for WarmupCosineLr {
    fn rates(&self, iteration: i64, _: usize, base: &GroupOptions) -> Rates {
        let ratio = match warmup(iteration, self.warmup_num_steps, self.warmup_type) {
            Some(share) => between(self.warmup_min_ratio, 1.0, share),
            None => {
                let steps = self.warmup_num_steps.max(2) as f64;
                let (past, falling) = (iteration as f64 - steps + 1.0, self.total_num_steps as f64 - steps);
                if past >= falling {
                    self.cos_min_ratio
                } else {
                    let height = (1.0 + (std::f64::consts::PI * past / falling).cos()) / 2.0;
                    between(self.cos_min_ratio, 1.0, height).max(0.0)
                }
            }
        };
        Rates::lr(base.lr * ratio)
    }
}
