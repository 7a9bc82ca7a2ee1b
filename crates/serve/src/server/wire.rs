//! The bytes of a connection, below the HTTP library: what it would let pass, and what it would leave unsaid.
//!
//! A request with both `Content-Length` and `Transfer-Encoding` has two ends. The library takes one of them and hides the other; who
//! stands between client and server may have taken the other, and see the rest as somebody's next request. So lines are looked at
//! as they come, and such a connection answers nothing. And what the library refuses by itself (another version of HTTP, lengths
//! that contradict each other, too many headers) it answers with a status alone: here it gets a body as all errors have one.

use std::io::Result;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll, ready};

use axum::http::StatusCode;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::fault::Fault;
use super::room::Place;

/// A longer line is no header that is looked for.
const LONGEST_NAME: usize = 20;

/// How a client begins that takes it for granted that HTTP/2 is spoken. The library hangs up on it without a word, and answers any
/// other version.
const PREFACE: &[u8] = b"PRI * HTTP/2.0";

/// A connection that is looked at.
pub(super) struct Wire {
    stream: TcpStream,
    /// What of the preface may still come; nothing once something else has.
    preface: &'static [u8],
    lines: Lines,
    has_two_ends: Arc<AtomicBool>,
    /// What is to be written in place of what the library gave.
    own: Vec<u8>,
    place: Arc<Place>,
}

impl Wire {
    pub(super) fn new(stream: TcpStream, place: Arc<Place>) -> Wire {
        Wire {
            stream,
            preface: PREFACE,
            lines: Lines::default(),
            has_two_ends: Arc::default(),
            own: Vec::new(),
            place,
        }
    }

