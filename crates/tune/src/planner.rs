//! The arithmetic of a plan: one method per purpose.

use ferrospeed_config::{
    DataType, GRADIENT_BYTES_UNDER_WAY, OneBitRule, Optimizer, OptimizerTier, ParameterTier, Precision, Stage,
};

use crate::activations::{ActivationBytes, PassingBytes, mlp_chunk};
use crate::model::Model;
use crate::plan::{Activations, Operands, Plan, Processor, Purpose, Request, Row, Tier, human};
use crate::stages::Staged;

/// The most elements that an update from a disk takes at a time.
const LARGEST_TILE: u64 = 4 << 20;
/// What a common disk may be written in its life.
const DISK_LIFE_BYTES: u64 = 600_000_000_000_000;
/// Where values are in two places, the first part has a multiple of so many elements.
const TILE_UNIT: u64 = 2048;

/// Plans the bytes of one rank.
pub fn plan(request: &Request<'_>) -> Plan {
    plan_part(request, None)
}

/// The same for a stage, whose part of the model is the request's.
pub(crate) fn plan_part(request: &Request<'_>, staged: Option<&Staged<'_>>) -> Plan {
    let mut planner = Planner { request, staged, rows: Vec::new(), in_turn_bytes: 0 };
    planner.parameters();
    planner.gradients();
    planner.optimizer_states();
    planner.feedback();
    planner.gathered();
    let activations = planner.activations();
    let notes = planner.wear().into_iter().collect();
    let in_turn_bytes = planner.in_turn_bytes;
    let rows = planner.rows.into_iter().filter(|row| row.bytes > 0).collect();
    Plan { rows, activations, in_turn_bytes, stages: None, notes }
}

struct Planner<'a> {
    request: &'a Request<'a>,
    staged: Option<&'a Staged<'a>>,
    rows: Vec<Row>,
    in_turn_bytes: u64,
}

