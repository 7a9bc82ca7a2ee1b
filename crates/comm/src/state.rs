//! What this rank knows about the health of the job.
//!
//! Every wait in the crate looks here a few times per second: at a failure that ends the whole job (a rank died), at a
//! failure of one group (its ranks disagreed), and at ranks that left in good order. The control connection of
//! [`rendezvous`](crate::rendezvous) writes to it; ranks that are threads of one process share a single instance.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Loss, Result};

/// A failure in a form that travels between ranks.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Announcement {
    /// A rank is gone; the job cannot go on.
    RankLost { rank: usize, loss: Loss, last_operation: String },
    /// What one rank sent another did not arrive as it was.
    Damaged { from_rank: usize, to_rank: usize, operation: String },
    /// The ranks of one group disagree.
    Mismatch { group_id: u64, group: String, rank_a: usize, call_a: String, rank_b: usize, call_b: String },
}

impl Announcement {
    fn into_error(self, state: &JobState) -> Error {
        match self {
            Announcement::RankLost { rank, loss, last_operation } => {
                Error::lost(rank, state.place(rank), loss, last_operation)
            }
            Announcement::Damaged { from_rank, to_rank, operation } => {
                Error::Damaged { from_rank, to_rank, operation }
            }
            Announcement::Mismatch { group, rank_a, call_a, rank_b, call_b, .. } => {
                Error::Mismatch { group, rank_a, call_a, rank_b, call_b }
            }
        }
    }
}

type Announcer = Box<dyn Fn(&Announcement) + Send + Sync>;
type Inquirer = Box<dyn Fn(usize) -> Option<String> + Send + Sync>;

/// The job's health as one rank sees it.
pub(crate) struct JobState {
    left: Vec<AtomicBool>,
    last_operations: Vec<Mutex<String>>,
    job_failure: OnceLock<Error>,
    any_group_failed: AtomicBool,
    group_failures: Mutex<HashMap<u64, Error>>,
    announcer: OnceLock<Announcer>,
    inquirer: OnceLock<Inquirer>,
    /// Where each rank is on the mesh.
    places: OnceLock<Vec<String>>,
}

impl JobState {
    pub(crate) fn new(world_size: usize) -> Self {
        JobState {
            left: (0..world_size).map(|_| AtomicBool::new(false)).collect(),
            last_operations: (0..world_size).map(|_| Mutex::new(String::from("none yet"))).collect(),
            job_failure: OnceLock::new(),
            any_group_failed: AtomicBool::new(false),
            group_failures: Mutex::new(HashMap::new()),
            announcer: OnceLock::new(),
            inquirer: OnceLock::new(),
            places: OnceLock::new(),
        }
    }

    /// Sets how failures found on this rank reach the others.
    pub(crate) fn set_announcer(&self, announcer: Announcer) {
        let _ = self.announcer.set(announcer);
    }

    /// Sets how to find out what another rank did last.
    pub(crate) fn set_inquirer(&self, inquirer: Inquirer) {
        let _ = self.inquirer.set(inquirer);
    }

    /// Says where each rank is on the mesh, for messages; the first mesh of a job is the one that they speak of.
    pub(crate) fn set_places(&self, places: Vec<String>) {
        let _ = self.places.set(places);
    }

    /// Where a rank is on the mesh, in brackets and with a space before them; empty without a mesh.
    pub(crate) fn place(&self, rank: usize) -> String {
        let place = self.places.get().and_then(|places| places.get(rank));
        place.map_or_else(String::new, |place| format!(" ({place})"))
    }

    /// A rank for messages.
    pub(crate) fn name(&self, rank: usize) -> String {
        format!("rank {rank}{}", self.place(rank))
    }

    /// Notes a failure that was found here and tells the others.
    pub(crate) fn announce(&self, announcement: Announcement) {
        if let Some(announcer) = self.announcer.get() {
            announcer(&announcement);
        }
        self.note(announcement);
    }

    /// Notes a failure that another rank found.
    pub(crate) fn note(&self, announcement: Announcement) {
        if let Announcement::Mismatch { group_id, .. } = &announcement {
            let group_id = *group_id;
            let mut failures = self.group_failures.lock().unwrap_or_else(PoisonError::into_inner);
            failures.entry(group_id).or_insert_with(|| announcement.into_error(self));
            self.any_group_failed.store(true, Ordering::Release);
        } else {
            let _ = self.job_failure.set(announcement.into_error(self));
        }
    }

    /// Notes that a rank left in good order; an operation that still needs it fails.
    pub(crate) fn note_left(&self, rank: usize) {
        if let Some(flag) = self.left.get(rank) {
            flag.store(true, Ordering::Release);
        }
    }

    pub(crate) fn set_last_operation(&self, rank: usize, description: String) {
        if let Some(slot) = self.last_operations.get(rank) {
            *slot.lock().unwrap_or_else(PoisonError::into_inner) = description;
        }
    }

    /// What a rank was last known to do; asks the hub where there is one.
    pub(crate) fn last_operation(&self, rank: usize) -> String {
        if self.job_failure.get().is_none()
            && let Some(answer) = self.inquirer.get().and_then(|inquire| inquire(rank))
        {
            return answer;
        }
        self.last_known_operation(rank)
    }

    /// What this rank has heard of, without asking.
    pub(crate) fn last_known_operation(&self, rank: usize) -> String {
        let slot =
            self.last_operations.get(rank).map(|slot| slot.lock().unwrap_or_else(PoisonError::into_inner));
        slot.map_or_else(|| "unknown".to_owned(), |text| text.clone())
    }

    /// Fails when the job, or this group, has failed.
    pub(crate) fn check(&self, group_id: u64) -> Result<()> {
        if let Some(failure) = self.job_failure.get() {
            return Err(failure.clone());
        }
        if self.any_group_failed.load(Ordering::Acquire)
            && let Some(failure) =
                self.group_failures.lock().unwrap_or_else(PoisonError::into_inner).get(&group_id)
        {
            return Err(failure.clone());
        }
        Ok(())
    }

    /// Fails when the job or this group has failed, or else when `rank`, which is still needed, has left.
    pub(crate) fn check_with(&self, group_id: u64, rank: usize) -> Result<()> {
        // A rank says why before it leaves: the reason of one that is seen to have left has arrived.
        let left = self.has_left(rank);
        self.check(group_id)?;
        if left { Err(self.left_error(rank)) } else { Ok(()) }
    }

    pub(crate) fn has_left(&self, rank: usize) -> bool {
        self.left.get(rank).is_some_and(|flag| flag.load(Ordering::Acquire))
    }

    /// The error of waiting for a rank that has left.
    pub(crate) fn left_error(&self, rank: usize) -> Error {
        let (place, last_operation) = (self.place(rank), self.last_operation(rank));
        Error::lost(rank, place, Loss::Left, last_operation)
    }
}
