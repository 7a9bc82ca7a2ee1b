//! Autotuning of a program's own training: a function that tries a configuration.
//!
//! ```
//! use ferrospeed_tune::tuning::program::autotune;
//! use ferrospeed_tune::tuning::{Metric, tuner::TunerOptions};
//! use serde_json::json;
//!
//! let base = json!({"optimizer": {"type": "AdamW"}});
//! let space = json!({"train_micro_batch_size_per_gpu": [1, 2, 4], "zero_optimization": {"stage": [0, 1]}});
//! let records = autotune(&base, &space, Metric::Throughput, &TunerOptions::default(), |ds_config| {
//!     // Train some steps and say how many samples passed in a second; `None` where it did not fit.
//!     let batch = ds_config["train_micro_batch_size_per_gpu"].as_u64()?;
//!     (batch < 4).then_some(batch as f64)
//! });
//! let best = records.best().unwrap();
//! assert_eq!(best.experiment.ds_config["train_micro_batch_size_per_gpu"], 2);
//! ```

use std::convert::Infallible;

use serde_json::Value;

use super::tuner::{TunerOptions, tune};
use super::{Experiment, Laboratory, Metric, Records, space};

/// A program that tries a configuration, and says what it measured.
struct Program<F>(F);

impl<F: FnMut(&Value) -> Option<f64>> Laboratory for Program<F> {
    type Error = Infallible;

    fn run(&mut self, experiments: &[Experiment]) -> Result<Vec<Option<f64>>, Infallible> {
        Ok(experiments.iter().map(|experiment| (self.0)(&experiment.ds_config)).collect())
    }
}

/// Tries the configurations that `base` becomes by each choice of a value for the lists in `choices`, in the order and as long as
/// the options say. `run` trains some steps by one and says what it measured, or nothing where that failed.
pub fn autotune(
    base: &Value,
    choices: &Value,
    metric: Metric,
    options: &TunerOptions,
    run: impl FnMut(&Value) -> Option<f64>,
) -> Records {
    let experiment = |(number, choice): (usize, Value)| {
        let mut ds_config = base.clone();
        space::overlay(&mut ds_config, &choice);
        Experiment { name: format!("program_{number}"), ds_config }
    };
    let experiments: Vec<Experiment> =
        space::combinations(choices).into_iter().enumerate().map(experiment).collect();
    let Ok(tried) = tune(options, metric, &experiments, &mut Program(run));
    let mut records = Records::new(metric);
    for (experiment, value) in &tried {
        records.note("program", experiment, *value);
    }
    records
}
