//! Collectives in place: ranks read (and, for reductions, write) each other's memory directly.
//!
//! Cost of an all_reduce of *N* bytes over *n* ranks: each rank folds one *n*-th of the elements straight from the *n*
//! buffers and writes the result to all of them while the lines are in its cache: *N* bytes read and *N* written per
//! rank, no intermediate copy, two steps. Everything else is a *pull*: each rank copies (or folds) the pieces that are
//! meant for it out of the buffers of the others. Where a reduce_scatter's pieces are so unequal that some ranks would wait
//! for others to fold, and its results are registered too, all fold a like share and write it to whom it is meant for.
//!
//! What a rank has read or written of its peers' memory would count as its own resident memory from then on, so large
//! reductions forget the pages behind them, where these are huge and cost little to find again.

use super::LocalCarrier;
use super::layout::{MAX_PARTS, Posted, PostedRange};
use super::staged::pieces_of;
use crate::backend::Ticket;
use crate::copy::copy;
use crate::error::{Error, Result};
use crate::op::{Collective, Kind, Part};
use crate::reduce::{STREAM_FROM_BYTES, fold};
use crate::sys::{HUGE_PAGE, forget_view};

/// Operations whose data all fit here are done in one step.
const SMALL_BYTES: usize = 16 << 10;
/// Pieces are uneven when the longest is longer than the average by more than one part in so many.
const UNEVEN_FROM: usize = 8;
/// Large folds forget the peers' pages after each so many bytes. A fold sees from its length whether its result should go past
/// the cache.
const WINDOW_BYTES: usize = STREAM_FROM_BYTES;
/// Ranks fold slices of whole cache lines, so that no two of them write to the same line.
const LINE_BYTES: usize = 64;

/// A piece of a peer's buffer that this rank needs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pull {
    /// The peer, numbered in the group.
    pub(super) source: usize,
    /// Which of the peer's pieces it is.
    pub(super) piece: usize,
    /// Where the piece begins in the peer's buffer.
    pub(super) source_offset: usize,
    /// Where it goes in this rank's output.
    pub(super) output_offset: usize,
    pub(super) bytes: usize,
}

impl LocalCarrier {
    pub(super) fn run_collective(&self, operation: &Collective, ticket: &Ticket) -> Result<()> {
        if let Some(ticket) = self.shared_ticket(operation, ticket) {
            return self.gather_shared(operation, &ticket);
        }
        let sequence = ticket.fingerprint.sequence;
        let small = self
            .small_bytes(operation)
            .is_some_and(|bytes| bytes <= SMALL_BYTES.min(self.layout.half_bytes()));
        let ranges: Vec<PostedRange> = if small {
            let mut offset = 0;
            for part in operation.parts.iter().filter(|_| self.shares(operation, self.membership.me)) {
                // SAFETY: the input is readable by the contract of regions; this half of our staging area is ours to
                // write (see the module `local` on parity), and the sum of the inputs fits it.
                unsafe {
                    copy(
                        part.input.as_ptr(),
                        self.layout.staging(self.membership.me, sequence).add(offset),
                        part.input.len(),
                    )
                };
                offset += part.input.len();
            }
            Vec::new()
        } else {
            let inputs = operation.parts.iter().map(|part| &part.input);
            let outputs = operation.parts.iter().map(|part| &part.output).filter(|_| is_uneven(operation));
            inputs.chain(outputs).map(|region| self.segments.locate(region, &self.membership.ranks)).collect()
        };
        if operation.kind == Kind::AllToAll {
            self.post_cuts(&operation.parts[0], sequence);
        }
        self.enter(ticket, &ranges)?;
        if operation.kind == Kind::AllToAll {
            self.check_cuts(ticket)?;
        }

        if small {
            let bases: Vec<*mut u8> =
                (0..self.membership.size()).map(|rank| self.layout.staging(rank, sequence)).collect();
            let mut offset = 0;
            for part in &operation.parts {
                let bases: Vec<*mut u8> = bases.iter().map(|base| base.wrapping_add(offset)).collect();
                self.consume_small(operation, part, &bases, sequence);
                offset += part.input.len();
            }
            return Ok(());
        }
        match self.direct_bases(operation, ticket)? {
            Some(bases) => {
                let outputs = self.outputs_in_reach(operation, ticket);
                for (index, (part, bases)) in operation.parts.iter().zip(&bases).enumerate() {
                    match outputs.get(index) {
                        Some(outputs) => self.fold_like_shares(operation, part, bases, outputs),
                        None => self.run_in_place(operation, part, bases, sequence),
                    }
                }
                self.step(ticket)
            }
            None => operation.parts.iter().try_for_each(|part| self.run_staged(operation, part, ticket)),
        }
    }

