//! Memory: what a model's states need before it is made, and what a device holds now.
//!
//! [`zero2`] and [`zero3`] are DeepSpeed's estimators, [`zero2_table`] and [`zero3_table`] what it prints. They know nothing of
//! activations; `ferrospeed plan` does. [`Engine::see_memory_usage`](crate::Engine::see_memory_usage) tells what is there.
//!
//! ```
//! use ferrospeed::memory::{ModelSize, Setup, Zero3Offload, zero3, zero3_table};
//! use ferrospeed::nn::{Init, Linear};
//!
//! // Handles cost nothing: no value exists before a store gives it one.
//! let init = Init::root();
//! Linear::new(&init.at("up"), 4096, 16384, true);
//! Linear::new(&init.at("down"), 16384, 4096, true);
//! let parameters = init.parameters();
//! let named = parameters.as_slice().iter().map(|param| (param.name(), param.id(), param.numel() as u64));
//! let size = ModelSize::of_named(named);
//! assert_eq!(size.total_params, 134_238_208);
//! let on_8_gpus = Setup::new(1, 8);
//! let estimate = zero3(size, Zero3Offload::None, true, on_8_gpus);
//! assert_eq!(estimate.device_bytes, 4 * 67_125_248 + 18 * 134_238_208 / 8);
//! println!("{}", zero3_table(size, on_8_gpus));
//! ```

pub use ferrospeed_tune::estimate::{
    Estimate, ModelSize, Setup, Zero3Offload, zero2, zero2_table, zero3, zero3_table,
};
