//! The flight recorder: the last operations of a rank, kept for the moment when something goes wrong.
//!
//! It costs a few dozen nanoseconds per operation and a fixed amount of memory. [`Recorder::dump`] writes it as JSON
//! lines, one file per rank; [`trace`](crate::trace) reads a folder of them and says who never entered what.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::backend::Ticket;
use crate::error::{Error, Result};
use crate::op::Kind;
use crate::private;

/// Operations that a recorder keeps.
pub const CAPACITY: usize = 1000;

/// How far an operation came.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Progress {
    /// Entered, not finished.
    Running,
    /// Finished.
    Done,
    /// Ended with an error.
    Failed,
}

/// One operation as the recorder keeps it, and as one line of a dump.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The rank, numbered in the world.
    pub rank: usize,
    /// The group's name.
    pub group: String,
    /// World ranks of the group.
    pub group_ranks: Vec<usize>,
    /// Number of the operation in its group; messages count per peer and direction.
    pub sequence: u64,
    /// What it is.
    pub kind: Kind,
    /// The peer of a message, numbered in the world.
    pub peer: Option<usize>,
    /// The operation in words, with its call site.
    pub description: String,
    /// Microseconds since 1970.
    pub started_us: u64,
    /// How long it took, once it ended.
    pub duration_us: Option<u64>,
    /// How far it came.
    pub progress: Progress,
    /// Why it failed.
    pub error: Option<String>,
}

/// The last operations of one rank.
#[derive(Debug)]
pub struct Recorder {
    rank: usize,
    records: Mutex<Records>,
}

#[derive(Debug, Default)]
struct Records {
    /// Number of the first record in `kept`.
    first: u64,
    kept: VecDeque<Entry>,
}

#[derive(Debug)]
struct Entry {
    ticket: Ticket,
    group: std::sync::Arc<str>,
    group_ranks: std::sync::Arc<[usize]>,
    peer: Option<usize>,
    duration_us: Option<u64>,
    error: Option<Error>,
}

impl Recorder {
    pub(crate) fn new(rank: usize) -> Self {
        Recorder { rank, records: Mutex::default() }
    }

    /// Notes that an operation begins; the number finds it again.
    pub(crate) fn begin(
        &self,
        ticket: &Ticket,
        group: &std::sync::Arc<str>,
        group_ranks: &std::sync::Arc<[usize]>,
        peer: Option<usize>,
    ) -> u64 {
        let entry = Entry {
            ticket: ticket.clone(),
            group: group.clone(),
            group_ranks: group_ranks.clone(),
            peer,
            duration_us: None,
            error: None,
        };
        let mut records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        if records.kept.len() == CAPACITY {
            records.kept.pop_front();
            records.first += 1;
        }
        records.kept.push_back(entry);
        records.first + records.kept.len() as u64 - 1
    }

    /// Notes how an operation ended.
    pub(crate) fn end(&self, number: u64, result: &Result<()>) {
        let mut records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        let index = number.wrapping_sub(records.first);
        if let Some(entry) = usize::try_from(index).ok().and_then(|index| records.kept.get_mut(index)) {
            entry.duration_us = Some(entry.ticket.started.elapsed().as_micros() as u64);
            entry.error = result.as_ref().err().cloned();
        }
    }

    /// The most recent operation in words.
    pub(crate) fn last(&self) -> Option<String> {
        let records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = records.kept.back()?;
        let state = if entry.duration_us.is_some() { "finished" } else { "inside" };
        Some(format!("{state} {} in group {}", entry.ticket.describe(), entry.group))
    }

    /// The operations kept, oldest first.
    pub fn records(&self) -> Vec<Record> {
        let (now, clock) = (Instant::now(), SystemTime::now());
        let records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        let of_entry = |entry: &Entry| {
            let started = clock.checked_sub(now.saturating_duration_since(entry.ticket.started));
            let since_epoch = started.and_then(|started| started.duration_since(UNIX_EPOCH).ok());
            Record {
                rank: self.rank,
                group: entry.group.to_string(),
                group_ranks: entry.group_ranks.to_vec(),
                sequence: entry.ticket.fingerprint.sequence,
                kind: entry.ticket.fingerprint.kind,
                peer: entry.peer,
                description: entry.ticket.describe(),
                started_us: since_epoch.unwrap_or_default().as_micros() as u64,
                duration_us: entry.duration_us,
                progress: match (&entry.error, entry.duration_us) {
                    (Some(_), _) => Progress::Failed,
                    (None, Some(_)) => Progress::Done,
                    (None, None) => Progress::Running,
                },
                error: entry.error.as_ref().map(ToString::to_string),
            }
        };
        records.kept.iter().map(of_entry).collect()
    }

    /// Writes `rank-N.jsonl` into `folder`, which is made if need be, and returns its path.
    pub fn dump(&self, folder: &Path) -> Result<PathBuf> {
        let path = folder.join(format!("rank-{:05}.jsonl", self.rank));
        let write = || -> std::io::Result<()> {
            make_folder(folder)?;
            let mut text = Vec::new();
            for record in self.records() {
                serde_json::to_writer(&mut text, &record)?;
                text.push(b'\n');
            }
            private::write(&path, &text)
        };
        write().map_err(|error| {
            Error::io(format!("writing the flight recorder to {}", path.display()), error)
        })?;
        Ok(path)
    }
}

/// A folder in the user's private one is made as private; one that the user named is made as any other.
fn make_folder(folder: &Path) -> std::io::Result<()> {
    match private::folder() {
        Ok(own) if folder.parent() == Some(own.as_path()) => private::make_folder(folder),
        _ => std::fs::create_dir_all(folder),
    }
}
