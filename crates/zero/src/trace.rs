//! The order in which a pass reads parameters, with what prefetching asks it: when a parameter is read next, and how
//! many elements are read until then. Pure, and each answer costs a search, not a walk.

/// A recorded order of reads.
#[derive(Debug)]
pub(crate) struct ReadOrder {
    reads: Vec<usize>,
    /// Where each parameter is read, ascending.
    places: Vec<Vec<usize>>,
    /// Elements read before each place, and before the end.
    numel_before: Vec<u64>,
}

impl ReadOrder {
    /// An order of reads among `numels.len()` parameters.
    pub(crate) fn new(reads: Vec<usize>, numels: &[u64]) -> ReadOrder {
        let mut places = vec![Vec::new(); numels.len()];
        let mut numel_before = vec![0];
        let mut total = 0;
        for (place, &param) in reads.iter().enumerate() {
            places[param].push(place);
            total += numels[param];
            numel_before.push(total);
        }
        ReadOrder { reads, places, numel_before }
    }

    pub(crate) fn as_slice(&self) -> &[usize] {
        &self.reads
    }

    /// The parameter read at a place.
    pub(crate) fn at(&self, place: usize) -> Option<usize> {
        self.reads.get(place).copied()
    }

    /// The first place from `place` on where `param` is read.
    pub(crate) fn next_read(&self, param: usize, place: usize) -> Option<usize> {
        let places = &self.places[param];
        places.get(places.partition_point(|&at| at < place)).copied()
    }

    /// Elements read from one place up to another.
    pub(crate) fn numel_between(&self, from: usize, to: usize) -> u64 {
        self.numel_before[to] - self.numel_before[from]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_reads_and_distances_are_those_of_a_walk() {
        let numels = [3, 5, 7, 11];
        let order = ReadOrder::new(vec![0, 1, 2, 1, 0, 2], &numels);
        assert_eq!(
            (order.next_read(1, 0), order.next_read(1, 2), order.next_read(1, 4)),
            (Some(1), Some(3), None)
        );
        assert_eq!(order.next_read(3, 0), None);
        assert_eq!(order.numel_between(1, 4), 5 + 7 + 5);
        assert_eq!(order.numel_between(2, 2), 0);
        assert_eq!((order.at(5), order.at(6)), (Some(2), None));
    }
}
