//! Questions to the server, over HTTP.
//!
//! Redirects are followed here: what proves who asks goes to the server that was named and to no other, while large files lie on
//! hosts of a delivery network.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;
use ureq::http::header::{AUTHORIZATION, HeaderMap, LOCATION, RANGE};
use ureq::http::{StatusCode, Uri};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};

use crate::environment::HubOptions;
use crate::error::{HubError, Result};
use crate::listing::{Listing, RemoteFile};
use crate::name::{HubName, RepoKind};
use crate::patience::{Came, Patience};

const CONNECT_TIME: Duration = Duration::from_secs(20);
const ANSWER_TIME: Duration = Duration::from_secs(30);
/// A list of files comes within this time.
const LIST_TIME: Duration = Duration::from_secs(60);
const MAX_LIST_BYTES: u64 = 64 << 20;
const MAX_AUTHORITIES_BYTES: u64 = 16 << 20;
/// More redirects are a circle.
const MAX_HOPS: usize = 8;
/// How often a server is asked that does not answer, or says that it is busy.
pub(crate) const ATTEMPTS: u32 = 5;

#[derive(Debug)]
pub(crate) struct Client {
    agent: ureq::Agent,
    endpoint: String,
    token: Option<String>,
    retry_after: Duration,
}

/// What a server answered.
pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: ureq::Body,
}

impl Reply {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }
}

impl Client {
    pub(crate) fn new(options: &HubOptions) -> Result<Client> {
        let mut tls = TlsConfig::builder();
        if let Some(path) = &options.authorities {
            let setting = |why: String| HubError::Setting {
                why: format!(
                    "{}: {why} (SSL_CERT_FILE, REQUESTS_CA_BUNDLE or CURL_CA_BUNDLE)",
                    path.display()
                ),
            };
            let bytes = ferrospeed_files::read(path, MAX_AUTHORITIES_BYTES)
                .map_err(|error| setting(error.to_string()))?;
            let found = parse_pem(&bytes).filter_map(|item| match item {
                Ok(PemItem::Certificate(certificate)) => Some(certificate),
                _ => None,
            });
            let found: Vec<_> = found.collect();
            if found.is_empty() {
                return Err(setting("holds no certificate".to_owned()));
            }
            tls = tls.root_certs(RootCerts::Specific(Arc::new(found)));
        }
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .https_only(options.endpoint.starts_with("https://"))
            .timeout_resolve(Some(CONNECT_TIME))
            .timeout_connect(Some(CONNECT_TIME))
            .timeout_recv_response(Some(ANSWER_TIME))
            .user_agent(concat!("ferrospeed/", env!("CARGO_PKG_VERSION")))
            .tls_config(tls.build());
        Ok(Client {
            agent: config.build().new_agent(),
            endpoint: options.endpoint.clone(),
            token: options.token.clone(),
            retry_after: options.retry_after,
        })
    }

    /// What a repository holds at a revision.
    pub(crate) fn listing(
        self: &Arc<Client>,
        name: &HubName,
        patience: &mut Patience<'_, '_>,
    ) -> Result<Listing> {
        let kind = match name.kind() {
            RepoKind::Model => "models",
            RepoKind::Dataset => "datasets",
        };
        let revision = escaped(name.revision(), "");
        let url =
            format!("{}/api/{kind}/{}/revision/{revision}?blobs=true", self.endpoint, name.repository());
        let text = self.ask(name, &url, patience, |mut reply, _| {
            reply.body.with_config().limit(MAX_LIST_BYTES).read_to_vec().map_err(Trouble::of)
        })?;
        let refuse = |why: &str| HubError::Refused {
            name: name.to_string(),
            why: format!("{url} gives no list of a repository's files: {why}"),
        };
        let value: Value = serde_json::from_slice(&text).map_err(|error| refuse(&error.to_string()))?;
        Listing::read(&value).map_err(|why| refuse(&why))
    }

