//! The final numbers of a run.

use super::text::Unit;
use crate::record::{EvalRecord, StepRecord};
use crate::routing::RoutingSummary;

/// One number with its name and, where it helps, a remark.
pub(crate) struct Tile {
    pub(crate) name: &'static str,
    pub(crate) value: String,
    pub(crate) remark: String,
}

/// The numbers a reader looks for first. `steps` and `evals` are in order, one per step.
pub(crate) fn tiles(steps: &[&StepRecord], evals: &[&EvalRecord]) -> Vec<Tile> {
    let tile = |name, value, remark| Tile { name, value, remark };
    let mut tiles = Vec::new();
    if let Some(last) = steps.last() {
        let skipped = steps.iter().filter(|record| record.skipped).count();
        let remark = if skipped == 0 { String::new() } else { format!("{skipped} skipped") };
        tiles.push(tile("Steps", last.step.to_string(), remark));
    }
    let mut losses = steps.iter().filter_map(|record| record.measured_loss());
    if let Some(first) = losses.next() {
        let remark = format!("from {}", Unit::Plain.show(first.into()));
        tiles.push(tile(
            "Training loss",
            Unit::Plain.show(losses.next_back().unwrap_or(first).into()),
            remark,
        ));
    }
    if let Some(last) = evals.last() {
        let best =
            evals.iter().filter(|record| record.loss.is_finite()).min_by(|a, b| a.loss.total_cmp(&b.loss));
        let remark =
            best.map(|best| format!("best {} at step {}", Unit::Plain.show(best.loss.into()), best.step));
        tiles.push(tile("Validation loss", Unit::Plain.show(last.loss.into()), remark.unwrap_or_default()));
    }
    let Some(last) = steps.last() else { return tiles };
    tiles.push(tile("Tokens", Unit::Count.show(last.tokens as f64), String::new()));
    type Value = fn(&StepRecord) -> f64;
    let medians: [(_, _, Value); 3] = [
        ("Tokens per second", Unit::Count, |record| record.tokens_per_s),
        ("FLOP per second", Unit::Count, |record| record.flops_per_s),
        ("Time per step", Unit::Milliseconds, |record| record.step_ms),
    ];
    for (name, unit, value) in medians {
        if let Some(median) = median(steps.iter().map(|record| value(record))) {
            tiles.push(tile(name, unit.show(median), "median".into()));
        }
    }
    let all_steps_ms = steps.iter().map(|record| record.step_ms).filter(|ms| ms.is_finite()).sum();
    tiles.push(tile("Time in steps", Unit::Milliseconds.show(all_steps_ms), String::new()));
    if let Some(peak) = steps.iter().map(|record| total_memory_bytes(record)).max().filter(|&bytes| bytes > 0)
    {
        tiles.push(tile("Peak memory", Unit::Bytes.show(peak as f64), "rank 0".into()));
    }
    if let Some(routing) = RoutingSummary::of(&last.routing) {
        let remark = format!("times the even share; {} without tokens", routing.idle_experts);
        tiles.push(tile("Busiest expert", format!("{:.2}", routing.imbalance), remark));
        let remark = format!("{:.1} % of choices dropped", 100.0 * routing.dropped_share);
        tiles.push(tile("Router entropy", format!("{:.3}", routing.entropy), remark));
    }
    tiles
}

/// The entry of a record's memory that is no category.
pub(crate) const TOTAL: &str = "total";

/// The peak over all categories together; without a record of it, the sum of their peaks.
pub(crate) fn total_memory_bytes(record: &StepRecord) -> u64 {
    let sum = || record.memory_bytes.values().fold(0, |sum: u64, &bytes| sum.saturating_add(bytes));
    record.memory_bytes.get(TOTAL).copied().unwrap_or_else(sum)
}

fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut finite: Vec<f64> = values.filter(|value| value.is_finite()).collect();
    finite.sort_by(f64::total_cmp);
    finite.get(finite.len() / 2).copied()
}
