//! ZeRO: what is split over ranks, and where it lives.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::Reader;

/// What is split over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Stage {
    /// Stage 0: nothing.
    Off,
    /// Stage 1: optimizer states.
    OptimizerStates,
    /// Stage 2: gradients as well.
    Gradients,
    /// Stage 3: parameters as well.
    Parameters,
}

impl Stage {
    /// The number that configurations use.
    pub fn number(self) -> u8 {
        self as u8
    }
}

/// The most bytes of gradients that may be on their way from a GPU to its host; then backward waits for the oldest.
pub const GRADIENT_BYTES_UNDER_WAY: u64 = 512 << 20;

/// `zero_optimization`.
#[derive(Debug, Clone, PartialEq)]
pub struct Zero {
    /// What is split.
    pub stage: Stage,
    /// Copy gradients into one buffer as they are produced.
    pub contiguous_gradients: bool,
    /// Reduce each gradient to its owner only.
    pub reduce_scatter: bool,
    /// Gradient elements reduced at once.
    pub reduce_bucket_size: u64,
    /// Reduce a bucket of several owners in one collective.
    pub use_multi_rank_bucket_allreduce: bool,
    /// Parameter elements gathered at once.
    pub allgather_bucket_size: u64,
    /// Reduce while the backward pass goes on.
    pub overlap_comm: bool,
    /// Restore master weights from the checkpoint's fp32 copy.
    pub load_from_fp32_weights: bool,
    /// Where optimizer states live.
    pub offload_optimizer: OptimizerOffload,
    /// Where parameters live in stage 3.
    pub offload_param: ParameterOffload,
    /// Parameter elements updated at once.
    pub sub_group_size: u64,
    /// Parameter elements fetched ahead.
    pub prefetch_bucket_size: u64,
    /// Smaller parameters stay whole.
    pub param_persistence_threshold: u64,
    /// Elements that may stay whole in total.
    pub model_persistence_threshold: u64,
    /// Parameter elements that may be whole at once.
    pub max_live_parameters: u64,
    /// Keep a parameter that is used again within this many elements.
    pub max_reuse_distance: u64,
    /// Collect the 16-bit model on rank 0 when it is saved.
    pub gather_16bit_weights_on_model_save: bool,
    /// Accept parameters without gradient.
    pub ignore_unused_parameters: bool,
    /// Spread gradient partitions over ranks in turn.
    pub round_robin_gradients: bool,
    /// Whether stages 0 and 1 average every micro-batch over ranks, and not only their sum.
    pub reduce_each_micro_batch: bool,
    /// ZeRO++: ranks that hold a second copy of the parameters.
    pub hpz_partition_size: u64,
    /// ZeRO++: gather parameters as int8.
    pub quantized_weights: bool,
    /// ZeRO++: keep frozen parameters as int8.
    pub quantized_nontrainable_weights: bool,
    /// ZeRO++: reduce gradients as int4.
    pub quantized_gradients: bool,
    /// MiCS: ranks that share one copy; `None` is off.
    pub mics_shard_size: Option<u64>,
    /// MiCS: gather between nodes first.
    pub mics_hierarchical_params_gather: bool,
}

/// Where buckets leave while backward goes on, a model is cut into about so many even if `reduce_bucket_size` would take it
/// whole: gradients that wait for the end take memory all that time, and nothing travels meanwhile.
const BUCKETS_AT_LEAST: u64 = 8;
/// Smaller buckets cost more in collectives than they save.
const SMALLEST_BUCKET_LIMIT: u64 = 1 << 20;

impl Zero {
    /// The most gradient elements that are reduced at once for a model of `trained_numel`: `reduce_bucket_size`, or less
    /// for a model that is not much larger, unless all are reduced when backward is over: then fewer buckets are fewer
    /// occasions to wait for each other. (A parameter that is larger itself travels alone.)
    pub fn bucket_numel(&self, trained_numel: u64) -> u64 {
        let largest = if self.stage >= Stage::Gradients || self.overlap_comm {
            (trained_numel / BUCKETS_AT_LEAST).max(SMALLEST_BUCKET_LIMIT)
        } else {
            u64::MAX
        };
        self.reduce_bucket_size.min(largest).max(1)
    }
}

/// Host memory that takes part in a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostBuffers {
    /// Whether it is page-locked.
    pub pinned: bool,
}

/// Buffers between NVMe and the rest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NvmeBuffers {
    /// The folder on the disk.
    pub path: PathBuf,
    /// How many buffers.
    pub count: u64,
    /// Whether they are page-locked.
    pub pinned: bool,
}

/// Where optimizer states and master weights live.
#[derive(Debug, Clone, PartialEq)]
pub struct OptimizerOffload {
    /// The tier.
    pub tier: OptimizerTier,
    /// The share of the states that is updated on the CPU.
    pub ratio: f64,
}

/// A tier for optimizer states.
#[derive(Debug, Clone, PartialEq)]
pub enum OptimizerTier {
    /// On the device.
    Device,
    /// In host memory.
    Host(HostBuffers),
    /// On NVMe.
    Nvme {
        /// The buffers in between.
        buffers: NvmeBuffers,
        /// Read ahead while updating.
        pipeline_read: bool,
        /// Write behind while updating.
        pipeline_write: bool,
        /// Initialise in bulk.
        fast_init: bool,
    },
}

