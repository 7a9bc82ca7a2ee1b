//! Dividing layers over pipeline stages, and elements over ranks.
//!
//! A result is a list of boundaries: part `i` holds the items from `boundaries[i]` up to `boundaries[i + 1]`.

use std::num::NonZeroUsize;

/// Inclusive prefix sums.
pub fn prefix_sum(weights: &[f64]) -> Vec<f64> {
    weights
        .iter()
        .scan(0.0, |sum, weight| {
            *sum += weight;
            Some(*sum)
        })
        .collect()
}

/// Parts of equal length; where that does not come out even, the first parts hold one more.
pub fn partition_uniform(items: usize, parts: NonZeroUsize) -> Vec<usize> {
    let (chunk, longer) = (items / parts, items % parts);
    (0..=parts.get()).map(|part| part * chunk + part.min(longer)).collect()
}

/// Parts whose heaviest and lightest differ as little as a dynamic programme over prefixes finds.
///
/// A state is a prefix cut into a number of parts; it keeps the heaviest and the lightest part of its best cut, so the
/// result is greedy on prefixes and may miss the true optimum. Ties go to the longest prefix, as in DeepSpeed, so that
/// both place layers alike.
pub fn partition_balanced(weights: &[f64], parts: NonZeroUsize) -> Vec<usize> {
    let (items, parts) = (weights.len(), parts.get());
    if items <= parts {
        return (0..=parts).map(|part| part.min(items)).collect();
    }
    let mut sums = vec![0.0];
    sums.extend(prefix_sum(weights));

    let unreached = State { spread: f64::INFINITY, heaviest: f64::INFINITY, lightest: f64::INFINITY, cut: 0 };
    let mut states = vec![vec![unreached; parts + 1]; items + 1];
    states[0][0] = State { spread: 0.0, heaviest: 0.0, ..unreached };
    for end in 1..=items {
        for count in 1..=parts.min(end) {
            for cut in 0..end {
                let before = states[cut][count - 1];
                let part = sums[end] - sums[cut];
                let heaviest = before.heaviest.max(part);
                let lightest = before.lightest.min(part);
                let spread = heaviest - lightest;
                if states[end][count].spread >= spread {
                    states[end][count] = State { spread, heaviest, lightest, cut };
                }
            }
        }
    }

    let mut boundaries = vec![items];
    let mut end = items;
    for count in (1..=parts).rev() {
        end = states[end][count].cut;
        boundaries.push(end);
    }
    boundaries.reverse();
    boundaries
}

/// The best cut of a prefix into some number of parts.
#[derive(Debug, Clone, Copy)]
struct State {
    spread: f64,
    heaviest: f64,
    lightest: f64,
    /// Where the last part starts.
    cut: usize,
}
