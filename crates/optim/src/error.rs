//! The one error of this crate.

/// What can go wrong around an optimizer step.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum OptimError {
    /// A list that must hold one number per parameter group does not.
    #[error(
        "scheduler.params.{key} lists {given} values but the optimizer has {groups} parameter groups: \
         give one value for all, or one for each"
    )]
    GroupCount {
        /// The parameter of the schedule.
        key: &'static str,
        /// How many values it lists.
        given: usize,
        /// How many groups there are.
        groups: usize,
    },
    /// The configuration names a schedule that nothing runs yet.
    #[error(
        "the schedule {name} is known but not available: use LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR or \
         WarmupCosineLR, or pass a schedule of your own"
    )]
    ScheduleNotAvailable {
        /// Its name.
        name: String,
    },
    /// The loss scale cannot fall any further.
    #[error(
        "step {step} overflowed at the smallest loss scale allowed ({scale}): gradients are infinite or NaN even \
         without room to scale the loss down. The training has probably diverged: look at the loss before this step, \
         lower the learning rate or clip gradients (gradient_clipping); bf16 needs no loss scale; \
         fp16.min_loss_scale below {scale} lets the scale fall further"
    )]
    LossScaleFloor {
        /// The step, counting from 1.
        step: u64,
        /// The smallest scale.
        scale: f64,
    },
    /// A section of the configuration cannot be used.
    #[error("{section}: {why}")]
    Section {
        /// The section.
        section: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// Something was set to a value that it cannot have.
    #[error("{what} cannot be {value}: {why}")]
    Value {
        /// What was set.
        what: &'static str,
        /// To what.
        value: String,
        /// Why that cannot be.
        why: &'static str,
    },
}

/// The result of everything here.
pub type Result<T, E = OptimError> = std::result::Result<T, E>;