    /// Size and hash of a file of which the list does not say them: a mirror's may not.
    pub(crate) fn described(
        self: &Arc<Client>,
        name: &HubName,
        commit: &str,
        file: &RemoteFile,
        patience: &mut Patience<'_, '_>,
    ) -> Result<(u64, String)> {
        if let (Some(size), Some(hash)) = (file.size, &file.hash) {
            return Ok((size, hash.to_ascii_lowercase()));
        }
        let url = self.url_of(name, commit, &file.path);
        let (reply, first) = self.ask(name, &url, patience, |reply, first| Ok((reply, first)))?;
        // The first server knows what the file is; the one that has its bytes may call them something else.
        let header = |name: &str| first.get(name).or_else(|| reply.headers.get(name))?.to_str().ok();
        let hash = file.hash.as_deref().or_else(|| header("x-linked-etag")).or_else(|| header("etag"));
        let hash = hash.map(|hash| hash.trim_start_matches("W/").trim_matches('"').to_ascii_lowercase());
        let is_name = |hash: &String| {
            !hash.is_empty() && hash.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
        };
        let size = file.size.or_else(|| header("x-linked-size")?.parse().ok());
        let size = size.or_else(|| reply.body.content_length());
        match (size, hash.filter(is_name)) {
            (Some(size), Some(hash)) => Ok((size, hash)),
            _ => Err(HubError::Refused {
                name: name.to_string(),
                why: format!(
                    "{url}: the server says neither in its list nor with the file how large it is and what its hash is"
                ),
            }),
        }
    }

    pub(crate) fn url_of(&self, name: &HubName, commit: &str, file: &str) -> String {
        let kind = if name.kind() == RepoKind::Dataset { "datasets/" } else { "" };
        format!("{}/{kind}{}/resolve/{commit}/{}", self.endpoint, name.repository(), escaped(file, "/"))
    }

    /// Asks until there is an answer that means something, some times and for some time; `read` takes from it what is wanted.
    fn ask<T: Send + 'static>(
        self: &Arc<Client>,
        name: &HubName,
        url: &str,
        patience: &mut Patience<'_, '_>,
        read: fn(Reply, HeaderMap) -> std::result::Result<T, Trouble>,
    ) -> Result<T> {
        let since = Instant::now();
        let until = since + patience.limit;
        for attempt in 1.. {
            let (client, at) = (Arc::clone(self), url.to_owned());
            let answer = patience.during(since, until, move || {
                let (reply, first) = client.follow(&at, 0, LIST_TIME)?;
                match reply.status.is_success() {
                    true => read(reply, first).map(Ok),
                    false => Ok(Err(reply)),
                }
            })?;
            let why = match answer {
                Came::This(Ok(Ok(read))) => return Ok(read),
                Came::This(Ok(Err(reply))) if !is_busy(reply.status) => {
                    return Err(self.refusal(name, &reply));
                }
                Came::This(Ok(Err(reply))) => format!("it answers {}", reply.status),
                Came::This(Err(Trouble::Lasting(why))) => return Err(self.unreachable(&why)),
                Came::This(Err(Trouble::Passing(why))) => why,
                Came::Ended | Came::Late => {
                    let why = format!("it has not answered {url} in {:?}", patience.limit);
                    return Err(self.unreachable(&why));
                }
            };
            if attempt == ATTEMPTS || Instant::now() >= until {
                return Err(self.unreachable(&why));
            }
            patience.pause(self.delay(attempt - 1), since)?;
        }
        Err(self.unreachable("it was asked for good"))
    }

    /// Before another attempt: twice as long each time.
    pub(crate) fn delay(&self, failures: u32) -> Duration {
        self.retry_after.saturating_mul(1 << failures.min(5))
    }

    /// Asks for the bytes from `first` on, wherever that leads; gives the headers of the first answer, too.
    pub(crate) fn follow(
        &self,
        url: &str,
        first: u64,
        body_time: Duration,
    ) -> std::result::Result<(Reply, HeaderMap), Trouble> {
        let mut at: Uri = url.parse().map_err(|error| Trouble::Lasting(format!("{url}: {error}")))?;
        let home = at.authority().cloned();
        let mut headers_of_first = None;
        for _ in 0..MAX_HOPS {
            let mut request = self.agent.get(&at).config().timeout_recv_body(Some(body_time)).build();
            if let (Some(token), true) = (&self.token, at.authority() == home.as_ref()) {
                request = request.header(AUTHORIZATION, format!("Bearer {token}"));
            }
            if first > 0 {
                request = request.header(RANGE, format!("bytes={first}-"));
            }
            let (head, body) = request.call().map_err(Trouble::of)?.into_parts();
            let next = head.headers.get(LOCATION).and_then(|to| to.to_str().ok());
            match next.filter(|_| head.status.is_redirection()) {
                Some(next) => {
                    at = target(&at, next).ok_or_else(|| {
                        Trouble::Lasting(format!("{at} leads to '{next}', which is no address"))
                    })?
                }
                None => {
                    let first = headers_of_first.unwrap_or_else(|| head.headers.clone());
                    return Ok((Reply { status: head.status, headers: head.headers, body }, first));
                }
            }
            headers_of_first.get_or_insert(head.headers);
        }
        Err(Trouble::Lasting(format!("{url} leads on and on ({MAX_HOPS} redirects)")))
    }

    pub(crate) fn unreachable(&self, why: &str) -> HubError {
        HubError::Unreachable { endpoint: self.endpoint.clone(), why: why.to_owned() }
    }

    /// What a server's refusal means, and what to do about it.
    pub(crate) fn refusal(&self, name: &HubName, reply: &Reply) -> HubError {
        let (endpoint, code) = (&self.endpoint, reply.header("x-error-code").unwrap_or_default());
        let kind = if name.kind() == RepoKind::Dataset { "datasets/" } else { "" };
        let page = format!("{endpoint}/{kind}{}", name.repository());
        let token = match self.token {
            Some(_) => "the token of HF_TOKEN (or of `hf auth login`) is not one that may read it",
            None => "set HF_TOKEN, with a token of https://huggingface.co/settings/tokens",
        };
        let unknown = match name.kind() {
            RepoKind::Model => "is neither a folder here nor a name that the server knows",
            RepoKind::Dataset => "is no name that the server knows",
        };
        let why = match (reply.status.as_u16(), code) {
            (_, "GatedRepo") => {
                format!("its authors ask for their terms to be accepted: {page}; then {token}")
            }
            (403, _) => format!("the server says 403: {page} may want its terms accepted, or {token}"),
            (_, "RevisionNotFound") => {
                format!("has no branch, tag or commit '{}'; see {page}/tree/main", name.revision())
            }
            (_, "EntryNotFound") => format!("the file is not there; see {page}/tree/{}", name.revision()),
            (401, _) => {
                format!("{unknown}, or it is private: look at the spelling ({page}); if it is yours, {token}")
            }
            (404, _) => format!("{unknown}: look at the spelling ({page})"),
            (status, _) => {
                let said = reply.header("x-error-message").unwrap_or_default();
                format!("{endpoint} answers {status} {said}")
            }
        };
        HubError::Refused { name: name.to_string(), why }
    }
}

