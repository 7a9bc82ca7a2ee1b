//! Ferrospeed: what DeepSpeed does for PyTorch, in Rust.
//!
//! Write a model with [`nn`], hand it to [`initialize`] with a `ds_config.json`, and train it with `forward`,
//! `backward` and `step`. Where its parameters, gradients and optimizer states live is the configuration's decision
//! (ZeRO stages 0 to 3) and nothing the model knows of.
//!
//! Three parts are features, so that a small program stays small: `models` (families with Hugging Face names and files),
//! `data` (text, JSON lines, Parquet, token files, tokenizers) and `serve` (the inference engine and its server).
//!
//! `examples/custom_model.rs` is a whole program of this kind. Start it on several ranks with
//! `ferrospeed launch -n 2 -- PROGRAM`.
//!
//! ```
//! use ferrospeed::config::{AutoValues, Config};
//! use ferrospeed::nn::Linear;
//! use ferrospeed::{Setup, initialize, ops};
//!
//! # fn main() -> Result<(), ferrospeed::Failure> {
//! let text = r#"{"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.05}}}"#;
//! let (config, _) = Config::from_str("ds_config.json", text)?.resolve(1.try_into()?, &AutoValues::new())?;
//! let (mut engine, layer) = initialize(&Setup::solo(config, ferrospeed::cpu::device()), |init| Linear::new(init, 4, 1, true))?;
//! let x = ferrospeed::Tensor::full([8, 4], 1.0, ferrospeed::DType::F32, engine.device())?;
//! let loss = engine.forward(|_| ops::mean(&ops::square(&layer.forward(&x)?)?))?;
//! engine.backward(&loss)?;
//! engine.step()?;
//! # Ok(())
//! # }
//! ```

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
pub use ferrospeed_zero as zero;

pub use ferrospeed_comm::World;
pub use ferrospeed_engine::{
    Activity, BackwardOptions, DataLoader, Dataset, Engine, EngineError, Failure, FindParameter, Format,
    LoadOptions, Loaded, LoaderOptions, ModelProfile, Monitor, ObserveError, Options, RepeatingLoader,
    ReportOptions, SaveOptions, Setup, Spelling, StepReport, StepTimes, initialize, initialize_model,
    initialize_pipeline, initialize_with,
};
pub use ferrospeed_tensor::{DType, Device, Param, Tensor, autograd, ops};
