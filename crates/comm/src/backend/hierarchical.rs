//! Several ranks on each of several hosts: shared memory inside a host, a link between hosts.
//!
//! The ranks of a group must lie host by host, the same number on each. A reduction then crosses the network once
//! instead of once per rank: each rank takes over the unrounded accumulator of the hosts before, folds its slice of its
//! host's ranks onto it, and hands it on; the last host rounds. It is the same fold in the same rank order, so the bits
//! are those of every other backend. The result of an all_reduce comes back the same way; that of a reduce or a
//! reduce_scatter goes from the last host to where it belongs. All_gather and broadcast send each byte to a host once
//! and spread it there. Everything else goes over the link directly.
//!
//! Ranks talk to their like on the other hosts only, so between two ranks every message has one meaning at a time.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::backend::local::{LocalCarrier, pieces_of};
use crate::backend::message::{Incoming, Link, MessageCarrier, Outgoing};
use crate::backend::{Carrier, Message, Ticket};
use crate::dtype::DType;
use crate::error::Result;
use crate::op::{Collective, Kind, Part};
use crate::reduce::{End, accumulator_bytes, fold_onwards};

/// A group over several hosts.
pub(crate) struct HierarchicalCarrier<L> {
    /// All ranks of the group, over the link.
    flat: MessageCarrier<L>,
    /// The ranks of this host.
    host: LocalCarrier,
    place: Place,
    next_host_sequence: AtomicU64,
    /// The accumulator that goes from host to host, of one window.
    carried: Mutex<Vec<u8>>,
}

/// Where this rank is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) hosts: usize,
    pub(crate) ranks_per_host: usize,
    /// This rank's host.
    pub(crate) host: usize,
    /// This rank among those of its host.
    pub(crate) index: usize,
}

impl Place {
    /// The place of the group's rank `me`, when its ranks lie host by host, several and equally many on each.
    pub(crate) fn find(ranks: &[usize], me: usize, hosts: &[Vec<usize>]) -> Option<Place> {
        let host_of = |rank: &usize| hosts.iter().position(|host| host.contains(rank));
        let order: Vec<Option<usize>> = ranks.iter().map(host_of).collect();
        let ranks_per_host = order.iter().take_while(|host| **host == order[0]).count();
        let count = ranks.len() / ranks_per_host;
        let regular = ranks.len().is_multiple_of(ranks_per_host)
            && order.chunks(ranks_per_host).all(|chunk| chunk.iter().all(|host| *host == chunk[0]))
            && (1..count).all(|host| !order[..host * ranks_per_host].contains(&order[host * ranks_per_host]));
        let place =
            Place { hosts: count, ranks_per_host, host: me / ranks_per_host, index: me % ranks_per_host };
        (regular && count > 1 && ranks_per_host > 1).then_some(place)
    }

    /// The group's rank with this rank's index on another host.
    fn peer_on(&self, host: usize) -> usize {
        host * self.ranks_per_host + self.index
    }

    fn last_host(&self) -> usize {
        self.hosts - 1
    }

    fn is_on_last_host(&self) -> bool {
        self.host == self.last_host()
    }

    /// Whether accumulators handed from host to host are fewer bytes on a host's link than a reduce_scatter that sends
    /// every rank's slices to their owners: *N* of them against *k* (*H* − 1) / *H* times *N*.
    fn shortens_reduce_scatter(&self, dtype: DType) -> bool {
        let widening = accumulator_bytes(dtype) / dtype.size();
        self.ranks_per_host * (self.hosts - 1) > widening * self.hosts
    }

    fn other_hosts(&self) -> impl Iterator<Item = usize> {
        let own = self.host;
        (0..self.hosts).filter(move |host| *host != own)
    }
}

impl<L: Link> HierarchicalCarrier<L> {
    pub(crate) fn new(flat: MessageCarrier<L>, host: LocalCarrier, place: Place) -> Self {
        HierarchicalCarrier {
            flat,
            host,
            place,
            next_host_sequence: AtomicU64::new(0),
            carried: Mutex::default(),
        }
    }

