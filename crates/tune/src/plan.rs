//! The bytes each rank keeps in each tier, and whether they fit.
//!
//! Model states follow from the ZeRO stage, the precision and the optimizer (Rajbhandari et al. 2020). Only what training does
//! is counted. Activations are counted per token from what each operation of a layer saves, in the manner of Korthikanti et
//! al. 2022. What the allocator loses to fragmentation is not in here.

use std::fmt;

use ferrospeed_config::Config;

use crate::model::Model;
pub use crate::planner::plan;

/// Where bytes lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// The memory that computes.
    Device,
    /// The memory of the host.
    Host,
    /// The disk.
    Nvme,
}

/// What bytes are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    /// Parameters in the training precision.
    Parameters,
    /// Gradients.
    Gradients,
    /// Master weights and optimizer states.
    OptimizerStates,
    /// Values kept for the backward pass.
    Activations,
    /// Buckets and gathered parameters.
    CommunicationBuffers,
}

/// What is planned.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// The model.
    pub model: &'a Model,
    /// The configuration.
    pub config: &'a Config,
    /// Ranks over which ZeRO splits.
    pub data_parallel_size: u64,
    /// Ranks, of those, that share each sequence.
    pub sequence_ranks: u64,
    /// Tokens per sample.
    pub sequence_length: u64,
    /// Recompute each layer in the backward pass.
    pub checkpoint_activations: bool,
    /// Tokens that feed-forward layers take at a time, the rest of which is computed again in backward; 0: all. `None`: some of
    /// very long inputs, where layers are recomputed.
    pub mlp_chunk: Option<u64>,
    /// Whether attention keeps its matrix of weights; fused attention does not.
    pub keeps_attention_matrix: bool,
    /// What ranks compute on.
    pub processor: Processor,
    /// What products of a host copy first.
    pub operands: Operands,
}

/// What products of a host copy before they multiply; a GPU's copy nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operands {
    /// Nothing.
    InPlace,
    /// bf16 into tiles, and f32 into tiles of three numbers each: AMX.
    InTiles,
    /// 16-bit operands into f32: vectors of less than 512 bits.
    Widened,
}

impl Operands {
    /// Of a host that multiplies in tiles, or widens.
    pub fn of_host(in_tiles: bool, widened: bool) -> Operands {
        match (in_tiles, widened) {
            (true, _) => Operands::InTiles,
            (false, true) => Operands::Widened,
            (false, false) => Operands::InPlace,
        }
    }
}

/// What a rank computes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Processor {
    /// The host's own cores.
    Cpu,
    /// A GPU each.
    Gpu,
}

impl Processor {
    /// How many rows of logits, each of this many bytes, the fused loss holds at once, at most: what a product is worth
    /// starting for, or what fills a GPU.
    pub(crate) fn loss_rows(self, row_bytes: u64) -> u64 {
        let fitting = |bytes: u64| bytes / row_bytes.max(1);
        match self {
            Processor::Cpu => fitting(16 << 20).max(fitting(64 << 20).min(256)),
            Processor::Gpu => fitting(768 << 20),
        }
    }
}

/// One purpose in one tier.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Row {
    /// What for.
    pub purpose: Purpose,
    /// Where.
    pub tier: Tier,
    /// How many, per rank.
    pub bytes: u64,
    /// How they come about.
    pub why: String,
    /// What all ranks of a host need of it together, where they have it in common.
    pub host_bytes: Option<u64>,
}

/// The bytes of one rank.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Plan {
    /// Every purpose and tier that holds anything.
    pub rows: Vec<Row>,
    /// Activations with and without recomputation; `None` where the shape of the model is not known.
    pub activations: Option<Activations>,
    /// Bytes of a device that gradients take over from activations: they are in both rows, and needed once.
    pub in_turn_bytes: u64,
    /// Where the model is in stages: what each needs, of which this is the fullest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stages: Option<StagedBytes>,
    /// What else is worth knowing.
    pub notes: Vec<String>,
}

/// The bytes of a model in stages, in the memory that computes.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct StagedBytes {
    /// Ranks that hold the same stage.
    pub ranks_per_stage: u64,
    /// Of one rank of each stage, without what the ranks of a host have in common.
    pub rank_bytes: Vec<u64>,
    /// What those of a host have in common, of each stage.
    pub common_bytes: Vec<u64>,
}

impl StagedBytes {
    /// What the host needs whose `ranks` hold the fullest stages.
    fn of_host(&self, ranks: u64) -> u64 {
        let mut stages: Vec<(u64, u64)> =
            self.rank_bytes.iter().copied().zip(self.common_bytes.iter().copied()).collect();
        stages.sort_unstable_by_key(|(own, _)| std::cmp::Reverse(*own));
        let (mut left, mut needed) = (ranks, 0u64);
        for (own, common) in stages {
            let here = left.min(self.ranks_per_stage);
            left -= here;
            let common = if here > 0 { common } else { 0 };
            needed = needed.saturating_add(own.saturating_mul(here)).saturating_add(common);
        }
        needed
    }
}