impl OptimizerTier {
    /// Whether the host's side of it is page-locked; gradients then leave a GPU while backward goes on.
    pub fn is_pinned(&self) -> bool {
        match self {
            OptimizerTier::Device => false,
            OptimizerTier::Host(buffers) => buffers.pinned,
            OptimizerTier::Nvme { buffers, .. } => buffers.pinned,
        }
    }
}

/// Where parameters live in stage 3.
#[derive(Debug, Clone, PartialEq)]
pub struct ParameterOffload {
    /// The tier.
    pub tier: ParameterTier,
}

/// A tier for parameters.
#[derive(Debug, Clone, PartialEq)]
pub enum ParameterTier {
    /// On the device.
    Device,
    /// In host memory.
    Host(HostBuffers),
    /// On NVMe.
    Nvme {
        /// The buffers in between.
        buffers: NvmeBuffers,
        /// Elements per buffer.
        buffer_size: u64,
        /// Elements that stay in host memory.
        max_in_cpu: u64,
    },
}

pub(super) fn build(full: &Map<String, Value>) -> Result<Zero, String> {
    let Some(Value::Object(section)) = full.get("zero_optimization") else {
        return Err("the option table lost `zero_optimization`".to_owned());
    };
    let read = Reader(section);
    let stage = match read.get::<u8>("stage")? {
        0 => Stage::Off,
        1 => Stage::OptimizerStates,
        2 => Stage::Gradients,
        _ => Stage::Parameters,
    };
    Ok(Zero {
        stage,
        contiguous_gradients: read.get("contiguous_gradients")?,
        reduce_scatter: read.get("reduce_scatter")?,
        reduce_bucket_size: read.get("reduce_bucket_size")?,
        use_multi_rank_bucket_allreduce: read.get("use_multi_rank_bucket_allreduce")?,
        allgather_bucket_size: read.get("allgather_bucket_size")?,
        overlap_comm: read.get("overlap_comm")?,
        load_from_fp32_weights: read.get("load_from_fp32_weights")?,
        offload_optimizer: optimizer_offload(read, stage)?,
        offload_param: parameter_offload(read, stage)?,
        sub_group_size: read.get("sub_group_size")?,
        prefetch_bucket_size: read.get("prefetch_bucket_size")?,
        param_persistence_threshold: read.get("param_persistence_threshold")?,
        model_persistence_threshold: read.get("model_persistence_threshold")?,
        max_live_parameters: read.get("max_live_parameters")?,
        max_reuse_distance: read.get("max_reuse_distance")?,
        gather_16bit_weights_on_model_save: read.get("gather_16bit_weights_on_model_save")?,
        ignore_unused_parameters: read.get("ignore_unused_parameters")?,
        round_robin_gradients: read.get("round_robin_gradients")?,
        reduce_each_micro_batch: read.get("reduce_each_micro_batch")?,
        hpz_partition_size: read.get("zero_hpz_partition_size")?,
        quantized_weights: read.get("zero_quantized_weights")?,
        quantized_nontrainable_weights: read.get("zero_quantized_nontrainable_weights")?,
        quantized_gradients: read.get("zero_quantized_gradients")?,
        mics_shard_size: u64::try_from(read.get::<i64>("mics_shard_size")?).ok().filter(|&size| size > 0),
        mics_hierarchical_params_gather: read.get("mics_hierarchical_params_gather")?,
    })
}

fn device(read: Reader<'_>, section: &str) -> Result<String, String> {
    Ok(read.get::<Option<String>>(&format!("{section}.device"))?.unwrap_or_else(|| "none".to_owned()))
}

fn nvme_buffers(read: Reader<'_>, section: &str) -> Result<NvmeBuffers, String> {
    Ok(NvmeBuffers {
        path: read.get(&format!("{section}.nvme_path"))?,
        count: read.get(&format!("{section}.buffer_count"))?,
        pinned: read.get(&format!("{section}.pin_memory"))?,
    })
}

/// Offload without ZeRO has no effect, and the type says so.
fn optimizer_offload(read: Reader<'_>, stage: Stage) -> Result<OptimizerOffload, String> {
    let section = "offload_optimizer";
    let tier = match device(read, section)?.as_str() {
        "cpu" if stage > Stage::Off => {
            OptimizerTier::Host(HostBuffers { pinned: read.get("offload_optimizer.pin_memory")? })
        }
        "nvme" if stage > Stage::Off => OptimizerTier::Nvme {
            buffers: nvme_buffers(read, section)?,
            pipeline_read: read.get("offload_optimizer.pipeline_read")?,
            pipeline_write: read.get("offload_optimizer.pipeline_write")?,
            fast_init: read.get("offload_optimizer.fast_init")?,
        },
        _ => OptimizerTier::Device,
    };
    Ok(OptimizerOffload { tier, ratio: read.get::<Option<f64>>("offload_optimizer.ratio")?.unwrap_or(1.0) })
}

/// Parameters can only live elsewhere in stage 3.
fn parameter_offload(read: Reader<'_>, stage: Stage) -> Result<ParameterOffload, String> {
    let section = "offload_param";
    let tier = match device(read, section)?.as_str() {
        "cpu" if stage == Stage::Parameters => {
            ParameterTier::Host(HostBuffers { pinned: read.get("offload_param.pin_memory")? })
        }
        "nvme" if stage == Stage::Parameters => ParameterTier::Nvme {
            buffers: nvme_buffers(read, section)?,
            buffer_size: read.get("offload_param.buffer_size")?,
            max_in_cpu: read.get("offload_param.max_in_cpu")?,
        },
        _ => ParameterTier::Device,
    };
    Ok(ParameterOffload { tier })
}
