//! A page on this machine that shows runs as they go.
//!
//! One HTML file with its style and script inside, and one JSON answer that the script asks for every second. It works
//! on runs that are starting, going and done, and on several side by side. Files are only read; nothing of a run waits
//! for it, and nothing leaves this machine: the server listens on loopback and answers requests to this machine only.
//!
//! ```no_run
//! use ferrospeed_observe::watch::Server;
//!
//! let server = Server::bind(&["runs/quickstart".into()], 0)?;
//! println!("http://{}", server.address());
//! server.run();
//! # Ok::<(), std::io::Error>(())
//! ```

mod http;
mod ranks;
mod run;
mod tail;

use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::json;

use http::{Request, Response};
use run::WatchedRun;

/// Where there are more connections at a time, the one that has been without a request for longest gives way.
const MOST_CONNECTIONS: usize = 32;
/// More runs are not shown: those that changed last are.
const MOST_RUNS: usize = 16;

const PAGE: &str = include_str!("page.html");
/// Charts, then what is drawn of ranks, then the page that draws them.
const SCRIPT: &str = concat!(include_str!("charts.js"), include_str!("ranks.js"), include_str!("page.js"));
const STYLE: &str = include_str!("../report/page.css");

/// A page about runs.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    runs: Arc<Mutex<Runs>>,
}

#[derive(Debug)]
struct Runs {
    folders: Vec<PathBuf>,
    watched: Vec<WatchedRun>,
}

impl Server {
    /// Listens on a port of the loopback interface; 0 takes one that is free. A folder is a run's, or holds runs' folders; it
    /// need not be there yet.
    pub fn bind(folders: &[PathBuf], port: u16) -> std::io::Result<Server> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port))?;
        let address = listener.local_addr()?;
        let runs = Runs { folders: folders.to_vec(), watched: Vec::new() };
        Ok(Server { listener, address, runs: Arc::new(Mutex::new(runs)) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers until the process ends.
    pub fn run(self) {
        let connections = Arc::new(Connections::default());
        for stream in self.listener.incoming() {
            // A connection that failed before it was taken concerns nobody else.
            let Ok(stream) = stream else { continue };
            let Some(number) = connections.enter(&stream) else { continue };
            let (runs, of_thread) = (self.runs.clone(), connections.clone());
            let started = std::thread::Builder::new().name("watch".into()).spawn(move || {
                http::serve(stream, |request| {
                    of_thread.has_asked(number);
                    answer(request, &runs)
                });
                of_thread.leave(number);
            });
            if started.is_err() {
                connections.leave(number);
            }
        }
    }
}

/// Who is connected.
#[derive(Debug, Default)]
struct Connections(Mutex<Connected>);

#[derive(Debug, Default)]
struct Connected {
    entered: u64,
    count: usize,
    /// Those whose request has not come, the first of them first.
    silent: BTreeMap<u64, TcpStream>,
}

impl Connections {
    /// Takes a newcomer, whose number it gives. Where all have asked and wait for answers there is no room.
    fn enter(&self, stream: &TcpStream) -> Option<u64> {
        let mut connected = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if connected.count >= MOST_CONNECTIONS {
            let (_, silent) = connected.silent.pop_first()?;
            // Whoever reads from it finds its end, and leaves.
            let _ = silent.shutdown(Shutdown::Both);
        }
        connected.entered += 1;
        connected.count += 1;
        let number = connected.entered;
        if let Ok(stream) = stream.try_clone() {
            connected.silent.insert(number, stream);
        }
        Some(number)
    }

    fn has_asked(&self, number: u64) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).silent.remove(&number);
    }

    fn leave(&self, number: u64) {
        let mut connected = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        connected.silent.remove(&number);
        connected.count -= 1;
    }
}

fn answer(request: &Request, runs: &Mutex<Runs>) -> Response {
    match request.path.as_str() {
        "/" => page(),
        "/runs.json" => {
            // A reader that panicked left nothing half-done that the next one cannot read again.
            let body = runs.lock().unwrap_or_else(PoisonError::into_inner).describe();
            let version = format!("\"{:016x}\"", version(&body));
            if request.known_version.as_deref() == Some(version.as_str()) {
                return Response {
                    headers: vec![("ETag", version)],
                    ..Response::plain("304 Not Modified", "")
                };
            }
            let content_type = "application/json";
            Response { status: "200 OK", content_type, headers: vec![("ETag", version)], body }
        }
        "/favicon.ico" => Response { body: Vec::new(), ..Response::plain("204 No Content", "") },
        _ => Response::plain("404 Not Found", "there is / and /runs.json"),
    }
}

/// The page. Its script carries a word that changes with every answer: a script from a run's texts could not.
fn page() -> Response {
    let nonce = format!(
        "{:016x}{:016x}",
        RandomState::new().build_hasher().finish(),
        RandomState::new().build_hasher().finish()
    );
    let page = PAGE.replace("NONCE", &nonce).replace("/* STYLE */", STYLE).replace("/* SCRIPT */", SCRIPT);
    let body = page.into_bytes();
    let policy = format!(
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; connect-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    let headers = vec![("Content-Security-Policy", policy)];
    Response { status: "200 OK", content_type: "text/html; charset=utf-8", headers, body }
}

/// Tells one answer from another (FNV-1a).
fn version(body: &[u8]) -> u64 {
    body.iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

impl Runs {
    fn describe(&mut self) -> Vec<u8> {
        let mut folders: Vec<PathBuf> = self.folders.iter().flat_map(|folder| run_folders(folder)).collect();
        if folders.len() > MOST_RUNS {
            let modified = |folder: &PathBuf| {
                std::fs::metadata(folder.join("log.jsonl")).and_then(|m| m.modified()).ok()
            };
            folders.sort_by_key(|folder| std::cmp::Reverse(modified(folder)));
            folders.truncate(MOST_RUNS);
            folders.sort();
        }
        self.watched.retain(|run| folders.iter().any(|folder| folder == run.folder()));
        for folder in &folders {
            if !self.watched.iter().any(|run| run.folder() == folder) {
                self.watched.push(WatchedRun::new(folder));
            }
        }
        let runs: Vec<_> = self.watched.iter_mut().map(WatchedRun::describe).collect();
        serde_json::to_vec(&json!({ "runs": runs })).unwrap_or_default()
    }
}

/// The runs that a folder stands for: itself, or those in it where it is none.
fn run_folders(folder: &Path) -> Vec<PathBuf> {
    let is_run = |folder: &Path| folder.join("log.jsonl").exists() || folder.join("config").is_dir();
    if !is_run(folder)
        && let Ok(entries) = std::fs::read_dir(folder)
    {
        let mut inside: Vec<PathBuf> =
            entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| is_run(path)).collect();
        inside.sort();
        if !inside.is_empty() {
            return inside;
        }
    }
    vec![folder.to_path_buf()]
}
