//! The communication logger: how often, how much, how fast.
//!
//! It is off until [`CommLog::start`]; then every collective and message of this rank is counted by kind and message
//! size. Bandwidths follow the usual convention: the *algorithm* bandwidth is the message over the time; the *bus*
//! bandwidth scales it by what each rank must move at least, so that it can be compared with a link's speed.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::dtype::ReduceOp;
use crate::error::Result;
use crate::group::Group;
use crate::op::Kind;

/// The share of the shortest and of the longest latencies that averages leave out.
const TRIMMED_SHARE: f64 = 0.1;
/// Latencies kept per row, for the averages; later ones only add to count and total.
const MAX_LATENCIES: usize = 4096;

/// Counts the operations of one rank.
#[derive(Debug, Default)]
pub struct CommLog {
    on: AtomicBool,
    rows: Mutex<BTreeMap<(&'static str, usize), Tally>>,
}

#[derive(Debug, Default, Clone)]
struct Tally {
    group_size: usize,
    count: u64,
    total_ms: f64,
    latencies_ms: Vec<f64>,
}

/// One line of the summary: the operations of one kind and message size.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct LogRow {
    /// The kind of operation.
    pub operation: &'static str,
    /// Bytes of the message: the whole buffer, or this rank's part of it for all_gather and reduce_scatter.
    pub bytes: usize,
    /// How often.
    pub count: u64,
    /// All of it.
    pub total_latency_ms: f64,
    /// The mean without the extremes.
    pub average_latency_ms: f64,
    /// Mean algorithm bandwidth.
    pub algorithm_gbps: f64,
    /// Mean bus bandwidth.
    pub bus_gbps: f64,
    /// How much of the total was waiting for slower ranks; known after [`CommLog::summary_across`].
    pub straggler_ms: Option<f64>,
}

impl CommLog {
    /// Begins to count.
    pub fn start(&self) {
        self.on.store(true, Ordering::Relaxed);
    }

    /// Stops counting; what was counted stays.
    pub fn stop(&self) {
        self.on.store(false, Ordering::Relaxed);
    }

    /// Forgets what was counted.
    pub fn clear(&self) {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    pub(crate) fn add(&self, kind: Kind, bytes: usize, group_size: usize, latency: Duration) {
        if !self.on.load(Ordering::Relaxed) {
            return;
        }
        let mut rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        let tally = rows.entry((kind.name(), bytes)).or_default();
        tally.group_size = group_size;
        tally.count += 1;
        tally.total_ms += latency.as_secs_f64() * 1e3;
        if tally.latencies_ms.len() < MAX_LATENCIES {
            tally.latencies_ms.push(latency.as_secs_f64() * 1e3);
        }
    }

    /// What was counted on this rank, by operation and size.
    pub fn summary(&self) -> Vec<LogRow> {
        let rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        rows.iter()
            .map(|((operation, bytes), tally)| {
                let mean = |value: fn(Bandwidth) -> f64| {
                    let of = |latency: &f64| value(bandwidth(operation, *bytes, *latency, tally.group_size));
                    trimmed_mean(&tally.latencies_ms.iter().map(of).collect::<Vec<_>>(), TRIMMED_SHARE)
                };
                LogRow {
                    operation,
                    bytes: *bytes,
                    count: tally.count,
                    total_latency_ms: tally.total_ms,
                    average_latency_ms: trimmed_mean(&tally.latencies_ms, TRIMMED_SHARE),
                    algorithm_gbps: mean(|bandwidth| bandwidth.algorithm_gbps),
                    bus_gbps: mean(|bandwidth| bandwidth.bus_gbps),
                    straggler_ms: None,
                }
            })
            .collect()
    }

    /// As [`CommLog::summary`], with the time each rank waited for slower ones: its own total less the smallest of the
    /// group, because the last to arrive waits least. Collective; the ranks must have counted the same operations.
    pub fn summary_across(&self, group: &Group) -> Result<Vec<LogRow>> {
        let mut rows = self.summary();
        let mut least: Vec<f64> = rows.iter().map(|row| row.total_latency_ms).collect();
        group.all_reduce(&mut least, ReduceOp::Min)?;
        for (row, least) in rows.iter_mut().zip(least) {
            row.straggler_ms = Some(row.total_latency_ms - least);
        }
        Ok(rows)
    }
}

/// The summary as a table, with columns of 20.
pub fn table(rows: &[LogRow]) -> String {
    let mut text = String::new();
    let mut line = |cells: Vec<String>| {
        let cells: String = cells.iter().map(|cell| format!("{cell:<20}")).collect();
        text.push_str(cells.trim_end());
        text.push('\n');
    };
    let headings = [
        "Comm. Op",
        "Message Size",
        "Count",
        "Total Latency(ms)",
        "Avg Latency(ms)",
        "tput_avg (Gbps)",
        "busbw_avg (Gbps)",
        "Straggler(ms)",
    ];
    line(headings.map(str::to_owned).to_vec());
    let mut last = "";
    for row in rows {
        if row.operation != last {
            line(vec![row.operation.to_owned()]);
            last = row.operation;
        }
        let number = |value: f64| format!("{value:.2}");
        line(vec![
            String::new(),
            readable_bytes(row.bytes as u64),
            row.count.to_string(),
            number(row.total_latency_ms),
            number(row.average_latency_ms),
            number(row.algorithm_gbps),
            number(row.bus_gbps),
            row.straggler_ms.map_or_else(|| "-".into(), number),
        ]);
    }
    text
}

/// Gigabits per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bandwidth {
    /// Message over time.
    pub algorithm_gbps: f64,
    /// Scaled to what each rank must move.
    pub bus_gbps: f64,
}

/// The bandwidths of an operation that took `latency_ms`.
///
/// `bytes` is the whole buffer; for all_gather and reduce_scatter it is one rank's part.
pub fn bandwidth(operation: &str, bytes: usize, latency_ms: f64, ranks: usize) -> Bandwidth {
    let ranks = ranks as f64;
    let rate = |bytes: f64| bytes / latency_ms * 8.0 / 1e6;
    let share = (ranks - 1.0) / ranks;
    let (algorithm, bus) = if operation.contains("all_reduce") {
        (rate(2.0 * bytes as f64), rate(bytes as f64) * 2.0 * share)
    } else if operation.starts_with("all_gather") || operation.starts_with("reduce_scatter") {
        let rate = rate(bytes as f64 * ranks);
        (rate, rate * share)
    } else if operation.starts_with("all_to_all") {
        (rate(bytes as f64), rate(bytes as f64) * share)
    } else {
        (rate(bytes as f64), rate(bytes as f64))
    };
    Bandwidth { algorithm_gbps: algorithm, bus_gbps: bus }
}

/// The mean without the smallest and the largest `share` of the values; NaN when nothing remains, 0 of nothing.
pub fn trimmed_mean(values: &[f64], share: f64) -> f64 {
    if values.is_empty() {
        return 0.0;
    }
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let cut = (sorted.len() as f64 * share).round_ties_even() as usize;
    let kept = sorted.get(cut..sorted.len().saturating_sub(cut)).unwrap_or_default();
    kept.iter().sum::<f64>() / kept.len() as f64
}

/// Bytes in words: `0B`, `1.5 KB`, `117.74 MB`.
pub fn readable_bytes(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KB", "MB", "GB", "TB", "PB", "EB"];
    if bytes == 0 {
        return "0B".to_owned();
    }
    let unit = (bytes.ilog2() / 10) as usize;
    let value = (bytes as f64 / 1024f64.powi(unit as i32) * 100.0).round_ties_even() / 100.0;
    format!("{value:?} {}", UNITS[unit])
}
