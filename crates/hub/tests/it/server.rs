//! A server that answers as the Hub does, on loopback: lists, redirects to a second host that has the bytes, ranges, refusals,
//! and what goes wrong on the way.
//!
//! `cli`'s tests use it too, which is why not everything here is used everywhere.
#![allow(dead_code)]

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sha2::{Digest, Sha256};

/// A commit.
pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
/// Files of this size and more lie on the other host, as `lfs` has them.
const LARGE: usize = 1024;

/// What goes wrong with an answer that holds bytes of a file; each entry concerns one answer.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Fault {
    /// Nothing does.
    None,
    /// The connection ends after so many bytes.
    CutAfter(usize),
    /// A bit is another one.
    Flip,
    /// There are more bytes than the list says.
    Longer,
    /// The server says that it is busy.
    Busy,
    /// It begins at the start, whatever was asked for.
    NoRange,
    /// A byte at a time, and long between them.
    Drip,
}

/// What goes wrong with all lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ListFault {
    /// None comes.
    Hang,
    /// It is always elsewhere.
    Circle,
    /// It is no answer.
    NoHttp,
}

/// A request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Asked {
    /// Its path, with what follows `?`.
    pub(crate) path: String,
    /// Which bytes.
    pub(crate) range: Option<String>,
    /// Whether it came with a token.
    pub(crate) token: Option<String>,
    /// Whether the host that has the bytes was asked.
    pub(crate) of_bytes: bool,
}