    /// The ticket of a step inside the host; those are numbered by themselves.
    fn host_ticket(&self, operation: &Collective, ticket: &Ticket) -> Ticket {
        let sequence = self.next_host_sequence.fetch_add(1, Ordering::Relaxed);
        Ticket { fingerprint: operation.fingerprint(ticket.fingerprint.group, sequence), ..ticket.clone() }
    }

    /// Folds `sources`, the same slice of this host's ranks, onto the accumulator of the hosts before. The last host
    /// rounds into `destinations`; the others hand the accumulator on, while they receive what is `awaited`.
    ///
    /// # Safety
    /// As [`fold_onwards`]; what is awaited is nobody else's.
    unsafe fn fold_hosts(
        &self,
        operation: &Collective,
        sources: &[*mut u8],
        bytes: usize,
        destinations: &[*mut u8],
        awaited: &[Incoming],
        ticket: &Ticket,
    ) -> Result<()> {
        let Some(op) = operation.reduce else { return Ok(()) };
        let (place, dtype) = (self.place, operation.dtype);
        let elements = bytes / dtype.size();
        let sources: Vec<*const u8> = sources.iter().map(|source| source.cast_const()).collect();
        let mut carried = self.carried.lock().unwrap_or_else(PoisonError::into_inner);
        carried.resize(elements * accumulator_bytes(dtype), 0);
        let (carry, carry_bytes) = (carried.as_mut_ptr(), carried.len());
        let before = place.host.checked_sub(1).map(|host| place.peer_on(host));
        // SAFETY: the caller's contract, and `carried`.
        unsafe {
            if let Some(peer) = before {
                self.flat.exchange(&[], &[Incoming { peer, start: carry, bytes: carry_bytes }], ticket)?;
            }
            let taken = before.map(|_| carry.cast_const());
            if place.is_on_last_host() {
                let end = End::Rounded { ranks: self.flat.size(), destinations };
                fold_onwards(dtype, op, taken, &sources, elements, end);
                return Ok(());
            }
            fold_onwards(dtype, op, taken, &sources, elements, End::PassedOn { accumulator: carry });
            let peer = place.peer_on(place.host + 1);
            self.flat.exchange(&[Outgoing { peer, start: carry, bytes: carry_bytes }], awaited, ticket)
        }
    }

    fn all_reduce(&self, operation: &Collective, part: &Part, ticket: &Ticket) -> Result<()> {
        let place = self.place;
        let host_ticket = self.host_ticket(operation, ticket);
        self.host.reduce_staged(part, true, &host_ticket, |bases, start, bytes| {
            let slices: Vec<*mut u8> = bases.iter().map(|base| base.wrapping_add(start)).collect();
            // SAFETY: this rank's slice of the host's windows, which nobody else touches in this step.
            unsafe {
                self.fold_hosts(operation, &slices, bytes, &slices, &[], ticket)?;
                if !place.is_on_last_host() {
                    let peer = place.peer_on(place.host + 1);
                    self.flat.exchange(&[], &[Incoming { peer, start: slices[0], bytes }], ticket)?;
                    for slice in &slices[1..] {
                        std::ptr::copy_nonoverlapping(slices[0], *slice, bytes);
                    }
                }
                if let Some(before) = place.host.checked_sub(1) {
                    let peer = place.peer_on(before);
                    self.flat.exchange(&[Outgoing { peer, start: slices[0], bytes }], &[], ticket)?;
                }
            }
            Ok(())
        })
    }

