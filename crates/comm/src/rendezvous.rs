//! How processes become a job.
//!
//! Rank 0 keeps a small hub at `MASTER_ADDR:MASTER_PORT` (`hub`); every rank, rank 0 included, joins it (`member`).
//! Both prove that they know the job's token (`auth`); then the rank presents its number, the world size,
//! the version of its binary and the hash of its configuration. A stranger (wrong token, garbage) is turned away and the
//! job goes on waiting; a member that disagrees about the job ends it for all, with the reason on both sides; missing ranks
//! are named now and then (`absent`), and at the deadline.
//!
//! The connection stays open. It carries the key-value store through which groups are set up, a heartbeat in both
//! directions that notices a stopped rank, and announcements of failures. No bulk data passes through it.

mod absent;
pub(crate) mod frame;
mod hub;
mod meeting;
mod member;
mod options;
mod port;
mod token;

pub use meeting::leave_meetings;
pub use options::{Backend, ConnectOptions};
pub use token::handed_over_token;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::Result;
use crate::state::JobState;
use crate::world::{World, WorldParts};
use hub::Hub;
use meeting::MeetingPoint;
use member::Member;

/// How often each side says that it is alive.
pub(crate) const BEAT_INTERVAL: Duration = Duration::from_millis(500);
/// A side that said nothing for this long is lost: with the interval above, noticed well within 5 seconds.
pub(crate) const SILENCE_LIMIT: Duration = Duration::from_millis(3500);

/// Keys of the store under which the hub itself answers: what a rank did last.
const LAST_OPERATION_KEY: &str = "last-operation/";

/// This process's ranks: those of the launcher that started it, or itself alone where none did.
pub fn init_distributed() -> Result<World> {
    match ConnectOptions::discover()? {
        Some(options) => World::connect(options),
        None => World::try_solo(),
    }
}

impl World {
    /// Joins a job of processes, and returns when all ranks are there.
    ///
    /// ```no_run
    /// use ferrospeed_comm::{ConnectOptions, World};
    /// let world = World::connect(ConnectOptions::from_env()?)?;
    /// world.group().barrier()?;
    /// # Ok::<(), ferrospeed_comm::Error>(())
    /// ```
    pub fn connect(options: ConnectOptions) -> Result<World> {
        options.check()?;
        if options.world_size == 1
            && matches!(options.backend, Backend::Auto | Backend::Local | Backend::Nccl)
        {
            // Nobody to meet: no port is taken, and any number of such jobs may run side by side.
            return World::alone(options.backend, &options.limits);
        }
        let deadline = Instant::now() + options.limits.deadline;
        let state = Arc::new(JobState::new(options.world_size));
        let hub = if options.rank == 0 { Some(Hub::start(&options, deadline)?) } else { None };
        let known = hub.as_ref().map(|hub| MeetingPoint { address: hub.address(), key: hub.key().clone() });
        let joined = Member::join(&options, known, deadline, Arc::clone(&state));
        if let (Err(_), Some(hub)) = (&joined, &hub) {
            hub.let_others_hear();
            hub.stop_listening();
        }
        let member = Arc::new(joined?);
        let leaving = Arc::clone(&member);
        let mut limits = options.limits.clone();
        limits.trace_folder = member.trace_folder().map(Into::into);
        let world = World::assemble(WorldParts {
            rank: options.rank,
            hosts: hosts_of(member.host_identities()),
            backend: options.backend,
            limits,
            key: member.key().clone(),
            state,
            store: Arc::clone(&member) as Arc<dyn crate::store::Store>,
            address: member.local_address(),
            departure: Box::new(move || {
                leaving.leave();
                if let Some(hub) = &hub {
                    hub.see_off(0);
                    hub.stop_listening();
                }
            }),
        })?;
        member.watch(&world);
        Ok(world)
    }
}

/// Ranks by host, hosts in the order of their lowest rank.
fn hosts_of(identities: &[String]) -> Vec<Vec<usize>> {
    let mut hosts: Vec<(&String, Vec<usize>)> = Vec::new();
    for (rank, identity) in identities.iter().enumerate() {
        match hosts.iter_mut().find(|(known, _)| *known == identity) {
            Some((_, ranks)) => ranks.push(rank),
            None => hosts.push((identity, vec![rank])),
        }
    }
    hosts.into_iter().map(|(_, ranks)| ranks).collect()
}

/// What tells this host apart: ranks with the same answer can map each other's memory and reach each other's loopback.
fn host_identity() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = |kind: &str| {
        std::fs::read_link(format!("/proc/self/ns/{kind}"))
            .map(|link| link.display().to_string())
            .unwrap_or_default()
    };
    format!("{} {} {}", boot.trim(), namespace("net"), namespace("pid"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_sorted_into_hosts_by_first_appearance() {
        let identities = ["b", "a", "b", "a", "c"].map(str::to_owned);
        assert_eq!(hosts_of(&identities), [vec![0, 2], vec![1, 3], vec![4]]);
    }
}
