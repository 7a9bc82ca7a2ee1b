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
use crate::rendezvous::SILENCE_LIMIT;
use crate::state::JobState;
use crate::store::HEALTH_CHECK_INTERVAL;

/// MPI counts in `int`; longer transfers are cut.
const MAX_MESSAGE_BYTES: usize = 1 << 30;
/// More than the longest message of any library.
const MAX_ERROR_BYTES: usize = 2048;
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
        // A failed call says so, and this rank goes on long enough to say which rank was lost.
        // SAFETY: two constants of the library, which is initialised.
        let code = unsafe { ffi::MPI_Comm_set_errhandler(ffi::RSMPI_COMM_WORLD, ffi::RSMPI_ERRORS_RETURN) };
        if code != 0 {
            return Err(refuse(format!("MPI_Comm_set_errhandler failed: {}", describe(code))));
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

/// A call of the library that failed.
#[derive(Debug)]
struct Refusal {
    call: &'static str,
    code: i32,
}

/// The transfers of one exchange.
#[derive(Default)]
struct Transfers {
    requests: Vec<(ffi::MPI_Request, usize)>,
}

impl Transfers {
    /// Starts everything listed.
    ///
    /// # Safety
    /// The ranges live until every transfer is done or cancelled.
    unsafe fn start(
        &mut self,
        outgoing: &[Outgoing],
        incoming: &[Incoming],
        membership: &Membership,
        tag: i32,
    ) -> std::result::Result<(), Refusal> {
        let pieces = |bytes: usize| {
            (0..bytes).step_by(MAX_MESSAGE_BYTES).map(move |at| (at, MAX_MESSAGE_BYTES.min(bytes - at)))
        };
        let (byte, world) =
            // SAFETY: constants of the library.
            unsafe { (ffi::RSMPI_UINT8_T, ffi::RSMPI_COMM_WORLD) };
        for item in incoming {
            for (at, bytes) in pieces(item.bytes) {
                let peer = membership.ranks[item.peer] as i32;
                // SAFETY: the caller's contract; a piece lies inside its range.
                let (code, request) = unsafe {
                    let mut request = ffi::RSMPI_REQUEST_NULL;
                    let to = item.start.add(at).cast();
                    (ffi::MPI_Irecv(to, bytes as i32, byte, peer, tag, world, &mut request), request)
                };
                check("MPI_Irecv", code)?;
                self.requests.push((request, item.peer));
            }
        }
        for item in outgoing {
            for (at, bytes) in pieces(item.bytes) {
                let peer = membership.ranks[item.peer] as i32;
                // SAFETY: as above.
                let (code, request) = unsafe {
                    let mut request = ffi::RSMPI_REQUEST_NULL;
                    let from = item.start.add(at).cast();
                    (ffi::MPI_Isend(from, bytes as i32, byte, peer, tag, world, &mut request), request)
                };
                check("MPI_Isend", code)?;
                self.requests.push((request, item.peer));
            }
        }
        Ok(())
    }

    /// Whether all are done.
    fn test(&mut self) -> std::result::Result<bool, Refusal> {
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

fn check(call: &'static str, code: i32) -> std::result::Result<(), Refusal> {
    if code == 0 { Ok(()) } else { Err(Refusal { call, code }) }
}

/// What the library says to an error of its own.
fn describe(code: i32) -> String {
    let mut text = [0u8; MAX_ERROR_BYTES];
    let mut bytes = 0;
    // SAFETY: the text has more room than any library asks for.
    let known = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut bytes) } == 0;
    let text = String::from_utf8_lossy(&text[..(bytes.max(0) as usize).min(MAX_ERROR_BYTES)]);
    if known { text.into_owned() } else { format!("code {code}") }
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
        let mut transfers = Transfers::default();
        // SAFETY: the ranges live through the call by the caller's contract, and the call ends only when every transfer
        // is done or cancelled.
        if let Err(refusal) = unsafe { transfers.start(outgoing, incoming, membership, tag) } {
            transfers.cancel();
            return Err(self.failure(&refusal, membership));
        }
        self.complete(transfers, membership, ticket)
    }
}

impl MpiLink {
    /// Why a call failed: a rank was lost, if the job notices one in a moment, or else what the library says.
    fn failure(&self, refusal: &Refusal, membership: &Membership) -> Error {
        let limit = Instant::now() + SILENCE_LIMIT;
        loop {
            if let Err(failure) = membership.state.check(membership.group_id) {
                return failure;
            }
            if Instant::now() >= limit {
                let problem = format!("{} failed: {}", refusal.call, describe(refusal.code));
                return Error::Backend { backend: "mpi", problem };
            }
            std::thread::sleep(HEALTH_CHECK_INTERVAL);
        }
    }

    fn complete(&self, mut transfers: Transfers, membership: &Membership, ticket: &Ticket) -> Result<()> {
        let mut tests = 0u32;
        let mut next_check = Instant::now() + HEALTH_CHECK_INTERVAL;
        loop {
            match transfers.test() {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(refusal) => {
                    transfers.cancel();
                    return Err(self.failure(&refusal, membership));
                }
            }
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
                        let (name, last) =
                            (membership.state.name(rank), membership.state.last_operation(rank));
                        format!("{name} (its last operation: {last})")
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
    }
}
