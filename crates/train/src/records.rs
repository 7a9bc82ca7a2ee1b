//! Everything rank 0 writes down while a run goes: logs, TensorBoard events, and the report at the end.

use ferrospeed_config::{Config, Precision};
use ferrospeed_observe::monitor::{Monitors, OptionalEvents, Samples, TensorBoard};
use ferrospeed_observe::report::{Report, render};
use ferrospeed_observe::{EvalRecord, JsonLines, StepRecord, read_json_lines};

use crate::error::{Result, TrainError};
use crate::folder::RunFolder;
use crate::run::{RunInfo, Summary};

/// The files of a run that is under way.
pub(crate) struct Records {
    folder: RunFolder,
    log: JsonLines,
    eval: JsonLines,
    monitors: Monitors,
    batch: u64,
}

impl Records {
    /// New, empty files. `batch` is the samples of a step.
    pub(crate) fn create(folder: &RunFolder, config: &Config, batch: u64) -> Result<Records> {
        let scales_loss = matches!(config.precision, Precision::Fp16 { .. });
        let mut monitors =
            Monitors::new(OptionalEvents { loss_scale: scales_loss, times: config.wall_clock_breakdown });
        monitors.add(TensorBoard::create(folder.path(), "events")?);
        let (log, eval) = (JsonLines::create(&folder.log())?, JsonLines::create(&folder.eval())?);
        Ok(Records { folder: folder.clone(), log, eval, monitors, batch })
    }

    pub(crate) fn step(&mut self, record: &StepRecord) -> Result<()> {
        self.log.write(record)?;
        let samples = Samples { before: (record.step - 1) * self.batch, after: record.step * self.batch };
        // The log is the run's memory; a chart that cannot be drawn does not end the run.
        if let Err(error) = self.monitors.step(record, samples) {
            tracing::warn!("{error}");
        }
        Ok(())
    }

    pub(crate) fn eval(&mut self, record: &EvalRecord) -> Result<()> {
        self.eval.write(record)?;
        if let Err(error) = self.monitors.validation(record, record.step * self.batch) {
            tracing::warn!("{error}");
        }
        Ok(())
    }

    /// Writes `report.html` from the logs.
    pub(crate) fn finish(mut self, title: &str, info: &RunInfo, summary: &Summary) -> Result<()> {
        if let Err(error) = self.monitors.flush() {
            tracing::warn!("{error}");
        }
        let facts = [
            ("parameters", info.parameters.to_string()),
            ("type", info.dtype.clone()),
            ("ranks", info.ranks.to_string()),
            ("ZeRO stage", info.stage.to_string()),
            ("sequences per step", info.batch.to_string()),
            ("tokens per sequence", info.sequence.to_string()),
            ("seconds", format!("{:.1}", summary.seconds)),
        ]
        .map(|(name, value)| (name.to_owned(), value));
        let mut documents = Vec::new();
        for name in ["recipe.toml", "ds_config.json"] {
            let path = self.folder.config().join(name);
            documents.push((name.to_owned(), std::fs::read_to_string(&path).map_err(TrainError::io(&path))?));
        }
        documents.extend(summary.sample.clone().map(|sample| ("sample".to_owned(), sample)));
        let page = render(&Report {
            title,
            steps: &read_json_lines(&self.folder.log())?,
            evals: &read_json_lines(&self.folder.eval())?,
            facts: &facts,
            documents: &documents,
        });
        std::fs::write(self.folder.report(), page).map_err(TrainError::io(self.folder.report()))
    }
}
