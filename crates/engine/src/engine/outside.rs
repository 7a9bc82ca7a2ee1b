//! Passes that somebody else computes: a module of another framework, whose parameters this engine keeps.
//!
//! Its autograd is not ours, so there is no closure to run within: a forward is begun, and a backward is begun and ended. In between
//! parameters are read and gradients pushed as by any model.

use std::time::Instant;

use ferrospeed_observe::trace::Activity;
use ferrospeed_zero::Pass;

use crate::engine::{BackwardOptions, Engine, Mode};
use crate::error::{EngineError, Result};
use crate::setup::kept_type;

/// A backward that somebody else computes.
#[derive(Debug)]
#[must_use = "a backward that is begun must be ended"]
pub struct OutsideBackward {
    start: Instant,
    options: BackwardOptions,
    /// What the gradient of the loss begins with.
    pub seed: f32,
}

impl Engine {
    /// Begins a forward, in the mode that [`Engine::train`] and [`Engine::eval`] have set.
    pub fn begin_outside_forward(&mut self) -> Result<()> {
        self.check_whole("forward")?;
        self.refuse_in_pipeline("forward")?;
        self.prepare_weights()?;
        if self.mode == Mode::Train {
            self.throughput.begin();
        }
        self.store.begin_pass(match self.mode {
            Mode::Train => Pass::Train,
            Mode::Evaluate => Pass::Evaluate,
        });
        Ok(())
    }

    /// Begins a backward. Of its loss, the gradient is what [`OutsideBackward::seed`] says: the loss scale, divided by the number
    /// of micro-batches of a step where the options have it so.
    pub fn begin_outside_backward(&mut self, options: BackwardOptions) -> Result<OutsideBackward> {
        self.check_whole("backward")?;
        self.refuse_in_pipeline("backward")?;
        self.check_trains()?;
        if options.retain_graph {
            self.store.accumulate_in(kept_type(&self.config, self.store.dtype(), true))?;
        }
        self.begin_backward(options.retain_graph)?;
        let scaled = if options.scale_wrt_gas { 1.0 / self.accumulation_steps as f32 } else { 1.0 };
        Ok(OutsideBackward { start: Instant::now(), options, seed: self.loss_scale() as f32 * scaled })
    }

    /// Ends it: all gradients are reduced when this returns, or added up where that is left to the last micro-batch. `loss` is that
    /// of the micro-batch, where it is known.
    pub fn end_outside_backward(&mut self, backward: OutsideBackward, loss: Option<f32>) -> Result<()> {
        self.end_backward(backward.start)?;
        self.times.backward += backward.start.elapsed();
        self.trace(Activity::Compute, "backward", backward.start);
        let Some(loss) = loss else { return Ok(()) };
        self.bad_loss |= !loss.is_finite();
        if backward.options.counts_in_mean {
            self.losses = (self.losses.0 + f64::from(loss), self.losses.1 + 1);
        }
        Ok(())
    }

    /// With `false`, gradients of the following backwards are not averaged over ranks yet: they join the next that is. As
    /// [`Engine::no_sync`], for whoever cannot put the work into a closure.
    pub fn set_synchronize(&self, synchronize: bool) {
        self.store.set_synchronize(synchronize);
    }

    /// Refuses a backward that nothing could follow.
    pub(super) fn check_trains(&self) -> Result<()> {
        if self.is_evaluating() {
            let why = "the engine is evaluating; call train() first";
            return Err(EngineError::Order { call: "backward", why });
        }
        if self.store.optimizer().is_none() {
            let why = "there is no optimizer: configure one, or give one to initialize";
            return Err(EngineError::Order { call: "backward", why });
        }
        Ok(())
    }
}
