//! Exchanges of tensors, wherever their memory is.
//!
//! On a host device the ranks read and write the tensors themselves, and so they do on GPUs when each has one of its own and
//! NCCL connects them. Otherwise a GPU's memory is copied to the host, exchanged there and copied back when somebody
//! waits (`staging.rs`): several ranks can then share one GPU.

use std::ops::Range;

use ferrospeed_comm::{DType as CommType, Group, ReduceOp, Region, Work};
use ferrospeed_tensor::{DType, Tensor};

use crate::error::Result;
use crate::staging::Room;

/// An exchange under way. Its tensors are not touched before [`Pending::wait`] returns.
pub struct Pending {
    work: Work,
    /// What remains to be done with what arrived.
    landing: Option<Landing>,
}

enum Landing {
    /// To send it from the host to its tensor.
    Room(Room, Tensor),
    /// Something else.
    Other(Box<dyn FnOnce() -> Result<()> + Send>),
}

impl Pending {
    /// Of which `finish` makes the result, once `work` is done and somebody waits.
    pub(crate) fn finished_by(work: Work, finish: impl FnOnce() -> Result<()> + Send + 'static) -> Pending {
        Pending { work, landing: Some(Landing::Other(Box::new(finish))) }
    }

    /// Whether [`Pending::wait`] would return at once.
    pub fn is_done(&self) -> bool {
        self.work.is_done()
    }

    /// Waits until the result is in its tensor.
    pub fn wait(self) -> Result<()> {
        self.work.wait()?;
        match self.landing {
            None => Ok(()),
            Some(Landing::Other(finish)) => finish(),
            Some(Landing::Room(room, target)) => room.land(&target),
        }
    }
}

/// The ranks of a reduction: one group, or two of which the second continues what the first has made.
#[derive(Debug, Clone, Copy)]
pub struct Levels<'a> {
    /// The ranks that reduce first.
    pub first: &'a Group,
    /// The ranks that reduce the results of the first.
    pub second: Option<&'a Group>,
}

impl<'a> From<&'a Group> for Levels<'a> {
    fn from(group: &'a Group) -> Levels<'a> {
        Levels { first: group, second: None }
    }
}

impl<'a> Levels<'a> {
    /// As they reach a tensor's memory where it is; `None` when it has to be copied to the host.
    fn in_place(self, tensor: &Tensor, op: ReduceOp) -> Result<Option<Levels<'a>>> {
        let is_host = tensor.device().backend().is_host();
        if !is_host && (tensor.dtype() == DType::Bool || matches!(op, ReduceOp::BitAnd | ReduceOp::BitOr)) {
            return Ok(None);
        }
        let second = self.second.map(|second| in_place(second, tensor)).transpose()?;
        Ok(match (in_place(self.first, tensor)?, second) {
            (Some(first), None) => Some(Levels { first, second: None }),
            (Some(first), Some(Some(second))) => Some(Levels { first, second: Some(second) }),
            _ => None,
        })
    }

    /// The second level of a reduction, where there is one.
    fn continued(self, first: Work, data: &Region, dtype: CommType, op: ReduceOp) -> Work {
        match self.second {
            Some(second) => second.all_reduce_after(&first, data, dtype, op),
            None => first,
        }
    }
}

/// The ranks as they reach a tensor's memory where it is; `None` when it has to be copied to the host.
fn in_place<'a>(group: &'a Group, tensor: &Tensor) -> Result<Option<&'a Group>> {
    if tensor.device().backend().is_host() { Ok(Some(group)) } else { Ok(group.on_devices()?) }
}

/// A tensor's bytes for a collective.
fn region(tensor: &Tensor) -> Region {
    // SAFETY: the tensor keeps its buffer alive; whoever starts the collective does not touch these bytes until it
    // has waited for it.
    unsafe { Region::from_raw(tensor.address().as_ptr(), tensor.size_bytes(), tensor.keep_alive()) }
}

/// Our element type as `comm` calls it.
fn comm_type(dtype: DType) -> CommType {
    match dtype {
        DType::F32 => CommType::F32,
        DType::BF16 => CommType::BF16,
        DType::F16 => CommType::F16,
        DType::I64 => CommType::I64,
        DType::I32 => CommType::I32,
        DType::U8 => CommType::U8,
        DType::Bool => CommType::Bool,
    }
}

/// Every rank's tensor becomes the reduction of all.
pub fn all_reduce<'a>(ranks: impl Into<Levels<'a>>, data: &Tensor, op: ReduceOp) -> Result<Pending> {
    let (ranks, dtype) = (ranks.into(), comm_type(data.dtype()));
    if let Some(ranks) = ranks.in_place(data, op)? {
        let first = ranks.first.all_reduce_async(&region(data), dtype, op);
        return Ok(Pending { work: ranks.continued(first, &region(data), dtype, op), landing: None });
    }
    let (room, bytes) = Room::filled_from(data)?;
    let first = ranks.first.all_reduce_async(&bytes, dtype, op);
    let work = ranks.continued(first, &bytes, dtype, op);
    Ok(Pending { work, landing: Some(Landing::Room(room, data.clone())) })
}

