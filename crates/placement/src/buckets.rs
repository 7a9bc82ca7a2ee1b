//! Which gradients travel together, and where each lies in its bucket: pure functions, no memory.
//!
//! Buckets are fixed before the first step and always leave in the same order, so that every rank issues the same
//! collectives whatever order its gradients arrive in. They are filled from the last parameter to the first, which
//! is about the order in which backward produces gradients. Inside a bucket elements lie by owner, so that one
//! reduce-scatter brings every rank its own.

use crate::facts::Request;
use crate::layout::Layout;
use crate::share::Share;

/// A run of elements of one parameter and its place in the bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
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
    /// Where each of them lies, in the order of `params`.
    pub places: Vec<Vec<Place>>,
    /// What this rank owns; neighbouring runs are joined.
    pub owned: Vec<Owned>,
    /// Where this rank's elements start in the bucket.
    pub own_start: usize,
    /// What is special about its parameters.
    pub kind: Kind,
}

/// How a parameter's gradient travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// With others, as soon as they are there.
    Ordinary,
    /// Alone: a table of which few rows have gradients, and only those travel.
    Rows,
    /// With others of its kind, when backward is over: a leaf module's, for which some ranks may have no gradient at all.
    Leaf,
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

    /// Where the gradient of the parameter at `seat` starts, if all of it lies in one stretch, in its own order.
    pub fn whole_place(&self, seat: usize) -> Option<usize> {
        let places = &self.places[seat];
        let start = places.first()?.in_bucket;
        places.iter().all(|place| place.in_bucket == start + place.in_param).then_some(start)
    }

    /// Where an element that this rank owns lies in its part of the group.
    pub fn in_part(&self, in_bucket: usize) -> usize {
        let run = self.owned.partition_point(|owned| owned.in_bucket <= in_bucket);
        self.owned[run - 1].in_part + (in_bucket - self.owned[run - 1].in_bucket)
    }

    /// `members` are (index among all parameters, index in the group), in the order in which the layout has them.
    fn new(group: usize, members: &[(usize, usize)], layout: &Layout, rank: usize, kind: Kind) -> Bucket {
        let mut bucket = Bucket {
            group,
            params: members.iter().map(|&(param, _)| param).collect(),
            counts: vec![0; layout.ranks],
            places: vec![Vec::new(); members.len()],
            owned: Vec::new(),
            own_start: 0,
            kind,
        };
        let mut in_bucket = 0;
        for owner in 0..layout.ranks {
            if owner == rank {
                bucket.own_start = in_bucket;
            }
            for (member, &(_, in_group)) in members.iter().enumerate() {
                let Some(fragment) = layout.fragment(in_group, owner) else { continue };
                let (in_param, len) = (fragment.in_param, fragment.len);
                bucket.places[member].push(Place { in_param, in_bucket, len });
                bucket.counts[owner] += len;
                if owner == rank {
                    match bucket.owned.last_mut() {
                        Some(joined) if joined.in_part + joined.len == fragment.in_part => joined.len += len,
                        _ => bucket.owned.push(Owned { in_bucket, in_part: fragment.in_part, len }),
                    }
                }
                in_bucket += len;
            }
        }
        bucket
    }
}

/// The buckets of what is trained.
pub(crate) fn of_shares(request: &Request<'_>, trained: &[&Share]) -> Vec<Bucket> {
    let numel = |param: &usize| request.params[*param].numel;
    let grouped: Vec<Vec<(usize, usize)>> = trained
        .iter()
        .map(|share| share.params.iter().map(|param| (*param, numel(param))).collect())
        .collect();
    let layouts: Vec<Layout> = trained.iter().map(|share| share.layout.clone()).collect();
    let owners: Vec<usize> = trained.iter().map(|share| share.own).collect();
    // Ranks that share one way of being spread cut it into the same buckets, whatever else each of them holds.
    let whole = |share: &Share| share.params.iter().map(numel).sum::<usize>() as u64;
    let common: u64 = trained.iter().filter(|share| share.spread == 0).map(|share| whole(share)).sum();
    let limit = |share: &&Share| match share.spread {
        0 => request.zero.bucket_numel(common),
        _ => request.zero.bucket_numel(whole(share)),
    };
    let limits: Vec<u64> = trained.iter().map(limit).collect();
    plan(&grouped, &layouts, |param| request.params[param].kind, &owners, &limits)
}

/// Cuts group `g` into buckets of at most `limits[g]` elements; a larger parameter travels alone.
///
/// `groups[g]` lists (index among all parameters, elements) in the order of `layouts[g]`'s indices; `kind` says how each
/// parameter, by index among all, travels; `owners[g]` is this rank's number among those that share group `g`.
pub fn plan(
    groups: &[Vec<(usize, usize)>],
    layouts: &[Layout],
    kind: impl Fn(usize) -> Kind,
    owners: &[usize],
    limits: &[u64],
) -> Vec<Bucket> {
    let mut buckets = Vec::new();
    for (group, params) in groups.iter().enumerate() {
        let (layout, limit) = (&layouts[group], limits[group]);
        // In the layout's order, so that what one rank owns is one run wherever possible.
        let mut position = vec![0; params.len()];
        layout.order.iter().enumerate().for_each(|(at, &in_group)| position[in_group] = at);
        for wanted in [Kind::Ordinary, Kind::Rows, Kind::Leaf] {
            let mut close = |members: &mut Vec<(usize, usize)>| {
                if !members.is_empty() {
                    members.sort_by_key(|&(_, in_group)| position[in_group]);
                    buckets.push(Bucket::new(group, members, layout, owners[group], wanted));
                    members.clear();
                }
            };
            let mut members: Vec<(usize, usize)> = Vec::new();
            let mut filled = 0u64;
            for (in_group, &(param, numel)) in params.iter().enumerate().rev() {
                if kind(param) != wanted {
                    continue;
                }
                if filled + numel as u64 > limit || wanted == Kind::Rows {
                    close(&mut members);
                    filled = 0;
                }
                members.push((param, in_group));
                filled += numel as u64;
            }
            close(&mut members);
        }
    }
    // A bucket can leave when its first parameter, the last to get a gradient, has one.
    buckets.sort_by_key(|bucket| {
        (bucket.kind == Kind::Leaf, std::cmp::Reverse(bucket.params.iter().copied().min()))
    });
    buckets
}
