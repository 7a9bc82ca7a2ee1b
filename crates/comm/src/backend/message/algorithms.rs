//! The collectives, as exchanges of byte ranges. Costs are in the document `docs/comm.md`.

use std::sync::PoisonError;

use super::{Incoming, Link, MessageCarrier, Outgoing};
use crate::backend::Ticket;
use crate::error::Result;
use crate::op::{Collective, Kind, Part};
use crate::reduce::fold;

/// From this size on a broadcast is scattered and gathered instead of sent down a tree.
const LARGE_BROADCAST_BYTES: usize = 256 << 10;
/// Groups larger than this gather along a ring, so that a rank talks to two peers at a time.
const DIRECT_GATHER_RANKS: usize = 8;

impl<L: Link> MessageCarrier<L> {
    pub(super) fn run_collective(&self, operation: &Collective, ticket: &Ticket) -> Result<()> {
        if operation.kind == Kind::Barrier {
            return self.barrier(ticket);
        }
        for part in &operation.parts {
            match operation.kind {
                Kind::AllReduce => self.all_reduce(operation, part, ticket)?,
                Kind::Reduce => self.reduce(operation, part, ticket)?,
                Kind::ReduceScatter => self.reduce_scatter(operation, part, ticket)?,
                Kind::AllGather => {
                    self.keep_own_part(part);
                    self.all_gather(
                        part.output.as_ptr(),
                        &starts(&part.output_cuts),
                        &part.output_cuts,
                        ticket,
                    )?;
                }
                Kind::Broadcast => self.broadcast(operation, part, ticket)?,
                Kind::Scatter => self.scatter(operation, part, ticket)?,
                Kind::Gather => self.gather(operation, part, ticket)?,
                Kind::AllToAll => self.all_to_all(part, ticket)?,
                Kind::Barrier | Kind::Send | Kind::Recv => {}
            }
        }
        Ok(())
    }