    /// Whether the operation reads the input of `rank`.
    pub(super) fn shares(&self, operation: &Collective, rank: usize) -> bool {
        match operation.kind {
            Kind::Broadcast | Kind::Scatter => operation.root == Some(rank),
            _ => true,
        }
    }

    /// The bytes that a rank contributes at most, where all ranks know it before they meet.
    fn small_bytes(&self, operation: &Collective) -> Option<usize> {
        let size = self.membership.size();
        let of_part = |part: &Part| match operation.kind {
            Kind::AllGather => part.output_cuts.iter().copied().max(),
            Kind::Scatter => part.output.len().checked_mul(size),
            // The ranks' totals may differ, and nobody knows the others' before they meet.
            Kind::AllToAll => None,
            _ => Some(part.input.len()),
        };
        operation.parts.iter().map(of_part).try_fold(0usize, |sum, bytes| sum.checked_add(bytes?))
    }

    /// Every rank's address of every part (`[part][rank]`), when all of them are registered.
    fn direct_bases(&self, operation: &Collective, ticket: &Ticket) -> Result<Option<Vec<Vec<*mut u8>>>> {
        let size = self.membership.size();
        let mut bases = vec![vec![std::ptr::null_mut(); size]; operation.parts.len()];
        for rank in (0..size).filter(|rank| self.shares(operation, *rank)) {
            let posted = self.layout.posted(rank, ticket.fingerprint.sequence);
            let ranges = posted.map(|posted| posted.ranges).unwrap_or_default();
            let inputs = ranges.get(..operation.parts.len()).unwrap_or_default();
            if inputs.len() != operation.parts.len() || inputs.iter().any(Option::is_none) {
                return Ok(None);
            }
            for (index, range) in inputs.iter().copied().flatten().enumerate() {
                let bytes =
                    self.shared_bytes(operation, &operation.parts[index], rank, ticket.fingerprint.sequence);
                let world_rank = self.membership.ranks[rank];
                bases[index][rank] = self.segments.resolve(world_rank, range, bytes).ok_or_else(|| {
                    let problem =
                        format!("rank {world_rank} names memory ({range:?}) that is not mapped here");
                    Error::Backend { backend: "local", problem }
                })?;
            }
        }
        Ok(Some(bases))
    }

    /// Every rank's address of every result (`[part][rank]`) of a reduce_scatter whose pieces are unequal; empty unless all
    /// of them are registered.
    fn outputs_in_reach(&self, operation: &Collective, ticket: &Ticket) -> Vec<Vec<*mut u8>> {
        if !is_uneven(operation) {
            return Vec::new();
        }
        let posted = |rank| self.layout.posted(rank, ticket.fingerprint.sequence);
        let ranks: Option<Vec<_>> = (0..self.membership.size()).map(posted).collect();
        let ranks = ranks.unwrap_or_default();
        let output = |(index, part): (usize, &Part)| {
            let of_rank = |(rank, posted): (usize, &Posted)| match part.input_cuts[rank] {
                0 => Some(std::ptr::null_mut()),
                bytes => {
                    let range = (*posted.ranges.get(operation.parts.len() + index)?)?;
                    self.segments.resolve(self.membership.ranks[rank], range, bytes)
                }
            };
            ranks.iter().enumerate().map(of_rank).collect::<Option<Vec<_>>>()
        };
        operation.parts.iter().enumerate().map(output).collect::<Option<_>>().unwrap_or_default()
    }

    /// Folds this rank's share of all elements, whomever they are meant for.
    fn fold_like_shares(&self, operation: &Collective, part: &Part, bases: &[*mut u8], outputs: &[*mut u8]) {
        let (start, bytes) = self.my_slice(part.input.len());
        for (piece, output) in pieces_of(&part.input_cuts).into_iter().zip(outputs) {
            let (from, to) = (piece.start.max(start), piece.end.min(start + bytes));
            if from < to {
                let bases: Vec<*mut u8> = bases.iter().map(|base| base.wrapping_add(from)).collect();
                let output = output.wrapping_add(from - piece.start);
                self.fold_and_forget(operation, &bases, &[output], 0, to - from);
            }
        }
    }

