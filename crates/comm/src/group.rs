//! Groups: the ranks that take part in an operation, and the operations themselves.
//!
//! Every operation exists twice: blocking, on typed slices, and asynchronous, on [`Region`]s, returning a [`Work`] to
//! wait on. Ranks, roots and peers are numbered *in the group*. Operations of one group run in the order in which they
//! were called, which must be the same on every rank; different groups do not wait for each other.

use std::collections::HashMap;
use std::panic::Location;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::backend::{Carrier, Membership, Message, Ticket};
use crate::error::{Error, Result};
use crate::lane::{Lane, Work};
use crate::logger::Ended;
use crate::op::{Collective, Fingerprint, Kind, invalid};
use crate::region::Region;
use crate::segment::Registered;
use crate::world::WorldInner;

mod asynchronous;
mod blocking;
mod call;

use call::{Call, input_region, output_region};

/// A group of ranks. Clones are the same group.
#[derive(Clone)]
pub struct Group {
    inner: Arc<GroupInner>,
}

struct GroupInner {
    world: Arc<WorldInner>,
    membership: Membership,
    name: Arc<str>,
    carrier: Arc<dyn Carrier>,
    collectives: Lane,
    messages: Mutex<HashMap<(Kind, usize), Arc<MessageLane>>>,
    next_sequence: AtomicU64,
    next_segment: AtomicU64,
    failure: OnceLock<Error>,
    /// The same ranks over the memory of their GPUs, once somebody asked; `None` where the host carries them.
    on_devices: OnceLock<Option<Group>>,
    connecting: Mutex<()>,
}

struct MessageLane {
    lane: Lane,
    next_sequence: AtomicU64,
}

impl std::fmt::Debug for Group {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Group({}, rank {} of {})", self.name(), self.rank(), self.size())
    }
}

impl Group {
    pub(crate) fn new(world: Arc<WorldInner>, membership: Membership, carrier: Arc<dyn Carrier>) -> Self {
        Group {
            inner: Arc::new(GroupInner {
                world,
                name: membership.group_name.as_str().into(),
                membership,
                carrier,
                collectives: Lane::new(),
                messages: Mutex::default(),
                next_sequence: AtomicU64::new(0),
                next_segment: AtomicU64::new(0),
                failure: OnceLock::new(),
                on_devices: OnceLock::new(),
                connecting: Mutex::new(()),
            }),
        }
    }

    /// This rank's number in the group.
    pub fn rank(&self) -> usize {
        self.inner.membership.me
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.inner.membership.size()
    }

    /// World ranks of the members, in group order.
    pub fn ranks(&self) -> &[usize] {
        &self.inner.membership.ranks
    }

