//! The client of `bench serve` for a server elsewhere: any that answers OpenAI's `/v1/completions` as a stream, ours or another.
//!
//! Plain HTTP, a connection for each request. What a server sends is bounded and believed only as far as numbers go.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::serve::Seen;

/// Time for a connection, and for a server to say anything.
const CONNECT_TIME: Duration = Duration::from_secs(10);
const SILENCE: Duration = Duration::from_secs(600);
/// Bytes of a line, and of an answer that is no stream.
const MAX_LINE_BYTES: u64 = 1 << 20;

/// A server, by its address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Peer {
    /// Host and port.
    authority: String,
    /// What comes before `/v1`.
    base: String,
    key: Option<String>,
}

impl Peer {
    /// Reads `http://host:port`, with or without a path and `/v1`.
    pub(super) fn parse(url: &str) -> Result<Peer, String> {
        let rest = url
            .strip_prefix("http://")
            .ok_or("only http:// is spoken; put what ends TLS before a server that wants it")?;
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        if authority.is_empty()
            || authority.contains(['@', ' ', '\r', '\n'])
            || path.contains([' ', '\r', '\n'])
        {
            return Err(format!("'{url}' is no address of a server"));
        }
        let with_port = match authority.rsplit_once(':') {
            Some((_, port)) if port.parse::<u16>().is_ok() => authority.to_owned(),
            _ => format!("{authority}:80"),
        };
        let path = path.trim_end_matches('/');
        let base = path.strip_suffix("v1").map_or(path, |base| base.trim_end_matches('/'));
        let base = if base.is_empty() { String::new() } else { format!("/{base}") };
        let key = std::env::var("FERROSPEED_API_KEY").ok();
        let key = key.and_then(|keys| keys.split(',').next().map(str::to_owned));
        Ok(Peer { authority: with_port, base, key: key.filter(|key| !key.is_empty()) })
    }

    /// What the server calls its (first) model.
    pub(super) fn model(&self) -> Result<String, String> {
        let mut answer = self.send("GET", "/v1/models", "")?;
        let mut text = String::new();
        answer.body.by_ref().take(MAX_LINE_BYTES).read_to_string(&mut text).map_err(|e| e.to_string())?;
        let models: Value = serde_json::from_str(&text).map_err(|error| format!("/v1/models: {error}"))?;
        let name = models["data"][0]["id"].as_str();
        name.map(str::to_owned).ok_or_else(|| "/v1/models names no model".to_owned())
    }

    /// Asks for `new_tokens` behind `prompt` and notes when they come.
    pub(super) fn complete(&self, model: &str, prompt: &[i64], new_tokens: u32) -> Result<Seen, String> {
        let body = json!({
            "model": model, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0.0, "stream": true,
            "stream_options": {"include_usage": true}, "ignore_eos": true,
        });
        let mut last = Instant::now();
        let mut seen = Seen::default();
        let mut counted = None;
        let mut answer = self.send("POST", "/v1/completions", &body.to_string())?;
        loop {
            let line = line(&mut answer.body).map_err(|error| format!("the stream broke off: {error}"))?;
            let Some(data) = line.strip_prefix("data:") else { continue };
            if data.trim() == "[DONE]" {
                break;
            }
            let event: Value =
                serde_json::from_str(data).map_err(|error| format!("in the stream: {error}"))?;
            if let Some(error) = event.get("error").filter(|error| !error.is_null()) {
                return Err(format!("the server says: {error}"));
            }
            counted = event["usage"]["completion_tokens"].as_u64().or(counted);
            let choice = &event["choices"][0];
            // The last event says why it ended, and nothing else.
            if choice.is_null() || (choice["finish_reason"].is_string() && choice["text"] == "") {
                continue;
            }
            let now = Instant::now();
            let ms = (now - last).as_secs_f64() * 1e3;
            if seen.tokens == 0 {
                seen.first_token_ms = ms
            } else {
                seen.gaps_ms.push(ms)
            }
            (seen.tokens, last) = (seen.tokens + 1, now);
        }
        if seen.tokens == 0 {
            return Err("a request got no token".to_owned());
        }
        seen.tokens = counted.map_or(seen.tokens, |tokens| tokens as usize);
        Ok(seen)
    }