    /// Bytes of `rank`'s shared buffer.
    fn shared_bytes(&self, operation: &Collective, part: &Part, rank: usize, sequence: u64) -> usize {
        match operation.kind {
            Kind::AllGather => part.output_cuts[rank],
            Kind::Scatter => part.output.len() * self.membership.size(),
            Kind::AllToAll => self.posted_cuts(rank, sequence).0.iter().sum(),
            _ => part.input.len(),
        }
    }

    fn consume_small(&self, operation: &Collective, part: &Part, bases: &[*mut u8], sequence: u64) {
        let me = self.membership.me;
        match operation.kind {
            Kind::AllReduce => {
                self.fold_range(operation, bases, &[part.output.as_ptr()], 0, part.output.len())
            }
            Kind::Reduce if operation.root == Some(me) => {
                self.fold_range(operation, bases, &[part.output.as_ptr()], 0, part.output.len());
            }
            Kind::Reduce | Kind::Barrier => {}
            _ => self.pull_whole(operation, part, bases, sequence),
        }
    }

    fn run_in_place(&self, operation: &Collective, part: &Part, bases: &[*mut u8], sequence: u64) {
        match operation.kind {
            Kind::AllReduce | Kind::Reduce => {
                let (start, bytes) = self.my_slice(part.input.len());
                match operation.root {
                    Some(root) => self.fold_and_forget(operation, bases, &[bases[root]], start, bytes),
                    None => self.fold_and_forget(operation, bases, bases, start, bytes),
                }
            }
            Kind::Barrier => {}
            _ => self.pull_whole(operation, part, bases, sequence),
        }
    }

    /// The byte range that this rank folds on behalf of the group.
    pub(super) fn my_slice(&self, bytes: usize) -> (usize, usize) {
        let per_rank = bytes.div_ceil(self.membership.size()).next_multiple_of(LINE_BYTES);
        let start = (per_rank * self.membership.me).min(bytes);
        (start, per_rank.min(bytes - start))
    }

    /// As [`fold_range`](Self::fold_range), over registered memory.
    fn fold_and_forget(
        &self,
        operation: &Collective,
        bases: &[*mut u8],
        destinations: &[*mut u8],
        start: usize,
        bytes: usize,
    ) {
        if bytes < 2 * WINDOW_BYTES || !self.segments.has_huge_pages() {
            return self.fold_range(operation, bases, destinations, start, bytes);
        }
        for at in (start..start + bytes).step_by(WINDOW_BYTES) {
            let end = (at + WINDOW_BYTES).min(start + bytes);
            self.fold_range(operation, bases, destinations, at, end - at);
            // With the page in which the window before ended.
            let from = at.saturating_sub(HUGE_PAGE).max(start);
            for rank in (0..bases.len()).filter(|rank| *rank != self.membership.me) {
                // SAFETY: registered memory of a peer.
                unsafe { forget_view(bases[rank].wrapping_add(from), end - from) };
            }
        }
    }

    /// Folds `bytes` from `start` on, over all ranks' buffers, into the same place of every destination.
    pub(super) fn fold_range(
        &self,
        operation: &Collective,
        bases: &[*mut u8],
        destinations: &[*mut u8],
        start: usize,
        bytes: usize,
    ) {
        let Some(op) = operation.reduce else { return };
        let sources: Vec<*const u8> =
            bases.iter().map(|base| base.wrapping_add(start).cast_const()).collect();
        let destinations: Vec<*mut u8> = destinations.iter().map(|base| base.wrapping_add(start)).collect();
        let elements = bytes / operation.dtype.size();
        // SAFETY: the fingerprints agree, so every buffer holds `start + bytes` bytes; between the two steps of the
        // operation only this rank touches this slice; destinations are the buffers themselves or this rank's output.
        unsafe {
            fold(operation.dtype, op, &sources, &destinations, elements, self.membership.size());
        }
    }

    /// Copies, or folds, every piece that is meant for this rank.
    fn pull_whole(&self, operation: &Collective, part: &Part, bases: &[*mut u8], sequence: u64) {
        let pulls = self.pulls(operation, part, sequence);
        if operation.kind == Kind::ReduceScatter {
            let Some(first) = pulls.first() else { return };
            let bases: Vec<*mut u8> =
                bases.iter().map(|base| base.wrapping_add(first.source_offset)).collect();
            self.fold_and_forget(operation, &bases, &[part.output.as_ptr()], 0, first.bytes);
            return;
        }
        for pull in pulls {
            // SAFETY: the piece lies inside the source's buffer (the cuts were checked on both sides) and inside our
            // output; its owner leaves it alone until the operation's last step.
            unsafe {
                copy(
                    bases[pull.source].add(pull.source_offset),
                    part.output.as_ptr().add(pull.output_offset),
                    pull.bytes,
                );
            }
        }
    }

