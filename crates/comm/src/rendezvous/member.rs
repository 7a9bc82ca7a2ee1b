//! A rank's side of its control connection: joining, the key-value store, heartbeats, announcements.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::net::{IpAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::absent::Patience;
use super::frame::{Frame, Hello, Welcome, read_frame, write_frame};
use super::hub::spawn;
use super::meeting::{self, MeetingPoint};
use super::{BEAT_INTERVAL, ConnectOptions, LAST_OPERATION_KEY, SILENCE_LIMIT, host_identity, port};
use crate::auth::{self, Claim, JobKey, Purpose, Timed, Unproven};
use crate::error::{Error, Loss, Result};
use crate::private;
use crate::recorder::Recorder;
use crate::sealed::Connection;
use crate::state::{Announcement, JobState};
use crate::store::{HEALTH_CHECK_INTERVAL, Store};
use crate::sys::{dump_requests, watch_dump_signal};
use crate::world::World;

/// How long the two sides of a new connection may take to prove themselves.
const PROOF_LIMIT: Duration = Duration::from_secs(5);
/// The first and the longest pause before the hub is called again.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));
/// How long to go on calling at an address where something listens that is not this job's hub. It may yet go away, or be
/// too crowded to answer; but a wrong token or port should be told soon.
const STRANGE_LIMIT: Duration = Duration::from_secs(20);

/// A joined rank's connection to the hub.
pub(super) struct Member {
    shared: Arc<Shared>,
    key: JobKey,
    host_identities: Vec<String>,
    local_address: IpAddr,
}

struct Shared {
    rank: usize,
    /// Locked while a frame is written.
    connection: Mutex<Arc<Connection>>,
    values: Mutex<HashMap<String, Vec<u8>>>,
    arrived: Condvar,
    state: Arc<JobState>,
    last_heard: Mutex<Instant>,
    leaving: AtomicBool,
    recorder: Mutex<Weak<Recorder>>,
    trace_folder: Option<PathBuf>,
}

/// What this rank says about itself.
pub(super) fn hello(options: &ConnectOptions) -> Hello {
    Hello {
        rank: options.rank,
        world_size: options.world_size,
        version: options.version.clone(),
        config_hash: options.config_hash.clone(),
        host_identity: host_identity(),
        pid: std::process::id(),
    }
}

impl Member {
    /// Connects to the hub (trying again until it is there) and waits until everybody has joined.
    pub(super) fn join(
        options: &ConnectOptions,
        hub: Option<MeetingPoint>,
        deadline: Instant,
        state: Arc<JobState>,
    ) -> Result<Member> {
        let (connection, key) = connect(options, hub.as_ref(), deadline)?;
        let connection = Arc::new(connection);
        let welcome = join_hub(&connection, options, deadline)?;
        let configure = |stream: &TcpStream| {
            stream.set_read_timeout(None)?;
            stream.set_write_timeout(Some(SILENCE_LIMIT))?;
            Ok(stream.local_addr()?.ip())
        };
        let local_address =
            configure(connection.stream()).map_err(|error| Error::io("the control connection", error))?;
        let shared = Arc::new(Shared {
            rank: options.rank,
            connection: Mutex::new(Arc::clone(&connection)),
            values: Mutex::default(),
            arrived: Condvar::new(),
            state: Arc::clone(&state),
            last_heard: Mutex::new(Instant::now()),
            leaving: AtomicBool::new(false),
            recorder: Mutex::new(Weak::new()),
            trace_folder: trace_folder(options, &welcome.job_name)?,
        });
        if shared.trace_folder.is_some() {
            watch_dump_signal();
        }
        let (listening, beating, announcing) =
            (Arc::clone(&shared), Arc::clone(&shared), Arc::clone(&shared));
        state.set_announcer(Box::new(move |announcement| {
            // When the hub cannot be reached, that is itself a failure, and noticed.
            let _ = announcing.send(&Frame::Announce(announcement.clone()));
        }));
        let asking = Arc::clone(&shared);
        state.set_inquirer(Box::new(move |rank| {
            let key = format!("{LAST_OPERATION_KEY}{rank}");
            let answer =
                asking.wait(&key, Instant::now() + Duration::from_secs(1), &JobState::new(0)).ok()??;
            String::from_utf8(answer).ok()
        }));
        spawn("comm-listen", move || listening.listen(&connection))?;
        spawn("comm-beat", move || beating.beat())?;
        Ok(Member { shared, key, host_identities: welcome.host_identities, local_address })
    }