    /// The group's name in messages and reports.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// The name of the backend that carries this group.
    pub fn backend(&self) -> &'static str {
        self.inner.carrier.name()
    }

    /// The same ranks over the memory of their GPUs, once [`World::attach_device`](crate::World::attach_device) has
    /// found that they can: its regions are addresses on the rank's own GPU.
    ///
    /// The first call connects them, so all ranks of the group must make it.
    pub fn on_devices(&self) -> Result<Option<&Group>> {
        let _one_at_a_time = self.inner.connecting.lock().unwrap_or_else(PoisonError::into_inner);
        if self.inner.on_devices.get().is_none() {
            let group = self.inner.world.connect_devices(&self.inner.membership)?;
            let _ = self.inner.on_devices.set(group);
        }
        Ok(self.inner.on_devices.get().and_then(Option::as_ref))
    }

    pub(crate) fn carrier(&self) -> Arc<dyn Carrier> {
        Arc::clone(&self.inner.carrier)
    }

    pub(crate) fn membership(&self) -> Membership {
        self.inner.membership.clone()
    }

    /// The number in this group of a world rank.
    pub fn rank_of(&self, world_rank: usize) -> Option<usize> {
        self.ranks().iter().position(|rank| *rank == world_rank)
    }

    /// Whether all its ranks are on this rank's host.
    pub fn is_on_one_host(&self) -> bool {
        let host = self.inner.world.my_host();
        self.ranks().iter().all(|rank| host.contains(rank))
    }

    /// Allocates `bytes` of zeroed memory that the group's other ranks on this host map too.
    ///
    /// Collective over the group, in the same order on all its ranks; the sizes may differ. An operation of another group
    /// reads and writes it in place where all *its* ranks are among those that map it, and through copies elsewhere.
    pub fn allocate(&self, bytes: usize) -> Result<Registered> {
        self.inner.world.allocate(self, bytes)
    }

    /// Allocates `bytes` of zeroed memory that exists once on this host: every rank of the group maps the same pages.
    ///
    /// It is the output of an all_gather among ranks that want to read the same thing: a part that its owner writes in
    /// its place is there for all, so nothing is copied, and a host holds one copy instead of one per rank.
    ///
    /// - A rank writes nothing but its own part, and only when no rank still reads what was there: after a barrier, or
    ///   any other collective that all of them entered when they had finished reading.
    /// - A rank reads the others' parts after an all_gather into this memory, until the next barrier or collective
    ///   through which it tells that it has finished.
    /// - Every rank names the same place as the output. Reductions, scatter, gather and all_to_all are refused: each of
    ///   them would write a result of one rank where another keeps its own.
    ///
    /// Collective over the group, in the same order as [`Group::allocate`] and with the same size on all.
    pub fn allocate_shared(&self, bytes: usize) -> Result<Registered> {
        self.inner.world.allocate_shared(self, bytes)
    }

    /// A number for the group's next segment, the same on all its ranks and no other group's.
    pub(crate) fn next_segment(&self) -> u64 {
        let number = self.inner.next_segment.fetch_add(1, Ordering::Relaxed);
        self.inner.membership.group_id << 32 | number
    }

    fn check(&self, operation: &Collective) -> Result<()> {
        operation.check(self.size())?;
        self.inner.world.check_shared(operation)
    }

    fn run(&self, operation: Collective) -> Result<()> {
        self.check(&operation)?;
        self.inner.collectives.run(|| self.inner.execute(&operation, self.inner.world.limits.deadline))
    }

    fn start(&self, operation: Result<Collective>) -> Work {
        self.start_after(|| Ok(()), operation)
    }

    /// Starts an operation which runs once `before` has, whose place among the group's operations is taken now.
    fn start_after(
        &self,
        before: impl FnOnce() -> Result<()> + Send + 'static,
        operation: Result<Collective>,
    ) -> Work {
        let operation = match operation.and_then(|operation| self.check(&operation).map(|()| operation)) {
            Ok(operation) => operation,
            Err(error) => return Work::finished(Err(error)),
        };
        let inner = Arc::clone(&self.inner);
        self.inner.collectives.start(move || {
            before()?;
            let limit = inner.world.limits.deadline;
            inner.execute(&operation, limit)
        })
    }

    fn message_lane(&self, message: &Message) -> Arc<MessageLane> {
        let mut lanes = self.inner.messages.lock().unwrap_or_else(PoisonError::into_inner);
        let lane = lanes.entry((message.kind, message.peer));
        let make = || Arc::new(MessageLane { lane: Lane::new(), next_sequence: AtomicU64::new(0) });
        Arc::clone(lane.or_insert_with(make))
    }

    fn check_message(&self, message: &Message, call_site: &Location<'_>) -> Result<()> {
        let refuse = |problem: String| Err(invalid(message.kind, call_site, problem));
        if message.peer >= self.size() {
            return refuse(format!("rank {} is not in a group of {}", message.peer, self.size()));
        }
        if message.peer == self.rank() {
            return refuse("a rank cannot exchange messages with itself".into());
        }
        if !message.region.len().is_multiple_of(message.dtype.size()) {
            return refuse(format!(
                "{} bytes are not a whole number of {} elements",
                message.region.len(),
                message.dtype
            ));
        }
        Ok(())
    }

    fn run_message(&self, message: Message, call_site: &'static Location<'static>) -> Result<()> {
        self.check_message(&message, call_site)?;
        let lane = self.message_lane(&message);
        lane.lane.run(|| self.inner.execute_message(&message, &lane.next_sequence, call_site))
    }

    fn start_message(&self, message: Message, call_site: &'static Location<'static>) -> Work {
        if let Err(error) = self.check_message(&message, call_site) {
            return Work::finished(Err(error));
        }
        let lane = self.message_lane(&message);
        let (inner, counter) = (Arc::clone(&self.inner), Arc::clone(&lane));
        lane.lane.start(move || inner.execute_message(&message, &counter.next_sequence, call_site))
    }
}

