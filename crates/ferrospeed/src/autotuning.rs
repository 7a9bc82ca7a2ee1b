//! Autotuning: which configuration trains fastest.
//!
//! `ferrospeed train --autotuning` does it for recipes. A program hands [`autotune`] a function that trains a few steps by a
//! configuration and says what it measured; lists among the choices are tried.
//!
//! ```
//! use ferrospeed::autotuning::{Metric, TunerOptions, autotune};
//! use ferrospeed::nn::Linear;
//! use ferrospeed::{DType, Failure, Setup, Tensor, World, initialize, ops};
//! use serde_json::{Value, json};
//!
//! /// Samples per second of some steps.
//! fn train(ds_config: &Value) -> Result<f64, Failure> {
//!     let setup = Setup::from_config(&ds_config.to_string(), World::solo(), ferrospeed::cpu::device())?;
//!     let (mut engine, layer) = initialize(&setup, |init| Linear::new(init, 4, 1, true))?;
//!     let rows = engine.train_micro_batch_size_per_gpu() as usize;
//!     let x = Tensor::full([rows, 4], 1.0, DType::F32, engine.device())?;
//!     let begun = std::time::Instant::now();
//!     while engine.global_steps() < 3 {
//!         let loss = engine.forward(|_| ops::mean(&ops::square(&layer.forward(&x)?)?))?;
//!         engine.backward(&loss)?;
//!         engine.step()?;
//!     }
//!     Ok(engine.global_samples() as f64 / begun.elapsed().as_secs_f64())
//! }
//!
//! let base = json!({"optimizer": {"type": "AdamW"}});
//! let choices = json!({"train_micro_batch_size_per_gpu": [1, 8], "zero_optimization": {"stage": [0, 2]}});
//! let records = autotune(&base, &choices, Metric::Throughput, &TunerOptions::default(), |ds_config| train(ds_config).ok());
//! let best = records.best().expect("one of them trains");
//! println!("{}\n{}", records.table(), best.experiment.ds_config);
//! ```

pub use ferrospeed_tune::tuning::program::autotune;
pub use ferrospeed_tune::tuning::tuner::{Order, TunerOptions};
pub use ferrospeed_tune::tuning::{Best, Experiment, Laboratory, Metric, Records};