    /// What the job's ranks know each other by.
    pub(super) fn key(&self) -> &JobKey {
        &self.key
    }

    /// Where this job's flight recorders go.
    pub(super) fn trace_folder(&self) -> Option<&Path> {
        self.shared.trace_folder.as_deref()
    }

    /// The identity of each rank's host.
    pub(super) fn host_identities(&self) -> &[String] {
        &self.host_identities
    }

    /// The address at which this host is known to the hub.
    pub(super) fn local_address(&self) -> IpAddr {
        self.local_address
    }

    /// Lets heartbeats tell what the rank does.
    pub(super) fn watch(&self, world: &World) {
        let recorder = Arc::downgrade(&world.inner.recorder);
        *self.shared.recorder.lock().unwrap_or_else(PoisonError::into_inner) = recorder;
    }

    /// Says goodbye.
    pub(super) fn leave(&self) {
        if !self.shared.leaving.swap(true, Ordering::SeqCst) {
            // The hub may be gone already, when rank 0 left first.
            let _ = self.shared.send(&Frame::Bye);
        }
    }
}

/// The folder that was named, or one of this job's own in the user's private folder.
fn trace_folder(options: &ConnectOptions, job_name: &str) -> Result<Option<PathBuf>> {
    let chosen = options.limits.trace_folder.clone();
    if chosen.is_some() || !options.traces_privately {
        return Ok(chosen);
    }
    let private = private::folder().map_err(|error| Error::io("the folder of flight recorders", error))?;
    Ok(Some(private.join(format!("trace-{job_name}"))))
}

fn join_hub(connection: &Connection, options: &ConnectOptions, deadline: Instant) -> Result<Welcome> {
    let failed = |error: std::io::Error| Error::io("joining the job", error);
    write_frame(&mut &*connection, &Frame::Hello(hello(options))).map_err(failed)?;
    loop {
        // The hub speaks every half second; a little more than the deadline lets its own verdict arrive.
        let left = (deadline + SILENCE_LIMIT).saturating_duration_since(Instant::now());
        connection
            .stream()
            .set_read_timeout(Some(left.min(SILENCE_LIMIT).max(Duration::from_millis(1))))
            .map_err(failed)?;
        match read_frame(&mut &*connection) {
            Ok(Frame::Welcome(welcome)) => return Ok(welcome),
            Ok(Frame::Refused(reason)) => {
                return Err(Error::rendezvous(format!("rank {} was refused: {reason}", options.rank)));
            }
            Ok(_) => {}
            Err(error) => {
                let what = match error.kind() {
                    ErrorKind::WouldBlock | ErrorKind::TimedOut => "rank 0 stopped responding to",
                    _ => "rank 0 ended the rendezvous with",
                };
                return Err(Error::rendezvous(format!("{what} rank {}: {error}", options.rank)));
            }
        }
    }
}

