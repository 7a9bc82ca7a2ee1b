//! `ReduceLROnPlateau`: rates that fall when a metric stands still.
//!
//! The one schedule that is no function of the iteration: it is told a metric after each step, and its state is saved.

use ferrospeed_config::ReduceLrOnPlateau;
use serde::{Deserialize, Serialize};

use super::rules::of_group;
use crate::GroupOptions;

/// What it remembers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlateauState {
    /// The best metric so far.
    pub best: Option<f64>,
    /// Steps since then that count.
    pub bad_steps: u64,
    /// Steps that still do not count.
    pub cooldown: u64,
    /// The rate of each group.
    pub rates: Vec<f64>,
}

/// The schedule with its state.
#[derive(Debug, Clone)]
pub(super) struct Plateau {
    params: ReduceLrOnPlateau,
    pub(super) state: PlateauState,
}

impl Plateau {
    pub(super) fn new(params: ReduceLrOnPlateau, groups: &[GroupOptions]) -> Plateau {
        let rates = groups.iter().map(|group| group.lr).collect();
        Plateau { params, state: PlateauState { best: None, bad_steps: 0, cooldown: 0, rates } }
    }

    fn is_better(&self, metric: f64) -> bool {
        let Some(best) = self.state.best else { return !metric.is_nan() };
        let threshold = self.params.threshold;
        match (self.params.mode.as_str(), self.params.threshold_mode.as_str()) {
            ("min", "rel") => metric < best * (1.0 - threshold),
            ("min", _) => metric < best - threshold,
            (_, "rel") => metric > best * (1.0 + threshold),
            _ => metric > best + threshold,
        }
    }

    /// Hears the metric of a step.
    pub(super) fn observe(&mut self, metric: f64) {
        let better = self.is_better(metric);
        let state = &mut self.state;
        if better {
            (state.best, state.bad_steps) = (Some(metric), 0);
        } else {
            state.bad_steps += 1;
        }
        if state.cooldown > 0 {
            (state.cooldown, state.bad_steps) = (state.cooldown - 1, 0);
        }
        if state.bad_steps > self.params.patience {
            for (group, rate) in state.rates.iter_mut().enumerate() {
                let lower = (*rate * self.params.factor).max(of_group(&self.params.min_lr, group));
                if *rate - lower > self.params.eps {
                    *rate = lower;
                }
            }
            (state.cooldown, state.bad_steps) = (self.params.cooldown, 0);
        }
    }
}
