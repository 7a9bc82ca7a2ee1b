//! Whether a run still learns: a loss or a gradient that is no number any more is a verdict, not a result.

use ferrospeed_observe::StepRecord;

use crate::error::{Result, TrainError};

/// Counts bad steps. One that is skipped because a loss scale was too high is none: with a lower scale the next may be good.
pub(crate) struct Health {
    limit: u64,
    bad_in_a_row: u64,
    last_good: Option<(u64, f32)>,
}

impl Health {
    pub(crate) fn new(limit: u64) -> Health {
        Health { limit: limit.max(1), bad_in_a_row: 0, last_good: None }
    }

    /// Looks at a step; an error when there were too many bad ones.
    pub(crate) fn judge(&mut self, record: &StepRecord) -> Result<()> {
        let Some(loss) = record.measured_loss() else { return Ok(()) };
        let has_scale = record.loss_scale > 1.0;
        if loss.is_finite() && (has_scale || !record.skipped) {
            self.bad_in_a_row = 0;
            self.last_good = Some((record.step, loss));
            return Ok(());
        }
        self.bad_in_a_row += 1;
        if self.bad_in_a_row < self.limit { Ok(()) } else { self.finish() }
    }

    /// At the end of a run: an error when its last step was bad.
    pub(crate) fn finish(&self) -> Result<()> {
        if self.bad_in_a_row == 0 {
            return Ok(());
        }
        let since = match self.last_good {
            Some((step, loss)) => format!("the last step that was taken is {step}, with a loss of {loss:.4}"),
            None => "none before was taken".to_owned(),
        };
        let why = format!(
            "the loss or a gradient of the last {} steps is not a number; {since}",
            self.bad_in_a_row
        );
        Err(TrainError::Diverged { why })
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
        let mut health = Health::new(3);
        for (step, loss) in [(1, 2.0), (2, f32::NAN), (3, f32::INFINITY), (4, 1.5), (5, f32::NAN)] {
            health.judge(&record(step, loss)).unwrap();
        }
        let error = health.finish().unwrap_err().to_string();
        assert!(
            error.contains("the last 1 steps") && error.contains("is 4, with a loss of 1.5000"),
            "{error}"
        );
        health.judge(&record(6, f32::NAN)).unwrap();
        // Where nothing is predicted, nothing has gone wrong.
        health.judge(&StepRecord { no_targets: true, ..record(7, f32::NAN) }).unwrap();
        health.judge(&record(8, f32::NAN)).unwrap_err();
    }

    #[test]
    fn steps_that_are_skipped_without_a_scale_to_lower_are_bad() {
        let skipped = |step, loss_scale| StepRecord { skipped: true, loss_scale, ..record(step, 5.5) };
        let mut health = Health::new(2);
        for step in 1..9 {
            health.judge(&skipped(step, 65536.0)).unwrap();
        }
        health.judge(&skipped(9, 1.0)).unwrap();
        assert!(health.judge(&skipped(10, 1.0)).unwrap_err().to_string().contains("the last 2 steps"));
        health.judge(&record(11, 5.4)).unwrap();
        health.finish().unwrap();
    }
}
