//! The one error of this crate.

use std::path::PathBuf;

use ferrospeed_tensor::{DType, TensorError};

/// What can go wrong with a model's configuration and weights.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file could not be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file is not what its name says.
    #[error("{path}: {why}")]
    BadFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A key of `config.json` is missing or has a value that makes no model.
    #[error("config.json: {key}: {why}")]
    Config {
        /// The key.
        key: String,
        /// What is wrong and what would be right.
        why: String,
    },
    /// Ranks cannot share the model as was asked.
    #[error("{why}")]
    Division {
        /// What cannot be divided by how many, and what can.
        why: String,
    },
    /// Fields of `config.json` that this model type is not known to have.
    #[error(
        "config.json: not known for this model type: {}. The model may compute something else because of them, so it is not \
         loaded; take out those that change nothing",
        fields.join(", ")
    )]
    UnknownFields {
        /// Each with its value.
        fields: Vec<String>,
    },
    /// The weights do not fit the model.
    #[error("the weights do not fit the model:\n{table}")]
    Weights {
        /// One line per tensor that is missing, unknown or of the wrong shape.
        table: String,
    },
    /// A value became infinite in a narrower type.
    #[error(
        "'{name}' holds {value}, which {dtype} cannot: it would become infinite. bfloat16 has the range of float32"
    )]
    TooLargeFor {
        /// The tensor.
        name: String,
        /// The value.
        value: f32,
        /// The type.
        dtype: DType,
    },
    /// An operation failed.
    #[error(transparent)]
    Tensor(#[from] TensorError),
}

/// The result of everything here.
pub type Result<T, E = ModelError> = std::result::Result<T, E>;

impl ModelError {
    /// A [`ModelError::Config`].
    pub fn config(key: impl Into<String>, why: impl Into<String>) -> Self {
        ModelError::Config { key: key.into(), why: why.into() }
    }

    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> ModelError {
        let path = path.into();
        move |source| ModelError::Io { path, source }
    }

    pub(crate) fn file(path: impl Into<PathBuf>, why: impl std::fmt::Display) -> Self {
        ModelError::BadFile { path: path.into(), why: why.to_string() }
    }
}

/// For code that a layer of the tape calls.
pub(crate) fn into_tensor_error(error: ModelError) -> TensorError {
    match error {
        ModelError::Tensor(error) => error,
        other => TensorError::BadArgument { op: "block", what: other.to_string() },
    }
}
