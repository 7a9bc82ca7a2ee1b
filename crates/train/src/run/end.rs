//! The end of a run: what is still to be written, and what became of it.

use std::ops::ControlFlow;
use std::time::Instant;

use ferrospeed_checkpoint::CheckpointError;
use ferrospeed_engine::machine;

use super::course::Course;
use super::{Observing, ObservingCost, Run, Summary};
use crate::adapter;
use crate::checkpoint::Ending;
use crate::error::{Result, TrainError};
use crate::export::export;

impl Course<'_, '_> {
    /// Writes all that is to be there after the last step.
    pub(super) fn end(mut self, start: Instant) -> Result<Summary> {
        let (run, folder) = (&mut self.run, self.job.folder);
        self.checkpoints.wait(&mut run.engine, self.progress)?;
        run.health.finish().map_err(|divergence| divergence.verdict(&folder.checkpoints()))?;
        if run.engine.config().comms_logger.is_some() {
            self.summary.communication = Some(run.engine.communication_summary(true)?);
        }
        if let (Some(path), Some(document)) = (&run.recipe.trace, run.engine.finish_trace()?) {
            // The weights are still to be exported.
            let written = ferrospeed_files::write(path, document).map_err(TrainError::io(path));
            self.misses(written.err().map(|error| format!("its trace is missing: {error}")));
        }
        if self.summary.ending != Ending::Left && !self.job.is_experiment {
            self.export()?;
        }
        if self.job.observing == Observing::Alternating {
            let [without_ms, with_ms] = std::mem::take(&mut self.times_ms);
            self.summary.observing_cost = ObservingCost::of(with_ms, without_ms);
        }
        self.summary.seconds = start.elapsed().as_secs_f64();
        self.summary.observing_seconds += self.run.engine.time_monitoring().as_secs_f64();
        self.close_records()?;
        match self.unsaved {
            Some(what) => Err(TrainError::Unsaved(what)),
            None => {
                if self.job.world.rank() == 0 {
                    folder.note_ending(self.summary.ending, self.summary.steps);
                }
                Ok(self.summary)
            }
        }
    }

    /// Notes what could not be written, where nothing was noted before.
    fn misses(&mut self, what: Option<String>) {
        self.unsaved = self.unsaved.take().or(what);
    }

    /// Adds to what could not be written.
    fn also_misses(&mut self, what: String) {
        self.unsaved = Some(self.unsaved.take().map_or(what.clone(), |first| format!("{first}; {what}")));
    }

    /// The weights as others read them, and what the model writes by them.
    fn export(&mut self) -> Result<()> {
        let folder = self.job.folder;
        match self.run.export(&folder.model()) {
            // All ranks have failed together.
            Err(TrainError::Checkpoint(error)) if !matches!(error, CheckpointError::Comm(_)) => {
                let kept = self.summary.checkpoint.as_ref().map_or(String::new(), |path| {
                    format!(
                        "; {} has them, and `ferrospeed checkpoint export-hf` writes them elsewhere",
                        path.display()
                    )
                });
                self.also_misses(format!(
                    "its weights are not in {}: {error}{kept}",
                    folder.model().display()
                ));
            }
            exported => exported?,
        }
        // The weights are there: who wants to leave now only goes without a sample.
        let samples = match self.run.samples(&mut self.listening())? {
            ControlFlow::Continue(samples) => samples,
            ControlFlow::Break(_) => None,
        };
        self.summary.sample = samples.map(|samples| samples.join("\n\n"));
        if let (0, Some(sample)) = (self.job.world.rank(), &self.summary.sample) {
            let written =
                ferrospeed_files::write(folder.sample(), sample).map_err(TrainError::io(folder.sample()));
            self.misses(written.err().map(|error| format!("its sample is missing: {error}")));
        }
        Ok(())
    }

    /// Ends the logs, the report and the curves, on the rank that writes them.
    fn close_records(&mut self) -> Result<()> {
        let Some(records) = self.records.take() else { return Ok(()) };
        let engine = &self.run.engine;
        // What the machine can do is measured once, and is no share of what each step costs.
        match (engine.model_profile(), &engine.config().flops_profiler) {
            (Some(profile), _) => {
                let peak = machine::measure_peak(engine.device(), engine.store().dtype())?;
                records.roofline(&profile.roofline(peak));
            }
            (None, Some(profiler)) if self.summary.new_steps > 0 => self.progress.warning(&format!(
                "flops_profiler: step {} (from 0) is not among those of this run, so nothing was profiled",
                profiler.profile_step
            )),
            (None, _) => {}
        }
        let begin = Instant::now();
        self.misses(records.broken.clone().map(|why| format!("its log is not complete: {why}")));
        let finished = records.finish(&self.run.recipe.name, &self.info, &self.summary);
        self.misses(finished.err().map(|error| format!("its report is missing: {error}")));
        let curves = self.run.engine.finish_monitors();
        if !curves.is_empty() {
            self.also_misses(format!("its curves are not complete: {}", curves.join("; ")));
        }
        self.summary.observing_seconds += begin.elapsed().as_secs_f64();
        Ok(())
    }
}

impl Run<'_> {
    /// Writes what was trained as others read it. All ranks call it together.
    pub(super) fn export(&self, folder: &std::path::Path) -> Result<()> {
        match (&self.recipe.model.path, self.model.adapters()) {
            (Some(base), Some(_)) => adapter::export(&self.engine, &self.model, base, folder),
            _ => export(&self.engine, &self.model, &self.model_config, folder),
        }
    }
}
