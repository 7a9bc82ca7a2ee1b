//! Ferrospeed: what DeepSpeed does for PyTorch, in Rust.
//!
//! Write a model with [`nn`], hand it to [`initialize`] with a `ds_config.json`, and train it with `forward`,
//! `backward` and `step`. Where its parameters, gradients and optimizer states live is the configuration's decision
//! (ZeRO stages 0 to 3) and nothing the model knows of.
//!
//! Each chapter of DeepSpeed's manual has a module here under its name, with an example; `docs/library.md` sets both tables of
//! contents side by side. `examples/` has whole programs, which run in our tests.
//!
//! Three parts are features, so that a small program stays small: `models` (families with Hugging Face names and files),
//! `data` (text, JSON lines, Parquet, token files, tokenizers) and `serve` (the inference engine and its server). `mpi` lets
//! ranks talk through the system's MPI.
//!
//! Start a program on several ranks with `ferrospeed launch -n 2 -- PROGRAM`.
//!
//! ```
//! use ferrospeed::nn::Linear;
//! use ferrospeed::{DType, Setup, Tensor, init_distributed, initialize, ops};
//!
//! # fn main() -> Result<(), ferrospeed::Failure> {
//! let ds_config = r#"{"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.05}}}"#;
//! let setup = Setup::from_config(ds_config, init_distributed()?, ferrospeed::cpu::device())?;
//! let (mut engine, layer) = initialize(&setup, |init| Linear::new(init, 4, 1, true))?;
//! let x = Tensor::full([8, 4], 1.0, DType::F32, engine.device())?;
//! let loss = engine.forward(|_| ops::mean(&ops::square(&layer.forward(&x)?)?))?;
//! engine.backward(&loss)?;
//! engine.step()?;
//! # Ok(())
//! # }
//! ```

pub mod autotuning;
pub mod checkpoint;
pub mod checkpointing;
pub mod memory;
pub mod moe;
pub mod monitor;
pub mod optimizers;
pub mod pipeline;
pub mod profiling;
pub mod schedules;
pub mod utils;
pub mod zero;

#[doc = include_str!("../../../docs/library.md")]
pub mod library {}

pub use ferrospeed_comm as comm;
pub use ferrospeed_config as config;
pub use ferrospeed_cpu as cpu;
pub use ferrospeed_cuda as cuda;
#[cfg(feature = "data")]
pub use ferrospeed_data as data;
#[cfg(feature = "models")]
pub use ferrospeed_models as models;
pub use ferrospeed_nn as nn;
pub use ferrospeed_optim as optim;
#[cfg(feature = "serve")]
pub use ferrospeed_serve as serve;
pub use ferrospeed_tensor as tensor;
#[cfg(feature = "data")]
pub use ferrospeed_text as text;

pub use ferrospeed_comm::{World, init_distributed};
pub use ferrospeed_engine::{
    Activity, BackwardOptions, Collated, DataLoader, Dataset, Engine, EngineError, Failure, FindParameter,
    Format, LoadOptions, Loaded, LoaderOptions, ModelProfile, Monitor, ObserveError, Options,
    RepeatingLoader, ReportOptions, SaveOptions, Setup, Spelling, StepReport, StepTimes, init_inference,
    initialize, initialize_model, initialize_pipeline, initialize_stages, initialize_with,
};
pub use ferrospeed_tensor::{DType, Device, Param, Tensor, autograd, ops};
