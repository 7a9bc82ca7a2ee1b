//! Which gradients travel together, and where each lies in its bucket: pure functions, no memory.
//!
//! Buckets are fixed before the first step and always leave in the same order, so that every rank issues the same
//! collectives whatever order its gradients arrive in. They are filled from the last parameter to the first, which
//! is about the order in which backward produces gradients. Inside a bucket elements lie by owner, so that one
//! reduce-scatter brings every rank its own.

use crate::partition::Layout;

/// A run of elements of one parameter and its place in the bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Index of the parameter among all.
    pub param: usize,
    /// Where the run starts in the parameter.
    pub in_param: usize,
    /// Where it starts in the bucket.
    pub in_bucket: usize,
    /// How many elements.
    pub len: usize,
}

/// A run of elements that this rank owns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owned {
    /// Where the run starts in the bucket.
    pub in_bucket: usize,
    /// Where it starts in this rank's part of the group.
    pub in_part: usize,
    /// How many elements.
    pub len: usize,
}

/// Gradients that travel together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bucket {
    /// Which group they belong to.
    pub group: usize,
    /// Indices of its parameters among all.
    pub params: Vec<usize>,
    /// Elements by owner.
    pub counts: Vec<usize>,
    /// Where everything lies.
    pub places: Vec<Place>,
    /// What this rank owns; neighbouring runs are joined.
    pub owned: Vec<Owned>,
    /// Where this rank's elements start in the bucket.
    pub own_start: usize,
}

impl Bucket {
    /// Elements in it.
    pub fn numel(&self) -> usize {
        self.counts.iter().sum()
    }

    /// Elements of this rank.
    pub fn own_numel(&self) -> usize {
        self.owned.iter().map(|owned| owned.len).sum()
    }

    fn new(group: usize, members: &[(usize, usize)], layout: &Layout, rank: usize) -> Bucket {
        // In the layout's order, so that what one rank owns is one run wherever possible.
        let mut members = members.to_vec();
        let position = |in_group: usize| layout.order.iter().position(|&param| param == in_group);
        members.sort_by_key(|&(_, in_group)| position(in_group));
        let mut bucket = Bucket {
            group,
            params: members.iter().map(|&(param, _)| param).collect(),
            counts: vec![0; layout.ranks],
            places: Vec::new(),
            owned: Vec::new(),
            own_start: 0,
        };
        let mut in_bucket = 0;
        for owner in 0..layout.ranks {
            if owner == rank {
                bucket.own_start = in_bucket;
            }
            for &(param, in_group) in &members {
                let Some(fragment) = layout.fragment(in_group, owner) else { continue };
                bucket.places.push(Place {
                    param,
                    in_param: fragment.in_param,
                    in_bucket,
                    len: fragment.len,
                });
                bucket.counts[owner] += fragment.len;
                if owner == rank {
                    match bucket.owned.last_mut() {
                        Some(last) if last.in_part + last.len == fragment.in_part => last.len += fragment.len,
                        _ => bucket.owned.push(Owned {
                            in_bucket,
                            in_part: fragment.in_part,
                            len: fragment.len,
                        }),
                    }
                }
                in_bucket += fragment.len;
            }
        }
        bucket
    }
}

/// Cuts all groups into buckets of at most `limit` elements; a larger parameter travels alone.
///
/// `groups[g]` lists (index among all parameters, elements) in the order of `layouts[g]`'s indices.
pub fn plan(groups: &[Vec<(usize, usize)>], layouts: &[Layout], rank: usize, limit: u64) -> Vec<Bucket> {
    let mut buckets = Vec::new();
    for (group, params) in groups.iter().enumerate() {
        let mut members: Vec<(usize, usize)> = Vec::new();
        let mut filled = 0u64;
        for (in_group, &(param, numel)) in params.iter().enumerate().rev() {
            if !members.is_empty() && filled + numel as u64 > limit {
                buckets.push(Bucket::new(group, &members, &layouts[group], rank));
                members.clear();
                filled = 0;
            }
            members.push((param, in_group));
            filled += numel as u64;
        }
        if !members.is_empty() {
            buckets.push(Bucket::new(group, &members, &layouts[group], rank));
        }
    }
    // A bucket can leave when its first parameter, the last to get a gradient, has one.
    buckets.sort_by_key(|bucket| std::cmp::Reverse(bucket.params.iter().copied().min()));
    buckets
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_travels_once_and_every_owned_one_comes_home() {
        let numels = [15, 5, 14, 1, 0, 9];
        for ranks in 1..5 {
            for layout in [
                Layout::flat(&numels, ranks, false),
                Layout::flat(&numels, ranks, true),
                Layout::per_parameter(&numels, ranks),
            ] {
                for limit in [1, 16, 1000] {
                    let group: Vec<(usize, usize)> = numels.iter().copied().enumerate().collect();
                    let mut owned_in_all = 0;
                    for rank in 0..ranks {
                        let buckets =
                            plan(std::slice::from_ref(&group), std::slice::from_ref(&layout), rank, limit);
                        let travelled: usize =
                            buckets.iter().flat_map(|b| &b.places).map(|place| place.len).sum();
                        assert_eq!(travelled, numels.iter().sum::<usize>());
                        for bucket in &buckets {
                            assert_eq!(bucket.own_numel(), bucket.counts[rank]);
                            owned_in_all += bucket.own_numel();
                        }
                    }
                    assert_eq!(owned_in_all, numels.iter().sum::<usize>());
                }
            }
        }
    }
}
