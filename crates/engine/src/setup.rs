//! What an engine is made from.

use std::num::NonZeroU64;

use ferrospeed_comm::topology::{DATA, MODEL};
use ferrospeed_comm::{ExpertMembership, Group, Mesh, World};
use ferrospeed_config::{AutoValues, Config, DataType, PipelineStages, Precision, Stage};
use ferrospeed_nn::{Init, Parameters};
use ferrospeed_optim::muon::Muon;
use ferrospeed_optim::schedule::Scheduler;
use ferrospeed_optim::{GroupOptions, Optimizer};
use ferrospeed_pipeline::partition::Measured;
use ferrospeed_tensor::store::{FromInitializers, ParamSource};
use ferrospeed_tensor::{DType, Device, Param};
use ferrospeed_zero::{Elsewhere, Homes, ParamGroup, Sharding, StoreOptions, ZeroStore};
use serde_json::Value;

use crate::activations::activation_shelf;
use crate::agreement::agree;
use crate::engine::Engine;
use crate::error::{EngineError, Result};
use crate::{experts, slices};

/// The surroundings of a run.
#[derive(Clone)]
pub struct Setup {
    /// The resolved configuration.
    pub config: Config,
    /// The ranks.
    pub world: World,
    /// Where this rank computes.
    pub device: Device,
    /// Where random numbers start.
    pub seed: u64,
    /// The run ends after this many skipped steps in a row.
    pub max_skipped_in_a_row: u64,
    /// What this rank read from files and every rank must have read alike, by name: a model's configuration, checksums of
    /// weights and data. Ranks compare it before anything else; where they differ, the error says in which name.
    pub read: Value,
}

impl Setup {
    /// One rank.
    pub fn solo(config: Config, device: Device) -> Setup {
        Setup::new(config, World::solo(), device)
    }

    /// Any ranks, any device, by a ds_config: its text, which begins with a brace, or what names it as DeepSpeed's
    /// `--deepspeed_config` does, the path of a file or base64. With `pipeline.stages` in it, batches are divided among the ranks
    /// that see different data.
    pub fn from_config(ds_config: &str, world: World, device: Device) -> Result<Setup> {
        let is_text = ds_config.trim_start().starts_with('{');
        let unresolved = match is_text {
            true => Config::from_str("ds_config", ds_config)?,
            false => Config::from_argument(ds_config)?,
        };
        let stages = unresolved.given("pipeline.stages").and_then(Value::as_u64).unwrap_or(1).max(1);
        let data_ranks = NonZeroU64::new(world.size() as u64 / stages).unwrap_or(NonZeroU64::MIN);
        let (config, report) = unresolved.resolve(data_ranks, &AutoValues::new())?;
        if world.rank() == 0 {
            report.warnings().for_each(|warning| tracing::warn!("{warning}"));
        }
        Ok(Setup::new(config, world, device))
    }

    /// Any ranks, any device.
    pub fn new(config: Config, world: World, device: Device) -> Setup {
        Setup { config, world, device, seed: 42, max_skipped_in_a_row: 50, read: Value::Null }
    }
}