    /// The pieces that this rank needs, in rank order.
    pub(super) fn pulls(&self, operation: &Collective, part: &Part, sequence: u64) -> Vec<Pull> {
        let (size, me) = (self.membership.size(), self.membership.me);
        let sources: Vec<usize> = match operation.kind {
            Kind::AllGather | Kind::AllToAll | Kind::ReduceScatter => (0..size).collect(),
            Kind::Gather if operation.root == Some(me) => (0..size).collect(),
            Kind::Broadcast if operation.root != Some(me) => operation.root.into_iter().collect(),
            Kind::Scatter => operation.root.into_iter().collect(),
            _ => Vec::new(),
        };
        let mut output_offset = 0;
        let mut pulls = Vec::with_capacity(sources.len());
        for source in sources {
            let (piece, source_offset, bytes) = match operation.kind {
                Kind::ReduceScatter => (me, part.input_cuts[..me].iter().sum(), part.input_cuts[me]),
                Kind::Scatter => (me, me * part.output.len(), part.output.len()),
                Kind::AllToAll => {
                    let (cuts, _) = self.posted_cuts(source, sequence);
                    (me, cuts[..me].iter().sum(), cuts[me])
                }
                Kind::AllGather => (0, 0, part.output_cuts[source]),
                _ => (0, 0, part.input.len()),
            };
            pulls.push(Pull { source, piece, source_offset, output_offset, bytes });
            output_offset += bytes;
        }
        pulls
    }

    /// Tells the others how this rank cuts its buffers.
    fn post_cuts(&self, part: &Part, sequence: u64) {
        let table = self.layout.table(self.membership.me, sequence);
        for (index, cut) in part.input_cuts.iter().chain(&part.output_cuts).enumerate() {
            // SAFETY: the table has room for two cuts per rank, and only this rank writes it.
            unsafe { table.add(index).write(*cut as u64) };
        }
    }

    /// How a rank cuts its input and its output.
    pub(super) fn posted_cuts(&self, rank: usize, sequence: u64) -> (Vec<usize>, Vec<usize>) {
        let size = self.membership.size();
        let table = self.layout.table(rank, sequence);
        // SAFETY: the rank has stepped past its writes, and the table has room for two cuts per rank.
        let read = |index: usize| unsafe { table.add(index).read() } as usize;
        ((0..size).map(read).collect(), (size..2 * size).map(read).collect())
    }

    /// What rank *p* sends to *q* must be what *q* expects from *p*; every rank checks every pair.
    fn check_cuts(&self, ticket: &Ticket) -> Result<()> {
        let size = self.membership.size();
        let sequence = ticket.fingerprint.sequence;
        let cuts: Vec<_> = (0..size).map(|rank| self.posted_cuts(rank, sequence)).collect();
        for (sender, receiver) in
            (0..size).flat_map(|sender| (0..size).map(move |receiver| (sender, receiver)))
        {
            let (sent, expected) = (cuts[sender].0[receiver], cuts[receiver].1[sender]);
            if sent != expected {
                let call = |rank: usize, what: String| {
                    let (seen, site) = self.layout.last_posted(rank);
                    let call = seen.map_or_else(String::new, |seen| seen.describe(&site));
                    (rank, format!("{call} {what}"))
                };
                let sends =
                    call(sender, format!("sending {sent} bytes to rank {}", self.membership.ranks[receiver]));
                let expects = call(
                    receiver,
                    format!("expecting {expected} bytes from rank {}", self.membership.ranks[sender]),
                );
                return Err(self.membership.mismatch(sends, expects));
            }
        }
        Ok(())
    }
}

/// Whether ranks of a reduce_scatter would wait for one that has much more to fold than they, and there is room to say where
/// the results lie.
fn is_uneven(operation: &Collective) -> bool {
    let is_uneven = |part: &Part| {
        let longest = part.input_cuts.iter().max().copied().unwrap_or(0);
        longest * part.input_cuts.len() > part.input.len() + part.input.len() / UNEVEN_FROM
    };
    operation.kind == Kind::ReduceScatter
        && 2 * operation.parts.len() <= MAX_PARTS
        && operation.parts.iter().any(is_uneven)
}