/// Activations of one rank, both ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Activations {
    /// Everything is kept.
    pub kept_bytes: u64,
    /// Each layer keeps its input and is computed again.
    pub checkpointed_bytes: u64,
}

/// What a machine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Memory of one device; `None` where ranks compute in host memory.
    pub device_bytes: Option<u64>,
    /// Memory of one host.
    pub host_bytes: u64,
    /// Free space of the disk of one host.
    pub nvme_bytes: u64,
    /// Ranks that share a host.
    pub ranks_per_host: u64,
}

/// A tier that is too small.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Shortfall {
    /// Which.
    pub tier: Tier,
    /// What is needed there, by one rank on a device or by all ranks of a host.
    pub needed_bytes: u64,
    /// What there is.
    pub available_bytes: u64,
}

impl Plan {
    /// The bytes of one rank in one tier.
    pub fn total(&self, tier: Tier) -> u64 {
        let bytes = self.rows.iter().filter(|row| row.tier == tier).map(|row| row.bytes);
        let in_turn = if tier == Tier::Device { self.in_turn_bytes } else { 0 };
        bytes.fold(0, u64::saturating_add).saturating_sub(in_turn)
    }

    /// Bytes of a rank that those of a host have in common, and what they all need of them.
    pub(crate) fn in_common(&self) -> (u64, u64) {
        let shared = self.rows.iter().filter_map(|row| Some((row.bytes, row.host_bytes?)));
        shared.fold((0, 0), |(own, common): (u64, u64), (bytes, host)| {
            (own.saturating_add(bytes), common.saturating_add(host))
        })
    }

    /// The tiers that are too small on such machines; empty when everything fits.
    pub fn shortfalls(&self, capacity: &Capacity) -> Vec<Shortfall> {
        let ranks = capacity.ranks_per_host.max(1);
        let (device, host, nvme) = (self.total(Tier::Device), self.total(Tier::Host), self.total(Tier::Nvme));
        let (own_copies, common) = self.in_common();
        let (on_device, on_host) = match (capacity.device_bytes, &self.stages) {
            (Some(available), _) => (Some((device, available)), host.saturating_mul(ranks)),
            (None, Some(stages)) => (None, stages.of_host(ranks).saturating_add(host.saturating_mul(ranks))),
            (None, None) => {
                let own = host.saturating_add(device).saturating_sub(own_copies);
                (None, own.saturating_mul(ranks).saturating_add(common))
            }
        };
        let tiers = [
            on_device.map(|(needed, available)| (Tier::Device, needed, available)),
            Some((Tier::Host, on_host, capacity.host_bytes)),
            Some((Tier::Nvme, nvme.saturating_mul(ranks), capacity.nvme_bytes)),
        ];
        let short = tiers.into_iter().flatten().filter(|(_, needed, available)| needed > available);
        short
            .map(|(tier, needed_bytes, available_bytes)| Shortfall { tier, needed_bytes, available_bytes })
            .collect()
    }

    /// Whether everything fits on such machines.
    pub fn fits(&self, capacity: &Capacity) -> bool {
        self.shortfalls(capacity).is_empty()
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Tier::Device => "device",
            Tier::Host => "host",
            Tier::Nvme => "NVMe",
        })
    }
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Purpose::Parameters => "parameters",
            Purpose::Gradients => "gradients",
            Purpose::OptimizerStates => "optimizer states",
            Purpose::Activations => "activations",
            Purpose::CommunicationBuffers => "buffers",
        })
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<17} {:<7} {:>12}", "per rank", "where", "bytes")?;
        for row in &self.rows {
            writeln!(f, "{:<17} {:<7} {:>12}  {}", row.purpose, row.tier, human(row.bytes), row.why)?;
        }
        if self.in_turn_bytes > 0 {
            let (none, bytes) = ("in turn", format!("-{}", human(self.in_turn_bytes)));
            let why = "gradients take the room that activations leave";
            writeln!(f, "{none:<17} {:<7} {bytes:>12}  {why}", Tier::Device)?;
        }
        for tier in [Tier::Device, Tier::Host, Tier::Nvme] {
            if self.total(tier) > 0 {
                writeln!(f, "{:<17} {:<7} {:>12}", "total", tier, human(self.total(tier)))?;
            }
        }
        if let Some(Activations { kept_bytes, checkpointed_bytes }) = self.activations {
            let (kept, checkpointed) = (human(kept_bytes), human(checkpointed_bytes));
            writeln!(
                f,
                "activations: {kept} when all are kept, {checkpointed} with activation checkpointing"
            )?;
        }
        self.notes.iter().try_for_each(|note| writeln!(f, "{note}"))
    }
}

/// Bytes in the unit that suits them.
pub fn human(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let power = (bytes.max(1).ilog2() / 10) as usize;
    match power {
        0 => format!("{bytes} B"),
        _ => format!("{:.2} {}", bytes as f64 / (1u64 << (10 * power)) as f64, units[power]),
    }
}
