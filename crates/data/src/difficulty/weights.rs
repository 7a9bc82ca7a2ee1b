//! Draws from groups by how many are left in each, one by one (Fenwick, "A new data structure for cumulative frequency tables", 1994).

/// How many are left in each group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Weights {
    /// Node `i`, from 1, holds the sum of as many groups up to `i` as its lowest bit says.
    sums: Vec<u64>,
    total: u64,
}

impl Weights {
    pub(super) fn new(left: impl Iterator<Item = u64>) -> Weights {
        let mut sums = vec![0];
        sums.extend(left);
        let total = sums.iter().sum();
        for node in 1..sums.len() {
            let above = node + lowest_bit(node);
            if above < sums.len() {
                sums[above] += sums[node];
            }
        }
        Weights { sums, total }
    }

    /// How many are left in all.
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// Takes the one that is `nth` of all that are left, which is below their total, and says which group it is of.
    pub(super) fn take(&mut self, mut nth: u64) -> usize {
        let mut before = 0;
        let mut stride = self.sums.len().next_power_of_two();
        while stride > 0 {
            let node = before + stride;
            if node < self.sums.len() && self.sums[node] <= nth {
                nth -= self.sums[node];
                before = node;
            }
            stride /= 2;
        }
        let mut node = before + 1;
        while node < self.sums.len() {
            self.sums[node] -= 1;
            node += lowest_bit(node);
        }
        self.total -= 1;
        before
    }
}

fn lowest_bit(node: usize) -> usize {
    node & node.wrapping_neg()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampler::mix;

    #[test]
    fn every_group_gives_as_many_as_it_has_in_any_order() {
        for groups in [vec![3], vec![0, 5, 0, 1], vec![2, 0, 7, 1, 1, 30, 4, 0, 9], (0..100).collect()] {
            let mut weights = Weights::new(groups.iter().copied());
            let mut taken = vec![0; groups.len()];
            let mut left = groups.clone();
            for turn in 0..groups.iter().sum::<u64>() {
                let nth = mix(turn) % weights.total();
                let mut rest = nth;
                let wanted = left.iter().position(|&left| {
                    let is_here = rest < left;
                    rest = rest.saturating_sub(left);
                    is_here
                });
                let group = weights.take(nth);
                assert_eq!(Some(group), wanted, "{groups:?}, {nth}th");
                left[group] -= 1;
                taken[group] += 1;
            }
            assert_eq!((taken, weights.total()), (groups, 0));
        }
    }
}
