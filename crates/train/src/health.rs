//! Whether a run still learns: a loss that is no number any more is a verdict, not a result.

use ferrospeed_observe::StepRecord;

use crate::error::{Result, TrainError};

/// Counts bad steps. One that is skipped because a loss scale was too high is none: its loss is a number.
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
        if loss.is_finite() {
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
            Some((step, loss)) => format!("the last loss that is a number is {loss:.4} at step {step}"),
            None => "it never was one".to_owned(),
        };
        let why = format!("the loss of the last {} steps is not a number; {since}", self.bad_in_a_row);
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
        assert!(error.contains("the last 1 steps") && error.contains("1.5000 at step 4"), "{error}");
        health.judge(&record(6, f32::NAN)).unwrap();
        // Where nothing is predicted, nothing has gone wrong.
        health.judge(&StepRecord { no_targets: true, ..record(7, f32::NAN) }).unwrap();
        health.judge(&record(8, f32::NAN)).unwrap_err();
    }
}
