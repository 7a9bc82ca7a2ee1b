//! Elastic batch sizes: one batch that divides evenly over many numbers of ranks.
//!
//! Version 0.1 multiplies the micro-batch sizes by highly composite numbers and keeps the batch that fits most rank
//! counts. Version 0.2 does so in whole nodes, and with model parallelism counts replicas instead of ranks.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// `elasticity`, once enabled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Elasticity {
    /// The largest batch.
    pub max_train_batch_size: u64,
    /// The micro-batch sizes to choose from.
    pub micro_batch_sizes: Vec<u64>,
    /// The fewest ranks.
    pub min_gpus: u64,
    /// The most ranks.
    pub max_gpus: u64,
    /// Ranks per node.
    pub num_gpus_per_node: u64,
    /// Ranks per model replica.
    pub model_parallel_size: u64,
    /// Which algorithm.
    pub version: Version,
    /// Among equals take the larger batch.
    pub prefer_larger_batch: bool,
}

/// Which algorithm chooses the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Version {
    /// Ranks one by one.
    #[serde(rename = "0.1")]
    V0_1,
    /// Whole nodes, and model parallelism.
    #[serde(rename = "0.2")]
    V0_2,
}

/// A batch and the numbers of ranks it fits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ElasticBatch {
    /// The batch.
    pub train_batch_size: u64,
    /// The numbers of model replicas that divide it.
    pub valid_replicas: Vec<u64>,
    /// The micro-batch for the replicas asked about.
    pub micro_batch_size: Option<u64>,
}

/// Why there is no elastic batch.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ElasticityError {
    /// A micro-batch is larger than the largest batch.
    #[error("the micro-batch size {micro} is larger than max_train_batch_size {max}")]
    MicroBatchTooLarge {
        /// The micro-batch.
        micro: u64,
        /// The largest batch.
        max: u64,
    },
    /// Version 0.2 depends on the number of ranks.
    #[error("elasticity version 0.2 needs the number of ranks; set WORLD_SIZE")]
    WorldSizeUnknown,
    /// The number of ranks fits no batch.
    #[error(
        "{replicas} model replicas do not divide the elastic batch {batch}; these numbers do: {}",
        show(valid)
    )]
    IncompatibleWorldSize {
        /// The replicas.
        replicas: u64,
        /// The batch.
        batch: u64,
        /// The numbers that would fit.
        valid: Vec<u64>,
    },
    /// Nodes cannot be cut into replicas.
    #[error("num_gpus_per_node {per_node} is not a multiple of model_parallel_size {model_parallel}")]
    NodeNotDivisible {
        /// Ranks per node.
        per_node: u64,
        /// Ranks per replica.
        model_parallel: u64,
    },
    /// Not even one sample of any micro-batch size per replica fits.
    #[error("no batch of at most {max} samples fits {replicas} model replicas")]
    NothingFits {
        /// The largest batch.
        max: u64,
        /// The replicas.
        replicas: u64,
    },
    /// What the scheduler handed on is no JSON.
    #[error("DEEPSPEED_ELASTICITY_CONFIG is no JSON: {0}")]
    SchedulerUnreadable(String),
    /// The scheduler planned with another section.
    #[error("the scheduler planned with another elasticity section: `{key}` was {theirs} there")]
    SchedulerDisagrees {
        /// The key that differs.
        key: &'static str,
        /// Its value there.
        theirs: String,
    },
    /// No micro-batch size divides a replica's share.
    #[error("none of the micro-batch sizes divides {share} samples per replica")]
    NoMicroBatch {
        /// The share.
        share: u64,
    },
}

impl Elasticity {
    /// Compares with the section as the scheduler saw it, which it hands on as JSON in `DEEPSPEED_ELASTICITY_CONFIG`.
    /// A scheduler that planned with another section would start numbers of ranks that do not fit.
    pub fn agree_with_scheduler(&self, section: &str) -> Result<(), ElasticityError> {
        let theirs: Value = serde_json::from_str(section)
            .map_err(|error| ElasticityError::SchedulerUnreadable(error.to_string()))?;
        let version = match self.version {
            Version::V0_1 => 0.1,
            Version::V0_2 => 0.2,
        };
        let their_version = match &theirs["version"] {
            Value::String(text) => text.parse().ok(),
            other => other.as_f64(),
        };
        let compared = [
            ("max_train_batch_size", theirs["max_train_batch_size"] == self.max_train_batch_size),
            ("micro_batch_sizes", theirs["micro_batch_sizes"] == Value::from(self.micro_batch_sizes.clone())),
            ("version", theirs["version"].is_null() || their_version == Some(version)),
        ];
        match compared.into_iter().find(|(_, agrees)| !agrees) {
            Some((key, _)) => {
                Err(ElasticityError::SchedulerDisagrees { key, theirs: theirs[key].to_string() })
            }
            None => Ok(()),
        }
    }
}

