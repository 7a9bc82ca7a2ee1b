//! Everything rank 0 writes down while a run goes: logs, and the report at the end.

use std::path::Path;

use ferrospeed_config::Monitors;
use ferrospeed_observe::monitor::CsvMonitor;
use ferrospeed_observe::report::{Report, render};
use ferrospeed_observe::roofline::Roofline;
use ferrospeed_observe::{EvalRecord, JsonLines, StepRecord, read_json_lines};
use serde_json::{Value, json};

use crate::error::{Result, TrainError};
use crate::folder::RunFolder;
use crate::kept_log::{gaps, open_log};
use crate::recipe::Recipe;
use crate::resume::finished_step;
use crate::run::{RunInfo, Summary};

/// The files of a run that is under way.
pub(crate) struct Records {
    folder: RunFolder,
    log: JsonLines,
    eval: JsonLines,
    /// Why the logs are not complete.
    pub(crate) broken: Option<String>,
}

impl Records {
    /// New, empty files, or those of a run that goes on after `done` steps: what was logged after them, before the run
    /// was ended, is dropped. Adds to `notes` what they lack, unless the steps before were taken in another folder.
    pub(crate) fn open(
        folder: &RunFolder,
        done: Option<u64>,
        goes_on_here: bool,
        notes: &mut Vec<String>,
    ) -> Result<Records> {
        let (log, missing) = open_log(&folder.log(), done, |record: &StepRecord| record.step, notes)?;
        notes.extend(gaps(&folder.log(), &missing).filter(|_| goes_on_here));
        let (eval, _) = open_log(&folder.eval(), done, |record: &EvalRecord| record.step, notes)?;
        // How an earlier attempt ended is over.
        let _ = std::fs::remove_file(folder.outcome());
        Ok(Records { folder: folder.clone(), log, eval, broken: None })
    }

    /// Says what the run is, for those who watch it.
    pub(crate) fn started(&self, recipe: &Recipe, info: &RunInfo, expected: &Value) -> Result<()> {
        let path = self.folder.about();
        let facts: serde_json::Map<String, Value> =
            info.facts().into_iter().map(|(name, value)| (name, value.into())).collect();
        let about = json!({ "steps": info.steps, "facts": facts, "recipe": recipe, "expected": expected });
        ferrospeed_files::write(&path, format!("{about:#}\n")).map_err(TrainError::io(&path))
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

    pub(crate) fn step(&mut self, record: &StepRecord) {
        let logged = self.log.write(record);
        self.tolerate(logged);
        if self.folder.is_being_replaced() {
            self.folder.forget_replaced();
        }
    }

    /// Keeps what held modules back, for the report.
    pub(crate) fn roofline(&self, roofline: &Roofline) {
        let path = self.folder.roofline();
        let written = serde_json::to_vec(roofline).map_err(std::io::Error::from);
        if let Err(error) = written.and_then(|text| ferrospeed_files::write(&path, text)) {
            tracing::warn!("{}: {error}; the report will lack the roofline", path.display());
        }
    }

    pub(crate) fn eval(&mut self, record: &EvalRecord) {
        let logged = self.eval.write(record);
        self.tolerate(logged);
    }

    /// What the model wrote on the way. Samples from after the checkpoint that a run goes on from stay beside the new ones.
    pub(crate) fn samples(&mut self, step: u64, texts: &[String]) {
        let line = json!({ "step": step, "samples": texts }).to_string() + "\n";
        let path = self.folder.samples();
        let options = std::fs::OpenOptions::new().create(true).append(true).clone();
        let written = ferrospeed_files::open_to_write(&path, &options)
            .and_then(|mut file| std::io::Write::write_all(&mut file, line.as_bytes()));
        if let Err(error) = written {
            tracing::warn!("{}: {error}; the report will lack the samples of step {step}", path.display());
        }
    }

    /// Writes `report.html` from the logs.
    pub(crate) fn finish(self, title: &str, info: &RunInfo, summary: &Summary) -> Result<()> {
        let mut facts = info.facts();
        facts.push(("seconds".into(), format!("{:.1}", summary.seconds)));
        write_report(&self.folder, title, &facts, summary.sample.clone())
    }
}

/// Takes from the CSV curves of a run that goes on what it will write again, as from its log. Adds to `notes` what it did.
pub(crate) fn go_back_in_curves(monitors: &Monitors, samples: u64, notes: &mut Vec<String>) {
    let Some(csv) = &monitors.csv_monitor else { return };
    let folder = Path::new(&csv.output_path);
    match CsvMonitor::go_back(folder, &csv.job_name, samples, &["Train/", "Validation/"]) {
        Ok(0) => {}
        Ok(rows) => notes.push(format!(
            "{}: {rows} row{} from {} {} taken away",
            folder.join(&csv.job_name).display(),
            if rows == 1 { "" } else { "s" },
            if samples == 0 { "an attempt without a checkpoint" } else { "after the checkpoint" },
            if rows == 1 { "is" } else { "are" },
        )),
        Err(error) => notes.push(format!("{error}; steps that are taken again will be there twice")),
    }
}

/// What a run keeps of its recipe and of itself.
const MAX_DOCUMENT_BYTES: u64 = 16 << 20;

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
    documents.extend(samples_on_the_way(folder).map(|samples| ("samples on the way".to_owned(), samples)));
    documents.extend(sample.map(|sample| ("sample".to_owned(), sample)));
    // A run that was not profiled has none.
    let roofline: Option<Roofline> = ferrospeed_files::read(folder.roofline(), MAX_DOCUMENT_BYTES)
        .ok()
        .and_then(|text| serde_json::from_slice(&text).ok());
    let page = render(&Report {
        title,
        steps: &read_json_lines(&folder.log())?,
        evals: &read_json_lines(&folder.eval())?,
        facts,
        documents: &documents,
        roofline: roofline.as_ref(),
    });
    ferrospeed_files::write(folder.report(), page).map_err(TrainError::io(folder.report()))
}

/// What the model wrote while it was trained, step by step.
fn samples_on_the_way(folder: &RunFolder) -> Option<String> {
    let text = ferrospeed_files::read_text(folder.samples(), MAX_DOCUMENT_BYTES).ok()?;
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let steps = lines.map(|line| {
        let samples = line["samples"].as_array().into_iter().flatten().filter_map(Value::as_str);
        format!("step {}\n{}\n", line["step"], samples.collect::<Vec<_>>().join("\n\n"))
    });
    Some(steps.collect::<Vec<_>>().join("\n"))
}

/// The report of a run that failed, from what it had written, and the note that it did. Whoever started the run calls it. A finished
/// run whose folder was not written to yet stays what it is.
pub fn report_failure(folder: &RunFolder, title: &str, why: &str) {
    if finished_step(folder).is_some() {
        return;
    }
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
