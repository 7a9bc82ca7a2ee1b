//! The one error of this crate.

use ferrospeed_collective::CollectiveError;
use ferrospeed_tensor::TensorError;

/// What can go wrong where model state lives.
#[derive(Debug, thiserror::Error)]
pub enum ZeroError {
    /// A collective failed.
    #[error(transparent)]
    Comm(ferrospeed_comm::Error),
    /// Ranks read or train different parameters at the same time.
    #[error(
        "{0}. If a router or a condition chooses which parameters of a module a rank uses, build that module under \
         Init::as_unit() or name its path in Options::leaf_modules, so that it comes and goes as one; else look for a \
         loop that is longer on one rank"
    )]
    Order(ferrospeed_comm::Error),
    /// A kernel or an allocation failed.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// A disk that holds state failed.
    #[error("{tier}: nvme: {error}")]
    Disk {
        /// The section that put the state there.
        tier: &'static str,
        /// What failed.
        error: ferrospeed_io::IoError,
    },
    /// The disk failed in the middle of a step.
    #[error(
        "{call}: a disk with offloaded state failed in the middle of a step, so weights are part old and part new; load a \
         checkpoint first"
    )]
    HalfStepped {
        /// What was asked for.
        call: &'static str,
    },
    /// A parameter is in two groups, or in none.
    #[error("parameter '{name}' {why}")]
    Parameter {
        /// Its name.
        name: String,
        /// What is wrong and what to do.
        why: String,
    },
    /// What is to be written is being read.
    #[error(
        "{call} writes parameter '{name}', but a tensor over its value, read at {read_at}, is still there: drop what \
         read() gave and its clones and views first, or keep a copy (to_vec())"
    )]
    Borrowed {
        /// What would write it.
        call: &'static str,
        /// The parameter.
        name: String,
        /// The line that read it.
        read_at: String,
    },
    /// The model or its groups differ between ranks.
    #[error(
        "rank {rank} has another model than rank 0: {what}; all ranks must build the same parameters in the same order"
    )]
    Disagreement {
        /// The rank that differs.
        rank: usize,
        /// In what.
        what: String,
    },
    /// Something was asked for at the wrong time or of the wrong size.
    #[error("{0}")]
    Request(String),
}

impl From<ferrospeed_comm::Error> for ZeroError {
    fn from(error: ferrospeed_comm::Error) -> ZeroError {
        let cause = match &error {
            ferrospeed_comm::Error::GroupFailed { first, .. } => first,
            other => other,
        };
        match cause {
            ferrospeed_comm::Error::Mismatch { .. } => ZeroError::Order(error),
            _ => ZeroError::Comm(error),
        }
    }
}

impl From<CollectiveError> for ZeroError {
    fn from(error: CollectiveError) -> ZeroError {
        match error {
            CollectiveError::Comm(error) => error.into(),
            CollectiveError::Tensor(error) => error.into(),
        }
    }
}

/// The result of everything here.
pub type Result<T, E = ZeroError> = std::result::Result<T, E>;
