//! What can go wrong before and while serving.

use std::path::PathBuf;

use thiserror::Error;

/// Errors of this crate.
#[derive(Debug, Error)]
pub enum ServeError {
    /// The model's files, or a pass through it.
    #[error(transparent)]
    Model(#[from] ferrospeed_models::ModelError),
    /// A tensor operation.
    #[error(transparent)]
    Tensor(#[from] ferrospeed_tensor::TensorError),
    /// Weights could not be placed.
    #[error(transparent)]
    Store(#[from] ferrospeed_tensor::StoreError),
    /// The tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] ferrospeed_text::TextError),
    /// A model that writes no text.
    #[error("{} is not a causal language model; only such can be served", .0.display())]
    NoDecoder(PathBuf),
    /// A cache that holds nothing.
    #[error("a cache of {bytes} bytes has no room for a block of {block_bytes} bytes; raise --cache-mib")]
    CacheTooSmall {
        /// What was asked for.
        bytes: u64,
        /// What one block takes.
        block_bytes: u64,
    },
    /// Few bits were asked for, and no weight can have them.
    #[error("{} has no weight that could be packed: the inputs of its layers are no multiple of 32", .0.display())]
    NothingToPack(PathBuf),
    /// Weights of few bits that should wait elsewhere.
    #[error("{}: weights of few bits stay on the device that computes; serve them without --weights-in, or in 16 bits", .0.display())]
    PackedAway(PathBuf),
    /// Weights that cannot wait where they should.
    #[error("weights away from the device: {0}")]
    Away(String),
    /// A draft model that knows other tokens.
    #[error("{} has a vocabulary of {draft} tokens and the model one of {model}: it guesses tokens of another language; take one with the same tokenizer", path.display())]
    OtherVocabulary {
        /// The draft model.
        path: PathBuf,
        /// Its tokens.
        draft: usize,
        /// The model's.
        model: usize,
    },
    /// Slices and experts on different numbers of ranks.
    #[error(
        "{slices} slices and experts on {experts} ranks do not go together: the same ranks hold both; make one of the numbers 1, or both the same"
    )]
    Division {
        /// Slices of each layer.
        slices: usize,
        /// Ranks over which experts are spread.
        experts: usize,
    },
    /// The ranks that hold a model together.
    #[error("the ranks that serve together: {0}")]
    Together(String),
    /// The network.
    #[error("{what}: {error}")]
    Io {
        /// What was tried.
        what: String,
        /// What the system said.
        error: std::io::Error,
    },
}

/// Results of this crate.
pub type Result<T, E = ServeError> = std::result::Result<T, E>;
