//! The training loop of one rank.

mod compare;
mod reference;
mod said;
mod steps;

pub use said::{Observing, ObservingCost, Progress, RunInfo, Summary};

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use ferrospeed_checkpoint::{CheckpointError, agree};
use ferrospeed_comm::{ReduceOp, World};
use ferrospeed_data::{Position, Sequences, Split, unheard};
use ferrospeed_engine::{
    Engine, EngineError, Options, Setup, activation_shelf, divides_by_measure, initialize_model,
    initialize_pipeline, machine,
};
use ferrospeed_models::Decoder;
use ferrospeed_models::adapter::AdapterFiles;
use ferrospeed_models::decoder::{CheckpointTimes, FeedForward};
use ferrospeed_nn::SequenceParallel;
use ferrospeed_nn::adapter::Start;
use ferrospeed_nn::tensor_parallel::Between;
use ferrospeed_observe::EvalRecord;
use ferrospeed_observe::monitor::TensorBoard;
use ferrospeed_observe::trace::Activity;
use ferrospeed_tensor::Device;
use ferrospeed_tensor::store::ParamSource;
use ferrospeed_text::Codec;
use ferrospeed_tune::plan::{Operands, Processor};
use serde_json::{Value, json};

use crate::adapter;
use crate::best::{Best, Standing};
use crate::checkpoint::{AdapterState, Checkpoints, Ending, StopRequests};
use crate::curriculum::Order;
use crate::data_state::DataState;
use crate::error::{Result, TrainError};
use crate::expected::Expected;
use crate::export::export;
use crate::folder::{FolderLock, RunFolder};
use crate::health::{Health, Trail};
use crate::layer_reduction::FirstWeights;
use crate::measure::measured;
use crate::model::{BuiltModel, slow_attention};
use crate::objective::Objective;
use crate::peak;
use crate::prepare::{Prepared, copy_companions, prepare};
use crate::recipe::Recipe;
use crate::records::{Records, go_back_in_curves};
use crate::resume::Resume;
use crate::routing;
use crate::told::Changes;
use reference::Reference;

/// One rank's part of a run.
pub struct Job<'a> {
    /// What to train.
    pub recipe: &'a Recipe,
    /// Where the recipe was read, for messages.
    pub path: &'a Path,
    /// The ranks.
    pub world: World,
    /// Where this rank computes.
    pub device: Device,
    /// Where files go.
    pub folder: &'a RunFolder,
    /// Whether whoever started this rank holds the folder's lock; else rank 0 takes it.
    pub folder_is_held: bool,
    /// Where it starts.
    pub resume: Resume,
    /// Whether the optimizer's states begin anew where it goes on from a checkpoint.
    pub fresh_optimizer: bool,
    /// What signals ask for.
    pub requests: StopRequests,
    /// When it is observed.
    pub observing: Observing,
    /// Whether only its speed is asked for: nothing is validated, sampled or exported.
    pub is_experiment: bool,
    /// What products of this host copy first, for the plan of its memory.
    pub operands: Operands,
}

struct Run<'a> {
    recipe: &'a Recipe,
    engine: Engine,
    model: Arc<Decoder>,
    /// Its Hugging Face `config.json`.
    model_config: Value,
    objective: Objective,
    /// How likely the model held answers before it was trained, where the objective asks for that.
    reference: Option<Reference>,
    sequences: Sequences,
    /// What rank 0 tells of them in checkpoints.
    data: Option<DataState>,
    codec: Option<Codec>,
    order: Order,
    position: Position,
    flops_per_token: f64,
    tokens: u64,
    health: Health,
    /// Its best validation so far.
    best: Best,
    /// With `activation_checkpointing.profile`.
    checkpoint_times: Option<Arc<CheckpointTimes>>,
    /// What checkpoints of a run with adapters say of them.
    adapter: Option<AdapterState>,
}