    fn send(&self, method: &str, path: &str, body: &str) -> Result<Answer, String> {
        let failed = |error: std::io::Error| format!("{}: {error}", self.authority);
        let mut addresses = self.authority.to_socket_addrs().map_err(failed)?;
        let address = addresses.next().ok_or_else(|| format!("{} has no address", self.authority))?;
        let mut stream = TcpStream::connect_timeout(&address, CONNECT_TIME).map_err(failed)?;
        stream.set_read_timeout(Some(SILENCE)).map_err(failed)?;
        stream.set_write_timeout(Some(SILENCE)).map_err(failed)?;
        let key = self.key.as_ref().map_or(String::new(), |key| format!("Authorization: Bearer {key}\r\n"));
        let request = format!(
            "{method} {}{path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n{key}Content-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n{body}",
            self.base,
            self.authority,
            body.len()
        );
        stream.write_all(request.as_bytes()).map_err(failed)?;
        let mut reader = BufReader::new(stream);
        let status = line(&mut reader)?;
        let mut chunked = false;
        loop {
            let header = line(&mut reader)?.to_ascii_lowercase();
            if header.is_empty() {
                break;
            }
            chunked |= header.starts_with("transfer-encoding:") && header.contains("chunked");
        }
        let body: Box<dyn BufRead> =
            if chunked { Box::new(BufReader::new(Chunks { reader, left: 0 })) } else { Box::new(reader) };
        if status.split(' ').nth(1) == Some("200") {
            return Ok(Answer { body });
        }
        let mut text = String::new();
        // What can be read of an explanation is told; the refusal stands without it.
        let _ = body.take(1 << 10).read_to_string(&mut text);
        Err(format!("{method} {path}: {status}: {}", text.trim()))
    }
}

struct Answer {
    body: Box<dyn BufRead>,
}

fn line(reader: &mut impl BufRead) -> Result<String, String> {
    let mut text = String::new();
    let read = reader.take(MAX_LINE_BYTES).read_line(&mut text).map_err(|error| error.to_string())?;
    if read == 0 {
        return Err("the server hung up".to_owned());
    }
    Ok(text.trim_end().to_owned())
}

/// A body in chunks, without their sizes.
struct Chunks {
    reader: BufReader<TcpStream>,
    left: u64,
}

impl Read for Chunks {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        if self.left == 0 {
            let bad = |why: String| std::io::Error::new(std::io::ErrorKind::InvalidData, why);
            let mut size = line(&mut self.reader).map_err(bad)?;
            if size.is_empty() {
                // The end of the chunk before.
                size = line(&mut self.reader).map_err(bad)?;
            }
            let digits = size.split(';').next().unwrap_or_default();
            self.left =
                u64::from_str_radix(digits.trim(), 16).map_err(|_| bad(format!("'{size}' is no chunk")))?;
            if self.left == 0 {
                return Ok(0);
            }
        }
        let most = out.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let read = self.reader.read(&mut out[..most])?;
        self.left -= read as u64;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_with_and_without_port_and_path() {
        let parts = |url: &str| Peer::parse(url).map(|peer| (peer.authority, peer.base));
        let peer = |authority: &str, base: &str| Ok((authority.to_owned(), base.to_owned()));
        assert_eq!(parts("http://127.0.0.1:8000"), peer("127.0.0.1:8000", ""));
        assert_eq!(parts("http://host:1/v1/"), peer("host:1", ""));
        assert_eq!(parts("http://host/some/v1"), peer("host:80", "/some"));
        for bad in ["https://host", "host:1", "http://", "http://a b", "http://a\r\nX: y/", "http://u@h"] {
            assert!(Peer::parse(bad).is_err(), "{bad}");
        }
    }
}
