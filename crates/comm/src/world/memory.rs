//! Registered memory: how the ranks of a host come to map each other's segments, or one in common.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Instant;

use super::WorldInner;
use crate::error::{Error, Result};
use crate::group::Group;
use crate::op::{Collective, Kind, Part};
use crate::segment::{self, Registered};
use crate::sys::SharedMemory;

/// A segment of one rank, as its peers find it.
#[derive(serde::Serialize, serde::Deserialize)]
struct SegmentAddress {
    pid: u32,
    descriptor: i32,
    mapped_bytes: usize,
}

/// Under which name a rank's segment is announced.
fn segment_key(id: u64, rank: usize) -> String {
    format!("segment/{id}/{rank}")
}

impl WorldInner {
    pub(crate) fn allocate(&self, group: &Group, bytes: usize) -> Result<Registered> {
        let deadline = Instant::now() + self.limits.deadline;
        let (id, peers) = (group.next_segment(), self.neighbours(group));
        let (memory, descriptor) = segment::create(bytes)?;
        self.announce_segment(id, &memory, &descriptor)?;
        let mut memories = HashMap::from([(self.rank, memory)]);
        for rank in peers.into_iter().filter(|rank| *rank != self.rank) {
            let address = self.segment_address(id, rank, bytes, deadline)?;
            memories.insert(rank, SharedMemory::open(address.pid, address.descriptor, address.mapped_bytes)?);
        }
        // Peers open the memory through our descriptor: it may close only when all have.
        group.barrier()?;
        drop(descriptor);
        self.store.remove(&segment_key(id, self.rank))?;
        Ok(self.segments.add(id, self.rank, bytes, memories))
    }

    pub(crate) fn allocate_shared(&self, group: &Group, bytes: usize) -> Result<Registered> {
        let deadline = Instant::now() + self.limits.deadline;
        let (id, peers) = (group.next_segment(), self.neighbours(group));
        let creator = peers.first().copied().unwrap_or(self.rank);
        let (memory, descriptor) = if creator == self.rank {
            let (memory, descriptor) = segment::create(bytes)?;
            self.announce_segment(id, &memory, &descriptor)?;
            (memory, Some(descriptor))
        } else {
            let address = self.segment_address(id, creator, bytes, deadline)?;
            let expected = segment::mapped_bytes(bytes);
            if address.mapped_bytes != expected {
                let problem = format!(
                    "allocate_shared({bytes} bytes) #{id}: rank {creator} asked for another size \
                     ({} bytes of pages, not {expected}); all ranks of a host must ask for the same",
                    address.mapped_bytes
                );
                return Err(Error::Backend { backend: "local", problem });
            }
            (SharedMemory::open(address.pid, address.descriptor, address.mapped_bytes)?, None)
        };
        group.barrier()?;
        if descriptor.is_some() {
            self.store.remove(&segment_key(id, self.rank))?;
        }
        Ok(self.segments.add_shared(id, bytes, memory, peers))
    }

    /// The ranks of a group that are on this host, in the group's order.
    fn neighbours(&self, group: &Group) -> Vec<usize> {
        let host = self.my_host();
        group.ranks().iter().copied().filter(|rank| host.contains(rank)).collect()
    }

    /// Tells the peers where they find a segment of this rank.
    fn announce_segment(&self, id: u64, memory: &SharedMemory, descriptor: &OwnedFd) -> Result<()> {
        let address = SegmentAddress {
            pid: std::process::id(),
            descriptor: descriptor.as_raw_fd(),
            mapped_bytes: memory.bytes(),
        };
        self.store.set(&segment_key(id, self.rank), serde_json::to_vec(&address).unwrap_or_default())
    }

    /// Where the segment of a peer is found.
    fn segment_address(
        &self,
        id: u64,
        rank: usize,
        bytes: usize,
        deadline: Instant,
    ) -> Result<SegmentAddress> {
        let Some(value) = self.store.wait(&segment_key(id, rank), deadline, &self.state)? else {
            let (name, last) = (self.state.name(rank), self.state.last_operation(rank));
            let missing = vec![format!("{name} (its last operation: {last})")];
            let operation = format!("allocate({bytes} bytes) #{id}");
            return Err(Error::Deadline { operation, waited: self.limits.deadline, missing });
        };
        serde_json::from_slice(&value)
            .map_err(|error| Error::rendezvous(format!("the segment of rank {rank} is malformed: {error}")))
    }

    /// Refuses operations that would write one rank's result into memory that all ranks have in common.
    pub(crate) fn check_shared(&self, operation: &Collective) -> Result<()> {
        if matches!(operation.kind, Kind::AllGather | Kind::Broadcast | Kind::Barrier) {
            return Ok(());
        }
        let shared = |part: &Part| self.segments.is_shared(&part.output);
        if operation.parts.iter().any(|part| !part.output.is_empty() && shared(part)) {
            let problem = "its output lies in memory that all ranks of the host have in common: only an \
                           all_gather or a broadcast gives all of them the same result";
            return Err(operation.invalid(problem));
        }
        Ok(())
    }
}
