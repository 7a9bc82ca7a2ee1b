//! Collectives over message passing: what `tcp` and `mpi` have in common.
//!
//! A [`Link`] moves bytes between ranks; everything else is here. Every collective begins with an exchange of
//! fingerprints between neighbours on a ring of ranks: if all ranks do not agree, some pair of neighbours does not, and
//! the two announce it to the job, so every rank fails with the same message. Reductions are a direct exchange: rank *i*
//! receives slice *i* of every rank and folds them in rank order. (A ring would start each slice's sum at another rank,
//! and a tree would pair them up: both change bits. The direct exchange moves exactly as many bytes as the ring.)

mod algorithms;
mod messages;

use std::sync::Mutex;
use std::sync::atomic::Ordering;

use crate::backend::stash::Stash;
use crate::backend::{Carrier, Membership, Message, Ticket};
use crate::dtype::{DType, ReduceOp};
use crate::error::Result;
use crate::op::{Collective, Fingerprint, Kind};

/// Which stream between two ranks the bytes take. Streams do not wait for each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Stream {
    /// The collectives of a group.
    Collectives,
    /// Messages from this rank to the peer.
    Sending,
    /// Messages from the peer to this rank.
    Receiving,
}

/// Bytes that go to a peer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Outgoing {
    pub(crate) peer: usize,
    pub(crate) start: *const u8,
    pub(crate) bytes: usize,
}

/// Bytes that come from a peer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Incoming {
    pub(crate) peer: usize,
    pub(crate) start: *mut u8,
    pub(crate) bytes: usize,
}

/// Moves bytes between the ranks of one group.
pub(crate) trait Link: Send + Sync {
    /// The backend's name in reports.
    fn name(&self) -> &'static str;

    /// Sends and receives everything listed, all at the same time. Bytes of one stream between two ranks keep their
    /// order, so the n-th incoming entry of a peer pairs with the n-th outgoing entry on its side, with the same length.
    ///
    /// # Safety
    /// The ranges are valid for the call; nobody else writes the outgoing or touches the incoming ones.
    unsafe fn exchange(
        &self,
        stream: Stream,
        outgoing: &[Outgoing],
        incoming: &[Incoming],
        membership: &Membership,
        ticket: &Ticket,
    ) -> Result<()>;
}

/// A group's collectives over a link.
pub(crate) struct MessageCarrier<L> {
    membership: Membership,
    link: L,
    staging: Mutex<Vec<u8>>,
    staging_bytes: usize,
    stash: Mutex<Stash>,
}

const CALL_SITE_BYTES: usize = 200;

/// A fingerprint and its call site on the wire.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct WireFingerprint {
    group: u64,
    sequence: u64,
    count: u64,
    shape: u64,
    root_plus_one: u32,
    part_count: u32,
    kind: u8,
    dtype: u8,
    reduce: u8,
    call_site_bytes: u8,
    call_site: [u8; CALL_SITE_BYTES],
    unused: [u8; 4],
}

impl WireFingerprint {
    fn of(ticket: &Ticket) -> Self {
        let fingerprint = &ticket.fingerprint;
        let mut wire = WireFingerprint {
            group: fingerprint.group,
            sequence: fingerprint.sequence,
            count: fingerprint.count,
            shape: fingerprint.shape,
            root_plus_one: fingerprint.root.map_or(0, |root| root + 1),
            part_count: fingerprint.part_count,
            kind: fingerprint.kind as u8,
            dtype: fingerprint.dtype as u8,
            reduce: fingerprint.reduce.map_or(0, |op| op as u8),
            call_site_bytes: 0,
            call_site: [0; CALL_SITE_BYTES],
            unused: [0; 4],
        };
        let site = ticket.call_site.to_string();
        let site = &site.as_bytes()[site.len().saturating_sub(CALL_SITE_BYTES)..];
        wire.call_site[..site.len()].copy_from_slice(site);
        wire.call_site_bytes = site.len() as u8;
        wire
    }

