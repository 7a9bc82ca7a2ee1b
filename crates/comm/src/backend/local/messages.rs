//! Messages between two ranks of a host.
//!
//! Every ordered pair of ranks has a channel: a ring of slots that the sender fills and the receiver empties. A message
//! begins with a header (tag, type, length, call site). Registered memory does not pass through the ring: the header
//! names it, the receiver copies it out in one go, and the sender waits until that is done.
//!
//! Messages of a pair arrive in the order they were sent. One whose tag is not the one asked for is put aside, up to
//! [`STASH_BYTES`] per group; beyond that the receiver fails and says which tags it holds.

use std::collections::{HashMap, VecDeque};
use std::sync::PoisonError;

use super::LocalCarrier;
use super::collectives::copy;
use super::sync::{Counter, Interrupted};
use crate::backend::{Message, Ticket};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::segment::SharedRange;

const SLOTS: usize = 8;
const SLOT_BYTES: usize = 32 << 10;
const CALL_SITE_BYTES: usize = 200;
/// Bytes of messages with other tags that a receiver keeps.
const STASH_BYTES: usize = 8 << 20;

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

#[repr(C)]
#[derive(Clone, Copy)]
struct Header {
    tag: u64,
    bytes: u64,
    segment_plus_one: u64,
    offset: u64,
    dtype: u8,
    call_site_bytes: u8,
    call_site: [u8; CALL_SITE_BYTES],
}

/// Messages that arrived before somebody asked for their tag: `(sender, tag)` → in order of arrival.
#[derive(Default)]
pub(super) struct Stash {
    waiting: HashMap<(usize, u64), VecDeque<(Header, Vec<u8>)>>,
    bytes: usize,
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
        let shared = if total > SLOT_BYTES { self.segments.locate(&message.region) } else { None };
        let mut header = Header {
            tag: message.tag,
            bytes: total as u64,
            segment_plus_one: shared.map_or(0, |range| range.segment + 1),
            offset: shared.map_or(0, |range| range.offset),
            dtype: message.dtype as u8,
            call_site_bytes: 0,
            call_site: [0; CALL_SITE_BYTES],
        };
        let site = ticket.call_site.to_string();
        let site = &site.as_bytes()[site.len().saturating_sub(CALL_SITE_BYTES)..];
        header.call_site[..site.len()].copy_from_slice(site);
        header.call_site_bytes = site.len() as u8;

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
        let key = (message.peer, message.tag);
        let stashed = {
            let mut stash = self.stash.lock().unwrap_or_else(PoisonError::into_inner);
            let found = stash.waiting.get_mut(&key).and_then(VecDeque::pop_front);
            stash.bytes -= found.as_ref().map_or(0, |(_, data)| data.len());
            found
        };
        if let Some((header, data)) = stashed {
            self.check_header(&header, message, ticket)?;
            // SAFETY: the lengths agree; the region is ours to write by its contract.
            unsafe { copy(data.as_ptr(), message.region.as_ptr(), data.len()) };
            return Ok(());
        }
        loop {
            let header = self.await_header(message.peer, ticket)?;
            if header.tag == message.tag {
                self.check_header(&header, message, ticket)?;
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
        let total = header.bytes as usize;
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
        let bytes = header.bytes as usize;
        let held = self.stash.lock().unwrap_or_else(PoisonError::into_inner).bytes;
        if bytes > STASH_BYTES.saturating_sub(held) {
            return Err(self.mismatch_with_sender(header, wanted, ticket));
        }
        let mut data = vec![0u8; bytes];
        self.receive_body(header, wanted.peer, data.as_mut_ptr(), ticket)?;
        let mut stash = self.stash.lock().unwrap_or_else(PoisonError::into_inner);
        stash.bytes += bytes;
        stash.waiting.entry((wanted.peer, header.tag)).or_default().push_back((*header, data));
        Ok(())
    }

    fn check_header(&self, header: &Header, message: &Message, ticket: &Ticket) -> Result<()> {
        let agrees = header.bytes == message.region.len() as u64 && header.dtype == message.dtype as u8;
        if agrees { Ok(()) } else { Err(self.mismatch_with_sender(header, message, ticket)) }
    }

    fn mismatch_with_sender(&self, header: &Header, message: &Message, ticket: &Ticket) -> Error {
        let site = &header.call_site[..(header.call_site_bytes as usize).min(CALL_SITE_BYTES)];
        let dtype = DType::from_code(header.dtype).map_or("an unknown type", DType::name);
        let sent = format!(
            "send({dtype}, {} bytes, tag {}) at {}",
            header.bytes,
            header.tag,
            String::from_utf8_lossy(site)
        );
        let expected = format!(
            "recv({}, {} bytes, tag {}) at {}",
            message.dtype,
            message.region.len(),
            message.tag,
            ticket.call_site
        );
        self.membership.announce_mismatch((message.peer, sent), (self.membership.me, expected))
    }
}
