//! The one error of this crate.

use std::path::{Path, PathBuf};

/// What can go wrong with a run's files.
#[derive(Debug, thiserror::Error)]
pub enum ObserveError {
    /// A file could not be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A line of a log is not a record.
    #[error("{path}:{line}: {why}")]
    BadLine {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong.
        why: String,
    },
    /// An event file is damaged or cut off.
    #[error("{path}: record at byte {offset}: {why}")]
    BadEvents {
        /// The file.
        path: PathBuf,
        /// Where the record starts.
        offset: usize,
        /// What is wrong.
        why: &'static str,
    },
}

impl ObserveError {
    /// The file that it is about.
    pub fn path(&self) -> &Path {
        match self {
            ObserveError::Io { path, .. }
            | ObserveError::BadLine { path, .. }
            | ObserveError::BadEvents { path, .. } => path,
        }
    }

    /// Names the file that an operation failed on.
    pub(crate) fn io(path: &Path) -> impl Fn(std::io::Error) -> ObserveError + '_ {
        move |source| ObserveError::Io { path: path.to_path_buf(), source }
    }
}

/// The result of everything here.
pub type Result<T, E = ObserveError> = std::result::Result<T, E>;