    /// As an all_reduce, but the last host sends its result to the root's host only.
    fn reduce(&self, operation: &Collective, part: &Part, ticket: &Ticket) -> Result<()> {
        let place = self.place;
        let root = operation.root.unwrap_or(0);
        let (root_host, root_index) = (root / place.ranks_per_host, root % place.ranks_per_host);
        let is_root = place.host == root_host && place.index == root_index;
        let host_ticket = self.host_ticket(operation, ticket);
        self.host.reduce_staged(part, is_root, &host_ticket, |bases, start, bytes| {
            let slices: Vec<*mut u8> = bases.iter().map(|base| base.wrapping_add(start)).collect();
            let result = slices[root_index];
            // SAFETY: this rank's slice of the host's windows, which nobody else touches in this step.
            unsafe {
                self.fold_hosts(operation, &slices, bytes, &[result], &[], ticket)?;
                if place.is_on_last_host() && place.host != root_host {
                    let peer = place.peer_on(root_host);
                    self.flat.exchange(&[Outgoing { peer, start: result, bytes }], &[], ticket)?;
                } else if place.host == root_host && !place.is_on_last_host() {
                    let peer = place.peer_on(place.last_host());
                    self.flat.exchange(&[], &[Incoming { peer, start: result, bytes }], ticket)?;
                }
            }
            Ok(())
        })
    }

    /// One host's pieces after the other: each rank folds, over its host, the piece of its like on that host.
    ///
    /// Windows follow one another without waiting for results: the owner of a piece takes in the result of an earlier
    /// window while it hands a later one on. It is behind by as many windows as there are hosts after it, since each of
    /// them holds one; that is also why nobody can wait in a circle.
    fn reduce_scatter(&self, operation: &Collective, part: &Part, ticket: &Ticket) -> Result<()> {
        let place = self.place;
        let behind = place.last_host() - place.host;
        let pieces = pieces_of(&part.input_cuts);
        for (owner, pieces) in pieces.chunks(place.ranks_per_host).enumerate() {
            let from = place.peer_on(place.last_host());
            let mut awaited: VecDeque<Incoming> = VecDeque::new();
            let host_ticket = self.host_ticket(operation, ticket);
            self.host.fold_pieces_staged(part, pieces, &host_ticket, |windows, start, bytes| {
                let output = part.output.as_ptr().wrapping_add(start);
                let result = if owner == place.host { output } else { windows[place.index] };
                if owner == place.host && !place.is_on_last_host() {
                    awaited.push_back(Incoming { peer: from, start: output, bytes });
                }
                let due = if awaited.len() > behind { awaited.pop_front() } else { None };
                // SAFETY: this rank's piece in the host's windows, and stretches of its output whose input is staged.
                unsafe {
                    self.fold_hosts(operation, windows, bytes, &[result], due.as_slice(), ticket)?;
                    if place.is_on_last_host() && owner != place.host {
                        let peer = place.peer_on(owner);
                        self.flat.exchange(&[Outgoing { peer, start: result, bytes }], &[], ticket)?;
                    }
                }
                Ok(())
            })?;
            for late in awaited {
                // SAFETY: stretches of this rank's output.
                unsafe { self.flat.exchange(&[], &[late], ticket)? };
            }
        }
        Ok(())
    }

    /// Each rank trades its part with its like on every other host; then each host gathers every host's parts.
    fn all_gather(&self, operation: &Collective, part: &Part, ticket: &Ticket) -> Result<()> {
        let place = self.place;
        let bytes = part.input.len();
        let of_rank = |rank: usize| part.output.slice(rank * bytes..(rank + 1) * bytes);
        let own = of_rank(place.peer_on(place.host));
        let outgoing: Vec<Outgoing> = place
            .other_hosts()
            .map(|host| Outgoing { peer: place.peer_on(host), start: part.input.as_ptr(), bytes })
            .collect();
        let incoming: Vec<Incoming> = place
            .other_hosts()
            .map(|host| place.peer_on(host))
            .map(|peer| Incoming { peer, start: of_rank(peer).as_ptr(), bytes })
            .collect();
        // SAFETY: disjoint parts of this rank's output; its own part may be where the input lies.
        unsafe {
            std::ptr::copy(part.input.as_ptr(), own.as_ptr(), bytes);
            self.flat.exchange(&outgoing, &incoming, ticket)?;
        }
        for host in 0..place.hosts {
            let first = host * place.ranks_per_host * bytes;
            let part = Part {
                input: of_rank(place.peer_on(host)),
                output: part.output.slice(first..first + place.ranks_per_host * bytes),
                input_cuts: Vec::new(),
                output_cuts: vec![bytes; place.ranks_per_host],
            };
            let inside = Collective { parts: vec![part], ..operation.clone() };
            self.host.run(&inside, &self.host_ticket(&inside, ticket))?;
        }
        Ok(())
    }