#[derive(Debug, Default)]
struct State {
    /// By kind and name (`models/org/name`), the files.
    repositories: BTreeMap<String, BTreeMap<String, Vec<u8>>>,
    /// Who may read; everybody without one.
    token: Option<String>,
    /// What is answered to all that have no token: the status and the code of the error.
    gate: Option<(u16, &'static str)>,
    /// Whether lists say sizes and hashes.
    says_hashes: bool,
    /// The size that lists give of every file, whatever it has.
    size: Option<u64>,
    list_fault: Option<ListFault>,
    faults: VecDeque<Fault>,
    asked: Vec<Asked>,
}

/// The server; it ends with the process.
#[derive(Debug, Clone)]
pub(crate) struct HubServer {
    state: Arc<Mutex<State>>,
    address: String,
    bytes_address: String,
}

impl HubServer {
    /// Starts it, with nothing to give.
    pub(crate) fn start() -> HubServer {
        let [front, bytes] = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let address = |listener: &TcpListener| format!("http://{}", listener.local_addr().unwrap());
        let state = Arc::new(Mutex::new(State { says_hashes: true, ..State::default() }));
        let server = HubServer { state, address: address(&front), bytes_address: address(&bytes) };
        for (listener, of_bytes) in [(front, false), (bytes, true)] {
            let server = server.clone();
            std::thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let server = server.clone();
                    std::thread::spawn(move || server.talk(&stream, of_bytes));
                }
            });
        }
        server
    }

    /// What `HF_ENDPOINT` is.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// Puts a file into a repository: `models/org/name` or `datasets/org/name`.
    pub(crate) fn put(&self, repository: &str, path: &str, bytes: impl Into<Vec<u8>>) -> &HubServer {
        let mut state = self.state.lock().unwrap();
        state.repositories.entry(repository.to_owned()).or_default().insert(path.to_owned(), bytes.into());
        drop(state);
        self
    }

    /// Only who sends this token may read.
    pub(crate) fn wants_token(&self, token: &str, status: u16, code: &'static str) -> &HubServer {
        let mut state = self.state.lock().unwrap();
        (state.token, state.gate) = (Some(token.to_owned()), Some((status, code)));
        drop(state);
        self
    }

    /// Lists say no sizes and hashes, as those of simple mirrors.
    pub(crate) fn without_hashes(&self) -> &HubServer {
        self.state.lock().unwrap().says_hashes = false;
        self
    }

    /// Lists give this size of every file.
    pub(crate) fn says_size(&self, size: u64) -> &HubServer {
        self.state.lock().unwrap().size = Some(size);
        self
    }

    /// What goes wrong with all lists from now on.
    pub(crate) fn list_fault(&self, fault: ListFault) -> &HubServer {
        self.state.lock().unwrap().list_fault = Some(fault);
        self
    }

    /// What goes wrong with the next answers that hold bytes of files.
    pub(crate) fn faults(&self, faults: impl IntoIterator<Item = Fault>) -> &HubServer {
        self.state.lock().unwrap().faults = faults.into_iter().collect();
        self
    }

    /// What was asked since the last time.
    pub(crate) fn asked(&self) -> Vec<Asked> {
        std::mem::take(&mut self.state.lock().unwrap().asked)
    }

    fn talk(&self, stream: &TcpStream, of_bytes: bool) {
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut reader = BufReader::new(stream);
        while let Some(asked) = read_request(&mut reader, of_bytes) {
            self.state.lock().unwrap().asked.push(asked.clone());
            let mut answer = Answer::default();
            self.answer(&asked, &mut answer);
            if answer.send(stream).is_err() || answer.cut_after.is_some() {
                let _ = stream.shutdown(std::net::Shutdown::Both);
                return;
            }
        }
    }

    fn answer(&self, asked: &Asked, answer: &mut Answer) {
        let mut state = self.state.lock().unwrap();
        let path = asked.path.split('?').next().unwrap_or_default().trim_start_matches('/');
        if let (Some((status, code)), false) = (state.gate, asked.of_bytes)
            && asked.token != state.token
        {
            return answer.refuse(status, code);
        }
        if let Some(rest) = path.strip_prefix("api/") {
            let (repository, revision) = rest.split_once("/revision/").unwrap_or((rest, "main"));
            match state.list_fault {
                Some(ListFault::Circle) => {
                    answer.status = 302;
                    return answer.header("Location", &asked.path);
                }
                Some(fault) => {
                    answer.list_fault = Some(fault);
                    return;
                }
                None => {}
            }
            let (says_hashes, size) = (state.says_hashes, state.size);
            let Some(files) = state.repositories.get(repository) else {
                return answer.refuse(404, "RepoNotFound");
            };
            if !["main", COMMIT, "v1", "refs%2Fpr%2F1"].contains(&revision) {
                return answer.refuse(404, "RevisionNotFound");
            }
            answer.status = 200;
            answer.body = list(files, says_hashes, size).into_bytes();
            return;
        }
        let resolved = path.split_once("/resolve/").and_then(|(repository, rest)| {
            let kind = if repository.starts_with("datasets/") { "" } else { "models/" };
            let (_, file) = rest.split_once('/')?;
            let bytes =
                state.repositories.get(&format!("{kind}{repository}"))?.get(&file.replace("%20", " "))?;
            Some(bytes.clone())
        });
        let Some(bytes) = resolved else { return answer.refuse(404, "EntryNotFound") };
        let large = bytes.len() >= LARGE;
        if large && !asked.of_bytes {
            answer.status = 302;
            answer.header("Location", &format!("{}/{path}?signed=yes", self.bytes_address));
            answer.header("X-Linked-Size", &bytes.len().to_string());
            answer.header("X-Linked-ETag", &format!("\"{}\"", sha256(&bytes)));
            return;
        }
        let hash = if large { "of-the-other-host".to_owned() } else { git_hash(&bytes) };
        answer.header("ETag", &format!("\"{hash}\""));
        let fault = state.faults.pop_front().unwrap_or(Fault::None);
        answer.fill(&bytes, asked.range.as_deref(), fault);
    }
}

#[derive(Default)]
struct Answer {
    status: u16,
    headers: String,
    body: Vec<u8>,
    cut_after: Option<usize>,
    is_dripped: bool,
    list_fault: Option<ListFault>,
}

