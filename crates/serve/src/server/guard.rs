//! Who may ask: keys, and that a web page elsewhere cannot make a browser ask in its name.
//!
//! A server on loopback without keys trusts what runs on its machine, but not what a browser there is told by strangers: a
//! name that was pointed at loopback is refused by its `Host`, and a form's content types by theirs.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::App;
use super::fault::Fault;
use super::listen::HEAD_BYTES;
use super::wire::LARGE_HEAD;

/// Paths that need no key: they tell nothing.
const OPEN: [&str; 4] = ["/", "/chat.js", "/chat.css", "/health"];

pub(super) struct Guard {
    /// Hashes, so that comparing takes the same time whatever was sent.
    keys: Vec<[u8; 32]>,
    on_loopback: bool,
}

fn hash(key: &str) -> [u8; 32] {
    Sha256::digest(key.as_bytes()).into()
}

impl Guard {
    pub(super) fn new(keys: &[String], address: SocketAddr) -> Guard {
        Guard { keys: keys.iter().map(|key| hash(key)).collect(), on_loopback: address.ip().is_loopback() }
    }

    fn admits(&self, method: &Method, path: &str, headers: &HeaderMap) -> Result<(), Fault> {
        let text = |name| headers.get(name).and_then(|value: &axum::http::HeaderValue| value.to_str().ok());
        if headers.get_all(header::HOST).iter().count() > 1 {
            let why = "the request names two hosts: send one Host header";
            return Err(Fault::new(StatusCode::BAD_REQUEST, why));
        }
        if self.on_loopback && self.keys.is_empty() && !text(header::HOST).is_some_and(is_local) {
            let why = "this server answers to localhost alone; start it with --api-key to use another name";
            return Err(Fault::new(StatusCode::FORBIDDEN, why));
        }
        if !self.keys.is_empty() && !OPEN.contains(&path) {
            let sent = text(header::AUTHORIZATION)
                .and_then(|value| value.split_once(' '))
                .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
                .map_or("", |(_, key)| key);
            let sent = hash(sent.trim());
            let known = self.keys.iter().fold(0u8, |known, key| known | key.ct_eq(&sent).unwrap_u8());
            if known == 0 {
                let mut fault = Fault::new(StatusCode::UNAUTHORIZED, "the API key is missing or wrong");
                fault.code = Some("invalid_api_key");
                return Err(fault);
            }
        }
        let is_json = || {
            let kind = text(header::CONTENT_TYPE).unwrap_or_default();
            kind.split(';').next().is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json"))
        };
        if *method == Method::POST && !is_json() {
            let why = "send the body as Content-Type: application/json";
            return Err(Fault::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, why));
        }
        Ok(())
    }
}

/// Whether a `Host` names this machine.
fn is_local(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name.eq_ignore_ascii_case("localhost")
        || name.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// A body that says itself that it is too large is not waited for.
fn check_size(headers: &HeaderMap, max_body_bytes: usize) -> Result<(), Fault> {
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    match announced.filter(|bytes: &u64| *bytes > max_body_bytes as u64) {
        Some(bytes) => {
            let why = format!("a body of {bytes} bytes is too large: this server takes {max_body_bytes}");
            Err(Fault::new(StatusCode::PAYLOAD_TOO_LARGE, why))
        }
        None => Ok(()),
    }
}

/// The library refuses a head that its buffer cannot take, which is more than what is promised.
fn check_head(request: &Request) -> Result<(), Fault> {
    // A name, a colon, a space and the end of the line; the request's own line likewise.
    let headers = request.headers().iter().map(|(name, value)| name.as_str().len() + value.len() + 4);
    let path = request.uri().path_and_query().map_or(0, |path| path.as_str().len());
    if path + headers.sum::<usize>() <= HEAD_BYTES {
        return Ok(());
    }
    Err(Fault::new(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, LARGE_HEAD))
}

pub(super) async fn check(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let admitted = check_head(&request)
        .and_then(|()| app.guard.admits(request.method(), request.uri().path(), request.headers()));
    match admitted.and_then(|()| check_size(request.headers(), app.options.max_body_bytes)) {
        Ok(()) => next.run(request).await,
        Err(fault) => fault.into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_this_machine_are_local() {
        for host in ["localhost", "LocalHost:8000", "127.0.0.1:1", "127.9.9.9", "[::1]:80", "[::1]"] {
            assert!(is_local(host), "{host}");
        }
        for host in ["", "evil.example", "localhost.evil.example:80", "10.0.0.1", "[::2]", "127.0.0.1.evil"] {
            assert!(!is_local(host), "{host}");
        }
    }
}
