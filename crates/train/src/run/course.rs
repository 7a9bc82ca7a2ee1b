//! A run from its first step to its last, with all that watches it.

use std::ops::ControlFlow;
use std::time::Instant;

use ferrospeed_checkpoint::CheckpointError;
use ferrospeed_comm::ReduceOp;
use ferrospeed_data::Split;
use ferrospeed_engine::{Engine, EngineError};
use ferrospeed_observe::monitor::TensorBoard;
use ferrospeed_observe::trace::Activity;
use ferrospeed_observe::{EvalRecord, StepRecord};
use ferrospeed_tune::plan::Processor;
use serde_json::json;

use super::build::Built;
use super::listening::Listening;
use super::{Job, Progress, Run, RunInfo, Summary};
use crate::best::Standing;
use crate::checkpoint::{Checkpoints, Ending};
use crate::error::{Result, TrainError};
use crate::expected::Expected;
use crate::folder::RunFolder;
use crate::peak;
use crate::prepare::copy_companions;
use crate::recipe::Recipe;
use crate::records::{Records, go_back_in_curves};
use crate::resume::Resume;
use crate::routing;
use crate::told::Changes;

/// A run on its way.
pub(super) struct Course<'a, 'r> {
    pub(super) job: &'a Job<'a>,
    pub(super) run: Run<'r>,
    pub(super) progress: &'a mut dyn Progress,
    pub(super) checkpoints: Checkpoints,
    /// Rank 0's.
    pub(super) records: Option<Records>,
    pub(super) info: RunInfo,
    pub(super) summary: Summary,
    /// Milliseconds of the steps that were not observed, and of those that were.
    pub(super) times_ms: [Vec<f64>; 2],
    /// What could not be written.
    pub(super) unsaved: Option<String>,
    changes: Changes,
    /// Whether the folder holds another run until the first step is done.
    replaces: bool,
}

impl<'a, 'r> Course<'a, 'r> {
    /// Goes back to where a checkpoint was, if it is to, and opens what the run writes.
    pub(super) fn begin(
        job: &'a Job<'a>,
        built: Built<'r>,
        progress: &'a mut dyn Progress,
    ) -> Result<Course<'a, 'r>> {
        let Built { mut run, mut warnings, bytes_per_token, wire_bytes_per_s, made_from } = built;
        let (recipe, folder) = (run.recipe, job.folder);
        // Only its speed is asked of an experiment, whatever its answers are held against.
        if run.objective.has_reference() && !job.is_experiment {
            // The weights are those that the run starts from, whatever a checkpoint has made of them.
            let cache = recipe.data.cache.clone().unwrap_or_else(|| folder.data());
            let found = run.find_reference(&cache, &made_from, &job.requests, progress);
            if let (Err(TrainError::StoppedAtOnce(ending)), 0, Resume::No) =
                (&found, job.world.rank(), &job.resume)
            {
                folder.note_ending(*ending, 0);
            }
            run.reference = Some(found?);
        }
        let checkpoints = Checkpoints::new(recipe, folder, job.fresh_optimizer);
        let resumed = run.resume(&checkpoints, &job.resume, folder, progress)?;
        let done = resumed.as_ref().map(|resumed| resumed.step);
        if done.is_some_and(|done| done >= recipe.steps) {
            run.health.finish_at_once().map_err(|divergence| divergence.verdict(&folder.checkpoints()))?;
        }
        let goes_on_here = resumed.as_ref().is_some_and(|resumed| folder.holds_checkpoint(&resumed.path));
        let records = match job.world.rank() {
            0 => Some(open_records(job, &run, done, goes_on_here, &mut warnings)?),
            _ => None,
        };
        watch(&mut run, folder)?;
        let peak = peak::measure(&run.engine)?;
        warnings.extend(run.shortened_sample()?.filter(|_| !job.is_experiment));
        let info = run.info(warnings, resumed, peak.flops_per_s);
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
        Ok(Course {
            job,
            run,
            progress,
            checkpoints,
            records,
            info,
            summary: Summary::of_steps(done.unwrap_or(0), bytes_per_token),
            times_ms: [Vec::new(), Vec::new()],
            unsaved: None,
            changes: Changes::default(),
            replaces: false,
        })
    }

