//! The resolved configuration, in types that cannot hold a contradiction.

mod one_bit;
mod optimizer;
mod precision;
mod sampling;
mod scheduler;
mod sections;
mod torch;
mod zero;

pub use one_bit::{OneBit, OneBitLamb, OneBitRule, ZeroOneAdam};
pub use optimizer::{Adagrad, Adam, Lamb, Lion, Muon, Optimizer, ScheduleFree, Sgd};
pub use precision::{DataType, LossScale, Precision};
pub use sampling::{CUTS_SEQUENCES, CurriculumMetric, DataSampling, MetricDifficulty};
pub use scheduler::{
    LrRangeTest, OneCycle, PerGroup, Scheduler, WarmupCosineLr, WarmupDecayLr, WarmupLr, WarmupType,
};
pub use sections::{
    ActivationCheckpointing, AsyncIo, Checkpoint, CommsLogger, CsvMonitor, FlopsProfiler, HybridEngine,
    Monitors, Pipeline, PipelineStages, TagValidation, Tensorboard, Wandb,
};
pub use torch::{
    Anneal, ConstantLr, CosineAnnealingLr, CosineAnnealingWarmRestarts, CyclicLr, CyclicMode, ExponentialLr,
    LinearLr, MultiStepLr, OneCycleLr, PolynomialLr, ReduceLrOnPlateau, StepLr, Torch, TorchRule,
    TorchSchedule,
};
pub use zero::{
    GRADIENT_BYTES_UNDER_WAY, HostBuffers, NvmeBuffers, OptimizerOffload, OptimizerTier, ParameterOffload,
    ParameterTier, Stage, Zero,
};

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::batch::BatchSizes;
use crate::elasticity::Elasticity;

/// A configuration that was read, checked and resolved for a number of ranks.
///
/// ```
/// use ferrospeed_config::{AutoValues, Config, Stage};
/// let text = r#"{ "train_batch_size": 32, "zero_optimization": { "stage": 2 } }"#;
/// let (config, report) = Config::from_str("example", text)?.resolve(4.try_into()?, &AutoValues::new())?;
/// assert_eq!(config.batch.train_micro_batch_size_per_gpu.get(), 8);
/// assert_eq!(config.zero.stage, Stage::Gradients);
/// assert!(report.all().is_empty());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The batch sizes, which agree with the number of ranks.
    pub batch: BatchSizes,
    /// The optimizer, unless the program brings its own.
    pub optimizer: Option<Optimizer>,
    /// The learning-rate schedule.
    pub scheduler: Option<Scheduler>,
    /// The number format of training.
    pub precision: Precision,
    /// The largest global gradient norm.
    pub gradient_clipping: Option<f64>,
    /// Divide gradients before the sum instead of after.
    pub prescale_gradients: bool,
    /// Divide gradients by this before the sum, and make up for it after.
    pub gradient_predivide_factor: f64,
    /// Exchange embedding gradients as rows.
    pub sparse_gradients: bool,
    /// The format in which gradients travel; `None` follows the precision.
    pub communication_data_type: Option<DataType>,
    /// The same under sequence parallelism.
    pub seq_parallel_comm_data_type: DataType,
    /// The format in which gradients accumulate; `None` follows the precision.
    pub grad_accum_dtype: Option<DataType>,
    /// Where model states live.
    pub zero: Zero,
    /// Run ZeRO with an optimizer outside its tested list.
    pub zero_allow_untested_optimizer: bool,
    /// Recomputation of activations.
    pub activation_checkpointing: ActivationCheckpointing,
    /// Report progress every this many steps.
    pub steps_per_print: Option<u64>,
    /// Time the parts of a step.
    pub wall_clock_breakdown: bool,
    /// Report memory around the parts of a step.
    pub memory_breakdown: bool,
    /// Print the engine after construction.
    pub dump_state: bool,
    /// Where training curves go.
    pub monitors: Monitors,
    /// Recording of collectives; `None` when it is off.
    pub comms_logger: Option<CommsLogger>,
    /// Counting of operations; `None` when it is off.
    pub flops_profiler: Option<FlopsProfiler>,
    /// Pipeline parallelism.
    pub pipeline: Pipeline,
    /// Checkpoints.
    pub checkpoint: Checkpoint,
    /// Asynchronous reads and writes.
    pub aio: AsyncIo,
    /// The elastic batch, when it is on.
    pub elasticity: Option<Elasticity>,
    /// Training and generation with one model; `None` when it is off.
    pub hybrid_engine: Option<HybridEngine>,
    /// Drop the last batch when it is not full.
    pub dataloader_drop_last: bool,
    /// Rank order of mixture-of-experts groups.
    pub use_data_before_expert_parallelism: bool,
    /// Seed of the data sampler.
    pub data_seed: u64,
    /// Samples by difficulty; `None` when they come as they are.
    pub data_sampling: Option<DataSampling>,
    full: Map<String, Value>,
}

