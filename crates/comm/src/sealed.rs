//! A connection of two ranks, and the seal that it has where the job asks for one (`FERROSPEED_COMM_ENCRYPT=1`).
//!
//! Once both ends have proven themselves ([`auth`](crate::auth)), a sealed connection begins with a Noise handshake
//! (Perrin, "The Noise Protocol Framework", 2018; the crate `snow`) of the pattern NNpsk0: fresh X25519 keys on both sides,
//! mixed with a key that only holders of the token can derive and that belongs to this connection alone. What follows
//! travels in messages of ChaCha20-Poly1305, numbered from 0: what was changed, left out, repeated or put in by somebody
//! between the two is an error, and who learns the token later cannot read it.
//!
//! ```text
//! 2 bytes: length n   n bytes: up to 65519 bytes of content, encrypted, and their tag of 16
//! ```
//!
//! An open connection costs one branch per call.

use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use snow::{Builder, HandshakeState, StatelessTransportState};

use crate::auth::{Timed, Unproven};

const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
/// An X25519 key and the tag of an empty content: the length of either message of the handshake.
const HANDSHAKE_BYTES: usize = 48;
const LENGTH_BYTES: usize = 2;
const TAG_BYTES: usize = 16;
/// Noise's longest message.
const MAX_MESSAGE_BYTES: usize = 65_535;
const MAX_CONTENT_BYTES: usize = MAX_MESSAGE_BYTES - TAG_BYTES;
/// How much is read at a time: a few messages.
const INBOX_BYTES: usize = 4 * (MAX_MESSAGE_BYTES + LENGTH_BYTES);

/// What a sealed connection encrypts and decrypts with.
pub(crate) struct Seal {
    transport: StatelessTransportState,
    outbox: Mutex<Outbox>,
    inbox: Mutex<Inbox>,
}

/// The secret that a handshake begins with, and what both ends must agree on.
pub(crate) struct Agreement<'a> {
    pub(crate) secret: &'a [u8; 32],
    pub(crate) about: &'a [u8],
}

impl Agreement<'_> {
    fn builder(&self) -> std::result::Result<Builder<'_>, snow::Error> {
        Builder::new(PATTERN.parse()?).psk(0, self.secret)?.prologue(self.about)
    }
}

fn not_noise(_: snow::Error) -> Unproven {
    Unproven::Protocol
}

fn speak(stream: &mut Timed<'_>, handshake: &mut HandshakeState) -> std::result::Result<(), Unproven> {
    let mut message = [0u8; HANDSHAKE_BYTES];
    handshake.write_message(&[], &mut message).map_err(not_noise)?;
    Ok(stream.write_all(&message)?)
}

fn hear(stream: &mut Timed<'_>, handshake: &mut HandshakeState) -> std::result::Result<(), Unproven> {
    let mut message = [0u8; HANDSHAKE_BYTES];
    stream.read_exact(&mut message)?;
    // It opens with the right secret alone.
    handshake.read_message(&message, &mut []).map(drop).map_err(|_| Unproven::Stranger)
}

impl Seal {
    /// The side that called.
    pub(crate) fn call(
        stream: &mut Timed<'_>,
        agreement: &Agreement<'_>,
    ) -> std::result::Result<Seal, Unproven> {
        let mut handshake = agreement.builder().and_then(Builder::build_initiator).map_err(not_noise)?;
        speak(stream, &mut handshake)?;
        hear(stream, &mut handshake)?;
        Seal::of(handshake)
    }

    /// The side that listened.
    pub(crate) fn answer(
        stream: &mut Timed<'_>,
        agreement: &Agreement<'_>,
    ) -> std::result::Result<Seal, Unproven> {
        let mut handshake = agreement.builder().and_then(Builder::build_responder).map_err(not_noise)?;
        hear(stream, &mut handshake)?;
        speak(stream, &mut handshake)?;
        Seal::of(handshake)
    }

    fn of(handshake: HandshakeState) -> std::result::Result<Seal, Unproven> {
        let transport = handshake.into_stateless_transport_mode().map_err(not_noise)?;
        Ok(Seal { transport, outbox: Mutex::default(), inbox: Mutex::default() })
    }

    fn outbox(&self) -> MutexGuard<'_, Outbox> {
        self.outbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One message that is encrypted and on its way.
#[derive(Default)]
struct Outbox {
    next_number: u64,
    wire: Vec<u8>,
    sent: usize,
}

impl Outbox {
    /// Encrypts as much of some content as a message takes; says how much.
    fn fill(&mut self, transport: &StatelessTransportState, content: &[u8]) -> Result<usize> {
        let count = content.len().min(MAX_CONTENT_BYTES);
        let length = count + TAG_BYTES;
        self.wire.resize(LENGTH_BYTES + length, 0);
        self.wire[..LENGTH_BYTES].copy_from_slice(&(length as u16).to_le_bytes());
        transport
            .write_message(self.next_number, &content[..count], &mut self.wire[LENGTH_BYTES..])
            .map_err(|error| Error::other(format!("cannot encrypt: {error}")))?;
        self.next_number += 1;
        self.sent = 0;
        Ok(count)
    }

