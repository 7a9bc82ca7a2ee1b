//! What `ferrospeed plan` is asked about: a configuration and a model with their sizes, or a recipe that says all of it.

use std::num::{NonZeroU64, NonZeroUsize};
use std::path::Path;

use ferrospeed_command::Failure;
use ferrospeed_command::terminal::print_note;
use ferrospeed_config::{AutoValues, Config, PipelineStages};
use ferrospeed_engine::refusals;
use ferrospeed_models::{DecoderConfig, ModelError};
use ferrospeed_nn::Parameters;
use ferrospeed_nn::tensor_parallel::Between;
use ferrospeed_train::{FromHub, Recipe, TrainError, frozen_and_adapters, shape_of};
use ferrospeed_tune::model::Model;
use serde_json::Value;

use super::config::{print_findings, refusal};
use super::from_hub;
use super::plan::PlanArgs;
use super::train_start::check_besides_data;

const DEFAULT_SEQUENCE_LENGTH: u64 = 2048;

/// What is planned, and on how many ranks.
pub(super) struct Asked {
    pub(super) model: Model,
    pub(super) config: Config,
    pub(super) data_ranks: NonZeroU64,
    /// Stages that the model is cut into.
    pub(super) stages: NonZeroUsize,
    /// Ranks that hold slices of each layer.
    pub(super) sliced: u64,
    pub(super) shared: Shared,
    pub(super) sequence_length: u64,
    pub(super) recomputes: bool,
    pub(super) mlp_chunk: Option<u64>,
    /// The handles of the model's parameters, where it is known.
    pub(super) parameters: Option<Parameters>,
    /// Whether weight decay leaves biases and norms alone.
    pub(super) spares_vectors: bool,
}

/// How many ranks share what.
pub(super) struct Shared {
    pub(super) experts: u64,
    pub(super) sequence: u64,
}

impl Asked {
    /// As the arguments say it, for so many data-parallel ranks where they are known.
    pub(super) fn read(args: &PlanArgs, world_size: Option<NonZeroU64>) -> Result<Asked, Failure> {
        match args.input.recipe() {
            Some(path) => Asked::of_recipe(args, world_size, path),
            None => Asked::of_config(args, world_size),
        }
    }

    fn of_config(args: &PlanArgs, world_size: Option<NonZeroU64>) -> Result<Asked, Failure> {
        let (model, decoder) = args.model.read_all()?;
        let data_ranks = world_size.unwrap_or(NonZeroU64::MIN);
        let read = args.input.read().and_then(|read| read.with_overrides(&sizes(args))).map_err(refusal)?;
        let auto = match (&model, args.input.auto_values()) {
            (Model::Transformer(transformer), _) => AutoValues::new().with_hidden_size(transformer.hidden),
            (Model::Counts(_), given) => given,
        };
        let (config, report) = read.resolve(data_ranks, &auto).map_err(refusal)?;
        print_findings(&report);
        let refused = refusals(&config, None).into_iter().next();
        refused.map_or(Ok(()), |error| Err(Failure::Usage(error.to_string())))?;
        let longest = match &model {
            Model::Transformer(transformer) => transformer.max_positions,
            Model::Counts(_) => DEFAULT_SEQUENCE_LENGTH,
        };
        let stages = match config.pipeline.stages {
            PipelineStages::Fixed(stages) => stages,
            PipelineStages::Auto => 1,
        };
        let stages = usize::try_from(stages).ok();
        check_division(decoder.as_ref(), &config)?;
        Ok(Asked {
            data_ranks,
            stages: stages.and_then(NonZeroUsize::new).unwrap_or(NonZeroUsize::MIN),
            sliced: size_of(&config, "tensor_parallel", "autotp_size"),
            shared: Shared {
                experts: size_of(&config, "expert_parallel", "autoep_size"),
                sequence: sequence_ranks(&config),
            },
            sequence_length: args.sequence_length.map_or(longest, NonZeroU64::get),
            recomputes: args.checkpoint_activations,
            mlp_chunk: None,
            parameters: args.model.parameters(),
            spares_vectors: false,
            model,
            config,
        })
    }

