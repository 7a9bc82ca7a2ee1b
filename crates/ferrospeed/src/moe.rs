//! Mixtures of experts: layers of which each token uses a few.
//!
//! [`Moe`] is the layer; without a capacity it drops no token, with one it is DeepSpeed's. [`Moe::over`] spreads experts over
//! ranks ([`Options::spread_experts`](crate::Options::spread_experts) tells the engine), in every ZeRO stage. Experts need no
//! parameter groups of their own: a parameter knows whose it is.
//!
//! ```
//! use ferrospeed::moe::{Moe, MoeConfig};
//! use ferrospeed::nn::{Linear, Mlp};
//! use ferrospeed::tensor::Activation;
//! use ferrospeed::{DType, Setup, Tensor, World, initialize, ops};
//!
//! # fn main() -> Result<(), ferrospeed::Failure> {
//! let ds_config = r#"{"train_batch_size": 8, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}"#;
//! let setup = Setup::from_config(ds_config, World::solo(), ferrospeed::cpu::device())?;
//! let (mut engine, layer) = initialize(&setup, |init| {
//!     Moe::new(init, MoeConfig::dropless(16, 4, 2), |init, _| {
//!         let linear = |name, inputs, outputs| Linear::new(&init.at(name), inputs, outputs, true);
//!         Mlp::new(linear("up", 16, 32), linear("down", 32, 16), Activation::Relu)
//!     })
//! })?;
//! let layer = layer?;
//! let x = Tensor::full([8, 16], 0.5, DType::F32, engine.device())?;
//! let loss = engine.forward(|mode| {
//!     let mixed = layer.forward(&x, mode)?;
//!     ops::add(ops::mean(&ops::square(&mixed.output)?)?, ops::affine(&mixed.balance_loss()?, 0.01, 0.0)?)
//! })?;
//! engine.backward(&loss)?;
//! engine.step()?;
//! # Ok(())
//! # }
//! ```

pub use ferrospeed_comm::ExpertMembership;
pub use ferrospeed_comm::layout::ExpertOrder;
pub use ferrospeed_nn::moe::{
    BalancedOver, BalancingBias, Capacity, Expert, ExpertRanks, Experts, GateNoise, GroupPlan, Mixed, Moe,
    MoeConfig, PlannedGroup, Routing, RoutingStatistics, balance_loss, split_param_groups, z_loss,
};
