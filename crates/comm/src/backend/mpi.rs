//! The `mpi` backend (cargo feature `mpi`): the collectives of [`message`](crate::backend::message) over MPI messages.
//!
//! MPI moves the bytes, over whatever fabric the cluster has; the algorithms are ours, because MPI's own reductions
//! promise no order, know no bf16 and wait without a deadline. Every wait polls, so a lost rank ends it. The library is
//! initialised for several threads, one per lane of a group.

use std::sync::Arc;
use std::time::{Duration, Instant};

use mpi::Threading;
use mpi::environment::Universe;
use mpi::ffi;
use mpi::topology::Communicator;

use crate::backend::message::{Incoming, Link, Outgoing, Stream};
use crate::backend::{Membership, Ticket};
use crate::error::{Error, Result};
use crate::state::JobState;
use crate::store::HEALTH_CHECK_INTERVAL;

/// MPI counts in `int`; longer transfers are cut.
const MAX_MESSAGE_BYTES: usize = 1 << 30;
/// Tests without a pause before the first pause.
const EAGER_TESTS: u32 = 2000;
const PAUSE: Duration = Duration::from_micros(50);

/// The initialised library; finalised when the last group is gone and the job went well.
pub(crate) struct Session {
    universe: Option<Universe>,
    state: Arc<JobState>,
}

// SAFETY: the library was initialised with MPI_THREAD_MULTIPLE, so any thread may call it.
unsafe impl Send for Session {}
// SAFETY: as above.
unsafe impl Sync for Session {}

impl Session {
    /// Initialises MPI, and checks that it numbers the ranks as the job does.
    pub(crate) fn open(rank: usize, size: usize, state: Arc<JobState>) -> Result<Arc<Session>> {
        let refuse = |problem: String| Error::Backend { backend: "mpi", problem };
        let (universe, threading) = mpi::initialize_with_threading(Threading::Multiple).ok_or_else(|| {
            refuse("the library is already initialised; a process can join one MPI job".into())
        })?;
        if threading != Threading::Multiple {
            return Err(refuse(format!(
                "the library offers {threading:?}, but several threads must call it"
            )));
        }
        let world = universe.world();
        if (world.rank() as usize, world.size() as usize) != (rank, size) {
            return Err(refuse(format!(
                "this is rank {} of {} in MPI, but RANK and WORLD_SIZE say {rank} of {size}; start it with mpirun or srun",
                world.rank(),
                world.size()
            )));
        }
        Ok(Arc::new(Session { universe: Some(universe), state }))
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // Finalising waits for all ranks: after a failure that would be for ever, so the process just ends.
        if self.state.check(u64::MAX).is_err() {
            std::mem::forget(self.universe.take());
        }
    }
}

/// One group's messages.
pub(crate) struct MpiLink {
    session: Arc<Session>,
}

impl MpiLink {
    pub(crate) fn new(session: Arc<Session>) -> Self {
        MpiLink { session }
    }
}

/// The transfers of one exchange.
struct Transfers {
    requests: Vec<(ffi::MPI_Request, usize)>,
}

impl Transfers {
    /// Whether all are done.
    fn test(&mut self) -> Result<bool> {
        for (request, _) in &mut self.requests {
            let mut done = 0;
            // SAFETY: a request that `start` made, or the null request that a finished one became.
            let code = unsafe { ffi::MPI_Test(request, &mut done, ffi::RSMPI_STATUS_IGNORE) };
            check("MPI_Test", code)?;
            if done == 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn unfinished_peers(&mut self) -> Vec<usize> {
        let mut peers = Vec::new();
        for (request, peer) in &mut self.requests {
            let mut done = 0;
            // SAFETY: as in `test`.
            let code = unsafe { ffi::MPI_Test(request, &mut done, ffi::RSMPI_STATUS_IGNORE) };
            if (code != 0 || done == 0) && !peers.contains(peer) {
                peers.push(*peer);
            }
        }
        peers
    }

    /// Takes back what has not happened, so that nothing is written into memory that is about to be given up.
    fn cancel(mut self) {
        for (request, _) in &mut self.requests {
            // SAFETY: requests of our own; a finished one is null and is left alone.
            unsafe {
                if *request != ffi::RSMPI_REQUEST_NULL {
                    ffi::MPI_Cancel(request);
                    ffi::MPI_Request_free(request);
                }
            }
        }
    }
}

fn check(call: &str, code: i32) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    Err(Error::Backend { backend: "mpi", problem: format!("{call} failed with code {code}") })
}

impl Link for MpiLink {
    fn name(&self) -> &'static str {
        "mpi"
    }

