//! Which way a layer is cut, and what of it a rank holds.

use std::ops::Range;

/// Which way a layer is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// Its outputs: `sections` equal sections (queries, keys and values that one layer makes), each of `units` units (heads,
    /// channels, tokens) of which a rank gets neighbouring ones. Of fewer units than ranks, several ranks share each.
    Outputs {
        /// How many sections.
        sections: usize,
        /// How many units each has.
        units: usize,
    },
    /// The outputs of one layer that makes the queries of `heads` heads and then keys and values of `kv_heads` heads each; a
    /// rank gets neighbouring ones of each. All of a parameter has as many holders, so there must be as many as ranks at least.
    Heads {
        /// Heads of queries.
        heads: usize,
        /// Heads of keys, and of values.
        kv_heads: usize,
    },
    /// Its inputs, in so many units; the ranks' results are summed.
    Inputs {
        /// How many units.
        units: usize,
    },
    /// The rows of a table; the ranks' lookups are summed.
    Entries,
    /// Not at all, but each rank uses it for its own slices alone, and has a summand of its gradient.
    Shared,
}

/// What one rank holds of a dim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) ranges: Vec<Range<usize>>,
    /// How many neighbouring ranks hold the same.
    pub(crate) holders: usize,
}

impl Cut {
    /// Rank `rank`'s part of a dim of `size` that is cut so.
    pub(crate) fn held(self, size: usize, rank: usize, ranks: usize) -> Held {
        match self {
            Cut::Outputs { sections, units } => held(size, sections, units, rank, ranks),
            Cut::Inputs { units } => held(size, 1, units, rank, ranks),
            Cut::Entries => held(size, 1, size, rank, ranks),
            Cut::Shared => Held { holders: ranks, ..held(size, 1, 1, 0, 1) },
            Cut::Heads { heads, kv_heads } => {
                let unit = size / (heads + 2 * kv_heads).max(1);
                let part = |first: usize, units: usize| {
                    let own = held(units * unit, 1, units, rank, ranks).ranges.remove(0);
                    first * unit + own.start..first * unit + own.end
                };
                let ranges = vec![part(0, heads), part(heads, kv_heads), part(heads + kv_heads, kv_heads)];
                Held { ranges, holders: 1 }
            }
        }
    }
}

/// Rank `rank`'s part of a dim of `sections` sections of `units` units each. Where units do not divide evenly, some ranks
/// have one more: models refuse that for heads and channels, and it is harmless for tokens.
pub(crate) fn held(size: usize, sections: usize, units: usize, rank: usize, ranks: usize) -> Held {
    let section = size / sections.max(1);
    let unit = section / units.max(1);
    let (first, behind, holders) = if units < ranks {
        let own = rank * units / ranks;
        (own, own + 1, ranks.div_ceil(units.max(1)))
    } else {
        (rank * units / ranks, (rank + 1) * units / ranks, 1)
    };
    let range = |index: usize| index * section + first * unit..index * section + behind * unit;
    Held { ranges: (0..sections).map(range).collect(), holders }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::single_range_in_vec_init, reason = "a list of one range is what is meant")]

    use super::*;

    #[test]
    fn every_unit_has_its_ranks() {
        // Queries, keys and values of four heads of two channels, on two ranks.
        assert_eq!(held(24, 3, 4, 1, 2), Held { ranges: vec![4..8, 12..16, 20..24], holders: 1 });
        // Two heads of three channels on four ranks: the first two share the first.
        let of = |rank| held(6, 1, 2, rank, 4);
        assert_eq!([of(0), of(1)], [0, 1].map(|_| Held { ranges: vec![0..3], holders: 2 }));
        assert_eq!(of(3), Held { ranges: vec![3..6], holders: 2 });
        // Four heads of queries and two of keys and values, of two channels each, in one layer.
        let grouped = Cut::Heads { heads: 4, kv_heads: 2 };
        assert_eq!(grouped.held(16, 1, 2), Held { ranges: vec![4..8, 10..12, 14..16], holders: 1 });
        // Tokens need not divide.
        let rows: Vec<usize> = (0..4).map(|rank| held(11, 1, 11, rank, 4).ranges[0].len()).collect();
        assert_eq!((rows.iter().sum::<usize>(), held(11, 1, 11, 3, 4).ranges[0].end), (11, 11));
    }
}
