//! JSON lines: one object per line, flushed as it is written, so that a reader beside the run sees whole lines.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{ObserveError, Result};
use crate::whole::WholeRecords;

/// A log that grows by one line at a time.
#[derive(Debug)]
pub struct JsonLines {
    path: PathBuf,
    file: WholeRecords,
}

impl JsonLines {
    /// A new, empty log.
    pub fn create(path: &Path) -> Result<JsonLines> {
        let mut log = JsonLines::append(path)?;
        log.file.cut(0).map_err(ObserveError::io(path))?;
        Ok(log)
    }

    /// A log that goes on: what is there stays.
    pub fn append(path: &Path) -> Result<JsonLines> {
        let file = WholeRecords::open(path).map_err(ObserveError::io(path))?;
        Ok(JsonLines { path: path.to_path_buf(), file })
    }

    /// Brings what was written to the disk.
    pub fn sync(&self) -> Result<()> {
        self.file.file().sync_data().map_err(ObserveError::io(&self.path))
    }

    /// Adds a record, or nothing where it does not go in whole.
    pub fn write(&mut self, record: &impl Serialize) -> Result<()> {
        let failed = ObserveError::io(&self.path);
        let mut line = serde_json::to_vec(record).map_err(|error| failed(error.into()))?;
        line.push(b'\n');
        self.file.append(&line).map_err(failed)
    }
}

/// No record comes near it.
pub(crate) const LONGEST_LINE_BYTES: u64 = 1 << 20;

/// Reads a log. A last line without an end is still being written and is passed over.
pub fn read_json_lines<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>> {
    let failed = |source| ObserveError::Io { path: path.to_path_buf(), source };
    let mut reader = BufReader::new(ferrospeed_files::open(path).map_err(failed)?);
    let mut records = Vec::new();
    let mut text = String::new();
    for line in 1.. {
        text.clear();
        let read = (&mut reader).take(LONGEST_LINE_BYTES).read_line(&mut text).map_err(failed)?;
        if read as u64 == LONGEST_LINE_BYTES {
            let why = format!("is longer than {LONGEST_LINE_BYTES} bytes");
            return Err(ObserveError::BadLine { path: path.to_path_buf(), line, why });
        }
        if !text.ends_with('\n') {
            break;
        }
        let record = serde_json::from_str(&text).map_err(|error| ObserveError::BadLine {
            path: path.to_path_buf(),
            line,
            why: error.to_string(),
        })?;
        records.push(record);
    }
    Ok(records)
}
