//! Schedules that remember: objects of the program's own, whose state checkpoints keep.
//!
//! ```
//! use ferrospeed_optim::GroupOptions;
//! use ferrospeed_optim::schedule::{OwnSchedule, Rates, Scheduler};
//! use serde_json::{Value, json};
//!
//! /// Halves the rate after every second step.
//! struct Halving {
//!     steps: u64,
//! }
//!
//! impl OwnSchedule for Halving {
//!     fn step(&mut self) {
//!         self.steps += 1;
//!     }
//!     fn rates(&self, _group: usize, base: &GroupOptions) -> Rates {
//!         Rates::lr(base.lr * 0.5f64.powi((self.steps / 2) as i32))
//!     }
//!     fn state(&self) -> Value {
//!         json!({ "steps": self.steps })
//!     }
//!     fn load(&mut self, state: &Value) -> Result<(), String> {
//!         self.steps = state["steps"].as_u64().ok_or("it says no steps")?;
//!         Ok(())
//!     }
//! }
//!
//! let group = GroupOptions { lr: 0.1, weight_decay: 0.0, betas: [0.9, 0.999] };
//! let mut scheduler = Scheduler::object(Halving { steps: 0 }, &[group]);
//! scheduler.step();
//! scheduler.step();
//! let mut again = Scheduler::object(Halving { steps: 0 }, &[group]);
//! again.load(scheduler.state())?;
//! assert_eq!(again.options()[0].lr, 0.05);
//! # Ok::<(), ferrospeed_optim::OptimError>(())
//! ```

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::Value;

use super::{Rates, Scheduler, SchedulerState};
use crate::GroupOptions;
use crate::error::{OptimError, Result};

/// A schedule with a state of its own, which moves on when it is told to. One whose rates follow from the number of the step
/// alone is a [`Schedule`](super::Schedule), and needs no state.
pub trait OwnSchedule: Send {
    /// An optimizer step was applied.
    fn step(&mut self);

    /// What holds now for a group; `base` is what it was configured with.
    fn rates(&self, group: usize, base: &GroupOptions) -> Rates;

    /// All that it remembers, to be saved.
    fn state(&self) -> Value;

    /// Goes on where another stood, or says why it cannot.
    fn load(&mut self, state: &Value) -> Result<(), String>;

    /// Whether it follows a metric, and is to be told one after each step.
    fn wants_metric(&self) -> bool {
        false
    }

    /// The metric of a step: the training loss, unless the program tells another.
    fn observe(&mut self, _metric: f64) {}
}

/// A handle to one; its clones are the same object.
#[derive(Clone)]
pub(super) struct Object(Arc<Mutex<dyn OwnSchedule>>);

impl Object {
    pub(super) fn new(schedule: impl OwnSchedule + 'static) -> Object {
        Object(Arc::new(Mutex::new(schedule)))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, dyn OwnSchedule + 'static> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Goes on with what a checkpoint holds of it.
    pub(super) fn load(&self, saved: &SchedulerState) -> Result<()> {
        let fail = |why: String| OptimError::Section { section: "the program's own schedule", why };
        let state = saved.own.as_ref().ok_or_else(|| {
            fail(
                "this checkpoint holds no state of it, and it would begin anew; load without the schedule \
                 (LoadOptions::load_lr_scheduler_states), or continue with the schedule that it was saved with"
                    .to_owned(),
            )
        })?;
        self.lock().load(state).map_err(fail)
    }
}

impl Scheduler {
    /// An object of the caller's own, whose state checkpoints keep.
    pub fn object(schedule: impl OwnSchedule + 'static, groups: &[GroupOptions]) -> Scheduler {
        Scheduler { name: "own", own: Some(Object::new(schedule)), ..Scheduler::constant(groups) }
    }
}