fn show(valid: &[u64]) -> String {
    let shown: Vec<String> = valid.iter().take(20).map(u64::to_string).collect();
    let more = if valid.len() > 20 { ", …" } else { "" };
    format!("[{}{more}]", shown.join(", "))
}

/// The largest batch the search considers; it keeps the search short whatever the file says.
pub const MAX_BATCH: u64 = 1 << 32;
/// The most micro-batch sizes it considers, for the same reason.
pub const MAX_MICRO_BATCH_SIZES: usize = 64;

/// Numbers with more divisors than any smaller one (Ramanujan 1915), up to 720720.
const HIGHLY_COMPOSITE: [u64; 38] = [
    1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120,
    20160, 25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400,
    665280, 720720,
];

/// Chooses the batch. `world_size` counts all ranks; without it version 0.1 still names the batch and its rank counts.
pub fn elastic_batch(
    elasticity: &Elasticity,
    world_size: Option<u64>,
) -> Result<ElasticBatch, ElasticityError> {
    let world_size = world_size.filter(|&size| size > 0);
    let model_parallel = elasticity.model_parallel_size.max(1);
    match elasticity.version {
        Version::V0_1 => {
            let (train_batch_size, valid_replicas) = best_batch(
                elasticity,
                elasticity.max_train_batch_size,
                elasticity.min_gpus,
                elasticity.max_gpus,
            )?;
            finish(elasticity, train_batch_size, valid_replicas, world_size)
        }
        Version::V0_2 => {
            let world_size = world_size.ok_or(ElasticityError::WorldSizeUnknown)?;
            let per_node = elasticity.num_gpus_per_node.max(1);
            if !per_node.is_multiple_of(model_parallel) {
                return Err(ElasticityError::NodeNotDivisible { per_node, model_parallel });
            }
            let replicas_per_node = per_node / model_parallel;
            let replicas = world_size / model_parallel;
            let (batch, nodes) = best_batch(
                elasticity,
                elasticity.max_train_batch_size / replicas_per_node,
                elasticity.min_gpus / per_node,
                elasticity.max_gpus / per_node,
            )?;
            let valid: Vec<u64> = nodes.iter().map(|nodes| nodes * replicas_per_node).collect();
            if valid.contains(&replicas) {
                return finish(elasticity, batch * replicas_per_node, valid, Some(replicas));
            }
            let batch = largest_multiple(elasticity, world_size, replicas_per_node, per_node)?;
            // A part of a node holds a part of a replica; only whole replicas count.
            let whole = world_size * replicas_per_node / per_node;
            finish(elasticity, batch, vec![whole], Some(replicas))
        }
    }
}

/// Version 0.2 where the node counts do not suit: the largest (or smallest) batch that these very ranks divide.
fn largest_multiple(
    elasticity: &Elasticity,
    world_size: u64,
    replicas_per_node: u64,
    per_node: u64,
) -> Result<u64, ElasticityError> {
    let max = elasticity.max_train_batch_size as f64;
    let replicas = world_size as f64 / per_node as f64 * replicas_per_node as f64;
    let candidates = elasticity.micro_batch_sizes.iter().map(|&micro| {
        let unit = micro as f64 * replicas;
        ((max / unit).floor() * unit) as u64
    });
    let candidates = candidates.filter(|&candidate| candidate > 0);
    let chosen = if elasticity.prefer_larger_batch { candidates.max() } else { candidates.min() };
    chosen.ok_or(ElasticityError::NothingFits {
        max: elasticity.max_train_batch_size,
        replicas: replicas as u64,
    })
}

