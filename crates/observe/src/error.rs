//! The one error of this crate.

use std::path::PathBuf;

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
}

/// The result of everything here.
pub type Result<T, E = ObserveError> = std::result::Result<T, E>;
