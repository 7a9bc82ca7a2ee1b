//! Lines between an agent and its coordinator, each with a proof that a holder of the job's token wrote it for this very place.
//!
//! ```text
//! listener → caller   greeting, 32 random letters
//! caller → listener   greeting, 32 random letters
//! both, then          HMAC-SHA256(token; role, both random texts, number of the line, line) in hex, the line
//! ```
//!
//! The random texts are fresh on both sides, lines are numbered and the two roles told apart: a line cannot be used again, moved,
//! or sent back. What is said is no secret (names, slots, addresses, reports of failures); the token never is.
//!
//! It refuses lines longer than any message, and reads nothing behind one that is not proven.

use std::io::{BufRead, BufReader, Error, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use hmac::{Hmac, KeyInit, Mac};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::Sha256;

use super::PROOF_LIMIT;

const GREETING: &str = "FERROSPEED-AGENT-1";
const TAG_DIGITS: usize = 64;
/// A round of a hundred thousand slots has less.
const MAX_LINE_BYTES: u64 = 8 << 20;
const MAX_GREETING_BYTES: u64 = 128;

/// Which end of a connection this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Coordinator,
    Agent,
}

/// Proofs of one direction.
struct Proofs {
    mac: Hmac<Sha256>,
    next: u64,
}

impl Proofs {
    fn new(token: &str, of: Role, greetings: &[String; 2]) -> Proofs {
        // HMAC takes keys of any length.
        let mut mac =
            Hmac::<Sha256>::new_from_slice(token.as_bytes()).unwrap_or_else(|_| unreachable!("any length"));
        let role = if of == Role::Coordinator { "coordinator" } else { "agent" };
        mac.update(format!("elastic\n{role}\n{}\n{}\n", greetings[0], greetings[1]).as_bytes());
        Proofs { mac, next: 0 }
    }

    fn of_next(&mut self, line: &str) -> Hmac<Sha256> {
        let mut mac = self.mac.clone();
        mac.update(&self.next.to_le_bytes());
        mac.update(line.as_bytes());
        self.next += 1;
        mac
    }
}

/// The writing half.
pub(super) struct Writer {
    stream: TcpStream,
    proofs: Proofs,
}

/// The reading half.
pub(super) struct Reader {
    lines: BufReader<TcpStream>,
    proofs: Proofs,
}

/// Greets the other end; what is read and written from then on is proven.
pub(super) fn meet(stream: TcpStream, token: &str, role: Role) -> std::io::Result<(Reader, Writer)> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PROOF_LIMIT))?;
    stream.set_write_timeout(Some(PROOF_LIMIT))?;
    let own = crate::surroundings::new_job_token().map_err(Error::other)?;
    let mut writing = stream.try_clone()?;
    writing.write_all(format!("{GREETING} {own}\n").as_bytes())?;
    let mut lines = BufReader::new(stream);
    let line = read_line(&mut lines, MAX_GREETING_BYTES)?;
    let theirs = line.strip_prefix(GREETING).map(str::trim).filter(|text| text.len() == own.len());
    let theirs = theirs.ok_or_else(|| invalid("it is no agent or coordinator of ours"))?.to_owned();
    let greetings = if role == Role::Coordinator { [own, theirs] } else { [theirs, own] };
    let other = if role == Role::Coordinator { Role::Agent } else { Role::Coordinator };
    let reader = Reader { lines, proofs: Proofs::new(token, other, &greetings) };
    Ok((reader, Writer { stream: writing, proofs: Proofs::new(token, role, &greetings) }))
}

impl Writer {
    /// Sends a message.
    pub(super) fn send(&mut self, message: &impl Serialize) -> std::io::Result<()> {
        let line = serde_json::to_string(message)?;
        let tag = self.proofs.of_next(&line).finalize().into_bytes();
        let tag: String = tag.iter().map(|byte| format!("{byte:02x}")).collect();
        self.stream.write_all(format!("{tag} {line}\n").as_bytes())
    }

