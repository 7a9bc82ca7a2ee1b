//! The `autotuning` section, as the search needs it. The configuration has been checked before.

use std::path::PathBuf;
use std::time::Duration;

use ferrospeed_config::whole;
use ferrospeed_tune::tuning::Metric;
use ferrospeed_tune::tuning::tuner::{Order, TunerOptions};
use serde_json::Value;

/// Who chooses what is tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Method {
    /// A model of costs and the memory plan, confirmed by a few runs.
    Planned,
    /// DeepSpeed's rules.
    DeepSpeed,
}

/// The section, with its defaults.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    pub(super) method: Method,
    pub(super) metric: Metric,
    pub(super) fast: bool,
    pub(super) overwrite: bool,
    pub(super) results_dir: PathBuf,
    pub(super) exps_dir: PathBuf,
    /// Steps before those that are measured.
    pub(super) start_profile_step: u64,
    /// The last that is.
    pub(super) end_profile_step: u64,
    pub(super) deadline: Duration,
    pub(super) tuner: TunerOptions,
    pub(super) model_parallel: u64,
    pub(super) num_params: Option<u64>,
    pub(super) hidden_size: Option<u64>,
    pub(super) max_train_batch_size: Option<u64>,
    pub(super) max_micro_batch: u64,
    pub(super) min_micro_batch: u64,
    pub(super) num_micro_batches: u64,
}

impl Settings {
    pub(super) fn read(section: &Value) -> Result<Settings, String> {
        let number = |key: &str, default: u64| whole(&section[key]).unwrap_or(default);
        let text = |key: &str, default: &str| section[key].as_str().unwrap_or(default).to_owned();
        let refuse = |key: &str| format!("autotuning.{key}: {} is not known", section[key]);
        let (start_profile_step, end_profile_step) =
            (number("start_profile_step", 3), number("end_profile_step", 5));
        if start_profile_step > end_profile_step {
            return Err(format!(
                "autotuning.end_profile_step {end_profile_step} is before start_profile_step {start_profile_step}: nothing would be measured"
            ));
        }
        let seconds = section["deadline_s"].as_f64().unwrap_or(600.0);
        let deadline = Duration::try_from_secs_f64(seconds)
            .map_err(|error| format!("autotuning.deadline_s {seconds}: {error}"))?;
        Ok(Settings {
            method: match section["method"].as_str() {
                Some("deepspeed") => Method::DeepSpeed,
                _ => Method::Planned,
            },
            metric: Metric::named(&text("metric", "throughput")).ok_or_else(|| refuse("metric"))?,
            fast: section["fast"] != false,
            overwrite: section["overwrite"] != false,
            results_dir: text("results_dir", "autotuning_results").into(),
            exps_dir: text("exps_dir", "autotuning_exps").into(),
            start_profile_step,
            end_profile_step,
            deadline,
            tuner: TunerOptions {
                order: Order::named(&text("tuner_type", "gridsearch")).ok_or_else(|| refuse("tuner_type"))?,
                early_stopping: number("tuner_early_stopping", 5) as usize,
                num_trials: number("tuner_num_trials", 50) as usize,
                seed: 0,
            },
            model_parallel: number("mp_size", 1),
            num_params: whole(&section["model_info"]["num_params"]),
            hidden_size: whole(&section["model_info"]["hidden_size"]),
            max_train_batch_size: whole(&section["max_train_batch_size"]),
            max_micro_batch: number("max_train_micro_batch_size_per_gpu", 1024),
            min_micro_batch: number("min_train_micro_batch_size_per_gpu", 1),
            num_micro_batches: number("num_tuning_micro_batch_sizes", 3),
        })
    }
}
