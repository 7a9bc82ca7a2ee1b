//! Messages between two ranks of a host.
//!
//! Every ordered pair of ranks has a channel: a ring of slots that the sender fills and the receiver empties. A message
//! begins with a header (tag, type, length, call site). Registered memory does not pass through the ring: the header
//! names it, the receiver copies it out in one go, and the sender waits until that is done.
//!
//! Tags that nobody asked for yet are put aside: see [`stash`](crate::backend::stash).

use std::sync::PoisonError;

use super::LocalCarrier;
use super::sync::{Counter, Interrupted};
use crate::backend::stash::MessageHeader;
use crate::backend::{Message, Ticket};
use crate::copy::copy;
use crate::error::{Error, Result};
use crate::segment::SharedRange;

const SLOTS: usize = 8;
const SLOT_BYTES: usize = 32 << 10;

/// The ring between a sender and a receiver.
#[repr(C)]
pub(super) struct Channel {
    /// Slots that the sender has filled so far.
    filled: Counter,
    /// Slots that the receiver has emptied so far.
    emptied: Counter,
    slots: [Slot; SLOTS],
}

#[repr(C, align(128))]
struct Slot {
    header: Header,
    data: [u8; SLOT_BYTES],
}

/// A message's own header, and where its data lies when it does not pass through the ring.
#[repr(C)]
#[derive(Clone, Copy)]
struct Header {
    message: MessageHeader,
    /// The segment plus one, so that zero means "in the ring".
    segment_plus_one: u64,
    offset: u64,
}

impl LocalCarrier {
    fn interrupted(&self, interrupted: Interrupted, peer: usize, ticket: &Ticket) -> Error {
        match interrupted {
            Interrupted::Failed(error) => error,
            Interrupted::DeadlinePassed => {
                let rank = self.membership.ranks[peer];
                let last = self.membership.state.last_operation(rank);
                ticket.deadline_error(vec![format!("rank {rank} (its last operation: {last})")])
            }
        }
    }

    fn channel_between(&self, sender: usize, receiver: usize) -> &Channel {
        // SAFETY: inside the control area, aligned to 128 bytes within page-aligned memory; the counters are atomics, and
        // slot contents are accessed through raw pointers only.
        unsafe { &*self.layout.channel(sender, receiver) }
    }

    pub(super) fn send_message(&self, message: &Message, ticket: &Ticket) -> Result<()> {
        let (me, to) = (self.membership.me, message.peer);
        let channel = self.channel_between(me, to);
        let total = message.region.len();
        let locate = || self.segments.locate(&message.region, &[self.membership.ranks[to]]);
        let shared = if total > SLOT_BYTES { locate() } else { None };
        let header = Header {
            message: MessageHeader::new(message, ticket),
            segment_plus_one: shared.map_or(0, |range| range.segment + 1),
            offset: shared.map_or(0, |range| range.offset),
        };
        let mut sent = 0;
        loop {
            let index = channel.filled.load();
            // A slot is free once the receiver has emptied what it held one round before.
            self.wait_for(&channel.emptied, index.wrapping_sub(SLOTS as u32 - 1), to, ticket.deadline)
                .map_err(|interrupted| self.interrupted(interrupted, to, ticket))?;
            let slot = self.slot(me, to, index);
            let bytes = if shared.is_some() { 0 } else { SLOT_BYTES.min(total - sent) };
            // SAFETY: the slot is ours until the counter moves; the region is readable by its contract.
            unsafe {
                if sent == 0 {
                    (&raw mut (*slot).header).write(header);
                }
                copy(message.region.as_ptr().add(sent), (&raw mut (*slot).data).cast(), bytes);
            }
            sent += bytes;
            let filled = channel.filled.advance(1);
            if shared.is_some() {
                return self
                    .wait_for(&channel.emptied, filled, to, ticket.deadline)
                    .map_err(|interrupted| self.interrupted(interrupted, to, ticket));
            }
            if sent == total {
                return Ok(());
            }
        }
    }