impl GroupInner {
    /// Runs one collective with its number; called in order, by one thread at a time.
    fn execute(&self, operation: &Collective, limit: Duration) -> Result<()> {
        self.check_usable()?;
        self.await_inputs(operation.parts.iter().map(|part| &part.input))?;
        for piece in operation.split(self.carrier.max_parts()) {
            let sequence = self.next_sequence.fetch_add(1, Ordering::Relaxed);
            let started = Instant::now();
            let ticket = Ticket {
                fingerprint: piece.fingerprint(self.membership.group_id, sequence),
                call_site: piece.call_site,
                started,
                deadline: started + limit,
                crossed_bytes: Arc::default(),
            };
            self.observed(&ticket, None, piece.message_bytes(), || self.carrier.run(&piece, &ticket))?;
        }
        Ok(())
    }

    fn execute_message(
        &self,
        message: &Message,
        next_sequence: &AtomicU64,
        call_site: &'static Location<'static>,
    ) -> Result<()> {
        self.check_usable()?;
        self.await_inputs([&message.region])?;
        let started = Instant::now();
        let fingerprint = Fingerprint {
            group: self.membership.group_id,
            sequence: next_sequence.fetch_add(1, Ordering::Relaxed),
            kind: message.kind,
            dtype: message.dtype,
            reduce: None,
            root: None,
            part_count: 1,
            count: (message.region.len() / message.dtype.size()) as u64,
            shape: message.tag,
            shared_output: None,
        };
        let ticket = Ticket {
            fingerprint,
            call_site,
            started,
            deadline: started + self.world.limits.deadline,
            crossed_bytes: Arc::default(),
        };
        let peer = self.membership.ranks[message.peer];
        self.observed(&ticket, Some(peer), message.region.len(), || match message.kind {
            Kind::Send => self.carrier.send(message, &ticket),
            _ => self.carrier.recv(message, &ticket),
        })
    }

    /// What a device has yet to write is there before the operation begins; where it fails, so does the group, so that nothing
    /// wrong is sent.
    fn await_inputs<'a>(&self, inputs: impl IntoIterator<Item = &'a Region>) -> Result<()> {
        let arrived = inputs.into_iter().try_for_each(Region::await_arrival);
        if let Err(error) = &arrived {
            let _ = self.failure.set(error.clone());
        }
        arrived
    }

    fn check_usable(&self) -> Result<()> {
        self.membership.state.check(self.membership.group_id)?;
        match self.failure.get() {
            Some(first) => Err(Error::GroupFailed {
                group: self.membership.group_name.clone(),
                first: Box::new(first.clone()),
            }),
            None => Ok(()),
        }
    }

    /// Runs with the flight recorder and the logger on; a failure ends the group and dumps the recorder.
    fn observed(
        &self,
        ticket: &Ticket,
        peer: Option<usize>,
        message_bytes: usize,
        run: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let recorder = &self.world.recorder;
        let number = recorder.begin(ticket, &self.name, &self.membership.ranks, peer);
        let result = run();
        recorder.end(number, &result);
        self.world.log.add(&Ended {
            kind: ticket.fingerprint.kind,
            bytes: message_bytes,
            crossed_bytes: ticket.crossed_bytes.load(Ordering::Relaxed),
            group_size: self.membership.size(),
            started: ticket.started,
            call_site: ticket.call_site,
            rank: self.world.rank,
        });
        if let Err(error) = &result
            && self.failure.set(error.clone()).is_ok()
        {
            self.world.dump_trace(error);
        }
        result
    }
}
