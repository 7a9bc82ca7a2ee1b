//! The training loop of one rank.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrospeed_checkpoint::{CheckpointError, agree};
use ferrospeed_comm::{ASKED_FOR, ReduceOp, World};
use ferrospeed_data::{Codec, Position, Sampler, Sequences, Split};
use ferrospeed_engine::{
    Engine, EngineError, Options, Setup, StepReport, activation_shelf, divides_by_measure, initialize_model,
    initialize_pipeline, machine,
};
use ferrospeed_models::decoder::{CheckpointTimes, FeedForward};
use ferrospeed_models::generate::{GenerateOptions, Sampling, generate};
use ferrospeed_models::{Decoder, Tokens};
use ferrospeed_nn::SequenceParallel;
use ferrospeed_nn::tensor_parallel::Between;
use ferrospeed_observe::monitor::TensorBoard;
use ferrospeed_observe::trace::Activity;
use ferrospeed_observe::{EvalRecord, StepRecord};
use ferrospeed_tensor::store::ParamSource;
use ferrospeed_tensor::{Device, Tensor};
use ferrospeed_tune::plan::Processor;
use serde_json::{Value, json};

use crate::checkpoint::{Checkpoints, Ending, Resume, Resumed, RunState, StopRequests};
use crate::error::{Result, TrainError};
use crate::expected::Expected;
use crate::export::export;
use crate::folder::{FolderLock, RunFolder};
use crate::health::Health;
use crate::measure::measured;
use crate::model::BuiltModel;
use crate::peak;
use crate::prepare::{Prepared, copy_companions, prepare};
use crate::recipe::Recipe;
use crate::records::Records;
use crate::routing;
use crate::told::{self, Changes, Own};

/// What is known before the first step.
#[derive(Debug, Clone, PartialEq)]
pub struct RunInfo {
    /// Parameters of the model.
    pub parameters: u64,
    /// Ranks.
    pub ranks: usize,
    /// Steps to take.
    pub steps: u64,
    /// ZeRO stage.
    pub stage: u8,
    /// The type of weights.
    pub dtype: String,
    /// Samples per step over all ranks.
    pub batch: u64,
    /// Tokens per sample.
    pub sequence: u64,
    /// Sequences to train on.
    pub train_sequences: u64,
    /// Sequences to measure on.
    pub validation_sequences: u64,
    /// What the configuration warned about.
    pub warnings: Vec<String>,
    /// Floating-point operations per second that all ranks together reach in a matrix product, measured at the start.
    pub peak_flops_per_s: f64,
    /// Which stage has which layers, where the model is in stages.
    pub division: Option<String>,
    /// The checkpoint that it goes on from.
    pub resumed: Option<Resumed>,
}

impl RunInfo {
    /// By name, for people.
    pub(crate) fn facts(&self) -> Vec<(String, String)> {
        let facts = [
            ("parameters", self.parameters.to_string()),
            ("type", self.dtype.clone()),
            ("ranks", self.ranks.to_string()),
            ("ZeRO stage", self.stage.to_string()),
            ("sequences per step", self.batch.to_string()),
            ("tokens per sequence", self.sequence.to_string()),
            ("sequences to train on", self.train_sequences.to_string()),
            ("sequences to validate on", self.validation_sequences.to_string()),
            ("measured peak", format!("{:.1} GFLOP/s", self.peak_flops_per_s / 1e9)),
        ];
        let division = self.division.iter().map(|division| ("stages", division.clone()));
        facts.into_iter().chain(division).map(|(name, value)| (name.to_owned(), value)).collect()
    }
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// Steps taken.
    pub steps: u64,
    /// The last step's loss; none where all steps had been taken before.
    pub loss: Option<f32>,
    /// The last validation's loss.
    pub validation_loss: Option<f32>,
    /// How much text a token stands for, where a tokenizer made tokens of plain text: losses per byte can be compared
    /// between tokenizers.
    pub bytes_per_token: Option<f64>,
    /// The text the model wrote.
    pub sample: Option<String>,
    /// Whether it came to its end.
    pub ending: Ending,
    /// The checkpoint that was written last, where the run waited for it.
    pub checkpoint: Option<PathBuf>,
    /// Wall-clock seconds.
    pub seconds: f64,
    /// Of these, seconds spent on logs, monitors, progress and report.
    pub observing_seconds: f64,
    /// With [`Observing::Alternating`].
    pub observing_cost: Option<ObservingCost>,
    /// With `comms_logger`: what ranks sent each other, in a table.
    pub communication: Option<String>,
}

