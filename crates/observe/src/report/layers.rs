//! What adds up within a step: memory by category, time by phase.

use std::collections::BTreeSet;

use super::chart::COLOURS;
use super::series::Point;
use super::summary::{TOTAL, total_memory_bytes};
use crate::record::StepRecord;

/// Values that add up, one row per step.
pub(crate) struct Layers<'a> {
    /// What each value of a row is.
    pub(crate) names: Vec<&'a str>,
    /// The step and its values.
    pub(crate) rows: Vec<(f64, Vec<f64>)>,
    /// What was measured of all together.
    pub(crate) totals: Vec<Point>,
}

/// Memory by category.
pub(crate) fn memory<'a>(steps: &[&'a StepRecord]) -> Layers<'a> {
    let found: BTreeSet<&str> =
        steps.iter().flat_map(|record| record.memory_bytes.keys().map(String::as_str)).collect();
    let mut names: Vec<&str> = found.into_iter().filter(|&name| name != TOTAL).collect();
    // More categories than colours: those that come last share one.
    let own = if names.len() > COLOURS { COLOURS - 1 } else { names.len() };
    let shared = names.split_off(own);
    let bytes =
        |record: &StepRecord, name: &str| record.memory_bytes.get(name).map_or(0.0, |&bytes| bytes as f64);
    let row = |record: &&StepRecord| {
        let mut values: Vec<f64> = names.iter().map(|name| bytes(record, name)).collect();
        if !shared.is_empty() {
            values.push(shared.iter().map(|name| bytes(record, name)).sum());
        }
        (record.step as f64, values)
    };
    let known = steps.iter().filter(|record| !record.memory_bytes.is_empty());
    let rows = known.clone().map(row).collect();
    let totals = known.map(|record| (record.step as f64, total_memory_bytes(record) as f64)).collect();
    if !shared.is_empty() {
        names.push("other categories");
    }
    Layers { names, rows, totals }
}

/// Time by phase; what no phase accounts for is `other`.
pub(crate) fn times<'a>(steps: &[&'a StepRecord]) -> Layers<'a> {
    let row = |record: &&StepRecord| {
        let parts = [record.forward_ms, record.backward_ms, record.optimizer_ms];
        let other = record.step_ms - parts.iter().sum::<f64>();
        (record.step as f64, parts.into_iter().chain([other]).collect())
    };
    Layers {
        names: vec!["forward", "backward", "optimizer", "other"],
        rows: steps.iter().map(row).collect(),
        totals: steps.iter().map(|record| (record.step as f64, record.step_ms)).collect(),
    }
}