    fn read(&self) -> Option<(Fingerprint, String)> {
        let site = &self.call_site[..(self.call_site_bytes as usize).min(CALL_SITE_BYTES)];
        let fingerprint = Fingerprint {
            group: self.group,
            sequence: self.sequence,
            kind: Kind::from_code(self.kind)?,
            dtype: DType::from_code(self.dtype)?,
            reduce: ReduceOp::from_code(self.reduce),
            root: self.root_plus_one.checked_sub(1),
            part_count: self.part_count,
            count: self.count,
            shape: self.shape,
            shared_output: None,
        };
        Some((fingerprint, String::from_utf8_lossy(site).into_owned()))
    }
}

impl<L: Link> MessageCarrier<L> {
    pub(crate) fn new(membership: Membership, link: L, staging_bytes: usize) -> Self {
        MessageCarrier { membership, link, staging: Mutex::default(), staging_bytes, stash: Mutex::default() }
    }

    pub(crate) fn size(&self) -> usize {
        self.membership.size()
    }

    /// Compares fingerprints with both neighbours on the ring of ranks.
    pub(crate) fn enter(&self, ticket: &Ticket) -> Result<()> {
        let (size, me) = (self.membership.size(), self.membership.me);
        let mut neighbours = vec![(me + 1) % size, (me + size - 1) % size];
        neighbours.dedup();
        neighbours.retain(|neighbour| *neighbour != me);
        let mine = WireFingerprint::of(ticket);
        let mut theirs = vec![<WireFingerprint as bytemuck::Zeroable>::zeroed(); neighbours.len()];
        let bytes = size_of::<WireFingerprint>();
        let outgoing: Vec<Outgoing> = neighbours
            .iter()
            .map(|peer| Outgoing { peer: *peer, start: (&raw const mine).cast(), bytes })
            .collect();
        let incoming: Vec<Incoming> = neighbours
            .iter()
            .zip(&mut theirs)
            .map(|(peer, slot)| Incoming { peer: *peer, start: (&raw mut *slot).cast(), bytes })
            .collect();
        // SAFETY: the ranges are these locals.
        unsafe { self.exchange(&outgoing, &incoming, ticket)? };
        for (peer, wire) in neighbours.into_iter().zip(&theirs) {
            let read = wire.read();
            if read.as_ref().is_none_or(|(fingerprint, _)| *fingerprint != ticket.fingerprint) {
                let call =
                    read.map_or_else(|| "nothing readable".into(), |(seen, site)| seen.describe(&site));
                return Err(self.membership.announce_mismatch((me, ticket.describe()), (peer, call)));
            }
        }
        Ok(())
    }

    /// As [`Link::exchange`] on the stream of collectives.
    ///
    /// # Safety
    /// As [`Link::exchange`].
    pub(crate) unsafe fn exchange(
        &self,
        outgoing: &[Outgoing],
        incoming: &[Incoming],
        ticket: &Ticket,
    ) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.exchange_on(Stream::Collectives, outgoing, incoming, ticket) }
    }

    /// As [`Link::exchange`], and counts what goes to other hosts.
    ///
    /// # Safety
    /// As [`Link::exchange`].
    unsafe fn exchange_on(
        &self,
        stream: Stream,
        outgoing: &[Outgoing],
        incoming: &[Incoming],
        ticket: &Ticket,
    ) -> Result<()> {
        let far = outgoing.iter().filter(|part| self.membership.is_far[part.peer]);
        ticket.crossed_bytes.fetch_add(far.map(|part| part.bytes as u64).sum(), Ordering::Relaxed);
        // SAFETY: the caller's contract.
        unsafe { self.link.exchange(stream, outgoing, incoming, &self.membership, ticket) }
    }
}

impl<L: Link> Carrier for MessageCarrier<L> {
    fn name(&self) -> &'static str {
        self.link.name()
    }

    fn max_parts(&self) -> usize {
        usize::MAX
    }

    fn run(&self, operation: &Collective, ticket: &Ticket) -> Result<()> {
        self.enter(ticket)?;
        self.run_collective(operation, ticket)
    }

    fn send(&self, message: &Message, ticket: &Ticket) -> Result<()> {
        self.send_message(message, ticket)
    }

    fn recv(&self, message: &Message, ticket: &Ticket) -> Result<()> {
        self.recv_message(message, ticket)
    }
}
