//! From a recipe whose data and model are there to an engine that trains it.

use std::num::NonZeroUsize;
use std::sync::Arc;

use ferrospeed_comm::Mesh;
use ferrospeed_config::Config;
use ferrospeed_data::{Position, Sequences, Split};
use ferrospeed_engine::{
    Engine, Options, Setup, activation_shelf, divides_by_measure, initialize_model, initialize_pipeline,
    machine,
};
use ferrospeed_models::Decoder;
use ferrospeed_models::adapter::AdapterFiles;
use ferrospeed_models::decoder::{CheckpointTimes, FeedForward};
use ferrospeed_nn::SequenceParallel;
use ferrospeed_nn::adapter::Start;
use ferrospeed_nn::tensor_parallel::Between;
use ferrospeed_tensor::store::ParamSource;
use serde_json::{Value, json};

use super::{Job, Run};
use crate::adapter;
use crate::best::Best;
use crate::checkpoint::AdapterState;
use crate::curriculum::Order;
use crate::data_state::DataState;
use crate::error::{Result, TrainError};
use crate::folder::RunFolder;
use crate::health::{Health, Trail};
use crate::layer_reduction::FirstWeights;
use crate::measure::measured;
use crate::model::{BuiltModel, slow_attention};
use crate::prepare::Prepared;
use crate::recipe::Recipe;

/// A run that is built, and what was found out on the way.
pub(super) struct Built<'a> {
    pub(super) run: Run<'a>,
    pub(super) warnings: Vec<String>,
    pub(super) bytes_per_token: Option<f64>,
    /// What a rank sends in a second, where it has peers.
    pub(super) wire_bytes_per_s: Option<f64>,
    /// What all that a run starts from is made of.
    pub(super) made_from: Value,
}

/// Builds it. All ranks call it together.
pub(super) fn build<'a>(
    job: &Job<'_>,
    recipe: &'a Recipe,
    mesh: &Mesh,
    prepared: Prepared,
) -> Result<Built<'a>> {
    let Prepared { sequences, codec, bytes_per_token, admission, model, mut warnings } = prepared;
    let BuiltModel { decoder: mut model, config: model_config, weights, adapter: first_adapter } = model;
    let (config, more) = recipe.config().map_err(|error| TrainError::Recipe {
        path: job.path.to_path_buf(),
        problems: vec![error.to_string()],
    })?;
    warnings.extend(more);
    let checkpoint_times = fit(&mut model, recipe, mesh, &config)?;
    // Before anything is counted or traced.
    let wire_bytes_per_s = machine::sent_bytes_per_s(&job.world)?;
    let data = DataState::of(recipe, &sequences)?;
    let weights_read = weights.as_ref().map(FirstWeights::fingerprint).transpose()?;
    let mut setup = Setup::new(config, job.world.clone(), job.device.clone());
    setup.seed = recipe.seed;
    setup.read = json!({
        "model.config": model_config,
        "model.path": weights_read,
        "adapter.path": first_adapter.as_ref().map(AdapterFiles::fingerprint).transpose()?,
        "data": data,
    });
    let made_from = json!({
        "read": setup.read, "adapter": recipe.adapter, "seed": recipe.seed, "dtype": format!("{:?}", setup.config.precision.data_type()),
        "rows": [sequences.count(Split::Train), sequences.count(Split::Validation)],
    });
    // The recipe says after how many bad steps a run ends.
    setup.max_skipped_in_a_row = u64::MAX;
    warnings.extend(write_into(job.folder, &mut setup.config, recipe));
    let engine = engine(&setup, recipe, mesh, &model, &sequences, weights.as_ref(), first_adapter.as_ref())?;
    warnings.extend(warnings_of(&engine, &model, recipe));

    let adapter_state = adapter::config(&model, recipe.model.path.as_deref())
        .map(|config| AdapterState { config, weights: weights_read.unwrap_or_default() });
    let mut run = Run {
        order: Order::new(sequences.count(Split::Train), recipe.seed, admission, engine.config().data_seed),
        flops_per_token: flops_per_token(&model, recipe.data.sequence),
        recipe,
        objective: recipe.objective(),
        reference: None,
        health: Health::new(recipe.max_bad_steps, engine.config().precision, 0, Trail::default()),
        engine,
        model: Arc::new(model),
        model_config,
        data: (job.world.rank() == 0).then_some(data),
        sequences,
        codec,
        position: Position::default(),
        tokens: 0,
        best: Best::default(),
        owes_validation: false,
        checkpoint_times,
        adapter: adapter_state,
    };
    // A schedule that follows a metric follows the validation loss, where there is one as training goes on.
    let validates = recipe.eval.every > 0 && run.sequences.count(Split::Validation) > 0;
    run.engine.follow_training_loss(!validates);
    Ok(Built { run, warnings, bytes_per_token, wire_bytes_per_s, made_from })
}

