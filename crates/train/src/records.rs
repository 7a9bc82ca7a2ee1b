//! Everything rank 0 writes down while a run goes: logs, monitors, and the report at the end.

use std::path::{Path, PathBuf};

use ferrospeed_config::{Config, Precision};
use ferrospeed_observe::monitor::{
    CsvMonitor, Monitors, OptionalEvents, Samples, TensorBoard, WandbOffline, WandbRun,
};
use ferrospeed_observe::report::{Report, render};
use ferrospeed_observe::{EvalRecord, JsonLines, StepRecord, read_json_lines};
use serde_json::{Value, json};

use crate::error::{Result, TrainError};
use crate::folder::RunFolder;
use crate::recipe::Recipe;
use crate::run::{RunInfo, Summary};

/// The files of a run that is under way.
pub(crate) struct Records {
    folder: RunFolder,
    log: JsonLines,
    eval: JsonLines,
    monitors: Monitors,
    /// Why the logs are not complete.
    pub(crate) broken: Option<String>,
}

impl Records {
    /// New, empty files, or those of a run that goes on after `done` steps: what was logged after them, before the run
    /// was ended, is dropped.
    pub(crate) fn open(folder: &RunFolder, config: &Config, done: Option<u64>) -> Result<Records> {
        let scales_loss = matches!(config.precision, Precision::Fp16 { .. });
        let mut monitors =
            Monitors::new(OptionalEvents { loss_scale: scales_loss, times: config.wall_clock_breakdown });
        monitors.add(TensorBoard::create(folder.path(), "events")?);
        add_configured(&mut monitors, config, folder)?;
        let open = |path: PathBuf| -> Result<JsonLines> {
            let Some(done) = done.filter(|_| path.exists()) else { return Ok(JsonLines::create(&path)?) };
            keep_steps(&path, done)?;
            Ok(JsonLines::append(&path)?)
        };
        let (log, eval) = (open(folder.log())?, open(folder.eval())?);
        // What an earlier attempt failed of is over.
        let _ = std::fs::remove_file(folder.outcome());
        Ok(Records { folder: folder.clone(), log, eval, monitors, broken: None })
    }

    /// Says what the run is, for those who watch it.
    pub(crate) fn started(&self, recipe: &Recipe, info: &RunInfo) -> Result<()> {
        let path = self.folder.about();
        let facts: serde_json::Map<String, Value> =
            info.facts().into_iter().map(|(name, value)| (name, value.into())).collect();
        let about = json!({ "steps": info.steps, "facts": facts, "recipe": recipe });
        std::fs::write(&path, format!("{about:#}\n")).map_err(TrainError::io(&path))
    }

    /// Brings the logs to the disk, so that none is behind the checkpoint that is written next.
    pub(crate) fn sync(&mut self) {
        let synced = self.log.sync().and_then(|()| self.eval.sync());
        self.tolerate(synced);
    }

    /// A log that cannot be written does not end a run: what was learned cannot be made again, a log can be done without.
    fn tolerate(&mut self, outcome: ferrospeed_observe::Result<()>) {
        let Err(error) = outcome else { return };
        if self.broken.is_none() {
            tracing::warn!("{error}; training goes on, and the log lacks what could not be written");
        }
        self.broken.get_or_insert(error.to_string());
    }

    /// `samples` were taken by all ranks before and after the step.
    pub(crate) fn step(&mut self, record: &StepRecord, samples: Samples) {
        let logged = self.log.write(record);
        self.tolerate(logged);
        // The log is the run's memory; a chart that cannot be drawn does not end the run.
        if let Err(error) = self.monitors.step(record, samples) {
            tracing::warn!("{error}");
        }
    }

    /// How sharply the loss bends in each block, where this step measured it.
    pub(crate) fn eigenvalues(&mut self, blocks: &[f64], samples: u64) {
        for (block, &value) in blocks.iter().enumerate() {
            let tag = format!("Train/Eigenvalues/ModelBlockParam_{block}");
            if let Err(error) = self.monitors.emit(&tag, value, samples) {
                tracing::warn!("{error}");
            }
        }
    }

    pub(crate) fn eval(&mut self, record: &EvalRecord, samples: u64) {
        let logged = self.eval.write(record);
        self.tolerate(logged);
        if let Err(error) = self.monitors.validation(record, samples) {
            tracing::warn!("{error}");
        }
    }