impl Config {
    /// Every option with its resolved value, defaults included. DeepSpeed reads it too.
    pub fn to_json(&self) -> Value {
        Value::Object(self.full.clone())
    }

    /// One section of [`Config::to_json`], checked against the table but without a type of its own yet.
    pub fn section(&self, name: &str) -> Option<&Value> {
        self.full.get(name).filter(|value| !value.is_null())
    }

    /// A number that is equal on two ranks exactly when they run the same configuration.
    pub fn canonical_hash(&self) -> u64 {
        crate::canonical::hash(&Value::Object(self.full.clone()))
    }

    /// Builds the typed form. The table has checked every value, so a failure here is a disagreement between the
    /// table and a type, which the message names.
    pub(crate) fn build(
        full: Map<String, Value>,
        batch: BatchSizes,
        elasticity: Option<Elasticity>,
    ) -> Result<Config, String> {
        let read = Reader(&full);
        Ok(Config {
            batch,
            optimizer: optimizer::build(&full)?,
            scheduler: scheduler::build(&full)?,
            precision: precision::build(&full)?,
            gradient_clipping: Some(read.get::<f64>("gradient_clipping")?).filter(|&norm| norm > 0.0),
            prescale_gradients: read.get("prescale_gradients")?,
            gradient_predivide_factor: read.get("gradient_predivide_factor")?,
            sparse_gradients: read.get("sparse_gradients")?,
            communication_data_type: read.get("communication_data_type")?,
            seq_parallel_comm_data_type: read.get("seq_parallel_comm_data_type")?,
            grad_accum_dtype: read.get("data_types.grad_accum_dtype")?,
            zero: zero::build(&full)?,
            zero_allow_untested_optimizer: read.get("zero_allow_untested_optimizer")?,
            activation_checkpointing: read.get("activation_checkpointing")?,
            steps_per_print: read.get("steps_per_print")?,
            wall_clock_breakdown: read.get("wall_clock_breakdown")?,
            memory_breakdown: read.get("memory_breakdown")?,
            dump_state: read.get("dump_state")?,
            monitors: Monitors {
                tensorboard: read.when_enabled("tensorboard")?,
                csv_monitor: read.when_enabled("csv_monitor")?,
                wandb: read.when_enabled("wandb")?,
            },
            comms_logger: read.when_enabled("comms_logger")?,
            flops_profiler: read.when_enabled("flops_profiler")?,
            pipeline: read.get("pipeline")?,
            checkpoint: read.get("checkpoint")?,
            aio: read.get("aio")?,
            elasticity,
            hybrid_engine: read.when_enabled("hybrid_engine")?,
            dataloader_drop_last: read.get("dataloader_drop_last")?,
            use_data_before_expert_parallelism: read.get("use_data_before_expert_parallelism")?,
            data_seed: read.get("data_efficiency.seed")?,
            data_sampling: sampling::build(&full)?,
            full,
        })
    }
}

/// Reads typed values from the full configuration.
#[derive(Clone, Copy)]
pub(crate) struct Reader<'a>(pub(crate) &'a Map<String, Value>);

impl Reader<'_> {
    /// The value at a path.
    pub(crate) fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, String> {
        let value = crate::auto::lookup(self.0, path).cloned().unwrap_or(Value::Null);
        serde_json::from_value(value)
            .map_err(|error| format!("the option table and the type of `{path}` disagree: {error}"))
    }

    /// A section that counts only when it says `"enabled": true`.
    pub(crate) fn when_enabled<T: DeserializeOwned>(&self, section: &str) -> Result<Option<T>, String> {
        let enabled: Option<bool> = self.get(&format!("{section}.enabled"))?;
        if enabled == Some(true) { self.get(section).map(Some) } else { Ok(None) }
    }
}
