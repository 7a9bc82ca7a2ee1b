//! Point-to-point messages over a link: a header, then the data, on a stream per direction.

use std::sync::PoisonError;

use super::{Incoming, Link, MessageCarrier, Outgoing, Stream};
use crate::backend::stash::{HEADER_BYTES, MessageHeader};
use crate::backend::{Message, Ticket};
use crate::error::Result;

impl<L: Link> MessageCarrier<L> {
    pub(super) fn send_message(&self, message: &Message, ticket: &Ticket) -> Result<()> {
        let header = MessageHeader::new(message, ticket);
        let peer = message.peer;
        let outgoing = [
            Outgoing { peer, start: (&raw const header).cast(), bytes: HEADER_BYTES },
            Outgoing { peer, start: message.region.as_ptr(), bytes: message.region.len() },
        ];
        // SAFETY: a local and a region that stays untouched while the operation is in flight.
        unsafe { self.exchange_on(Stream::Sending, &outgoing, &[], ticket) }
    }

    pub(super) fn recv_message(&self, message: &Message, ticket: &Ticket) -> Result<()> {
        let stashed =
            self.stash.lock().unwrap_or_else(PoisonError::into_inner).take(message.peer, message.tag);
        if let Some((header, data)) = stashed {
            header.check(message, ticket, &self.membership)?;
            // SAFETY: the lengths agree; the region is ours to write by its contract.
            unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), message.region.as_ptr(), data.len()) };
            return Ok(());
        }
        loop {
            let mut header = <MessageHeader as bytemuck::Zeroable>::zeroed();
            self.receive(message.peer, (&raw mut header).cast(), HEADER_BYTES, ticket)?;
            if header.tag == message.tag {
                header.check(message, ticket, &self.membership)?;
                return self.receive(message.peer, message.region.as_ptr(), message.region.len(), ticket);
            }
            if !self.stash.lock().unwrap_or_else(PoisonError::into_inner).has_room_for(header.bytes) {
                return Err(header.mismatch(message, ticket, &self.membership));
            }
            let mut data = vec![0u8; header.bytes as usize];
            self.receive(message.peer, data.as_mut_ptr(), data.len(), ticket)?;
            self.stash.lock().unwrap_or_else(PoisonError::into_inner).put(message.peer, header, data);
        }
    }

    fn receive(&self, peer: usize, start: *mut u8, bytes: usize, ticket: &Ticket) -> Result<()> {
        // SAFETY: both callers pass memory that they own for the length of the call.
        unsafe { self.exchange_on(Stream::Receiving, &[], &[Incoming { peer, start, bytes }], ticket) }
    }
}
