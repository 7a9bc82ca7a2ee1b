//! Counting what parts of a program do, by hand: DeepSpeed's `FlopsProfiler` and `get_model_profile`.
//!
//! ```
//! use ferrospeed_engine::FlopsProfiler;
//! use ferrospeed_nn::{Init, Linear};
//! use ferrospeed_tensor::store::{FromInitializers, PlainStore};
//! use ferrospeed_tensor::{DType, Tensor};
//!
//! # fn main() -> ferrospeed_tensor::Result<()> {
//! let (init, device) = (Init::root(), ferrospeed_cpu::device());
//! let layer = Linear::new(&init.at("proj"), 4, 2, true);
//! let params = init.parameters();
//! let _store = PlainStore::attach(params.as_slice(), DType::F32, &device, &FromInitializers { seed: 1 })?;
//! let x = Tensor::zeros([3, 4], DType::F32, &device)?;
//! let mut profiler = FlopsProfiler::new(&device, &params);
//! profiler.start_profile(&[]);
//! profiler.profiled(|| layer.forward(&x))?;
//! profiler.stop_profile();
//! profiler.profiled(|| layer.forward(&x))?; // is not counted
//! assert_eq!((profiler.get_total_flops(), profiler.get_total_params()), (48, 10));
//! assert_eq!(profiler.text_of_macs(), "24 MACs");
//! # Ok(())
//! # }
//! ```

use ferrospeed_nn::Parameters;
use ferrospeed_observe::flops::format::NumberStyle;
use ferrospeed_tensor::Device;
use ferrospeed_tensor::profile::{self, Profile};

use crate::model_profile::{ModelProfile, ReportOptions};

/// Counts what runs inside [`FlopsProfiler::profiled`] between start and stop.
#[derive(Debug)]
pub struct FlopsProfiler {
    device: Device,
    parameters: Parameters,
    counted: Profile,
    ignored: Vec<String>,
    is_on: bool,
}

impl FlopsProfiler {
    /// Of the model with these parameters.
    pub fn new(device: &Device, parameters: &Parameters) -> FlopsProfiler {
        FlopsProfiler {
            device: device.clone(),
            parameters: parameters.clone(),
            counted: Profile::default(),
            ignored: Vec::new(),
            is_on: false,
        }
    }

    /// Counts from now on, from nothing. What modules of the classes `ignore_list` do counts as done by those above them.
    pub fn start_profile(&mut self, ignore_list: &[&str]) {
        self.reset_profile();
        self.ignored = ignore_list.iter().map(|class| (*class).to_owned()).collect();
        self.is_on = true;
    }

    /// Runs a part of the program, and counts it if it is to be.
    pub fn profiled<R>(&mut self, work: impl FnOnce() -> R) -> R {
        if !self.is_on {
            return work();
        }
        let (result, counted) = profile::collect(&self.device, work);
        self.counted.merge(counted);
        result
    }

    /// Counts no more; what was counted stays.
    pub fn stop_profile(&mut self) {
        self.is_on = false;
    }

    /// Forgets what was counted, and goes on counting where it did.
    pub fn reset_profile(&mut self) {
        self.counted = Profile::default();
    }

    /// Counts no more, and forgets.
    pub fn end_profile(&mut self) {
        self.stop_profile();
        self.reset_profile();
        self.ignored.clear();
    }

    /// What was counted, by module.
    pub fn model_profile(&self) -> ModelProfile {
        let (params, aliases) = (self.parameters.as_slice(), self.parameters.aliases());
        let ignored: Vec<&str> = self.ignored.iter().map(String::as_str).collect();
        ModelProfile::new(self.counted.clone(), params, aliases).without(&ignored)
    }

    /// Floating-point operations of forward.
    pub fn get_total_flops(&self) -> u64 {
        self.model_profile().flops()
    }

    /// Multiply-accumulates of forward.
    pub fn get_total_macs(&self) -> u64 {
        self.model_profile().macs()
    }

    /// Seconds of forward.
    pub fn get_total_duration(&self) -> f64 {
        self.model_profile().model().seconds
    }

    /// Parameters.
    pub fn get_total_params(&self) -> u64 {
        self.model_profile().params()
    }

    /// [`FlopsProfiler::get_total_flops`] as DeepSpeed writes it.
    pub fn text_of_flops(&self) -> String {
        NumberStyle::default().number(self.get_total_flops() as f64)
    }

    /// [`FlopsProfiler::get_total_macs`] as DeepSpeed writes it.
    pub fn text_of_macs(&self) -> String {
        NumberStyle::default().macs(self.get_total_macs() as f64)
    }

    /// [`FlopsProfiler::get_total_duration`] as DeepSpeed writes it.
    pub fn text_of_duration(&self) -> String {
        NumberStyle::default().duration(self.get_total_duration())
    }

    /// [`FlopsProfiler::get_total_params`] as DeepSpeed writes it.
    pub fn text_of_params(&self) -> String {
        NumberStyle::default().params(self.get_total_params() as f64)
    }

    /// The whole report: DeepSpeed's `print_model_profile`, to be printed or written.
    pub fn report(&self, profile_step: u64, options: &ReportOptions) -> String {
        self.model_profile().report(profile_step, options)
    }

    /// The modules of each level that took most: DeepSpeed's `print_model_aggregated_profile`.
    pub fn aggregated(&self, options: &ReportOptions) -> String {
        self.model_profile().aggregated(options)
    }
}
