//! `ferrospeed plan`: the bytes of each rank in each tier, and whether they fit, before anything is started.

use std::num::{NonZeroU64, NonZeroUsize};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use ferrospeed_command::Failure;
use ferrospeed_command::terminal::{self, Colour, Paint};
use ferrospeed_config::Config;
use ferrospeed_engine::{PlacedOn, placement};
use ferrospeed_launch::probe;
use ferrospeed_pipeline::division::Division;
use ferrospeed_placement::DeviceKind;
use ferrospeed_tune::crossing::{Crossings, Hosts, crossings};
use ferrospeed_tune::model::{Model, Transformer};
use ferrospeed_tune::plan::{Capacity, Plan, Processor, Request, Shortfall, human, plan};
use ferrospeed_tune::stages::{divide, plan_in_stages, too_few_slots};
use serde_json::{Value, json};

use super::config::InputArgs;
use super::counts::at_least_one;
use super::model::ModelArgs;
use super::offload_folders::{check_offload_folders, free_bytes, offload_folders};
use super::plan_asked::{Asked, Shared};
use super::plan_search;
use super::plan_simulate::{self, SimulateArgs};
use super::rates::RateArgs;

const GIB: f64 = (1u64 << 30) as f64;

#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(super) input: InputArgs,
    #[command(flatten)]
    pub(super) model: ModelArgs,
    /// The number of data-parallel ranks; default: the recipe's, or 1
    #[arg(long = "world_size", alias = "world-size", short = 'w', value_name = "COUNT", value_parser = at_least_one)]
    pub(super) world_size: Option<NonZeroU64>,
    /// Slices of each layer, on as many ranks for each of those [default: the configuration's tensor_parallel.autotp_size]
    #[arg(long, value_name = "SLICES", value_parser = at_least_one)]
    pub(super) tp: Option<NonZeroU64>,
    /// Stages of the model, on as many ranks for each of those [default: the configuration's pipeline.stages]
    #[arg(long, value_name = "STAGES", value_parser = at_least_one)]
    pub(super) pp: Option<NonZeroU64>,
    /// The order in which stages work: 1f1b, interleaved:CHUNKS, zb-h1 or zb-v [default: the configuration's
    /// pipeline.schedule]
    #[arg(long = "pp_schedule", alias = "pp-schedule", value_name = "SCHEDULE")]
    pub(super) pp_schedule: Option<String>,
    /// Ranks, of the data-parallel ones, that share the experts of a layer [default: the configuration's
    /// expert_parallel.autoep_size]
    #[arg(long, value_name = "RANKS", value_parser = at_least_one)]
    pub(super) ep: Option<NonZeroU64>,
    /// Ranks that share each sequence, for each of the data-parallel ones [default: the configuration's
    /// sequence_parallel_size]
    #[arg(long, value_name = "RANKS", value_parser = at_least_one)]
    pub(super) sp: Option<NonZeroU64>,
    /// How many ranks share a host; all when absent
    #[arg(long = "ranks_per_host", alias = "ranks-per-host", value_name = "COUNT", value_parser = at_least_one)]
    ranks_per_host: Option<NonZeroU64>,
    /// Tokens per sample; default: the recipe's, the model's longest, or 2048
    #[arg(long = "sequence_length", alias = "sequence-length", value_name = "COUNT", value_parser = at_least_one)]
    pub(super) sequence_length: Option<NonZeroU64>,
    /// Compute each layer again in the backward pass, as a recipe's model.activation_checkpointing asks too
    #[arg(long = "checkpoint_activations", alias = "checkpoint-activations")]
    pub(super) checkpoint_activations: bool,
    /// Attention keeps its matrix of weights, as attention that is not fused does
    #[arg(long = "keep_attention_matrix", alias = "keep-attention-matrix")]
    keep_attention_matrix: bool,
    /// Memory of one device in GiB, in place of this machine's
    #[arg(long = "device_gib", alias = "device-gib", value_name = "GIB", allow_negative_numbers = true, value_parser = parse_gib)]
    device_bytes: Option<u64>,
    /// Memory of one host in GiB, in place of this machine's
    #[arg(long = "host_gib", alias = "host-gib", value_name = "GIB", allow_negative_numbers = true, value_parser = parse_gib)]
    host_bytes: Option<u64>,
    /// Free space of one host's disk in GiB, in place of this machine's
    #[arg(long = "nvme_gib", alias = "nvme-gib", value_name = "GIB", allow_negative_numbers = true, value_parser = parse_gib)]
    nvme_bytes: Option<u64>,
    /// The folder whose disk is offloaded to, in place of the configuration's
    #[arg(long = "nvme_path", alias = "nvme-path", value_name = "FOLDER")]
    nvme_path: Option<PathBuf>,
    /// Name the fastest ways to lay the run out on --world_size ranks in all (data, slices, sequences, stage, micro-batch,
    /// recomputation, offload) that fit, by a model of costs
    #[arg(long)]
    search: bool,
    /// Print where every run of bytes of a rank's model state is, who owns it, and what a step does to it, in order
    #[arg(long, conflicts_with_all = ["search", "json"])]
    placement: bool,
    /// The rank that --placement is about
    #[arg(long, value_name = "RANK", default_value_t = 0, requires = "placement")]
    rank: usize,
    #[command(flatten, next_help_heading = "A step on paper")]
    pub(super) simulate: SimulateArgs,
    #[command(flatten, next_help_heading = "Rates for --search and --simulate")]
    pub(super) rates: RateArgs,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

