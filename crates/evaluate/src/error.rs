//! The one error of this crate.

use std::path::{Path, PathBuf};

/// What can go wrong with an evaluation.
#[derive(Debug, thiserror::Error)]
pub enum EvaluateError {
    /// The data.
    #[error(transparent)]
    Data(#[from] ferrospeed_data::DataError),
    /// The tokenizer or the chat template.
    #[error(transparent)]
    Text(#[from] ferrospeed_text::TextError),
    /// The model.
    #[error(transparent)]
    Serve(#[from] ferrospeed_serve::ServeError),
    /// A text that the engine did not answer.
    #[error("{path}: {place}: {why}")]
    Unanswered {
        /// The file.
        path: PathBuf,
        /// The line, sample, row or token.
        place: String,
        /// What the engine says.
        why: String,
    },
    /// There is nothing to ask.
    #[error("{path}: {why}")]
    Nothing {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong and what to do.
        why: String,
    },
    /// The engine's thread does not start.
    #[error("cannot start the engine's thread: {0}")]
    Engine(std::io::Error),
}

impl EvaluateError {
    pub(crate) fn nothing(path: &Path, why: impl Into<String>) -> EvaluateError {
        EvaluateError::Nothing { path: path.to_path_buf(), why: why.into() }
    }
}

/// The result of everything here.
pub type Result<T, E = EvaluateError> = std::result::Result<T, E>;