/// `result` becomes the reduction of this rank's stretch of every rank's tensor; rank `r` of the first level has `counts[r]`
/// elements of it. It may be that stretch itself.
pub fn reduce_scatter<'a>(
    ranks: impl Into<Levels<'a>>,
    data: &Tensor,
    result: &Tensor,
    counts: &[usize],
    op: ReduceOp,
) -> Result<Pending> {
    let (ranks, dtype) = (ranks.into(), comm_type(data.dtype()));
    if let Some(ranks) = ranks.in_place(data, op)? {
        let result = region(result);
        let first = ranks.first.reduce_scatter_unequal_async(&region(data), &result, counts, dtype, op);
        return Ok(Pending { work: ranks.continued(first, &result, dtype, op), landing: None });
    }
    let (room, arrived) = Room::awaiting(result)?;
    let sent = Room::filled_from(data)?.1;
    let first = ranks.first.reduce_scatter_unequal_async(&sent, &arrived, counts, dtype, op);
    let work = ranks.continued(first, &arrived, dtype, op);
    Ok(Pending { work, landing: Some(Landing::Room(room, result.clone())) })
}

/// A tensor of which each rank has a stretch, `own` here, becomes whole on all; rank `r` has `counts[r]` elements. For
/// host memory only.
pub fn all_gather_unequal(
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
pub fn all_gather(group: &Group, pairs: &[(Tensor, Tensor)], identity: u64) -> Result<Vec<Pending>> {
    let Some((first, _)) = pairs.first() else { return Ok(Vec::new()) };
    let dtype = comm_type(first.dtype());
    if let Some(group) = in_place(group, first)? {
        let regions: Vec<_> = pairs.iter().map(|(own, all)| (region(own), region(all))).collect();
        let work = group.all_gather_identified(&regions, dtype, identity);
        return Ok(pairs.iter().map(|_| Pending { work: work.clone(), landing: None }).collect());
    }
    let (mut regions, mut rooms) = (Vec::with_capacity(pairs.len()), Vec::with_capacity(pairs.len()));
    for (own, all) in pairs {
        let (room, arrived) = Room::awaiting(all)?;
        regions.push((Room::filled_from(own)?.1, arrived));
        rooms.push((room, all.clone()));
    }
    let work = group.all_gather_identified(&regions, dtype, identity);
    let pending = |(room, all)| Pending { work: work.clone(), landing: Some(Landing::Room(room, all)) };
    Ok(rooms.into_iter().map(pending).collect())
}

/// Rank `r` gets `send[r]` elements of this rank's tensor, and `result` gets `receive[r]` elements of rank `r`'s, in order.
pub fn all_to_all(
    group: &Group,
    data: &Tensor,
    result: &Tensor,
    send: &[usize],
    receive: &[usize],
) -> Result<Pending> {
    let dtype = comm_type(data.dtype());
    if let Some(group) = in_place(group, data)? {
        let work = group.all_to_all_unequal_async(&region(data), &region(result), send, receive, dtype);
        return Ok(Pending { work, landing: None });
    }
    let (room, arrived) = Room::awaiting(result)?;
    let sent = Room::filled_from(data)?.1;
    let work = group.all_to_all_unequal_async(&sent, &arrived, send, receive, dtype);
    Ok(Pending { work, landing: Some(Landing::Room(room, result.clone())) })
}

/// Every rank's tensor becomes the root's.
pub fn broadcast(group: &Group, data: &Tensor, root: usize) -> Result<Pending> {
    let dtype = comm_type(data.dtype());
    if let Some(group) = in_place(group, data)? {
        return Ok(Pending { work: group.broadcast_async(&region(data), dtype, root), landing: None });
    }
    let (room, bytes) = Room::filled_from(data)?;
    let work = group.broadcast_async(&bytes, dtype, root);
    Ok(Pending { work, landing: Some(Landing::Room(room, data.clone())) })
}

/// Sends a tensor to a rank of the group.
pub fn send(group: &Group, data: &Tensor, to: usize, tag: u64) -> Result<Pending> {
    let dtype = comm_type(data.dtype());
    // NCCL's messages would wait for its collectives.
    let bytes = if data.device().backend().is_host() { region(data) } else { Room::filled_from(data)?.1 };
    Ok(Pending { work: group.send_async(&bytes, dtype, to, tag), landing: None })
}

/// Receives a tensor from a rank of the group.
pub fn receive(group: &Group, result: &Tensor, from: usize, tag: u64) -> Result<Pending> {
    let dtype = comm_type(result.dtype());
    if result.device().backend().is_host() {
        return Ok(Pending { work: group.recv_async(&region(result), dtype, from, tag), landing: None });
    }
    let (room, arrived) = Room::awaiting(result)?;
    let work = group.recv_async(&arrived, dtype, from, tag);
    Ok(Pending { work, landing: Some(Landing::Room(room, result.clone())) })
}