    /// As `ferrospeed train` would run it, with what the other arguments change.
    fn of_recipe(args: &PlanArgs, world_size: Option<NonZeroU64>, path: &Path) -> Result<Asked, Failure> {
        let mut overrides = args.input.overrides().to_vec();
        overrides.extend(sizes(args));
        let usage = |error: TrainError| Failure::Usage(error.to_string());
        let mut recipe = Recipe::load(path, &overrides).map_err(usage)?;
        from_hub::bring(&mut recipe, path, FromHub::ModelConfig)?;
        let mesh = recipe.mesh();
        // As `train` has it: options of the command bring the ranks that they need, a recipe says how many there are.
        let ranks = world_size.map_or_else(
            || match recipe.ranks {
                // Refused below, whatever else is asked for.
                0 => 0,
                ranks => u64::from(ranks).max(ranks_asked_for(args)),
            },
            |ranks| ranks.get().saturating_mul(mesh.ranks_of_a_sample() as u64),
        );
        recipe.ranks = u32::try_from(ranks).map_err(|_| {
            Failure::Usage(format!("{ranks} ranks are too many (--world_size, --tp, --pp, --sp)"))
        })?;
        let mut parameters = args.model.parameters();
        let model = match args.model.is_given() {
            true => {
                let (model, decoder) = args.model.read_all()?;
                let (config, _) = recipe.config().map_err(refusal)?;
                check_division(decoder.as_ref(), &config)?;
                let problems = recipe.problems();
                if !problems.is_empty() {
                    return Err(usage(TrainError::Recipe { path: path.into(), problems }));
                }
                model
            }
            false => {
                let config = ferrospeed_train::model_config(&recipe, path).map_err(usage)?;
                let shape = shape_of(&config)
                    .map_err(|error| Failure::Usage(format!("{}: {error}", path.display())))?;
                let (frozen, adapters) = frozen_and_adapters(&recipe, &config);
                parameters = ferrospeed_train::parameters(&recipe, &config);
                Model::Transformer(shape.with_adapters(frozen, adapters))
            }
        };
        if args.is_about_this_machine() {
            check_besides_data(&recipe, None)?;
        }
        let (config, warnings) = recipe.config().map_err(refusal)?;
        warnings.iter().for_each(|warning| print_note(warning));
        for why in ferrospeed_train::unusable_data(&recipe) {
            print_note(&format!("{why}; it is planned for all the same, and `train` would refuse it here"));
        }
        Ok(Asked {
            model,
            config,
            data_ranks: recipe.data_ranks(),
            stages: mesh.pipe,
            sliced: mesh.tensor.get() as u64,
            shared: Shared { experts: mesh.expert.get() as u64, sequence: mesh.sequence.get() as u64 },
            sequence_length: args.sequence_length.map_or(recipe.data.sequence, NonZeroU64::get),
            recomputes: args.checkpoint_activations || recipe.model.activation_checkpointing,
            mlp_chunk: recipe.model.mlp_chunk,
            parameters,
            spares_vectors: recipe.spares_vectors(),
        })
    }
}

/// Refuses slices and experts that a model cannot be divided into, as `train` does.
fn check_division(decoder: Option<&DecoderConfig>, config: &Config) -> Result<(), Failure> {
    let Some(decoder) = decoder else { return Ok(()) };
    let ranks = |section, key| usize::try_from(size_of(config, section, key)).unwrap_or(usize::MAX);
    let own_tokens =
        config.section("tensor_parallel").is_some_and(|section| section["sequence_parallel"] == true);
    let between = if own_tokens { Between::OwnTokens } else { Between::AllTokens };
    let told = |key: &str, checked: Result<(), ModelError>| {
        checked.map_err(|error| Failure::Usage(format!("{key}: {error}")))
    };
    let slices = decoder.check_slices(ranks("tensor_parallel", "autotp_size"), between);
    told("tensor_parallel.autotp_size (--tp)", slices)?;
    let experts = decoder.check_experts(ranks("expert_parallel", "autoep_size"));
    told("expert_parallel.autoep_size (--ep)", experts)
}

/// How many ranks the axes need that options of the command ask for.
fn ranks_asked_for(args: &PlanArgs) -> u64 {
    [args.pp, args.tp, args.sp, args.ep]
        .into_iter()
        .flatten()
        .fold(1, |ranks, size| ranks.saturating_mul(size.get()))
}

/// What options of the command say of the mesh, as assignments of the configuration's keys.
fn sizes(args: &PlanArgs) -> Vec<String> {
    let sizes = [
        ("pipeline.stages", args.pp),
        ("tensor_parallel.autotp_size", args.tp),
        ("expert_parallel.autoep_size", args.ep),
        ("sequence_parallel_size", args.sp),
    ];
    let schedule = args.pp_schedule.iter().map(|name| format!("pipeline.schedule={name}"));
    let sizes = sizes.iter().filter_map(|(key, size)| Some(format!("{key}={}", (*size)?)));
    sizes.chain(schedule).collect()
}

/// A number of ranks that the configuration asks for.
fn size_of(config: &Config, section: &str, key: &str) -> u64 {
    config.section(section).and_then(|section| section[key].as_u64()).unwrap_or(1).max(1)
}

/// Ranks that share each sequence, as the configuration asks.
fn sequence_ranks(config: &Config) -> u64 {
    config.section("sequence_parallel_size").and_then(Value::as_u64).unwrap_or(1).max(1)
}