/// Runs a recipe on this rank; all ranks call it together.
pub fn run(job: &Job<'_>, progress: &mut dyn Progress) -> Result<Summary> {
    let start = Instant::now();
    let (recipe, folder) = (job.recipe, job.folder);
    let _lock = if job.folder_is_held { None } else { take_folder(job)? };
    let sizes = recipe.mesh();
    let mesh = sizes.over(&job.world)?;
    let Prepared { sequences, codec, bytes_per_token, admission, model, warnings: mut all_warnings } =
        prepare(recipe, job.path, folder, Some(&mesh), &mut unheard)?;
    let recipe = &recipe.with_steps_of(sequences.count(Split::Train)).map_err(|error| {
        TrainError::Recipe { path: job.path.to_path_buf(), problems: vec![error.to_string()] }
    })?;
    let BuiltModel { decoder: mut model, config: model_config, weights, adapter: first_adapter } = model;
    if sizes.sequence.get() > 1 {
        let sequence = SequenceParallel::new(mesh.sequence()?, recipe.sequence_method());
        model.set_sequence_parallel(Some(sequence));
    }
    let (config, warnings) = recipe.config().map_err(|error| TrainError::Recipe {
        path: job.path.to_path_buf(),
        problems: vec![error.to_string()],
    })?;
    all_warnings.extend(warnings);

    if recipe.model.activation_checkpointing {
        let slices = mesh.tensor()?;
        let alike = (recipe.between_slices() == Between::AllTokens).then_some(&slices);
        model.checkpoint_activations_on(activation_shelf(&config.activation_checkpointing, alike));
    }
    let checkpoint_times = config.activation_checkpointing.profile.then(|| model.time_checkpoints());
    let rank = job.world.rank();
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
    if let Some(profiler) = &mut setup.config.flops_profiler {
        // Among the lines of a terminal a report of a thousand lines would be lost.
        profiler.output_file.get_or_insert_with(|| folder.profile().display().to_string());
        // Steps are numbered from 0 there, and a run of one step has no step 1, the default.
        let last = recipe.steps - 1;
        if profiler.profile_step > last {
            all_warnings.push(format!(
                "flops_profiler.profile_step: there is no step {} (from 0) in a run of {}; its last is profiled",
                profiler.profile_step, recipe.steps
            ));
            profiler.profile_step = last;
        }
    }
    if let Some(wandb) = &mut setup.config.monitors.wandb {
        wandb.dir.get_or_insert_with(|| folder.wandb().display().to_string());
    }
    let source = weights.as_ref().map(|weights| weights as &dyn ParamSource);
    // What is trained beside the model's weights begins with what was saved of it, or with what changes nothing.
    let saved = first_adapter.as_ref().map(|adapter| adapter as &dyn ParamSource);
    let with_adapters = source.filter(|_| model.adapters().is_some());
    let beginning =
        with_adapters.map(|own| Start::new(own, saved, recipe.seed, model.parameters().as_slice()));
    let source = beginning.as_ref().map(|beginning| beginning as &dyn ParamSource).or(source);
    let spares_vectors = recipe.spares_vectors();
    let mut options = Options { source, spares_vectors, ..Default::default() };
    if sizes.ranks_of_a_sample() > 1 {
        options.spread_over(&mesh)?;
    }
    if sizes.expert.get() > 1 {
        options.spread_experts(&mesh, mesh.expert(sizes.expert.get(), recipe.expert_order())?)?;
    }
    if recipe.stages().get() > 1 && divides_by_measure(&setup.config) {
        options.measured = Some(measured(&setup, &model, &sequences, recipe)?);
    }
    let engine = match recipe.stages() {
        NonZeroUsize::MIN => initialize_model(&setup, model.parameters(), options)?,
        stages => initialize_pipeline(&setup, stages, &model, model.parameters(), options)?,
    };
    if !job.device.backend().is_host() {
        all_warnings.extend(slow_attention(model.config(), engine.config().precision.data_type()));
    }
    if model.attends_sparsely() {
        all_warnings.push(
            "sparse_attention: training and validation attend over the active blocks; samples, `generate` and `serve` attend over all tokens".to_owned(),
        );
    }
    if recipe.sample.is_some() && engine.is_pipeline() {
        all_warnings.push(
            "sample: no rank holds all of a model in stages, so it writes nothing; `ferrospeed generate` does, from the exported weights".to_owned(),
        );
    }

    let adapter_state = adapter::config(&model, recipe.model.path.as_deref())
        .map(|config| AdapterState { config, weights: weights_read.unwrap_or_default() });
    let health = Health::new(recipe.max_bad_steps, engine.config().precision, 0, Trail::default());
    let mut run = Run {
        order: Order::new(sequences.count(Split::Train), recipe.seed, admission, engine.config().data_seed),
        flops_per_token: flops_per_token(&model, recipe.data.sequence),
        recipe,
        objective: recipe.objective(),
        reference: None,
        engine,
        model: Arc::new(model),
        model_config,
        data: (rank == 0).then_some(data),
        sequences,
        codec,
        position: Position::default(),
        tokens: 0,
        health,
        best: Best::default(),
        checkpoint_times,
        adapter: adapter_state,
    };
    // A schedule that follows a metric follows the validation loss, where there is one as training goes on.
    let validates = recipe.eval.every > 0 && run.sequences.count(Split::Validation) > 0;
    run.engine.follow_training_loss(!validates);
    // Only its speed is asked of an experiment, whatever its answers are held against.
    if run.objective.has_reference() && !job.is_experiment {
        // The weights are those that the run starts from, whatever a checkpoint has made of them.
        let cache = recipe.data.cache.clone().unwrap_or_else(|| folder.data());
        let reference = run.find_reference(&cache, &made_from, progress)?;
        run.reference = Some(reference);
    }
    let mut checkpoints = Checkpoints::new(recipe, folder, job.fresh_optimizer);
    let resumed = run.resume(&checkpoints, &job.resume, folder, progress)?;
    let done = resumed.as_ref().map(|resumed| resumed.step);
    if done.is_some_and(|done| done >= recipe.steps) {
        run.health.finish_at_once().map_err(|divergence| divergence.verdict(&folder.checkpoints()))?;
    }
    // An attempt that ended before its first checkpoint is made again from the first step.
    let begins_again = resumed.is_none() && job.resume == Resume::Newest && folder.log().exists();
    let mut records = if rank == 0 {
        folder.create()?;
        copy_companions(recipe, run.codec.as_ref(), &folder.model())?;
        write_config(recipe, &run.engine, folder)?;
        let goes_on_here = resumed.as_ref().is_some_and(|resumed| folder.holds_checkpoint(&resumed.path));
        if goes_on_here || begins_again {
            let samples = run.engine.global_samples();
            go_back_in_curves(&run.engine.config().monitors, samples, &mut all_warnings);
        }
        Some(Records::open(folder, done, goes_on_here, &mut all_warnings)?)
    } else {
        None
    };
    run.engine.add_monitor(|| TensorBoard::create(folder.path(), "events"))?;
    if recipe.trace.is_some() {
        run.engine.start_trace()?;
    }
    if recipe.gradient_norms_every > 0 {
        run.engine.watch_gradients(recipe.gradient_norms_every)?;
    }
    let peak = peak::measure(&run.engine)?;
    all_warnings.extend(run.shortened_sample()?.filter(|_| !job.is_experiment));
    let info = run.info(all_warnings, resumed, peak.flops_per_s);
    if let Some(records) = &records {
        let processor = match run.engine.device().backend().is_host() {
            true => Processor::Cpu,
            false => Processor::Gpu,
        };
        let expected = Expected::of(recipe, &run.model_config, processor, job.operands);
        let per_rank = peak::of_a_rank(peak, info.ranks);
        let limits = expected.as_ref().map(|expected| {
            expected.tokens_per_s((info.batch * info.sequence) as f64, per_rank, wire_bytes_per_s)
        });
        let planned = expected.map(|expected| expected.memory_bytes());
        records.started(recipe, &info, &json!({ "plan": planned, "limits": limits }))?;
        progress.started(&info);
    }
    let mut summary = Summary {
        steps: done.unwrap_or(0),
        new_steps: 0,
        loss: None,
        validation_loss: None,
        bytes_per_token,
        sample: None,
        ending: Ending::Finished,
        checkpoint: None,
        seconds: 0.0,
        observing_seconds: 0.0,
        observing_cost: None,
        communication: None,
    };
    let [finish, leave] = job.requests.asked();
    let mut said = [rank == 0 && folder.is_being_replaced(), finish, leave].map(|so| f32::from(u8::from(so)));
    run.engine.world().group().all_reduce(&mut said, ReduceOp::Sum)?;
    let [mut replaces, finish, leave] = said.map(|ranks| ranks > 0.0);
    // Whoever stops a run before its first step wants none; and at that step, who stops one that replaces another wants the other.
    if let Some(ending) = Ending::asked([finish, leave]).filter(|_| summary.steps < recipe.steps) {
        if rank == 0 {
            folder.note_ending(ending, summary.steps);
        }
        return Err(TrainError::StoppedAtOnce(ending));
    }
    if recipe.eval.at_start && summary.steps == 0 && !job.is_experiment {
        let found = run.validate(0, records.as_mut(), progress, &mut summary)?;
        // What the run starts from may be the best that it ever has.
        found.map_or(Ok(Standing::Best), |record| run.compare(&record, folder, progress))?;
    }
    let mut times_ms = [Vec::new(), Vec::new()];
    let mut changes = Changes::default();
    let mut unsaved = None;
    for step in summary.steps + 1..=recipe.steps {
        let step_begin = Instant::now();
        let observed = job.observing.is_on(step);
        run.engine.set_monitoring(observed);
        let (mut record, asked) = run
            .step(step, &job.requests)
            .map_err(|error| run.health.of_failure(error, &folder.checkpoints()))?;
        if let (true, Some(ending)) = (std::mem::take(&mut replaces) && step < recipe.steps, asked) {
            return Err(TrainError::StoppedAtOnce(ending));
        }
        if observed {
            record.routing = routing::over_ranks(&run.model, &run.engine, sizes.tensor.get())?;
            routing::monitor(&mut run.engine, &record.routing);
            for (name, value) in &record.measures {
                run.engine.monitor(&format!("Train/Samples/{name}"), *value);
            }
            record.rank_memory_bytes = changes.of(std::mem::take(&mut record.rank_memory_bytes));
        }
        (summary.steps, summary.new_steps) = (step, summary.new_steps + 1);
        summary.loss = record.measured_loss().or(summary.loss);
        let verdict = run.health.judge(&record);
        if let Some(records) = records.as_mut().filter(|_| observed) {
            let begin = Instant::now();
            records.step(&record);
            progress.step(&record);
            summary.observing_seconds += begin.elapsed().as_secs_f64();
            run.engine.trace(Activity::Files, "log", begin);
        }
        // Every rank sees the same losses, so all of them leave here.
        verdict.map_err(|divergence| divergence.verdict(&folder.checkpoints()))?;
        times_ms[usize::from(observed)].push(step_begin.elapsed().as_secs_f64() * 1e3);
        summary.ending = asked.filter(|_| step < recipe.steps).unwrap_or(Ending::Finished);
        let mut last = step == recipe.steps || asked.is_some();
        let due = recipe.eval.every > 0 && step.is_multiple_of(recipe.eval.every);
        let at_end = last && summary.ending != Ending::Left && !job.is_experiment;
        if (due || at_end)
            && let Some(record) = run.validate(step, records.as_mut(), progress, &mut summary)?
        {
            if due {
                run.engine.observe_metric(f64::from(record.loss));
            }
            last |= run.compare(&record, folder, progress)? == Standing::Enough;
        }
        let shows = recipe
            .sample
            .as_ref()
            .is_some_and(|sample| sample.every > 0 && step.is_multiple_of(sample.every));
        if shows && !job.is_experiment {
            let samples = run.samples()?;
            if let (Some(records), Some(samples)) = (&mut records, samples) {
                records.samples(step, &samples);
            }
        }
        checkpoints.look(&mut run.engine, progress)?;
        let stopped = summary.ending != Ending::Finished;
        let save_now = stopped || (last && checkpoints.is_due_at_end());
        if let Some(records) = records.as_mut().filter(|_| save_now || checkpoints.is_due(step)) {
            records.sync();
        }
        let (position, state) = (run.position.samples, run.state());
        let saving = Instant::now();
        if save_now {
            match checkpoints.save_now(&mut run.engine, position, &state, progress) {
                Ok(saved) => summary.checkpoint = Some(saved),
                // The weights are still here: they are exported before anybody is told.
                Err(TrainError::Engine(EngineError::Checkpoint(error))) if summary.ending != Ending::Left => {
                    unsaved = Some(format!("its last checkpoint was not saved: {error}"));
                }
                Err(error) => return Err(error),
            }
        } else if checkpoints.is_due(step) {
            checkpoints.save(&mut run.engine, position, &state, progress)?;
        }
        if save_now || checkpoints.is_due(step) {
            run.engine.trace(Activity::Files, "checkpoint", saving);
        }
        if last {
            break;
        }
    }
    checkpoints.wait(&mut run.engine, progress)?;
    run.health.finish().map_err(|divergence| divergence.verdict(&folder.checkpoints()))?;
    if run.engine.config().comms_logger.is_some() {
        summary.communication = Some(run.engine.communication_summary(true)?);
    }
    if let (Some(path), Some(document)) = (&recipe.trace, run.engine.finish_trace()?) {
        // The weights are still to be exported.
        let written = ferrospeed_files::write(path, document).map_err(TrainError::io(path));
        unsaved = unsaved.or(written.err().map(|error| format!("its trace is missing: {error}")));
    }
    if summary.ending != Ending::Left && !job.is_experiment {
        match run.export(&folder.model()) {
            // All ranks have failed together.
            Err(TrainError::Checkpoint(error)) if !matches!(error, CheckpointError::Comm(_)) => {
                let kept = summary.checkpoint.as_ref().map_or(String::new(), |path| {
                    format!(
                        "; {} has them, and `ferrospeed checkpoint export-hf` writes them elsewhere",
                        path.display()
                    )
                });
                let missing = format!("its weights are not in {}: {error}{kept}", folder.model().display());
                also(&mut unsaved, missing);
            }
            exported => exported?,
        }
        summary.sample = run.samples()?.map(|samples| samples.join("\n\n"));
        if let (0, Some(sample)) = (rank, &summary.sample) {
            let written =
                ferrospeed_files::write(folder.sample(), sample).map_err(TrainError::io(folder.sample()));
            unsaved = unsaved.or(written.err().map(|error| format!("its sample is missing: {error}")));
        }
    }
    if job.observing == Observing::Alternating {
        let [without_ms, with_ms] = times_ms;
        summary.observing_cost = ObservingCost::of(with_ms, without_ms);
    }
    summary.seconds = start.elapsed().as_secs_f64();
    summary.observing_seconds += run.engine.time_monitoring().as_secs_f64();
    if let Some(records) = records {
        // What the machine can do is measured once, and is no share of what each step costs.
        match (run.engine.model_profile(), &run.engine.config().flops_profiler) {
            (Some(profile), _) => {
                let peak = machine::measure_peak(run.engine.device(), run.engine.store().dtype())?;
                records.roofline(&profile.roofline(peak));
            }
            (None, Some(profiler)) if summary.new_steps > 0 => progress.warning(&format!(
                "flops_profiler: step {} (from 0) is not among those of this run, so nothing was profiled",
                profiler.profile_step
            )),
            (None, _) => {}
        }
        let begin = Instant::now();
        let broken = records.broken.clone().map(|why| format!("its log is not complete: {why}"));
        let finished = records.finish(&recipe.name, &info, &summary);
        unsaved =
            unsaved.or(broken).or(finished.err().map(|error| format!("its report is missing: {error}")));
        let curves = run.engine.finish_monitors();
        if !curves.is_empty() {
            also(&mut unsaved, format!("its curves are not complete: {}", curves.join("; ")));
        }
        summary.observing_seconds += begin.elapsed().as_secs_f64();
    }
    match unsaved {
        Some(what) => Err(TrainError::Unsaved(what)),
        None => {
            if rank == 0 {
                folder.note_ending(summary.ending, summary.steps);
            }
            Ok(summary)
        }
    }
}

