//! Optimizers: those that a configuration names, and a program's own.
//!
//! `optimizer.type` of a configuration makes one for all parameters, or for groups with rates of their own. [`Optimizer::own`]
//! makes one of a rule that looks at each weight by itself, which runs in every ZeRO stage.
//!
//! ```
//! use ferrospeed::nn::{Init, Linear};
//! use ferrospeed::optimizers::{GroupOptions, Optimizer, OwnOptimizer, ParamGroup, Slices};
//! use ferrospeed::{DType, Options, Setup, Tensor, World, initialize_model, ops};
//!
//! /// Steps of one size against the sign of the gradient.
//! #[derive(Debug)]
//! struct SignDescent;
//!
//! impl OwnOptimizer for SignDescent {
//!     fn name(&self) -> &'static str {
//!         "sign-descent"
//!     }
//!     fn state_names(&self) -> &'static [&'static str] {
//!         &[]
//!     }
//!     fn update(&self, slices: Slices<'_, '_>, options: &GroupOptions, _step: u64) {
//!         for (weight, gradient) in slices.weights.iter_mut().zip(slices.gradient) {
//!             *weight -= options.lr as f32 * gradient.signum();
//!         }
//!     }
//! }
//!
//! # fn main() -> Result<(), ferrospeed::Failure> {
//! let ds_config = r#"{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": true}"#;
//! let setup = Setup::from_config(ds_config, World::solo(), ferrospeed::cpu::device())?;
//! let init = Init::root();
//! let (up, down) = (Linear::new(&init.at("up"), 4, 8, true), Linear::new(&init.at("down"), 8, 1, true));
//! let rate = |lr| GroupOptions { lr, weight_decay: 0.0, betas: [0.0; 2] };
//! // Two groups: the last layer learns ten times as fast.
//! let (fast, slow) = init.parameters().partition(|param| param.name().starts_with("down."));
//! let group = |parameters: &ferrospeed::nn::Parameters, lr| ParamGroup { params: parameters.as_slice().to_vec(), options: rate(lr) };
//! let options = Options {
//!     groups: Some(vec![group(&slow, 0.001), group(&fast, 0.01)]),
//!     optimizer: Some((Optimizer::own(SignDescent), rate(0.001))),
//!     ..Options::default()
//! };
//! let mut engine = initialize_model(&setup, &init.parameters(), options)?;
//! assert_eq!(engine.get_lr(), [0.001, 0.01]);
//! let x = Tensor::full([8, 4], 1.0, DType::F32, engine.device())?;
//! let loss = engine.forward(|_| ops::mean(&ops::square(&down.forward(&ops::tanh(&up.forward(&x)?)?)?)?))?;
//! engine.backward(&loss)?;
//! engine.step()?;
//! # Ok(())
//! # }
//! ```

pub use ferrospeed_optim::own::{Own, OwnOptimizer, Slices};
pub use ferrospeed_optim::{
    GroupOptions, LossScaler, Optimizer, adagrad, adam, lamb, lion, one_bit, sgd, torch,
};
pub use ferrospeed_zero::ParamGroup;