impl PlanArgs {
    /// Whether what is planned runs here: nobody has said that memory or hosts are others.
    pub(super) fn is_about_this_machine(&self) -> bool {
        self.device_bytes.is_none() && self.host_bytes.is_none() && self.ranks_per_host.is_none()
    }
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
    if args.search {
        return plan_search::run(args);
    }
    if args.simulate.simulate {
        return plan_simulate::run(args);
    }
    if args.rates.is_given() {
        return Err(Failure::Usage("rates are for --search and --simulate".to_owned()));
    }
    let asked = Asked::read(args, args.world_size)?;
    check_offload_folders(&asked.config)?;
    if args.placement {
        return print_placement(args, &asked);
    }
    let Asked {
        model,
        config,
        data_ranks,
        stages,
        sliced,
        shared,
        sequence_length,
        recomputes,
        mlp_chunk,
        ..
    } = asked;
    let zero_ranks = data_ranks.get().saturating_mul(shared.sequence);
    let division = staged(&model, &config, stages, sequence_length)?;
    if let (Model::Transformer(whole), true) = (&model, recomputes)
        && let Some(why) = too_few_slots(whole, &config, division.as_ref())
    {
        return Err(Failure::Usage(why));
    }
    let model = spread(model, sliced, shared.experts, zero_ranks)?;
    let ranks = zero_ranks.saturating_mul(sliced).saturating_mul(stages.get() as u64);
    let capacity = capacity(args, &config, ranks)?;
    let request = Request {
        model: &model,
        config: &config,
        data_parallel_size: zero_ranks,
        sequence_ranks: shared.sequence,
        sequence_length,
        checkpoint_activations: recomputes,
        mlp_chunk,
        keeps_attention_matrix: args.keep_attention_matrix,
        processor: if capacity.device_bytes.is_some() { Processor::Gpu } else { Processor::Cpu },
        operands: super::doctor::operands(),
    };
    let planned =
        division.as_ref().map_or_else(|| Ok(plan(&request)), |division| plan_in_stages(&request, division));
    let mut planned = planned.map_err(|error| Failure::Usage(error.to_string()))?;
    let after = config.section("use_data_before_expert_parallelism").and_then(Value::as_bool);
    let crossings = crossings(
        &request,
        Hosts {
            ranks_per_host: capacity.ranks_per_host / sliced,
            expert_ranks: shared.experts,
            experts_are_neighbours: after != Some(true),
        },
    );
    planned.notes.extend(exchanges(&request, sliced, shared.experts));
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

/// Prints the placement of one rank.
fn print_placement(args: &PlanArgs, asked: &Asked) -> Result<ExitCode, Failure> {
    let Shared { experts, sequence } = asked.shared;
    if asked.sliced > 1 || asked.stages.get() > 1 || experts > 1 || sequence > 1 {
        let why = "--placement shows ranks that all hold the whole model: leave out --tp, --pp, --ep and --sp, and the keys that ask for them";
        return Err(Failure::Usage(why.to_owned()));
    }
    let Some(parameters) = &asked.parameters else {
        let why =
            "--placement needs the shapes of a model that is trained here: give --model PATH, or a recipe";
        return Err(Failure::Usage(why.to_owned()));
    };
    let ranks = usize::try_from(asked.data_ranks.get()).unwrap_or(usize::MAX);
    let capacity = capacity(args, &asked.config, asked.data_ranks.get())?;
    let on = PlacedOn {
        ranks,
        rank: args.rank,
        on_one_host: capacity.ranks_per_host >= asked.data_ranks.get(),
        device: if capacity.device_bytes.is_some() { DeviceKind::Beside } else { DeviceKind::Host },
    };
    let placed = placement(&asked.config, parameters, asked.spares_vectors, &on);
    let placed = placed.map_err(|error| Failure::Usage(error.to_string()))?;
    terminal::print_output(&placed.to_string())?;
    Ok(ExitCode::SUCCESS)
}

/// What slices and experts make ranks send each other, beside ZeRO.
fn exchanges(request: &Request<'_>, sliced: u64, expert_ranks: u64) -> Vec<String> {
    let Model::Transformer(transformer) = request.model else { return Vec::new() };
    let length = request.sequence_length.div_ceil(request.sequence_ranks.max(1));
    let tokens = request.config.batch.train_micro_batch_size_per_gpu.get().saturating_mul(length);
    let width = request.config.precision.data_type().bytes();
    let mut notes = Vec::new();
    if sliced > 1 {
        let bytes = human(transformer.summed_bytes(tokens, width));
        notes.push(format!(
            "tensor parallelism: {sliced} ranks sum {bytes} per micro-batch, beside what ZeRO exchanges"
        ));
    }
    if expert_ranks > 1 {
        notes.push(format!(
            "expert parallelism: {} of {} experts of a layer on each of {expert_ranks} ranks, which send each other {} per micro-batch where the router is balanced",
            transformer.experts / expert_ranks,
            transformer.experts,
            human(transformer.routed_bytes(tokens, width, expert_ranks))
        ));
    }
    if request.sequence_ranks > 1 {
        notes.push(format!(
            "sequence parallelism: {length} of {} tokens of a sample on each rank",
            request.sequence_length
        ));
    }
    notes
}

/// Which stage has which layers of the model; `None` where it is in one piece.
pub(super) fn staged(
    model: &Model,
    config: &Config,
    stages: NonZeroUsize,
    sequence_length: u64,
) -> Result<Option<Division>, Failure> {
    match model {
        _ if stages.get() == 1 => Ok(None),
        Model::Transformer(whole) => divide(whole, config, stages, sequence_length)
            .map(Some)
            .map_err(|error| Failure::Usage(error.to_string())),
        Model::Counts(_) => {
            let why = "--pp: which layers a stage gets follows from the model's shape; name it with --model";
            Err(Failure::Usage(why.to_owned()))
        }
    }
}

/// What one rank holds of a model in slices and with experts on several ranks.
pub(super) fn spread(
    model: Model,
    slices: u64,
    expert_ranks: u64,
    world_size: u64,
) -> Result<Model, Failure> {
    let transformer = match model {
        Model::Transformer(transformer) => transformer.in_slices(slices),
        Model::Counts(_) if slices > 1 || expert_ranks > 1 => {
            let why = "--tp and --ep: which parameters are cut or spread follows from the model's shape; name it with --model";
            return Err(Failure::Usage(why.to_owned()));
        }
        counts => return Ok(counts),
    };
    let spread = with_experts_over(transformer, expert_ranks)?;
    if !world_size.is_multiple_of(expert_ranks) {
        let why = format!(
            "experts on {expert_ranks} ranks need a multiple of as many data-parallel ranks, and there are {world_size} (--world_size)"
        );
        return Err(refused_experts(&why));
    }
    Ok(Model::Transformer(spread))
}

/// What one rank holds of a model whose experts are on several, if they can be.
pub(super) fn with_experts_over(model: Transformer, ranks: u64) -> Result<Transformer, Failure> {
    model.with_experts_over(ranks).ok_or_else(|| match model.experts {
        0 => refused_experts(&format!("the model has no experts to spread over {ranks} ranks")),
        experts => refused_experts(&format!("{experts} experts cannot be shared by {ranks} ranks alike")),
    })
}

fn refused_experts(why: &str) -> Failure {
    Failure::Usage(format!("expert_parallel.autoep_size (--ep): {why}"))
}

/// What there is: what the user says, else what this machine has.
pub(super) fn capacity(args: &PlanArgs, config: &Config, ranks: u64) -> Result<Capacity, Failure> {
    let device_bytes = match args.device_bytes {
        Some(bytes) => Some(bytes),
        None => probe::cuda_driver().ok().and_then(|driver| driver.device_bytes),
    };
    let host_bytes = match args.host_bytes {
        Some(bytes) => bytes,
        None => probe::available_memory_bytes().ok_or_else(|| {
            Failure::Run("this machine does not say how much memory it has; give --host_gib".to_owned())
        })?,
    };
    let nvme_bytes = match args.nvme_bytes {
        Some(bytes) => bytes,
        None => {
            let named = || offload_folders(config).into_iter().next();
            let folder = args.nvme_path.clone().or_else(named).unwrap_or_else(|| ".".into());
            free_bytes(&folder).map_err(|why| {
                Failure::Usage(format!("{}: {why}; name another folder with --nvme_path", folder.display()))
            })?
        }
    };
    let ranks_per_host = args.ranks_per_host.map_or(ranks, NonZeroU64::get).min(ranks);
    Ok(Capacity { device_bytes, host_bytes, nvme_bytes, ranks_per_host })
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
