//! A run for Weights & Biases, kept on disk until somebody uploads it.
//!
//! This is **not** the binary file that `wandb sync` reads, and nothing here talks to a network. It is a folder of
//! two plain files that hold all that `wandb.init` and `wandb.log` would have been told:
//!
//! - `metadata.json`: `format` (`"ferrospeed-wandb-offline"`), `version` (1), `project`, `group`, `team`, `name`
//!   (`null` where there is none), `started_unix_s`.
//! - `history.jsonl`: one line per value, in order: `{"tag": "Train/Samples/lr", "value": 0.1, "step": 8,
//!   "time_unix_s": 1700000000.5}`. JSON has no such numbers, so a value may also be `"NaN"`, `"Infinity"` or
//!   `"-Infinity"`.
//!
//! Uploading it takes a few lines of Python, on a machine that has `wandb` and a network:
//!
//! ```python
//! import json, sys, wandb
//! folder = sys.argv[1]
//! about = json.load(open(f"{folder}/metadata.json"))
//! run = wandb.init(project=about["project"], group=about["group"], entity=about["team"], name=about["name"])
//! for line in open(f"{folder}/history.jsonl"):
//!     row = json.loads(line)
//!     run.log({row["tag"]: float(row["value"])}, step=row["step"])
//! run.finish()
//! ```
//!
//! Each process makes a folder of its own, as each call of `wandb.init` makes a run of its own.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::error::{ObserveError, Result};
use crate::log::JsonLines;
use crate::monitor::{Monitor, unix_time_s};

/// What `wandb.init` would be told.
#[derive(Debug, Clone, Serialize)]
pub struct WandbRun {
    /// The project.
    pub project: String,
    /// The group of runs, if any.
    pub group: Option<String>,
    /// The team (entity), if any.
    pub team: Option<String>,
    /// The name of the run, if it has one.
    pub name: Option<String>,
}

#[derive(Serialize)]
struct Metadata<'a> {
    format: &'static str,
    version: u32,
    #[serde(flatten)]
    run: &'a WandbRun,
    started_unix_s: f64,
}

#[derive(Serialize)]
struct Row<'a> {
    tag: &'a str,
    value: Value,
    step: u64,
    time_unix_s: f64,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Value {
    Finite(f64),
    NotFinite(&'static str),
}

/// Keeps a run for Weights & Biases on disk.
#[derive(Debug)]
pub struct WandbOffline {
    folder: PathBuf,
    history: JsonLines,
}

impl WandbOffline {
    /// Makes a folder for this run inside `output_path`.
    pub fn create(output_path: &Path, run: &WandbRun) -> Result<WandbOffline> {
        let folder = new_folder(output_path)?;
        let about =
            Metadata { format: "ferrospeed-wandb-offline", version: 1, run, started_unix_s: unix_time_s() };
        let path = folder.join("metadata.json");
        let text =
            serde_json::to_string_pretty(&about).map_err(|error| ObserveError::io(&path)(error.into()))?;
        fs::write(&path, text + "\n").map_err(ObserveError::io(&path))?;
        let history = JsonLines::create(&folder.join("history.jsonl"))?;
        Ok(WandbOffline { folder, history })
    }

    /// The folder of this run.
    pub fn folder(&self) -> &Path {
        &self.folder
    }
}

impl Monitor for WandbOffline {
    fn write(&mut self, tag: &str, value: f64, step: u64) -> Result<()> {
        let value = match value {
            value if value.is_finite() => Value::Finite(value),
            value if value.is_nan() => Value::NotFinite("NaN"),
            value if value > 0.0 => Value::NotFinite("Infinity"),
            _ => Value::NotFinite("-Infinity"),
        };
        self.history.write(&Row { tag, value, step, time_unix_s: unix_time_s() })
    }

    /// Lines go to the file as they are written: nothing is held back.
    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}

/// `output_path/ferrospeed-run-SECONDS-PID-N`, with the first N that is free.
fn new_folder(output_path: &Path) -> Result<PathBuf> {
    fs::create_dir_all(output_path).map_err(ObserveError::io(output_path))?;
    let (second, process) = (unix_time_s() as u64, std::process::id());
    let mut attempt = 0;
    loop {
        let folder = output_path.join(format!("ferrospeed-run-{second}-{process}-{attempt}"));
        match fs::create_dir(&folder) {
            Ok(()) => return Ok(folder),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => attempt += 1,
            Err(source) => return Err(ObserveError::Io { path: folder, source }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::read_json_lines;

    fn run() -> WandbRun {
        WandbRun { project: "deepspeed".into(), group: None, team: Some("t".into()), name: None }
    }

    #[test]
    fn metadata_and_history_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let mut wandb = WandbOffline::create(folder.path(), &run()).unwrap();
        for (value, step) in [(0.1, 8), (f64::NAN, 16), (f64::NEG_INFINITY, 24)] {
            wandb.write("Train/\"x\"\n", value, step).unwrap();
        }
        let text = fs::read_to_string(wandb.folder().join("metadata.json")).unwrap();
        let about: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(about["format"], "ferrospeed-wandb-offline");
        assert_eq!(about["project"], "deepspeed");
        assert_eq!(about["team"], "t");
        assert!(about["group"].is_null());
        let rows: Vec<serde_json::Value> = read_json_lines(&wandb.folder().join("history.jsonl")).unwrap();
        let values: Vec<_> = rows.iter().map(|row| row["value"].clone()).collect();
        assert_eq!(values, [serde_json::json!(0.1), "NaN".into(), "-Infinity".into()]);
        assert!(rows.iter().all(|row| row["tag"] == "Train/\"x\"\n"));
        assert_eq!(rows[1]["step"], 16);
    }

    #[test]
    fn two_runs_in_one_second_do_not_share_a_folder() {
        let folder = tempfile::tempdir().unwrap();
        let first = WandbOffline::create(folder.path(), &run()).unwrap();
        let second = WandbOffline::create(folder.path(), &run()).unwrap();
        assert_ne!(first.folder(), second.folder());
    }
}
