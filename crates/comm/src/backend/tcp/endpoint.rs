//! Where a rank can be reached: one listener per rank, and the connections that came in.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::backend::message::Stream;
use crate::backend::{Membership, Ticket};
use crate::error::{Error, Result};
use crate::state::JobState;
use crate::store::{HEALTH_CHECK_INTERVAL, Store};

const MAGIC: [u8; 8] = *b"FERRODT\x01";
/// How long a fresh connection may take to introduce itself.
const INTRODUCTION_LIMIT: Duration = Duration::from_secs(5);
/// How long the call of a rank that has left may still be on its way: it may have called, sent what was its part and left.
const LAST_CALL_LIMIT: Duration = Duration::from_secs(1);
/// Large socket buffers keep long transfers going while a rank folds.
static SOCKET_BUFFER_BYTES: libc::c_int = 4 << 20;

/// Which connection this is; the one who connects says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Introduction {
    job: u64,
    group: u64,
    from_rank: u64,
    /// 0: collectives; 1: messages from the one who connects.
    purpose: u64,
}

impl Introduction {
    fn to_bytes(self) -> [u8; 40] {
        let mut bytes = [0u8; 40];
        bytes[..8].copy_from_slice(&MAGIC);
        for (slot, word) in
            bytes[8..].chunks_exact_mut(8).zip([self.job, self.group, self.from_rank, self.purpose])
        {
            slot.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    fn read(stream: &mut TcpStream) -> std::io::Result<Option<Self>> {
        let mut bytes = [0u8; 40];
        stream.read_exact(&mut bytes)?;
        let mut words = bytes.chunks_exact(8).map(|word| {
            let mut copy = [0u8; 8];
            copy.copy_from_slice(word);
            copy
        });
        let magic = words.next();
        let mut word = || words.next().map(u64::from_le_bytes).unwrap_or(0);
        let introduction = Introduction { job: word(), group: word(), from_rank: word(), purpose: word() };
        Ok((magic == Some(MAGIC)).then_some(introduction))
    }
}

/// This rank's listener and what came in through it.
pub(crate) struct Endpoint {
    job: u64,
    rank: usize,
    store: Arc<dyn Store>,
    arrived: Arc<Arrived>,
    addresses: Mutex<HashMap<usize, SocketAddr>>,
    own_address: SocketAddr,
}

#[derive(Default)]
struct Arrived {
    connections: Mutex<HashMap<Introduction, TcpStream>>,
    changed: Condvar,
    closed: std::sync::atomic::AtomicBool,
}

impl Endpoint {
    /// Listens at `address` and tells the others.
    pub(crate) fn open(
        job: u64,
        rank: usize,
        address: IpAddr,
        store: Arc<dyn Store>,
    ) -> Result<Arc<Endpoint>> {
        let what = || format!("listening for peers at {address}");
        let listener = TcpListener::bind((address, 0)).map_err(|error| Error::io(what(), error))?;
        let own_address = listener.local_addr().map_err(|error| Error::io(what(), error))?;
        store.set(&format!("tcp/{rank}"), own_address.to_string().into_bytes())?;
        let arrived = Arc::new(Arrived::default());
        let accepting = Arc::clone(&arrived);
        std::thread::Builder::new()
            .name("comm-accept".into())
            .spawn(move || accept(&listener, job, &accepting))
            .map_err(|error| Error::io(what(), error))?;
        Ok(Arc::new(Endpoint { job, rank, store, arrived, addresses: Mutex::default(), own_address }))
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
    ) -> Result<TcpStream> {
        let peer_rank = membership.ranks[peer];
        let active = match stream {
            Stream::Collectives => self.rank < peer_rank,
            Stream::Sending => true,
            Stream::Receiving => false,
        };
        let from_rank = if active { self.rank } else { peer_rank } as u64;
        let purpose = u64::from(stream != Stream::Collectives);
        let introduction = Introduction { job: self.job, group: membership.group_id, from_rank, purpose };
        let connection = if active {
            self.call(peer_rank, introduction, membership, ticket)?
        } else {
            self.await_call(peer_rank, introduction, membership, ticket)?
        };
        configure(&connection)
            .map_err(|error| Error::io(format!("the connection to rank {peer_rank}"), error))?;
        Ok(connection)
    }

    fn call(
        &self,
        rank: usize,
        introduction: Introduction,
        membership: &Membership,
        ticket: &Ticket,
    ) -> Result<TcpStream> {
        let address = self.address_of(rank, ticket.deadline, &membership.state)?;
        loop {
            membership.state.check(membership.group_id)?;
            let left = ticket.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ticket
                    .deadline_error(vec![format!("rank {rank} (at {address}, which cannot be reached)")]));
            }
            let attempt = TcpStream::connect_timeout(&address, left.min(Duration::from_secs(2)));
            if let Ok(mut connection) = attempt
                && connection.write_all(&introduction.to_bytes()).is_ok()
            {
                return Ok(connection);
            }
            std::thread::sleep(HEALTH_CHECK_INTERVAL.min(left));
        }
    }

    fn await_call(
        &self,
        rank: usize,
        introduction: Introduction,
        membership: &Membership,
        ticket: &Ticket,
    ) -> Result<TcpStream> {
        let mut connections = self.arrived.connections.lock().unwrap_or_else(PoisonError::into_inner);
        let mut seen_leaving = None;
        loop {
            if let Some(connection) = connections.remove(&introduction) {
                return Ok(connection);
            }
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

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.arrived.closed.store(true, std::sync::atomic::Ordering::SeqCst);
        // Wakes the accepting thread, so that the port is given back.
        let _ = TcpStream::connect_timeout(&self.own_address, Duration::from_secs(1));
    }
}

fn configure(connection: &TcpStream) -> std::io::Result<()> {
    connection.set_nodelay(true)?;
    connection.set_read_timeout(None)?;
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

fn accept(listener: &TcpListener, job: u64, arrived: &Arc<Arrived>) {
    for stream in listener.incoming() {
        if arrived.closed.load(std::sync::atomic::Ordering::SeqCst) {
            return;
        }
        let Ok(mut stream) = stream else { continue };
        let arrived = Arc::clone(arrived);
        let introduce = move || {
            let limit = stream.set_read_timeout(Some(INTRODUCTION_LIMIT));
            match limit.and_then(|()| Introduction::read(&mut stream)) {
                Ok(Some(introduction)) if introduction.job == job => {
                    let mut connections = arrived.connections.lock().unwrap_or_else(PoisonError::into_inner);
                    connections.insert(introduction, stream);
                    arrived.changed.notify_all();
                }
                _ => tracing::warn!(
                    "turned away a connection that is not of this job: {:?}",
                    stream.peer_addr()
                ),
            }
        };
        // When no thread can be had, the connection drops and its rank tries again.
        let _ = std::thread::Builder::new().name("comm-introduce".into()).spawn(introduce);
    }
}
