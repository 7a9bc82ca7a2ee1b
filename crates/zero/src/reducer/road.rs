//! The way of gradients between ranks: among whom, in what form, and what multiplies them.
//!
//! A bucket is summed as it is, or, where a share's road has [`Hops`], in integers of four bits
//! (`zero_quantized_gradients`; see `quantized_gradients` for what those spare). All else is the same for both.

use ferrospeed_collective::exchange::{self, Pending};
use ferrospeed_collective::hops::{self, Hops};
use ferrospeed_comm::ReduceOp;
use ferrospeed_placement::buckets::Bucket;
use ferrospeed_placement::stage::Extent;
use ferrospeed_tensor::backend::Unary;
use ferrospeed_tensor::{Tensor, ops};

use super::{InFlight, Reducer};
use crate::error::Result;
use crate::memory::part;
use crate::sharding::Sharding;

/// The way of a share's gradients from the ranks to their average.
#[derive(Debug, Clone)]
pub(crate) struct Road {
    pub(crate) sharding: Sharding,
    /// Multiplies gradients before the sum, and after it; `None` after it means the plain average.
    pub(crate) before: f32,
    pub(crate) after: Option<f32>,
    /// Where they travel as small integers: the hops.
    pub(crate) hops: Option<Hops>,
}

impl Road {
    /// What ranks do with gradients.
    pub(crate) fn operation(&self) -> ReduceOp {
        if self.after.is_some() { ReduceOp::Sum } else { ReduceOp::Avg }
    }

    /// Whether anything multiplies gradients beyond the plain average.
    pub(crate) fn scales(&self) -> bool {
        self.before != 1.0 || self.after.is_some_and(|after| after != 1.0)
    }
}

impl Reducer {
    /// The way of a bucket's gradients.
    pub(crate) fn road(&self, bucket: usize) -> &Road {
        &self.roads[self.buckets[bucket].group]
    }

    /// Whether a bucket's gradients have to be exchanged.
    pub(crate) fn travels(&self, bucket: usize) -> bool {
        !self.is_local && self.road(bucket).sharding.ranks() > 1
    }

    /// What multiplies a bucket's gradients before their sum.
    pub(crate) fn before(&self, bucket: usize) -> f32 {
        if self.is_local { 1.0 } else { self.road(bucket).before }
    }

    /// What multiplies them after it, where that is anything.
    pub(crate) fn after(&self, bucket: usize) -> Option<f32> {
        self.road(bucket).after.filter(|&after| after != 1.0 && !self.is_local)
    }

    /// In the type of the wire, and multiplied by what comes before the sum.
    pub(crate) fn prepared(&self, bucket: usize, gradient: Tensor) -> Result<Tensor> {
        let before = self.before(bucket);
        let gradient = if before == 1.0 {
            gradient
        } else {
            let mut scaled = Tensor::empty(*gradient.shape(), gradient.dtype(), &self.device)?;
            self.device.backend().unary(
                Unary::Affine { scale: before, shift: 0.0 },
                &gradient,
                scaled.out()?,
            )?;
            scaled
        };
        Ok(ops::cast(&gradient, self.wire)?)
    }

    /// Starts the reduction of a bucket, where it is not reduced already.
    pub(super) fn reduce(&self, index: usize, travels: bool) -> Result<Option<InFlight>> {
        if self.stay() {
            return Ok(None);
        }
        let (bucket, buffer) = (&self.buckets[index], self.buffer(index)?);
        let mut own = part(&buffer, bucket.own_start, bucket.own_numel())?;
        if travels && self.placed.facts.owned == Extent::Part {
            own = self.place_of_first(bucket)?.unwrap_or(own);
        }
        let work = travels.then(|| self.exchange(index, &buffer, &own)).transpose()?;
        Ok(Some(InFlight { bucket: index, work, own }))
    }

    /// Starts the exchange of a bucket that lies in `data`; this rank's part arrives in `own`.
    pub(crate) fn exchange(&self, index: usize, data: &Tensor, own: &Tensor) -> Result<Pending> {
        let (bucket, road) = (&self.buckets[index], self.road(index));
        let (levels, op) = (road.sharding.levels(), road.operation());
        Ok(match &road.hops {
            _ if self.placed.facts.owned == Extent::Whole => exchange::all_reduce(levels, data, op)?,
            Some(hops) => hops::reduce_scatter(hops, &self.parcels[index], data, own, op)?,
            None => exchange::reduce_scatter(levels, data, own, &bucket.counts, op)?,
        })
    }

    /// Where the first micro-batch's reduction of a bucket goes without a copy: where it is kept.
    pub(super) fn place_of_first(&self, bucket: &Bucket) -> Result<Option<Tensor>> {
        match (self.kept.get(bucket.group), &bucket.owned[..]) {
            (Some(kept), [owned]) if self.micro_steps == 0 && self.wire == self.kept_type => {
                part(kept, owned.in_part, owned.len).map(Some)
            }
            _ => Ok(None),
        }
    }
}