    /// Whether some request of this connection, so far, says twice where it ends.
    pub(super) fn has_two_ends(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.has_two_ends)
    }

    /// Makes the preface of HTTP/2 the first line of a request in a version that nobody knows.
    fn spoil_preface(&mut self, bytes: &mut [u8]) {
        for byte in bytes {
            let Some((next, rest)) = self.preface.split_first() else { return };
            self.preface = if byte == next { rest } else { &[] };
            if byte == next && rest.is_empty() {
                *byte = b'?';
            }
        }
    }

    /// Writes what is left of our own words.
    fn poll_own(&mut self, context: &mut Context<'_>) -> Poll<Result<()>> {
        while !self.own.is_empty() {
            let written = ready!(Pin::new(&mut self.stream).poll_write(context, &self.own))?;
            if written == 0 {
                return Poll::Ready(Err(std::io::ErrorKind::WriteZero.into()));
            }
            self.own.drain(..written);
            self.place.touch();
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for Wire {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        let wire = self.get_mut();
        let before = buffer.filled().len();
        ready!(Pin::new(&mut wire.stream).poll_read(context, buffer))?;
        wire.spoil_preface(&mut buffer.filled_mut()[before..]);
        if wire.lines.name_both(&buffer.filled()[before..]) {
            wire.has_two_ends.store(true, Relaxed);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Wire {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        let wire = self.get_mut();
        ready!(wire.poll_own(context))?;
        match with_body(bytes) {
            Some(own) => {
                wire.own = own;
                // The rest follows with the next write or flush; an error of the stream is told there too.
                let _ = wire.poll_own(context)?;
                Poll::Ready(Ok(bytes.len()))
            }
            None => {
                let written = ready!(Pin::new(&mut wire.stream).poll_write(context, bytes))?;
                wire.place.touch();
                Poll::Ready(Ok(written))
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let wire = self.get_mut();
        ready!(wire.poll_own(context))?;
        Pin::new(&mut wire.stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let wire = self.get_mut();
        ready!(wire.poll_own(context))?;
        Pin::new(&mut wire.stream).poll_shutdown(context)
    }
}

/// The lines of what comes in. Bodies are looked at too: no line of JSON begins as these headers do.
#[derive(Default)]
struct Lines {
    /// How the line begins that is under way, as far as it matters.
    line: Vec<u8>,
    has_length: bool,
    has_encoding: bool,
}

impl Lines {
    /// Whether both headers have been between two empty lines.
    fn name_both(&mut self, bytes: &[u8]) -> bool {
        let mut both = false;
        for part in bytes.split_inclusive(|&byte| byte == b'\n') {
            let room = LONGEST_NAME.saturating_sub(self.line.len());
            self.line.extend_from_slice(&part[..part.len().min(room)]);
            if part.ends_with(b"\n") {
                self.end_line();
            }
            both |= self.has_length && self.has_encoding;
        }
        both
    }

    fn end_line(&mut self) {
        let begins =
            |name: &[u8]| self.line.get(..name.len()).is_some_and(|line| line.eq_ignore_ascii_case(name));
        self.has_length |= begins(b"content-length:");
        self.has_encoding |= begins(b"transfer-encoding:");
        if self.line.trim_ascii().is_empty() {
            (self.has_length, self.has_encoding) = (false, false);
        }
        self.line.clear();
    }
}

/// Why a head is refused: [`super::listen::HEAD_BYTES`] and the library's own bound.
pub(super) const LARGE_HEAD: &str = "the head of the request is too large: 100 headers and 64 KiB are taken";

/// The library's own refusal with a body; none of our answers is an error without one.
fn with_body(bytes: &[u8]) -> Option<Vec<u8>> {
    let head = std::str::from_utf8(bytes).ok()?.strip_suffix("\r\n\r\n")?;
    let (status, headers) = head.strip_prefix("HTTP/1.")?.split_once("\r\n")?;
    let status =
        StatusCode::from_bytes(status.get(2..5)?.as_bytes()).ok().filter(StatusCode::is_client_error)?;
    let says_empty = |line: &str| line.eq_ignore_ascii_case("content-length: 0");
    if !headers.split("\r\n").any(says_empty) {
        return None;
    }
    let why = match status {
        StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE => LARGE_HEAD,
        StatusCode::URI_TOO_LONG => "the path of the request is too long",
        _ => {
            "this is no request of HTTP/1.1: it begins with a line such as GET /v1/models HTTP/1.1, then headers such as Host: localhost, of which one may be a Content-Length"
        }
    };
    let body = Fault::new(status, why).body().to_string();
    let kept: Vec<&str> = headers.split("\r\n").filter(|line| !says_empty(line)).collect();
    let line = head.split("\r\n").next()?;
    let own = format!("content-type: application/json\r\ncontent-length: {}", body.len());
    Some(format!("{line}\r\n{}\r\n{own}\r\n\r\n{body}", kept.join("\r\n")).into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_headers_are_seen_however_the_bytes_come() {
        let both = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nHost: x\r\ncontent-LENGTH: 4\r\n\r\n";
        for size in 1..both.len() {
            let mut lines = Lines::default();
            assert!(both.chunks(size).fold(false, |seen, bytes| seen | lines.name_both(bytes)), "{size}");
        }
        let apart = b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}\n\nPOST / HTTP/1.1\nTransfer-Encoding: chunked\n\n\
                      {\"transfer-encoding: x\": \"Content-Length: 4\"}\n";
        for size in 1..apart.len() {
            let mut lines = Lines::default();
            assert!(!apart.chunks(size).any(|bytes| lines.name_both(bytes)), "{size}");
        }
    }

    #[test]
    fn only_refusals_without_a_body_get_one() {
        let head = |status: &str, length: &str| {
            format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\ndate: x\r\n\r\n")
        };
        let own = String::from_utf8(with_body(head("400 Bad Request", "0").as_bytes()).unwrap()).unwrap();
        let (head_of_own, body) = own.split_once("\r\n\r\n").unwrap();
        assert!(head_of_own.contains(&format!("content-length: {}", body.len())), "{own}");
        assert!(body.contains("\"invalid_request_error\""), "{own}");
        for other in
            [head("200 OK", "0"), head("400 Bad Request", "12"), head("204 No Content", "0"), "{}".into()]
        {
            assert_eq!(with_body(other.as_bytes()), None, "{other}");
        }
    }
}
