//! The one error of this crate.

use std::path::{Path, PathBuf};

/// What can go wrong with data.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A file could not be read or written.
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
    /// A place in a file is not what it should be.
    #[error("{path}: {place}: {why}")]
    BadPlace {
        /// The file.
        path: PathBuf,
        /// Which line, byte or row.
        place: String,
        /// What is wrong and what to do.
        why: String,
    },
    /// A file of tokens is shorter than it was when the run began.
    #[error(
        "{path}: has {now} bytes now, and bytes {start}..{end} were in it when it was opened: it was cut while it is trained on; put it back as it was, and go on with --resume"
    )]
    Shortened {
        /// The file.
        path: PathBuf,
        /// The first byte that was wanted.
        start: u64,
        /// One past the last.
        end: u64,
        /// How many it has.
        now: u64,
    },
    /// A token that the model has no row for.
    #[error(
        "{place}: token {token} does not fit a vocabulary of {vocabulary}; the model needs a larger one, or the data another tokenizer or token type"
    )]
    TokenTooLarge {
        /// The file and the position in it.
        place: String,
        /// The token.
        token: i64,
        /// What the model has.
        vocabulary: u64,
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
    /// All of the data is kept for validation.
    #[error(
        "validation = {share} keeps all {sequences} sequences of {sequence} tokens, and none is left to train on; take a smaller share, or give more data"
    )]
    NothingToTrainOn {
        /// What is kept.
        share: f64,
        /// How many sequences there are.
        sequences: u64,
        /// The length of each.
        sequence: u64,
    },
    /// Whoever was told how far it is said to stop.
    #[error("told to stop while text became tokens")]
    Stopped,
    /// Documents are to be kept apart, and nobody knows where they end.
    #[error(
        "where documents end is not known: token files do not say it; name the token behind each (data.end_token), or a data.tokenizer that has one"
    )]
    NoBorders,
    /// The token that documents end with is none of the model's.
    #[error(
        "data.end_token: {token} is no token of a vocabulary of {vocabulary}; name the one that documents end with"
    )]
    NoSuchEnd {
        /// The token.
        token: i64,
        /// What the model has.
        vocabulary: u64,
    },
    /// No token of the data has one before it in its document.
    #[error(
        "data.documents: every document {what} has one token, and nothing predicts the first of a document; is data.end_token the one that documents end with?"
    )]
    NothingToPredict {
        /// Of what.
        what: &'static str,
    },
    /// There are more sequences than an order by difficulty can hold.
    #[error(
        "{sequences} sequences are too many to be ordered by difficulty: at most {}; take longer ones, or train without curriculum_metrics",
        u32::MAX
    )]
    TooManySequences {
        /// How many there are.
        sequences: u64,
    },
    /// No sequence may be drawn when a run begins.
    #[error(
        "no sequence is easy enough for the first step ({}); the easiest has {easiest}: raise min_difficulty",
        .first.map_or("none ever is".to_owned(), |step| format!("the first one is at step {step}"))
    )]
    NothingAdmitted {
        /// The step at which the first one may.
        first: Option<u64>,
        /// The least difficulty of each metric.
        easiest: String,
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
    /// A text could not be turned into tokens, or back.
    #[error(transparent)]
    Text(#[from] ferrospeed_text::TextError),
}

impl DataError {
    pub(crate) fn io(path: &Path) -> impl Fn(std::io::Error) -> DataError + '_ {
        move |source| DataError::Io { path: path.to_path_buf(), source }
    }

    pub(crate) fn bad_file(path: &Path, why: impl Into<String>) -> DataError {
        DataError::BadFile { path: path.to_path_buf(), why: why.into() }
    }

    /// That of a place in a file.
    pub fn bad_place(path: &Path, place: impl Into<String>, why: impl Into<String>) -> DataError {
        DataError::BadPlace { path: path.to_path_buf(), place: place.into(), why: why.into() }
    }
}

/// The result of everything here.
pub type Result<T, E = DataError> = std::result::Result<T, E>;
