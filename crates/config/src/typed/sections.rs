//! The smaller sections.

use serde::{Deserialize, Serialize};

/// `activation_checkpointing`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ActivationCheckpointing {
    /// Split kept activations over tensor-parallel ranks.
    pub partition_activations: bool,
    /// Checkpointed calls per forward pass.
    pub number_checkpoints: Option<u64>,
    /// Keep them in one buffer.
    pub contiguous_memory_optimization: bool,
    /// Wait for the device at each checkpoint.
    pub synchronize_checkpoint_boundary: bool,
    /// Time each checkpointed call.
    pub profile: bool,
    /// Keep them in host memory.
    pub cpu_checkpointing: bool,
}

/// Where training curves go; each is `None` when it is off.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Monitors {
    /// TensorBoard files.
    pub tensorboard: Option<Tensorboard>,
    /// CSV files.
    pub csv_monitor: Option<CsvMonitor>,
    /// Weights & Biases.
    pub wandb: Option<Wandb>,
}

/// `tensorboard`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tensorboard {
    /// The folder.
    pub output_path: String,
    /// The folder of this run below it.
    pub job_name: String,
}

/// `csv_monitor`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CsvMonitor {
    /// The folder.
    pub output_path: String,
    /// The folder of this run below it.
    pub job_name: String,
}

/// `wandb`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wandb {
    /// The group of runs.
    pub group: Option<String>,
    /// The team that owns the project.
    pub team: Option<String>,
    /// The project.
    pub project: String,
    /// The folder that runs are kept in.
    pub dir: Option<String>,
}

/// `comms_logger`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommsLogger {
    /// Record all collectives.
    pub prof_all: bool,
    /// Record these, when not all.
    pub prof_ops: Vec<String>,
    /// Log each as it happens.
    pub verbose: bool,
    /// Name the caller of each.
    pub debug: bool,
}

/// `flops_profiler`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FlopsProfiler {
    /// Forward passes that the report takes backward to repeat.
    pub recompute_fwd_factor: f64,
    /// Which step, from 0.
    pub profile_step: u64,
    /// Levels of the summary by class; -1 goes to the level above the last.
    pub module_depth: i64,
    /// Classes named at each level.
    pub top_modules: u64,
    /// Print the tree of modules.
    pub detailed: bool,
    /// Write there instead of to the log.
    pub output_file: Option<String>,
}

/// The number of pipeline stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(from = "serde_json::Value")]
pub enum PipelineStages {
    /// As many as the module says.
    Auto,
    /// This many.
    Fixed(u64),
}

impl From<serde_json::Value> for PipelineStages {
    fn from(value: serde_json::Value) -> Self {
        value.as_u64().map_or(PipelineStages::Auto, PipelineStages::Fixed)
    }
}

/// `pipeline`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Pipeline {
    /// How many stages.
    pub stages: PipelineStages,
    /// How layers are divided.
    pub partition: String,
    /// The order of a step's work.
    pub schedule: String,
    /// Seed each layer by its index.
    pub seed_layers: bool,
    /// Recompute every this many layers; 0 never.
    pub activation_checkpoint_interval: u64,
    /// Send a share of activations per tensor-parallel rank.
    pub pipe_partitioned: bool,
    /// The same for gradients.
    pub grad_partitioned: bool,
}

/// What happens when ranks disagree about a checkpoint's tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum TagValidation {
    /// Nothing.
    Ignore,
    /// A warning.
    Warn,
    /// An error.
    Fail,
}

/// `checkpoint`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// What happens when ranks disagree about the tag.
    pub tag_validation: TagValidation,
    /// Load a universal checkpoint.
    pub load_universal: bool,
    /// Each node writes to its own disk.
    pub use_node_local_storage: bool,
}

/// `aio`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AsyncIo {
    /// Bytes per request.
    pub block_size: u64,
    /// Requests in flight.
    pub queue_depth: u64,
    /// Threads per request.
    pub thread_count: u64,
    /// Submit one request at a time.
    pub single_submit: bool,
    /// Submit while others complete.
    pub overlap_events: bool,
}

/// `hybrid_engine`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HybridEngine {
    /// Longest generated text.
    pub max_out_tokens: u64,
    /// Tensor-parallel size while generating.
    pub inference_tp_size: u64,
    /// Free the cache after generating.
    pub release_inference_cache: bool,
    /// Page-lock offloaded parameters.
    pub pin_parameters: bool,
    /// Layers gathered at once.
    pub tp_gather_partition_size: u64,
}
