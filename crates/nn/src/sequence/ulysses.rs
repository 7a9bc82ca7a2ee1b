//! Attention over whole sequences with some of the heads.
//!
//! Ranks get equally many query heads, or as nearly so as can be, each with the key and value heads that they look at: where
//! there are fewer of these than ranks, or a group of queries lies on two ranks, the same key head goes to several.

use std::ops::Range;

use ferrospeed_collective::ops::{Parts, all_to_all_parts};
use ferrospeed_tensor::ops::{self, AttentionOptions, WeightGrid};
use ferrospeed_tensor::{Device, Result, Tensor, TensorError};

use super::part::SequencePart;

/// The heads that one rank attends with.
#[derive(Debug, Clone, PartialEq, Eq)]
struct HeadShare {
    queries: Range<usize>,
    keys: Range<usize>,
    /// Query heads of one key head.
    group: usize,
}

impl HeadShare {
    fn of(rank: usize, ranks: usize, heads: usize, kv_heads: usize) -> HeadShare {
        let queries = heads * rank / ranks..heads * (rank + 1) / ranks;
        let group = heads / kv_heads;
        let keys = if queries.is_empty() { 0..0 } else { queries.start / group..queries.end.div_ceil(group) };
        HeadShare { queries, keys, group }
    }

    /// Heads that travel to the rank.
    fn width(&self) -> usize {
        self.queries.len() + 2 * self.keys.len()
    }

    /// Where these heads are among all queries, all keys and all values.
    fn order(&self, heads: usize, kv_heads: usize) -> impl Iterator<Item = i64> {
        let of_keys = |first: usize| self.keys.start + first..self.keys.end + first;
        let places = self.queries.clone().chain(of_keys(heads)).chain(of_keys(heads + kv_heads));
        places.map(|head| head as i64)
    }

    /// The key head of each query head, where these do not look at equally many each, in order.
    fn uneven(&self) -> Option<Vec<i64>> {
        let of_query = |query: usize| query / self.group - self.keys.start;
        let looked_at: Vec<usize> = self.queries.clone().map(of_query).collect();
        let even = self.queries.len().is_multiple_of(self.keys.len().max(1))
            && looked_at.iter().enumerate().all(|(at, &key)| key == at * self.keys.len() / looked_at.len());
        (!even).then(|| looked_at.into_iter().map(|key| key as i64).collect())
    }
}

fn indices(places: impl Iterator<Item = i64>, device: &Device) -> Result<Tensor> {
    let places: Vec<i64> = places.collect();
    Tensor::from_slice(&places, [places.len()], device)
}

pub(super) fn attention(
    part: &SequencePart,
    [q, k, v]: [&Tensor; 3],
    options: &AttentionOptions,
) -> Result<Tensor> {
    let (group, device) = (part.group(), q.device());
    let (heads, kv_heads) = (q.sizes()[2], k.sizes()[2]);
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        let why = format!("{heads} query heads cannot share {kv_heads} key heads");
        return Err(TensorError::argument("sequence parallel", why));
    }
    let shares: Vec<HeadShare> =
        (0..group.size()).map(|rank| HeadShare::of(rank, group.size(), heads, kv_heads)).collect();
    let tokens = Parts { dim: 1, sizes: part.counts() };
    let order = indices(shares.iter().flat_map(|share| share.order(heads, kv_heads)), device)?;
    let by_rank = ops::index_select(&ops::concat(&[q.clone(), k.clone(), v.clone()], 2)?, 2, &order)?;
    let widths = Parts { dim: 2, sizes: shares.iter().map(HeadShare::width).collect() };
    let whole = all_to_all_parts(&by_rank, &widths, &tokens, group)?;
    let mixed = attend(&whole, &shares[group.rank()], options)?;
    let queries = Parts { dim: 2, sizes: shares.iter().map(|share| share.queries.len()).collect() };
    Ok(all_to_all_parts(&mixed, &tokens, &queries, group)?)
}

/// Attention with this rank's heads of `whole [batch, tokens, heads that travelled, dim]`.
fn attend(whole: &Tensor, share: &HeadShare, options: &AttentionOptions) -> Result<Tensor> {
    if share.queries.is_empty() {
        // Nothing, but what comes back in backward must pass here.
        return Ok(whole.clone());
    }
    let split = ops::split(whole, 2, &[share.queries.len(), share.keys.len(), share.keys.len()])?;
    let [q, k, v] = &split[..] else { unreachable!("three parts were asked for") };
    let slopes = options.alibi_slopes.as_ref();
    let slopes = slopes.map(|slopes| ops::narrow(slopes, 0, share.queries.start, share.queries.len()));
    let weights = options.weights.map(|grid| WeightGrid { first: [share.queries.start, 0, 0], ..grid });
    let options = AttentionOptions { alibi_slopes: slopes.transpose()?, weights, ..options.clone() };
    match share.uneven() {
        None => ops::attention(q, k, v, &options),
        Some(looked_at) => {
            let looked_at = indices(looked_at.into_iter(), whole.device())?;
            let [k, v] = [k, v].map(|heads| ops::index_select(heads, 2, &looked_at));
            ops::attention(q, &k?, &v?, &options)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_shared_out_with_the_keys_they_look_at() {
        let shares = |ranks, heads, kv| -> Vec<HeadShare> {
            (0..ranks).map(|rank| HeadShare::of(rank, ranks, heads, kv)).collect()
        };
        // Eight queries on two key heads for four ranks: each key head goes to two.
        let keys: Vec<Range<usize>> = shares(4, 8, 2).into_iter().map(|share| share.keys).collect();
        assert_eq!(keys, [0..1, 0..1, 1..2, 1..2]);
        // Three groups of two on two ranks: the middle one lies on both.
        let uneven = shares(2, 6, 3);
        assert_eq!((uneven[0].keys.clone(), uneven[1].keys.clone()), (0..2, 1..3));
        assert_eq!((uneven[0].uneven(), uneven[1].uneven()), (Some(vec![0, 0, 1]), Some(vec![0, 1, 1])));
        assert!(shares(2, 8, 4).iter().all(|share| share.uneven().is_none() && share.width() == 8));
        // More ranks than heads: somebody has none.
        assert_eq!(shares(4, 3, 3).iter().map(HeadShare::width).collect::<Vec<_>>(), [0, 3, 3, 3]);
    }
}