    unsafe fn exchange(
        &self,
        stream: Stream,
        outgoing: &[Outgoing],
        incoming: &[Incoming],
        membership: &Membership,
        ticket: &Ticket,
    ) -> Result<()> {
        debug_assert!(self.session.universe.is_some());
        let tag = (membership.group_id as i32) * 2 + i32::from(stream != Stream::Collectives);
        let mut transfers = Transfers { requests: Vec::new() };
        let pieces = |bytes: usize| {
            (0..bytes).step_by(MAX_MESSAGE_BYTES).map(move |at| (at, MAX_MESSAGE_BYTES.min(bytes - at)))
        };
        // SAFETY: the ranges live through the call by the caller's contract, and the call ends only when every transfer
        // is done or cancelled.
        unsafe {
            for item in incoming {
                for (at, bytes) in pieces(item.bytes) {
                    let mut request = ffi::RSMPI_REQUEST_NULL;
                    let code = ffi::MPI_Irecv(
                        item.start.add(at).cast(),
                        bytes as i32,
                        ffi::RSMPI_UINT8_T,
                        membership.ranks[item.peer] as i32,
                        tag,
                        ffi::RSMPI_COMM_WORLD,
                        &mut request,
                    );
                    check("MPI_Irecv", code)?;
                    transfers.requests.push((request, item.peer));
                }
            }
            for item in outgoing {
                for (at, bytes) in pieces(item.bytes) {
                    let mut request = ffi::RSMPI_REQUEST_NULL;
                    let code = ffi::MPI_Isend(
                        item.start.add(at).cast(),
                        bytes as i32,
                        ffi::RSMPI_UINT8_T,
                        membership.ranks[item.peer] as i32,
                        tag,
                        ffi::RSMPI_COMM_WORLD,
                        &mut request,
                    );
                    check("MPI_Isend", code)?;
                    transfers.requests.push((request, item.peer));
                }
            }
        }
        self.complete(transfers, membership, ticket)
    }
}

impl MpiLink {
    fn complete(&self, mut transfers: Transfers, membership: &Membership, ticket: &Ticket) -> Result<()> {
        let mut tests = 0u32;
        let mut next_check = Instant::now() + HEALTH_CHECK_INTERVAL;
        while !transfers.test()? {
            tests = tests.saturating_add(1);
            if tests > EAGER_TESTS {
                std::thread::sleep(PAUSE);
            }
            let now = Instant::now();
            if now < next_check {
                continue;
            }
            next_check = now + HEALTH_CHECK_INTERVAL;
            let peers = transfers.unfinished_peers();
            let left = peers
                .iter()
                .map(|peer| membership.ranks[*peer])
                .find(|rank| membership.state.has_left(*rank));
            let failure = match membership.state.check(membership.group_id) {
                Err(failure) => Some(failure),
                Ok(()) if now >= ticket.deadline => {
                    let missing = peers.iter().map(|peer| {
                        let rank = membership.ranks[*peer];
                        format!("rank {rank} (its last operation: {})", membership.state.last_operation(rank))
                    });
                    Some(ticket.deadline_error(missing.collect()))
                }
                Ok(()) => left
                    .filter(|_| !transfers.test().unwrap_or(false))
                    .map(|rank| membership.state.left_error(rank)),
            };
            if let Some(failure) = failure {
                transfers.cancel();
                return Err(failure);
            }
        }
        Ok(())
    }
}