    /// Hands on what is left of the message; says whether nothing is.
    fn drain(&mut self, mut to: impl Write) -> Result<bool> {
        while self.sent < self.wire.len() {
            match to.write(&self.wire[self.sent..]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }
}

/// What has come: encrypted bytes `begin..end` of `wire`, and content of which `taken` bytes have been handed on.
#[derive(Default)]
struct Inbox {
    next_number: u64,
    wire: Vec<u8>,
    begin: usize,
    end: usize,
    content: Vec<u8>,
    taken: usize,
}

impl Inbox {
    /// Where the next message lies in `wire`, once all of it has come.
    fn message(&self) -> Result<Option<(usize, usize)>> {
        let come = &self.wire[self.begin..self.end];
        let Some(length) = come.first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
        let length = usize::from(u16::from_le_bytes(*length));
        if length < TAG_BYTES {
            return Err(changed());
        }
        let start = self.begin + LENGTH_BYTES;
        Ok((come.len() >= LENGTH_BYTES + length).then_some((start, start + length)))
    }

    /// Reads content; 0 bytes mean that the other side has closed the connection.
    fn read(
        &mut self,
        transport: &StatelessTransportState,
        mut from: impl Read,
        out: &mut [u8],
    ) -> Result<usize> {
        loop {
            if self.taken < self.content.len() {
                let count = out.len().min(self.content.len() - self.taken);
                out[..count].copy_from_slice(&self.content[self.taken..self.taken + count]);
                self.taken += count;
                return Ok(count);
            }
            if let Some((start, end)) = self.message()? {
                let length = end - start - TAG_BYTES;
                // Content that fits goes straight to where it belongs.
                let straight = length <= out.len();
                self.content.resize(if straight { 0 } else { length }, 0);
                self.taken = 0;
                let to = if straight { &mut out[..length] } else { &mut self.content[..] };
                let message = &self.wire[start..end];
                transport.read_message(self.next_number, message, to).map_err(|_| changed())?;
                self.next_number += 1;
                self.begin = end;
                if straight && length > 0 {
                    return Ok(length);
                }
                continue;
            }
            self.wire.resize(INBOX_BYTES, 0);
            self.wire.copy_within(self.begin..self.end, 0);
            (self.begin, self.end) = (0, self.end - self.begin);
            match from.read(&mut self.wire[self.end..])? {
                0 => return Ok(0),
                count => self.end += count,
            }
        }
    }
}

fn changed() -> Error {
    let problem = "what came is not what was sent: somebody or something between the hosts has changed it";
    Error::new(ErrorKind::InvalidData, problem)
}

/// A connection that has proven itself.
pub(crate) struct Connection {
    stream: Arc<TcpStream>,
    seal: Option<Box<Seal>>,
}

impl Connection {
    pub(crate) fn new(stream: Arc<TcpStream>, seal: Option<Seal>) -> Self {
        Connection { stream, seal: seal.map(Box::new) }
    }

    /// Whether what comes is proven to be what was sent.
    pub(crate) fn is_sealed(&self) -> bool {
        self.seal.is_some()
    }

    pub(crate) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Takes what can be sent now without waiting, of which a part may stay here: see [`Connection::is_flushed`].
    pub(crate) fn offer(&self, content: &[u8]) -> Result<usize> {
        let Some(seal) = &self.seal else { return (&*self.stream).write(content) };
        let mut outbox = seal.outbox();
        if !outbox.drain(&*self.stream)? {
            return Err(ErrorKind::WouldBlock.into());
        }
        let count = outbox.fill(&seal.transport, content)?;
        outbox.drain(&*self.stream)?;
        Ok(count)
    }

    /// Sends what stayed here, without waiting; says whether nothing does any more.
    pub(crate) fn is_flushed(&self) -> Result<bool> {
        self.seal.as_ref().map_or(Ok(true), |seal| seal.outbox().drain(&*self.stream))
    }

    /// Reads, but not beyond a deadline.
    pub(crate) fn until(&self, deadline: Instant) -> impl Read + '_ {
        Until { connection: self, deadline }
    }

    fn read_from(&self, mut from: impl Read, out: &mut [u8]) -> Result<usize> {
        match &self.seal {
            Some(seal) => seal.inbox().read(&seal.transport, from, out),
            None => from.read(out),
        }
    }
}

impl Read for &Connection {
    fn read(&mut self, out: &mut [u8]) -> Result<usize> {
        self.read_from(&*self.stream, out)
    }
}

/// For a connection that may wait: all that is taken is sent.
impl Write for &Connection {
    fn write(&mut self, content: &[u8]) -> Result<usize> {
        let Some(seal) = &self.seal else { return (&*self.stream).write(content) };
        let mut outbox = seal.outbox();
        // What an earlier call could not send in its time goes first.
        if !outbox.drain(&*self.stream)? {
            return Err(ErrorKind::TimedOut.into());
        }
        let count = outbox.fill(&seal.transport, content)?;
        if outbox.drain(&*self.stream)? { Ok(count) } else { Err(ErrorKind::TimedOut.into()) }
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}

struct Until<'a> {
    connection: &'a Connection,
    deadline: Instant,
}

impl Read for Until<'_> {
    fn read(&mut self, out: &mut [u8]) -> Result<usize> {
        let Until { connection, deadline } = *self;
        connection.read_from(Timed { stream: &connection.stream, deadline }, out)
    }
}

#[cfg(test)]
#[path = "sealed/tests.rs"]
mod tests;
