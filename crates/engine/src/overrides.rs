//! What a program may change while an engine trains: batch sizes, the loss scale, the metric of a schedule.

use std::num::NonZeroU64;

use ferrospeed_comm::ReduceOp;

use crate::engine::Engine;
use crate::error::{EngineError, Result};
use crate::setup::kept_type;

impl Engine {
    /// Changes the samples per step by changing the number of micro-batches, from the next step on.
    pub fn set_train_batch_size(&mut self, samples: u64) -> Result<()> {
        let per_micro_batch = self.train_micro_batch_size_per_gpu() * self.data_parallel_size as u64;
        if samples == 0 || !samples.is_multiple_of(per_micro_batch) {
            let why = format!("{samples} is not a multiple of micro-batch × ranks = {per_micro_batch}");
            return Err(EngineError::Argument { what: "train batch size", why });
        }
        let steps = samples / per_micro_batch;
        if steps > 1 {
            // A run that did not accumulate so far has no memory for it yet.
            self.store.accumulate_in(kept_type(&self.config, self.store.dtype(), true))?;
        }
        self.accumulation_steps = steps;
        Ok(())
    }

    /// Changes the samples per micro-batch and rank, and with them the samples per step; the number of micro-batches stays.
    pub fn set_train_micro_batch_size(&mut self, samples: u64) -> Result<()> {
        let whole = samples
            .checked_mul(self.accumulation_steps)
            .and_then(|product| product.checked_mul(self.data_parallel_size as u64));
        let (Some(micro), Some(whole)) = (NonZeroU64::new(samples), whole.and_then(NonZeroU64::new)) else {
            let why = format!("{samples} is not a number of samples");
            return Err(EngineError::Argument { what: "train micro batch size", why });
        };
        self.config.batch.train_micro_batch_size_per_gpu = micro;
        self.config.batch.train_batch_size = whole;
        Ok(())
    }

    /// From now on the loss is multiplied by this before backward, and the scale of the configuration rests; `None` goes on
    /// with that. Gradients are divided by the scale they were made with, so it cannot change between backward and step.
    pub fn override_loss_scale(&mut self, scale: Option<f64>) -> Result<()> {
        if self.losses.1 > 0 {
            return Err(EngineError::Order {
                call: "override_loss_scale",
                why: "there are gradients of another scale; call it after a step, or zero_grad() first",
            });
        }
        if let Some(scale) = scale.filter(|scale| !(scale.is_finite() && *scale > 0.0)) {
            let why = format!("{scale} is not a positive number");
            return Err(EngineError::Argument { what: "loss scale", why });
        }
        self.loss_scale_override = scale;
        Ok(())
    }

    /// Whether a schedule that follows a metric (`ReduceLROnPlateau`) is told the mean training loss after each step. It is,
    /// unless the caller has something better, such as a validation loss, for [`Engine::observe_metric`].
    pub fn follow_training_loss(&mut self, follow: bool) {
        self.follows_training_loss = follow;
    }

    /// Tells a metric to a schedule that follows one. Every rank tells the same.
    pub fn observe_metric(&mut self, metric: f64) {
        if let Some(scheduler) = &mut self.scheduler {
            scheduler.observe(metric);
        }
        self.apply_schedule();
    }

    /// The mean loss of a step over micro-batches and ranks, where anybody asks for it; a schedule that follows the loss is
    /// told where the step was applied.
    pub(crate) fn training_loss(&mut self, is_applied: bool) -> Result<Option<f64>> {
        let wanted = self.scheduler.as_ref().is_some_and(|scheduler| scheduler.wants_metric());
        let is_followed = wanted && self.follows_training_loss && is_applied;
        if !is_followed && !self.monitoring.is_due() {
            return Ok(None);
        }
        let mut sums = [self.losses.0, self.losses.1 as f64];
        self.world.group().all_reduce(&mut sums, ReduceOp::Sum)?;
        let [sum, count] = sums;
        let mean = (count > 0.0).then(|| sum / count);
        if let (true, Some(mean)) = (is_followed, mean) {
            self.observe_metric(mean);
        }
        Ok(mean)
    }
}
