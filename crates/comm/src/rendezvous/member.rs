//! A rank's side of its control connection: joining, the key-value store, heartbeats, announcements.

use std::collections::HashMap;
use std::io::{ErrorKind, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::frame::{Frame, Hello, MAGIC, read_frame, write_frame};
use super::hub::spawn;
use super::{BEAT_INTERVAL, ConnectOptions, LAST_OPERATION_KEY, SILENCE_LIMIT, host_identity, port};
use crate::error::{Error, Loss, Result};
use crate::recorder::Recorder;
use crate::state::{Announcement, JobState};
use crate::store::{HEALTH_CHECK_INTERVAL, Store};
use crate::sys::{dump_requests, watch_dump_signal};
use crate::world::World;

/// A joined rank's connection to the hub.
pub(super) struct Member {
    shared: Arc<Shared>,
    host_identities: Vec<String>,
    local_address: IpAddr,
}

struct Shared {
    rank: usize,
    stream: Mutex<TcpStream>,
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
        token: options.token.clone(),
        host_identity: host_identity(),
        pid: std::process::id(),
    }
}

impl Member {
    /// Connects to the hub (trying again until it is there) and waits until everybody has joined.
    pub(super) fn join(
        options: &ConnectOptions,
        hub: Option<SocketAddr>,
        deadline: Instant,
        state: Arc<JobState>,
    ) -> Result<Member> {
        let (mut stream, identities) = join_hub(options, hub, deadline)?;
        let configure = |stream: &TcpStream| {
            stream.set_read_timeout(None)?;
            stream.set_write_timeout(Some(SILENCE_LIMIT))?;
            Ok((stream.try_clone()?, stream.local_addr()?.ip()))
        };
        let (writer, local_address) =
            configure(&stream).map_err(|error| Error::io("the control connection", error))?;
        let shared = Arc::new(Shared {
            rank: options.rank,
            stream: Mutex::new(writer),
            values: Mutex::default(),
            arrived: Condvar::new(),
            state: Arc::clone(&state),
            last_heard: Mutex::new(Instant::now()),
            leaving: AtomicBool::new(false),
            recorder: Mutex::new(Weak::new()),
            trace_folder: options.limits.trace_folder.clone(),
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
        spawn("comm-listen", move || listening.listen(&mut stream))?;
        spawn("comm-beat", move || beating.beat())?;
        Ok(Member { shared, host_identities: identities, local_address })
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

fn join_hub(
    options: &ConnectOptions,
    hub: Option<SocketAddr>,
    deadline: Instant,
) -> Result<(TcpStream, Vec<String>)> {
    let mut stream = connect(options, hub, deadline)?;
    let failed = |error: std::io::Error| Error::io("joining the job", error);
    stream.set_nodelay(true).map_err(failed)?;
    stream.write_all(&MAGIC).map_err(failed)?;
    write_frame(&mut stream, &Frame::Hello(hello(options))).map_err(failed)?;
    loop {
        // The hub speaks every half second; a little more than the deadline lets its own verdict arrive.
        let left = (deadline + SILENCE_LIMIT).saturating_duration_since(Instant::now());
        stream
            .set_read_timeout(Some(left.min(SILENCE_LIMIT).max(Duration::from_millis(1))))
            .map_err(failed)?;
        match read_frame(&mut stream) {
            Ok(Frame::Welcome(identities)) => return Ok((stream, identities)),
            Ok(Frame::Refused(reason)) => {
                return Err(Error::rendezvous(format!("rank {} was refused: {reason}", options.rank)));
            }
            Ok(_) => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                let problem = format!("the listener at {} does not answer as a hub", options.master_addr);
                return Err(Error::rendezvous(problem));
            }
            Err(error) => {
                let problem = format!("rank 0 ended the rendezvous with rank {}: {error}", options.rank);
                return Err(Error::rendezvous(problem));
            }
        }
    }
}

fn connect(options: &ConnectOptions, hub: Option<SocketAddr>, deadline: Instant) -> Result<TcpStream> {
    let mut last_problem = String::from("it does not listen yet");
    loop {
        let address = match hub {
            Some(address) => Some(address),
            None if options.is_single_host() => port::ask_port(options),
            None => Some(port::resolve(options)?),
        };
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let (host, port) = (&options.master_addr, options.master_port);
            let problem =
                format!("rank {} cannot reach rank 0 at {host}:{port}: {last_problem}", options.rank);
            return Err(Error::rendezvous(problem));
        }
        if let Some(address) = address {
            match TcpStream::connect_timeout(&address, left.min(Duration::from_secs(5))) {
                Ok(stream) => return Ok(stream),
                Err(error) => last_problem = error.to_string(),
            }
        }
        std::thread::sleep(Duration::from_millis(20).min(left));
    }
}

impl Shared {
    fn send(&self, frame: &Frame) -> std::io::Result<()> {
        write_frame(&mut *self.stream.lock().unwrap_or_else(PoisonError::into_inner), frame)
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

    fn listen(&self, stream: &mut TcpStream) {
        loop {
            let frame = read_frame(stream);
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
        let last_operation = self.state.last_operation(0);
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