    fn others(&self) -> impl Iterator<Item = usize> + '_ {
        let (size, me) = (self.membership.size(), self.membership.me);
        // Starting after oneself spreads the load: not everybody talks to rank 0 first.
        (1..size).map(move |distance| (me + distance) % size)
    }

    /// In round *k*, rank *i* tells rank *i* + 2ᵏ that it, and all it has heard of, are here.
    fn barrier(&self, ticket: &Ticket) -> Result<()> {
        let (size, me) = (self.membership.size(), self.membership.me);
        let (sent, mut received) = (1u8, 0u8);
        let mut distance = 1;
        while distance < size {
            let outgoing = Outgoing { peer: (me + distance) % size, start: &sent, bytes: 1 };
            let incoming = Incoming { peer: (me + size - distance) % size, start: &mut received, bytes: 1 };
            // SAFETY: the ranges are these locals.
            unsafe { self.exchange(&[outgoing], &[incoming], ticket)? };
            distance *= 2;
        }
        Ok(())
    }

    /// A slice for each rank, of whole elements.
    fn slices(&self, elements: usize, unit: usize) -> (Vec<usize>, Vec<usize>) {
        let per_rank = elements.div_ceil(self.membership.size());
        let start = |rank: usize| (per_rank * rank).min(elements);
        let ranks = 0..self.membership.size();
        let starts = ranks.clone().map(|rank| start(rank) * unit).collect();
        (starts, ranks.map(|rank| (start(rank + 1) - start(rank)) * unit).collect())
    }

    /// Direct reduce-scatter of one window while the results of the window before are gathered.
    fn all_reduce(&self, operation: &Collective, part: &Part, ticket: &Ticket) -> Result<()> {
        let unit = operation.dtype.size();
        let window = (self.staging_bytes / unit * unit).max(unit);
        let total = part.input.len();
        let mut gathering: Option<(usize, Vec<usize>, Vec<usize>)> = None;
        let mut at = 0;
        loop {
            let bytes = window.min(total - at);
            let (starts, lengths) = self.slices(bytes / unit, unit);
            let base = part.output.as_ptr().wrapping_add(at);
            let mut outgoing = Vec::new();
            let mut incoming = Vec::new();
            if let Some((before, starts, lengths)) = &gathering {
                let base = part.output.as_ptr().wrapping_add(*before);
                self.list_gather(base, starts, lengths, &mut outgoing, &mut incoming);
            }
            let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
            let own = lengths[self.membership.me];
            staging.resize(own * self.membership.size(), 0);
            for peer in self.others() {
                outgoing.push(Outgoing {
                    peer,
                    start: base.wrapping_add(starts[peer]),
                    bytes: lengths[peer],
                });
                incoming.push(Incoming {
                    peer,
                    start: staging.as_mut_ptr().wrapping_add(peer * own),
                    bytes: own,
                });
            }
            // SAFETY: ranges of the staging area and of the buffer, which the operation has to itself; what is sent of
            // this window and what is received of the one before lie apart.
            unsafe { self.exchange(&outgoing, &incoming, ticket)? };
            self.fold_staged(
                operation,
                &staging,
                base.wrapping_add(starts[self.membership.me]),
                own,
                base.wrapping_add(starts[self.membership.me]),
            );
            drop(staging);
            gathering = Some((at, starts, lengths));
            at += bytes;
            if at >= total {
                break;
            }
        }
        if let Some((before, starts, lengths)) = gathering {
            self.all_gather(part.output.as_ptr().wrapping_add(before), &starts, &lengths, ticket)?;
        }
        Ok(())
    }

    /// Folds this rank's slice: the others' parts from the staging area, its own from where it lies.
    fn fold_staged(
        &self,
        operation: &Collective,
        staging: &[u8],
        own: *const u8,
        bytes: usize,
        destination: *mut u8,
    ) {
        let Some(op) = operation.reduce else { return };
        let (size, me) = (self.membership.size(), self.membership.me);
        let source = |rank: usize| if rank == me { own } else { staging.as_ptr().wrapping_add(rank * bytes) };
        let sources: Vec<*const u8> = (0..size).map(source).collect();
        // SAFETY: the staging area holds `bytes` for each rank; the destination is this rank's own slice or its output.
        unsafe {
            fold(operation.dtype, op, &sources, &[destination], bytes / operation.dtype.size(), size);
        }
    }

    fn reduce_scatter(&self, operation: &Collective, part: &Part, ticket: &Ticket) -> Result<()> {
        let (size, me) = (self.membership.size(), self.membership.me);
        let unit = operation.dtype.size();
        let window = (self.staging_bytes / size / unit * unit).max(unit);
        let starts = starts(&part.input_cuts);
        let longest = part.input_cuts.iter().copied().max().unwrap_or(0);
        let mut at = 0;
        while at < longest {
            let length = |rank: usize| window.min(part.input_cuts[rank].saturating_sub(at));
            let own = length(me);
            let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
            staging.resize(own * size, 0);
            let mut outgoing = Vec::new();
            let mut incoming = Vec::new();
            for peer in self.others() {
                let start = part.input.as_ptr().wrapping_add(starts[peer] + at.min(part.input_cuts[peer]));
                outgoing.push(Outgoing { peer, start, bytes: length(peer) });
                incoming.push(Incoming {
                    peer,
                    start: staging.as_mut_ptr().wrapping_add(peer * own),
                    bytes: own,
                });
            }
            // SAFETY: ranges of the input, which nobody changes, and of the staging area.
            unsafe { self.exchange(&outgoing, &incoming, ticket)? };
            if own > 0 {
                let source = part.input.as_ptr().wrapping_add(starts[me] + at);
                self.fold_staged(operation, &staging, source, own, part.output.as_ptr().wrapping_add(at));
            }
            at += window;
        }
        Ok(())
    }

    /// Direct reduce-scatter, window by window, into scratch; the slices go to the root.
    fn reduce(&self, operation: &Collective, part: &Part, ticket: &Ticket) -> Result<()> {
        let (size, me) = (self.membership.size(), self.membership.me);
        let unit = operation.dtype.size();
        let window = (self.staging_bytes / 2 / unit * unit).max(unit);
        let root = operation.root.unwrap_or(0);
        let total = part.input.len();
        let mut at = 0;
        while at < total {
            let bytes = window.min(total - at);
            let (starts, lengths) = self.slices(bytes / unit, unit);
            let base = part.input.as_ptr().wrapping_add(at);
            let own = lengths[me];
            let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
            // One slice of every rank, and one for the result: other ranks than the root keep their data.
            staging.resize(own * (size + 1), 0);
            let mut outgoing = Vec::new();
            let mut incoming = Vec::new();
            for peer in self.others() {
                outgoing.push(Outgoing {
                    peer,
                    start: base.wrapping_add(starts[peer]),
                    bytes: lengths[peer],
                });
                incoming.push(Incoming {
                    peer,
                    start: staging.as_mut_ptr().wrapping_add(peer * own),
                    bytes: own,
                });
            }
            // SAFETY: ranges of the buffer and of the staging area, apart from each other.
            unsafe { self.exchange(&outgoing, &incoming, ticket)? };
            let source = base.wrapping_add(starts[me]);
            if me == root {
                self.fold_staged(operation, &staging, source, own, source);
                let from = |peer: usize| Incoming {
                    peer,
                    start: base.wrapping_add(starts[peer]),
                    bytes: lengths[peer],
                };
                let incoming: Vec<Incoming> = self.others().map(from).collect();
                // SAFETY: the root's buffer, outside its own slice.
                unsafe { self.exchange(&[], &incoming, ticket)? };
            } else {
                let (sources, result) = staging.split_at_mut(own * size);
                self.fold_staged(operation, sources, source, own, result.as_mut_ptr());
                let outgoing = Outgoing { peer: root, start: result.as_ptr(), bytes: own };
                // SAFETY: the result's own part of the staging area.
                unsafe { self.exchange(&[outgoing], &[], ticket)? };
            }
            at += bytes;
        }
        Ok(())
    }

    fn keep_own_part(&self, part: &Part) {
        let own = starts(&part.output_cuts)[self.membership.me];
        let destination = part.output.as_ptr().wrapping_add(own);
        // SAFETY: the input fits its place in the output (checked by the caller); it may be that very place.
        unsafe { std::ptr::copy(part.input.as_ptr(), destination, part.input.len()) };
    }

    fn list_gather(
        &self,
        base: *mut u8,
        starts: &[usize],
        lengths: &[usize],
        outgoing: &mut Vec<Outgoing>,
        incoming: &mut Vec<Incoming>,
    ) {
        let me = self.membership.me;
        for peer in self.others() {
            outgoing.push(Outgoing { peer, start: base.wrapping_add(starts[me]), bytes: lengths[me] });
            incoming.push(Incoming { peer, start: base.wrapping_add(starts[peer]), bytes: lengths[peer] });
        }
    }

    /// Completes a buffer of which each rank holds its own part.
    fn all_gather(&self, base: *mut u8, starts: &[usize], lengths: &[usize], ticket: &Ticket) -> Result<()> {
        let (size, me) = (self.membership.size(), self.membership.me);
        if size <= DIRECT_GATHER_RANKS {
            let (mut outgoing, mut incoming) = (Vec::new(), Vec::new());
            self.list_gather(base, starts, lengths, &mut outgoing, &mut incoming);
            // SAFETY: disjoint parts of a buffer that the operation has to itself.
            return unsafe { self.exchange(&outgoing, &incoming, ticket) };
        }
        let (right, left) = ((me + 1) % size, (me + size - 1) % size);
        for step in 0..size - 1 {
            let passing = (me + size - step) % size;
            let coming = (left + size - step) % size;
            let outgoing =
                Outgoing { peer: right, start: base.wrapping_add(starts[passing]), bytes: lengths[passing] };
            let incoming =
                Incoming { peer: left, start: base.wrapping_add(starts[coming]), bytes: lengths[coming] };
            // SAFETY: disjoint parts of a buffer that the operation has to itself.
            unsafe { self.exchange(&[outgoing], &[incoming], ticket)? };
        }
        Ok(())
    }

    /// Small: down a binomial tree. Large: the root scatters, then everybody gathers.
    fn broadcast(&self, operation: &Collective, part: &Part, ticket: &Ticket) -> Result<()> {
        let (size, me) = (self.membership.size(), self.membership.me);
        let root = operation.root.unwrap_or(0);
        let (base, bytes) = (part.output.as_ptr(), part.output.len());
        if bytes >= LARGE_BROADCAST_BYTES && size > 2 {
            let (starts, lengths) = self.slices(bytes, 1);
            if me == root {
                let to = |peer: usize| Outgoing {
                    peer,
                    start: base.wrapping_add(starts[peer]),
                    bytes: lengths[peer],
                };
                let outgoing: Vec<Outgoing> = self.others().map(to).collect();
                // SAFETY: parts of the root's buffer, which it only reads.
                unsafe { self.exchange(&outgoing, &[], ticket)? };
            } else {
                let incoming =
                    Incoming { peer: root, start: base.wrapping_add(starts[me]), bytes: lengths[me] };
                // SAFETY: this rank's part of its own buffer.
                unsafe { self.exchange(&[], &[incoming], ticket)? };
            }
            return self.all_gather(base, &starts, &lengths, ticket);
        }
        // Ranks are renumbered so that the root is 0; rank r has its parent at r with the highest bit cleared.
        let virtual_rank = (me + size - root) % size;
        let actual = |rank: usize| (rank + root) % size;
        if virtual_rank > 0 {
            let parent = virtual_rank & !(1 << virtual_rank.ilog2());
            let incoming = Incoming { peer: actual(parent), start: base, bytes };
            // SAFETY: this rank's own buffer.
            unsafe { self.exchange(&[], &[incoming], ticket)? };
        }
        let first_child_bit = virtual_rank.checked_ilog2().map_or(0, |bit| bit + 1);
        let children = (first_child_bit..usize::BITS)
            .map(|bit| virtual_rank | 1 << bit)
            .take_while(|child| *child < size);
        let outgoing: Vec<Outgoing> =
            children.map(|child| Outgoing { peer: actual(child), start: base, bytes }).collect();
        // SAFETY: this rank's own buffer, complete by now and only read.
        unsafe { self.exchange(&outgoing, &[], ticket) }
    }

    fn scatter(&self, operation: &Collective, part: &Part, ticket: &Ticket) -> Result<()> {
        let me = self.membership.me;
        let root = operation.root.unwrap_or(0);
        let bytes = part.output.len();
        if me != root {
            let incoming = Incoming { peer: root, start: part.output.as_ptr(), bytes };
            // SAFETY: this rank's own output.
            return unsafe { self.exchange(&[], &[incoming], ticket) };
        }
        let piece = |rank: usize| part.input.as_ptr().wrapping_add(rank * bytes);
        let outgoing: Vec<Outgoing> =
            self.others().map(|peer| Outgoing { peer, start: piece(peer), bytes }).collect();
        // SAFETY: parts of the root's input; its own part may overlap its output.
        unsafe {
            std::ptr::copy(piece(me), part.output.as_ptr(), bytes);
            self.exchange(&outgoing, &[], ticket)
        }
    }

    fn gather(&self, operation: &Collective, part: &Part, ticket: &Ticket) -> Result<()> {
        let root = operation.root.unwrap_or(0);
        let bytes = part.input.len();
        if self.membership.me != root {
            let outgoing = Outgoing { peer: root, start: part.input.as_ptr(), bytes };
            // SAFETY: this rank's own input.
            return unsafe { self.exchange(&[outgoing], &[], ticket) };
        }
        self.keep_own_part(part);
        let place = |rank: usize| part.output.as_ptr().wrapping_add(rank * bytes);
        let incoming: Vec<Incoming> =
            self.others().map(|peer| Incoming { peer, start: place(peer), bytes }).collect();
        // SAFETY: parts of the root's output, apart from its own.
        unsafe { self.exchange(&[], &incoming, ticket) }
    }

    /// Every pair first agrees on the bytes that it is about to move.
    fn all_to_all(&self, part: &Part, ticket: &Ticket) -> Result<()> {
        let (size, me) = (self.membership.size(), self.membership.me);
        let sends: Vec<u64> = part.input_cuts.iter().map(|cut| *cut as u64).collect();
        let mut announced = vec![0u64; size];
        announced[me] = sends[me];
        let outgoing: Vec<Outgoing> = self
            .others()
            .map(|peer| Outgoing { peer, start: (&raw const sends[peer]).cast(), bytes: 8 })
            .collect();
        let base: *mut u64 = announced.as_mut_ptr();
        let incoming: Vec<Incoming> = self
            .others()
            .map(|peer| Incoming { peer, start: base.wrapping_add(peer).cast(), bytes: 8 })
            .collect();
        // SAFETY: words of these two locals.
        unsafe { self.exchange(&outgoing, &incoming, ticket)? };
        for (peer, sent) in announced.iter().enumerate() {
            let expected = part.output_cuts[peer] as u64;
            if *sent != expected {
                let call = ticket.describe();
                let sends = format!("{call} sending {sent} bytes to rank {}", self.membership.ranks[me]);
                let expects =
                    format!("{call} expecting {expected} bytes from rank {}", self.membership.ranks[peer]);
                return Err(self.membership.announce_mismatch((peer, sends), (me, expects)));
            }
        }
        let (from, to) = (starts(&part.input_cuts), starts(&part.output_cuts));
        let outgoing: Vec<Outgoing> = self
            .others()
            .map(|peer| {
                let start = part.input.as_ptr().wrapping_add(from[peer]);
                Outgoing { peer, start, bytes: part.input_cuts[peer] }
            })
            .collect();
        let incoming: Vec<Incoming> = self
            .others()
            .map(|peer| {
                let start = part.output.as_ptr().wrapping_add(to[peer]);
                Incoming { peer, start, bytes: part.output_cuts[peer] }
            })
            .collect();
        // SAFETY: pieces of the input, which is only read, and of the output, as the cuts were checked to fit them.
        unsafe {
            std::ptr::copy(
                part.input.as_ptr().wrapping_add(from[me]),
                part.output.as_ptr().wrapping_add(to[me]),
                part.input_cuts[me],
            );
            self.exchange(&outgoing, &incoming, ticket)
        }
    }
}

/// Where each piece begins.
fn starts(cuts: &[usize]) -> Vec<usize> {
    let running = cuts.iter().scan(0, |sum, cut| {
        let start = *sum;
        *sum += cut;
        Some(start)
    });
    running.collect()
}