/// Fits a model to the ranks that share sequences, and to what layers keep for backward.
fn fit(
    model: &mut Decoder,
    recipe: &Recipe,
    mesh: &Mesh,
    config: &Config,
) -> Result<Option<Arc<CheckpointTimes>>> {
    if recipe.mesh().sequence.get() > 1 {
        let sequence = SequenceParallel::new(mesh.sequence()?, recipe.sequence_method());
        model.set_sequence_parallel(Some(sequence));
    }
    if recipe.model.activation_checkpointing {
        let slices = mesh.tensor()?;
        let alike = (recipe.between_slices() == Between::AllTokens).then_some(&slices);
        model.checkpoint_activations_on(activation_shelf(&config.activation_checkpointing, alike));
    }
    Ok(config.activation_checkpointing.profile.then(|| model.time_checkpoints()))
}

/// Lets what a configuration has written go to the run's folder. Returns what had to be changed.
fn write_into(folder: &RunFolder, config: &mut Config, recipe: &Recipe) -> Option<String> {
    if let Some(wandb) = &mut config.monitors.wandb {
        wandb.dir.get_or_insert_with(|| folder.wandb().display().to_string());
    }
    let profiler = config.flops_profiler.as_mut()?;
    // Among the lines of a terminal a report of a thousand lines would be lost.
    profiler.output_file.get_or_insert_with(|| folder.profile().display().to_string());
    // Steps are numbered from 0 there, and a run of one step has no step 1, the default.
    let (asked, last) = (profiler.profile_step, recipe.steps - 1);
    profiler.profile_step = asked.min(last);
    (asked > last).then(|| {
        format!(
            "flops_profiler.profile_step: there is no step {asked} (from 0) in a run of {}; its last is profiled",
            recipe.steps
        )
    })
}

fn engine(
    setup: &Setup,
    recipe: &Recipe,
    mesh: &Mesh,
    model: &Decoder,
    sequences: &Sequences,
    weights: Option<&FirstWeights>,
    first_adapter: Option<&AdapterFiles>,
) -> Result<Engine> {
    let sizes = recipe.mesh();
    let source = weights.map(|weights| weights as &dyn ParamSource);
    // What is trained beside the model's weights begins with what was saved of it, or with what changes nothing.
    let saved = first_adapter.map(|adapter| adapter as &dyn ParamSource);
    let with_adapters = source.filter(|_| model.adapters().is_some());
    let beginning =
        with_adapters.map(|own| Start::new(own, saved, recipe.seed, model.parameters().as_slice()));
    let source = beginning.as_ref().map(|beginning| beginning as &dyn ParamSource).or(source);
    let mut options = Options { source, spares_vectors: recipe.spares_vectors(), ..Default::default() };
    if sizes.ranks_of_a_sample() > 1 {
        options.spread_over(mesh)?;
    }
    if sizes.expert.get() > 1 {
        options.spread_experts(mesh, mesh.expert(sizes.expert.get(), recipe.expert_order())?)?;
    }
    if recipe.stages().get() > 1 && divides_by_measure(&setup.config) {
        options.measured = Some(measured(setup, model, sequences, recipe)?);
    }
    Ok(match recipe.stages() {
        NonZeroUsize::MIN => initialize_model(setup, model.parameters(), options)?,
        stages => initialize_pipeline(setup, stages, model, model.parameters(), options)?,
    })
}

/// What is allowed and most likely not meant.
fn warnings_of(engine: &Engine, model: &Decoder, recipe: &Recipe) -> Vec<String> {
    let mut warnings = Vec::new();
    if !engine.device().backend().is_host() {
        warnings.extend(slow_attention(model.config(), engine.config().precision.data_type()));
    }
    if model.attends_sparsely() {
        warnings.push(
            "sparse_attention: training and validation attend over the active blocks; samples, `generate` and `serve` attend over all tokens".to_owned(),
        );
    }
    if recipe.sample.is_some() && engine.is_pipeline() {
        warnings.push(
            "sample: no rank holds all of a model in stages, so it writes nothing; `ferrospeed generate` does, from the exported weights".to_owned(),
        );
    }
    warnings
}

/// Forward and backward: six operations per weight and token, and the attention scores (Kaplan et al., 2020).
fn flops_per_token(model: &Decoder, sequence: u64) -> f64 {
    let config = model.config();
    let embedding = (config.vocab * config.embedding_width) as f64;
    // The table is looked up, not multiplied, unless it is also the head.
    let multiplied = model.parameters().whole_numel() as f64 - if config.tied { 0.0 } else { embedding };
    // Of a mixture, the experts that a token does not go to do nothing for it.
    let idle = match &config.feed_forward {
        FeedForward::Mixture(mixture) => {
            let expert = 3 * config.width * mixture.inner_width;
            (config.layers * mixture.experts.saturating_sub(mixture.chosen) * expert) as f64
        }
        FeedForward::Plain { .. } | FeedForward::Gated { .. } | FeedForward::GatedPacked { .. } => 0.0,
    };
    let multiplied = multiplied - idle;
    // A weight that is not trained gets no gradient, which is one of the three products.
    let frozen =
        model.parameters().as_slice().iter().filter(|param| !param.is_trainable() && !param.is_table());
    let frozen = frozen.map(|param| param.whole_shape().numel() as f64).sum::<f64>().min(multiplied);
    let seen = sequence as f64 * model.attended_share(usize::try_from(sequence).unwrap_or(usize::MAX));
    6.0 * multiplied - 2.0 * frozen + 12.0 * (config.layers * config.heads * config.head_dim) as f64 * seen
}
