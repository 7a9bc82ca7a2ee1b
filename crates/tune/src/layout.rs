//! One way to lay a run out on its ranks, and all the ways that a configuration leaves open.
//!
//! What a configuration says stays; a list in it stands for choices, as in autotuning. Left open are the ZeRO stage, how many
//! ranks hold slices of a layer or share a sequence, the micro-batch, whether layers are computed again, and, on GPUs, what waits
//! in the host's memory. Pipeline stages and spread experts are taken as they are.

use std::fmt;

use ferrospeed_config::whole;
use serde::Serialize;
use serde_json::{Value, json};

use crate::model::Transformer;
use crate::plan::Processor;

/// What waits in the host's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Offload {
    /// What the configuration says: without a word, nothing.
    AsConfigured,
    /// Optimizer states.
    Optimizer,
    /// These and parameters.
    Everything,
}

/// One way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Layout {
    /// ZeRO stage.
    pub stage: u8,
    /// Samples of a rank in a micro-batch.
    pub micro_batch: u64,
    /// Micro-batches of a step.
    pub accumulation: u64,
    /// Whether layers are computed again in backward.
    pub recompute: bool,
    /// Ranks that hold slices of each layer.
    pub tensor: u64,
    /// Ranks that share each sequence.
    pub sequence: u64,
    /// What waits elsewhere.
    pub offload: Offload,
}

impl Layout {
    /// Ranks of so many that see samples of their own.
    pub fn data_ranks(&self, ranks: u64) -> u64 {
        (ranks / self.tensor.saturating_mul(self.sequence).max(1)).max(1)
    }

    /// A configuration that is laid out so. Recomputation is not among its keys: a recipe's `model.activation_checkpointing`
    /// asks for it.
    pub fn applied_to(&self, ds_config: &Value) -> Value {
        let mut config = ds_config.clone();
        if let Some(config) = config.as_object_mut() {
            config.remove("autotuning");
            config.remove("train_batch_size");
        }
        config["train_micro_batch_size_per_gpu"] = self.micro_batch.into();
        config["gradient_accumulation_steps"] = self.accumulation.into();
        config["zero_optimization"]["stage"] = self.stage.into();
        if self.tensor > 1 || !config["tensor_parallel"].is_null() {
            config["tensor_parallel"]["autotp_size"] = self.tensor.into();
        }
        if self.sequence > 1 || !config["sequence_parallel_size"].is_null() {
            config["sequence_parallel_size"] = self.sequence.into();
        }
        let host = || json!({"device": "cpu", "pin_memory": true});
        if self.offload != Offload::AsConfigured {
            config["zero_optimization"]["offload_optimizer"] = host();
        }
        if self.offload == Offload::Everything {
            config["zero_optimization"]["offload_param"] = host();
        }
        config
    }
}

impl fmt::Display for Layout {
    /// As DeepSpeed names experiments; what it has no name for follows.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "z{}_gas{}_tmbspg{}", self.stage, self.accumulation, self.micro_batch)?;
        if self.tensor > 1 {
            write!(f, "_tp{}", self.tensor)?;
        }
        if self.sequence > 1 {
            write!(f, "_sp{}", self.sequence)?;
        }
        match self.offload {
            Offload::AsConfigured => {}
            Offload::Optimizer => f.write_str("_oo")?,
            Offload::Everything => f.write_str("_oa")?,
        }
        if self.recompute { f.write_str("_ac") } else { Ok(()) }
    }
}

/// How samples become micro-batches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Batch {
    /// A step has so many, however they are divided.
    OfStep(u64),
    /// These sizes, so many micro-batches of them.
    OfMicroBatches {
        /// Samples.
        sizes: Vec<u64>,
        /// How many.
        accumulation: u64,
    },
}

/// What may be chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Space {
    /// ZeRO stages.
    pub stages: Vec<u8>,
    /// Ranks that hold slices, and ranks that share sequences.
    pub meshes: Vec<(u64, u64)>,
    /// Whether layers are computed again.
    pub recomputes: Vec<bool>,
    /// What waits elsewhere.
    pub offloads: Vec<Offload>,
    /// Samples.
    pub batch: Batch,
    /// The smallest and largest micro-batch.
    pub micro_batches: (u64, u64),
}

/// What a space is made for.
#[derive(Debug, Clone, Copy)]
pub struct Open<'a> {
    /// The configuration as it was written.
    pub ds_config: &'a Value,
    /// The model, whole.
    pub model: &'a Transformer,
    /// Ranks.
    pub ranks: u64,
    /// Tokens per sample.
    pub sequence_length: u64,
    /// What ranks compute on.
    pub processor: Processor,
    /// Whether layers are computed again in any case.
    pub recomputes: bool,
    /// Whether ranks hold stages or other experts: then the mesh stays as it is.
    pub is_divided: bool,
}

/// Sizes without a bound are powers of two up to this one.
const LARGEST_POWER: u32 = 19;
/// Larger micro-batches and more slices or parts are not looked at.
const LARGEST_SIZE: u64 = 1 << LARGEST_POWER;
const MOST_SLICES: u64 = 1 << 16;

