//! Whether a run still learns: a loss or a gradient that is no number any more is a verdict, not a result, and so is a gradient that is
//! zero everywhere. The second comes from weights so large that what is divided by them, as in a norm, is nothing.

use std::path::Path;

use ferrospeed_checkpoint::{Listed, list};
use ferrospeed_config::{LossScale, Precision};
use ferrospeed_engine::EngineError;
use ferrospeed_observe::StepRecord;
use ferrospeed_optim::OptimError;
use serde::{Deserialize, Serialize};

use crate::error::TrainError;

/// A loss below which there is nothing left to learn: then a gradient may be zero, in f16 above all.
const LEARNT: f32 = 0.01;

/// Counts bad steps. One that is skipped because a loss scale was too high is none where that scale falls: with a lower one the
/// next may be good.
pub(crate) struct Health {
    limit: u64,
    scale_falls: bool,
    /// Steps that were taken before this run began to count.
    begun_after: u64,
    /// How those went.
    earlier: Trail,
    own: Trail,
}

/// How the steps up to now went. Checkpoints keep it.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub(crate) struct Trail {
    bad_in_a_row: u64,
    /// Whether the last bad one had numbers, and a gradient of nothing but zeros.
    #[serde(default)]
    is_flat: bool,
    /// The last step that was good and changed weights, and its loss.
    last_good: Option<(u64, f32)>,
}

/// What ended a run: why, and the last step before which all was well.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Divergence {
    pub(crate) why: String,
    /// The update of this step may have been the one that broke the weights.
    pub(crate) suspect_step: u64,
}

impl Health {
    /// Of a run that goes on after so many steps. Bad ones among them do not count, but are known.
    pub(crate) fn new(limit: u64, precision: Precision, begun_after: u64, earlier: Trail) -> Health {
        let scale_falls = matches!(precision, Precision::Fp16 { loss_scale: LossScale::Dynamic { .. }, .. });
        Health { limit: limit.max(1), scale_falls, begun_after, earlier, own: Trail::default() }
    }

    /// Looks at a step; an error when there were too many bad ones.
    pub(crate) fn judge(&mut self, record: &StepRecord) -> Result<(), Divergence> {
        let Some(loss) = record.measured_loss() else { return Ok(()) };
        // Exactly zero in every element: what is small rounds to something.
        let is_flat = !record.skipped && record.grad_norm == Some(0.0) && loss > LEARNT;
        if loss.is_finite() && !is_flat && (self.scale_falls || !record.skipped) {
            self.own.bad_in_a_row = 0;
            if !record.skipped {
                self.own.last_good = Some((record.step, loss));
            }
            return Ok(());
        }
        self.own.bad_in_a_row += 1;
        self.own.is_flat = is_flat && loss.is_finite();
        if self.own.bad_in_a_row < self.limit { Ok(()) } else { self.finish() }
    }

    /// At the end of a run: an error when its last step was bad.
    pub(crate) fn finish(&self) -> Result<(), Divergence> {
        if self.own.bad_in_a_row == 0 {
            return Ok(());
        }
        let since = match (self.own.last_good, self.begun_after) {
            (None, 1..) => format!("none was taken since it went on after step {}", self.begun_after),
            _ => self.own.since(),
        };
        Err(Divergence { why: self.own.in_words(&since), suspect_step: self.suspect_step() })
    }

    /// Of a run that has no step left to take: an error when the last one that was taken before was bad.
    pub(crate) fn finish_at_once(&self) -> Result<(), Divergence> {
        match self.earlier.bad_in_a_row {
            0 => Ok(()),
            _ => {
                let why = self.earlier.in_words(&self.earlier.since());
                Err(Divergence { why, suspect_step: self.suspect_step() })
            }
        }
    }

    /// What to keep for who goes on from here.
    pub(crate) fn trail(&self) -> Trail {
        let earlier = if self.own.last_good.is_some() { Trail::default() } else { self.earlier };
        Trail {
            bad_in_a_row: earlier.bad_in_a_row + self.own.bad_in_a_row,
            is_flat: if self.own.bad_in_a_row > 0 { self.own.is_flat } else { earlier.is_flat },
            last_good: self.own.last_good.or(earlier.last_good),
        }
    }

    /// A failure of the loss scale is a verdict too.
    pub(crate) fn of_failure(&self, error: TrainError, checkpoints: &Path) -> TrainError {
        match error {
            TrainError::Engine(EngineError::Optim(floor @ OptimError::LossScaleFloor { .. })) => {
                let way_back = way_back(self.suspect_step(), checkpoints);
                TrainError::ScaleFloor { floor, way_back }
            }
            other => other,
        }
    }

    /// The last step that changed weights which were good until then.
    fn suspect_step(&self) -> u64 {
        let unknown = if self.earlier.bad_in_a_row == 0 { self.begun_after } else { 0 };
        self.own.last_good.or(self.earlier.last_good).map_or(unknown, |(step, _)| step)
    }
}

impl Trail {
    fn since(&self) -> String {
        match self.last_good {
            Some((step, loss)) => {
                format!("the last step that was taken is {step}, with a loss of {loss:.4}")
            }
            None => "none before was taken".to_owned(),
        }
    }

    fn in_words(&self, since: &str) -> String {
        let bad = self.bad_in_a_row;
        match self.is_flat {
            true => format!(
                "every gradient of the last {bad} steps is zero: nothing is learned any more, as where weights have grown beyond all measure; {since}"
            ),
            false => format!("the loss or a gradient of the last {bad} steps is not a number; {since}"),
        }
    }
}

impl Divergence {
    /// The verdict, with the newest checkpoint in `checkpoints` that was saved before anything went wrong.
    pub(crate) fn verdict(self, checkpoints: &Path) -> TrainError {
        TrainError::Diverged { why: self.why, way_back: way_back(self.suspect_step, checkpoints) }
    }
}

