//! A permutation as a strided copy along as few axes as can be.

use crate::shape::Shape;

/// One axis of a strided copy: how many places it has, and how far apart they are in source and target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Axis {
    /// Places.
    pub size: usize,
    /// Elements between neighbours in the source.
    pub from: usize,
    /// Elements between neighbours in the target.
    pub to: usize,
}

/// The axes that take `x` to the order of dimensions `order`, in the order of the target, the last of which has its neighbours
/// next to each other there. Those of one place are left out, and those that stay together are one.
pub fn axes(x: &Shape, order: &[usize]) -> Vec<Axis> {
    let strides = x.strides();
    let mut axes: Vec<Axis> = Vec::with_capacity(order.len());
    for (size, from) in order.iter().map(|&dim| (x[dim], strides[dim])).filter(|&(size, _)| size != 1) {
        match axes.last_mut() {
            Some(before) if before.from == size * from => {
                (before.size, before.from) = (before.size * size, from)
            }
            _ => axes.push(Axis { size, from, to: 1 }),
        }
    }
    if axes.is_empty() {
        axes.push(Axis { size: 1, from: 1, to: 1 });
    }
    let mut to = 1;
    for axis in axes.iter_mut().rev() {
        axis.to = to;
        to *= axis.size;
    }
    axes
}

/// Whether elements stay where they are: at most dimensions of size one move.
pub fn is_still(x: &Shape, order: &[usize]) -> bool {
    axes(x, order).len() == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(sizes: &[usize], order: &[usize]) -> Vec<[usize; 3]> {
        axes(&Shape::from(sizes), order).iter().map(|axis| [axis.size, axis.from, axis.to]).collect()
    }

    #[test]
    fn what_stays_together_is_one_axis() {
        // [batch, tokens, parts, heads, dim]: parts come first.
        assert_eq!(found(&[3, 5, 2, 4, 8], &[2, 0, 1, 3, 4]), [[2, 32, 480], [15, 64, 32], [32, 1, 1]]);
        assert_eq!(found(&[3, 5, 7], &[2, 0, 1]), [[7, 1, 15], [15, 7, 1]]);
        assert_eq!(found(&[3, 5, 7], &[2, 1, 0]), [[7, 1, 15], [5, 7, 3], [3, 35, 1]]);
    }

    #[test]
    fn what_moves_only_places_of_one_is_still() {
        for (sizes, order) in [
            (&[3, 5, 7][..], &[0, 1, 2][..]),
            (&[1, 5, 2, 4], &[1, 0, 2, 3]),
            (&[5, 1, 1, 4], &[1, 0, 3, 2]),
            (&[1, 1], &[1, 0]),
            (&[], &[]),
        ] {
            assert!(is_still(&Shape::from(sizes), order), "{sizes:?} {order:?}");
        }
        assert!(!is_still(&Shape::from([2, 2]), &[1, 0]));
    }
}
