//! Parts of tensors that several ranks hold slices of.
//!
//! A rank of a tensor-parallel run writes its slice as one piece after the other, however its rows lie in the whole; the
//! manifest says which slice it was. Who reads asks for elements of the whole, or of a slice of its own: where the slices are
//! the same the bytes are read as they lie, and otherwise each block is read once and its elements are put in their places.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Some ranges along one dim of a tensor, joined in order.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// The dim.
    pub dim: usize,
    /// First and behind the last, ascending.
    pub ranges: Vec<[u64; 2]>,
}

impl Part {
    fn check(&self, shape: &[u64]) -> Result<(), String> {
        let ordered = self.ranges.windows(2).all(|pair| pair[0][1] <= pair[1][0]);
        let inside =
            shape.get(self.dim).is_some_and(|size| self.ranges.last().is_some_and(|last| last[1] <= *size));
        if ordered && inside && self.ranges.iter().all(|[start, end]| start < end) {
            return Ok(());
        }
        Err(format!("{:?} along dim {} is no part of {shape:?}", self.ranges, self.dim))
    }
}

/// Checks that parts of one tensor are its whole, once.
pub(crate) fn check_cover(shape: &[u64], parts: &[Option<&Part>]) -> Result<(), String> {
    let cut: Vec<&Part> = parts.iter().copied().flatten().collect();
    if cut.is_empty() {
        return Ok(());
    }
    cut.iter().try_for_each(|part| part.check(shape))?;
    let dim = cut[0].dim;
    if cut.len() < parts.len() || cut.iter().any(|part| part.dim != dim) {
        return Err("is cut in more than one way".to_owned());
    }
    let mut ranges: Vec<[u64; 2]> = cut.iter().flat_map(|part| part.ranges.iter().copied()).collect();
    ranges.sort_unstable();
    let mut next = 0;
    for [start, end] in ranges {
        if start != next {
            let what = if start < next { "overlap" } else { "leave a gap" };
            return Err(format!("is cut into parts that {what} at {next} of dim {dim}"));
        }
        next = end;
    }
    if next == shape[dim] {
        Ok(())
    } else {
        Err(format!("is cut into parts that end at {next} of dim {dim}"))
    }
}

/// Where the elements of a part lie in the whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Places {
    /// Elements of the whole, and of the part, per step along all dims before the cut.
    whole_row: u64,
    own_row: u64,
    /// What of a row the part holds.
    ranges: Vec<[u64; 2]>,
    numel: u64,
}

/// Where an element of the whole is in a part, and of how many of the next ones it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    /// There, and the next ones behind it.
    At(u64, u64),
    /// Nowhere.
    Nowhere(u64),
}

impl Places {
    /// Of a part that has been checked; `None` is the whole.
    pub(crate) fn of(shape: &[u64], part: Option<&Part>) -> Places {
        let numel: u64 = shape.iter().product();
        let Some(part) = part else {
            let row = numel.max(1);
            return Places { whole_row: row, own_row: row, ranges: vec![[0, row]], numel };
        };
        let inner: u64 = shape[part.dim + 1..].iter().product();
        let whole_row = (shape[part.dim] * inner).max(1);
        let ranges: Vec<[u64; 2]> = part.ranges.iter().map(|range| range.map(|end| end * inner)).collect();
        let own_row: u64 = ranges.iter().map(|[start, end]| end - start).sum();
        Places { whole_row, own_row: own_row.max(1), ranges, numel: numel / whole_row * own_row }
    }

    /// How many elements it has.
    pub(crate) fn numel(&self) -> u64 {
        self.numel
    }

    /// Elements of the part as runs of elements of the whole, in order.
    pub(crate) fn runs(&self, elements: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        let mut at = elements.start;
        std::iter::from_fn(move || {
            if at >= elements.end {
                return None;
            }
            let (row, mut within) = (at / self.own_row, at % self.own_row);
            for [start, end] in &self.ranges {
                if within < end - start {
                    let count = (end - start - within).min(elements.end - at);
                    let first = row * self.whole_row + start + within;
                    at += count;
                    return Some(first..first + count);
                }
                within -= end - start;
            }
            None
        })
    }

