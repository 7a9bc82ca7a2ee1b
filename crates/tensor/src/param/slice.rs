//! Parameters that are slices of a whole: what tensor parallelism gives a rank.
//!
//! A [`Slice`] is some ranges along one dim of a whole tensor, joined in order: one range for a plain cut, three for a weight
//! in which queries, keys and values lie one after the other. Whoever speaks of the whole (initialisers, weight files,
//! checkpoints, exports) asks for [`Slice::runs`]: stretches of the slice as stretches of the whole.

use std::ops::Range;

use crate::error::{Result, TensorError};
use crate::shape::Shape;

/// Which part of a whole tensor a parameter is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slice {
    whole: Shape,
    dim: usize,
    ranges: Vec<Range<usize>>,
    holders: usize,
}

impl Slice {
    /// These ranges along `dim`, in order; none is empty and none overlaps another.
    pub fn new(whole: impl Into<Shape>, dim: usize, ranges: Vec<Range<usize>>) -> Result<Slice> {
        let whole = whole.into();
        let ordered = ranges.windows(2).all(|pair| pair[0].end <= pair[1].start);
        let inside = dim < whole.dims() && ranges.last().is_some_and(|last| last.end <= whole[dim]);
        if !(ordered && inside && ranges.iter().all(|range| range.start < range.end)) {
            return Err(TensorError::argument("slice", format!("{ranges:?} along dim {dim} of {whole}")));
        }
        Ok(Slice { whole, dim, ranges, holders: 1 })
    }

    /// The same, held by so many neighbouring ranks, each of which computes a summand of its gradient.
    pub fn held_by(self, holders: usize) -> Slice {
        Slice { holders, ..self }
    }

    /// The shape of the whole.
    pub fn whole(&self) -> &Shape {
        &self.whole
    }

    /// The dim along which it is cut.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// What it holds along that dim, in order.
    pub fn ranges(&self) -> &[Range<usize>] {
        &self.ranges
    }

    /// How many ranks hold it.
    pub fn holders(&self) -> usize {
        self.holders
    }

    /// Its own shape.
    pub fn shape(&self) -> Shape {
        let mut sizes = self.whole.sizes().to_vec();
        sizes[self.dim] = self.ranges.iter().map(Range::len).sum();
        Shape::new(&sizes)
    }

    /// Elements `range` of the slice as runs of elements of the whole, in order.
    pub fn runs(&self, range: Range<usize>) -> impl Iterator<Item = Range<usize>> + '_ {
        let inner: usize = self.whole.sizes()[self.dim + 1..].iter().product();
        let (whole_row, own_row) = (self.whole[self.dim] * inner, self.shape()[self.dim] * inner);
        let mut at = range.start;
        std::iter::from_fn(move || {
            if at >= range.end {
                return None;
            }
            let (outer, mut within) = (at / own_row, at % own_row);
            for part in &self.ranges {
                let length = part.len() * inner;
                if within < length {
                    let count = (length - within).min(range.end - at);
                    let start = outer * whole_row + part.start * inner + within;
                    at += count;
                    return Some(start..start + count);
                }
                within -= length;
            }
            None
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::single_range_in_vec_init, reason = "a list of one range is what is meant")]

    use super::*;

    /// What of a whole, numbered element by element, a slice holds.
    fn picked(slice: &Slice, range: Range<usize>) -> Vec<usize> {
        slice.runs(range).flatten().collect()
    }

    #[test]
    fn any_stretch_of_a_slice_is_found_in_the_whole() {
        // Rows 1 and 3 of the middle dim of [2, 4, 3], by hand.
        let slice = Slice::new([2, 4, 3], 1, vec![1..2, 3..4]).unwrap();
        let all = [3, 4, 5, 9, 10, 11, 15, 16, 17, 21, 22, 23];
        assert_eq!((slice.shape().sizes(), picked(&slice, 0..12)), (&[2, 2, 3][..], all.to_vec()));
        for start in 0..12 {
            for end in start..=12 {
                assert_eq!(picked(&slice, start..end), all[start..end]);
            }
        }
        assert_eq!(slice.runs(0..12).count(), 4);
        let rows = Slice::new([4, 3], 0, vec![1..3]).unwrap();
        assert_eq!(rows.runs(0..6).collect::<Vec<_>>(), [3..9]);
        let columns = Slice::new([2, 4], 1, vec![2..4]).unwrap();
        assert_eq!(columns.runs(1..3).collect::<Vec<_>>(), [3..4, 6..7]);
    }

    #[test]
    fn what_is_no_slice_is_refused() {
        for (dim, ranges) in
            [(2, vec![0..1]), (0, vec![0..5]), (1, vec![2..3, 0..1]), (1, vec![1..1]), (0, vec![])]
        {
            assert!(Slice::new([4, 3], dim, ranges.clone()).is_err(), "{ranges:?} along {dim}");
        }
    }
}
