//! The arithmetic of a plan: one method per purpose.

use ferrospeed_config::{DataType, OptimizerTier, ParameterTier, Precision, Stage};

use crate::activations::ActivationBytes;
use crate::model::Model;
use crate::plan::{Activations, Plan, Processor, Purpose, Request, Row, Tier, human};

/// The most elements that an update from a disk takes at a time.
const LARGEST_TILE: u64 = 4 << 20;
/// What a common disk may be written in its life.
const DISK_LIFE_BYTES: u64 = 600_000_000_000_000;
/// Where values are in two places, the first part has a multiple of so many elements.
const TILE_UNIT: u64 = 2048;

/// Plans the bytes of one rank.
pub fn plan(request: &Request<'_>) -> Plan {
    let mut planner = Planner { request, rows: Vec::new() };
    planner.parameters();
    planner.gradients();
    planner.optimizer_states();
    planner.buffers();
    let activations = planner.activations();
    let notes = planner.wear().into_iter().collect();
    Plan { rows: planner.rows.into_iter().filter(|row| row.bytes > 0).collect(), activations, notes }
}

struct Planner<'a> {
    request: &'a Request<'a>,
    rows: Vec<Row>,
}

impl Planner<'_> {
    fn add(&mut self, purpose: Purpose, tier: Tier, bytes: u64, why: impl Into<String>) {
        self.rows.push(Row { purpose, tier, bytes, why: why.into(), in_common: false });
    }

    fn stage(&self) -> Stage {
        self.request.config.zero.stage
    }

    /// What a rank has of the model where nothing is shared out.
    fn params(&self) -> u64 {
        self.request.model.size().total_params
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
        let ranks = self.request.data_parallel_size.max(1);
        let sharers = match self.request.config.zero.mics_shard_size {
            Some(size) if self.stage() == Stage::Parameters => size.clamp(1, ranks),
            _ => ranks,
        };
        self.all_params().div_ceil(sharers)
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
            let in_common = self.request.processor == Processor::Cpu && self.stage() != Stage::Off;
            // The ranks of a host hold different experts, and together all of them.
            let params = if in_common { self.all_params() } else { self.params() };
            let mut why = format!("all {params} parameters × {width} bytes");
            if in_common {
                why.push_str(", once for all ranks of a host");
            }
            let bytes = params.saturating_mul(width);
            return self.rows.push(Row { purpose, tier: Tier::Device, bytes, why, in_common });
        }
        for (tier, count) in self.parameters_by_tier() {
            let why = format!("{count} of {} parameters × {width} bytes", self.all_params());
            self.add(purpose, tier, count.saturating_mul(width), why);
        }
    }

    fn gradients(&mut self) {
        let (stage, purpose) = (self.stage(), Purpose::Gradients);
        let config = self.request.config;
        // Sums of micro-batches are wide unless told otherwise; a single one has the type it travels in.
        let width = match config.grad_accum_dtype {
            Some(data_type) => data_type.bytes(),
            None if config.batch.gradient_accumulation_steps.get() > 1 => DataType::Fp32.bytes(),
            None => config.communication_data_type.map_or(self.width(), DataType::bytes),
        };
        if stage < Stage::Gradients {
            return self.add(
                purpose,
                Tier::Device,
                self.params().saturating_mul(width),
                format!("all of them × {width} bytes"),
            );
        }
        let share = self.share();
        self.add(purpose, Tier::Device, share.saturating_mul(width), format!("{share} × {width} bytes"));
    }

    fn optimizer_states(&mut self) {
        let (config, purpose) = (self.request.config, Purpose::OptimizerStates);
        let states = config.optimizer.as_ref().and_then(|optimizer| optimizer.states_per_parameter());
        let assumed = if states.is_none() { " (two, as Adam has)" } else { "" };
        let states = states.unwrap_or(2);
        let count = if self.stage() == Stage::Off { self.params() } else { self.share() };
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

    fn buffers(&mut self) {
        let (zero, params, purpose) =
            (&self.request.config.zero, self.params(), Purpose::CommunicationBuffers);
        let width = self.request.config.communication_data_type.map_or(self.width(), DataType::bytes);
        // Below stage 2 gradients stay in the buffers they travel in.
        if self.request.data_parallel_size > 1 && self.stage() >= Stage::Gradients {
            let bucket = zero.bucket_numel(params).min(params);
            let copies = if zero.overlap_comm { 2 } else { 1 };
            let why = format!("{copies} × {bucket} gradients × {width} bytes");
            self.add(purpose, Tier::Device, bucket.saturating_mul(copies * width), why);
        }
        if self.stage() == Stage::Parameters {
            let layer = match self.request.model {
                Model::Transformer(transformer) => {
                    transformer.layer_params.max(transformer.size.largest_layer_params)
                }
                Model::Counts(size) => size.largest_layer_params,
            };
            let ahead = zero.prefetch_bucket_size.min(params);
            let live = layer.saturating_add(ahead).min(params).min(zero.max_live_parameters.max(layer));
            let why = format!(
                "{live} gathered parameters × {} bytes: one layer and what is fetched ahead",
                self.width()
            );
            self.add(purpose, Tier::Device, live.saturating_mul(self.width()), why);
        }
    }

    fn activations(&mut self) -> Option<Activations> {
        let Model::Transformer(shape) = self.request.model else { return None };
        let config = self.request.config;
        let tokens =
            config.batch.train_micro_batch_size_per_gpu.get().saturating_mul(self.request.sequence_length);
        let bytes = ActivationBytes::of(
            shape,
            self.width(),
            tokens,
            self.request.sequence_length,
            self.request.keeps_attention_matrix,
            self.request.processor,
        );
        let (kept, checkpointed) = (bytes.kept(shape.layers), bytes.checkpointed(shape.layers));
        let purpose = Purpose::Activations;
        if !self.request.checkpoint_activations {
            self.add(
                purpose,
                Tier::Device,
                kept,
                format!("{tokens} tokens through {} layers, all kept", shape.layers),
            );
        } else if config.activation_checkpointing.cpu_checkpointing
            && self.request.processor == Processor::Gpu
        {
            let why = "one layer that is computed again, with its input";
            self.add(purpose, Tier::Device, bytes.checkpointed(1), why.to_owned());
            let why = format!("the inputs of {} layers", shape.layers);
            self.add(purpose, Tier::Host, bytes.layer_input.saturating_mul(shape.layers), why);
        } else {
            let why = format!("the inputs of {} layers, and one layer that is computed again", shape.layers);
            self.add(purpose, Tier::Device, checkpointed, why);
        }
        Some(Activations { kept_bytes: kept, checkpointed_bytes: checkpointed })
    }
}