/// Who is told what happens. Only rank 0 tells.
pub trait Progress {
    /// Before the first step.
    fn started(&mut self, _info: &RunInfo) {}
    /// After each step.
    fn step(&mut self, _record: &StepRecord) {}
    /// After each validation.
    fn eval(&mut self, _record: &EvalRecord) {}
    /// After each checkpoint.
    fn saved(&mut self, _path: &Path) {}
    /// Something went wrong that does not end the run.
    fn warning(&mut self, _text: &str) {}
}

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
    /// What signals ask for.
    pub requests: StopRequests,
    /// When it is observed.
    pub observing: Observing,
    /// Whether only its speed is asked for: nothing is validated, sampled or exported.
    pub is_experiment: bool,
    /// Whether products of this host copy an operand into tiles first, for the plan of its memory.
    pub in_tiles: bool,
}

/// When steps are logged, monitored and shown.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Observing {
    /// In every step.
    #[default]
    Always,
    /// In every other block of ten steps, to measure what it costs.
    Alternating,
}

impl Observing {
    fn is_on(self, step: u64) -> bool {
        self == Observing::Always || ((step - 1) / 10).is_multiple_of(2)
    }
}

/// What observing costs: median milliseconds of a step with and without, and of how many.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ObservingCost {
    /// With.
    pub with_ms: f64,
    /// Without.
    pub without_ms: f64,
    /// How many steps there were of the rarer kind.
    pub steps: usize,
}

impl ObservingCost {
    /// `None` where there are not both.
    fn of(mut with_ms: Vec<f64>, mut without_ms: Vec<f64>) -> Option<ObservingCost> {
        let steps = with_ms.len().min(without_ms.len());
        let median = |values: &mut Vec<f64>| {
            values.sort_by(f64::total_cmp);
            values.get(values.len() / 2).copied()
        };
        Some(ObservingCost { with_ms: median(&mut with_ms)?, without_ms: median(&mut without_ms)?, steps })
    }
}

struct Run<'a> {
    recipe: &'a Recipe,
    engine: Engine,
    model: Decoder,
    /// Its Hugging Face `config.json`.
    model_config: Value,
    sequences: Sequences,
    codec: Option<Codec>,
    sampler: Sampler,
    position: Position,
    flops_per_token: f64,
    tokens: u64,
    /// With `activation_checkpointing.profile`.
    checkpoint_times: Option<Arc<CheckpointTimes>>,
}

