//! The one error of this crate.

use std::path::{Path, PathBuf};

/// What can go wrong with text and its tokens.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
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
        /// What is wrong and what to do.
        why: String,
    },
    /// A text could not be turned into tokens, or back.
    #[error("{tokenizer}: {why}")]
    Tokenizer {
        /// The `tokenizer.json`.
        tokenizer: PathBuf,
        /// What it says.
        why: String,
    },
    /// No chat template has such a name, and no such file is there.
    #[error(
        "'{name}' is neither a file nor one of the chat templates that are known by name: {}",
        crate::named::NAMES.join(", ")
    )]
    NoSuchTemplate {
        /// What was asked for.
        name: String,
    },
    /// A template refused a conversation, or did not come to an end.
    #[error("{0}")]
    Rendering(String),
    /// What a template writes of a conversation does not show where a turn begins or ends.
    #[error(
        "which tokens message {message} makes cannot be told: {why}; take a chat template that marks what the assistant says with \
         {{% generation %}} … {{% endgeneration %}} (data.chat_template), or train on all tokens (data.train_on = \"all\")"
    )]
    Uncut {
        /// Which message, from 1.
        message: usize,
        /// What was found, with the place.
        why: String,
    },
    /// A conversation that cannot be learnt from.
    #[error("{0}")]
    Conversation(String),
}

impl TextError {
    pub(crate) fn io(path: &Path) -> impl Fn(std::io::Error) -> TextError + '_ {
        move |source| TextError::Io { path: path.to_path_buf(), source }
    }

    pub(crate) fn bad_file(path: &Path, why: impl Into<String>) -> TextError {
        TextError::BadFile { path: path.to_path_buf(), why: why.into() }
    }
}

/// The result of everything here.
pub type Result<T, E = TextError> = std::result::Result<T, E>;
