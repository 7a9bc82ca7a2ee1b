//! Experts that live on several ranks: rows go to the rank of their expert and come back.
//!
//! Rows are sorted by expert already, so what goes to one rank is one stretch. Ranks tell each other first how many rows of
//! each expert come; what a rank gets lies by sender and is sorted by expert again. A rank without tokens, and an expert
//! without rows, take part in every exchange like all others, so no choice of a router can make ranks wait for ever.
//! (Lepikhin et al.: "GShard", 2020.)
//!
//! Where all ranks have the same rows, as those that serve one model together, none need leave: each rank computes the rows of
//! its experts, and the results go to all.

use ferrospeed_collective::ops::{all_to_all_rows, all_to_all_rows_beside};
use ferrospeed_comm::Group;
use ferrospeed_tensor::ops::{self, Routes};
use ferrospeed_tensor::{DType, Result, Tensor, TensorError};

use super::experts::Experts;
use crate::Mode;
use crate::init::Holder;

/// The ranks that hold different experts of a layer.
#[derive(Debug, Clone)]
pub struct ExpertRanks {
    /// Which.
    pub group: Group,
    /// What they have to send to the experts.
    pub tokens: RankTokens,
}

/// Whose tokens the ranks of a group have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RankTokens {
    /// Each its own, as in training.
    Own,
    /// All of them the same, to the bit. Without gradients.
    Same,
}

impl From<&Group> for ExpertRanks {
    /// Ranks with tokens of their own.
    fn from(group: &Group) -> ExpertRanks {
        ExpertRanks { group: group.clone(), tokens: RankTokens::Own }
    }
}

/// The rank that holds an expert of `count`: equal stretches, in the order of ranks.
pub(super) fn holder(expert: usize, count: usize, ranks: usize) -> Holder {
    Holder { ranks, rank: expert / count.div_ceil(ranks).max(1) }
}

/// Refuses stretches that are not equal.
pub(super) fn check_division(count: usize, ranks: usize) -> Result<()> {
    if count > 0 && count.is_multiple_of(ranks) {
        return Ok(());
    }
    let why =
        format!("{count} experts cannot be divided over {ranks} ranks: choose an ep_size that divides them");
    Err(TensorError::argument("moe", why))
}

/// As [`Experts::forward`], where the experts of `counts` are spread over the ranks of a group and `experts` are this rank's.
/// While rows are on their way to them, `beside` does what needs none of it.
pub(super) fn forward<T>(
    experts: &Experts,
    group: &Group,
    (rows, counts): (&Tensor, &Tensor),
    mode: Mode,
    beside: impl FnOnce() -> Result<T>,
) -> Result<(Tensor, T)> {
    let (total, width, device) = (rows.sizes()[0], rows.shape().last(), rows.device());
    let counts = counts.to_vec::<i64>()?;
    let own = counts.len() / group.size();
    // By sender, how many rows of each of this rank's experts come.
    let mut coming = vec![0i64; counts.len()];
    group.all_to_all(&counts, &mut coming).map_err(failed)?;
    let (send, receive) = (by_rank(&counts, own), by_rank(&coming, own));
    let leaving = counted(&send, total)?;
    let leave = ops::narrow(rows, 0, 0, leaving)?;
    let (here, made_beside) =
        all_to_all_rows_beside(&leave, &send, &receive, group, beside).map_err(TensorError::from)?;
    drop(leave);
    // One row more, which no expert gets, so that there is always one.
    let here = ops::concat(&[here, Tensor::zeros([1, width], rows.dtype(), device)?], 0)?;
    let mut choices = Vec::with_capacity(here.sizes()[0]);
    for chunk in coming.chunks(own) {
        for (expert, &count) in chunk.iter().enumerate() {
            choices.extend(std::iter::repeat_n(expert as i64, count.max(0) as usize));
        }
    }
    choices.push(own as i64);
    let routes = Routes::new(&Tensor::from_slice(&choices, [choices.len(), 1], device)?, own)?;
    let made = experts.forward(&routes.spread(&here)?, routes.counts(), mode)?;
    let ones = Tensor::full([choices.len(), 1], 1.0, DType::F32, device)?;
    let made = ops::narrow(&routes.collect(&made, &ones)?, 0, 0, choices.len() - 1)?;
    let back = all_to_all_rows(&made, &receive, &send, group).map_err(TensorError::from)?;
    Ok((filled(back, rows, leaving)?, made_beside))
}

/// As [`Experts::forward`], where the experts of `counts` are spread over ranks that all have these rows, and `experts` are
/// this rank's.
pub(super) fn forward_same(
    experts: &Experts,
    group: &Group,
    (rows, counts): (&Tensor, &Tensor),
    mode: Mode,
) -> Result<Tensor> {
    if mode == Mode::Train {
        let why =
            "ranks with the same tokens cannot train experts; build the mixture for tokens of their own";
        return Err(TensorError::argument("moe", why));
    }
    let counts = counts.to_vec::<i64>()?;
    let (own, rank) = (counts.len() / group.size(), group.rank());
    let held = by_rank(&counts, own);
    let used = counted(&held, rows.sizes()[0])?;
    let (first, count) = (held[..rank].iter().sum(), held[rank]);
    let mut made = ops::narrow(rows, 0, first, count)?;
    if count > 0 {
        let counts = Tensor::from_slice(&counts[rank * own..(rank + 1) * own], [own], rows.device())?;
        made = experts.forward(&made, &counts, mode)?;
    }
    let for_all = ops::concat(&vec![made; group.size()], 0)?;
    let joined = all_to_all_rows(&for_all, &vec![count; group.size()], &held, group);
    filled(joined.map_err(TensorError::from)?, rows, used)
}

/// How many rows go to the experts of each rank, which has `own` of them.
fn by_rank(counts: &[i64], own: usize) -> Vec<usize> {
    counts.chunks(own).map(|chunk| chunk.iter().sum::<i64>().max(0) as usize).collect()
}

/// How many rows go to any expert, of `total`.
fn counted(held: &[usize], total: usize) -> Result<usize> {
    let used: usize = held.iter().sum();
    if used <= total {
        return Ok(used);
    }
    Err(TensorError::argument("moe", format!("{used} rows are counted where {total} are")))
}

/// The `used` rows that experts made, and zeros for the others of `rows`.
fn filled(made: Tensor, rows: &Tensor, used: usize) -> Result<Tensor> {
    match rows.sizes()[0] - used {
        0 => Ok(made),
        rest => {
            let none = Tensor::zeros([rest, rows.shape().last()], rows.dtype(), rows.device())?;
            ops::concat(&[made, none], 0)
        }
    }
}

fn failed(error: ferrospeed_comm::Error) -> TensorError {
    ferrospeed_collective::CollectiveError::from(error).into()
}
