//! Training: `initialize`, then `forward`, `backward`, `step`.
//!
//! The engine puts the parts together and keeps the counters; kernels, formulas and layouts are elsewhere. A model is
//! any code that computes a loss from parameter handles.
//!
//! ```
//! use ferrospeed_config::{AutoValues, Config};
//! use ferrospeed_engine::{Setup, initialize};
//! use ferrospeed_nn::Linear;
//! use ferrospeed_tensor::{DType, Tensor, ops};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let text = r#"{"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}"#;
//! let (config, _) = Config::from_str("example", text)?.resolve(1.try_into()?, &AutoValues::new())?;
//! let setup = Setup::solo(config, ferrospeed_cpu::device());
//! let (mut engine, layer) = initialize(&setup, |init| Linear::new(init, 3, 1, true))?;
//! let x = Tensor::full([4, 3], 1.0, DType::F32, engine.device())?;
//! for _ in 0..3 {
//!     let loss = engine.forward(|_| ops::mean(&ops::square(&layer.forward(&x)?)?))?;
//!     engine.backward(&loss)?;
//!     engine.step()?;
//! }
//! assert_eq!(engine.global_steps(), 3);
//! # Ok(())
//! # }
//! ```

mod activations;
mod agreement;
mod checkpoint;
pub mod checkpointing;
mod communication;
mod compression;
mod eigenvalues;
mod engine;
mod error;
mod examine;
mod experts;
mod failure;
mod features;
mod flops_profiler;
mod kernels;
mod layer_norms;
mod loader;
pub mod machine;
mod model_profile;
mod monitors;
mod overrides;
mod parts;
mod pipeline;
mod placed;
mod profiler;
mod reports;
mod setup;
mod slices;
mod state_access;
mod timeline;
mod timers;

pub use activations::activation_shelf;
pub use checkpoint::{FindParameter, Format, LoadOptions, Loaded, SaveOptions, Spelling};
pub use engine::{BackwardOptions, Engine, OutsideBackward, StepReport};
pub use error::{EngineError, Result};
pub use examine::refusals;
pub use failure::Failure;
pub use features::{metric_curricula, random_ltd, sparse_attention};
pub use ferrospeed_observe::ObserveError;
pub use ferrospeed_observe::monitor::Monitor;
pub use ferrospeed_observe::trace::Activity;
pub use flops_profiler::FlopsProfiler;
pub use loader::{Collated, DataLoader, Dataset, LoaderOptions, RepeatingLoader};
pub use model_profile::{ModelProfile, ReportOptions};
pub use pipeline::{
    EvalOptions, Evaluation, Passed, Reduce, StageFailure, StageTimes, divide, divides_by_measure,
    initialize_pipeline, initialize_stages, measure_layers,
};
pub use placed::{PlacedOn, placement};
pub use setup::{Options, Setup, init_inference, initialize, initialize_model, initialize_with};
pub use state_access::{
    safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state, safe_get_local_fp32_param,
    safe_get_local_grad, safe_get_local_optimizer_state, safe_set_full_fp32_param,
    safe_set_full_optimizer_state, safe_set_local_fp32_param, safe_set_local_optimizer_state,
};
pub use timers::StepTimes;