    /// Where an element of the whole is.
    pub(crate) fn find(&self, element: u64) -> Found {
        let (row, within) = (element / self.whole_row, element % self.whole_row);
        let mut before = row * self.own_row;
        for [start, end] in &self.ranges {
            if within < *start {
                return Found::Nowhere(start - within);
            }
            if within < *end {
                return Found::At(before + within - start, end - within);
            }
            before += end - start;
        }
        Found::Nowhere(self.whole_row - within)
    }

    /// What of elements `from` of another part belongs to elements `to` of this one: calls `copy` with (where it is from the
    /// first of `from` on, where it goes from the first of `to` on, how many) until it says that this is enough.
    pub(crate) fn each_common(
        &self,
        to: &Range<u64>,
        other: &Places,
        from: Range<u64>,
        mut copy: impl FnMut(u64, u64, u64) -> bool,
    ) {
        let mut source = 0;
        for run in other.runs(from) {
            let mut at = run.start;
            while at < run.end {
                let count = match self.find(at) {
                    Found::Nowhere(next) => next.min(run.end - at),
                    Found::At(place, next) => {
                        let count = next.min(run.end - at);
                        let (first, behind) = (place.max(to.start), (place + count).min(to.end));
                        let goes_on =
                            first >= behind || copy(source + first - place, first - to.start, behind - first);
                        if !goes_on {
                            return;
                        }
                        count
                    }
                };
                at += count;
                source += count;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(dim: usize, ranges: &[[u64; 2]]) -> Part {
        Part { dim, ranges: ranges.to_vec() }
    }

    #[test]
    fn any_part_is_made_of_any_others() {
        let shape = [3u64, 8, 2];
        let whole: Vec<u64> = (0..48).collect();
        let cuts: [Vec<Option<Part>>; 4] = [
            vec![None],
            vec![Some(part(1, &[[0, 4]])), Some(part(1, &[[4, 8]]))],
            vec![Some(part(1, &[[0, 1], [4, 6]])), Some(part(1, &[[1, 4], [6, 8]]))],
            vec![Some(part(0, &[[0, 1]])), Some(part(0, &[[1, 3]]))],
        ];
        let values = |part: &Option<Part>| -> Vec<u64> {
            let places = Places::of(&shape, part.as_ref());
            places.runs(0..places.numel()).flatten().map(|at| whole[at as usize]).collect()
        };
        for from in &cuts {
            check_cover(&shape, &from.iter().map(Option::as_ref).collect::<Vec<_>>()).unwrap();
            for to in cuts.iter().flatten() {
                let target = Places::of(&shape, to.as_ref());
                for elements in [0..target.numel(), 3..target.numel() - 2] {
                    let mut found = vec![u64::MAX; (elements.end - elements.start) as usize];
                    for source in from {
                        let (places, held) = (Places::of(&shape, source.as_ref()), values(source));
                        // In blocks, as files are read.
                        for start in (0..places.numel()).step_by(5) {
                            let block = start..(start + 5).min(places.numel());
                            target.each_common(&elements, &places, block, |at, to, count| {
                                for index in 0..count {
                                    found[(to + index) as usize] = held[(start + at + index) as usize];
                                }
                                true
                            });
                        }
                    }
                    let wanted = values(to)[elements.start as usize..elements.end as usize].to_vec();
                    assert_eq!(found, wanted, "{from:?} to {to:?}");
                }
            }
        }
    }

    #[test]
    fn parts_that_are_no_whole_are_refused() {
        let (low, high) = (part(0, &[[0, 2]]), part(0, &[[2, 4]]));
        let refused = |parts: &[Option<&Part>]| check_cover(&[4, 6], parts).unwrap_err();
        assert!(check_cover(&[4, 6], &[Some(&low), Some(&high)]).is_ok());
        assert!(refused(&[Some(&low)]).contains("end at 2"));
        assert!(refused(&[Some(&high)]).contains("leave a gap at 0"));
        assert!(refused(&[Some(&low), Some(&part(0, &[[1, 4]]))]).contains("overlap at 2"));
        assert!(refused(&[Some(&low), Some(&part(1, &[[2, 4]]))]).contains("more than one way"));
        assert!(refused(&[Some(&low), None]).contains("more than one way"));
        for bad in [
            part(2, &[[0, 1]]),
            part(0, &[[0, 5]]),
            part(0, &[[1, 1]]),
            part(1, &[[3, 4], [0, 1]]),
            part(0, &[]),
        ] {
            assert!(refused(&[Some(&bad)]).contains("is no part of"), "{bad:?}");
        }
    }
}
