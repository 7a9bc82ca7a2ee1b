//! Proof of membership: both ends of a connection show that they know the job's token, without telling it.
//!
//! ```text
//! listener → caller   magic, 32 random bytes
//! caller → listener   magic, 32 random bytes, claim, HMAC("caller", both random values, claim)
//! listener → caller   1, HMAC("listener", both random values, claim)      or 0 and why not,
//!                     or 2, HMAC("differs", both random values, claim)    where only one of the two seals
//! ```
//!
//! The key is derived from the token. A claim says who calls whom for what, so a proof is good for one link only; the
//! random values are fresh on both sides, so it cannot be used again; the two roles are told apart, so it cannot be sent
//! back. Whoever calls proves itself first: a stranger who connects learns nothing that depends on the token. This is
//! ISO/IEC 9798-4's mutual authentication in three passes, with HMAC-SHA256 (RFC 2104).
//!
//! Where the job's connections are sealed ([`sealed`](crate::sealed)) the claim says so, and the handshake of the seal follows.
//! Two members of which only one seals cannot become a link whatever they wait for: the listener proves that it is one, so
//! that the caller may give up at once, which it would not do on a stranger's word.
//!
//! It refuses to wait: the whole exchange has one deadline, however slowly the bytes come.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::private::fill_random;
use crate::sealed::{Agreement, Seal};

/// Begins both sides' first message; the last byte is the version of the protocol.
const MAGIC: [u8; 8] = *b"FERROCM\x02";
const NONCE_BYTES: usize = 32;
const TAG_BYTES: usize = 32;
const MAX_REASON_BYTES: usize = 255;

/// The first byte of the listener's answer.
const REFUSED: u8 = 0;
const ACCEPTED: u8 = 1;
const SEALS_DIFFER: u8 = 2;

type Tag = [u8; TAG_BYTES];

/// What a job's ranks have in common and strangers have not.
#[derive(Clone)]
pub(crate) struct JobKey {
    mac: Hmac<Sha256>,
    seals: bool,
}

impl JobKey {
    pub(crate) fn of_token(token: &str) -> Self {
        // HMAC takes keys of any length.
        let mac = Hmac::new_from_slice(token.as_bytes()).unwrap_or_else(|_| unreachable!("any length"));
        JobKey { mac, seals: false }
    }

    /// The same key, for connections that are sealed or not.
    pub(crate) fn sealing(self, seals: bool) -> Self {
        JobKey { seals, ..self }
    }

    /// A name that only the token's holders can find, for what lies in a folder of their own.
    pub(crate) fn name(&self, purpose: &str) -> String {
        let tag = self.tag(purpose.as_bytes(), &[]);
        tag[..16].iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn mac(&self, role: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
        let mut mac = self.mac.clone();
        // Lengths keep two different lists of parts from reading alike.
        for part in std::iter::once(&role).chain(parts) {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        mac
    }

    fn tag(&self, role: &[u8], parts: &[&[u8]]) -> Tag {
        self.mac(role, parts).finalize().into_bytes().into()
    }

    /// Compares in constant time.
    fn is_tag(&self, tag: &Tag, role: &[u8], parts: &[&[u8]]) -> bool {
        self.mac(role, parts).verify_slice(tag).is_ok()
    }
}

impl std::fmt::Debug for JobKey {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("JobKey(secret)")
    }
}

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Purpose {
    /// A rank's connection to the hub.
    Control,
    /// Collectives of a group.
    Collectives,
    /// Messages from the one who calls.
    Messages,
}

/// Who calls whom, and for what.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Claim {
    pub(crate) purpose: Purpose,
    pub(crate) group: u64,
    pub(crate) from_rank: usize,
    pub(crate) to_rank: usize,
}

const CLAIM_BYTES: usize = 32;
/// Set in a claim's first word where the connection is to be sealed.
const SEALED: u64 = 1 << 8;

impl Claim {
    fn to_bytes(self, seals: bool) -> [u8; CLAIM_BYTES] {
        let purpose = match self.purpose {
            Purpose::Control => 0,
            Purpose::Collectives => 1,
            Purpose::Messages => 2,
        };
        let purpose = if seals { purpose | SEALED } else { purpose };
        let words = [purpose, self.group, self.from_rank as u64, self.to_rank as u64];
        let mut bytes = [0u8; CLAIM_BYTES];
        for (slot, word) in bytes.chunks_exact_mut(8).zip(words) {
            slot.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// The claim, and whether the connection is to be sealed.
    fn from_bytes(bytes: &[u8; CLAIM_BYTES]) -> Option<(Self, bool)> {
        let mut words = bytes.chunks_exact(8).map(|word| {
            let mut copy = [0u8; 8];
            copy.copy_from_slice(word);
            u64::from_le_bytes(copy)
        });
        let first = words.next()?;
        let purpose = match first & !SEALED {
            0 => Purpose::Control,
            1 => Purpose::Collectives,
            2 => Purpose::Messages,
            _ => return None,
        };
        let group = words.next()?;
        let from_rank = usize::try_from(words.next()?).ok()?;
        let to_rank = usize::try_from(words.next()?).ok()?;
        Some((Claim { purpose, group, from_rank, to_rank }, first & SEALED != 0))
    }
}

/// Why two ends did not become one link.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unproven {
    /// The connection failed, or was too slow.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// The other side is something else.
    #[error("it does not speak this protocol")]
    Protocol,
    /// The other side does not know the token.
    #[error("its job token is not this job's")]
    Stranger,
    /// The listener says that it does not take the caller; it has not proven anything itself.
    #[error("it answers: {0}")]
    TurnedAway(String),
    /// Both are members of the job, and only one of them seals its connections.
    #[error(
        "rank {sealing} encrypts its connections and rank {open} does not; set FERROSPEED_COMM_ENCRYPT alike for every rank"
    )]
    SealsDiffer { sealing: usize, open: usize },
}

