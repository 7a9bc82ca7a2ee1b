//! The `local` backend: ranks of one host over shared memory.
//!
//! A group shares one control area ([`layout`]): a step counter per rank, the descriptors of the current operation, a
//! staging area of fixed size, and a channel per pair of ranks. An operation runs like this:
//!
//! 1. Every rank writes its descriptor (fingerprint, call site, where its buffers lie) and steps forward. When all have
//!    stepped, every rank compares all fingerprints, so a mismatch is an error on all of them before data moves.
//! 2. If all buffers are registered, ranks read and write each other's memory in place ([`collectives`]); otherwise the
//!    data passes through the staging area in windows ([`staged`]). Small messages lie in the staging area already when
//!    the rank steps forward, so they need this one step only.
//! 3. A last step makes sure that nobody still reads what its owner is about to change.
//!
//! Descriptors and small messages are double-buffered by the parity of the sequence number: a rank can write those of
//! operation *s* + 2 only after every rank stepped into *s* + 1, that is, finished reading those of *s*.

mod collectives;
mod layout;
mod messages;
mod shared;
mod staged;
mod sync;

pub(crate) use sync::Patience;

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::Instant;

use crate::backend::stash::Stash;
use crate::backend::{Carrier, Membership, Message, Ticket};
use crate::error::{Error, Result};
use crate::op::Collective;
use crate::segment::SegmentTable;
use crate::store::Store;
use crate::sys::SharedMemory;
use layout::{Layout, PostedRange};
pub(crate) use staged::pieces_of;

/// One rank's view of a group on one host.
pub(crate) struct LocalCarrier {
    membership: Membership,
    layout: Layout,
    segments: Arc<SegmentTable>,
    patience: Patience,
    stash: Mutex<Stash>,
}

/// What the leader tells the members about the control area.
#[derive(serde::Serialize, serde::Deserialize)]
struct ControlAddress {
    pid: u32,
    descriptor: i32,
    bytes: usize,
    ranks: Vec<usize>,
}

impl LocalCarrier {
    /// Sets the group up: its first rank creates the control area, the others map it.
    pub(crate) fn connect(
        membership: Membership,
        segments: Arc<SegmentTable>,
        store: &dyn Store,
        staging_bytes: usize,
        patience: Patience,
        deadline: Instant,
    ) -> Result<Self> {
        let size = membership.size();
        let bytes = Layout::bytes(size, staging_bytes);
        let key = format!("group/{}", membership.group_id);
        let mut descriptor = None;
        let memory = if membership.me == 0 {
            let (memory, owned) = SharedMemory::create(bytes)?;
            let address = ControlAddress {
                pid: std::process::id(),
                descriptor: owned.as_raw_fd(),
                bytes,
                ranks: membership.ranks.to_vec(),
            };
            descriptor = Some(owned);
            store.set(&key, serde_json::to_vec(&address).unwrap_or_default())?;
            memory
        } else {
            let leader = membership.ranks[0];
            let Some(value) = store.wait(&key, deadline, &membership.state)? else {
                let problem = format!("rank {leader} did not create group {} in time", membership.group_name);
                return Err(Error::rendezvous(problem));
            };
            let address: ControlAddress = serde_json::from_slice(&value).map_err(|error| {
                Error::rendezvous(format!("the address of group {key} is malformed: {error}"))
            })?;
            if address.ranks != membership.ranks.to_vec() || address.bytes != bytes {
                let call = |ranks: &[usize]| format!("new_group({ranks:?})");
                return Err(
                    membership.mismatch((0, call(&address.ranks)), (membership.me, call(&membership.ranks)))
                );
            }
            SharedMemory::open(address.pid, address.descriptor, bytes)?
        };
        let carrier = LocalCarrier {
            layout: Layout::new(memory, size, staging_bytes),
            membership,
            segments,
            patience,
            stash: Mutex::default(),
        };
        // The leader may close its descriptor, and everybody forget the key, once all have mapped the area.
        carrier.step_together(
            &format!("creating group {}", carrier.membership.group_name),
            Instant::now(),
            deadline,
        )?;
        drop(descriptor);
        if carrier.membership.me == 0 {
            store.remove(&key)?;
        }
        Ok(carrier)
    }

    /// Writes this rank's descriptor, waits for all, and compares.
    fn enter(&self, ticket: &Ticket, shared: &[PostedRange]) -> Result<()> {
        let call_site = ticket.call_site.to_string();
        self.layout.post(self.membership.me, &ticket.fingerprint, &call_site, shared);
        self.step(ticket)?;
        let mine = &ticket.fingerprint;
        for rank in 0..self.membership.size() {
            let theirs = self.layout.posted(rank, mine.sequence);
            if theirs.is_none_or(|posted| posted.fingerprint != *mine) {
                let (seen, site) = self.layout.last_posted(rank);
                let theirs = seen.map_or_else(|| "nothing readable".to_owned(), |seen| seen.describe(&site));
                return Err(self
                    .membership
                    .mismatch((self.membership.me, ticket.describe()), (rank, theirs)));
            }
        }
        Ok(())
    }
}

impl Carrier for LocalCarrier {
    fn name(&self) -> &'static str {
        "local"
    }

    fn max_parts(&self) -> usize {
        layout::MAX_PARTS
    }

    fn run(&self, operation: &Collective, ticket: &Ticket) -> Result<()> {
        self.run_collective(operation, ticket)
    }

    fn send(&self, message: &Message, ticket: &Ticket) -> Result<()> {
        self.send_message(message, ticket)
    }

    fn recv(&self, message: &Message, ticket: &Ticket) -> Result<()> {
        self.recv_message(message, ticket)
    }
}
