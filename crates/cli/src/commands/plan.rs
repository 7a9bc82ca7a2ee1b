//! `ferrospeed plan`: the bytes of each rank in each tier, and whether they fit, before anything is started.

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use ferrospeed_config::{AutoValues, Config, OptimizerTier, ParameterTier};
use ferrospeed_launch::probe;
use ferrospeed_tune::crossing::{Crossings, crossings};
use ferrospeed_tune::model::Model;
use ferrospeed_tune::plan::{Capacity, Plan, Processor, Request, Shortfall, human, plan};
use serde_json::json;

use super::config::{InputArgs, print_findings, refusal};
use super::model::ModelArgs;
use crate::failure::Failure;
use crate::terminal::{self, Colour, Paint};

const GIB: f64 = (1u64 << 30) as f64;
const DEFAULT_SEQUENCE_LENGTH: u64 = 2048;

#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    input: InputArgs,
    #[command(flatten)]
    model: ModelArgs,
    /// The number of data-parallel ranks
    #[arg(long = "world_size", alias = "world-size", short = 'w', value_name = "COUNT", default_value = "1")]
    world_size: NonZeroU64,
    /// Slices of each layer, on as many ranks for each of those [default: the configuration's tensor_parallel.autotp_size]
    #[arg(long, value_name = "SLICES")]
    tp: Option<NonZeroU64>,
    /// Ranks, of the data-parallel ones, that share the experts of a layer [default: the configuration's
    /// expert_parallel.autoep_size]
    #[arg(long, value_name = "RANKS")]
    ep: Option<NonZeroU64>,
    /// How many ranks share a host; all when absent
    #[arg(long = "ranks_per_host", alias = "ranks-per-host", value_name = "COUNT")]
    ranks_per_host: Option<NonZeroU64>,
    /// Tokens per sample; the model's longest when absent, 2048 when that is not known
    #[arg(long = "sequence_length", alias = "sequence-length", value_name = "COUNT")]
    sequence_length: Option<NonZeroU64>,
    /// Compute each layer again in the backward pass
    #[arg(long = "checkpoint_activations", alias = "checkpoint-activations")]
    checkpoint_activations: bool,
    /// Attention keeps its matrix of weights, as attention that is not fused does
    #[arg(long = "keep_attention_matrix", alias = "keep-attention-matrix")]
    keep_attention_matrix: bool,
    /// Memory of one device in GiB, in place of this machine's
    #[arg(long = "device_gib", alias = "device-gib", value_name = "GIB", value_parser = parse_gib)]
    device_bytes: Option<u64>,
    /// Memory of one host in GiB, in place of this machine's
    #[arg(long = "host_gib", alias = "host-gib", value_name = "GIB", value_parser = parse_gib)]
    host_bytes: Option<u64>,
    /// Free space of one host's disk in GiB, in place of this machine's
    #[arg(long = "nvme_gib", alias = "nvme-gib", value_name = "GIB", value_parser = parse_gib)]
    nvme_bytes: Option<u64>,
    /// The folder whose disk is offloaded to, in place of the configuration's
    #[arg(long = "nvme_path", alias = "nvme-path", value_name = "FOLDER")]
    nvme_path: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn parse_gib(text: &str) -> Result<u64, String> {
    let gib: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    let bytes = gib * GIB;
    if !(bytes.is_finite() && (0.0..=u64::MAX as f64 / 2.0).contains(&bytes)) {
        return Err("not an amount of memory".to_owned());
    }
    Ok(bytes as u64)
}

