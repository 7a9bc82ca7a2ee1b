//! Collectives over tensors, wherever their memory is.
//!
//! On a host device the ranks read and write the tensors themselves, and so they do on GPUs when each has one of its own and
//! NCCL connects them. Otherwise a GPU's memory is copied to the host, exchanged there and copied back when somebody
//! waits: several ranks can then share one GPU.

use std::ops::Range;

use ferrospeed_comm::{DType, Group, ReduceOp, Region, Work};
use ferrospeed_tensor::Tensor;

use crate::error::Result;
use crate::memory::{comm_type, region};
use crate::sharding::Sharding;

/// An exchange under way. Its tensors are not touched before [`Pending::wait`] returns.
pub(crate) struct Pending {
    work: Work,
    /// Where the result arrives on the host, and the tensor it is for.
    landing: Option<(Region, Tensor)>,
}

impl Pending {
    /// Whether [`Pending::wait`] would return at once.
    pub(crate) fn is_done(&self) -> bool {
        self.work.is_done()
    }

    /// Waits until the result is in its tensor.
    pub(crate) fn wait(self) -> Result<()> {
        self.work.wait()?;
        if let Some((arrived, target)) = self.landing {
            // SAFETY: the exchange is over, and nobody else knows this region.
            let bytes = unsafe { arrived.as_slice::<u8>() };
            target.device().backend().copy_from_host(bytes, &target)?;
        }
        Ok(())
    }
}

/// The ranks as they reach a tensor's memory where it is; `None` when it has to be copied to the host.
fn in_place<'a>(group: &'a Group, tensor: &Tensor) -> Option<&'a Group> {
    if tensor.device().backend().is_host() { Some(group) } else { group.on_devices() }
}

/// A copy of a device's tensor on the host.
fn staged(tensor: &Tensor) -> Result<Region> {
    let copy = Region::zeroed(tensor.size_bytes());
    // SAFETY: the region was just made and nobody else knows it.
    let bytes = unsafe { copy.as_mut_slice::<u8>() };
    tensor.device().backend().copy_to_host(tensor, bytes)?;
    Ok(copy)
}

/// The groups of a sharding as they reach a tensor's memory where it is; `None` when it has to be copied to the host.
fn both_in_place<'a>(sharding: &'a Sharding, tensor: &Tensor) -> Option<(&'a Group, Option<&'a Group>)> {
    let shard = in_place(&sharding.shard, tensor)?;
    match &sharding.replicas {
        Some(replicas) => Some((shard, Some(in_place(replicas, tensor)?))),
        None => Some((shard, None)),
    }
}

/// The second level of a reduction, where there is one.
fn over_replicas(first: Work, replicas: Option<&Group>, data: &Region, dtype: DType, op: ReduceOp) -> Work {
    replicas.map_or(first.clone(), |replicas| replicas.all_reduce_after(&first, data, dtype, op))
}

/// Every rank's tensor becomes the reduction of all: within shards first, then between them.
pub(crate) fn all_reduce(sharding: &Sharding, data: &Tensor, op: ReduceOp) -> Result<Pending> {
    let dtype = comm_type(data.dtype());
    if let Some((shard, replicas)) = both_in_place(sharding, data) {
        let first = shard.all_reduce_async(&region(data), dtype, op);
        return Ok(Pending { work: over_replicas(first, replicas, &region(data), dtype, op), landing: None });
    }
    let copy = staged(data)?;
    let first = sharding.shard.all_reduce_async(&copy, dtype, op);
    let work = over_replicas(first, sharding.replicas.as_ref(), &copy, dtype, op);
    Ok(Pending { work, landing: Some((copy, data.clone())) })
}

/// `result` becomes the reduction of this rank's stretch of every rank's tensor; rank `r` of the shard has `counts[r]`
/// elements of it. It may be that stretch itself.
pub(crate) fn reduce_scatter(
    sharding: &Sharding,
    data: &Tensor,
    result: &Tensor,
    counts: &[usize],
    op: ReduceOp,
) -> Result<Pending> {
    let dtype = comm_type(data.dtype());
    if let Some((shard, replicas)) = both_in_place(sharding, data) {
        let result = region(result);
        let first = shard.reduce_scatter_unequal_async(&region(data), &result, counts, dtype, op);
        return Ok(Pending { work: over_replicas(first, replicas, &result, dtype, op), landing: None });
    }
    let arrived = Region::zeroed(result.size_bytes());
    let first = sharding.shard.reduce_scatter_unequal_async(&staged(data)?, &arrived, counts, dtype, op);
    let work = over_replicas(first, sharding.replicas.as_ref(), &arrived, dtype, op);
    Ok(Pending { work, landing: Some((arrived, result.clone())) })
}

/// A tensor of which each rank has a stretch, `own` here, becomes whole on all; rank `r` has `counts[r]` elements. For
/// host memory only.
pub(crate) fn all_gather_unequal(
    group: &Group,
    data: &Tensor,
    own: Range<usize>,
    counts: &[usize],
) -> Result<Pending> {
    let (all, size) = (region(data), data.dtype().size_bytes());
    let stretch = all.slice(own.start * size..own.end * size);
    let work = group.all_gather_unequal_async(&stretch, &all, counts, comm_type(data.dtype()));
    Ok(Pending { work, landing: None })
}

/// One exchange for several pairs: each second tensor becomes all ranks' first ones, end to end. Ranks that bring tensors
/// of another `identity` disagree, though they be as large.
pub(crate) fn all_gather(group: &Group, pairs: &[(Tensor, Tensor)], identity: u64) -> Result<Vec<Pending>> {
    let Some((first, _)) = pairs.first() else { return Ok(Vec::new()) };
    let dtype = comm_type(first.dtype());
    if let Some(group) = in_place(group, first) {
        let regions: Vec<_> = pairs.iter().map(|(own, all)| (region(own), region(all))).collect();
        let work = group.all_gather_identified(&regions, dtype, identity);
        return Ok(pairs.iter().map(|_| Pending { work: work.clone(), landing: None }).collect());
    }
    let mut regions = Vec::with_capacity(pairs.len());
    for (own, all) in pairs {
        regions.push((staged(own)?, Region::zeroed(all.size_bytes())));
    }
    let work = group.all_gather_identified(&regions, dtype, identity);
    let pending = |((_, all), (_, arrived)): (&(Tensor, Tensor), (Region, Region))| Pending {
        work: work.clone(),
        landing: Some((arrived, all.clone())),
    };
    Ok(pairs.iter().zip(regions).map(pending).collect())
}