    fn slot(&self, sender: usize, receiver: usize, index: u32) -> *mut Slot {
        let channel = self.layout.channel(sender, receiver);
        // SAFETY: only an address inside the channel is computed.
        unsafe { (&raw mut (*channel).slots).cast::<Slot>().add(index as usize % SLOTS) }
    }

    pub(super) fn recv_message(&self, message: &Message, ticket: &Ticket) -> Result<()> {
        let stashed =
            self.stash.lock().unwrap_or_else(PoisonError::into_inner).take(message.peer, message.tag);
        if let Some((header, data)) = stashed {
            header.check(message, ticket, &self.membership)?;
            // SAFETY: the lengths agree; the region is ours to write by its contract.
            unsafe { copy(data.as_ptr(), message.region.as_ptr(), data.len()) };
            return Ok(());
        }
        loop {
            let header = self.await_header(message.peer, ticket)?;
            if header.message.tag == message.tag {
                header.message.check(message, ticket, &self.membership)?;
                return self.receive_body(&header, message.peer, message.region.as_ptr(), ticket);
            }
            self.put_aside(&header, message, ticket)?;
        }
    }

    fn await_header(&self, from: usize, ticket: &Ticket) -> Result<Header> {
        let me = self.membership.me;
        let channel = self.channel_between(from, me);
        let index = channel.emptied.load();
        self.wait_for(&channel.filled, index.wrapping_add(1), from, ticket.deadline)
            .map_err(|interrupted| self.interrupted(interrupted, from, ticket))?;
        // SAFETY: the sender has filled this slot and leaves it alone until we empty it.
        Ok(unsafe { (&raw const (*self.slot(from, me, index)).header).read() })
    }

    /// Copies a message's data to `to`, which has room for it, and frees the slots.
    fn receive_body(&self, header: &Header, from: usize, to: *mut u8, ticket: &Ticket) -> Result<()> {
        let me = self.membership.me;
        let channel = self.channel_between(from, me);
        let total = header.message.bytes as usize;
        if let Some(segment) = header.segment_plus_one.checked_sub(1) {
            let range = SharedRange { segment, offset: header.offset };
            let rank = self.membership.ranks[from];
            let source = self.segments.resolve(rank, range, total).ok_or_else(|| {
                let problem = format!("rank {rank} sends memory ({range:?}) that is not mapped here");
                Error::Backend { backend: "local", problem }
            })?;
            // SAFETY: the range lies in the peer's segment, and the peer waits until we move the counter.
            unsafe { copy(source, to, total) };
            channel.emptied.advance(1);
            return Ok(());
        }
        let mut received = 0;
        loop {
            let index = channel.emptied.load();
            self.wait_for(&channel.filled, index.wrapping_add(1), from, ticket.deadline)
                .map_err(|interrupted| self.interrupted(interrupted, from, ticket))?;
            let bytes = SLOT_BYTES.min(total - received);
            // SAFETY: the slot is filled and ours until the counter moves; `to` has room for the whole message.
            unsafe { copy((&raw const (*self.slot(from, me, index)).data).cast(), to.add(received), bytes) };
            received += bytes;
            channel.emptied.advance(1);
            if received == total {
                return Ok(());
            }
        }
    }

    fn put_aside(&self, header: &Header, wanted: &Message, ticket: &Ticket) -> Result<()> {
        if !self.stash.lock().unwrap_or_else(PoisonError::into_inner).has_room_for(header.message.bytes) {
            return Err(header.message.mismatch(wanted, ticket, &self.membership));
        }
        let mut data = vec![0u8; header.message.bytes as usize];
        self.receive_body(header, wanted.peer, data.as_mut_ptr(), ticket)?;
        self.stash.lock().unwrap_or_else(PoisonError::into_inner).put(wanted.peer, header.message, data);
        Ok(())
    }
}
