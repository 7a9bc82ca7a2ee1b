//! The `tcp` backend: sockets between ranks.
//!
//! Each pair of ranks of a group has a connection of its own per stream, made when it is first needed, so nothing has to
//! be sorted out by tag and a slow group holds up no other. An exchange writes and reads all its connections at once,
//! without blocking, and sleeps in `poll` when none of them moves. What arrives other than it was sent is an error
//! ([`traffic`]).

mod endpoint;
mod traffic;

pub(crate) use endpoint::Endpoint;

use std::collections::HashMap;
use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::backend::message::{Incoming, Link, Outgoing, Stream};
use crate::backend::{Membership, Ticket};
use crate::error::{Error, Loss, Result};
use crate::sealed::Connection;
use crate::store::HEALTH_CHECK_INTERVAL;
use traffic::Traffic;

/// How long to wait for the job's own word on why a connection broke.
const VERDICT_LIMIT: Duration = Duration::from_secs(4);
/// Polls without sleeping before the first sleep.
const EAGER_POLLS: u32 = 50;

/// The connections of one group.
pub(crate) struct TcpLink {
    endpoint: Arc<Endpoint>,
    connections: Mutex<HashMap<(Stream, usize), Arc<Connection>>>,
}

impl TcpLink {
    pub(crate) fn new(endpoint: Arc<Endpoint>) -> Self {
        TcpLink { endpoint, connections: Mutex::default() }
    }

    fn connection(
        &self,
        stream: Stream,
        peer: usize,
        membership: &Membership,
        ticket: &Ticket,
    ) -> Result<Arc<Connection>> {
        let known =
            self.connections.lock().unwrap_or_else(PoisonError::into_inner).get(&(stream, peer)).cloned();
        if let Some(known) = known {
            return Ok(known);
        }
        let made = self.endpoint.connect(stream, peer, membership, ticket)?;
        self.connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert((stream, peer), Arc::clone(&made));
        Ok(made)
    }
}

impl Link for TcpLink {
    fn name(&self) -> &'static str {
        "tcp"
    }

    unsafe fn exchange(
        &self,
        stream: Stream,
        outgoing: &[Outgoing],
        incoming: &[Incoming],
        membership: &Membership,
        ticket: &Ticket,
    ) -> Result<()> {
        let mut traffic: Vec<Traffic> = Vec::new();
        let peers = outgoing.iter().map(|item| item.peer).chain(incoming.iter().map(|item| item.peer));
        for peer in peers {
            if traffic.iter().all(|known| known.peer != peer) {
                let connection = self.connection(stream, peer, membership, ticket)?;
                let place = (peer, membership.is_far[peer]);
                traffic.push(Traffic::new(place, connection, outgoing, incoming));
            }
        }
        let mut idle_polls = 0;
        let mut next_check = Instant::now() + HEALTH_CHECK_INTERVAL;
        while !traffic.is_empty() {
            let mut moved = false;
            for connection in &mut traffic {
                // SAFETY: the caller's contract.
                match unsafe { connection.advance() } {
                    Ok(progress) => moved |= progress,
                    Err(error) => return Err(broken(connection.peer, error, membership, ticket)),
                }
            }
            traffic.retain(|connection| !connection.is_done());
            idle_polls = if moved { 0 } else { idle_polls + 1 };
            if idle_polls > EAGER_POLLS {
                wait_for_movement(&traffic);
            }
            let now = Instant::now();
            if now >= next_check {
                membership.state.check(membership.group_id)?;
                next_check = now + HEALTH_CHECK_INTERVAL;
            }
            if now >= ticket.deadline && !traffic.is_empty() {
                let missing = traffic.iter().map(|connection| {
                    let rank = membership.ranks[connection.peer];
                    let (name, last) = (membership.state.name(rank), membership.state.last_operation(rank));
                    format!("{name} (its last operation: {last})")
                });
                return Err(ticket.deadline_error(missing.collect()));
            }
        }
        Ok(())
    }
}

fn wait_for_movement(traffic: &[Traffic]) {
    let mut watched: Vec<libc::pollfd> = traffic
        .iter()
        .map(|connection| {
            let writes = if connection.sends() { libc::POLLOUT } else { 0 };
            let reads = if connection.receives() { libc::POLLIN } else { 0 };
            libc::pollfd {
                fd: connection.connection.stream().as_raw_fd(),
                events: writes | reads,
                revents: 0,
            }
        })
        .collect();
    // SAFETY: the array is valid for the call; descriptors stay open through `traffic`.
    unsafe {
        libc::poll(
            watched.as_mut_ptr(),
            watched.len() as libc::nfds_t,
            HEALTH_CHECK_INTERVAL.as_millis() as i32,
        );
    }
}

/// A connection broke: the job usually knows why a moment later, and says it better.
fn broken(peer: usize, error: std::io::Error, membership: &Membership, ticket: &Ticket) -> Error {
    let rank = membership.ranks[peer];
    if error.kind() == ErrorKind::InvalidData {
        return membership.announce_damage(rank, ticket.describe());
    }
    let limit = Instant::now() + VERDICT_LIMIT;
    while Instant::now() < limit {
        if let Err(verdict) = membership.state.check_with(membership.group_id, rank) {
            return verdict;
        }
        std::thread::sleep(HEALTH_CHECK_INTERVAL);
    }
    let last_operation = format!("{} (its connection: {error})", membership.state.last_operation(rank));
    Error::lost(rank, membership.state.place(rank), Loss::Died, last_operation)
}

#[cfg(test)]
mod tests;
