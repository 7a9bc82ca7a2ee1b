//! Profiling: operations, multiply-accumulates, parameters and times of a model's modules.
//!
//! The `flops_profiler` section profiles one micro-batch of one step. [`FlopsProfiler`] counts between start and stop;
//! [`ModelProfile::measure`] is DeepSpeed's `get_model_profile`, of any function: one that generates, for its `mode="generate"`.
//!
//! ```
//! use ferrospeed::nn::{Init, Linear};
//! use ferrospeed::profiling::{FlopsProfiler, ModelProfile, NumberStyle, ReportOptions};
//! use ferrospeed::tensor::store::{FromInitializers, PlainStore};
//! use ferrospeed::{DType, Tensor};
//!
//! # fn main() -> Result<(), ferrospeed::Failure> {
//! let (init, device) = (Init::root(), ferrospeed::cpu::device());
//! let layer = Linear::new(&init.at("proj"), 256, 128, true);
//! let parameters = init.parameters();
//! let _store = PlainStore::attach(parameters.as_slice(), DType::F32, &device, &FromInitializers { seed: 1 })?;
//! let x = Tensor::zeros([16, 256], DType::F32, &device)?;
//! let profile = ModelProfile::measure(&device, &parameters, 1, || layer.forward(&x))?;
//! assert_eq!(NumberStyle::default().macs(profile.macs() as f64), "524.29 KMACs");
//!
//! let mut profiler = FlopsProfiler::new(&device, &parameters);
//! profiler.start_profile(&[]);
//! profiler.profiled(|| layer.forward(&x))?;
//! profiler.stop_profile();
//! assert_eq!(profiler.get_total_flops(), profile.flops());
//! println!("{}", profiler.report(1, &ReportOptions { module_depth: -1, top_modules: 1, detailed: true }));
//! profiler.end_profile();
//! # Ok(())
//! # }
//! ```

pub use ferrospeed_engine::{FlopsProfiler, ModelProfile, ReportOptions, machine};
pub use ferrospeed_observe::flops::Module;
pub use ferrospeed_observe::flops::format::NumberStyle;
pub use ferrospeed_observe::roofline;
pub use ferrospeed_tensor::profile;
