//! The hub: rank 0's side of the control connections.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::absent::{self, Patience};
use super::frame::{Frame, Hello, Welcome, read_frame, write_frame};
use super::meeting::Meeting;
use super::{BEAT_INTERVAL, ConnectOptions, LAST_OPERATION_KEY, SILENCE_LIMIT, port};
use crate::auth::{self, Claim, JobKey, Purpose, Timed, Unproven};
use crate::error::{Error, Loss, Result};
use crate::private;
use crate::reception::{Guest, Reception};
use crate::sealed::Connection;
use crate::state::Announcement;

/// How long a write to a member may take.
const WRITE_LIMIT: Duration = Duration::from_secs(2);
/// How long a failed rendezvous goes on answering.
const LAST_WORD_LIMIT: Duration = Duration::from_secs(1);
/// How often refused connections are told of at most.
const STRANGERS_EVERY: Duration = Duration::from_secs(1);

/// Rank 0's service to the job. Members are served as long as the process lives; newcomers until rank 0 leaves.
#[derive(Clone)]
pub(super) struct Hub {
    shared: Arc<Shared>,
    reception: Arc<Reception>,
}

struct Shared {
    expected: Hello,
    deadline: Instant,
    local_world_size: Option<usize>,
    /// Where ranks are told to come to.
    place: String,
    key: JobKey,
    /// A random name for what this job keeps on disk.
    job_name: String,
    /// Where ranks of one host find the port.
    meeting: Option<Meeting>,
    state: Mutex<State>,
    /// A member is gone.
    departed: Condvar,
    strangers: Mutex<Strangers>,
}

/// What was said of refused connections.
#[derive(Default)]
struct Strangers {
    last: Option<Instant>,
    untold: u64,
}

#[derive(Default)]
struct State {
    members: BTreeMap<usize, Membership>,
    welcomed: bool,
    /// Why nobody can join any more.
    refusal: Option<String>,
    values: HashMap<String, Vec<u8>>,
    /// Ranks that wait for a key.
    waiting: HashMap<String, Vec<usize>>,
}

struct Membership {
    connection: Arc<Connection>,
    from: SocketAddr,
    host_identity: String,
    last_heard: Instant,
    last_operation: String,
    gone: bool,
}

/// Why a connection is not taken into the job.
struct Refusal {
    reason: String,
    /// Whether the others must hear of it too, because the job cannot come together.
    ends_job: bool,
}

/// What a connection that has proven itself said first.
type Introduction = std::result::Result<Hello, Refusal>;

impl Refusal {
    fn stranger(reason: impl ToString) -> Self {
        Refusal { reason: reason.to_string(), ends_job: false }
    }
}

impl Hub {
    /// Listens, and serves until the process ends.
    pub(super) fn start(options: &ConnectOptions, deadline: Instant) -> Result<Hub> {
        let failed = |error| Error::io("the rendezvous address", error);
        let listener = port::bind(options)?;
        let address = listener.local_addr().map_err(failed)?;
        let (meeting, key) = match options.is_single_host() {
            true => Meeting::call(options, address.port()).map(|(meeting, key)| (Some(meeting), key))?,
            false => (None, JobKey::of_token(&options.token).sealing(options.encrypt)),
        };
        let shared = Arc::new(Shared {
            expected: super::member::hello(options),
            deadline,
            local_world_size: options.local_world_size,
            place: format!("{}:{}", options.master_addr, options.master_port),
            key,
            job_name: private::random_hex::<8>().map_err(failed)?,
            meeting,
            state: Mutex::default(),
            departed: Condvar::new(),
            strangers: Mutex::default(),
        });
        let (serving, watching) = (Arc::clone(&shared), Arc::clone(&shared));
        let reception = Reception::open(listener, move |guest| serving.serve(guest)).map_err(failed)?;
        spawn("comm-hub-watch", move || watching.watch())?;
        Ok(Hub { shared, reception: Arc::new(reception) })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.reception.address()
    }

