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
use crate::dtype::{DType, Element, ReduceOp};
use crate::error::{Error, Result};
use crate::lane::{Lane, Work};
use crate::logger::Ended;
use crate::op::{Collective, Fingerprint, Kind, Part, invalid};
use crate::region::Region;
use crate::segment::Registered;
use crate::world::WorldInner;

mod asynchronous;
mod blocking;

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

impl Collective {
    /// Lists longer than a backend takes at once run as several operations.
    fn split(&self, max_parts: usize) -> Vec<Collective> {
        if self.parts.len() <= max_parts {
            return vec![self.clone()];
        }
        let piece = |parts: &[Part]| Collective { parts: parts.to_vec(), ..self.clone() };
        self.parts.chunks(max_parts).map(piece).collect()
    }
}

/// Builds the checked description of each collective from its buffers.
struct Call {
    size: usize,
    me: usize,
    dtype: DType,
    call_site: &'static Location<'static>,
}

impl Call {
    fn new(group: &Group, dtype: DType, call_site: &'static Location<'static>) -> Self {
        Call { size: group.size(), me: group.rank(), dtype, call_site }
    }

    fn operation(
        &self,
        kind: Kind,
        reduce: Option<ReduceOp>,
        root: Option<usize>,
        parts: impl IntoIterator<Item = Part>,
    ) -> Collective {
        let parts = parts.into_iter().collect();
        Collective { kind, dtype: self.dtype, reduce, root, parts, identity: 0, call_site: self.call_site }
    }

    /// Cuts `bytes` into one equal part per rank.
    fn equal_cuts(&self, kind: Kind, what: &str, bytes: usize) -> Result<Vec<usize>> {
        let unit = self.size * self.dtype.size();
        if !bytes.is_multiple_of(unit) {
            let elements = bytes / self.dtype.size();
            let problem =
                format!("the {what}'s {elements} elements do not divide into {} equal parts", self.size);
            return Err(invalid(kind, self.call_site, problem));
        }
        Ok(vec![bytes / self.size; self.size])
    }

    /// Counts in elements, one per rank, as bytes.
    fn given_cuts(&self, kind: Kind, what: &str, counts: &[usize]) -> Result<Vec<usize>> {
        if counts.len() != self.size {
            let problem = format!("{} {what} for a group of {} ranks", counts.len(), self.size);
            return Err(invalid(kind, self.call_site, problem));
        }
        Ok(counts.iter().map(|count| count * self.dtype.size()).collect())
    }

    fn expect_bytes(&self, kind: Kind, what: &str, region: &Region, bytes: usize) -> Result<()> {
        if region.len() == bytes {
            return Ok(());
        }
        let unit = self.dtype.size();
        let problem =
            format!("the {what} holds {} elements, but {} are needed", region.len() / unit, bytes / unit);
        Err(invalid(kind, self.call_site, problem))
    }

    fn in_place(region: &Region) -> Part {
        Part {
            input: region.clone(),
            output: region.clone(),
            input_cuts: Vec::new(),
            output_cuts: Vec::new(),
        }
    }

    fn reduce_scatter(&self, op: ReduceOp, pairs: &[(Region, Region)]) -> Result<Collective> {
        let kind = Kind::ReduceScatter;
        let part = |(input, output): &(Region, Region)| {
            let input_cuts = self.equal_cuts(kind, "input", input.len())?;
            self.expect_bytes(kind, "output", output, input_cuts[self.me])?;
            Ok(Part { input: input.clone(), output: output.clone(), input_cuts, output_cuts: Vec::new() })
        };
        let parts: Result<Vec<Part>> = pairs.iter().map(part).collect();
        Ok(self.operation(kind, Some(op), None, parts?))
    }

    fn reduce_scatter_unequal(
        &self,
        op: ReduceOp,
        input: Region,
        output: Region,
        counts: &[usize],
    ) -> Result<Collective> {
        let kind = Kind::ReduceScatter;
        let input_cuts = self.given_cuts(kind, "counts", counts)?;
        self.expect_bytes(kind, "output", &output, input_cuts[self.me])?;
        Ok(self.operation(
            kind,
            Some(op),
            None,
            [Part { input, output, input_cuts, output_cuts: Vec::new() }],
        ))
    }