/// Calls the hub, again and again with longer pauses, until it is there and both have proven themselves.
fn connect(
    options: &ConnectOptions,
    hub: Option<&MeetingPoint>,
    deadline: Instant,
) -> Result<(Connection, JobKey)> {
    let find = || match hub {
        Some(known) => Ok(MeetingPoint { address: known.address, key: known.key.clone() }),
        None if options.is_single_host() => meeting::find(options),
        None => port::resolve(options)
            .map(|address| MeetingPoint {
                address,
                key: JobKey::of_token(&options.token).sealing(options.encrypt),
            })
            .map_err(|error| error.to_string()),
    };
    let claim = Claim { purpose: Purpose::Control, group: 0, from_rank: options.rank, to_rank: 0 };
    let mut strange_since = None;
    let mut patience = Patience::until(deadline);
    let mut pause = PAUSES.0;
    loop {
        let problem = match find() {
            Ok(found) => match call(&found, claim, deadline) {
                Ok(connection) => return Ok((connection, found.key)),
                Err(problem @ Unproven::SealsDiffer { .. }) => {
                    return Err(Error::rendezvous(problem.to_string()));
                }
                Err(problem) if found.address.ip().is_loopback() && has_no_way(&problem) => {
                    return Err(Error::rendezvous(format!(
                        "rank {} cannot reach rank 0 at {}: {problem}: the loopback interface of this host is down or has no such address; bring it up (`ip link set lo up`)",
                        options.rank, found.address
                    )));
                }
                Err(problem) if is_strange(&problem) => {
                    strange_since.get_or_insert_with(Instant::now);
                    format!("what listens there is not this job's hub: {problem}")
                }
                Err(problem) => {
                    strange_since = None;
                    problem.to_string()
                }
            },
            Err(problem) => problem,
        };
        let is_over = |since: Instant| since.elapsed() > STRANGE_LIMIT;
        let left = deadline.saturating_duration_since(Instant::now());
        let (host, port) = (&options.master_addr, options.master_port);
        if let Some(waited) = patience.runs_out().filter(|_| !left.is_zero()) {
            tracing::warn!(
                "rendezvous: rank {} looks for rank 0 at {host}:{port} since {} s, and gives up in {} s: {problem}",
                options.rank,
                waited.as_secs(),
                left.as_secs()
            );
        }
        if left.is_zero() || strange_since.is_some_and(is_over) {
            let problem = format!("rank {} cannot reach rank 0 at {host}:{port}: {problem}", options.rank);
            return Err(Error::rendezvous(problem));
        }
        std::thread::sleep(pause.min(left));
        pause = (pause * 2).min(if strange_since.is_some() { PAUSES.1 } else { PAUSES.1 / 10 });
    }
}

/// Whether the host has no interface over which the address could be reached. On loopback that does not pass by waiting.
fn has_no_way(problem: &Unproven) -> bool {
    let kinds = [ErrorKind::NetworkUnreachable, ErrorKind::HostUnreachable, ErrorKind::AddrNotAvailable];
    matches!(problem, Unproven::Io(error) if kinds.contains(&error.kind()))
}

/// Whether something answered that is not the hub, or listens and says nothing. A hub that is not there yet refuses the
/// connection, and one in a crowd may cut it.
fn is_strange(problem: &Unproven) -> bool {
    match problem {
        Unproven::Io(error) => matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut),
        Unproven::Protocol | Unproven::Stranger | Unproven::TurnedAway(_) => true,
        Unproven::SealsDiffer { .. } => false,
    }
}

fn call(hub: &MeetingPoint, claim: Claim, deadline: Instant) -> std::result::Result<Connection, Unproven> {
    let limit = deadline.min(Instant::now() + PROOF_LIMIT);
    let left = limit.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let stream = TcpStream::connect_timeout(&hub.address, left)?;
    stream.set_nodelay(true)?;
    let seal = auth::call(Timed { stream: &stream, deadline: limit }, &hub.key, claim)?;
    Ok(Connection::new(Arc::new(stream), seal))
}

impl Shared {
    fn send(&self, frame: &Frame) -> std::io::Result<()> {
        let connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        write_frame(&mut &**connection, frame)
    }

