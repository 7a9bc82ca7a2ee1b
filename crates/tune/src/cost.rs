//! What a step costs: what one rank computes, moves through memory, sends and fetches, and how long that takes at given rates.
//!
//! The counts are those of the manual's tables (docs/tensor-parallel.md, sequence-parallel.md, comm.md) and are tested against
//! the communication log. Times are a model: arithmetic runs beside the passes over memory, everything else is added up, as if
//! nothing travelled beside compute. So it ranks configurations and says which limit binds; it does not foretell a clock.
//! Latencies, kernels that reach less than the measured product, and waits for slower ranks are not in it.

use std::fmt;

use ferrospeed_config::{Config, DataType, Optimizer, OptimizerTier, ParameterTier, Stage};
use serde::Serialize;

use crate::crossing::{INT4, INT8, SIGNS, gathered_again};
use crate::model::{Model, Transformer};
use crate::plan::{Processor, Request, plan};

/// Bytes that an update of one weight reads and writes: gradient, master and two moments.
const UPDATE_BYTES: f64 = 28.0;

/// Why ranks send each other something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// Weights are gathered: after an update, or in stage 3 before they are used.
    Weights,
    /// Gradients are summed.
    Gradients,
    /// Slices of a layer are summed.
    Slices,
    /// Parts of a sequence attend to each other.
    Sequences,
    /// Tokens go to their experts and come back.
    Experts,
}

/// What one rank passes to others in a step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Sent {
    /// Why.
    pub reason: Reason,
    /// How many.
    pub bytes: f64,
    /// How far apart the ranks are that it goes between: of so many neighbours, the first and the last.
    pub span: u64,
}

/// What one rank does in a step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepWork {
    /// Floating-point operations.
    pub flops: f64,
    /// Bytes that forward and backward move between memory and cores.
    pub pass_bytes: f64,
    /// Bytes that the update moves there.
    pub update_bytes: f64,
    /// What it sends.
    pub sent: Vec<Sent>,
    /// Bytes that go between a GPU and the host.
    pub host_bytes: f64,
    /// Bytes that are read from and written to the disk.
    pub disk_bytes: f64,
    /// Tokens of a micro-batch: few of them leave cores idle.
    pub tokens: f64,
    /// How often it waits for other ranks, about.
    pub exchanges: f64,
}

/// What one rank can do, measured or given.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Rates {
    /// Floating-point operations per second.
    pub flops_per_s: f64,
    /// Bytes per second between memory and cores.
    pub memory_bytes_per_s: f64,
    /// Bytes per second that it sends to ranks of its host while they all send.
    pub wire_bytes_per_s: f64,
    /// The same to other hosts; none: as within.
    pub link_bytes_per_s: Option<f64>,
    /// Ranks of a host.
    pub ranks_per_host: u64,
    /// Bytes per second between a GPU and the host.
    pub host_bytes_per_s: f64,
    /// Bytes per second of the disk, for each rank while they all use it.
    pub disk_bytes_per_s: f64,
    /// Tokens of a micro-batch at which half of the operations per second are reached.
    pub half_speed_tokens: f64,
}

/// What binds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// Operations.
    Compute,
    /// Bytes between memory and cores.
    Memory,
    /// Bytes between ranks.
    Wire,
    /// Bytes between a device and where state lies.
    Offload,
}

/// How long a step takes by each limit.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct StepTime {
    /// Operations.
    pub compute_s: f64,
    /// Of that, what is lost to micro-batches too small to keep all cores busy.
    pub idle_s: f64,
    /// Forward, backward and update through memory.
    pub memory_s: f64,
    /// Of that, the update.
    pub update_s: f64,
    /// Between ranks.
    pub wire_s: f64,
    /// From and to the host and the disk.
    pub offload_s: f64,
}

impl StepTime {
    /// All of it.
    pub fn total_s(&self) -> f64 {
        let passes_s = self.compute_s.max(self.memory_s - self.update_s);
        passes_s + self.update_s + self.wire_s + self.offload_s
    }

    /// Each limit and how long a step takes by it.
    pub fn limits(&self) -> [(Limit, f64); 4] {
        [
            (Limit::Compute, self.compute_s),
            (Limit::Memory, self.memory_s),
            (Limit::Wire, self.wire_s),
            (Limit::Offload, self.offload_s),
        ]
    }

    /// The one that takes longest.
    pub fn binding(&self) -> Limit {
        let [first, rest @ ..] = self.limits();
        rest.into_iter().fold(first, |most, next| if next.1 > most.1 { next } else { most }).0
    }
}