impl Space {
    /// All that a configuration leaves open.
    pub fn left_open_by(open: &Open<'_>) -> Space {
        let config = open.ds_config;
        let zero = &config["zero_optimization"];
        let stages: Vec<u8> =
            numbers(&zero["stage"]).into_iter().filter_map(|stage| u8::try_from(stage).ok()).collect();
        let all_stages = if open.is_divided { vec![0, 1] } else { vec![0, 1, 2, 3] };
        let says_offload = !zero["offload_optimizer"].is_null() || !zero["offload_param"].is_null();
        let offloads = match open.processor {
            Processor::Gpu if !says_offload => {
                vec![Offload::AsConfigured, Offload::Optimizer, Offload::Everything]
            }
            // A rank without a GPU computes in the host's memory.
            _ => vec![Offload::AsConfigured],
        };
        let sizes = numbers(&config["train_micro_batch_size_per_gpu"]);
        let accumulation = whole(&config["gradient_accumulation_steps"]).unwrap_or(1).max(1);
        let batch = match (sizes.is_empty(), whole(&config["train_batch_size"])) {
            (true, Some(batch)) => Batch::OfStep(batch),
            (true, None) => Batch::OfMicroBatches {
                sizes: (0..=LARGEST_POWER).map(|power| 1 << power).collect(),
                accumulation,
            },
            (false, _) => Batch::OfMicroBatches { sizes, accumulation },
        };
        Space {
            stages: if stages.is_empty() { all_stages } else { stages },
            meshes: meshes(open),
            recomputes: if open.recomputes { vec![true] } else { vec![false, true] },
            offloads,
            batch,
            micro_batches: (1, u64::MAX),
        }
    }

    /// Every choice, on so many ranks.
    pub fn layouts(&self, ranks: u64) -> Vec<Layout> {
        let mut all = Vec::new();
        for &(tensor, sequence) in &self.meshes {
            for (micro_batch, accumulation) in self.sizes(ranks / (tensor * sequence).max(1)) {
                for &stage in &self.stages {
                    for &offload in &self.offloads {
                        let is_possible = match offload {
                            Offload::AsConfigured => true,
                            Offload::Optimizer => stage >= 1,
                            Offload::Everything => stage == 3,
                        };
                        let ways = self.recomputes.iter().filter(|_| is_possible);
                        all.extend(ways.map(|&recompute| Layout {
                            stage,
                            micro_batch,
                            accumulation,
                            recompute,
                            tensor,
                            sequence,
                            offload,
                        }));
                    }
                }
            }
        }
        all
    }

    /// Micro-batches, and how many of them, on so many ranks that see samples of their own.
    fn sizes(&self, data_ranks: u64) -> Vec<(u64, u64)> {
        let (least, most) = self.micro_batches;
        let all: Vec<(u64, u64)> = match &self.batch {
            Batch::OfStep(batch) if data_ranks > 0 && batch.is_multiple_of(data_ranks) => {
                let own = batch / data_ranks;
                (1..=own.min(LARGEST_SIZE))
                    .filter(|size| own.is_multiple_of(*size))
                    .map(|size| (size, own / size))
                    .collect()
            }
            Batch::OfStep(_) => Vec::new(),
            Batch::OfMicroBatches { sizes, accumulation } => {
                sizes.iter().map(|&size| (size, *accumulation)).collect()
            }
        };
        all.into_iter().filter(|(size, _)| (least..=most).contains(size)).collect()
    }
}

/// A number, or the numbers of a list.
fn numbers(value: &Value) -> Vec<u64> {
    match value {
        Value::Array(list) => list.iter().filter_map(whole).collect(),
        one => whole(one).into_iter().collect(),
    }
}

/// Ways to divide ranks: heads and inner channels must divide into slices, tokens into parts.
fn meshes(open: &Open<'_>) -> Vec<(u64, u64)> {
    let given = |value: &Value| Some(numbers(value)).filter(|sizes| !sizes.is_empty());
    let tensor = given(&open.ds_config["tensor_parallel"]["autotp_size"]);
    let sequence = given(&open.ds_config["sequence_parallel_size"]);
    let divisors = || -> Vec<u64> {
        match open.is_divided {
            true => vec![1],
            false => (1..=open.ranks.clamp(1, MOST_SLICES))
                .filter(|size| open.ranks.is_multiple_of(*size))
                .collect(),
        }
    };
    let (heads, inner) = (open.model.heads, open.model.intermediate);
    let mut all = Vec::new();
    for slices in tensor.unwrap_or_else(divisors) {
        for parts in sequence.clone().unwrap_or_else(divisors) {
            let product = slices.max(1).saturating_mul(parts.max(1));
            let is_possible = slices > 0
                && parts > 0
                && open.ranks.is_multiple_of(product)
                && heads.is_multiple_of(slices)
                && inner.is_multiple_of(slices)
                // A ring gives each rank two pieces of a sequence.
                && (parts == 1 || open.sequence_length.is_multiple_of(2 * parts));
            if is_possible {
                all.push((slices, parts));
            }
        }
    }
    all
}