/// Why there is no answer.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// A server that is slow or was interrupted may answer in a while.
    Passing(String),
    /// A name that is not known, a port that is closed or an answer that is none will not be another one in a second.
    Lasting(String),
}

impl Trouble {
    pub(crate) fn of(error: ureq::Error) -> Trouble {
        use std::io::ErrorKind;
        let why = error.to_string();
        match error {
            ureq::Error::Io(error) => match error.kind() {
                ErrorKind::ConnectionRefused
                | ErrorKind::HostUnreachable
                | ErrorKind::NetworkUnreachable
                | ErrorKind::InvalidData
                | ErrorKind::InvalidInput => Trouble::Lasting(why),
                _ => Trouble::Passing(why),
            },
            ureq::Error::Timeout(_) | ureq::Error::ConnectionFailed => Trouble::Passing(why),
            _ => Trouble::Lasting(why),
        }
    }

    /// Of bytes that were read.
    pub(crate) fn of_read(error: std::io::Error) -> Trouble {
        match error.downcast::<ureq::Error>() {
            Ok(error) => Trouble::of(error),
            Err(error) => Trouble::of(ureq::Error::Io(error)),
        }
    }
}

/// Whether a server may answer otherwise in a while.
pub(crate) fn is_busy(status: StatusCode) -> bool {
    status.is_server_error() || matches!(status.as_u16(), 408 | 429)
}

/// Where a redirect leads: to an address, or to a path of the same host.
fn target(at: &Uri, to: &str) -> Option<Uri> {
    let next: Uri = to.parse().ok()?;
    if next.scheme().is_some() {
        return Some(next);
    }
    let path = next.path_and_query().filter(|path| path.as_str().starts_with('/'))?;
    Uri::builder()
        .scheme(at.scheme()?.clone())
        .authority(at.authority()?.clone())
        .path_and_query(path.clone())
        .build()
        .ok()
}

/// A text as a part of an address; `kept` stay as they are.
fn escaped(text: &str, kept: &str) -> String {
    let mut out = String::new();
    for byte in text.bytes() {
        match byte {
            byte if byte.is_ascii_alphanumeric()
                || b"-_.~".contains(&byte)
                || kept.as_bytes().contains(&byte) =>
            {
                out.push(char::from(byte));
            }
            byte => out += &format!("%{byte:02X}"),
        }
    }
    out
}
