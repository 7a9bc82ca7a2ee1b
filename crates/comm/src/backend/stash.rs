//! Headers of point-to-point messages, and those that arrived before their tag was asked for.
//!
//! Messages of a pair of ranks arrive in the order they were sent. One whose tag is not the one asked for is put aside,
//! up to [`STASH_BYTES`] per group; beyond that the receive fails and names both sides, rather than eat all memory.

use std::collections::{HashMap, VecDeque};

use crate::backend::{Membership, Message, Ticket};
use crate::dtype::DType;
use crate::error::{Error, Result};

/// Bytes of messages with other tags that a receiver keeps.
pub(crate) const STASH_BYTES: usize = 8 << 20;
const CALL_SITE_BYTES: usize = 200;
/// Bytes of a header on the wire.
pub(crate) const HEADER_BYTES: usize = size_of::<MessageHeader>();

/// What a message says about itself; laid out the same in shared memory and on the wire.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct MessageHeader {
    pub(crate) tag: u64,
    pub(crate) bytes: u64,
    dtype: u8,
    call_site_bytes: u8,
    call_site: [u8; CALL_SITE_BYTES],
    unused: [u8; 6],
}

impl MessageHeader {
    pub(crate) fn new(message: &Message, ticket: &Ticket) -> Self {
        let mut header = MessageHeader {
            tag: message.tag,
            bytes: message.region.len() as u64,
            dtype: message.dtype as u8,
            call_site_bytes: 0,
            call_site: [0; CALL_SITE_BYTES],
            unused: [0; 6],
        };
        // The end of a path says more than its beginning.
        let site = ticket.call_site.to_string();
        let site = &site.as_bytes()[site.len().saturating_sub(CALL_SITE_BYTES)..];
        header.call_site[..site.len()].copy_from_slice(site);
        header.call_site_bytes = site.len() as u8;
        header
    }

    /// Fails, on both sides, when the message is not what the receiver expects.
    pub(crate) fn check(&self, expected: &Message, ticket: &Ticket, membership: &Membership) -> Result<()> {
        let agrees = self.bytes == expected.region.len() as u64 && self.dtype == expected.dtype as u8;
        if agrees { Ok(()) } else { Err(self.mismatch(expected, ticket, membership)) }
    }

    pub(crate) fn mismatch(&self, expected: &Message, ticket: &Ticket, membership: &Membership) -> Error {
        let site = &self.call_site[..(self.call_site_bytes as usize).min(CALL_SITE_BYTES)];
        let site = String::from_utf8_lossy(site);
        let dtype = DType::from_code(self.dtype).map_or("an unknown type", DType::name);
        let sent = format!("send({dtype}, {} bytes, tag {}) at {site}", self.bytes, self.tag);
        let (dtype, bytes, tag) = (expected.dtype, expected.region.len(), expected.tag);
        let wanted = format!("recv({dtype}, {bytes} bytes, tag {tag}) at {}", ticket.call_site);
        membership.announce_mismatch((expected.peer, sent), (membership.me, wanted))
    }
}

/// A message that was received before it was asked for.
type Early = (MessageHeader, Vec<u8>);

/// Messages that wait for somebody to ask for their tag.
#[derive(Default)]
pub(crate) struct Stash {
    /// `(sender, tag)` → in order of arrival.
    waiting: HashMap<(usize, u64), VecDeque<Early>>,
    bytes: usize,
}

impl Stash {
    pub(crate) fn take(&mut self, sender: usize, tag: u64) -> Option<Early> {
        let found = self.waiting.get_mut(&(sender, tag))?.pop_front()?;
        self.bytes -= found.1.len();
        Some(found)
    }

    pub(crate) fn has_room_for(&self, bytes: u64) -> bool {
        bytes <= (STASH_BYTES - self.bytes) as u64
    }

    pub(crate) fn put(&mut self, sender: usize, header: MessageHeader, data: Vec<u8>) {
        self.bytes += data.len();
        self.waiting.entry((sender, header.tag)).or_default().push_back((header, data));
    }
}