/// What may take the place of what the configuration says.
#[derive(Default)]
pub struct Options<'a> {
    /// Parameters with options of their own. Default: all in one group.
    pub groups: Option<Vec<ParamGroup>>,
    /// Whether weight decay spares vectors (biases, norms), in a group of their own, where no groups are given: as Hugging Face's
    /// Trainer builds its optimizer.
    pub spares_vectors: bool,
    /// Where first values come from. Default: the parameters' initialisers.
    pub source: Option<&'a dyn ParamSource>,
    /// The update rule and the options of a group: one of ours, or one of the program's own ([`Optimizer::own`]).
    /// Default: the configured one.
    pub optimizer: Option<(Optimizer, GroupOptions)>,
    /// The learning-rate schedule: any [`ferrospeed_optim::schedule::Schedule`] in a [`Scheduler::custom`]. Default: the
    /// configured one.
    pub scheduler: Option<Scheduler>,
    /// Over which ranks state is spread, in any stage. Default: over all, or in shards of `mics_shard_size`.
    pub sharding: Option<Sharding>,
    /// Parameters that are spread in another way: slices, weights that stages share.
    pub elsewhere: Vec<Elsewhere>,
    /// The groups over which experts are spread, one per size: see [`Options::spread_experts`]. Default: each rank holds all.
    pub experts: Vec<ExpertMembership>,
    /// Where ranks hold different parts of one model: all of them, for one norm and one decision to step. Default: none do.
    pub agreement: Option<Group>,
    /// How many ranks see different samples, where others see the same ones. Default: every rank sees its own.
    pub data_parallel_size: Option<usize>,
    /// This rank's number among them. Default: that among the ranks that state is spread over.
    pub data_rank: Option<usize>,
    /// The mesh whose ranks hold slices of the model's layers: see [`Options::spread_over`]. Default: none do.
    pub mesh: Option<Mesh>,
    /// What layers take, where a model in stages is divided by that: see [`measure_layers`](crate::measure_layers). Default:
    /// nobody has measured them.
    pub measured: Option<Vec<Measured>>,
    /// Whether gradients are only added up until the step, however many micro-batches it has: a backward that waited for
    /// other ranks could keep a pipeline waiting.
    pub reduces_at_step: bool,
    /// Paths of modules (`*` stands for anything) that ranks may read unlike each other, as experts that a router
    /// chooses: stage 3 gathers and releases all of such a module at once. DeepSpeed's `set_z3_leaf_modules`.
    pub leaf_modules: Vec<String>,
}

impl Options<'_> {
    /// On a mesh: state is spread over the ranks that hold the same slices, the ranks of its data axis see different
    /// samples, and where layers are in slices all ranks come to one norm. All ranks call it together.
    pub fn spread_over(&mut self, mesh: &Mesh) -> Result<()> {
        self.sharding = Some(Sharding::over(&mesh.sequence_data()?).divided_by(mesh.size(DATA)));
        self.agreement = (mesh.size(MODEL) > 1).then(|| mesh.world().group());
        self.data_parallel_size = Some(mesh.size(DATA));
        self.data_rank = Some(mesh.coordinate(DATA));
        self.mesh = Some(mesh.clone());
        Ok(())
    }
}

/// Builds a model on handles, decides where its state lives, and makes it ready to train.
pub fn initialize<M>(setup: &Setup, build: impl FnOnce(&Init) -> M) -> Result<(Engine, M)> {
    initialize_with(setup, Options::default(), build)
}

/// The same with an optimizer, a schedule, groups or first values of the caller's own.
pub fn initialize_with<M>(
    setup: &Setup,
    options: Options<'_>,
    build: impl FnOnce(&Init) -> M,
) -> Result<(Engine, M)> {
    let init = Init::root();
    let model = build(&init);
    let engine = initialize_model(setup, &init.parameters(), options)?;
    Ok((engine, model))
}

/// The same for a model that is built already.
pub fn initialize_model(setup: &Setup, parameters: &Parameters, options: Options<'_>) -> Result<Engine> {
    experts::check(&setup.config, parameters)?;
    if let PipelineStages::Fixed(stages) = setup.config.pipeline.stages
        && stages > 1
    {
        let why = format!(
            "{stages} stages are asked for, and this model is no list of layers that could be divided: build it as Stages and \
             call initialize_pipeline, or remove the key"
        );
        return Err(EngineError::Argument { what: "pipeline.stages", why });
    }
    initialize_part(setup, parameters, options)
}

/// An engine that only computes what a model of the program's own says: DeepSpeed's `init_inference` of a module. Weights come from
/// `source`, or begin as the model's initialisers say; stage 3 of the configuration's `zero_optimization` divides them over
/// the ranks, and `offload_param` keeps them in the host's memory or on a disk until a pass needs them. No optimizer is made,
/// and [`Engine::forward`] runs in evaluation.
pub fn init_inference<M>(
    setup: &Setup,
    source: Option<&dyn ParamSource>,
    build: impl FnOnce(&Init) -> M,
) -> Result<(Engine, M)> {
    let mut setup = setup.clone();
    (setup.config.optimizer, setup.config.scheduler) = (None, None);
    if setup.config.zero.stage != Stage::Parameters {
        // What the others divide there is only in training.
        setup.config.zero.stage = Stage::Off;
    }
    let options = Options { source, ..Options::default() };
    let (mut engine, model) = initialize_with(&setup, options, build)?;
    engine.eval();
    Ok((engine, model))
}

