//! ZeRO: where a model's parameters, gradients and optimizer states live.
//!
//! `zero_optimization` of a configuration decides it, and nothing of a model's code does: there is no `zero.Init`, since a handle
//! has no value before its store gives it one, and no external parameters to be registered. What [`ZeroStore::gathered`] does is
//! DeepSpeed's `GatheredParameters`; [`Options::leaf_modules`](crate::Options::leaf_modules) its `set_z3_leaf_modules`;
//! [`TiledLinear`] its layer in tiles.
//!
//! ```
//! use ferrospeed::nn::Linear;
//! use ferrospeed::{Setup, World, initialize};
//!
//! # fn main() -> Result<(), ferrospeed::Failure> {
//! let ds_config = r#"{
//!     "train_batch_size": 8, "optimizer": {"type": "AdamW"},
//!     "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
//! }"#;
//! let setup = Setup::from_config(ds_config, World::solo(), ferrospeed::cpu::device())?;
//! let (engine, layer) = initialize(&setup, |init| Linear::new(init, 4, 2, false))?;
//! // Rank 0 makes a new value of the gathered weights, which all ranks get.
//! engine.store().gathered(&[layer.weight().clone()], Some(0), |weights| weights[0].fill(0.5))?;
//! assert_eq!(engine.weight_as_read(layer.weight())?, [0.5; 8]);
//! # Ok(())
//! # }
//! ```

pub use ferrospeed_nn::{TiledLinear, TiledSource, Tiling};
pub use ferrospeed_tensor::store::{FromInitializers, ParamSource};
pub use ferrospeed_zero::*;