    /// Whoever stops a run before its first step wants none; and at that step, who stops one that replaces another wants
    /// the other. All ranks hear of it.
    pub(super) fn stop_at_once(&mut self) -> Result<()> {
        let (rank, folder) = (self.job.world.rank(), self.job.folder);
        let [finish, leave] = self.job.requests.asked();
        let mut said =
            [rank == 0 && folder.is_being_replaced(), finish, leave].map(|so| f32::from(u8::from(so)));
        self.run.engine.world().group().all_reduce(&mut said, ReduceOp::Sum)?;
        let [replaces, finish, leave] = said.map(|ranks| ranks > 0.0);
        self.replaces = replaces;
        let has_steps = self.summary.steps < self.run.recipe.steps;
        if let Some(ending) = Ending::asked([finish, leave]).filter(|_| has_steps) {
            return Err(self.stopped_at_once(ending));
        }
        Ok(())
    }

    /// No step was taken, and none will be.
    fn stopped_at_once(&self, ending: Ending) -> TrainError {
        if self.job.world.rank() == 0 {
            self.job.folder.note_ending(ending, self.summary.steps);
        }
        TrainError::StoppedAtOnce(ending)
    }

    /// To what is asked while something takes long without a step.
    pub(super) fn listening(&self) -> Listening {
        let before = Some(self.summary.ending).filter(|ending| *ending != Ending::Finished);
        Listening::new(self.run.engine.world().group(), &self.job.requests, before)
    }

    /// Takes all steps, and what is validated, shown and saved after each.
    pub(super) fn walk(&mut self) -> Result<()> {
        let recipe = self.run.recipe;
        if recipe.eval.at_start && self.summary.steps == 0 && !self.job.is_experiment {
            match self.validate(0)? {
                ControlFlow::Break(ending) => return Err(self.stopped_at_once(ending)),
                // What the run starts from may be the best that it ever has.
                ControlFlow::Continue(found) => self.weigh(0, found)?,
            };
        }
        if self.settle()? == Standing::Enough {
            return Ok(());
        }
        for step in self.summary.steps + 1..=recipe.steps {
            let mut last = self.step(step)?;
            let at_end = last && self.summary.ending != Ending::Left && !self.job.is_experiment;
            let mut shown = ControlFlow::Continue(());
            if self.validation_is_due(step) || at_end {
                match self.validate(step)? {
                    ControlFlow::Continue(found) => last |= self.weigh(step, found)? == Standing::Enough,
                    ControlFlow::Break(ending) => {
                        self.run.owes_validation = true;
                        shown = ControlFlow::Break(ending);
                    }
                }
            }
            if shown.is_continue() {
                shown = self.show_samples(step)?;
            }
            if let ControlFlow::Break(ending) = shown {
                (self.summary.ending, last) = (ending, true);
            }
            self.save(step, last)?;
            if last {
                break;
            }
        }
        Ok(())
    }

    fn validation_is_due(&self, step: u64) -> bool {
        let every = self.run.recipe.eval.every;
        every > 0 && step.is_multiple_of(every)
    }

    /// Makes the validation that the run it goes on from was not given the time for.
    fn settle(&mut self) -> Result<Standing> {
        let step = self.summary.steps;
        let is_wanted = self.validation_is_due(step) || step >= self.run.recipe.steps;
        if !std::mem::take(&mut self.run.owes_validation) || !is_wanted || self.job.is_experiment {
            return Ok(Standing::Best);
        }
        match self.validate(step)? {
            ControlFlow::Continue(found) => self.weigh(step, found),
            // The checkpoint still owes it.
            ControlFlow::Break(ending) => Err(self.stopped_at_once(ending)),
        }
    }

    /// What a validation means for the run.
    fn weigh(&mut self, step: u64, found: Option<EvalRecord>) -> Result<Standing> {
        let Some(record) = found else { return Ok(Standing::Best) };
        if step > 0 && self.validation_is_due(step) {
            self.run.engine.observe_metric(f64::from(record.loss));
        }
        self.compare(&record)
    }

