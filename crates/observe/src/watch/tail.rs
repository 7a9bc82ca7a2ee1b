//! A log that is read as it grows.

use std::io::{BufRead, BufReader, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

use crate::record::{EvalRecord, StepRecord};

/// More records than this are thinned out: one of two neighbours goes, and it is not one that stands out.
const MOST_RECORDS: usize = 1 << 16;
/// A longer line is none of ours.
const LONGEST_LINE_BYTES: u64 = 1 << 20;

/// The records of a log so far. A log that is replaced (a run that goes on from a checkpoint does that) is read anew.
#[derive(Debug)]
pub(super) struct Tail<T> {
    path: PathBuf,
    /// Which file was read, and how far.
    file: Option<(u64, u64)>,
    offset: u64,
    records: Vec<T>,
    /// Whether a line was passed over that is no record.
    has_bad_lines: bool,
    /// Why it could not be read.
    failure: Option<String>,
}

/// What may be left out of a long log.
pub(super) trait Logged {
    /// Whether it must not be left out for a neighbour: a spike, a step that was skipped.
    fn stands_out_from(&self, other: &Self) -> bool;

    /// Takes over what few records tell from a neighbour that is left out.
    fn inherit(&mut self, _left_out: Self)
    where
        Self: Sized,
    {
    }
}

/// A loss that is a tenth larger, or no number.
fn jumps(loss: f32, other: f32) -> bool {
    !loss.is_finite() || loss - other > 0.1 * other.abs()
}

impl Logged for StepRecord {
    fn stands_out_from(&self, other: &StepRecord) -> bool {
        let jumped = |loss| other.measured_loss().is_none_or(|other| jumps(loss, other));
        self.skipped || self.measured_loss().is_some_and(jumped)
    }

    fn inherit(&mut self, left_out: StepRecord) {
        if self.rank_memory_bytes.is_empty() {
            self.rank_memory_bytes = left_out.rank_memory_bytes;
        }
        if self.layer_norms.is_empty() {
            self.layer_norms = left_out.layer_norms;
        }
    }
}

impl Logged for EvalRecord {
    fn stands_out_from(&self, other: &EvalRecord) -> bool {
        jumps(self.loss, other.loss)
    }
}

/// The first of every two, or the second where it stands out.
fn thinned<T: Logged>(records: Vec<T>) -> Vec<T> {
    let mut rest = records.into_iter();
    let mut kept = Vec::with_capacity(MOST_RECORDS);
    while let Some(mut stays) = rest.next() {
        if let Some(mut goes) = rest.next() {
            if goes.stands_out_from(&stays) {
                std::mem::swap(&mut stays, &mut goes);
            }
            stays.inherit(goes);
        }
        kept.push(stays);
    }
    kept
}

impl<T: DeserializeOwned + Logged> Tail<T> {
    pub(super) fn new(path: &Path) -> Tail<T> {
        let (path, records) = (path.to_path_buf(), Vec::new());
        Tail { path, file: None, offset: 0, records, has_bad_lines: false, failure: None }
    }

    /// Reads what was added. A file that is not there has no records; a line that is no record is passed over, for a
    /// page that shows the others is worth more than none.
    pub(super) fn refresh(&mut self) {
        self.failure = self.read_on().err().map(|error| error.to_string());
        if self.failure.is_some() {
            self.begin_anew(None);
        }
    }

    /// What was read.
    pub(super) fn records(&self) -> &[T] {
        &self.records
    }

    /// Why there are no records, where there should be some.
    pub(super) fn problem(&self) -> Option<String> {
        let unreadable = self.has_bad_lines.then(|| "none of its lines can be read".to_owned());
        let why = self.failure.clone().or(unreadable.filter(|_| self.records.is_empty()))?;
        Some(format!("{}: {why}", self.path.file_name().unwrap_or_default().to_string_lossy()))
    }

    fn begin_anew(&mut self, file: Option<(u64, u64)>) {
        (self.file, self.offset, self.has_bad_lines) = (file, 0, false);
        self.records.clear();
    }

    fn read_on(&mut self) -> std::io::Result<()> {
        let file = ferrospeed_files::open(&self.path)?;
        let about = file.metadata()?;
        let identity = (about.dev(), about.ino());
        if self.file != Some(identity) || about.len() < self.offset {
            self.begin_anew(Some(identity));
        }
        let mut reader = BufReader::with_capacity(1 << 16, file);
        reader.seek(SeekFrom::Start(self.offset))?;
        let mut line = Vec::new();
        loop {
            line.clear();
            let read = std::io::Read::take(&mut reader, LONGEST_LINE_BYTES).read_until(b'\n', &mut line)?;
            // A line without an end is still being written.
            if read == 0 || (line.last() != Some(&b'\n') && (read as u64) < LONGEST_LINE_BYTES) {
                return Ok(());
            }
            self.offset += read as u64;
            match serde_json::from_slice(&line) {
                Ok(record) => self.records.push(record),
                Err(_) => self.has_bad_lines = true,
            }
            if self.records.len() > MOST_RECORDS {
                self.records = thinned(std::mem::take(&mut self.records));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(tail: &mut Tail<EvalRecord>) -> Vec<u64> {
        tail.refresh();
        tail.records().iter().map(|record| record.step).collect()
    }

    fn line(step: u64) -> String {
        format!("{{\"step\":{step},\"loss\":1.5,\"tokens\":1}}\n")
    }

    #[test]
    fn a_log_is_followed_through_growth_replacement_and_loss() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("eval.jsonl");
        let mut tail = Tail::new(&path);
        assert!(steps(&mut tail).is_empty());
        std::fs::write(&path, line(1) + "{\"step\":2,").unwrap();
        assert_eq!(steps(&mut tail), [1]);
        std::fs::write(&path, line(1) + &line(2) + "not a record\n" + &line(3)).unwrap();
        assert_eq!(steps(&mut tail), [1, 2, 3]);
        let beside = folder.path().join("other");
        std::fs::write(&beside, line(1) + &line(7)).unwrap();
        std::fs::rename(&beside, &path).unwrap();
        assert_eq!(steps(&mut tail), [1, 7]);
        std::fs::remove_file(&path).unwrap();
        assert!(steps(&mut tail).is_empty());
    }

    #[test]
    fn what_few_records_tell_outlives_them() {
        let record = |step: u64| StepRecord { step, ..StepRecord::default() };
        let mut records: Vec<StepRecord> = (0..8).map(record).collect();
        records[1].rank_memory_bytes = vec![Default::default()];
        records[2].layer_norms = vec![("a".to_owned(), 1.0)];
        records[3].skipped = true;
        let kept = thinned(thinned(records));
        assert_eq!(kept.iter().map(|record| record.step).collect::<Vec<_>>(), [3, 4]);
        assert_eq!((kept[0].rank_memory_bytes.len(), kept[0].layer_norms.len()), (1, 1));
    }

    #[test]
    fn a_long_log_is_thinned_and_a_giant_line_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("eval.jsonl");
        let mut text: String = (0..MOST_RECORDS as u64 + 1).map(line).collect();
        text += &"x".repeat(3 << 20);
        text += "\n";
        text += &line(99);
        std::fs::write(&path, text).unwrap();
        let found = steps(&mut Tail::new(&path));
        assert!(found.len() < MOST_RECORDS, "{}", found.len());
        assert_eq!(found.last(), Some(&99));
    }
}
