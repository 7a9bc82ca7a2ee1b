//! As much of HTTP/1.1 as a browser on this machine needs to show one page, and nothing for anybody else.
//!
//! One request per connection. Bounded: the head of a request, the time it may take, the connections at a time. A
//! request must name this machine in `Host`, so that a page from elsewhere cannot read runs through a name that it
//! points here (DNS rebinding). Only `GET` and `HEAD` of a fixed set of paths are answered; no path reaches a file.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// A longer head of a request is refused.
const LONGEST_HEAD_BYTES: usize = 8 << 10;
/// A request and its answer may take this long each.
const PATIENCE: Duration = Duration::from_secs(5);

/// What was asked for.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) path: String,
    /// `HEAD` wants no body.
    pub(super) head_only: bool,
    /// `If-None-Match`
    pub(super) known_version: Option<String>,
}

/// What is answered.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Response {
    pub(super) status: &'static str,
    pub(super) content_type: &'static str,
    /// Further header lines.
    pub(super) headers: Vec<(&'static str, String)>,
    pub(super) body: Vec<u8>,
}

impl Response {
    pub(super) fn plain(status: &'static str, text: &str) -> Response {
        let body = format!("{text}\n").into_bytes();
        Response { status, content_type: "text/plain; charset=utf-8", headers: Vec::new(), body }
    }
}

/// Reads one request and writes what `answer` makes of it. A peer that is too slow, or gone, is left alone.
pub(super) fn serve(mut stream: TcpStream, answer: impl FnOnce(&Request) -> Response) {
    let _ = stream.set_write_timeout(Some(PATIENCE));
    let (response, head_only) = match read_head(&mut stream) {
        Some(Ok(head)) => match parse(&head) {
            Ok(request) => (answer(&request), request.head_only),
            Err(refusal) => (refusal, false),
        },
        Some(Err(refusal)) => (refusal, false),
        None => return,
    };
    let mut head = format!(
        "HTTP/1.1 {}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\n\
         Cache-Control: no-cache\r\nX-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\n\
         X-Frame-Options: DENY\r\nCross-Origin-Resource-Policy: same-origin\r\n",
        response.status,
        response.content_type,
        response.body.len()
    );
    for (name, value) in &response.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str("\r\n");
    let body: &[u8] = if head_only { &[] } else { &response.body };
    let _ =
        stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body)).and_then(|()| stream.flush());
}

/// The head of a request, up to its empty line. `None` when the peer went away or took too long.
fn read_head(stream: &mut TcpStream) -> Option<Result<String, Response>> {
    let end = Instant::now() + PATIENCE;
    let mut head = Vec::new();
    let mut buffer = [0; 1024];
    loop {
        // A timeout of zero would mean none at all.
        let left = end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        if Instant::now() >= end || stream.set_read_timeout(Some(left)).is_err() {
            return None;
        }
        match stream.read(&mut buffer) {
            Ok(0) | Err(_) => return None,
            Ok(count) => head.extend_from_slice(&buffer[..count]),
        }
        if let Some(end) = head.windows(4).position(|window| window == b"\r\n\r\n") {
            head.truncate(end);
            return Some(String::from_utf8(head).map_err(|_| bad("the request is not text")));
        }
        if head.len() > LONGEST_HEAD_BYTES {
            return Some(Err(Response::plain(
                "431 Request Header Fields Too Large",
                "the request is too long",
            )));
        }
    }
}

fn bad(why: &str) -> Response {
    Response::plain("400 Bad Request", why)
}

fn parse(head: &str) -> Result<Request, Response> {
    let mut lines = head.split("\r\n");
    let words: Vec<&str> = lines.next().unwrap_or_default().split(' ').collect();
    let [method, target, version] = words[..] else { return Err(bad("the first line is no request")) };
    if !matches!(version, "HTTP/1.1" | "HTTP/1.0") {
        return Err(Response::plain("505 HTTP Version Not Supported", "HTTP/1.1 is spoken here"));
    }
    if !matches!(method, "GET" | "HEAD") {
        return Err(Response {
            headers: vec![("Allow", "GET, HEAD".into())],
            ..Response::plain("405 Method Not Allowed", "only GET and HEAD are answered")
        });
    }
    let (mut hosts, mut known_version) = (Vec::new(), None);
    for line in lines {
        let Some((name, value)) = line.split_once(':') else { return Err(bad("a header has no colon")) };
        match name.to_ascii_lowercase().as_str() {
            "host" => hosts.push(value.trim()),
            "if-none-match" => known_version = Some(value.trim().to_owned()),
            _ => {}
        }
    }
    let [host] = hosts[..] else { return Err(bad("one Host header is needed")) };
    if !is_this_machine(host) {
        return Err(Response::plain("421 Misdirected Request", "only localhost is served"));
    }
    let path = target.split('?').next().unwrap_or_default().to_owned();
    Ok(Request { path, head_only: method == "HEAD", known_version })
}

fn is_this_machine(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    matches!(name.to_ascii_lowercase().as_str(), "localhost" | "127.0.0.1" | "[::1]")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_requests_to_this_machine_are_understood() {
        let status = |head: &str| parse(head).map_or_else(|refusal| refusal.status, |_| "200");
        for (head, expected) in [
            ("GET / HTTP/1.1\r\nHost: localhost:8000", "200"),
            ("GET /x?y HTTP/1.0\r\nhost: 127.0.0.1", "200"),
            ("HEAD / HTTP/1.1\r\nHost: [::1]:80", "200"),
            ("GET / HTTP/1.1\r\nHost: evil.example", "421 Misdirected Request"),
            ("GET / HTTP/1.1\r\nHost: localhost.evil.example:80", "421 Misdirected Request"),
            ("GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost", "400 Bad Request"),
            ("GET / HTTP/1.1", "400 Bad Request"),
            ("GET / HTTP/2\r\nHost: localhost", "505 HTTP Version Not Supported"),
            ("POST / HTTP/1.1\r\nHost: localhost", "405 Method Not Allowed"),
            ("GET  / HTTP/1.1\r\nHost: localhost", "400 Bad Request"),
            ("", "400 Bad Request"),
            ("GET / HTTP/1.1\r\nHost: localhost\r\nnonsense", "400 Bad Request"),
        ] {
            assert_eq!(status(head), expected, "{head:?}");
        }
    }
}