impl Answer {
    fn header(&mut self, name: &str, value: &str) {
        let _ = write!(self.headers, "{name}: {value}\r\n");
    }

    fn refuse(&mut self, status: u16, code: &str) {
        self.status = status;
        self.header("X-Error-Code", code);
        self.header("X-Error-Message", "it is refused");
    }

    fn fill(&mut self, bytes: &[u8], range: Option<&str>, fault: Fault) {
        let first =
            range.and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse::<usize>().ok());
        (self.status, self.body) = (200, bytes.to_vec());
        if let (Some(first), false) = (first, matches!(fault, Fault::NoRange)) {
            let total = bytes.len();
            (self.status, self.body) = (206, bytes[first.min(total)..].to_vec());
            self.header("Content-Range", &format!("bytes {first}-{}/{total}", total - 1));
        }
        match fault {
            Fault::None | Fault::NoRange => {}
            Fault::Drip => self.is_dripped = true,
            Fault::CutAfter(count) => self.cut_after = Some(count.min(self.body.len())),
            Fault::Flip => self.body[0] ^= 1,
            Fault::Longer => self.body.push(0),
            Fault::Busy => (self.status, self.body) = (503, Vec::new()),
        }
    }

    fn send(&self, mut stream: &TcpStream) -> std::io::Result<()> {
        match self.list_fault {
            // Until whoever asked has gone.
            Some(ListFault::Hang) => return std::io::Read::read(&mut stream, &mut [0]).map(drop),
            Some(_) => return stream.write_all(b"this is no answer\r\n\r\n"),
            None => {}
        }
        let head = format!(
            "HTTP/1.1 {} X\r\nContent-Length: {}\r\n{}\r\n",
            self.status,
            self.body.len(),
            self.headers
        );
        stream.write_all(head.as_bytes())?;
        for byte in self.body.chunks(1).filter(|_| self.is_dripped) {
            stream.write_all(byte)?;
            std::thread::sleep(Duration::from_millis(20));
        }
        if self.is_dripped {
            return Ok(());
        }
        stream.write_all(&self.body[..self.cut_after.unwrap_or(self.body.len())])?;
        stream.flush()
    }
}

fn read_request(reader: &mut BufReader<&TcpStream>, of_bytes: bool) -> Option<Asked> {
    let mut line = String::new();
    reader.read_line(&mut line).ok().filter(|&count| count > 0)?;
    let path = line.split(' ').nth(1)?.to_owned();
    let (mut range, mut token) = (None, None);
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok().filter(|&count| count > 0)?;
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        match name.to_ascii_lowercase().as_str() {
            "range" => range = Some(value.to_owned()),
            "authorization" => token = value.strip_prefix("Bearer ").map(str::to_owned),
            _ => {}
        }
    }
    Some(Asked { path, range, token, of_bytes })
}

fn list(files: &BTreeMap<String, Vec<u8>>, says_hashes: bool, size: Option<u64>) -> String {
    let siblings = files.iter().map(|(name, bytes)| {
        let mut file = serde_json::json!({ "rfilename": name });
        if says_hashes {
            let size = size.unwrap_or(bytes.len() as u64);
            file["size"] = size.into();
            file["blobId"] = git_hash(bytes).into();
            if bytes.len() >= LARGE {
                file["lfs"] =
                    serde_json::json!({ "sha256": sha256(bytes), "size": size, "pointerSize": 130 });
            }
        }
        file
    });
    serde_json::json!({ "sha": COMMIT, "siblings": siblings.collect::<Vec<_>>() }).to_string()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The hash of a large file.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// The hash of a small one.
pub(crate) fn git_hash(bytes: &[u8]) -> String {
    let mut hasher = sha1::Sha1::new();
    sha1::Digest::update(&mut hasher, format!("blob {}\0", bytes.len()));
    sha1::Digest::update(&mut hasher, bytes);
    hex(&sha1::Digest::finalize(hasher))
}
