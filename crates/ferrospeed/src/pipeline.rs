//! Pipelines: each rank holds some of the layers, and micro-batches pass through them.
//!
//! A model of layers ([`Sequential`] with a loss, as [`Trained`]; or anything that implements [`Stages`]) is divided as the
//! `pipeline` section says ([`initialize_stages`], [`initialize_pipeline`]). [`Engine::train_batch`](crate::Engine::train_batch)
//! runs a whole step, [`Engine::eval_batch_with`](crate::Engine::eval_batch_with) an evaluation. [`schedule`] has the
//! schedules as values: they print, and are checked and simulated without running anything.
//!
//! ```
//! use ferrospeed::nn::{Linear, Sequential};
//! use ferrospeed::pipeline::{EvalOptions, Trained, initialize_stages};
//! use ferrospeed::tensor::{Activation, Result};
//! use ferrospeed::{DType, EngineError, Failure, Options, Setup, Tensor, World, ops};
//!
//! fn mean_square(y: &Tensor, target: &Tensor) -> Result<Tensor> {
//!     ops::mean(&ops::square(&ops::sub(y, target)?)?)
//! }
//!
//! fn stage(world: World) -> Result<f32, Failure> {
//!     let ds_config = r#"{
//!         "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
//!         "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "pipeline": {"stages": 2}
//!     }"#;
//!     let setup = Setup::from_config(ds_config, world, ferrospeed::cpu::with_threads(1))?;
//!     let (mut engine, model) = initialize_stages(&setup, Options::default(), |init| Trained {
//!         layers: Sequential::new(init)
//!             .add(|init| Linear::new(init, 8, 16, true))
//!             .add(|_| Activation::Tanh)
//!             .add(|init| Linear::new(init, 16, 1, true)),
//!         loss: mean_square,
//!     })?;
//!     let device = engine.device().clone();
//!     let batch = |_micro: usize| {
//!         let x = Tensor::full([4, 8], 0.5, DType::F32, &device)?;
//!         Ok::<_, EngineError>((x, Tensor::full([4, 1], 1.0, DType::F32, &device)?))
//!     };
//!     let (first, _) = engine.train_batch(&model, batch)?;
//!     let after = engine.eval_batch_with(&model, EvalOptions::of(2), batch)?;
//!     assert!(after.losses[0] < first);
//!     Ok(first)
//! }
//!
//! # fn main() -> Result<(), Failure> {
//! // Ranks are processes (`ferrospeed launch -n 2 -- PROGRAM`), or threads as here.
//! let losses = World::on_threads(2, stage).into_iter().collect::<Result<Vec<f32>, Failure>>()?;
//! assert_eq!(losses[0], losses[1]);
//! # Ok(())
//! # }
//! ```

pub use ferrospeed_comm::{Mesh, ProcessTopology};
pub use ferrospeed_engine::{
    EvalOptions, Evaluation, Reduce, StageTimes, divide, divides_by_measure, initialize_pipeline,
    initialize_stages, measure_layers,
};
pub use ferrospeed_nn::{Carried, Layer, Sequential, Stages, Trained};
pub use ferrospeed_pipeline::{
    PipelineError, boundary, division, draw, partition, schedule, simulate, validate,
};