impl StepWork {
    /// How long it takes.
    pub fn time(&self, rates: &Rates) -> StepTime {
        let busy_s = self.flops / rates.flops_per_s;
        let idle_s = busy_s * rates.half_speed_tokens / self.tokens.max(1.0);
        let wire = |sent: &Sent| {
            let far = rates.link_bytes_per_s.filter(|_| sent.span > rates.ranks_per_host);
            sent.bytes / far.unwrap_or(rates.wire_bytes_per_s)
        };
        let update_s = self.update_bytes / rates.memory_bytes_per_s;
        StepTime {
            compute_s: busy_s + idle_s,
            idle_s,
            memory_s: self.pass_bytes / rates.memory_bytes_per_s + update_s,
            update_s,
            wire_s: self.sent.iter().map(wire).sum(),
            offload_s: self.host_bytes / rates.host_bytes_per_s + self.disk_bytes / rates.disk_bytes_per_s,
        }
    }

    /// Everything that it sends.
    pub fn sent_bytes(&self) -> f64 {
        self.sent.iter().map(|sent| sent.bytes).sum()
    }
}

/// What one rank does in a step.
pub fn step_work(request: &Request<'_>) -> StepWork {
    let step = Step { request };
    let sent = [step.weights(), step.gradients()].into_iter().chain(step.of_the_mesh());
    let (host_bytes, disk_bytes) = step.offloaded();
    let micro_batches = step.micro_batches();
    let activations = plan(request).activations.map_or(0, |both| both.kept_bytes) as f64;
    // Weights are read forward and backward, and once more where forward runs again; gradients are written.
    let weights = step.params() * step.width() * if request.checkpoint_activations { 4.0 } else { 3.0 };
    let updated = match request.config.zero.stage {
        Stage::Off => step.trained(),
        _ => step.trained() / step.ranks(),
    };
    StepWork {
        flops: step.flops_per_token() * step.tokens() * micro_batches,
        pass_bytes: (weights + 2.0 * activations) * micro_batches,
        update_bytes: updated * UPDATE_BYTES,
        sent: sent.filter(|sent| sent.bytes > 0.0).collect(),
        host_bytes,
        disk_bytes,
        tokens: step.tokens(),
        exchanges: step.exchanges(),
    }
}

struct Step<'a> {
    request: &'a Request<'a>,
}

