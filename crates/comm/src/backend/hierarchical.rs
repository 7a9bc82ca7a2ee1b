//! Several ranks on each of several hosts: shared memory inside a host, a link between hosts.
//!
//! The ranks of a group must lie host by host, the same number on each. An all_reduce then crosses the network once in
//! each direction instead of once per rank: each rank folds its slice of the host's ranks, takes over the unrounded
//! accumulator of the hosts before, and hands it on; the last host rounds, and the result comes back the same way. It is
//! the same fold in the same rank order, so the bits are those of every other backend. All_gather and broadcast send
//! each byte to a host once and spread it there. Everything else goes over the link directly.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::backend::local::LocalCarrier;
use crate::backend::message::{Incoming, Link, MessageCarrier, Outgoing};
use crate::backend::{Carrier, Message, Ticket};
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

    fn other_hosts(&self) -> impl Iterator<Item = usize> {
        let own = self.host;
        (0..self.hosts).filter(move |host| *host != own)
    }
}

impl<L: Link> HierarchicalCarrier<L> {
    pub(crate) fn new(flat: MessageCarrier<L>, host: LocalCarrier, place: Place) -> Self {
        HierarchicalCarrier { flat, host, place, next_host_sequence: AtomicU64::new(0) }
    }

    /// The ticket of a step inside the host; those are numbered by themselves.
    fn host_ticket(&self, operation: &Collective, ticket: &Ticket) -> Ticket {
        let sequence = self.next_host_sequence.fetch_add(1, Ordering::Relaxed);
        Ticket { fingerprint: operation.fingerprint(ticket.fingerprint.group, sequence), ..ticket.clone() }
    }

    fn all_reduce(&self, operation: &Collective, part: &Part, ticket: &Ticket) -> Result<()> {
        let Some(op) = operation.reduce else { return Ok(()) };
        let (place, dtype) = (self.place, operation.dtype);
        let ranks = self.flat.size();
        let mut carried = Vec::new();
        let host_ticket = self.host_ticket(operation, ticket);
        self.host.reduce_staged(operation, part, &host_ticket, |bases, start, bytes| {
            let elements = bytes / dtype.size();
            carried.resize(elements * accumulator_bytes(dtype), 0u8);
            let carry_bytes = carried.len();
            let carry = carried.as_mut_ptr();
            let slices: Vec<*mut u8> = bases.iter().map(|base| base.wrapping_add(start)).collect();
            let sources: Vec<*const u8> = slices.iter().map(|slice| slice.cast_const()).collect();
            let before = place.host.checked_sub(1).map(|host| place.peer_on(host));
            let after = (place.host + 1 < place.hosts).then(|| place.peer_on(place.host + 1));
            // SAFETY: `carried` and this rank's slice of the host's windows, which nobody else touches in this step.
            unsafe {
                if let Some(peer) = before {
                    self.flat.exchange(
                        &[],
                        &[Incoming { peer, start: carry, bytes: carry_bytes }],
                        ticket,
                    )?;
                }
                let taken = before.map(|_| carry.cast_const());
                if let Some(peer) = after {
                    fold_onwards(dtype, op, taken, &sources, elements, End::PassedOn { accumulator: carry });
                    let handed_on = Outgoing { peer, start: carry, bytes: carry_bytes };
                    let result = Incoming { peer, start: slices[0], bytes };
                    self.flat.exchange(&[handed_on], &[result], ticket)?;
                    for slice in &slices[1..] {
                        std::ptr::copy_nonoverlapping(slices[0], *slice, bytes);
                    }
                } else {
                    let end = End::Rounded { ranks, destinations: &slices };
                    fold_onwards(dtype, op, taken, &sources, elements, end);
                }
                if let Some(peer) = before {
                    self.flat.exchange(&[Outgoing { peer, start: slices[0], bytes }], &[], ticket)?;
                }
            }
            Ok(())
        })
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
