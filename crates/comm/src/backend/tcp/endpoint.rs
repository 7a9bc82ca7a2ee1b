//! Where a rank can be reached: one listener per rank, and the connections that came in.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::auth::{self, Claim, JobKey, Purpose, Timed, Unproven};
use crate::backend::message::Stream;
use crate::backend::{Membership, Ticket};
use crate::error::{Error, Result};
use crate::reception::{Guest, Reception};
use crate::sealed::Connection;
use crate::state::JobState;
use crate::store::{HEALTH_CHECK_INTERVAL, Store};

/// How long the two sides of a new connection may take to prove themselves.
const PROOF_LIMIT: Duration = Duration::from_secs(5);
/// No socket takes a timeout of zero.
const MIN_WAIT: Duration = Duration::from_millis(1);
/// How long the call of a rank that has left may still be on its way: it may have called, sent what was its part and left.
const LAST_CALL_LIMIT: Duration = Duration::from_secs(1);
/// Large socket buffers keep long transfers going while a rank folds.
static SOCKET_BUFFER_BYTES: libc::c_int = 4 << 20;

/// This rank's listener and what came in through it.
pub(crate) struct Endpoint {
    key: JobKey,
    rank: usize,
    store: Arc<dyn Store>,
    arrived: Arc<Arrived>,
    addresses: Mutex<HashMap<usize, SocketAddr>>,
    /// Gives the port back when dropped.
    _reception: Reception,
}

/// Connections that proved themselves.
#[derive(Default)]
struct Arrived {
    connections: Mutex<HashMap<Claim, Arrival>>,
    changed: Condvar,
}

/// One connection per claim: a second call replaces one that is still waiting, and never one that is in use.
enum Arrival {
    Waiting(Arc<Connection>),
    Taken,
}

impl Endpoint {
    /// Listens at `address` and tells the others.
    pub(crate) fn open(
        key: JobKey,
        rank: usize,
        address: IpAddr,
        store: Arc<dyn Store>,
    ) -> Result<Arc<Endpoint>> {
        let failed = |error| Error::io(format!("listening for peers at {address}"), error);
        let listener = TcpListener::bind((address, 0)).map_err(failed)?;
        let own_address = listener.local_addr().map_err(failed)?;
        let arrived = Arc::new(Arrived::default());
        let (arriving, proving) = (Arc::clone(&arrived), key.clone());
        let reception = Reception::open(listener, move |guest| arriving.receive(guest, rank, &proving));
        let reception = reception.map_err(failed)?;
        store.set(&format!("tcp/{rank}"), own_address.to_string().into_bytes())?;
        let addresses = Mutex::default();
        Ok(Arc::new(Endpoint { key, rank, store, arrived, addresses, _reception: reception }))
    }

    fn address_of(&self, rank: usize, deadline: Instant, state: &JobState) -> Result<SocketAddr> {
        if let Some(known) = self.addresses.lock().unwrap_or_else(PoisonError::into_inner).get(&rank) {
            return Ok(*known);
        }
        let value = self.store.wait(&format!("tcp/{rank}"), deadline, state)?;
        let address = value.and_then(|value| String::from_utf8(value).ok()?.parse().ok());
        let address =
            address.ok_or_else(|| Error::rendezvous(format!("rank {rank} has not said where it listens")))?;
        self.addresses.lock().unwrap_or_else(PoisonError::into_inner).insert(rank, address);
        Ok(address)
    }

    /// Makes a connection of a group, or waits for the peer to make it. The sender of messages connects; for collectives
    /// the lower rank does.
    pub(super) fn connect(
        &self,
        stream: Stream,
        peer: usize,
        membership: &Membership,
        ticket: &Ticket,
    ) -> Result<Arc<Connection>> {
        let peer_rank = membership.ranks[peer];
        let active = match stream {
            Stream::Collectives => self.rank < peer_rank,
            Stream::Sending => true,
            Stream::Receiving => false,
        };
        let (from_rank, to_rank) = if active { (self.rank, peer_rank) } else { (peer_rank, self.rank) };
        let purpose = match stream {
            Stream::Collectives => Purpose::Collectives,
            Stream::Sending | Stream::Receiving => Purpose::Messages,
        };
        let claim = Claim { purpose, group: membership.group_id, from_rank, to_rank };
        let connection = match active {
            true => Arc::new(self.call(claim, membership, ticket)?),
            false => self.await_call(claim, membership, ticket)?,
        };
        configure(connection.stream())
            .map_err(|error| Error::io(format!("the connection to rank {peer_rank}"), error))?;
        Ok(connection)
    }

