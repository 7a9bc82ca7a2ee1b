//! New values for every rank, below stage 3: each rank has updated its own part, and all read all of them.
//!
//! They are gathered when a step ends. Where states are offloaded, the step ends before the update does: then each tile is
//! gathered when it is updated, on the thread that updates, in an order that all ranks share, over a group of its own, so
//! that whatever the ranks exchange during forward goes its own way.

use std::ops::Range;

use ferrospeed_collective::exchange;
use ferrospeed_comm::{Group, World};
use ferrospeed_tensor::{Category, Device, Out, Tensor};

use crate::attached::State;
use crate::error::{Result, ZeroError};
use crate::memory::{is_common, part};
use crate::sharding::Sharding;
use crate::store::{Share, ZeroStore};

/// The ranks that below stage 3 send each other what a step made of a share.
pub(crate) fn published_among(share: &Share) -> Option<&Group> {
    share.owners().filter(|_| share.placed.is_published())
}

/// How tiles reach all ranks while they run a forward.
#[derive(Clone)]
pub(crate) struct Publishing {
    group: Group,
    /// Whether all ranks read the same memory, so that nothing has to move.
    in_common: bool,
}

impl Publishing {
    /// Among the ranks of the common sharding, which are all there are. All ranks call it together.
    pub(crate) fn open(world: &World, sharding: &Sharding, device: &Device) -> Result<Publishing> {
        let in_common = is_common(&sharding.shard, device);
        let group = world.named_group(sharding.shard.ranks(), Some("published tiles"))?;
        let why = "new values are placed to go to ranks that this one is not of: a fault of the store";
        let group = group.ok_or_else(|| ZeroError::Request(why.into()))?;
        Ok(Publishing { group, in_common })
    }

    /// Brings all ranks a tile of everybody's part, from `start` of each on.
    pub(crate) fn send(&self, values: &Tensor, part_numel: usize, tile: &Range<usize>) -> Result<()> {
        if self.in_common {
            return Ok(self.group.barrier()?);
        }
        let (ranks, own, len) = (self.group.size(), self.group.rank(), tile.len());
        let place = |rank: usize| part(values, rank * part_numel + tile.start, len);
        let all = Tensor::empty_in([ranks * len], values.dtype(), values.device(), Category::Buffers)?;
        let pair = (place(own)?, all.clone());
        let pending = exchange::all_gather(&self.group, &[pair], tile.start as u64)?;
        pending.into_iter().try_for_each(exchange::Pending::wait)?;
        for rank in (0..ranks).filter(|rank| *rank != own) {
            let to = place(rank)?;
            // SAFETY: a tile of values that are being updated, which nobody reads before it is done.
            let to = unsafe { Out::vouched(&to) };
            values.device().backend().copy(&part(&all, rank * len, len)?, to)?;
        }
        Ok(())
    }
}

impl ZeroStore {
    /// Brings every rank the new values: below stage 3 they are gathered, in stage 3 old copies are dropped.
    pub(crate) fn publish(&self, state: &mut State) -> Result<()> {
        if let Some(residency) = &mut state.residency {
            return residency.clear();
        }
        let mut pending = Vec::new();
        for (group, share) in state.shares.iter().enumerate() {
            let Some(owners) = published_among(share) else { continue };
            let pair = (share.own_values()?, share.values.memory()?.clone());
            pending.extend(exchange::all_gather(owners, &[pair], group as u64)?);
        }
        Ok(pending.into_iter().try_for_each(exchange::Pending::wait)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tile_of_every_rank_comes_to_its_place_and_the_rest_stays() {
        const PART: usize = 10;
        let start = |world: World| {
            std::thread::spawn(move || {
                let rank = world.rank();
                let own: Vec<f32> = (0..2 * PART).map(|at| (1000 * (rank + 1) + at) as f32).collect();
                let values = Tensor::from_slice(&own, [2 * PART], &ferrospeed_cpu::device()).unwrap();
                let publishing = Publishing { group: world.group(), in_common: false };
                publishing.send(&values, PART, &(3..7)).unwrap();
                (own, values.to_vec_f32().unwrap())
            })
        };
        let threads: Vec<_> = World::threads(2).into_iter().map(start).collect();
        let ranks: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        for (rank, (before, after)) in ranks.iter().enumerate() {
            for at in 0..2 * PART {
                let owner = at / PART;
                let is_sent = (3..7).contains(&(at % PART));
                let expected = if is_sent { ranks[owner].0[at] } else { before[at] };
                assert_eq!(after[at], expected, "{at} of rank {rank}");
            }
        }
    }
}
