//! Autotuning: which configurations to try, in which order, and which of them was best.
//!
//! Everything here is a pure rule over a [`Laboratory`], which runs experiments: real ones in the command line's, simulated
//! ones in tests. [`deepspeed`] searches as DeepSpeed does; [`planned`] begins where a model of costs says it is best and
//! measures a handful of neighbours.

mod boosting;
pub mod deepspeed;
pub mod machine;
mod memory;
pub mod naming;
pub mod planned;
pub mod program;
mod records;
pub mod space;
pub mod tuner;

use ferrospeed_config::whole;
use serde_json::Value;

pub use memory::{ModelInfo, Number, Precision, instantiation_bytes};
pub use records::{Best, Records};

/// What is optimised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Metric {
    /// Samples per second.
    #[default]
    Throughput,
    /// Time of a step.
    Latency,
    /// Floating-point operations per second.
    Flops,
}

impl Metric {
    /// By its name in a configuration.
    pub fn named(name: &str) -> Option<Metric> {
        match name {
            "throughput" => Some(Metric::Throughput),
            "latency" => Some(Metric::Latency),
            "flops" | "FLOPS_per_gpu" => Some(Metric::Flops),
            _ => None,
        }
    }

    /// Its key in an experiment's measurements.
    pub fn key(self) -> &'static str {
        match self {
            Metric::Throughput => "throughput",
            Metric::Latency => "latency",
            Metric::Flops => "FLOPS_per_gpu",
        }
    }

    /// Whether one value is better than another: times are better small.
    pub fn is_better(self, value: f64, than: f64) -> bool {
        match self {
            Metric::Latency => value < than,
            Metric::Throughput | Metric::Flops => value > than,
        }
    }

    /// By which share one value is better than another; negative where it is worse.
    fn gain(self, value: f64, than: f64) -> f64 {
        match self {
            Metric::Latency => (than - value) / than,
            Metric::Throughput | Metric::Flops => (value - than) / than,
        }
    }
}

/// One configuration to try.
#[derive(Debug, Clone, PartialEq)]
pub struct Experiment {
    /// Its name, and that of its folder.
    pub name: String,
    /// The configuration.
    pub ds_config: Value,
}

impl Experiment {
    /// Samples of a rank in a micro-batch.
    pub fn micro_batch(&self) -> u64 {
        whole(&self.ds_config["train_micro_batch_size_per_gpu"]).unwrap_or(0)
    }
}

/// Runs experiments.
pub trait Laboratory {
    /// What ends the search: nothing that an experiment does.
    type Error;

    /// What each of some experiments measured; nothing where it failed, ran out of memory or out of time.
    fn run(&mut self, experiments: &[Experiment]) -> Result<Vec<Option<f64>>, Self::Error>;
}
