//! The one error of this crate.

use std::path::PathBuf;

/// What can go wrong with data.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A file could not be read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file is not what it should be.
    #[error("{path}: {why}")]
    BadFile {
        /// The file.
        path: PathBuf,
        /// What is wrong, where, and what to do.
        why: String,
    },
    /// There is not enough to train on.
    #[error("{tokens} tokens do not make {wanted} of {sequence} tokens; give more data or shorter sequences")]
    TooLittle {
        /// What there is.
        tokens: u64,
        /// What was wanted.
        wanted: &'static str,
        /// The length of a sequence.
        sequence: u64,
    },
    /// Tokens were asked for that do not exist.
    #[error("tokens {start}..{end} lie outside a stream of {len}")]
    OutOfRange {
        /// The first.
        start: u64,
        /// One past the last.
        end: u64,
        /// How many there are.
        len: u64,
    },
}

/// The result of everything here.
pub type Result<T, E = DataError> = std::result::Result<T, E>;
