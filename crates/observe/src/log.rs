//! JSON lines: one object per line, flushed as it is written, so that a reader beside the run sees whole lines.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{ObserveError, Result};

/// A log that grows by one line at a time.
#[derive(Debug)]
pub struct JsonLines {
    path: PathBuf,
    file: File,
}

impl JsonLines {
    /// A new, empty log.
    pub fn create(path: &Path) -> Result<JsonLines> {
        refuse_special(path)?;
        let file =
            File::create(path).map_err(|source| ObserveError::Io { path: path.to_path_buf(), source })?;
        Ok(JsonLines { path: path.to_path_buf(), file })
    }

    /// A log that goes on: what is there stays.
    pub fn append(path: &Path) -> Result<JsonLines> {
        refuse_special(path)?;
        let file = File::options().create(true).append(true).open(path);
        let file = file.map_err(|source| ObserveError::Io { path: path.to_path_buf(), source })?;
        Ok(JsonLines { path: path.to_path_buf(), file })
    }

    /// Brings what was written to the disk.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(|source| ObserveError::Io { path: self.path.clone(), source })
    }

    /// Adds a record.
    pub fn write(&mut self, record: &impl Serialize) -> Result<()> {
        let failed = |source| ObserveError::Io { path: self.path.clone(), source };
        let mut line = serde_json::to_vec(record).map_err(|error| failed(error.into()))?;
        line.push(b'\n');
        self.file.write_all(&line).map_err(failed)
    }
}

/// Reads a log. A last line without an end is still being written and is passed over.
pub fn read_json_lines<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>> {
    let failed = |source| ObserveError::Io { path: path.to_path_buf(), source };
    refuse_special(path)?;
    let mut reader = BufReader::new(File::open(path).map_err(failed)?);
    let mut records = Vec::new();
    let mut text = String::new();
    for line in 1.. {
        text.clear();
        if reader.read_line(&mut text).map_err(failed)? == 0 || !text.ends_with('\n') {
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

/// A log is a plain file: a device never ends, and a pipe waits for whoever is at its other end.
fn refuse_special(path: &Path) -> Result<()> {
    match std::fs::metadata(path) {
        Ok(about) if !about.is_file() => {
            let source = std::io::Error::new(std::io::ErrorKind::InvalidInput, "is no plain file");
            Err(ObserveError::Io { path: path.to_path_buf(), source })
        }
        _ => Ok(()),
    }
}
