//! A run for Weights & Biases, kept on disk until somebody uploads it with `wandb sync`.
//!
//! Nothing here talks to a network. [`WandbOffline`] writes the folder that `wandb` itself writes in offline mode:
//! `OUTPUT/offline-run-DATE_TIME-ID/run-ID.wandb`, a file of protocol-buffer records (version, run, one history record
//! per position, a summary, the end). `wandb sync OUTPUT/offline-run-*` uploads it.
//!
//! Values of one position are one row there, so a row is written when the next position begins, or at the end. Each
//! process makes a run of its own, as each call of `wandb.init` does.

mod log;

use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::{Path, PathBuf};

use crate::calendar::civil_date;
use crate::error::{ObserveError, Result};
use crate::monitor::wire::{put_bytes, put_number};
use crate::monitor::{Monitor, unix_time_s};
use log::RunFile;

/// The oldest `wandb` that can read what is written, as its own files say.
const MIN_CONSUMER: &str = "0.70.0";

/// What `wandb.init` would be told.
#[derive(Debug, Clone, Default)]
pub struct WandbRun {
    /// The project.
    pub project: String,
    /// The group of runs, if any.
    pub group: Option<String>,
    /// The team (entity), if any.
    pub team: Option<String>,
}

/// Keeps a run for Weights & Biases on disk.
#[derive(Debug)]
pub struct WandbOffline {
    folder: PathBuf,
    path: PathBuf,
    file: RunFile,
    records: u64,
    started_unix_s: f64,
    /// The row that is not yet written.
    row: Option<Row>,
    /// The last value of every tag.
    summary: BTreeMap<String, String>,
    has_ended: bool,
}

#[derive(Debug)]
struct Row {
    step: u64,
    time_unix_s: f64,
    values: BTreeMap<String, String>,
}

impl WandbOffline {
    /// Makes a folder for this run inside `output_path`.
    pub fn create(output_path: &Path, run: &WandbRun) -> Result<WandbOffline> {
        let started_unix_s = unix_time_s();
        let id = random_id();
        let folder = output_path.join(format!("offline-run-{}-{id}", stamp(started_unix_s as u64)));
        let files = folder.join("files");
        ferrospeed_files::create_folder(&files).map_err(ObserveError::io(&files))?;
        let path = folder.join(format!("run-{id}.wandb"));
        let file = RunFile::create(&path).map_err(ObserveError::io(&path))?;
        let (row, summary) = (None, BTreeMap::new());
        let (records, has_ended) = (0, false);
        let mut monitor =
            WandbOffline { folder, path, file, records, started_unix_s, row, summary, has_ended };

        let mut version = Vec::new();
        put_bytes(&mut version, 1, concat!("ferrospeed ", env!("CARGO_PKG_VERSION")).as_bytes());
        put_bytes(&mut version, 2, MIN_CONSUMER.as_bytes());
        let mut header = Vec::new();
        put_bytes(&mut header, 1, &version);
        monitor.append(field::HEADER, &header)?;

        let mut about = Vec::new();
        put_bytes(&mut about, 1, id.as_bytes());
        for (number, text) in [(2, &run.team), (3, &Some(run.project.clone())), (6, &run.group)] {
            if let Some(text) = text {
                put_bytes(&mut about, number, text.as_bytes());
            }
        }
        let mut start = Vec::new();
        put_number(&mut start, 1, started_unix_s as u64);
        put_number(&mut start, 2, (started_unix_s.fract() * 1e9) as u64);
        put_bytes(&mut about, 17, &start);
        monitor.append(field::RUN, &about)?;
        Ok(monitor)
    }

    /// The folder of this run.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    fn append(&mut self, kind: u64, message: &[u8]) -> Result<()> {
        let mut record = Vec::with_capacity(message.len() + 16);
        put_number(&mut record, 1, self.records + 1);
        put_bytes(&mut record, kind, message);
        self.file.append(&record).map_err(ObserveError::io(&self.path))?;
        self.records += 1;
        Ok(())
    }

    fn write_row(&mut self) -> Result<()> {
        let Some(row) = self.row.take() else { return Ok(()) };
        let runtime_s = row.time_unix_s - self.started_unix_s;
        let mut values = row.values;
        self.summary.extend(values.clone());
        values.insert("_step".into(), row.step.to_string());
        values.insert("_timestamp".into(), number(row.time_unix_s));
        values.insert("_runtime".into(), number(runtime_s));
        let mut history = items(&values);
        let mut step = Vec::new();
        put_number(&mut step, 1, row.step);
        put_bytes(&mut history, 2, &step);
        self.append(field::HISTORY, &history)
    }
}

/// Fields of a record, by what it is about.
mod field {
    pub(super) const HISTORY: u64 = 2;
    pub(super) const SUMMARY: u64 = 3;
    pub(super) const RUN: u64 = 17;
    pub(super) const EXIT: u64 = 18;
    pub(super) const HEADER: u64 = 21;
}

impl Monitor for WandbOffline {
    fn write(&mut self, tag: &str, value: f64, step: u64) -> Result<()> {
        let is_next = self.row.as_ref().is_some_and(|row| row.step != step);
        let written = if is_next { self.write_row() } else { Ok(()) };
        let row =
            self.row.get_or_insert_with(|| Row { step, time_unix_s: unix_time_s(), values: BTreeMap::new() });
        row.values.insert(tag.to_owned(), number(value));
        written
    }