    fn call(&self, claim: Claim, membership: &Membership, ticket: &Ticket) -> Result<Connection> {
        let rank = claim.to_rank;
        let address = self.address_of(rank, ticket.deadline, &membership.state)?;
        loop {
            membership.state.check(membership.group_id)?;
            let left = ticket.deadline.saturating_duration_since(Instant::now());
            let attempt = || -> std::result::Result<Connection, Unproven> {
                let connection =
                    TcpStream::connect_timeout(&address, left.clamp(MIN_WAIT, Duration::from_secs(2)))?;
                connection.set_nodelay(true)?;
                let deadline = ticket.deadline.min(Instant::now() + PROOF_LIMIT);
                let seal = auth::call(Timed { stream: &connection, deadline }, &self.key, claim)?;
                Ok(Connection::new(Arc::new(connection), seal))
            };
            let problem = match attempt() {
                Ok(connection) => return Ok(connection),
                Err(problem @ Unproven::SealsDiffer { .. }) => {
                    return Err(Error::rendezvous(problem.to_string()));
                }
                Err(problem) => problem,
            };
            if left.is_zero() {
                let missing = format!("rank {rank} (at {address}, which cannot be reached: {problem})");
                return Err(ticket.deadline_error(vec![missing]));
            }
            std::thread::sleep(HEALTH_CHECK_INTERVAL.min(left));
        }
    }

    fn await_call(&self, claim: Claim, membership: &Membership, ticket: &Ticket) -> Result<Arc<Connection>> {
        let rank = claim.from_rank;
        let mut connections = self.arrived.connections.lock().unwrap_or_else(PoisonError::into_inner);
        let mut seen_leaving = None;
        loop {
            if let Some(Arrival::Waiting(connection)) = connections.insert(claim, Arrival::Taken) {
                return Ok(connection);
            }
            connections.remove(&claim);
            membership.state.check(membership.group_id)?;
            if membership.state.has_left(rank)
                && seen_leaving.get_or_insert_with(Instant::now).elapsed() > LAST_CALL_LIMIT
            {
                return Err(membership.state.left_error(rank));
            }
            let left = ticket.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let last = membership.state.last_operation(rank);
                return Err(ticket.deadline_error(vec![format!("rank {rank} (its last operation: {last})")]));
            }
            let pause = HEALTH_CHECK_INTERVAL.min(left);
            connections = self
                .arrived
                .changed
                .wait_timeout(connections, pause)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

impl Arrived {
    /// Lets a connection prove itself, and keeps it for whoever waits for it.
    fn receive(&self, guest: Guest, rank: usize, key: &JobKey) {
        let wanted = |claim: &Claim| {
            let known = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
            match known.get(claim) {
                _ if claim.purpose == Purpose::Control || claim.to_rank != rank => {
                    Err(format!("this is rank {rank}, which takes links of groups"))
                }
                Some(Arrival::Taken) => Err("that link is already there".to_owned()),
                _ => Ok(()),
            }
        };
        let timed = Timed { stream: &guest.stream, deadline: guest.deadline };
        let answered = guest.stream.set_nodelay(true).map_err(Unproven::from);
        match answered.and_then(|()| auth::answer(timed, key, wanted)) {
            Ok((claim, seal)) => {
                let connection = Arc::new(Connection::new(guest.leave_room(), seal));
                let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
                if !matches!(connections.get(&claim), Some(Arrival::Taken)) {
                    connections.insert(claim, Arrival::Waiting(connection));
                    self.changed.notify_all();
                }
            }
            Err(why) => {
                tracing::warn!("turned away a connection from {:?}: {why}", guest.stream.peer_addr());
            }
        }
    }
}

fn configure(connection: &TcpStream) -> std::io::Result<()> {
    connection.set_nodelay(true)?;
    connection.set_read_timeout(None)?;
    connection.set_write_timeout(None)?;
    connection.set_nonblocking(true)?;
    for option in [libc::SO_SNDBUF, libc::SO_RCVBUF] {
        // SAFETY: sets an integer option of an open socket; a kernel that grants less is fine.
        unsafe {
            libc::setsockopt(
                connection.as_raw_fd(),
                libc::SOL_SOCKET,
                option,
                (&raw const SOCKET_BUFFER_BYTES).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            );
        }
    }
    Ok(())
}