/// All parameters together, or where weight decay spares vectors, matrices and vectors; of Muon, hidden matrices before
/// what is left of each. A set may be empty, so that all stages of a pipeline have as many.
pub(crate) fn sets_of(
    parameters: &Parameters,
    rule: Option<&Optimizer>,
    spares_vectors: bool,
) -> Vec<Vec<Param>> {
    let all = parameters.as_slice().to_vec();
    let sets = match spares_vectors {
        false => vec![all],
        true => {
            let is_matrix = |param: &Param| param.whole_shape().sizes().len() > 1;
            let (matrices, vectors) = all.into_iter().partition(is_matrix);
            vec![matrices, vectors]
        }
    };
    let Some(Optimizer::Muon(_)) = rule else { return sets };
    let halves = |set: Vec<Param>| -> [Vec<Param>; 2] { set.into_iter().partition(is_hidden_matrix).into() };
    sets.into_iter().flat_map(halves).collect()
}

fn is_hidden_matrix(param: &Param) -> bool {
    Muon::takes(param.name(), param.whole_shape().sizes().len())
}

/// Those sets with their options: vectors do not decay.
pub(crate) fn groups_of(
    parameters: &Parameters,
    rule: Option<&Optimizer>,
    options: GroupOptions,
    spares_vectors: bool,
) -> Vec<ParamGroup> {
    let undecayed = GroupOptions { weight_decay: 0.0, ..options };
    let of_sets: Vec<GroupOptions> = [options, undecayed]
        .into_iter()
        .flat_map(|of_set| match rule {
            Some(Optimizer::Muon(muon)) => vec![muon.of_matrices(&of_set, &options), of_set],
            _ => vec![of_set],
        })
        .collect();
    let groups = sets_of(parameters, rule, spares_vectors).into_iter().zip(of_sets);
    groups.map(|(params, options)| ParamGroup { params, options }).collect()
}

/// Groups that a program gave, of Muon: hidden matrices apart, but for groups that are of matrices already.
fn split_for_muon(muon: &Muon, groups: Vec<ParamGroup>, configured: &GroupOptions) -> Vec<ParamGroup> {
    let halves = |group: ParamGroup| -> Vec<ParamGroup> {
        if Muon::moves(&group.options) {
            return vec![group];
        }
        let (matrices, others): (Vec<Param>, Vec<Param>) =
            group.params.into_iter().partition(is_hidden_matrix);
        let of_matrices = muon.of_matrices(&group.options, configured);
        let halves = [(matrices, of_matrices), (others, group.options)].into_iter();
        halves
            .filter(|(params, _)| !params.is_empty())
            .map(|(params, options)| ParamGroup { params, options })
            .collect()
    };
    groups.into_iter().flat_map(halves).collect()
}