    /// Takes a step. Returns whether it is the last.
    fn step(&mut self, step: u64) -> Result<bool> {
        let (begin, steps) = (Instant::now(), self.run.recipe.steps);
        let observed = self.job.observing.is_on(step);
        self.run.engine.set_monitoring(observed);
        let taken = self.run.step(step, &self.job.requests);
        let checkpoints = self.job.folder.checkpoints();
        let (mut record, asked) = taken.map_err(|error| self.run.health.of_failure(error, &checkpoints))?;
        if let (true, Some(ending)) = (std::mem::take(&mut self.replaces) && step < steps, asked) {
            return Err(TrainError::StoppedAtOnce(ending));
        }
        if observed {
            self.observe(&mut record)?;
        }
        (self.summary.steps, self.summary.new_steps) = (step, self.summary.new_steps + 1);
        self.summary.loss = record.measured_loss().or(self.summary.loss);
        let verdict = self.run.health.judge(&record);
        if let Some(records) = self.records.as_mut().filter(|_| observed) {
            let begin = Instant::now();
            records.step(&record);
            self.progress.step(&record);
            self.summary.observing_seconds += begin.elapsed().as_secs_f64();
            self.run.engine.trace(Activity::Files, "log", begin);
        }
        // Every rank sees the same losses, so all of them leave here.
        verdict.map_err(|divergence| divergence.verdict(&checkpoints))?;
        self.times_ms[usize::from(observed)].push(begin.elapsed().as_secs_f64() * 1e3);
        self.summary.ending = asked.filter(|_| step < steps).unwrap_or(Ending::Finished);
        Ok(step == steps || asked.is_some())
    }

    /// Adds to a step's record what only observed steps have.
    fn observe(&mut self, record: &mut StepRecord) -> Result<()> {
        let run = &mut self.run;
        record.routing = routing::over_ranks(&run.model, &run.engine, run.recipe.mesh().tensor.get())?;
        routing::monitor(&mut run.engine, &record.routing);
        for (name, value) in &record.measures {
            run.engine.monitor(&format!("Train/Samples/{name}"), *value);
        }
        record.rank_memory_bytes = self.changes.of(std::mem::take(&mut record.rank_memory_bytes));
        Ok(())
    }

    /// Measures what is only measured, if there is such, and writes it down; nothing of what is stopped on the way.
    fn validate(&mut self, step: u64) -> Result<ControlFlow<Ending, Option<EvalRecord>>> {
        if self.run.sequences.count(Split::Validation) == 0 {
            return Ok(ControlFlow::Continue(None));
        }
        let mut listening = self.listening();
        let record = match self.run.evaluate(step, &mut listening)? {
            ControlFlow::Continue(Some(record)) => record,
            other => return Ok(other),
        };
        self.summary.validation_loss = Some(record.loss);
        if let Some(records) = &mut self.records {
            let begin = Instant::now();
            records.eval(&record);
            self.run.engine.monitor("Validation/Samples/loss", record.loss.into());
            for (name, value) in &record.measures {
                self.run.engine.monitor(&format!("Validation/Samples/{name}"), *value);
            }
            self.progress.eval(&record);
            self.summary.observing_seconds += begin.elapsed().as_secs_f64();
        }
        Ok(ControlFlow::Continue(Some(record)))
    }