pub(crate) fn run(args: &PlanArgs) -> Result<ExitCode, Failure> {
    let model = args.model.read()?;
    let config = resolve(args, &model)?;
    let known_length = match &model {
        Model::Transformer(transformer) => Some(transformer.max_positions),
        Model::Counts(_) => None,
    };
    let slices = args.tp.map_or_else(|| size_of(&config, "tensor_parallel", "autotp_size"), NonZeroU64::get);
    let expert_ranks =
        args.ep.map_or_else(|| size_of(&config, "expert_parallel", "autoep_size"), NonZeroU64::get);
    let model = spread(model, slices, expert_ranks, args.world_size.get())?;
    let capacity = capacity(args, &config, slices)?;
    let sequence_length =
        args.sequence_length.map(NonZeroU64::get).or(known_length).unwrap_or(DEFAULT_SEQUENCE_LENGTH);
    let request = Request {
        model: &model,
        config: &config,
        data_parallel_size: args.world_size.get(),
        sequence_length,
        checkpoint_activations: args.checkpoint_activations,
        keeps_attention_matrix: args.keep_attention_matrix,
        processor: if capacity.device_bytes.is_some() { Processor::Gpu } else { Processor::Cpu },
    };
    let mut planned = plan(&request);
    let crossings = crossings(&request, capacity.ranks_per_host / slices);
    if let (Model::Transformer(transformer), true) = (&model, slices > 1) {
        let tokens = config.batch.train_micro_batch_size_per_gpu.get().saturating_mul(sequence_length);
        let bytes = transformer.summed_bytes(tokens, config.precision.data_type().bytes());
        planned.notes.push(format!(
            "tensor parallelism: {slices} ranks sum {} per micro-batch, beside what ZeRO exchanges",
            human(bytes)
        ));
    }
    if let (Model::Transformer(transformer), true) = (&model, expert_ranks > 1) {
        let tokens = config.batch.train_micro_batch_size_per_gpu.get().saturating_mul(sequence_length);
        let bytes = transformer.routed_bytes(tokens, config.precision.data_type().bytes(), expert_ranks);
        planned.notes.push(format!(
            "expert parallelism: {} of {} experts of a layer on each of {expert_ranks} ranks, which send each other {} per micro-batch where the router is balanced",
            transformer.experts / expert_ranks,
            transformer.experts,
            human(bytes)
        ));
    }
    let shortfalls = planned.shortfalls(&capacity);
    let text = match args.json {
        true => as_json(&planned, crossings.as_ref(), &capacity, &shortfalls),
        false => {
            let crossings = crossings.map_or_else(String::new, |crossings| crossings.to_string());
            crossings + &as_text(&planned, &capacity, &shortfalls, Paint::for_stdout())
        }
    };
    terminal::print_output(&text)?;
    Ok(if shortfalls.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn resolve(args: &PlanArgs, model: &Model) -> Result<Config, Failure> {
    let read = args.input.read().map_err(refusal)?;
    let auto = match (model, args.input.auto_values()) {
        (Model::Transformer(transformer), _) => AutoValues::new().with_hidden_size(transformer.hidden),
        (Model::Counts(_), given) => given,
    };
    let (config, report) = read.resolve(args.world_size, &auto).map_err(refusal)?;
    print_findings(&report);
    Ok(config)
}

/// What one rank holds of a model in slices and with experts on several ranks.
fn spread(model: Model, slices: u64, expert_ranks: u64, world_size: u64) -> Result<Model, Failure> {
    let transformer = match model {
        Model::Transformer(transformer) => transformer.in_slices(slices),
        Model::Counts(_) if slices > 1 || expert_ranks > 1 => {
            let why = "--tp and --ep: which parameters are cut or spread follows from the model's shape; name it with --model";
            return Err(Failure::Usage(why.to_owned()));
        }
        counts => return Ok(counts),
    };
    if !world_size.is_multiple_of(expert_ranks) {
        let why = format!(
            "--ep: experts on {expert_ranks} ranks need a multiple of as many data-parallel ranks, and there are {world_size} (--world_size)"
        );
        return Err(Failure::Usage(why));
    }
    let spread = transformer.with_experts_over(expert_ranks).ok_or_else(|| {
        Failure::Usage(format!(
            "--ep: a layer's {} experts cannot be shared by {expert_ranks} ranks alike",
            transformer.experts
        ))
    })?;
    Ok(Model::Transformer(spread))
}

/// A number of ranks that the configuration asks for.
fn size_of(config: &Config, section: &str, key: &str) -> u64 {
    config.section(section).and_then(|section| section[key].as_u64()).unwrap_or(1).max(1)
}

/// What there is: what the user says, else what this machine has.
fn capacity(args: &PlanArgs, config: &Config, slices: u64) -> Result<Capacity, Failure> {
    let device_bytes = match args.device_bytes {
        Some(bytes) => Some(bytes),
        None => probe::cuda_driver().ok().and_then(|driver| driver.device_bytes),
    };
    let host_bytes = match args.host_bytes {
        Some(bytes) => bytes,
        None => super::doctor::available_memory_bytes().ok_or_else(|| {
            Failure::Run("this machine does not say how much memory it has; give --host_gib".to_owned())
        })?,
    };
    let nvme_bytes = match args.nvme_bytes {
        Some(bytes) => bytes,
        None => {
            let folder =
                args.nvme_path.clone().or_else(|| offload_folder(config)).unwrap_or_else(|| ".".into());
            probe::free_disk_bytes(&folder).map_err(|why| {
                Failure::Usage(format!("{}: {why}; name another folder with --nvme_path", folder.display()))
            })?
        }
    };
    let ranks = args.world_size.get().saturating_mul(slices);
    let ranks_per_host = args.ranks_per_host.map_or(ranks, NonZeroU64::get).min(ranks);
    Ok(Capacity { device_bytes, host_bytes, nvme_bytes, ranks_per_host })
}

/// The folder that the configuration offloads to.
fn offload_folder(config: &Config) -> Option<PathBuf> {
    if let OptimizerTier::Nvme { buffers, .. } = &config.zero.offload_optimizer.tier {
        return Some(buffers.path.clone());
    }
    match &config.zero.offload_param.tier {
        ParameterTier::Nvme { buffers, .. } => Some(buffers.path.clone()),
        ParameterTier::Device | ParameterTier::Host(_) => None,
    }
}

fn as_text(planned: &Plan, capacity: &Capacity, shortfalls: &[Shortfall], paint: Paint) -> String {
    let device = match capacity.device_bytes {
        Some(bytes) => format!("{} on each device", human(bytes)),
        None => "no device, ranks compute in host memory".to_owned(),
    };
    let mut text = format!(
        "{planned}there is: {device}; {} of host memory and {} of disk for {} rank(s) of a host\n",
        human(capacity.host_bytes),
        human(capacity.nvme_bytes),
        capacity.ranks_per_host
    );
    for shortfall in shortfalls {
        let (needed, available) = (human(shortfall.needed_bytes), human(shortfall.available_bytes));
        let verdict = paint.paint(Colour::Red, "does not fit");
        text.push_str(&format!("{verdict}: {} needs {needed}, there is {available}\n", shortfall.tier));
    }
    if shortfalls.is_empty() {
        text.push_str(&format!("{}\n", paint.paint(Colour::Green, "fits")));
    }
    text
}

fn as_json(
    planned: &Plan,
    crossings: Option<&Crossings>,
    capacity: &Capacity,
    shortfalls: &[Shortfall],
) -> String {
    let document = json!({
        "fits": shortfalls.is_empty(),
        "plan": planned,
        "between_hosts": crossings,
        "capacity": {
            "device_bytes": capacity.device_bytes,
            "host_bytes": capacity.host_bytes,
            "nvme_bytes": capacity.nvme_bytes,
            "ranks_per_host": capacity.ranks_per_host,
        },
        "shortfalls": shortfalls,
    });
    serde_json::to_string_pretty(&document).unwrap_or_default()
}