impl Unproven {
    fn seals_differ(claim: &Claim, caller_seals: bool) -> Self {
        let Claim { from_rank, to_rank, .. } = *claim;
        let (sealing, open) = if caller_seals { (from_rank, to_rank) } else { (to_rank, from_rank) };
        Unproven::SealsDiffer { sealing, open }
    }
}

/// A socket whose reads and writes all end at one deadline.
pub(crate) struct Timed<'a> {
    pub(crate) stream: &'a TcpStream,
    pub(crate) deadline: Instant,
}

impl Timed<'_> {
    fn left(&self) -> std::io::Result<Option<std::time::Duration>> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(Some(left)) }
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(bytes)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn read_array<const BYTES: usize>(stream: &mut Timed<'_>) -> std::io::Result<[u8; BYTES]> {
    let mut bytes = [0u8; BYTES];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// The caller's side; gives the seal, where there is one.
pub(crate) fn call(mut stream: Timed<'_>, key: &JobKey, claim: Claim) -> Result<Option<Seal>, Unproven> {
    if read_array(&mut stream)? != MAGIC {
        return Err(Unproven::Protocol);
    }
    let theirs: [u8; NONCE_BYTES] = read_array(&mut stream)?;
    let mut ours = [0u8; NONCE_BYTES];
    fill_random(&mut ours)?;
    let claimed = claim;
    let claim = claim.to_bytes(key.seals);
    let proof = key.tag(b"caller", &[&theirs, &ours, &claim]);
    stream.write_all(&[&MAGIC[..], &ours, &claim, &proof].concat())?;
    match read_array(&mut stream)? {
        [ACCEPTED] => {}
        [SEALS_DIFFER] => {
            let proof = read_array(&mut stream)?;
            let is_member = key.is_tag(&proof, b"differs", &[&theirs, &ours, &claim]);
            return Err(if is_member {
                Unproven::seals_differ(&claimed, key.seals)
            } else {
                Unproven::Stranger
            });
        }
        [REFUSED] => {
            let [length] = read_array(&mut stream)?;
            let mut reason = vec![0u8; usize::from(length)];
            stream.read_exact(&mut reason)?;
            return Err(Unproven::TurnedAway(String::from_utf8_lossy(&reason).escape_debug().collect()));
        }
        _ => return Err(Unproven::Protocol),
    }
    let proof = read_array(&mut stream)?;
    if !key.is_tag(&proof, b"listener", &[&theirs, &ours, &claim]) {
        return Err(Unproven::Stranger);
    }
    let secret = key.tag(b"seal", &[&theirs, &ours, &claim]);
    let agreement = Agreement { secret: &secret, about: &claim };
    key.seals.then(|| Seal::call(&mut stream, &agreement)).transpose()
}

/// The listener's side: what the caller has proven to be, and the seal where there is one. `accepts` may still turn it away, with a reason that only a
/// member hears.
pub(crate) fn answer(
    mut stream: Timed<'_>,
    key: &JobKey,
    accepts: impl FnOnce(&Claim) -> Result<(), String>,
) -> Result<(Claim, Option<Seal>), Unproven> {
    let mut ours = [0u8; NONCE_BYTES];
    fill_random(&mut ours)?;
    stream.write_all(&[&MAGIC[..], &ours].concat())?;
    if read_array(&mut stream)? != MAGIC {
        turn_away(&mut stream, &Unproven::Protocol.to_string());
        return Err(Unproven::Protocol);
    }
    let theirs: [u8; NONCE_BYTES] = read_array(&mut stream)?;
    let claim_bytes: [u8; CLAIM_BYTES] = read_array(&mut stream)?;
    let proof = read_array(&mut stream)?;
    if !key.is_tag(&proof, b"caller", &[&ours, &theirs, &claim_bytes]) {
        turn_away(&mut stream, &Unproven::Stranger.to_string());
        return Err(Unproven::Stranger);
    }
    let (claim, seals) = Claim::from_bytes(&claim_bytes).ok_or(Unproven::Protocol)?;
    if seals != key.seals {
        let proof = key.tag(b"differs", &[&ours, &theirs, &claim_bytes]);
        stream.write_all(&[&[SEALS_DIFFER][..], &proof].concat())?;
        return Err(Unproven::seals_differ(&claim, seals));
    }
    if let Err(reason) = accepts(&claim) {
        turn_away(&mut stream, &reason);
        return Err(Unproven::TurnedAway(reason));
    }
    let proof = key.tag(b"listener", &[&ours, &theirs, &claim_bytes]);
    stream.write_all(&[&[ACCEPTED][..], &proof].concat())?;
    let secret = key.tag(b"seal", &[&ours, &theirs, &claim_bytes]);
    let agreement = Agreement { secret: &secret, about: &claim_bytes };
    let seal = key.seals.then(|| Seal::answer(&mut stream, &agreement)).transpose()?;
    Ok((claim, seal))
}

fn turn_away(stream: &mut Timed<'_>, reason: &str) {
    let reason = &reason.as_bytes()[..reason.len().min(MAX_REASON_BYTES)];
    // It is being turned away: whether it hears why is its own affair.
    let _ = stream.write_all(&[&[REFUSED, reason.len() as u8][..], reason].concat());
}

#[cfg(test)]
#[path = "auth/tests.rs"]
mod tests;