    /// The root sends to its like on every other host; each of them spreads it on its host.
    fn broadcast(&self, operation: &Collective, part: &Part, ticket: &Ticket) -> Result<()> {
        let place = self.place;
        let root = operation.root.unwrap_or(0);
        let (root_host, root_index) = (root / place.ranks_per_host, root % place.ranks_per_host);
        let (start, bytes) = (part.output.as_ptr(), part.output.len());
        let (mut outgoing, mut incoming) = (Vec::new(), Vec::new());
        if place.index == root_index && place.host == root_host {
            outgoing.extend(place.other_hosts().map(|host| Outgoing {
                peer: place.peer_on(host),
                start,
                bytes,
            }));
        } else if place.index == root_index {
            incoming.push(Incoming { peer: root, start, bytes });
        }
        // SAFETY: this rank's own buffer, sent or received whole.
        unsafe { self.flat.exchange(&outgoing, &incoming, ticket)? };
        let inside = Collective { parts: vec![part.clone()], root: Some(root_index), ..operation.clone() };
        self.host.run(&inside, &self.host_ticket(&inside, ticket))
    }
}

impl<L: Link> Carrier for HierarchicalCarrier<L> {
    fn name(&self) -> &'static str {
        "hierarchical"
    }

    fn max_parts(&self) -> usize {
        self.flat.max_parts()
    }

    fn run(&self, operation: &Collective, ticket: &Ticket) -> Result<()> {
        let equal = |part: &Part| part.output_cuts.windows(2).all(|pair| pair[0] == pair[1]);
        match operation.kind {
            Kind::AllReduce => {
                self.flat.enter(ticket)?;
                operation.parts.iter().try_for_each(|part| self.all_reduce(operation, part, ticket))
            }
            Kind::Reduce => {
                self.flat.enter(ticket)?;
                operation.parts.iter().try_for_each(|part| self.reduce(operation, part, ticket))
            }
            Kind::ReduceScatter if self.place.shortens_reduce_scatter(operation.dtype) => {
                self.flat.enter(ticket)?;
                operation.parts.iter().try_for_each(|part| self.reduce_scatter(operation, part, ticket))
            }
            Kind::AllGather if operation.parts.iter().all(equal) => {
                self.flat.enter(ticket)?;
                operation.parts.iter().try_for_each(|part| self.all_gather(operation, part, ticket))
            }
            Kind::Broadcast => {
                self.flat.enter(ticket)?;
                operation.parts.iter().try_for_each(|part| self.broadcast(operation, part, ticket))
            }
            _ => self.flat.run(operation, ticket),
        }
    }

    fn send(&self, message: &Message, ticket: &Ticket) -> Result<()> {
        self.flat.send(message, ticket)
    }

    fn recv(&self, message: &Message, ticket: &Ticket) -> Result<()> {
        self.flat.recv(message, ticket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_needs_whole_hosts_in_order() {
        let hosts = [vec![0, 1, 2], vec![3, 4, 5]];
        let place = Place { hosts: 2, ranks_per_host: 2, host: 1, index: 0 };
        assert_eq!(Place::find(&[1, 0, 5, 3], 2, &hosts), Some(place));
        assert_eq!(Place::find(&[0, 3, 1, 4], 0, &hosts), None, "hosts alternate");
        assert_eq!(Place::find(&[0, 1, 3], 0, &hosts), None, "hosts differ in size");
        assert_eq!(Place::find(&[0, 3], 0, &hosts), None, "one rank per host is better off flat");
        assert_eq!(Place::find(&[0, 1], 0, &hosts), None, "one host needs no network");
    }
}