    fn wait(&self, key: &str, deadline: Instant, state: &JobState) -> Result<Option<Vec<u8>>> {
        let asked = self.send(&Frame::Wait(key.to_owned()));
        asked.map_err(|error| Error::io(format!("asking for {key}"), error))?;
        let mut values = self.values.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(value) = values.remove(key) {
                return Ok(Some(value));
            }
            state.check(u64::MAX)?;
            let now = Instant::now();
            if now >= deadline {
                return Ok(None);
            }
            let pause = HEALTH_CHECK_INTERVAL.min(deadline - now);
            values = self.arrived.wait_timeout(values, pause).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn listen(&self, connection: &Connection) {
        loop {
            let frame = read_frame(&mut &*connection);
            *self.last_heard.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
            match frame {
                Ok(Frame::Value(key, value)) => {
                    self.values.lock().unwrap_or_else(PoisonError::into_inner).insert(key, value);
                    self.arrived.notify_all();
                }
                Ok(Frame::Announce(announcement)) => {
                    if let Announcement::RankLost { rank, last_operation, .. } = &announcement {
                        self.state.set_last_operation(*rank, last_operation.clone());
                    }
                    self.state.note(announcement);
                }
                Ok(Frame::Left(rank)) => self.state.note_left(rank),
                // Once rank 0 is gone nobody can be asked what it did.
                Ok(Frame::Beat(Some(last_operation))) => self.state.set_last_operation(0, last_operation),
                Ok(_) => {}
                Err(_) => break,
            }
        }
        // The connection is gone: with rank 0, unless we or it left in good order.
        if !self.leaving.load(Ordering::SeqCst) && !self.state.has_left(0) {
            self.lose_hub(Loss::Died);
        }
    }

    fn lose_hub(&self, loss: Loss) {
        let last_operation = self.state.last_known_operation(0);
        self.state.note(Announcement::RankLost { rank: 0, loss, last_operation });
    }

    fn beat(&self) {
        let mut dumps_written = dump_requests();
        loop {
            let asleep = Instant::now();
            std::thread::sleep(BEAT_INTERVAL);
            if asleep.elapsed() > SILENCE_LIMIT / 2 {
                // This process was stopped for a while: what it did not hear meanwhile says nothing about the hub.
                *self.last_heard.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
            }
            if self.leaving.load(Ordering::SeqCst) {
                return;
            }
            let recorder = self.recorder.lock().unwrap_or_else(PoisonError::into_inner).upgrade();
            if let (Some(recorder), Some(folder)) = (&recorder, &self.trace_folder)
                && dumps_written != dump_requests()
            {
                dumps_written = dump_requests();
                match recorder.dump(folder) {
                    Ok(path) => tracing::info!("flight recorder of rank {} in {}", self.rank, path.display()),
                    Err(error) => tracing::error!("{error}"),
                }
            }
            let last_operation = recorder.and_then(|recorder| recorder.last());
            let silence = self.last_heard.lock().unwrap_or_else(PoisonError::into_inner).elapsed();
            if self.state.has_left(0) {
                continue;
            }
            // A connection that is gone shows in `listen`.
            let _ = self.send(&Frame::Beat(last_operation));
            if self.rank != 0 && silence > SILENCE_LIMIT {
                self.lose_hub(Loss::Silent);
            }
        }
    }
}

impl Store for Member {
    fn set(&self, key: &str, value: Vec<u8>) -> Result<()> {
        let sent = self.shared.send(&Frame::Set(key.to_owned(), value));
        sent.map_err(|error| Error::io(format!("telling the others {key}"), error))
    }

    fn wait(&self, key: &str, deadline: Instant, state: &JobState) -> Result<Option<Vec<u8>>> {
        self.shared.wait(key, deadline, state)
    }

    fn remove(&self, key: &str) -> Result<()> {
        let sent = self.shared.send(&Frame::Remove(key.to_owned()));
        sent.map_err(|error| Error::io(format!("forgetting {key}"), error))
    }
}
