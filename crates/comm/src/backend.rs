//! Backends: what carries a group's operations.
//!
//! A backend sees one [`Carrier`] per group. It executes operations that are already checked and numbered; it must give
//! the same bits as every other backend (the reduction is a fold in rank order, see [`reduce`](crate::reduce)), keep the
//! deadline of the [`Ticket`], and refuse an operation whose fingerprint differs between ranks.

pub(crate) mod hierarchical;
pub(crate) mod local;
pub(crate) mod message;
#[cfg(feature = "mpi")]
pub(crate) mod mpi;
pub(crate) mod nccl;
mod stash;
pub(crate) mod tcp;

use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::op::{Collective, Fingerprint, Kind};
use crate::region::Region;
use crate::state::{Announcement, JobState};

/// Carries the operations of one group.
pub(crate) trait Carrier: Send + Sync {
    /// The backend's name in reports.
    fn name(&self) -> &'static str;
    /// Buffers that one operation may have; longer lists run as several operations.
    fn max_parts(&self) -> usize;
    /// Executes a collective. Called by one thread at a time, in the same order on every rank.
    fn run(&self, operation: &Collective, ticket: &Ticket) -> Result<()>;
    /// Sends a message. Called by one thread at a time per peer.
    fn send(&self, message: &Message, ticket: &Ticket) -> Result<()>;
    /// Receives a message. Called by one thread at a time per peer.
    fn recv(&self, message: &Message, ticket: &Ticket) -> Result<()>;
}

/// An operation's number and time limit.
#[derive(Debug, Clone)]
pub(crate) struct Ticket {
    pub(crate) fingerprint: Fingerprint,
    pub(crate) call_site: &'static Location<'static>,
    pub(crate) started: Instant,
    pub(crate) deadline: Instant,
    /// Bytes that this rank has sent to other hosts for it.
    pub(crate) crossed_bytes: Arc<AtomicU64>,
}

impl Ticket {
    pub(crate) fn describe(&self) -> String {
        self.fingerprint.describe(&self.call_site.to_string())
    }

    pub(crate) fn deadline_error(&self, missing: Vec<String>) -> Error {
        Error::Deadline { operation: self.describe(), waited: self.started.elapsed(), missing }
    }
}

/// One half of a point-to-point message.
#[derive(Debug, Clone)]
pub(crate) struct Message {
    pub(crate) kind: Kind,
    /// The other rank, numbered in the group.
    pub(crate) peer: usize,
    pub(crate) tag: u64,
    pub(crate) dtype: DType,
    pub(crate) region: Region,
}

/// This rank's place in a group: what every carrier needs to know.
#[derive(Clone)]
pub(crate) struct Membership {
    pub(crate) group_id: u64,
    pub(crate) group_name: String,
    /// World ranks, in group order.
    pub(crate) ranks: Arc<[usize]>,
    /// This rank's index in `ranks`.
    pub(crate) me: usize,
    /// Whether each of them is on another host than this one.
    pub(crate) is_far: Arc<[bool]>,
    pub(crate) state: Arc<JobState>,
}

impl Membership {
    pub(crate) fn size(&self) -> usize {
        self.ranks.len()
    }

    /// The error of two ranks that are in different operations.
    pub(crate) fn mismatch(&self, first: (usize, String), second: (usize, String)) -> Error {
        Error::Mismatch {
            group: self.group_name.clone(),
            rank_a: self.ranks[first.0],
            call_a: first.1,
            rank_b: self.ranks[second.0],
            call_b: second.1,
        }
    }

    /// The error of bytes that came from another rank (numbered in the world) other than they were sent. The others hear of
    /// it too: the job cannot go on.
    pub(crate) fn announce_damage(&self, from_rank: usize, operation: String) -> Error {
        let to_rank = self.ranks[self.me];
        self.state.announce(Announcement::Damaged { from_rank, to_rank, operation: operation.clone() });
        Error::Damaged { from_rank, to_rank, operation }
    }

    /// As [`mismatch`](Self::mismatch), and tells the ranks that cannot find it out by themselves.
    pub(crate) fn announce_mismatch(&self, first: (usize, String), second: (usize, String)) -> Error {
        self.state.announce(Announcement::Mismatch {
            group_id: self.group_id,
            group: self.group_name.clone(),
            rank_a: self.ranks[first.0],
            call_a: first.1.clone(),
            rank_b: self.ranks[second.0],
            call_b: second.1.clone(),
        });
        self.mismatch(first, second)
    }
}
