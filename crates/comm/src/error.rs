//! The one error type of this crate.
//!
//! Every variant carries its operands: which operation, which rank, which call site. Errors are `Clone`, because one
//! failure of a group is reported to every operation still queued on it.

use std::sync::Arc;
use std::time::Duration;

use crate::dtype::{DType, ReduceOp};

/// The result of this crate's calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// How a rank was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Loss {
    /// Its process ended without saying goodbye.
    Died,
    /// Its process no longer answers: stopped, swapped out, or cut off from the network.
    Silent,
    /// It left the job in good order while others still needed it.
    Left,
}

impl std::fmt::Display for Loss {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Loss::Died => "died",
            Loss::Silent => "stopped responding",
            Loss::Left => "left the job",
        })
    }
}

/// What can go wrong between ranks.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// An argument makes no sense on this rank alone.
    #[error("{operation}: {problem} (at {call_site})")]
    InvalidArgument {
        /// The call.
        operation: &'static str,
        /// What is wrong with it.
        problem: String,
        /// Where it was made.
        call_site: String,
    },
    /// The reduction is not defined on the type.
    #[error(
        "{op} is not defined on {dtype}: avg needs a floating-point type, bit_and and bit_or an integer type"
    )]
    UnsupportedReduction {
        /// The operator.
        op: ReduceOp,
        /// The element type.
        dtype: DType,
    },
    /// Two ranks are in different operations.
    #[error(
        "ranks disagree in group {group}: rank {rank_a} calls {call_a}, but rank {rank_b} calls {call_b}; \
         every rank of a group must make the same calls in the same order"
    )]
    Mismatch {
        /// The group's name.
        group: String,
        /// The first of the two ranks (numbered in the world).
        rank_a: usize,
        /// Its operation and call site.
        call_a: String,
        /// The second of the two ranks.
        rank_b: usize,
        /// Its operation and call site.
        call_b: String,
    },
    /// The deadline passed while ranks were missing.
    #[error("{operation} gave up after {} s: waiting for {}", waited.as_secs_f64(), missing.join("; "))]
    Deadline {
        /// The operation and its call site.
        operation: String,
        /// How long it waited.
        waited: Duration,
        /// One phrase for each missing rank: its number and what it did last.
        missing: Vec<String>,
    },
    /// A rank is gone.
    #[error("rank {rank}{place} {loss}; the last operation that it told of: {last_operation}")]
    RankLost {
        /// The rank (numbered in the world).
        rank: usize,
        /// Where it is on the mesh, in brackets; empty without one.
        place: String,
        /// How it was lost.
        loss: Loss,
        /// What it was last known to do.
        last_operation: String,
    },
    /// Bytes on their way from one rank to another were changed.
    #[error(
        "what rank {from_rank} sent did not reach rank {to_rank} as it was, in {operation}: something between them changes \
         data; look at the network cards, cables and memory of their hosts, and go on from the last checkpoint"
    )]
    Damaged {
        /// Who sent it (numbered in the world).
        from_rank: usize,
        /// Who noticed.
        to_rank: usize,
        /// The operation and its call site on the rank that noticed.
        operation: String,
    },
    /// An earlier operation of this group failed, so the ranks are no longer in step.
    #[error("group {group} cannot be used any more: {first}")]
    GroupFailed {
        /// The group's name.
        group: String,
        /// The failure that ended it.
        first: Box<Error>,
    },
    /// The job could not be put together.
    #[error("rendezvous: {problem}")]
    Rendezvous {
        /// What happened, with ranks and addresses.
        problem: String,
    },
    /// The environment does not describe a job.
    #[error("{variable}: {problem}")]
    Environment {
        /// The variable.
        variable: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A launcher's variables do not say who this process is.
    #[error("{launcher} environment: {reason}")]
    Discovery {
        /// Whose variables.
        launcher: &'static str,
        /// What is missing or wrong.
        reason: String,
    },
    /// The chosen backend cannot serve this job.
    #[error("backend {backend}: {problem}")]
    Backend {
        /// Its name.
        backend: &'static str,
        /// Why.
        problem: String,
    },
    /// A topology or mesh question that has no answer.
    #[error("topology: {problem}")]
    Topology {
        /// The question and why it has no answer.
        problem: String,
    },
    /// The operating system refused.
    #[error("{what}: {source}")]
    Io {
        /// What was attempted.
        what: String,
        /// The system's answer.
        source: Arc<std::io::Error>,
    },
}

impl Error {
    /// The error of whoever needs a rank that is gone.
    pub(crate) fn lost(rank: usize, place: String, loss: Loss, last_operation: String) -> Self {
        let error = Error::RankLost { rank, place, loss, last_operation };
        crate::blame::note(&error.to_string());
        error
    }

    pub(crate) fn io(what: impl Into<String>, source: std::io::Error) -> Self {
        Error::Io { what: what.into(), source: Arc::new(source) }
    }

    pub(crate) fn rendezvous(problem: impl Into<String>) -> Self {
        Error::Rendezvous { problem: problem.into() }
    }
}