    /// Holds a validation against those before, and keeps the weights where none was better. All ranks have the same record.
    fn compare(&mut self, record: &EvalRecord) -> Result<Standing> {
        let (run, folder) = (&mut self.run, self.job.folder);
        let recipe = &run.recipe.eval;
        let (standing, leads) = (run.best.judge(recipe, record), self.job.world.rank() == 0);
        if standing == Standing::Best && recipe.keep_best {
            if leads {
                copy_companions(run.recipe, run.codec.as_ref(), &folder.best_model())?;
            }
            match run.export(&folder.best_model()) {
                // All ranks have failed together, and the one before is whole.
                Err(TrainError::Checkpoint(error)) if !matches!(error, CheckpointError::Comm(_)) => {
                    if leads {
                        self.progress.warning(&format!("the best weights are not kept: {error}"));
                    }
                }
                exported => exported?,
            }
        }
        if let (Standing::Enough, Some((step, value)), true) = (standing, run.best.found, leads) {
            let (count, measure) =
                (recipe.patience.unwrap_or(0), recipe.measure.as_deref().unwrap_or("loss"));
            self.progress.warning(&format!(
                "eval.patience: none of the last {count} validations was better than that of step {step} ({measure} {value:.4}): the run ends here"
            ));
        }
        Ok(standing)
    }

    /// Writes samples down after the steps that ask for them.
    fn show_samples(&mut self, step: u64) -> Result<ControlFlow<Ending>> {
        let is_due = |every: u64| every > 0 && step.is_multiple_of(every);
        let shows = self.run.recipe.sample.as_ref().is_some_and(|sample| is_due(sample.every));
        if !shows || self.job.is_experiment {
            return Ok(ControlFlow::Continue(()));
        }
        let samples = match self.run.samples(&mut self.listening())? {
            ControlFlow::Continue(samples) => samples,
            ControlFlow::Break(ending) => return Ok(ControlFlow::Break(ending)),
        };
        if let (Some(records), Some(samples)) = (&mut self.records, samples) {
            records.samples(step, &samples);
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Saves a checkpoint where one is due.
    fn save(&mut self, step: u64, last: bool) -> Result<()> {
        let Course { run, checkpoints, progress, .. } = self;
        checkpoints.look(&mut run.engine, &mut **progress)?;
        let stopped = self.summary.ending != Ending::Finished;
        let save_now = stopped || (last && checkpoints.is_due_at_end());
        if !save_now && !checkpoints.is_due(step) {
            return Ok(());
        }
        if let Some(records) = &mut self.records {
            records.sync();
        }
        let (position, state) = (run.position.samples, run.state());
        let saving = Instant::now();
        if save_now {
            match checkpoints.save_now(&mut run.engine, position, &state, &mut **progress) {
                Ok(saved) => self.summary.checkpoint = Some(saved),
                // The weights are still here: they are exported before anybody is told.
                Err(TrainError::Engine(EngineError::Checkpoint(error)))
                    if self.summary.ending != Ending::Left =>
                {
                    self.unsaved = Some(format!("its last checkpoint was not saved: {error}"));
                }
                Err(error) => return Err(error),
            }
        } else {
            checkpoints.save(&mut run.engine, position, &state, &mut **progress)?;
        }
        run.engine.trace(Activity::Files, "checkpoint", saving);
        Ok(())
    }
}

/// The files of a run's folder, which rank 0 writes.
fn open_records(
    job: &Job<'_>,
    run: &Run<'_>,
    done: Option<u64>,
    goes_on_here: bool,
    warnings: &mut Vec<String>,
) -> Result<Records> {
    let folder = job.folder;
    // An attempt that ended before its first checkpoint is made again from the first step.
    let begins_again = done.is_none() && job.resume == Resume::Newest && folder.log().exists();
    folder.create()?;
    copy_companions(run.recipe, run.codec.as_ref(), &folder.model())?;
    write_config(run.recipe, &run.engine, folder)?;
    if goes_on_here || begins_again {
        go_back_in_curves(&run.engine.config().monitors, run.engine.global_samples(), warnings);
    }
    Records::open(folder, done, goes_on_here, warnings)
}

/// Turns on what a recipe wants to be watched.
fn watch(run: &mut Run<'_>, folder: &RunFolder) -> Result<()> {
    run.engine.add_monitor(|| TensorBoard::create(folder.path(), "events"))?;
    if run.recipe.trace.is_some() {
        run.engine.start_trace()?;
    }
    if run.recipe.gradient_norms_every > 0 {
        run.engine.watch_gradients(run.recipe.gradient_norms_every)?;
    }
    Ok(())
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
