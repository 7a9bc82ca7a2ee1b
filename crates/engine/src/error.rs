//! The one error of this crate.

use std::path::{Path, PathBuf};

use ferrospeed_tensor::TensorError;
use ferrospeed_zero::ZeroError;

/// What can go wrong in training.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// Ranks could not talk.
    #[error(transparent)]
    Comm(#[from] ferrospeed_comm::Error),
    /// A kernel or an allocation failed.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// Model state could not be laid out, reduced or updated.
    #[error(transparent)]
    Zero(#[from] ZeroError),
    /// The configuration is wrong; every mistake is in the message.
    #[error(transparent)]
    Config(#[from] ferrospeed_config::ConfigError),
    /// The configuration asks for something that does not run yet.
    #[error("{key}: {why}")]
    Unsupported {
        /// The configuration key.
        key: &'static str,
        /// Why, and what to write instead.
        why: String,
    },
    /// Ranks were started with different settings, files or programs.
    #[error(
        "rank {rank} was told something else than rank 0: {what} is {there} there and {here} on rank 0; give every rank the same configuration, seed, files and program"
    )]
    Disagreement {
        /// The first rank that differs.
        rank: usize,
        /// Which key.
        what: String,
        /// Its value on that rank.
        there: String,
        /// Its value on rank 0.
        here: String,
    },
    /// Two stages of a pipeline could not talk.
    #[error("stage {} ({}): {source}", .what.stage, .what.doing())]
    Stage {
        /// Who, with whom, on what.
        what: crate::pipeline::StageFailure,
        /// Why.
        source: Box<EngineError>,
    },
    /// Layers cannot be divided, or a schedule cannot be made.
    #[error(transparent)]
    Pipeline(#[from] ferrospeed_pipeline::PipelineError),
    /// Tensors could not be exchanged.
    #[error(transparent)]
    Collective(#[from] ferrospeed_collective::CollectiveError),
    /// A monitor could not be made.
    #[error(transparent)]
    Observe(#[from] ferrospeed_observe::ObserveError),
    /// A call came at the wrong time.
    #[error("{call}: {why}")]
    Order {
        /// The call.
        call: &'static str,
        /// What should have come first.
        why: &'static str,
    },
    /// A load failed when part of the state was replaced: what is there is neither the old state nor the new.
    #[error(
        "{call}: the load from {} failed halfway, so the state is part old and part new; load another checkpoint first",
        checkpoint.display()
    )]
    HalfLoaded {
        /// The call.
        call: &'static str,
        /// The checkpoint that could not be read.
        checkpoint: PathBuf,
    },
    /// Steps were skipped too often.
    #[error(
        "{skipped} steps in a row were skipped because a gradient was not a number (last: '{param}' on rank {rank}); the run has diverged: lower the learning rate, clip gradients, or check the data"
    )]
    Diverged {
        /// How many in a row.
        skipped: u64,
        /// The last bad parameter.
        param: String,
        /// Where it came from.
        rank: usize,
    },
    /// A checkpoint could not be saved or loaded.
    #[error(transparent)]
    Checkpoint(#[from] ferrospeed_checkpoint::CheckpointError),
    /// A schedule or the loss scale cannot go on.
    #[error(transparent)]
    Optim(#[from] ferrospeed_optim::OptimError),
    /// A value that a caller passed makes no sense.
    #[error("{what}: {why}")]
    Argument {
        /// Which.
        what: &'static str,
        /// Why.
        why: String,
    },
}

/// The result of everything here.
pub type Result<T, E = EngineError> = std::result::Result<T, E>;

impl EngineError {
    pub(crate) fn half_loaded(call: &'static str, checkpoint: &Path) -> EngineError {
        EngineError::HalfLoaded { call, checkpoint: checkpoint.to_path_buf() }
    }
}
