//! The ways in which a configuration can fail to become usable.

use std::path::PathBuf;

use crate::diagnostic::Report;

/// Why there is no configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("cannot read the configuration {}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The text is longer than any configuration is.
    #[error(
        "{file}: {bytes} bytes or more are too many for a configuration (the limit is {limit_bytes}); is this the right file?"
    )]
    TooLarge {
        /// The file or name.
        file: String,
        /// Its size.
        bytes: u64,
        /// The largest size that is read.
        limit_bytes: u64,
    },
    /// The bytes are not UTF-8 text.
    #[error("{file}: not UTF-8 text: byte {offset} cannot be decoded; save the file as UTF-8")]
    NotUtf8 {
        /// The file or name.
        file: String,
        /// The first bad byte, counted from zero.
        offset: usize,
    },
    /// The argument names no file and decodes to nothing.
    #[error("`{argument}` is neither an existing file nor URL-safe base64 of a configuration: {why}")]
    NeitherFileNorBase64 {
        /// What was given, shortened.
        argument: String,
        /// Why it does not decode.
        why: String,
    },
    /// An override such as `--set a.b=1` could not be applied.
    #[error("cannot apply the override `{assignment}`: {why}")]
    BadOverride {
        /// The whole assignment.
        assignment: String,
        /// What is wrong with it.
        why: String,
    },
    /// The configuration has errors; the report names them all, and the warnings beside them.
    #[error("{0}")]
    Invalid(Report),
}

impl ConfigError {
    /// The findings, where the configuration could be read at all.
    pub fn report(&self) -> Option<&Report> {
        match self {
            ConfigError::Invalid(report) => Some(report),
            _ => None,
        }
    }
}