/// The newest checkpoint in a folder from before a step, in words.
fn way_back(suspect_step: u64, checkpoints: &Path) -> String {
    let saved = list(checkpoints).unwrap_or_default();
    let step_of = |listed: &Listed| listed.manifest.training.global_steps;
    let before =
        saved.iter().filter(|listed| step_of(listed) < suspect_step).max_by_key(|listed| step_of(listed));
    match before {
        Some(listed) => format!(
            "--resume {} goes on after step {}, the newest checkpoint from before it went wrong",
            checkpoints.join(&listed.tag).display(),
            step_of(listed)
        ),
        None if saved.is_empty() => "there is no checkpoint to go on from".to_owned(),
        None => "there is no checkpoint from before it went wrong: start anew with --overwrite".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(step: u64, loss: f32) -> StepRecord {
        StepRecord { step, loss, ..StepRecord::default() }
    }

    #[test]
    fn a_run_whose_loss_stays_bad_is_stopped_and_one_that_recovers_is_not() {
        let mut health = Health::new(3, Precision::Fp32, 0, Trail::default());
        for (step, loss) in [(1, 2.0), (2, f32::NAN), (3, f32::INFINITY), (4, 1.5), (5, f32::NAN)] {
            health.judge(&record(step, loss)).unwrap();
        }
        let Divergence { why, suspect_step } = health.finish().unwrap_err();
        assert!(why.contains("the last 1 steps") && why.contains("is 4, with a loss of 1.5000"), "{why}");
        assert_eq!(suspect_step, 4, "its update came after its loss");
        health.judge(&record(6, f32::NAN)).unwrap();
        // Where nothing is predicted, nothing has gone wrong.
        health.judge(&StepRecord { no_targets: true, ..record(7, f32::NAN) }).unwrap();
        health.judge(&record(8, f32::NAN)).unwrap_err();
    }

    #[test]
    fn gradients_of_nothing_but_zeros_are_a_verdict_too() {
        let flat = |step| StepRecord { grad_norm: Some(0.0), ..record(step, 5.5452) };
        let mut health = Health::new(2, Precision::Fp32, 0, Trail::default());
        health.judge(&StepRecord { grad_norm: Some(0.3), ..record(1, 5.0) }).unwrap();
        health.judge(&flat(2)).unwrap();
        health.judge(&StepRecord { grad_norm: Some(1e-30), ..record(3, 5.0) }).unwrap();
        health.judge(&flat(4)).unwrap();
        let Divergence { why, suspect_step } = health.judge(&flat(5)).unwrap_err();
        assert!(why.contains("every gradient of the last 2 steps is zero") && why.contains("is 3,"), "{why}");
        assert_eq!(suspect_step, 3);
        assert!(health.trail().is_flat);
        // Who knows all of the data by heart has nothing to learn.
        let mut health = Health::new(2, Precision::Fp32, 0, Trail::default());
        for step in 1..9 {
            health.judge(&StepRecord { grad_norm: Some(0.0), ..record(step, 1e-6) }).unwrap();
        }
        health.finish().unwrap();
    }

    #[test]
    fn steps_that_are_skipped_without_a_scale_that_falls_are_bad() {
        let skipped = |step, loss_scale| StepRecord { skipped: true, loss_scale, ..record(step, 5.5) };
        let half = |loss_scale| Precision::Fp16 { loss_scale, auto_cast: false, half_master_weights: false };
        let falling = LossScale::Dynamic {
            initial_power: 16,
            window: 1000,
            hysteresis: 2,
            consecutive_hysteresis: false,
            minimum: 1.0,
        };
        let mut health = Health::new(2, half(falling), 0, Trail::default());
        for step in 1..9 {
            health.judge(&skipped(step, 65536.0)).unwrap();
        }
        for precision in [Precision::Fp32, half(LossScale::Static(65536.0))] {
            let mut health = Health::new(2, precision, 30, Trail::default());
            health.judge(&skipped(31, 65536.0)).unwrap();
            let Divergence { why, suspect_step } = health.judge(&skipped(32, 65536.0)).unwrap_err();
            assert!(why.contains("the last 2 steps") && why.contains("went on after step 30"), "{why}");
            assert_eq!(suspect_step, 30);
            health.judge(&record(33, 5.4)).unwrap();
            health.finish().unwrap();
        }
    }

    #[test]
    fn a_run_that_goes_on_knows_since_when_the_one_before_was_bad() {
        let mut health = Health::new(9, Precision::Fp32, 0, Trail::default());
        health.finish_at_once().unwrap();
        for (step, loss) in [(1, 2.0), (2, 1.5), (3, f32::NAN), (4, f32::NAN)] {
            health.judge(&record(step, loss)).unwrap();
        }
        let ended = health.finish().unwrap_err();
        let mut health = Health::new(9, Precision::Fp32, 4, health.trail());
        assert_eq!(health.finish_at_once().unwrap_err(), ended, "it has not become better since");
        health.finish().unwrap();
        health.judge(&record(5, f32::NAN)).unwrap();
        let Divergence { why, suspect_step } = health.finish().unwrap_err();
        assert!(why.contains("the last 1 steps") && why.contains("went on after step 4"), "{why}");
        assert_eq!(suspect_step, 2, "what was saved after step 3 was broken already");
        assert_eq!(health.trail(), Trail { bad_in_a_row: 3, is_flat: false, last_good: Some((2, 1.5)) });
        health.judge(&record(6, 1.0)).unwrap();
        assert_eq!(health.trail(), Trail { bad_in_a_row: 0, is_flat: false, last_good: Some((6, 1.0)) });
    }
}
