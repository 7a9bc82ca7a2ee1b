//! Which nodes are in a round, and with how many ranks each.

use std::fmt;
use std::sync::Arc;

use super::Limits;

/// Which numbers of ranks can train: those that divide the batch, say.
#[derive(Clone)]
pub struct AllowedRanks(Arc<dyn Fn(usize) -> bool + Send + Sync>);

impl AllowedRanks {
    /// By a rule.
    pub fn by(rule: impl Fn(usize) -> bool + Send + Sync + 'static) -> AllowedRanks {
        AllowedRanks(Arc::new(rule))
    }

    /// Any number.
    pub fn any() -> AllowedRanks {
        AllowedRanks::by(|_| true)
    }
}

impl fmt::Debug for AllowedRanks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AllowedRanks")
    }
}

/// The most ranks that are allowed on nodes with so many slots, by node: the last ones have fewer, or none. `None` where there
/// are too few nodes, or no number of ranks is allowed that uses as many nodes as it must.
pub(super) fn choose(slots: &[usize], limits: &Limits) -> Option<Vec<usize>> {
    let most = &slots[..slots.len().min(limits.max_nodes)];
    if most.len() < limits.min_nodes.max(1) {
        return None;
    }
    let all: usize = most.iter().sum();
    (1..=all).rev().filter(|ranks| (limits.allowed.0)(*ranks)).map(|ranks| fill(most, ranks)).find(|nodes| {
        let used = nodes.iter().filter(|ranks| **ranks > 0).count();
        used >= limits.min_nodes
    })
}

/// So many ranks on the first nodes.
fn fill(slots: &[usize], ranks: usize) -> Vec<usize> {
    let mut left = ranks;
    slots
        .iter()
        .map(|slots| {
            let here = left.min(*slots);
            left -= here;
            here
        })
        .collect()
}
