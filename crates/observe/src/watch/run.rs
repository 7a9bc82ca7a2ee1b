//! One run's folder as the page gets it.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::Serialize;
use serde_json::{Value, json};

use super::ranks;
use super::tail::Tail;
use crate::record::{EvalRecord, StepRecord};
use crate::report::layers::{self, Layers};
use crate::report::series::{Curve, Merge, Point, shorten_rows};
use crate::report::{spikes, summary};
use crate::routing::RoutingSummary;

/// A run that wrote nothing for this long, and for this many of its steps, is silent.
const SILENT_AFTER_S: f64 = 30.0;
const SILENT_AFTER_STEPS: f64 = 20.0;
/// More of a text is not shown.
const LONGEST_DOCUMENT_BYTES: usize = 256 << 10;
/// A description of a run is not read when it is larger.
const LONGEST_JSON_BYTES: u64 = 16 << 20;
/// More marks than this cannot be told apart.
const MOST_MARKS: usize = 200;
/// More layers than this are no rows of a picture.
const MOST_LAYERS: usize = 64;

/// How a run stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum State {
    /// There is no step yet.
    Starting,
    /// Steps come.
    Running,
    /// None came for long: it was stopped hard, or it hangs.
    Silent,
    /// It took its last step.
    Finished,
    /// Somebody asked it to stop before.
    Stopped,
    /// It ended with an error.
    Failed,
}

/// A run that is watched.
#[derive(Debug)]
pub(super) struct WatchedRun {
    folder: PathBuf,
    steps: Tail<StepRecord>,
    evals: Tail<EvalRecord>,
}

