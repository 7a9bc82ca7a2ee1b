//! Which rank works on which whole matrix, where an update needs more of one than its owners have: a pure function.

/// Deals work out: the most costly first, each to the rank that has least to do, the first of several. The same on all ranks.
pub fn deal(costs: &[u64], ranks: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..costs.len()).collect();
    order.sort_by_key(|&item| std::cmp::Reverse(costs[item]));
    let mut busy = vec![0u64; ranks.max(1)];
    let mut dealt = vec![0; costs.len()];
    for item in order {
        let least = (0..busy.len()).min_by_key(|&rank| busy[rank]).unwrap_or(0);
        busy[least] = busy[least].saturating_add(costs[item].max(1));
        dealt[item] = least;
    }
    dealt
}

/// What a matrix costs: products of its shorter side with all of it.
pub fn cost(rows: usize, columns: usize) -> u64 {
    let (rows, columns) = (rows as u64, columns as u64);
    rows.saturating_mul(columns).saturating_mul(rows.min(columns))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_are_dealt_first_and_nobody_waits_for_two_of_them() {
        assert_eq!(deal(&[1, 9, 2, 8, 3], 2), [0, 0, 0, 1, 1]);
        assert_eq!(deal(&[5, 5, 5, 5], 3), [0, 1, 2, 0]);
        assert_eq!(deal(&[], 4), [0; 0]);
        assert_eq!(deal(&[0, 0, 0], 1), [0, 0, 0]);
        assert!(cost(4, 100) < cost(20, 20));
    }
}
