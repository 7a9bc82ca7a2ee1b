//! What DeepSpeed keeps in `utils`: loaders, a look at what is spread over ranks, timers, the log.
//!
//! ```
//! use ferrospeed::nn::Linear;
//! use ferrospeed::utils::{RepeatingLoader, safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state};
//! use ferrospeed::{Setup, Tensor, World, initialize, ops};
//!
//! # fn main() -> Result<(), ferrospeed::Failure> {
//! let ds_config = r#"{"train_batch_size": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}"#;
//! let setup = Setup::from_config(ds_config, World::solo(), ferrospeed::cpu::device())?;
//! let (mut engine, layer) = initialize(&setup, |init| Linear::new(init, 1, 1, true))?;
//! // DeepSpeed's `training_data` and `collate_fn`.
//! let (samples, device) = ((0..10).map(|sample| sample as f32).collect::<Vec<_>>(), engine.device().clone());
//! let loader = engine.data_loader(samples)?.collated(|samples| Tensor::from_slice(&samples, [samples.len(), 1], &device));
//! for x in RepeatingLoader(loader).take(7) {
//!     let x = x?;
//!     let loss = engine.forward(|_| ops::mean(&ops::square(&layer.forward(&x)?)?))?;
//!     engine.backward(&loss)?;
//!     assert_eq!(safe_get_full_grad(&engine, layer.weight())?.len(), 1);
//!     engine.step()?;
//! }
//! assert_eq!(safe_get_full_optimizer_state(&engine, layer.weight(), "exp_avg")?.len(), 1);
//! assert!(safe_get_full_fp32_param(&engine, layer.weight())?[0].is_finite());
//! # Ok(())
//! # }
//! ```

pub use ferrospeed_comm::{print_what_was_asked_for, tell};
pub use ferrospeed_engine::{
    Collated, DataLoader, Dataset, LoaderOptions, RepeatingLoader, StepTimes, safe_get_full_fp32_param,
    safe_get_full_grad, safe_get_full_optimizer_state, safe_get_local_fp32_param, safe_get_local_grad,
    safe_get_local_optimizer_state, safe_set_full_fp32_param, safe_set_full_optimizer_state,
    safe_set_local_fp32_param, safe_set_local_optimizer_state,
};
