//! What ranks did, and held, over a run: their mean, a timeline of the last steps, and who waited when.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::record::{RankTimes, StepRecord};
use crate::report::series::{Merge, shorten_rows};

/// Steps over which ranks are compared.
const RECENT_STEPS: usize = 20;
/// Steps that a timeline shows.
const TIMELINE_STEPS: usize = 12;
/// More ranks than this are no rows of a picture.
const MOST_RANKS: usize = 64;

/// What each rank did in recent steps, on average: single ones say little.
pub(super) fn recent(steps: &[&StepRecord]) -> Vec<RankTimes> {
    let Some(last) = steps.last() else { return Vec::new() };
    let alike = steps.iter().rev().take(RECENT_STEPS).filter(|record| record.ranks.len() == last.ranks.len());
    let mut sums = vec![RankTimes::default(); last.ranks.len()];
    let mut count = 0.0;
    for record in alike {
        count += 1.0;
        for (sum, times) in sums.iter_mut().zip(&record.ranks) {
            sum.forward_ms += times.forward_ms;
            sum.backward_ms += times.backward_ms;
            sum.wait_ms += times.wait_ms;
            sum.optimizer_ms += times.optimizer_ms;
        }
    }
    let mean = |sum: RankTimes| RankTimes {
        forward_ms: sum.forward_ms / count,
        backward_ms: sum.backward_ms / count,
        wait_ms: sum.wait_ms / count,
        optimizer_ms: sum.optimizer_ms / count,
    };
    sums.into_iter().map(mean).collect()
}

/// The last steps, each with what every rank did in it.
pub(super) fn timeline(steps: &[&StepRecord]) -> Value {
    let with_ranks: Vec<&&StepRecord> = steps.iter().filter(|record| !record.ranks.is_empty()).collect();
    let last = &with_ranks[with_ranks.len().saturating_sub(TIMELINE_STEPS)..];
    let step = |record: &&&StepRecord| {
        let ranks = &record.ranks[..record.ranks.len().min(MOST_RANKS)];
        json!({ "step": record.step, "step_ms": finite(record.step_ms), "ranks": ranks })
    };
    last.iter().map(step).collect()
}

/// The share of each step that each rank waited for others, over the whole run.
pub(super) fn waits(steps: &[&StepRecord]) -> Value {
    let Some(ranks) = steps.last().map(|last| last.ranks.len()).filter(|&ranks| ranks > 0) else {
        return json!([]);
    };
    let alike = steps.iter().filter(|record| record.ranks.len() == ranks && record.step_ms > 0.0);
    let row = |record: &&StepRecord| {
        let waited = record.ranks.iter().take(MOST_RANKS).map(|rank| rank.wait_ms / record.step_ms);
        (record.step as f64, waited.collect())
    };
    let rows: Vec<(f64, Vec<f64>)> = alike.map(row).collect();
    json!(shorten_rows(&rows, Merge::Mean))
}

/// What each rank held at most, by category, over all steps but the first, which makes what the others find, unless only
/// that one tells it; a rank that is alone has it in every record.
pub(super) fn memory(steps: &[&StepRecord]) -> Vec<BTreeMap<String, u64>> {
    let settled = most_held(steps.get(1..).unwrap_or_default());
    if settled.is_empty() { most_held(steps) } else { settled }
}

fn most_held(steps: &[&StepRecord]) -> Vec<BTreeMap<String, u64>> {
    let mut most: Vec<BTreeMap<String, u64>> = Vec::new();
    for record in steps {
        let alone = [record.memory_bytes.clone()];
        let of_ranks: &[BTreeMap<String, u64>] =
            if record.ranks.is_empty() { &alone } else { &record.rank_memory_bytes };
        for (rank, memory) in of_ranks.iter().take(MOST_RANKS).enumerate() {
            if most.len() <= rank {
                most.push(BTreeMap::new());
            }
            for (name, &bytes) in memory {
                let entry = most[rank].entry(name.clone()).or_default();
                *entry = bytes.max(*entry);
            }
        }
    }
    most
}

fn finite(value: f64) -> f64 {
    if value.is_finite() { value } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(step: u64, waits_ms: &[f64]) -> StepRecord {
        let ranks = waits_ms.iter().map(|&wait_ms| RankTimes { wait_ms, ..RankTimes::default() }).collect();
        StepRecord { step, step_ms: 100.0, ranks, ..StepRecord::default() }
    }

    #[test]
    fn waits_are_shares_of_a_step_and_the_timeline_ends_with_the_last() {
        let records: Vec<StepRecord> = (1..=30).map(|step| record(step, &[0.0, 25.0])).collect();
        let steps: Vec<&StepRecord> = records.iter().collect();
        assert_eq!(waits(&steps)[0], json!([1.0, [0.0, 0.25]]));
        let timeline = timeline(&steps);
        assert_eq!(timeline.as_array().map(Vec::len), Some(TIMELINE_STEPS));
        assert_eq!(timeline[TIMELINE_STEPS - 1]["step"], 30);
        assert_eq!(waits(&[]), json!([]));
    }

    #[test]
    fn what_ranks_held_is_found_though_few_steps_tell_it() {
        let held = |bytes: u64| BTreeMap::from([("total".to_owned(), bytes)]);
        let mut records: Vec<StepRecord> = (1..=4).map(|step| record(step, &[0.0, 0.0])).collect();
        records[0].rank_memory_bytes = vec![held(9), held(9)];
        records[1].rank_memory_bytes = vec![held(3), held(4)];
        records[3].rank_memory_bytes = vec![held(5), held(2)];
        let most = memory(&records.iter().collect::<Vec<_>>());
        assert_eq!(most, [held(5), held(4)]);
        assert_eq!(memory(&[&records[0], &records[2]]), [held(9), held(9)], "nothing else tells it");
    }
}
