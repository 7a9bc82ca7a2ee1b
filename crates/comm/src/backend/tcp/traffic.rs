//! What one connection has to do in an exchange, and the checksum behind everything that it carries.
//!
//! TCP's own sum has 16 bits and is made anew at every hop that looks into packets: damage inside a switch, a network card
//! or a driver gets past it (Stone and Partridge, "When the CRC and TCP checksum disagree", 2000), and one bit of an
//! exponent is enough to spoil a model. So on an open connection between hosts four bytes follow each entry of an exchange,
//! its CRC-32, and an entry counts as received when they agree. A sealed connection proves more and has none; nor has one
//! inside a host, which no wire carries and whose speed is that of the memory that a checksum would read once more.
//!
//! Bytes are counted a piece at a time, right before they are sent and right after they have come, while caches hold them.
//! The checksum travels in the same call as the last piece: a small message costs no call more.

use std::collections::VecDeque;
use std::io::{Error, ErrorKind, IoSlice, IoSliceMut, Read, Result, Write};
use std::sync::Arc;

use crc32fast::Hasher;

use crate::backend::message::{Incoming, Outgoing};
use crate::sealed::Connection;

const CHECKSUM_BYTES: usize = 4;
/// How much is counted and moved at a time: what a core's own cache holds.
const PIECE_BYTES: usize = 256 << 10;

/// See the module.
pub(super) struct Traffic {
    pub(super) peer: usize,
    pub(super) connection: Arc<Connection>,
    outgoing: VecDeque<Sending>,
    incoming: VecDeque<Receiving>,
    /// Whether all that was handed to the connection has left it.
    flushed: bool,
}

struct Sending {
    part: Outgoing,
    sum: Hasher,
    /// Bytes that are counted and not sent yet.
    counted: usize,
    trailer: Trailer,
}

struct Receiving {
    part: Incoming,
    sum: Hasher,
    trailer: Trailer,
}

/// The checksum's own bytes, of which some have passed; all of them where there is no checksum.
#[derive(Clone, Copy)]
struct Trailer {
    bytes: [u8; CHECKSUM_BYTES],
    passed: usize,
}

impl Trailer {
    fn of(is_checked: bool, bytes: usize) -> Self {
        let absent = !is_checked || bytes == 0;
        Trailer { bytes: [0; CHECKSUM_BYTES], passed: if absent { CHECKSUM_BYTES } else { 0 } }
    }

    fn is_done(&self) -> bool {
        self.passed == CHECKSUM_BYTES
    }
}

impl Traffic {
    /// `is_far`: whether the peer is on another host.
    pub(super) fn new(
        (peer, is_far): (usize, bool),
        connection: Arc<Connection>,
        outgoing: &[Outgoing],
        incoming: &[Incoming],
    ) -> Self {
        let is_checked = is_far && !connection.is_sealed();
        let sending = |part: &Outgoing| Sending {
            part: *part,
            sum: Hasher::new(),
            counted: 0,
            trailer: Trailer::of(is_checked, part.bytes),
        };
        let receiving = |part: &Incoming| Receiving {
            part: *part,
            sum: Hasher::new(),
            trailer: Trailer::of(is_checked, part.bytes),
        };
        let outgoing = outgoing.iter().filter(|part| part.peer == peer).map(sending).collect();
        let incoming = incoming.iter().filter(|part| part.peer == peer).map(receiving).collect();
        Traffic { peer, connection, outgoing, incoming, flushed: true }
    }

    pub(super) fn sends(&self) -> bool {
        !self.outgoing.is_empty() || !self.flushed
    }

    pub(super) fn receives(&self) -> bool {
        !self.incoming.is_empty()
    }

    pub(super) fn is_done(&self) -> bool {
        !self.sends() && !self.receives()
    }

    /// Moves what can be moved now; says whether anything moved.
    ///
    /// # Safety
    /// As [`Link::exchange`](crate::backend::message::Link::exchange).
    pub(super) unsafe fn advance(&mut self) -> Result<bool> {
        let mut moved = false;
        while let Some(next) = self.outgoing.front_mut() {
            // SAFETY: the caller's contract.
            match unsafe { next.send(&self.connection) } {
                Ok(()) => moved = true,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            if next.part.bytes == 0 && next.trailer.is_done() {
                self.outgoing.pop_front();
            }
        }
        while let Some(next) = self.incoming.front_mut() {
            // SAFETY: the caller's contract.
            match unsafe { next.receive(&self.connection) } {
                Ok(()) => moved = true,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            if next.part.bytes == 0 && next.trailer.is_done() {
                self.incoming.pop_front();
            }
        }
        self.flushed = self.connection.is_flushed()?;
        Ok(moved)
    }
}

impl Sending {
    /// # Safety
    /// The part is readable.
    unsafe fn send(&mut self, connection: &Connection) -> Result<()> {
        // SAFETY: readable by the caller's contract.
        let bytes = unsafe { std::slice::from_raw_parts(self.part.start, self.part.bytes) };
        let count = if self.trailer.is_done() {
            if bytes.is_empty() { 0 } else { connection.offer(bytes)? }
        } else {
            if self.counted == 0 && !bytes.is_empty() {
                self.counted = bytes.len().min(PIECE_BYTES);
                self.sum.update(&bytes[..self.counted]);
                self.trailer.bytes = self.sum.clone().finalize().to_le_bytes();
            }
            let is_last = self.counted == bytes.len();
            let trailer = if is_last { &self.trailer.bytes[self.trailer.passed..] } else { &[] };
            let pieces = [IoSlice::new(&bytes[..self.counted]), IoSlice::new(trailer)];
            let written = connection.stream().write_vectored(&pieces)?;
            let count = written.min(self.counted);
            self.counted -= count;
            self.trailer.passed += written - count;
            count
        };
        self.part.start = self.part.start.wrapping_add(count);
        self.part.bytes -= count;
        Ok(())
    }
}

impl Receiving {
    /// # Safety
    /// The part is writable, and nobody else's.
    unsafe fn receive(&mut self, mut connection: &Connection) -> Result<()> {
        // SAFETY: writable, and ours alone, by the caller's contract; sockets only write to it.
        let bytes = unsafe { std::slice::from_raw_parts_mut(self.part.start, self.part.bytes) };
        let count = if self.trailer.is_done() {
            match if bytes.is_empty() { Ok(0) } else { connection.read(bytes) } {
                Ok(0) if !bytes.is_empty() => return Err(ErrorKind::UnexpectedEof.into()),
                count => count?,
            }
        } else {
            let length = bytes.len().min(PIECE_BYTES);
            let is_last = length == bytes.len();
            let trailer = if is_last { &mut self.trailer.bytes[self.trailer.passed..] } else { &mut [] };
            let mut pieces = [IoSliceMut::new(&mut bytes[..length]), IoSliceMut::new(trailer)];
            let read = connection.stream().read_vectored(&mut pieces)?;
            if read == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            let count = read.min(length);
            self.sum.update(&bytes[..count]);
            self.trailer.passed += read - count;
            if self.trailer.is_done() && self.sum.clone().finalize().to_le_bytes() != self.trailer.bytes {
                return Err(Error::new(ErrorKind::InvalidData, "its checksum is another"));
            }
            count
        };
        self.part.start = self.part.start.wrapping_add(count);
        self.part.bytes -= count;
        Ok(())
    }
}