    /// Whole rows go to the file as they end; the last one waits for its other values.
    fn flush(&mut self) -> Result<()> {
        Ok(())
    }

    /// The last row, the summary and the end of the run.
    fn finish(&mut self) -> Result<()> {
        self.has_ended = true;
        let row = self.write_row();
        let summary = items(&self.summary);
        let summary = self.append(field::SUMMARY, &summary);
        let mut exit = Vec::new();
        put_number(&mut exit, 2, (unix_time_s() - self.started_unix_s).max(0.0) as u64);
        row.and(summary).and(self.append(field::EXIT, &exit))
    }
}

impl Drop for WandbOffline {
    /// The run ends with its process. Who wants to know whether all of it is written calls `finish`.
    fn drop(&mut self) {
        if !self.has_ended {
            let _ = self.finish();
        }
    }
}

/// `repeated Item { repeated string nested_key = 2; string value_json = 16; }` as field 1.
fn items(values: &BTreeMap<String, String>) -> Vec<u8> {
    let mut out = Vec::new();
    for (key, value) in values {
        let mut item = Vec::new();
        put_bytes(&mut item, 2, key.as_bytes());
        put_bytes(&mut item, 16, value.as_bytes());
        put_bytes(&mut out, 1, &item);
    }
    out
}

/// A number as `wandb` writes it: JSON, and the three that JSON lacks.
fn number(value: f64) -> String {
    match value {
        value if value.is_nan() => "NaN".into(),
        value if value.is_infinite() => if value > 0.0 { "Infinity" } else { "-Infinity" }.into(),
        value => format!("{value:?}"),
    }
}

/// Eight letters and digits that no other run has.
fn random_id() -> String {
    let mut number = RandomState::new().build_hasher().finish();
    let digit = |_| {
        let digit = b"abcdefghijklmnopqrstuvwxyz0123456789"[(number % 36) as usize];
        number /= 36;
        char::from(digit)
    };
    (0..8).map(digit).collect()
}

/// `20240131_235959`, in UTC.
fn stamp(unix_s: u64) -> String {
    let (days, second) = (unix_s / 86_400, unix_s % 86_400);
    let (year, month, day) = civil_date(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}{month:02}{day:02}_{hour:02}{minute:02}{second:02}")
}

/// The records in the file of a run's folder.
#[cfg(test)]
pub(super) fn records_of(folder: &Path) -> Vec<Vec<u8>> {
    let paths = folder.read_dir().unwrap().map(|entry| entry.unwrap().path());
    let path = paths.into_iter().find(|path| path.extension().is_some_and(|end| end == "wandb")).unwrap();
    log::read(&std::fs::read(path).unwrap())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run() -> WandbRun {
        WandbRun { project: "deepspeed".into(), group: None, team: Some("t".into()) }
    }

    fn records(monitor: WandbOffline) -> Vec<Vec<u8>> {
        let folder = monitor.folder().to_path_buf();
        drop(monitor);
        records_of(&folder)
    }

    fn contains(record: &[u8], text: &str) -> bool {
        record.windows(text.len()).any(|window| window == text.as_bytes())
    }

    #[test]
    fn a_run_has_a_version_itself_a_row_per_position_a_summary_and_an_end() {
        let folder = tempfile::tempdir().unwrap();
        let mut wandb = WandbOffline::create(folder.path(), &run()).unwrap();
        for (tag, value, step) in [("lr", 0.1, 8), ("loss", f64::NAN, 8), ("lr", 0.2, 16)] {
            wandb.write(tag, value, step).unwrap();
        }
        let name = wandb.folder().file_name().unwrap().to_str().unwrap().to_owned();
        assert!(
            name.starts_with("offline-run-2") && name.len() == "offline-run-20240131_235959-abcdefgh".len()
        );
        let found = records(wandb);
        assert_eq!(found.len(), 6);
        // A byte of key and one of number, then the kind's key, in a varint of one or two bytes.
        let kind = |record: &Vec<u8>| {
            let low = u64::from(record[2] & 0x7f);
            let high = if record[2] < 0x80 { 0 } else { u64::from(record[3]) };
            (low | (high << 7)) >> 3
        };
        let kinds: Vec<u64> = found.iter().map(kind).collect();
        assert_eq!(
            kinds,
            [field::HEADER, field::RUN, field::HISTORY, field::HISTORY, field::SUMMARY, field::EXIT]
        );
        assert!(contains(&found[1], "deepspeed") && contains(&found[1], &name[name.len() - 8..]));
        assert!(contains(&found[2], "NaN") && contains(&found[2], "0.1") && !contains(&found[2], "0.2"));
        assert!(contains(&found[3], "0.2") && contains(&found[4], "0.2") && contains(&found[4], "NaN"));
    }

    #[test]
    fn days_are_those_of_the_calendar() {
        assert_eq!(stamp(0), "19700101_000000");
        assert_eq!(stamp(951_782_400 + 86_399), "20000229_235959");
        assert_eq!(stamp(1_706_745_599), "20240131_235959");
    }

    #[test]
    fn two_runs_in_one_second_do_not_share_a_folder() {
        let folder = tempfile::tempdir().unwrap();
        let first = WandbOffline::create(folder.path(), &run()).unwrap();
        let second = WandbOffline::create(folder.path(), &run()).unwrap();
        assert_ne!(first.folder(), second.folder());
    }
}