impl WatchedRun {
    pub(super) fn new(folder: &Path) -> WatchedRun {
        WatchedRun {
            folder: folder.to_path_buf(),
            steps: Tail::new(&folder.join("log.jsonl")),
            evals: Tail::new(&folder.join("eval.jsonl")),
        }
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Everything the page shows of it.
    pub(super) fn describe(&mut self) -> Value {
        self.steps.refresh();
        let log_problem = self.steps.problem();
        // Of several records of one step (after a resume) the last counts.
        let steps: BTreeMap<u64, &StepRecord> =
            self.steps.records().iter().map(|record| (record.step, record)).collect();
        let steps: Vec<&StepRecord> = steps.into_values().collect();
        self.evals.refresh();
        let evals: BTreeMap<u64, &EvalRecord> =
            self.evals.records().iter().map(|record| (record.step, record)).collect();
        let evals: Vec<&EvalRecord> = evals.into_values().collect();
        let outcome = json(&self.folder.join("outcome.json")).unwrap_or(Value::Null);
        let (state, idle_s) = state(&self.folder, &outcome, &steps);
        let about = json(&self.folder.join("config/run.json")).unwrap_or(Value::Null);
        let name = self.folder.file_name().map(|name| name.to_string_lossy().into_owned());
        let tiles = summary::tiles(&steps, &evals);
        let tiles: Vec<Value> = tiles
            .iter()
            .map(|tile| json!({"name": tile.name, "value": tile.value, "remark": tile.remark}))
            .collect();
        let documents: Vec<(&str, String)> = ["config/recipe.toml", "config/ds_config.json", "sample.txt"]
            .iter()
            .filter_map(|&name| Some((name, text(&self.folder.join(name))?)))
            .collect();
        json!({
            "name": name.unwrap_or_else(|| self.folder.display().to_string()),
            "path": self.folder.display().to_string(),
            "state": state,
            "why": (state == State::Failed).then(|| outcome["why"].as_str().unwrap_or_default()),
            // A run that is starting has none yet.
            "log_problem": log_problem.filter(|_| state != State::Starting),
            // Only where it says something: an answer that changes is drawn again.
            "idle_s": idle_s.filter(|_| state == State::Silent).map(f64::round),
            "step": steps.last().map(|record| record.step).or(outcome["step"].as_u64()),
            "steps_planned": about["steps"],
            "eta_s": eta_s(&steps, about["steps"].as_u64(), state),
            "tiles": tiles,
            "curves": {
                "loss": curve(&steps, |record| record.measured_loss().map(f64::from)),
                "validation": points(evals.iter().map(|record| (record.step as f64, f64::from(record.loss))).collect()),
                "lr": curve(&steps, |record| Some(record.lr)),
                "tokens_per_s": curve(&steps, |record| Some(record.tokens_per_s)),
                "grad_norm": curve(&steps, |record| record.grad_norm),
                "entropy": curve(&steps, |record| Some(RoutingSummary::of(&record.routing)?.entropy)),
                "imbalance": curve(&steps, |record| Some(RoutingSummary::of(&record.routing)?.imbalance)),
                "dropped": curve(&steps, |record| Some(RoutingSummary::of(&record.routing)?.dropped_share)),
            },
            "routing": steps.iter().rev().find(|record| !record.routing.is_empty()).map(|record| &record.routing),
            "skipped": steps.iter().filter(|record| record.skipped).map(|record| record.step)
                .take(MOST_MARKS).collect::<Vec<_>>(),
            "memory": shortened(&layers::memory(&steps), Merge::Highest),
            "times": shortened(&layers::times(&steps), Merge::Mean),
            "spikes": spikes::of(&steps).into_iter().take(MOST_MARKS).collect::<Vec<_>>(),
            "ranks": ranks::recent(&steps),
            "timeline": ranks::timeline(&steps),
            "waits": ranks::waits(&steps),
            "rank_memory": ranks::memory(&steps),
            "layer_norms": layer_norms(&steps),
            "expected": about["expected"],
            "facts": about["facts"],
            "recipe": about["recipe"],
            "ds_config": json(&self.folder.join("config/ds_config.json")),
            "documents": documents,
        })
    }
}

/// The norms of layers' gradients: the layers, and a row per step in which they were taken. Layers beyond what can be told
/// apart are left out, those in the middle first.
fn layer_norms(steps: &[&StepRecord]) -> Value {
    let taken: Vec<&StepRecord> =
        steps.iter().copied().filter(|record| !record.layer_norms.is_empty()).collect();
    let Some(last) = taken.last() else { return Value::Null };
    let names: Vec<&str> = last.layer_norms.iter().map(|(name, _)| name.as_str()).collect();
    let is_shown = |index: usize| index < MOST_LAYERS / 2 || index + MOST_LAYERS / 2 >= names.len();
    let row = |record: &&StepRecord| {
        let norms = record.layer_norms.iter().enumerate().filter(|(index, _)| is_shown(*index));
        (record.step as f64, norms.map(|(_, (_, norm))| *norm).collect::<Vec<f64>>())
    };
    let rows: Vec<(f64, Vec<f64>)> =
        taken.iter().filter(|record| record.layer_norms.len() == names.len()).map(row).collect();
    let shown: Vec<&str> =
        names.iter().enumerate().filter(|(index, _)| is_shown(*index)).map(|(_, name)| *name).collect();
    json!({ "names": shown, "of": names.len(), "rows": shorten_rows(&rows, Merge::Highest) })
}

fn text(path: &Path) -> Option<String> {
    let file = ferrospeed_files::open(path).ok()?;
    let mut bytes = Vec::new();
    file.take(LONGEST_DOCUMENT_BYTES as u64 + 1).read_to_end(&mut bytes).ok()?;
    let cut = bytes.len() > LONGEST_DOCUMENT_BYTES;
    bytes.truncate(LONGEST_DOCUMENT_BYTES);
    Some(String::from_utf8_lossy(&bytes).into_owned() + if cut { "\n…" } else { "" })
}

fn json(path: &Path) -> Option<Value> {
    serde_json::from_slice(&ferrospeed_files::read(path, LONGEST_JSON_BYTES).ok()?).ok()
}

/// How a run stands, from what it wrote down at its end; one that did not, or an earlier version, is judged by its files.
fn state(folder: &Path, outcome: &Value, steps: &[&StepRecord]) -> (State, Option<f64>) {
    match outcome["state"].as_str() {
        Some("failed") => return (State::Failed, None),
        Some("stopped") => return (State::Stopped, None),
        Some("finished") => return (State::Finished, None),
        _ => {}
    }
    let modified = |name: &str| fs::metadata(folder.join(name)).and_then(|about| about.modified()).ok();
    let report = modified("report.html");
    let Some(log) = modified("log.jsonl") else {
        return (if report.is_some() { State::Finished } else { State::Starting }, None);
    };
    let idle_s = SystemTime::now().duration_since(log).map_or(0.0, |idle| idle.as_secs_f64());
    // A report that is older than the log is that of an earlier run in this folder.
    if report.is_some_and(|report| report >= log) {
        return (State::Finished, Some(idle_s));
    }
    let patience_s = steps
        .last()
        .map_or(SILENT_AFTER_S * 10.0, |last| SILENT_AFTER_S.max(SILENT_AFTER_STEPS * last.step_ms / 1e3));
    let state = match (idle_s > patience_s, steps.is_empty()) {
        (true, _) => State::Silent,
        (false, true) => State::Starting,
        (false, false) => State::Running,
    };
    (state, Some(idle_s))
}

fn eta_s(steps: &[&StepRecord], planned: Option<u64>, state: State) -> Option<f64> {
    let last = steps.last()?;
    let recent = &steps[steps.len().saturating_sub(20)..];
    let mean_s = recent.iter().map(|record| record.step_ms / 1e3).sum::<f64>() / recent.len() as f64;
    let left = planned?.checked_sub(last.step)? as f64 * mean_s;
    (state == State::Running && left.is_finite()).then_some(left.round())
}

fn curve(steps: &[&StepRecord], value: fn(&StepRecord) -> Option<f64>) -> Value {
    points(steps.iter().filter_map(|record| Some((record.step as f64, value(record)?))).collect())
}

/// Points that are worth drawing, `null` where a curve breaks.
fn points(points: Vec<Point>) -> Value {
    let curve = Curve::new(&points);
    let mut shown: Vec<(f64, Option<f64>)> = curve.points().map(|&(x, y)| (x, Some(y))).collect();
    shown.extend(curve.broken_at.iter().take(MOST_MARKS).map(|&x| (x, None)));
    shown.sort_by(|a, b| a.0.total_cmp(&b.0));
    json!(shown)
}

fn shortened(layers: &Layers<'_>, merge: Merge) -> Value {
    json!({
        "names": layers.names,
        "rows": shorten_rows(&layers.rows, merge),
        "totals": points(layers.totals.clone()),
    })
}