impl Step<'_> {
    fn config(&self) -> &Config {
        self.request.config
    }

    fn shape(&self) -> Option<&Transformer> {
        match self.request.model {
            Model::Transformer(shape) => Some(shape),
            Model::Counts(_) => None,
        }
    }

    fn slices(&self) -> u64 {
        self.shape().map_or(1, |shape| shape.slices.max(1))
    }

    /// Ranks over which ZeRO splits.
    fn ranks(&self) -> f64 {
        self.request.data_parallel_size.max(1) as f64
    }

    fn params(&self) -> f64 {
        let (_, adapters) = self.request.model.frozen_and_adapters();
        self.request.model.size().total_params.saturating_add(adapters) as f64
    }

    /// Those that get gradients.
    fn trained(&self) -> f64 {
        self.params() - self.request.model.frozen_and_adapters().0 as f64
    }

    /// Experts that this rank holds, in parameters, and on how many ranks those of a layer are.
    fn experts(&self) -> (f64, f64) {
        let Some(shape) = self.shape().filter(|shape| shape.expert_params > 0) else { return (0.0, 1.0) };
        let held = shape.expert_params.saturating_mul(shape.layers) as f64;
        (held, 1.0 + shape.params_elsewhere as f64 / held)
    }

    fn width(&self) -> f64 {
        self.config().precision.data_type().bytes() as f64
    }

    fn gradient_width(&self) -> f64 {
        let wire = match self.request.sequence_ranks > 1 {
            true => Some(self.config().seq_parallel_comm_data_type),
            false => self.config().communication_data_type,
        };
        wire.map_or(self.width(), |data_type| DataType::bytes(data_type) as f64)
    }

    fn micro_batches(&self) -> f64 {
        self.config().batch.gradient_accumulation_steps.get() as f64
    }

    /// Tokens of a micro-batch on this rank.
    fn tokens(&self) -> f64 {
        let length = self.request.sequence_length.div_ceil(self.request.sequence_ranks.max(1));
        self.config().batch.train_micro_batch_size_per_gpu.get() as f64 * length as f64
    }

    /// Six operations per weight and token and twelve per channel of attention and position (Kaplan et al. 2020), eight and
    /// sixteen where layers run forward twice.
    fn flops_per_token(&self) -> f64 {
        let Some(shape) = self.shape() else { return 6.0 * self.params() };
        // A table is looked up, not multiplied, unless it is also the head.
        let table = if shape.tied_head { 0.0 } else { (shape.vocab * shape.hidden) as f64 };
        let (held, expert_ranks) = self.experts();
        let chosen = held * expert_ranks * shape.experts_per_token as f64 / shape.experts.max(1) as f64;
        let multiplied = (self.params() - table - held + chosen).max(0.0);
        let attention =
            (shape.layers * shape.heads * shape.head_dim) as f64 * self.request.sequence_length as f64;
        // What is not trained gets no gradient, which is one of the three products.
        let frozen = (self.params() - self.trained() - table).clamp(0.0, multiplied);
        let once = 6.0 * multiplied - 2.0 * frozen + 12.0 * attention;
        match self.request.checkpoint_activations {
            false => once,
            true => {
                let in_layers = (shape.layer_params.saturating_mul(shape.layers)) as f64 - held + chosen;
                once + 2.0 * in_layers + 4.0 * attention
            }
        }
    }

    /// What travels between ranks over which state is spread: dense parameters over all, experts over those that hold the same.
    /// `bytes` gets a number of parameters and of ranks.
    fn over_ranks(&self, bytes: impl Fn(f64, f64) -> f64) -> f64 {
        let (experts, expert_ranks) = self.experts();
        let apart = if expert_ranks > 1.0 { experts } else { 0.0 };
        bytes(self.params() - apart, self.ranks()) + bytes(apart, (self.ranks() / expert_ranks).max(1.0))
    }

    fn span(&self) -> u64 {
        self.request.data_parallel_size.saturating_mul(self.slices())
    }

    fn is_one_bit(&self) -> bool {
        matches!(self.config().optimizer, Some(Optimizer::OneBit(_)))
    }

    /// Ranks that share state in stage 3.
    fn sharers(&self, ranks: f64) -> f64 {
        self.config().zero.mics_shard_size.map_or(ranks, |size| (size as f64).clamp(1.0, ranks))
    }

    /// The share of parameters that backward gathers again: of those in layers, what does not stay. A lookup needs no table
    /// there, and the loss takes the head's gradients in forward.
    fn gathered_again(&self) -> f64 {
        let in_layers = self
            .shape()
            .map_or(self.params(), |shape| shape.layer_params.saturating_mul(shape.layers) as f64);
        gathered_again(self.request) * (in_layers / self.params()).min(1.0)
    }

    fn weights(&self) -> Sent {
        let zero = &self.config().zero;
        let width =
            if zero.quantized_weights && zero.stage == Stage::Parameters { INT8 } else { self.width() };
        let gathers = match zero.stage {
            _ if self.is_one_bit() => 0.0,
            Stage::Off => 0.0,
            // What is not trained stays where it is.
            Stage::OptimizerStates | Stage::Gradients => self.trained() / self.params().max(1.0),
            Stage::Parameters => self.micro_batches() * (1.0 + self.gathered_again()),
        };
        let bytes = self.over_ranks(|params, ranks| {
            let ranks = if zero.stage == Stage::Parameters { self.sharers(ranks) } else { ranks };
            params * width * (ranks - 1.0) / ranks * gathers
        });
        Sent { reason: Reason::Weights, bytes, span: self.span() }
    }

    fn gradients(&self) -> Sent {
        let zero = &self.config().zero;
        let micro_batches = match zero.stage {
            Stage::Off | Stage::OptimizerStates if !zero.reduce_each_micro_batch => 1.0,
            _ => self.micro_batches(),
        };
        let bytes = self.over_ranks(|params, ranks| {
            let part = |ranks: f64| (ranks - 1.0) / ranks;
            match zero.stage {
                _ if self.is_one_bit() => 2.0 * params / SIGNS * part(ranks),
                Stage::Off => 2.0 * params * self.gradient_width() * part(ranks),
                Stage::Parameters => {
                    let width = if zero.quantized_gradients { INT4 } else { self.gradient_width() };
                    let sharers = self.sharers(ranks);
                    // Those that hold the same shard sum theirs.
                    let again = 2.0 * part(ranks / sharers) / sharers;
                    params * width * (part(sharers) + again)
                }
                _ => params * self.gradient_width() * part(ranks),
            }
        });
        let bytes = bytes * self.trained() / self.params().max(1.0);
        Sent { reason: Reason::Gradients, bytes: bytes * micro_batches, span: self.span() }
    }

    /// What slices, parts of sequences and experts exchange.
    fn of_the_mesh(&self) -> Vec<Sent> {
        let Some(shape) = self.shape() else { return Vec::new() };
        let (tokens, width, micro_batches) = (self.tokens(), self.width(), self.micro_batches());
        let recomputes = f64::from(u8::from(self.request.checkpoint_activations));
        let layers = shape.layers as f64;
        let (slices, parts) = (self.slices() as f64, self.request.sequence_ranks.max(1) as f64);
        let stream = tokens * shape.hidden as f64 * width;
        // Two sums per layer each way, one for the embedding, one for the head; of a mixture the second has the rows of all
        // chosen experts.
        let per_layer = 1.0 + shape.experts_per_token as f64;
        let sums = (2.0 + recomputes) * per_layer * layers + 2.0;
        let summed = 2.0 * (slices - 1.0) / slices * sums * stream;
        let [queries, keys] =
            [shape.heads, shape.kv_heads].map(|heads| tokens * (heads * shape.head_dim) as f64);
        let is_ring = self.config().section("sequence_parallel_method").is_some_and(|value| value == "ring");
        let exchanged = match is_ring {
            true => (parts - 1.0) * 2.0 * keys * (width * (2.0 + recomputes) + 4.0),
            false => (parts - 1.0) / parts * 2.0 * (queries + keys) * width * (2.0 + recomputes),
        };
        let (_, expert_ranks) = self.experts();
        let routed = (4.0 + 2.0 * recomputes)
            * layers
            * shape.experts_per_token as f64
            * stream
            * (expert_ranks - 1.0)
            / expert_ranks;
        let sequence_span = self.slices().saturating_mul(self.request.sequence_ranks.max(1));
        [
            (Reason::Slices, summed, self.slices()),
            (Reason::Sequences, exchanged * layers, sequence_span),
            (Reason::Experts, routed, (expert_ranks as u64).saturating_mul(self.slices())),
        ]
        .map(|(reason, bytes, span)| Sent { reason, bytes: bytes * micro_batches, span })
        .into()
    }

    /// Collectives of a step: of state, a few in stages that have whole weights and some per layer in stage 3; four per layer
    /// between slices, eight between parts of sequences, four between experts.
    fn exchanges(&self) -> f64 {
        let layers = self.shape().map_or(1.0, |shape| shape.layers as f64);
        let micro_batches = self.micro_batches();
        let of_state = match self.config().zero.stage {
            _ if self.ranks() <= 1.0 => 0.0,
            Stage::Off | Stage::OptimizerStates => 2.0,
            Stage::Gradients => 1.0 + micro_batches,
            Stage::Parameters => 3.0 * layers * micro_batches,
        };
        let per_layer =
            [(self.slices() > 1, 4.0), (self.request.sequence_ranks > 1, 8.0), (self.experts().1 > 1.0, 4.0)];
        let of_layers = per_layer.iter().filter(|(is_cut, _)| *is_cut).map(|(_, count)| count * layers);
        of_state + of_layers.sum::<f64>() * micro_batches
    }

    /// Bytes between a GPU and its host, and between the host and the disk.
    fn offloaded(&self) -> (f64, f64) {
        let zero = &self.config().zero;
        let share = self.trained() / self.ranks();
        let moved = share * zero.offload_optimizer.ratio;
        let (mut host, mut disk) = (0.0, 0.0);
        // Gradients there, new weights back.
        let to_and_fro = moved * (self.gradient_width() + self.width());
        match &zero.offload_optimizer.tier {
            OptimizerTier::Device => {}
            OptimizerTier::Host(_) => host += to_and_fro,
            OptimizerTier::Nvme { .. } => {
                host += to_and_fro;
                // Master and two moments, read and written.
                disk += 2.0 * moved * 12.0;
            }
        }
        let fetched = share * self.width() * self.micro_batches() * (1.0 + self.gathered_again());
        match &zero.offload_param.tier {
            _ if zero.stage != Stage::Parameters => {}
            ParameterTier::Device => {}
            ParameterTier::Host(_) => host += fetched,
            ParameterTier::Nvme { max_in_cpu, .. } => {
                let away = (share - *max_in_cpu as f64).max(0.0) / share.max(1.0);
                host += fetched;
                disk += (fetched + share * self.width()) * away;
            }
        }
        (if self.request.processor == Processor::Gpu { host } else { 0.0 }, disk)
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Reason::Weights => "weights",
            Reason::Gradients => "gradients",
            Reason::Slices => "slices",
            Reason::Sequences => "sequences",
            Reason::Experts => "experts",
        })
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Limit::Compute => "compute",
            Limit::Memory => "memory",
            Limit::Wire => "wire",
            Limit::Offload => "offload",
        })
    }
}