/// Version 0.1: the batch up to `max_batch` that fits most counts between `min_count` and `max_count`.
fn best_batch(
    elasticity: &Elasticity,
    max_batch: u64,
    min_count: u64,
    max_count: u64,
) -> Result<(u64, Vec<u64>), ElasticityError> {
    let mut micros = elasticity.micro_batch_sizes.clone();
    micros.sort_unstable();
    micros.dedup();
    let micros = &micros;
    if let Some(&micro) = micros.iter().find(|&&micro| micro > max_batch) {
        return Err(ElasticityError::MicroBatchTooLarge { micro, max: max_batch });
    }
    let smallest = micros.iter().copied().min().unwrap_or(1).max(1);
    let min_count = min_count.max(1);
    let max_count = if max_count == 0 { max_batch / smallest } else { max_count };
    let mut best = (smallest, Vec::new());
    for base in
        micros.iter().copied().chain(least_common_multiple(micros).filter(|&multiple| multiple <= MAX_BATCH))
    {
        let batch = candidate(base, max_batch);
        let valid = valid_counts(batch, micros, min_count, max_count);
        let more = valid.len() > best.1.len();
        let preferred = if elasticity.prefer_larger_batch { batch > best.0 } else { batch < best.0 };
        if more || (valid.len() == best.1.len() && preferred) {
            best = (batch, valid);
        }
    }
    Ok(best)
}

fn candidate(base: u64, max_batch: u64) -> u64 {
    if base >= max_batch {
        return base;
    }
    let room = max_batch / base;
    let factor = HIGHLY_COMPOSITE.iter().rev().find(|&&number| number <= room).copied().unwrap_or(1);
    base * factor
}

/// `None` where it does not fit 64 bits, which is far beyond any batch.
fn least_common_multiple(numbers: &[u64]) -> Option<u64> {
    numbers.iter().try_fold(1u64, |multiple, &number| {
        (multiple / greatest_common_divisor(multiple, number)).checked_mul(number)
    })
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a.max(1) } else { greatest_common_divisor(b, a % b) }
}

/// The counts that divide the batch into whole micro-batches.
fn valid_counts(batch: u64, micros: &[u64], min_count: u64, max_count: u64) -> Vec<u64> {
    let mut counts = Vec::new();
    for &micro in micros.iter().filter(|&&micro| micro > 0 && batch.is_multiple_of(micro)) {
        let most = batch / micro;
        let mut divisor = 1;
        while divisor <= most / divisor {
            if most.is_multiple_of(divisor) {
                counts.extend([divisor, most / divisor]);
            }
            divisor += 1;
        }
    }
    counts.retain(|count| (min_count..=max_count).contains(count));
    counts.sort_unstable();
    counts.dedup();
    counts
}

/// Checks the replicas asked about and chooses their micro-batch.
fn finish(
    elasticity: &Elasticity,
    batch: u64,
    valid: Vec<u64>,
    replicas: Option<u64>,
) -> Result<ElasticBatch, ElasticityError> {
    let Some(replicas) = replicas else {
        return Ok(ElasticBatch { train_batch_size: batch, valid_replicas: valid, micro_batch_size: None });
    };
    if !valid.contains(&replicas) {
        return Err(ElasticityError::IncompatibleWorldSize { replicas, batch, valid });
    }
    let share = batch / replicas;
    let micro = elasticity
        .micro_batch_sizes
        .iter()
        .copied()
        .filter(|&micro| micro > 0 && share.is_multiple_of(micro))
        .max();
    let micro_batch_size = Some(micro.ok_or(ElasticityError::NoMicroBatch { share })?);
    Ok(ElasticBatch { train_batch_size: batch, valid_replicas: valid, micro_batch_size })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scheduler_that_planned_with_other_numbers_is_noticed() {
        let ours = Elasticity {
            max_train_batch_size: 100,
            micro_batch_sizes: vec![2, 4],
            min_gpus: 1,
            max_gpus: 8,
            num_gpus_per_node: 1,
            model_parallel_size: 1,
            version: Version::V0_2,
            prefer_larger_batch: true,
        };
        let same = r#"{"max_train_batch_size": 100, "micro_batch_sizes": [2, 4], "version": 0.2}"#;
        assert_eq!(ours.agree_with_scheduler(same), Ok(()));
        let other = r#"{"max_train_batch_size": 100, "micro_batch_sizes": [2], "version": 0.2}"#;
        let message = ours.agree_with_scheduler(other).expect_err("other sizes").to_string();
        assert_eq!(
            message,
            "the scheduler planned with another elasticity section: `micro_batch_sizes` was [2] there"
        );
        assert!(matches!(ours.agree_with_scheduler("{"), Err(ElasticityError::SchedulerUnreadable(_))));
    }
}