    /// Ends the connection, for its reader too.
    pub(super) fn close(&self) {
        // Who is gone already needs no end.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
}

impl Reader {
    /// How long to wait for the next message.
    pub(super) fn wait_at_most(&self, limit: Duration) -> std::io::Result<()> {
        self.lines.get_ref().set_read_timeout(Some(limit))
    }

    /// The next message.
    pub(super) fn receive<M: DeserializeOwned>(&mut self) -> std::io::Result<M> {
        let text = read_line(&mut self.lines, MAX_LINE_BYTES)?;
        let (tag, line) = text.split_at_checked(TAG_DIGITS).ok_or_else(|| invalid("a line without proof"))?;
        let line = line.strip_prefix(' ').ok_or_else(|| invalid("a line without proof"))?;
        let digits = |index: usize| tag.get(2 * index..2 * index + 2);
        let tag: Option<Vec<u8>> =
            (0..TAG_DIGITS / 2).map(|index| u8::from_str_radix(digits(index)?, 16).ok()).collect();
        let proof = self.proofs.of_next(line);
        match tag.is_some_and(|tag| proof.verify_slice(&tag).is_ok()) {
            true => Ok(serde_json::from_str(line)?),
            false => Err(invalid("it does not know the job's token")),
        }
    }
}

fn read_line(lines: &mut BufReader<TcpStream>, most: u64) -> std::io::Result<String> {
    let mut line = String::new();
    lines.by_ref().take(most).read_line(&mut line)?;
    match line.strip_suffix('\n') {
        Some(whole) => Ok(whole.to_owned()),
        None if line.len() as u64 >= most => Err(invalid("a line that is longer than any message")),
        None => Err(ErrorKind::UnexpectedEof.into()),
    }
}

fn invalid(why: &str) -> Error {
    Error::new(ErrorKind::InvalidData, why)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// Both ends of a connection, each with a token.
    fn ends(tokens: [&str; 2]) -> [(Reader, Writer); 2] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let calling = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let answering = listener.accept().unwrap().0;
        std::thread::scope(|scope| {
            let one = scope.spawn(|| meet(answering, tokens[0], Role::Coordinator).unwrap());
            let other = meet(calling, tokens[1], Role::Agent).unwrap();
            [one.join().unwrap(), other]
        })
    }

    #[test]
    fn holders_of_one_token_understand_each_other() {
        let [(mut hears, mut says), (mut other_hears, mut other_says)] = ends(["t", "t"]);
        for number in 0..3u32 {
            other_says.send(&number).unwrap();
            says.send(&(number + 10)).unwrap();
            assert_eq!(hears.receive::<u32>().unwrap(), number);
            assert_eq!(other_hears.receive::<u32>().unwrap(), number + 10);
        }
    }

    #[test]
    fn a_stranger_a_repeated_line_and_ones_own_line_are_not_read() {
        let [(mut hears, _), (_, mut other_says)] = ends(["t", "another"]);
        other_says.send(&1u32).unwrap();
        let why = hears.receive::<u32>().unwrap_err().to_string();
        assert!(why.contains("does not know the job's token"), "{why}");

        let [(mut hears, _), (_, mut other_says)] = ends(["t", "t"]);
        let mut proofs = std::mem::replace(&mut other_says.proofs.next, 0);
        other_says.send(&1u32).unwrap();
        other_says.proofs.next = std::mem::take(&mut proofs);
        other_says.send(&1u32).unwrap();
        assert_eq!(hears.receive::<u32>().unwrap(), 1);
        assert!(hears.receive::<u32>().is_err(), "the same line again");

        // What the coordinator has said comes back to it.
        let [(mut hears, says), (_, mut other_says)] = ends(["t", "t"]);
        other_says.proofs.mac = says.proofs.mac.clone();
        other_says.send(&1u32).unwrap();
        assert!(hears.receive::<u32>().is_err());
    }
}