    fn all_gather(&self, pairs: &[(Region, Region)]) -> Result<Collective> {
        let kind = Kind::AllGather;
        let part = |(input, output): &(Region, Region)| {
            let output_cuts = self.equal_cuts(kind, "output", output.len())?;
            self.expect_bytes(kind, "input", input, output_cuts[self.me])?;
            Ok(Part { input: input.clone(), output: output.clone(), input_cuts: Vec::new(), output_cuts })
        };
        let parts: Result<Vec<Part>> = pairs.iter().map(part).collect();
        Ok(self.operation(kind, None, None, parts?))
    }

    fn all_gather_unequal(&self, input: Region, output: Region, counts: &[usize]) -> Result<Collective> {
        let kind = Kind::AllGather;
        let output_cuts = self.given_cuts(kind, "counts", counts)?;
        self.expect_bytes(kind, "input", &input, output_cuts[self.me])?;
        Ok(self.operation(kind, None, None, [Part { input, output, input_cuts: Vec::new(), output_cuts }]))
    }

    /// `input` matters on the root only.
    fn scatter(&self, input: Option<Region>, output: Region, root: usize) -> Result<Collective> {
        let kind = Kind::Scatter;
        let (input, input_cuts) = match input {
            Some(input) if self.me == root => {
                self.expect_bytes(kind, "root's input", &input, output.len() * self.size)?;
                (input, vec![output.len(); self.size])
            }
            None if self.me == root => {
                return Err(invalid(kind, self.call_site, "the root gives no input"));
            }
            _ => (output.slice(0..0), Vec::new()),
        };
        Ok(self.operation(
            kind,
            None,
            Some(root),
            [Part { input, output, input_cuts, output_cuts: Vec::new() }],
        ))
    }

    /// `output` matters on the root only.
    fn gather(&self, input: Region, output: Option<Region>, root: usize) -> Result<Collective> {
        let kind = Kind::Gather;
        let (output, output_cuts) = match output {
            Some(output) if self.me == root => {
                self.expect_bytes(kind, "root's output", &output, input.len() * self.size)?;
                (output, vec![input.len(); self.size])
            }
            None if self.me == root => {
                return Err(invalid(kind, self.call_site, "the root gives no output"));
            }
            _ => (input.slice(0..0), Vec::new()),
        };
        Ok(self.operation(
            kind,
            None,
            Some(root),
            [Part { input, output, input_cuts: Vec::new(), output_cuts }],
        ))
    }

    fn all_to_all(&self, input: Region, output: Region) -> Result<Collective> {
        let kind = Kind::AllToAll;
        self.expect_bytes(kind, "output", &output, input.len())?;
        let cuts = self.equal_cuts(kind, "input", input.len())?;
        Ok(self.operation(
            kind,
            None,
            None,
            [Part { input, output, input_cuts: cuts.clone(), output_cuts: cuts }],
        ))
    }

    fn all_to_all_unequal(
        &self,
        input: Region,
        output: Region,
        send_counts: &[usize],
        recv_counts: &[usize],
    ) -> Result<Collective> {
        let kind = Kind::AllToAll;
        let input_cuts = self.given_cuts(kind, "send counts", send_counts)?;
        let output_cuts = self.given_cuts(kind, "receive counts", recv_counts)?;
        Ok(self.operation(kind, None, None, [Part { input, output, input_cuts, output_cuts }]))
    }

    fn barrier(&self) -> Collective {
        self.operation(Kind::Barrier, None, None, [])
    }
}

/// The bytes of a typed slice as regions for the length of a blocking call.
///
/// # Safety
/// The region must not outlive the borrow.
unsafe fn output_region<T: Element>(values: &mut [T]) -> Region {
    // SAFETY: the caller's contract.
    unsafe { Region::borrowed(bytemuck::cast_slice_mut(values)) }
}

/// # Safety
/// The region must not outlive the borrow, and the operation must only read it.
unsafe fn input_region<T: Element>(values: &[T]) -> Region {
    // SAFETY: the caller's contract.
    unsafe { Region::borrowed_input(bytemuck::cast_slice(values)) }
}