/// The same for those parameters of a model that this rank's stage uses.
pub(crate) fn initialize_part(
    setup: &Setup,
    parameters: &Parameters,
    mut options: Options<'_>,
) -> Result<Engine> {
    agree(setup)?;
    let config = &setup.config;
    let optimizer = match options.optimizer {
        Some(given) => Some(given),
        None => configured_optimizer(config)?,
    };
    if let Some((rule, _)) = optimizer.as_ref().filter(|(rule, _)| rule.is_of_the_host())
        && !setup.device.backend().is_host()
    {
        let why = format!(
            "{} runs on the host only, and this rank computes on a GPU; use Adam, AdamW, SGD, Adagrad, Lion, Lamb or Muon \
             without maximize, amsgrad, lr_decay and initial_accumulator_value, or the CPU",
            rule.name()
        );
        return Err(EngineError::Unsupported { key: "optimizer.type", why });
    }
    if let Some((rule @ Optimizer::Own(_), _)) = &optimizer
        && config.zero.stage != Stage::Off
        && !config.zero_allow_untested_optimizer
    {
        let why = format!(
            "ZeRO is not tested with {}; add \"zero_allow_untested_optimizer\": true to run it all the same",
            rule.name()
        );
        return Err(EngineError::Unsupported { key: "optimizer", why });
    }
    let group_options = optimizer
        .as_ref()
        .map_or(GroupOptions { lr: 0.0, weight_decay: 0.0, betas: [0.0; 2] }, |(_, options)| *options);
    if optimizer.is_some() && !(group_options.lr.is_finite() && group_options.lr >= 0.0) {
        let why = format!("{} is not a learning rate", group_options.lr);
        return Err(EngineError::Argument { what: "optimizer.params.lr", why });
    }
    if optimizer.is_none() && matches!(config.zero.stage, Stage::OptimizerStates | Stage::Gradients) {
        let why = format!(
            "stage {} divides what an optimizer needs, and there is none: configure one, or use stage 0 or 3",
            config.zero.stage.number()
        );
        return Err(EngineError::Argument { what: "zero_optimization.stage", why });
    }
    let spares_vectors = options.spares_vectors;
    let rule = optimizer.as_ref().map(|(rule, _)| rule);
    let mut groups = match (options.groups, rule) {
        (Some(groups), Some(Optimizer::Muon(muon))) => split_for_muon(muon, groups, &group_options),
        (Some(groups), _) => groups,
        (None, rule) => groups_of(parameters, rule, group_options, spares_vectors),
    };
    let dtype = model_type(config);
    let accumulates = config.batch.gradient_accumulation_steps.get() > 1 || options.reduces_at_step;
    let initial = FromInitializers { seed: setup.seed };
    let source: &dyn ParamSource = options.source.unwrap_or(&initial);
    let stream = setup.device.backend().stream();
    let stream = stream.map(|(ordinal, handle)| ferrospeed_comm::DeviceStream { ordinal, handle });
    setup.world.attach_device(stream)?;
    let in_shards = config.zero.stage == Stage::Parameters && config.zero.mics_shard_size.is_some();
    if options.mesh.is_some() && in_shards {
        let why = "on a mesh, state is spread over all ranks that hold the same slices; remove it".to_owned();
        return Err(EngineError::Unsupported { key: "zero_optimization.mics_shard_size", why });
    }
    let mut sharding = match (options.sharding, config.zero.mics_shard_size) {
        (Some(given), _) => given,
        (None, Some(size)) if config.zero.stage == Stage::Parameters => {
            Sharding::in_shards_of(&setup.world, usize::try_from(size).unwrap_or(usize::MAX))?
        }
        (None, _) => Sharding::over_world(&setup.world),
    };
    let mesh = options.mesh.take().filter(|mesh| mesh.size(MODEL) > 1);
    slices::check(config, optimizer.as_ref().map(|(rule, _)| rule), mesh.as_ref())?;
    let own = experts::own_part(config, parameters, &mut groups, &options.experts, &sharding)?;
    let (aliases, states) = (parameters.aliases().clone(), parameters.states().clone());
    let (parameters, parts) = match own {
        Some(own) => {
            options.elsewhere.extend(own.elsewhere);
            (own.parameters, Some(own.parts))
        }
        None => (parameters.clone(), None),
    };
    let mut leaf_modules = Vec::new();
    for pattern in options.leaf_modules.iter().chain(&configured_leaf_modules(config)) {
        let found = parameters.modules(pattern);
        if found.is_empty() {
            let why = format!("no module of this model has a path like '{pattern}'");
            return Err(EngineError::Argument { what: "leaf modules", why });
        }
        leaf_modules.extend(found.iter().map(|module| module.as_slice().to_vec()));
    }
    if let Some(mesh) = &mesh {
        options.elsewhere.extend(slices::elsewhere(mesh, &parameters, &sharding, &options.elsewhere)?);
        let group = mesh.tensor()?;
        sharding = sharding.sliced_over(&group);
        for way in &mut options.elsewhere {
            way.sharding = way.sharding.clone().sliced_over(&group);
        }
    }
    let data_parallel_size = options.data_parallel_size.unwrap_or(setup.world.size());
    let asked = config.section("sequence_parallel_size").and_then(serde_json::Value::as_u64).unwrap_or(1);
    if asked > 1 && sharding.ranks() as u64 != asked * data_parallel_size as u64 {
        let why = format!(
            "sequences are to be shared by {asked} ranks each, and the engine was given no mesh that says so: call \
             Options::spread_over with one, and Decoder::set_sequence_parallel with its sequence group"
        );
        return Err(EngineError::Argument { what: "sequence_parallel_size", why });
    }
    // Gradients of the same samples come from ranks that hold parts of their sequences.
    let wire = if sharding.ranks() > data_parallel_size {
        Some(config.seq_parallel_comm_data_type)
    } else {
        config.communication_data_type
    };
    let wire = wire.map_or(dtype, element_type);
    let store = ZeroStore::attach(
        &setup.world,
        &setup.device,
        parameters.as_slice(),
        &groups,
        &StoreOptions {
            zero: &config.zero,
            dtype,
            wire,
            kept: kept_type(config, wire, accumulates),
            accumulates,
            predivide: config.gradient_predivide_factor,
            prescale: config.prescale_gradients,
            sparse_gradients: config.sparse_gradients,
            sharding,
            elsewhere: &options.elsewhere,
            agreement: options.agreement,
            reduces_each_micro_batch: config.zero.reduce_each_micro_batch && !options.reduces_at_step,
            leaf_modules: &leaf_modules,
            optimizer: optimizer.map(|(rule, _)| rule),
            homes: Homes::from_config(&config.zero, &config.aio, &setup.device),
        },
        source,
    )?;
    if setup.world.rank() == 0 {
        Homes::clamped(&config.zero, &config.aio).iter().for_each(|clamped| tracing::warn!("{clamped}"));
    }
    let mut engine = Engine::new(setup, store, options.scheduler, aliases, data_parallel_size)?;
    engine.parts = parts;
    engine.expert_ranks = options.experts.iter().map(|groups| groups.expert.size()).max().unwrap_or(1);
    engine.states = states;
    engine.reduces_at_step = options.reduces_at_step;
    engine.slices = mesh.map(|mesh| mesh.tensor()).transpose()?;
    engine.shelf = activation_shelf(&config.activation_checkpointing, engine.slices.as_ref());
    engine.data_rank = options.data_rank.unwrap_or(engine.data_rank);
    Ok(engine)
}