    pub(super) fn key(&self) -> &JobKey {
        &self.shared.key
    }

    /// Gives the port back; members stay connected.
    pub(super) fn stop_listening(&self) {
        self.reception.close();
        self.shared.end_meeting();
    }

    /// Before this process may end: gives ranks that are just introducing themselves the time to hear why.
    pub(super) fn let_others_hear(&self) {
        std::thread::sleep(LAST_WORD_LIMIT / 5);
        self.reception.wait_until_empty(LAST_WORD_LIMIT);
    }

    /// Before this process may end: lets what its own rank said last be passed on, and that it left.
    pub(super) fn see_off(&self, rank: usize) {
        let is_here = |state: &mut State| state.members.get(&rank).is_some_and(|member| !member.gone);
        let served = self.shared.departed.wait_timeout_while(self.shared.lock(), LAST_WORD_LIMIT, is_here);
        drop(served.unwrap_or_else(PoisonError::into_inner));
        // Where its words were not read in time, the others must not take it for dead.
        self.shared.announce_left(rank);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end_meeting(&self) {
        self.meeting.iter().for_each(Meeting::end);
    }

    fn serve(&self, guest: Guest) {
        let proven = self.prove(&guest);
        let stream = guest.leave_room();
        let from = stream.peer_addr().map_or_else(|_| "somewhere".to_owned(), |from| from.to_string());
        let (connection, hello) = match proven {
            Ok(proven) => proven,
            // A member, and there is no job in which both can be.
            Err(why @ Unproven::SealsDiffer { .. }) => return self.refuse_all(&why.to_string()),
            Err(why) => return self.tell_of_stranger(&from, &why.to_string()),
        };
        let rank = match hello.and_then(|hello| self.admit(hello, &connection)) {
            Ok(rank) => rank,
            Err(Refusal { reason, ends_job }) => {
                self.tell_of_stranger(&from, &reason);
                let _ = write_frame(&mut &*connection, &Frame::Refused(reason.clone()));
                if ends_job {
                    self.refuse_all(&reason);
                }
                return;
            }
        };
        let said_goodbye = loop {
            match read_frame(&mut &*connection) {
                Ok(Frame::Bye) => break true,
                Ok(frame) => self.handle(rank, frame),
                Err(_) => break false,
            }
        };
        if said_goodbye {
            self.announce_left(rank);
        } else {
            self.lose(rank, Loss::Died);
        }
    }

    /// Tells of a refused connection: of many, once in a while, and how many they were. Whoever reaches the port must not fill a log.
    fn tell_of_stranger(&self, from: &str, why: &str) {
        let mut told = self.strangers.lock().unwrap_or_else(PoisonError::into_inner);
        told.untold += 1;
        if told.last.is_some_and(|last| last.elapsed() < STRANGERS_EVERY) {
            return;
        }
        let others = match std::mem::take(&mut told.untold) - 1 {
            0 => String::new(),
            more => format!(", after {more} others"),
        };
        told.last = Some(Instant::now());
        tracing::warn!("rendezvous: refused a connection from {from}{others}: {why}");
    }

    /// Lets the connection prove itself and reads who it is; the answer to anything else is a reason.
    fn prove(&self, guest: &Guest) -> std::result::Result<(Arc<Connection>, Introduction), Unproven> {
        guest.stream.set_nodelay(true)?;
        let wanted = |claim: &Claim| match (claim.purpose, claim.to_rank) {
            (Purpose::Control, 0) => Ok(()),
            _ => Err("this is rank 0's hub".to_owned()),
        };
        let timed = Timed { stream: &guest.stream, deadline: guest.deadline };
        let (claim, seal) = auth::answer(timed, &self.key, wanted)?;
        let connection = Connection::new(Arc::clone(&guest.stream), seal);
        let hello = match read_frame(&mut connection.until(guest.deadline)) {
            Ok(Frame::Hello(hello)) if hello.rank == claim.from_rank => Ok(hello),
            Ok(_) => Err(Refusal::stranger("it did not begin with who it is")),
            Err(error) => Err(Refusal::stranger(format!("it did not say who it is: {error}"))),
        };
        Ok((Arc::new(connection), hello))
    }

    /// Takes a rank into the job. A stranger is refused; a member that disagrees ends the job for all.
    fn admit(&self, hello: Hello, connection: &Arc<Connection>) -> std::result::Result<usize, Refusal> {
        let (expected, stream) = (&self.expected, connection.stream());
        let from = stream.peer_addr().map_err(Refusal::stranger)?;
        let disagreement = [
            ("world size", hello.world_size.to_string(), expected.world_size.to_string()),
            ("version", hello.version.clone(), expected.version.clone()),
            ("configuration hash", hello.config_hash.clone(), expected.config_hash.clone()),
        ]
        .into_iter()
        .find(|(_, theirs, ours)| theirs != ours);
        if let Some((what, theirs, ours)) = disagreement {
            let reason = format!(
                "rank {} (process {} at {from}) has {what} {theirs:?}, but rank 0 has {ours:?}",
                hello.rank, hello.pid
            );
            return Err(Refusal { reason, ends_job: true });
        }
        if hello.rank >= expected.world_size {
            let reason = format!("rank {} does not exist in a world of {}", hello.rank, expected.world_size);
            return Err(Refusal::stranger(reason));
        }
        let mut state = self.lock();
        if let Some(reason) = &state.refusal {
            return Err(Refusal::stranger(reason));
        }
        if let Some(other) = state.members.get(&hello.rank) {
            let reason =
                format!("rank {} is already here, from {}; this one is from {from}", hello.rank, other.from);
            return Err(Refusal::stranger(reason));
        }
        let configured =
            stream.set_read_timeout(None).and_then(|()| stream.set_write_timeout(Some(WRITE_LIMIT)));
        configured.map_err(Refusal::stranger)?;
        let member = Membership {
            connection: Arc::clone(connection),
            from,
            host_identity: hello.host_identity,
            last_heard: Instant::now(),
            last_operation: "none yet".into(),
            gone: false,
        };
        state.members.insert(hello.rank, member);
        if state.members.len() == expected.world_size {
            let identity = |rank| state.members.get(&rank).map(|member| member.host_identity.clone());
            let host_identities = (0..expected.world_size).filter_map(identity).collect();
            state.welcomed = true;
            state.members.values_mut().for_each(|member| member.last_heard = Instant::now());
            self.end_meeting();
            state.broadcast(&Frame::Welcome(Welcome { host_identities, job_name: self.job_name.clone() }));
        }
        Ok(hello.rank)
    }

    fn handle(&self, rank: usize, frame: Frame) {
        let mut state = self.lock();
        if let Some(member) = state.members.get_mut(&rank) {
            member.last_heard = Instant::now();
        }
        match frame {
            Frame::Beat(Some(last_operation)) => {
                if let Some(member) = state.members.get_mut(&rank) {
                    member.last_operation = last_operation;
                }
            }
            Frame::Set(key, value) => {
                for waiting in state.waiting.remove(&key).unwrap_or_default() {
                    state.send(waiting, &Frame::Value(key.clone(), value.clone()));
                }
                state.values.insert(key, value);
            }
            Frame::Wait(key) => {
                match state.last_operation_of(&key).or_else(|| state.values.get(&key).cloned()) {
                    Some(value) => state.send(rank, &Frame::Value(key, value)),
                    None => state.waiting.entry(key).or_default().push(rank),
                }
            }
            Frame::Remove(key) => {
                state.values.remove(&key);
            }
            announce @ Frame::Announce(_) => state.broadcast(&announce),
            _ => {}
        }
    }

    /// Who has not come.
    fn missing(&self, state: &State) -> String {
        let came_from = state.members.iter().map(|(rank, member)| (*rank, member.from.ip())).collect();
        absent::describe(self.expected.world_size, self.local_world_size, &came_from)
    }

    /// Tells everybody that a rank left in good order.
    fn announce_left(&self, rank: usize) {
        let mut state = self.lock();
        if let Some(member) = state.members.get_mut(&rank)
            && !std::mem::replace(&mut member.gone, true)
        {
            state.broadcast(&Frame::Left(rank));
            self.departed.notify_all();
        }
    }

    fn lose(&self, rank: usize, loss: Loss) {
        let mut state = self.lock();
        let Some(member) = state.members.get_mut(&rank).filter(|member| !member.gone) else { return };
        member.gone = true;
        self.departed.notify_all();
        let last_operation = member.last_operation.clone();
        if !state.welcomed {
            let reason = format!("rank {rank} {loss} before all ranks had met");
            drop(state);
            return self.refuse_all(&reason);
        }
        state.broadcast(&Frame::Announce(Announcement::RankLost { rank, loss, last_operation }));
    }

    fn refuse_all(&self, reason: &str) {
        let mut state = self.lock();
        if state.refusal.is_none() {
            tracing::error!("rendezvous: {reason}");
            state.refusal = Some(reason.to_owned());
            state.broadcast(&Frame::Refused(reason.to_owned()));
        }
    }

    /// Sends heartbeats, notices silent ranks, tells of missing ones and gives up on them at the deadline.
    fn watch(&self) {
        let mut patience = Patience::until(self.deadline);
        loop {
            let asleep = Instant::now();
            std::thread::sleep(BEAT_INTERVAL);
            let mut state = self.lock();
            if asleep.elapsed() > SILENCE_LIMIT / 2 {
                // This process was stopped for a while: what it did not hear meanwhile says nothing about the members.
                state.members.values_mut().for_each(|member| member.last_heard = Instant::now());
            }
            if !state.welcomed && state.refusal.is_none() {
                let missing = self.missing(&state);
                if Instant::now() >= self.deadline {
                    drop(state);
                    self.refuse_all(&format!("gave up waiting for {missing}"));
                    continue;
                }
                if let Some(waited) = patience.runs_out() {
                    tracing::warn!(
                        "rendezvous: waiting for {missing} since {} s; gives up in {} s. Was it started, and can it reach {}?",
                        waited.as_secs(),
                        self.deadline.saturating_duration_since(Instant::now()).as_secs(),
                        self.place
                    );
                }
            }
            let last_operation = state.members.get(&0).map(|member| member.last_operation.clone());
            state.broadcast(&Frame::Beat(last_operation));
            // Members begin to beat when they are welcomed.
            let welcomed = state.welcomed;
            let silent = |(rank, member): (&usize, &Membership)| {
                (welcomed && !member.gone && member.last_heard.elapsed() > SILENCE_LIMIT).then_some(*rank)
            };
            let silent: Vec<usize> = state.members.iter().filter_map(silent).collect();
            drop(state);
            silent.into_iter().for_each(|rank| self.lose(rank, Loss::Silent));
        }
    }
}

impl State {
    /// The answer to a member that asks what another did last.
    fn last_operation_of(&self, key: &str) -> Option<Vec<u8>> {
        let rank: usize = key.strip_prefix(LAST_OPERATION_KEY)?.parse().ok()?;
        self.members.get(&rank).map(|member| member.last_operation.clone().into_bytes())
    }

    fn send(&mut self, rank: usize, frame: &Frame) {
        if let Some(member) = self.members.get_mut(&rank) {
            // A member that cannot be written to is noticed by its silence.
            let _ = write_frame(&mut &*member.connection, frame);
        }
    }

    fn broadcast(&mut self, frame: &Frame) {
        let present: Vec<usize> =
            self.members.iter().filter(|(_, member)| !member.gone).map(|(rank, _)| *rank).collect();
        present.into_iter().for_each(|rank| self.send(rank, frame));
    }
}

pub(super) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
    let spawned = std::thread::Builder::new().name(name.into()).spawn(body);
    spawned.map(drop).map_err(|error| Error::io(format!("starting the thread {name}"), error))
}