impl Run<'_> {
    /// Measures what is only measured, if there is such, and writes it down.
    fn validate(
        &mut self,
        step: u64,
        records: Option<&mut Records>,
        progress: &mut dyn Progress,
        summary: &mut Summary,
    ) -> Result<Option<EvalRecord>> {
        if self.sequences.count(Split::Validation) == 0 {
            return Ok(None);
        }
        let Some(record) = self.evaluate(step)? else { return Ok(None) };
        summary.validation_loss = Some(record.loss);
        if let Some(records) = records {
            let begin = Instant::now();
            records.eval(&record);
            self.engine.monitor("Validation/Samples/loss", record.loss.into());
            for (name, value) in &record.measures {
                self.engine.monitor(&format!("Validation/Samples/{name}"), *value);
            }
            progress.eval(&record);
            summary.observing_seconds += begin.elapsed().as_secs_f64();
        }
        Ok(Some(record))
    }

    /// Writes what was trained as others read it. All ranks call it together.
    fn export(&self, folder: &Path) -> Result<()> {
        match (&self.recipe.model.path, self.model.adapters()) {
            (Some(base), Some(_)) => adapter::export(&self.engine, &self.model, base, folder),
            _ => export(&self.engine, &self.model, &self.model_config, folder),
        }
    }

    /// Holds a validation against those before, and keeps the weights where none was better. All ranks have the same record.
    fn compare(
        &mut self,
        record: &EvalRecord,
        folder: &RunFolder,
        progress: &mut dyn Progress,
    ) -> Result<Standing> {
        let recipe = &self.recipe.eval;
        let (standing, leads) = (self.best.judge(recipe, record), self.engine.world().rank() == 0);
        if standing == Standing::Best && recipe.keep_best {
            if leads {
                copy_companions(self.recipe, self.codec.as_ref(), &folder.best_model())?;
            }
            match self.export(&folder.best_model()) {
                // All ranks have failed together, and the one before is whole.
                Err(TrainError::Checkpoint(error)) if !matches!(error, CheckpointError::Comm(_)) => {
                    if leads {
                        progress.warning(&format!("the best weights are not kept: {error}"));
                    }
                }
                exported => exported?,
            }
        }
        if let (Standing::Enough, Some((step, value)), true) = (standing, self.best.found, leads) {
            let (count, measure) =
                (recipe.patience.unwrap_or(0), recipe.measure.as_deref().unwrap_or("loss"));
            progress.warning(&format!(
                "eval.patience: none of the last {count} validations was better than that of step {step} ({measure} {value:.4}): the run ends here"
            ));
        }
        Ok(standing)
    }
}