/// The patterns of the modules that `zero_optimization.leaf_module` names, whole or by their ends.
fn configured_leaf_modules(config: &Config) -> Vec<String> {
    let section = config.section("zero_optimization").and_then(|zero| zero.get("leaf_module"));
    let texts = |key: &str| {
        let list = section.and_then(|section| section[key].as_array()).map_or(&[][..], Vec::as_slice);
        list.iter().filter_map(Value::as_str)
    };
    let ends = texts("name_suffixes").map(|end| format!("*{end}"));
    texts("names").map(str::to_owned).chain(ends).collect()
}

/// The optimizer that a configuration names.
pub(crate) fn configured_optimizer(config: &Config) -> Result<Option<(Optimizer, GroupOptions)>> {
    let Some(configured) = &config.optimizer else { return Ok(None) };
    Optimizer::from_config(configured).map(Some).ok_or_else(|| {
        let why = format!(
            "{configured:?} does not run yet; use one of docs/config.md that does, or one of your own"
        );
        EngineError::Unsupported { key: "optimizer.type", why }
    })
}

pub(crate) fn element_type(data_type: DataType) -> DType {
    match data_type {
        DataType::Fp32 => DType::F32,
        DataType::Fp16 => DType::F16,
        DataType::Bf16 => DType::BF16,
    }
}

/// The type of weights and activations.
pub(crate) fn model_type(config: &Config) -> DType {
    match config.precision {
        Precision::Fp32 => DType::F32,
        Precision::Bf16 { .. } => DType::BF16,
        Precision::Fp16 { .. } => DType::F16,
    }
}

/// Sums of micro-batches are kept in f32 unless the configuration says otherwise; a single one needs no more than the type
/// it travels in.
pub(crate) fn kept_type(config: &Config, wire: DType, accumulates: bool) -> DType {
    match config.grad_accum_dtype {
        Some(data_type) => element_type(data_type),
        None if accumulates => DType::F32,
        None => wire,
    }
}
