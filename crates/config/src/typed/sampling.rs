//! `data_efficiency.data_sampling` with its curriculum on.

use std::path::PathBuf;

use serde_json::{Map, Value};

use super::Reader;

/// The metric that cuts sequences, as those who train with DeepSpeed call it.
pub const CUTS_SEQUENCES: &str = "seqlen_truncate";

/// Samples by difficulty.
#[derive(Debug, Clone, PartialEq)]
pub struct DataSampling {
    /// Samples are at most so many times the sequences.
    pub num_epochs: u64,
    /// What sequences have to reach.
    pub metrics: Vec<CurriculumMetric>,
    /// How long sequences are: a section as `curriculum_learning` is one.
    pub cut: Option<Value>,
}

/// A metric that sequences come in by.
#[derive(Debug, Clone, PartialEq)]
pub struct CurriculumMetric {
    /// Its name in the configuration.
    pub name: String,
    /// Sequences by rising difficulty.
    pub index_to_sample: PathBuf,
    /// What its difficulties are.
    pub difficulty: MetricDifficulty,
    /// How difficulty grows: a section as `curriculum_learning` is one.
    pub schedule: Value,
}

/// What the difficulties of a schedule are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MetricDifficulty {
    /// Values of the metric.
    Value {
        /// The values.
        index_to_metric: PathBuf,
    },
    /// Parts of the sequences.
    Percentile {
        /// How many there are.
        last: u64,
    },
}

/// The rules have seen to it that nothing is missing.
pub(super) fn build(full: &Map<String, Value>) -> Result<Option<DataSampling>, String> {
    let (read, sampling) = (Reader(full), "data_efficiency.data_sampling");
    let enabled: Option<bool> = read.get(&format!("{sampling}.curriculum_learning.enabled"))?;
    if enabled != Some(true) {
        return Ok(None);
    }
    let sections: Map<String, Value> =
        read.get(&format!("{sampling}.curriculum_learning.curriculum_metrics"))?;
    let (mut metrics, mut cut) = (Vec::new(), None);
    for (name, section) in sections {
        if name == CUTS_SEQUENCES {
            cut = Some(section);
            continue;
        }
        let path =
            |key: &str| section[key].as_str().map(PathBuf::from).ok_or(format!("`{name}.{key}` is no path"));
        let difficulty = match section["difficulty_type"].as_str() {
            Some("value") => MetricDifficulty::Value { index_to_metric: path("index_to_metric_path")? },
            _ => {
                MetricDifficulty::Percentile { last: section["max_difficulty"].as_u64().unwrap_or(1).max(1) }
            }
        };
        let index_to_sample = path("index_to_sample_path")?;
        metrics.push(CurriculumMetric { name, index_to_sample, difficulty, schedule: section });
    }
    Ok(Some(DataSampling { num_epochs: read.get(&format!("{sampling}.num_epochs"))?, metrics, cut }))
}
