//! Activation checkpointing: computing again in backward what was not kept.
//!
//! [`checkpoint`] goes around a part of a model's forward; [`Recomputed`] is a layer of that kind. Where the inputs wait
//! meanwhile is the configuration's decision (`activation_checkpointing`): where they are, in the host's memory, or divided over
//! the ranks that have the same. A pipeline recomputes whole layers by itself (`pipeline.activation_checkpoint_interval`).
//!
//! ```
//! use ferrospeed::checkpointing::Recomputed;
//! use ferrospeed::nn::{Linear, Sequential};
//! use ferrospeed::tensor::Activation;
//! use ferrospeed::{DType, Setup, Tensor, World, initialize, ops};
//!
//! # fn main() -> Result<(), ferrospeed::Failure> {
//! let ds_config = r#"{
//!     "train_batch_size": 4, "optimizer": {"type": "AdamW"},
//!     "activation_checkpointing": {"cpu_checkpointing": true}
//! }"#;
//! let setup = Setup::from_config(ds_config, World::solo(), ferrospeed::cpu::device())?;
//! let (mut engine, model) = initialize(&setup, |init| {
//!     Sequential::new(init)
//!         .add(|init| Recomputed::of(Linear::new(init, 8, 64, true)))
//!         .add(|_| Activation::Relu)
//!         .add(|init| Recomputed::of(Linear::new(init, 64, 1, true)))
//! })?;
//! let x = Tensor::full([4, 8], 1.0, DType::F32, engine.device())?;
//! let loss = engine.forward(|mode| ops::mean(&ops::square(&model.forward(&x, mode)?)?))?;
//! engine.backward(&loss)?;
//! engine.step()?;
//! # Ok(())
//! # }
//! ```

pub use ferrospeed_engine::checkpointing::{Recomputed, checkpoint, configure, is_configured, reset};
pub use ferrospeed_tensor::autograd::{InPlace, OnHost, Shelf, checkpoint_on};
