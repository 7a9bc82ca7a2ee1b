//! Schedules of the learning rate: those that a configuration names, and a program's own.
//!
//! A schedule is a function of the step ([`Schedule`]; a closure is one), or an object that remembers ([`OwnSchedule`]), whose
//! state checkpoints keep. [`curriculum`] and its neighbours are schedules of other things.
//!
//! ```
//! use ferrospeed::nn::Linear;
//! use ferrospeed::optimizers::GroupOptions;
//! use ferrospeed::schedules::{Rates, Scheduler};
//! use ferrospeed::{DType, Options, Setup, Tensor, World, initialize_with, ops};
//!
//! # fn main() -> Result<(), ferrospeed::Failure> {
//! let ds_config = r#"{"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}"#;
//! let setup = Setup::from_config(ds_config, World::solo(), ferrospeed::cpu::device())?;
//! let group = GroupOptions { lr: 0.1, weight_decay: 0.0, betas: [0.9, 0.999] };
//! let halves = |iteration: i64, _group: usize, base: &GroupOptions| Rates::lr(base.lr * 0.5f64.powi(1 + iteration as i32));
//! let options = Options { scheduler: Some(Scheduler::custom(halves, &[group])), ..Options::default() };
//! let (mut engine, layer) = initialize_with(&setup, options, |init| Linear::new(init, 4, 1, true))?;
//! let x = Tensor::full([8, 4], 1.0, DType::F32, engine.device())?;
//! for rate in [0.1, 0.05, 0.025] {
//!     assert_eq!(engine.get_lr(), [rate]);
//!     let loss = engine.forward(|_| ops::mean(&ops::square(&layer.forward(&x)?)?))?;
//!     engine.backward(&loss)?;
//!     engine.step()?;
//! }
//! # Ok(())
//! # }
//! ```

pub use ferrospeed_optim::schedule::{OwnSchedule, Rates, Schedule, Scheduler, SchedulerState};
pub use ferrospeed_optim::{curriculum, progressive_layer_drop, random_ltd};