    /// Writes `report.html` from the logs.
    pub(crate) fn finish(mut self, title: &str, info: &RunInfo, summary: &Summary) -> Result<()> {
        if let Err(error) = self.monitors.flush() {
            tracing::warn!("{error}");
        }
        let mut facts = info.facts();
        facts.push(("seconds".into(), format!("{:.1}", summary.seconds)));
        write_report(&self.folder, title, &facts, summary.sample.clone())
    }
}

/// What a run keeps of its recipe and of itself.
const MAX_DOCUMENT_BYTES: u64 = 16 << 20;
/// A log of ten million steps.
const MAX_LOG_BYTES: u64 = 8 << 30;

fn write_report(
    folder: &RunFolder,
    title: &str,
    facts: &[(String, String)],
    sample: Option<String>,
) -> Result<()> {
    let mut documents = Vec::new();
    for name in ["recipe.toml", "ds_config.json"] {
        let path = folder.config().join(name);
        documents.push((
            name.to_owned(),
            ferrospeed_files::read_text(&path, MAX_DOCUMENT_BYTES).map_err(TrainError::io(&path))?,
        ));
    }
    documents.extend(sample.map(|sample| ("sample".to_owned(), sample)));
    let page = render(&Report {
        title,
        steps: &read_json_lines(&folder.log())?,
        evals: &read_json_lines(&folder.eval())?,
        facts,
        documents: &documents,
    });
    std::fs::write(folder.report(), page).map_err(TrainError::io(folder.report()))
}

/// The report of a run that failed, from what it had written, and the note that it did. Whoever started the run calls it.
pub fn report_failure(folder: &RunFolder, title: &str, why: &str) {
    folder.note_failure(why);
    let about = ferrospeed_files::read(folder.about(), MAX_DOCUMENT_BYTES)
        .ok()
        .and_then(|text| serde_json::from_slice(&text).ok());
    let about: Value = about.unwrap_or(Value::Null);
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let facts =
        about["facts"].as_object().into_iter().flatten().map(|(name, value)| (name.clone(), text(value)));
    let facts: Vec<_> = std::iter::once(("failed".to_owned(), why.to_owned())).chain(facts).collect();
    if folder.log().exists()
        && let Err(error) = write_report(folder, title, &facts, None)
    {
        tracing::warn!("no report of the failed run: {error}");
    }
}

/// The monitors that the ds_config asks for, in the places it names: relative to the folder the command is run in, as
/// DeepSpeed has it. Nothing is sent to Weights & Biases: what it would be told is kept in the run's folder.
fn add_configured(monitors: &mut Monitors, config: &Config, folder: &RunFolder) -> Result<()> {
    if let Some(board) = &config.monitors.tensorboard {
        monitors.add(TensorBoard::create(Path::new(&board.output_path), &board.job_name)?);
    }
    if let Some(csv) = &config.monitors.csv_monitor {
        monitors.add(CsvMonitor::create(Path::new(&csv.output_path), &csv.job_name)?);
    }
    if let Some(wandb) = &config.monitors.wandb {
        let (project, group, team) = (wandb.project.clone(), wandb.group.clone(), wandb.team.clone());
        let name = folder.path().file_name().map(|name| name.to_string_lossy().into_owned());
        monitors.add(WandbOffline::create(&folder.wandb(), &WandbRun { project, group, team, name })?);
    }
    Ok(())
}

/// Drops the lines of later steps, and a last one that was never finished. The new file takes the old one's place whole.
fn keep_steps(path: &Path, last: u64) -> Result<()> {
    #[derive(serde::Deserialize)]
    struct Step {
        step: u64,
    }
    let text = ferrospeed_files::read_text(path, MAX_LOG_BYTES).map_err(TrainError::io(path))?;
    let mut kept = String::with_capacity(text.len());
    for line in text.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
        let step: Step = serde_json::from_str(line).map_err(|error| TrainError::io(path)(error.into()))?;
        if step.step <= last {
            kept.push_str(line);
        }
    }
    let beside = path.with_extension("jsonl.partial");
    std::fs::write(&beside, kept).map_err(TrainError::io(&beside))?;
    std::fs::rename(&beside, path).map_err(TrainError::io(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_goes_on_after_the_step_that_was_saved() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.jsonl");
        let line = |step: u64| format!("{{\"step\":{step},\"loss\":0.1}}\n");
        std::fs::write(&path, format!("{}{}{}{{\"step\":4,\"lo", line(1), line(2), line(3))).unwrap();
        keep_steps(&path, 2).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), format!("{}{}", line(1), line(2)));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);

        std::fs::write(&path, "not a record\n").unwrap();
        let error = keep_steps(&path, 2).unwrap_err().to_string();
        assert!(error.contains("log.jsonl"), "{error}");
    }
}