impl Planner<'_> {
    fn add(&mut self, purpose: Purpose, tier: Tier, bytes: u64, why: impl Into<String>) {
        self.rows.push(Row { purpose, tier, bytes, why: why.into(), host_bytes: None });
    }

    fn stage(&self) -> Stage {
        self.request.config.zero.stage
    }

    /// What a rank has of the model and its adapters where nothing is shared out.
    fn params(&self) -> u64 {
        let (_, adapters) = self.request.model.frozen_and_adapters();
        self.request.model.size().total_params.saturating_add(adapters)
    }

    /// Those of so many that are trained.
    fn trained(&self, params: u64) -> u64 {
        let (frozen, _) = self.request.model.frozen_and_adapters();
        // What other ranks have of a model that is frozen is frozen too.
        let elsewhere = if frozen > 0 { params.saturating_sub(self.params()) } else { 0 };
        params.saturating_sub(frozen).saturating_sub(elsewhere)
    }

    /// A rank's share of what is trained.
    fn trained_share(&self) -> u64 {
        self.trained(self.all_params()).div_ceil(self.sharers())
    }

    /// The same and the experts that other ranks have.
    fn all_params(&self) -> u64 {
        let elsewhere = match self.request.model {
            Model::Transformer(transformer) => transformer.params_elsewhere,
            Model::Counts(_) => 0,
        };
        self.params().saturating_add(elsewhere)
    }

    /// A rank's share of all parameters: among all ranks, or in stage 3 among those of a `mics_shard_size`.
    fn share(&self) -> u64 {
        self.all_params().div_ceil(self.sharers())
    }

    /// The parameters whose states a rank keeps: of a tied weight each of the two stages that have it updates one half.
    fn updated_params(&self) -> u64 {
        let (all, sharers) = match self.stage() {
            Stage::Off => (self.trained(self.params()), 1),
            _ => (self.trained(self.all_params()), self.sharers()),
        };
        let tied = self.staged.map_or(0, |staged| staged.tied_params).min(all);
        all.saturating_sub(tied).div_ceil(sharers).saturating_add(tied.div_ceil(2 * sharers))
    }

    /// The ranks among which state is shared out.
    fn sharers(&self) -> u64 {
        let ranks = self.request.data_parallel_size.max(1);
        match self.request.config.zero.mics_shard_size {
            Some(size) if self.stage() == Stage::Parameters => size.clamp(1, ranks),
            _ => ranks,
        }
    }

    /// What each step writes to a disk, and how long one lasts that way.
    fn wear(&self) -> Option<String> {
        let written = self.rows.iter().filter(|row| row.tier == Tier::Nvme).map(|row| row.bytes).sum::<u64>();
        let steps = DISK_LIFE_BYTES.checked_div(written)?;
        let written = human(written);
        Some(format!(
            "each step of a rank writes {written} to NVMe: a disk that may be written 600 TB in its life takes {steps} steps of one rank"
        ))
    }

    /// Memory of the host: for a rank without a GPU that is where it computes.
    fn host(&self) -> Tier {
        if self.request.processor == Processor::Gpu { Tier::Host } else { Tier::Device }
    }

    /// Where f32 weights and optimizer states are that do not stay with the device.
    fn home_of_states(&self) -> Tier {
        match &self.request.config.zero.offload_optimizer.tier {
            OptimizerTier::Nvme { .. } => Tier::Nvme,
            OptimizerTier::Host(_) => self.host(),
            // Weights that are not on a GPU are updated by the host.
            OptimizerTier::Device
                if self.parameters_by_tier().iter().any(|(tier, _)| *tier != Tier::Device) =>
            {
                self.host()
            }
            OptimizerTier::Device => Tier::Device,
        }
    }

    /// How many of a rank's `count` states have that home: the share that `ratio` says.
    fn moved(&self, count: u64) -> u64 {
        let moved = (count as f64 * self.request.config.zero.offload_optimizer.ratio) as u64;
        if moved >= count { count } else { moved - moved % TILE_UNIT }
    }

    /// Where a rank's part of what kernels read is in stage 3 between the times when they do, in elements.
    fn parameters_by_tier(&self) -> Vec<(Tier, u64)> {
        let share = self.share();
        match &self.request.config.zero.offload_param.tier {
            _ if self.stage() != Stage::Parameters => vec![(Tier::Device, self.params())],
            ParameterTier::Nvme { max_in_cpu, .. } if *max_in_cpu < share => {
                let in_host = max_in_cpu - max_in_cpu % TILE_UNIT;
                let places = [(self.host(), in_host), (Tier::Nvme, share - in_host)];
                places.into_iter().filter(|(_, count)| *count > 0).collect()
            }
            ParameterTier::Nvme { .. } | ParameterTier::Host(_) => vec![(self.host(), share)],
            ParameterTier::Device => vec![(Tier::Device, share)],
        }
    }

    fn width(&self) -> u64 {
        self.request.config.precision.data_type().bytes()
    }

    fn parameters(&mut self) {
        let (width, purpose) = (self.width(), Purpose::Parameters);
        if self.stage() < Stage::Parameters {
            let params = self.params();
            let in_common = self.request.processor == Processor::Cpu && self.stage() != Stage::Off;
            let mut why = format!("all {params} parameters × {width} bytes");
            if self.trained(params) < params {
                why.push_str(&format!(", {} of them trained", self.trained(params)));
            }
            if in_common {
                why.push_str(", once for all ranks of a host");
            }
            // The ranks of a host hold different experts, and together all of them.
            let host_bytes = in_common.then(|| self.all_params().saturating_mul(width));
            let bytes = params.saturating_mul(width);
            return self.rows.push(Row { purpose, tier: Tier::Device, bytes, why, host_bytes });
        }
        for (tier, count) in self.parameters_by_tier() {
            let why = format!("{count} of {} parameters × {width} bytes", self.all_params());
            self.add(purpose, tier, count.saturating_mul(width), why);
        }
    }

    /// The type in which gradients travel: that of sequences' parts, the configured one, or the model's.
    fn wire_width(&self) -> u64 {
        let config = self.request.config;
        let wire = match self.request.sequence_ranks > 1 {
            true => Some(config.seq_parallel_comm_data_type),
            false => config.communication_data_type,
        };
        wire.map_or(self.width(), DataType::bytes)
    }

    /// Sums of micro-batches are wide unless told otherwise; a single one has the type it travels in.
    fn kept_width(&self) -> u64 {
        match self.request.config.grad_accum_dtype {
            Some(data_type) => data_type.bytes(),
            None if self.accumulates() => DataType::Fp32.bytes(),
            None => self.wire_width(),
        }
    }

    fn accumulates(&self) -> bool {
        // A stage reduces when a step ends, however many micro-batches it has.
        self.staged.is_some() || self.request.config.batch.gradient_accumulation_steps.get() > 1
    }

    /// Whether gradients stay where backward makes them: nobody else needs them, and nothing is added up.
    fn gradients_stay(&self) -> bool {
        let alone = self.request.data_parallel_size <= 1;
        alone && !self.accumulates() && self.wire_width() == self.kept_width()
    }

    /// Whether gradients go to the host while backward goes on, which updates all of them.
    fn gradients_leave(&self) -> bool {
        let count = self.updated_params();
        self.request.processor == Processor::Gpu
            && self.request.config.zero.offload_optimizer.tier.is_pinned()
            && self.moved(count) == count
            && (self.gradients_stay() || self.stage() >= Stage::Gradients)
    }

    fn gradients(&mut self) {
        let (stage, purpose) = (self.stage(), Purpose::Gradients);
        let (wire, kept) = (self.wire_width(), self.kept_width());
        let params = self.trained(self.params());
        let held = if stage < Stage::Gradients { params } else { self.trained_share() };
        let why = if held == params {
            format!("all of them × {kept} bytes")
        } else {
            format!("{held} × {kept} bytes")
        };
        let bytes = held.saturating_mul(kept);
        if self.gradients_leave() {
            self.add(purpose, Tier::Host, bytes, why);
            self.add(purpose, Tier::Device, bytes.min(GRADIENT_BYTES_UNDER_WAY), "on their way to the host");
        } else {
            self.add(purpose, Tier::Device, bytes, why);
        }
        if self.gradients_stay() || stage < Stage::Gradients && wire == kept {
            return;
        }
        // Below stage 2 whole sums stay, and what travels is a copy in another type.
        let zero = &self.request.config.zero;
        let limit = zero.bucket_numel(params);
        let experts = self.expert_params();
        let in_slices = matches!(self.request.model, Model::Transformer(shape) if shape.slices > 1);
        // What is spread in another way is in buckets of its own; what other ranks reach has memory of its own too.
        let dense = params.saturating_sub(experts);
        let ways = match self.expert_ranks() > 1 {
            true => vec![(dense, 1), (experts, 1)],
            false if experts > 0 => vec![(dense.max(experts), 2)],
            false => match self.staged.map_or(0, |staged| staged.tied_params) {
                0 => vec![(params, if in_slices { 2 } else { 1 })],
                tied => vec![(dense.saturating_sub(tied), 1), (tied, 1)],
            },
        };
        for (numel, least) in ways {
            let bucket = limit.min(numel).max(self.largest_parameter().min(numel));
            let buckets = numel.div_ceil(bucket.max(1)).max(least);
            let copies = if zero.overlap_comm { buckets.clamp(1, 2) } else { 1 };
            let why = format!("{copies} × {bucket} gradients × {wire} bytes");
            self.add(Purpose::CommunicationBuffers, Tier::Device, bucket.saturating_mul(copies * wire), why);
        }
    }

    /// Parameters of experts that this rank holds.
    fn expert_params(&self) -> u64 {
        match self.request.model {
            Model::Transformer(shape) => shape.expert_params.saturating_mul(shape.layers),
            Model::Counts(_) => 0,
        }
    }

    /// Ranks that share the experts of a layer.
    fn expert_ranks(&self) -> u64 {
        (self.all_params() - self.params()) / self.expert_params().max(1) + 1
    }

    fn largest_parameter(&self) -> u64 {
        self.request.model.size().largest_layer_params
    }

    fn optimizer_states(&mut self) {
        let (config, purpose) = (self.request.config, Purpose::OptimizerStates);
        let states = config.optimizer.as_ref().and_then(|optimizer| optimizer.states_per_parameter());
        let assumed = if states.is_none() { " (two, as Adam has)" } else { "" };
        let states = states.unwrap_or(2);
        let count = self.updated_params();
        let (home, values, moved) = (self.home_of_states(), self.parameters_by_tier(), self.moved(count));
        let is_away = values.iter().any(|(tier, _)| *tier != Tier::Device);
        let updates_elsewhere = self.request.processor == Processor::Gpu && home != Tier::Device && moved > 0;
        let master = match config.precision {
            // Weights that kernels do not read where the update works have a copy there.
            Precision::Fp32 if is_away || updates_elsewhere => 4,
            Precision::Fp32 => 0,
            Precision::Fp16 { half_master_weights: true, .. } => 2,
            Precision::Fp16 { .. } | Precision::Bf16 { .. } => 4,
        };
        let width = master + 4 * states;
        let places = match home {
            Tier::Device => [(home, count), (Tier::Device, 0)],
            home => [(home, moved), (Tier::Device, count - moved)],
        };
        for (tier, count) in places {
            let why =
                format!("{count} × ({master} bytes of master weight + {states} states × 4 bytes){assumed}");
            self.add(purpose, tier, count.saturating_mul(width), why);
        }
        let count = moved;
        if let OptimizerTier::Nvme { buffers, .. } = &config.zero.offload_optimizer.tier {
            let tile = config.zero.sub_group_size.clamp(1, LARGEST_TILE).min(count);
            let tiles = buffers.count.clamp(1, count.div_ceil(tile.max(1)).max(1));
            let why = format!("{tiles} tiles of {tile} on their way from and to the disk × {width} bytes");
            let bytes = tiles.saturating_mul(tile).saturating_mul(width);
            self.add(Purpose::CommunicationBuffers, self.host(), bytes, why);
        }
    }

    /// What 1-bit optimizers keep beside their states: what compression has lost, and 1-bit LAMB's momenta end to end.
    fn feedback(&mut self) {
        let Some(Optimizer::OneBit(one_bit)) = &self.request.config.optimizer else { return };
        let (count, ranks) = (self.updated_params(), self.request.data_parallel_size);
        let averaged = if ranks > 1 { count.div_ceil(ranks) } else { 0 };
        let lost = if ranks > 1 { count } else { 0 };
        let fused = if matches!(one_bit.rule, OneBitRule::Lamb(_)) { count } else { 0 };
        let why = format!(
            "({lost} + {averaged} + {fused}) × 4 bytes: what was lost of a rank's own values and of the averages it makes, and momenta end to end, once second moments are frozen"
        );
        let values = lost.saturating_add(averaged).saturating_add(fused);
        self.add(Purpose::OptimizerStates, Tier::Device, values.saturating_mul(4), why);
    }

    /// What stage 3 holds whole beside a rank's share.
    fn gathered(&mut self) {
        let all_at_hand = self.parameters_by_tier().iter().all(|(tier, _)| *tier == Tier::Device);
        if self.stage() != Stage::Parameters || self.sharers() == 1 && all_at_hand {
            return;
        }
        let (zero, params, width) = (&self.request.config.zero, self.params(), self.width());
        // What forward has read last is read first by backward, and stays; what comes next is fetched ahead.
        let stays = zero.max_reuse_distance / 2;
        let ahead = zero.prefetch_bucket_size;
        let live = self.largest_parameter().saturating_add(stays).saturating_add(ahead);
        // An expert that no other rank has is whole where it is.
        let own =
            if self.expert_ranks() == self.request.data_parallel_size { self.expert_params() } else { 0 };
        let spread = params.saturating_sub(own);
        let live = live.min(zero.max_live_parameters).max(self.largest_parameter()).min(spread);
        let why = format!(
            "{live} gathered parameters × {width} bytes: in use, fetched ahead, and kept for backward"
        );
        self.add(Purpose::CommunicationBuffers, Tier::Device, live.saturating_mul(width), why);
        let (ranks, neighbours) = (self.request.data_parallel_size, zero.hpz_partition_size);
        if neighbours > 1 && neighbours < ranks {
            let part = params.div_ceil(neighbours);
            let why = format!(
                "{part} × {width} bytes: the second copy, which {neighbours} neighbours hold among themselves (zero_hpz_partition_size)"
            );
            self.add(Purpose::Parameters, Tier::Device, part.saturating_mul(width), why);
        }
    }

    fn activations(&mut self) -> Option<Activations> {
        let Model::Transformer(shape) = self.request.model else { return None };
        let config = self.request.config;
        let length = self.request.sequence_length.div_ceil(self.request.sequence_ranks.max(1));
        let tokens = config.batch.train_micro_batch_size_per_gpu.get().saturating_mul(length);
        let again = self.request.checkpoint_activations;
        let mlp_chunk = |again: bool| mlp_chunk(self.request.mlp_chunk, shape, tokens, again);
        let bytes_of = |again: bool| {
            ActivationBytes::of(
                shape,
                self.width(),
                tokens,
                self.request.sequence_length,
                self.request.keeps_attention_matrix,
                mlp_chunk(again),
                self.request.processor,
            )
        };
        let bytes = bytes_of(again);
        let operands = match (self.request.operands, self.request.processor) {
            (_, Processor::Gpu) => Operands::InPlace,
            (Operands::InTiles, _) if config.precision.data_type() == DataType::Fp16 => Operands::InPlace,
            (operands, Processor::Cpu) => operands,
        };
        let in_place = self.stage() < Stage::Gradients;
        let passing_of = |again: bool| {
            let processor = self.request.processor;
            PassingBytes::of(shape, self.width(), tokens, mlp_chunk(again), processor, operands, in_place)
        };
        let passing = passing_of(again);
        if let Some(staged) = self.staged {
            let [kept, checkpointed] =
                [false, true].map(|again| staged.peak(&bytes_of(again), &passing_of(again), again));
            let held = if again { checkpointed } else { kept };
            self.add(Purpose::Activations, Tier::Device, held.activations, staged.why(tokens));
            let why = "gradients on their way, the head's in f32, and operands in tiles";
            self.add(Purpose::CommunicationBuffers, Tier::Device, held.passing, why);
            return Some(Activations {
                kept_bytes: kept.activations,
                checkpointed_bytes: checkpointed.activations,
            });
        }
        let (kept, checkpointed) =
            (bytes_of(false).kept(shape.layers), bytes_of(true).checkpointed(shape.layers));
        let on_host = again
            && config.activation_checkpointing.cpu_checkpointing
            && self.request.processor == Processor::Gpu;
        // Layers whose inputs are on the device.
        let held = if on_host { 1 } else { shape.layers };
        let (peak, counted) = match again {
            true => (
                passing.peak(&bytes, bytes.layer_input.saturating_mul(held), bytes.layer),
                bytes.checkpointed(held),
            ),
            false => (passing.peak(&bytes, bytes.layer.saturating_mul(held), 0), kept),
        };
        let why = "gradients on their way, the head's in f32, and operands in tiles";
        self.add(Purpose::CommunicationBuffers, Tier::Device, peak.saturating_sub(counted), why);
        if self.gradients_stay() {
            let trained = self.trained(self.params());
            let all = shape.size.total_params.max(1) as f64;
            let of_layer = (trained as f64 / all * shape.layer_params as f64) as u64;
            let [gradients, of_layer] =
                [trained, of_layer].map(|count| count.saturating_mul(self.kept_width()));
            let gradients =
                if self.gradients_leave() { gradients.min(GRADIENT_BYTES_UNDER_WAY) } else { gradients };
            let most = peak.max(passing.end(&bytes, gradients, of_layer));
            self.in_turn_bytes = peak.max(counted).saturating_add(gradients).saturating_sub(most);
        }
        let purpose = Purpose::Activations;
        if !again {
            self.add(
                purpose,
                Tier::Device,
                kept,
                format!("{tokens} tokens through {} layers, all kept", shape.layers),
            );
        } else if on_host {
            let why = "one layer that is computed again, with its input";
            self.add(purpose, Tier::Device, counted, why);
            let why = format!("the inputs of {} layers", shape.layers);
            self.add(purpose, Tier::Host, bytes.layer_input.saturating_mul(shape.layers), why);
        } else {
            let why = format!("the inputs of {} layers, and one layer that is computed again", shape.layers);
            self.add(purpose, Tier::Device, checkpointed, why);
        }
        Some(Activations { kept_bytes: kept, checkpointed_bytes: checkpointed })
    }
}