/// Runs a recipe on this rank; all ranks call it together.
pub fn run(job: &Job<'_>, progress: &mut dyn Progress) -> Result<Summary> {
    let start = Instant::now();
    let (recipe, folder) = (job.recipe, job.folder);
    let _lock = if job.folder_is_held { None } else { take_folder(job)? };
    let mesh = recipe.mesh().over(&job.world)?;
    let Prepared { sequences, codec, bytes_per_token, model, warnings: mut all_warnings } =
        prepare(recipe, job.path, folder, Some(&mesh), &mut |_| {})?;
    let BuiltModel { decoder: mut model, config: model_config, weights } = model;
    if recipe.mesh().sequence.get() > 1 {
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
    let mut setup = Setup::new(config, job.world.clone(), job.device.clone());
    setup.seed = recipe.seed;
    if let Some(profiler) = &mut setup.config.flops_profiler {
        // Among the lines of a terminal a report of a thousand lines would be lost.
        profiler.output_file.get_or_insert_with(|| folder.profile().display().to_string());
    }
    if let Some(wandb) = &mut setup.config.monitors.wandb {
        wandb.dir.get_or_insert_with(|| folder.wandb().display().to_string());
    }
    let source = weights.as_ref().map(|weights| weights as &dyn ParamSource);
    let mut options = Options { source, ..Default::default() };
    if recipe.mesh().ranks_of_a_sample() > 1 {
        options.spread_over(&mesh)?;
    }
    if recipe.mesh().expert.get() > 1 {
        options.spread_experts(&mesh, mesh.expert(recipe.mesh().expert.get(), recipe.expert_order())?)?;
    }
    if recipe.stages().get() > 1 && divides_by_measure(&setup.config) {
        options.measured = Some(measured(&setup, &model, &sequences, recipe)?);
    }
    let engine = match recipe.stages() {
        NonZeroUsize::MIN => initialize_model(&setup, model.parameters(), options)?,
        stages => initialize_pipeline(&setup, stages, &model, model.parameters(), options)?,
    };
    if recipe.sample.is_some() && recipe.mesh().divides_model() {
        all_warnings.push(
            "sample: no rank holds all of a model in stages or slices, or with experts on several ranks, so it writes nothing; `ferrospeed generate` does, from the exported weights".to_owned(),
        );
    }

    if let Some(profiler) = &engine.config().flops_profiler {
        if recipe.stages().get() > 1 {
            all_warnings.push(
                "flops_profiler: a model in stages is not profiled, for its micro-batches run into each other; profile it with one stage, or look at --trace".to_owned(),
            );
        } else if profiler.profile_step > recipe.steps {
            all_warnings.push(format!(
                "flops_profiler.profile_step: step {} is never taken, the run has {}; nothing is profiled",
                profiler.profile_step, recipe.steps
            ));
        }
    }

    let mut run = Run {
        sampler: Sampler::new(sequences.count(Split::Train), recipe.seed),
        flops_per_token: flops_per_token(&model, recipe.data.sequence),
        recipe,
        engine,
        model,
        model_config,
        sequences,
        codec,
        position: Position::default(),
        tokens: 0,
        checkpoint_times,
    };
    // A schedule that follows a metric follows the validation loss, where there is one as training goes on.
    let validates = recipe.eval.every > 0 && run.sequences.count(Split::Validation) > 0;
    run.engine.follow_training_loss(!validates);
    let mut checkpoints = Checkpoints::new(recipe, folder);
    let resumed = run.resume(&checkpoints, &job.resume, folder, progress)?;
    let done = resumed.as_ref().map(|resumed| resumed.step);
    let mut records = if rank == 0 {
        folder.create()?;
        copy_companions(recipe, run.codec.as_ref(), &folder.model())?;
        write_config(recipe, &run.engine, folder)?;
        Some(Records::open(folder, done)?)
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
    let info = run.info(all_warnings, resumed, peak.flops_per_s);
    if let Some(records) = &records {
        let processor = match run.engine.device().backend().is_host() {
            true => Processor::Cpu,
            false => Processor::Gpu,
        };
        let expected = Expected::of(recipe, &run.model_config, processor, job.in_tiles);
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
    // Whoever stops a run that replaces another at once wants the other.
    let mut replaces = [f32::from(u8::from(rank == 0 && folder.is_being_replaced()))];
    run.engine.world().group().all_reduce(&mut replaces, ReduceOp::Sum)?;
    let mut replaces = replaces[0] > 0.0;
    let mut times_ms = [Vec::new(), Vec::new()];
    let mut changes = Changes::default();
    let mut health = Health::new(recipe.max_bad_steps);
    let mut unsaved = None;
    for step in summary.steps + 1..=recipe.steps {
        let step_begin = Instant::now();
        let observed = job.observing.is_on(step);
        run.engine.set_monitoring(observed);
        let (mut record, asked) = run.step(step, &job.requests)?;
        if std::mem::take(&mut replaces) && asked.is_some() && step < recipe.steps {
            return Err(TrainError::StoppedAtOnce);
        }
        if observed {
            record.routing = routing::over_ranks(&run.model, &run.engine, recipe.mesh().tensor.get())?;
            routing::monitor(&mut run.engine, &record.routing);
            record.rank_memory_bytes = changes.of(std::mem::take(&mut record.rank_memory_bytes));
        }
        (summary.steps, summary.loss) = (step, Some(record.loss));
        let verdict = health.judge(&record);
        if let Some(records) = records.as_mut().filter(|_| observed) {
            let begin = Instant::now();
            records.step(&record);
            progress.step(&record);
            summary.observing_seconds += begin.elapsed().as_secs_f64();
            run.engine.trace(Activity::Files, "log", begin);
        }
        // Every rank sees the same losses, so all of them leave here.
        verdict?;
        times_ms[usize::from(observed)].push(step_begin.elapsed().as_secs_f64() * 1e3);
        summary.ending = asked.filter(|_| step < recipe.steps).unwrap_or(Ending::Finished);
        let last = step == recipe.steps || asked.is_some();
        let due = recipe.eval.every > 0 && step.is_multiple_of(recipe.eval.every);
        let at_end = last && summary.ending != Ending::Left && !job.is_experiment;
        if (due || at_end) && run.sequences.count(Split::Validation) > 0 {
            let record = run.evaluate(step)?;
            summary.validation_loss = Some(record.loss);
            if due {
                run.engine.observe_metric(f64::from(record.loss));
            }
            if let Some(records) = &mut records {
                let begin = Instant::now();
                records.eval(&record);
                run.engine.monitor("Validation/Samples/loss", record.loss.into());
                progress.eval(&record);
                summary.observing_seconds += begin.elapsed().as_secs_f64();
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
    health.finish()?;
    if run.engine.config().comms_logger.is_some() {
        summary.communication = Some(run.engine.communication_summary(true)?);
    }
    if let (Some(path), Some(document)) = (&recipe.trace, run.engine.finish_trace()?) {
        std::fs::write(path, document).map_err(TrainError::io(path))?;
    }
    if summary.ending != Ending::Left && !job.is_experiment {
        export(&run.engine, &run.model, &run.model_config, &folder.model())?;
        summary.sample = run.sample()?;
        if let (0, Some(sample)) = (rank, &summary.sample) {
            std::fs::write(folder.sample(), sample).map_err(TrainError::io(folder.sample()))?;
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
        if let Some(profile) = run.engine.model_profile() {
            let peak = machine::measure_peak(run.engine.device(), run.engine.store().dtype())?;
            records.roofline(&profile.roofline(peak));
        }
        let begin = Instant::now();
        let broken = records.broken.clone().map(|why| format!("its log is not complete: {why}"));
        let finished = records.finish(&recipe.name, &info, &summary);
        unsaved =
            unsaved.or(broken).or(finished.err().map(|error| format!("its report is missing: {error}")));
        summary.observing_seconds += begin.elapsed().as_secs_f64();
    }
    match unsaved {
        Some(what) => Err(TrainError::Unsaved(what)),
        None => Ok(summary),
    }
}

/// Rank 0 takes the folder where nobody did before; all ranks hear whether it could.
fn take_folder(job: &Job<'_>) -> Result<Option<FolderLock>> {
    let leads = job.world.rank() == 0;
    let taken = if !leads {
        Ok(None)
    } else if job.resume == Resume::No && job.folder.holds_run() {
        Err(TrainError::Used { dir: job.folder.path().to_path_buf() })
    } else {
        job.folder.lock().map(Some)
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
        std::fs::write(&path, text).map_err(TrainError::io(&path))
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
        FeedForward::Plain { .. } | FeedForward::Gated { .. } => 0.0,
    };
    let multiplied = multiplied - idle;
    6.0 * multiplied + 12.0 * (config.layers * config.heads * config.head_dim) as f64 * sequence as f64
}

impl Run<'_> {
    /// Goes on from a checkpoint, if one is asked for and there.
    fn resume(
        &mut self,
        checkpoints: &Checkpoints,
        resume: &Resume,
        folder: &RunFolder,
        progress: &mut dyn Progress,
    ) -> Result<Option<Resumed>> {
        let Some((loaded, state)) = checkpoints.load(&mut self.engine, resume, folder, progress)? else {
            return Ok(None);
        };
        let mut changes = loaded.changes;
        let own = self.state();
        if let Some(state) = state {
            self.tokens = state.tokens;
            for (what, before, now) in [
                ("sequences to train on", state.train_sequences, own.train_sequences),
                ("tokens per sequence", state.sequence, own.sequence),
            ] {
                if before != now {
                    changes.push(format!("{what}: {before} -> {now}; the order of samples is another one"));
                }
            }
        }
        if self.engine.seed() != self.recipe.seed {
            changes.push(format!("seed: the saved {} is kept, not {}", self.engine.seed(), self.recipe.seed));
        }
        self.position.samples = loaded.data_position;
        self.sampler = Sampler::new(self.sequences.count(Split::Train), self.engine.seed());
        Ok(Some(Resumed { path: loaded.path, step: self.engine.global_steps(), changes }))
    }

    /// What a checkpoint holds besides the engine's state.
    fn state(&self) -> RunState {
        RunState {
            tokens: self.tokens,
            train_sequences: self.sequences.count(Split::Train),
            sequence: self.recipe.data.sequence,
            model_config: self.model_config.clone(),
        }
    }

    fn info(&self, warnings: Vec<String>, resumed: Option<Resumed>, peak_flops_per_s: f64) -> RunInfo {
        RunInfo {
            parameters: self.model.parameters().whole_numel() as u64,
            ranks: self.engine.world().size(),
            steps: self.recipe.steps,
            stage: self.engine.config().zero.stage.number(),
            dtype: self.engine.store().dtype().to_string(),
            batch: self.engine.train_batch_size(),
            sequence: self.recipe.data.sequence,
            train_sequences: self.sequences.count(Split::Train),
            validation_sequences: self.sequences.count(Split::Validation),
            warnings,
            peak_flops_per_s,
            division: self.engine.division().map(ToString::to_string),
            resumed,
        }
    }

    /// The first `kept` tokens of some sequences.
    fn batch(&self, split: Split, indices: impl Iterator<Item = u64>, kept: u64) -> Result<Tensor> {
        let (length, kept) = (self.recipe.data.sequence as usize, kept as usize);
        let mut ids = Vec::new();
        for index in indices {
            let start = ids.len();
            ids.resize(start + length, 0);
            self.sequences.read(split, index, &mut ids[start..])?;
            ids.truncate(start + kept);
        }
        Ok(Tensor::from_slice(&ids, [ids.len() / kept, kept], self.engine.device())?)
    }

    /// One optimizer step; says whether any rank was asked to stop, and how.
    fn step(&mut self, step: u64, requests: &StopRequests) -> Result<(StepRecord, Option<Ending>)> {
        let start = Instant::now();
        let device = self.engine.device().clone();
        device.backend().reset_peak_memory();
        let (size, micro_batches) =
            (self.engine.train_micro_batch_size_per_gpu(), self.engine.gradient_accumulation_steps());
        let (lr, loss_scale) =
            (self.engine.get_lr().first().copied().unwrap_or(0.0), self.engine.loss_scale());
        let length = self.engine.curriculum_length(self.recipe.data.sequence);
        let reading = Instant::now();
        let mut batches = Vec::new();
        for micro in 0..micro_batches {
            let (rank, ranks) = (self.engine.data_rank() as u64, self.engine.data_ranks() as u64);
            let indices = self.sampler.micro_batch(self.position, micro, rank, ranks, size);
            batches.push(self.batch(Split::Train, indices, length)?);
        }
        self.engine.trace(Activity::Files, "data", reading);
        let (loss, report) = self.train_on(batches)?;
        self.tell_checkpoint_times();
        self.position.samples += self.engine.train_batch_size();
        let tokens = self.engine.train_batch_size() * length;
        self.tokens += tokens;
        let (memory, times) = (device.memory_usage(), self.engine.last_step_times());
        let own = Own { loss, requests: requests.asked(), times, memory };
        let told = told::tell(&self.engine.world().group(), own)?;
        let seconds = start.elapsed().as_secs_f64();
        let record = StepRecord {
            step,
            // Stages have agreed on it, and averaging equal numbers may round.
            loss: if self.engine.stage().1 > 1 { loss } else { told.loss },
            lr,
            grad_norm: match report {
                StepReport::Applied { grad_norm } => Some(grad_norm),
                _ => None,
            },
            tokens: self.tokens,
            tokens_per_s: tokens as f64 / seconds,
            step_ms: seconds * 1e3,
            forward_ms: times.forward.as_secs_f64() * 1e3,
            backward_ms: times.backward.as_secs_f64() * 1e3,
            optimizer_ms: times.step.as_secs_f64() * 1e3,
            flops_per_s: self.flops_per_token * tokens as f64 / seconds,
            memory_bytes: told::peaks(&memory),
            skipped: matches!(report, StepReport::Skipped { .. }),
            loss_scale,
            routing: Vec::new(),
            ranks: told.times,
            rank_memory_bytes: told.memory,
            layer_norms: self.engine.layer_norms().to_vec(),
        };
        let asked = match told.requests {
            [_, true] => Some(Ending::Left),
            [true, false] => Some(Ending::Stopped),
            [false, false] => None,
        };
        Ok((record, asked))
    }

    /// With `activation_checkpointing.profile`, how long recomputed blocks took in the last step.
    fn tell_checkpoint_times(&self) {
        let Some(times) = &self.checkpoint_times else { return };
        let time = times.take();
        if self.engine.world().rank() == 0 {
            let ms = |time: Duration| time.as_secs_f64() * 1e3;
            let (forward, backward) = (ms(time.forward), ms(time.backward));
            tracing::info!(
                target: ASKED_FOR,
                "time (ms) | checkpointed forward: {forward:.2} | checkpointed backward: {backward:.2} | calls: {}",
                time.calls
            );
        }
    }

    /// Takes a step on some micro-batches; returns their mean loss, of this rank's or of all, and what became of it.
    fn train_on(&mut self, batches: Vec<Tensor>) -> Result<(f32, StepReport)> {
        let model = &self.model;
        if self.engine.stage().1 > 1 {
            let labelled = |micro: usize| {
                Ok::<_, TrainError>((Tokens::new(batches[micro].clone()), batches[micro].clone()))
            };
            return self.engine.train_batch(model, labelled);
        }
        let (mut sum, mut report) = (0.0, StepReport::Accumulating);
        for (micro, ids) in batches.iter().enumerate() {
            if micro == 0 {
                let loss = |mode| -> Result<Tensor> { Ok(model.loss(&Tokens::new(ids.clone()), ids, mode)?) };
                self.engine.update_eigenvalues(loss)?;
            }
            let loss = self.engine.forward(|mode| model.loss(&Tokens::new(ids.clone()), ids, mode))?;
            sum += loss.item()?;
            self.engine.backward(&loss)?;
            report = self.engine.step()?;
        }
        Ok((sum / batches.len() as f32, report))
    }

    /// The loss of some tokens, without gradients.
    fn loss_of(&mut self, ids: &Tensor) -> Result<f32> {
        let model = &self.model;
        if self.engine.stage().1 > 1 {
            let labelled = |_| Ok::<_, TrainError>((Tokens::new(ids.clone()), ids.clone()));
            return Ok(self.engine.eval_losses(model, 1, labelled)?[0]);
        }
        Ok(self.engine.forward(|mode| model.loss(&Tokens::new(ids.clone()), ids, mode))?.item()?)
    }

    /// The mean loss over validation sequences, which ranks share out.
    fn evaluate(&mut self, step: u64) -> Result<EvalRecord> {
        let available = self.sequences.count(Split::Validation);
        let count = if self.recipe.eval.sequences == 0 {
            available
        } else {
            self.recipe.eval.sequences.min(available)
        };
        let (rank, ranks) = (self.engine.data_rank() as u64, self.engine.data_ranks() as u64);
        let size = self.engine.train_micro_batch_size_per_gpu();
        self.engine.eval();
        // Every rank takes part in every round (stage 3 gathers together); a rank without a sequence of its own
        // repeats one that does not count.
        let mut sums = [0.0f64, 0.0];
        for round in 0..count.div_ceil(ranks * size) {
            let first = (round * ranks + rank) * size;
            let own: Vec<u64> = (first..(first + size).min(count)).collect();
            let counted = own.len() as f64;
            let indices = if own.is_empty() { vec![0] } else { own };
            let ids = self.batch(Split::Validation, indices.into_iter(), self.recipe.data.sequence)?;
            sums[0] += f64::from(self.loss_of(&ids)?) * counted;
            sums[1] += counted;
        }
        self.engine.train();
        self.engine.world().group().all_reduce(&mut sums, ReduceOp::Sum)?;
        let tokens = count * (self.recipe.data.sequence - 1);
        Ok(EvalRecord { step, loss: (sums[0] / sums[1].max(1.0)) as f32, tokens })
    }

    /// Lets the model write. All ranks do, since in stage 3 they hold its weights together.
    fn sample(&self) -> Result<Option<String>> {
        let Some(sample) = &self.recipe.sample else { return Ok(None) };
        if self.recipe.mesh().divides_model() {
            return Ok(None);
        }
        // Data that was tokens from the start has no text to show.
        let Some(codec) = &self.codec else { return Ok(None) };
        let prompt: Vec<i64> = codec.encode_prompt(&sample.prompt)?.into_iter().map(i64::from).collect();
        let room = (self.recipe.data.sequence as usize).saturating_sub(prompt.len());
        let sampling = if sample.temperature == 0.0 {
            Sampling::Greedy
        } else {
            Sampling::Random {
                temperature: sample.temperature,
                top_k: Some(50),
                top_p: None,
                seed: self.recipe.seed,
            }
        };
        let options = GenerateOptions {
            max_new_tokens: (sample.tokens as usize).min(room),
            sampling,
            end_tokens: codec.end_token().map(i64::from).into_iter().collect(),
            pad_token: 0,
        };
        let device = self.engine.device();
        let written = generate(&self.model, &[prompt], None, &options, device, &mut |_, _| {})?;
        Ok(Some(codec.decode(&written[0])?))
    }
}