/// Adds to what a run could not write.
fn also(unsaved: &mut Option<String>, what: String) {
    *unsaved = Some(unsaved.take().map_or(what.clone(), |first| format!("{first}; {what}")));
}

/// Rank 0 takes the folder where nobody did before; all ranks hear whether it could.
fn take_folder(job: &Job<'_>) -> Result<Option<FolderLock>> {
    let leads = job.world.rank() == 0;
    let taken = if !leads {
        Ok(None)
    } else {
        let unused = if job.resume == Resume::No { job.folder.check_unused() } else { Ok(()) };
        unused.and_then(|()| job.folder.lock().map(Some))
    };
    let said = taken.as_ref().map(|_| ()).map_err(|error| CheckpointError::Request(error.to_string()));
    match (agree(&job.world.group(), said), taken) {
        (Ok(_), Ok(lock)) => Ok(lock),
        (_, Err(error)) => Err(error),
        (Err(error), _) => Err(error.into()),
    }
}

/// The resolved recipe and configuration, which reproduce the run.
fn write_config(recipe: &Recipe, engine: &Engine, folder: &RunFolder) -> Result<()> {
    let write = |name: &str, text: String| {
        let path = folder.config().join(name);
        ferrospeed_files::write(&path, text).map_err(TrainError::io(&path))
    };
    let recipe = recipe.to_toml().unwrap_or_else(|error| format!("# cannot be written as TOML: {error}\n"));
    write("recipe.toml", recipe)?;
    write("ds_config.json", format!("{:#}\n", engine.config().to_json()))
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
