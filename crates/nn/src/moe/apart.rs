//! Experts that live on several ranks: rows go to the rank of their expert and come back.
//!
//! Rows are sorted by expert already, so what goes to one rank is one stretch. Ranks tell each other first how many rows of
//! each expert come; what a rank gets lies by sender and is sorted by expert again. A rank without tokens, and an expert
//! without rows, take part in every exchange like all others, so no choice of a router can make ranks wait for ever.
//! (Lepikhin et al.: "GShard", 2020.)

use ferrospeed_collective::ops::{all_to_all_rows, all_to_all_rows_beside};
use ferrospeed_comm::Group;
use ferrospeed_tensor::ops::{self, Routes};
use ferrospeed_tensor::{DType, Result, Tensor, TensorError};

use super::experts::Experts;
use crate::Mode;
use crate::init::Holder;

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
    let by_rank = |counts: &[i64]| -> Vec<usize> {
        counts.chunks(own).map(|chunk| chunk.iter().sum::<i64>().max(0) as usize).collect()
    };
    let (send, receive) = (by_rank(&counts), by_rank(&coming));
    let leaving: usize = send.iter().sum();
    if leaving > total {
        return Err(TensorError::argument("moe", format!("{leaving} rows are counted where {total} are")));
    }
    let leave = ops::narrow(rows, 0, 0, leaving)?;
    let (here, made_beside) =
        all_to_all_rows_beside(&leave, &send, &receive, group, beside).map_err(TensorError::from)?;
    drop(leave);
    // One row more, which no expert gets, so that there is always one.
    let none = |count: usize| Tensor::zeros([count, width], rows.dtype(), device);
    let here = ops::concat(&[here, none(1)?], 0)?;
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
    let back = match total - leaving {
        0 => back,
        rest => ops::concat(&[back, none(rest)?], 0)?,
    };
    Ok((back, made_beside))
}

fn failed(error: ferrospeed_comm::Error) -> TensorError {
    ferrospeed_collective::CollectiveError::from(error).into()
}
