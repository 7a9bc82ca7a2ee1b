//! The one error of this crate.

use ferrospeed_tensor::TensorError;

/// What can go wrong between ranks' tensors.
#[derive(Debug, thiserror::Error)]
pub enum CollectiveError {
    /// Ranks could not talk.
    #[error(transparent)]
    Comm(#[from] ferrospeed_comm::Error),
    /// A kernel or an allocation failed.
    #[error(transparent)]
    Tensor(#[from] TensorError),
}

/// An operation of a model fails as operations do.
impl From<CollectiveError> for TensorError {
    fn from(error: CollectiveError) -> TensorError {
        match error {
            CollectiveError::Tensor(error) => error,
            CollectiveError::Comm(error) => TensorError::argument("collective", error.to_string()),
        }
    }
}

/// The result of everything here.
pub type Result<T, E = CollectiveError> = std::result::Result<T, E>;
