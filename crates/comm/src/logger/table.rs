//! The summary as DeepSpeed lays it out: columns of 20, a line per operation, below it one per message size.

use std::collections::BTreeMap;

use super::{LogRow, readable_bytes};

fn line(text: &mut String, cells: &[String]) {
    text.extend(cells.iter().map(|cell| format!("{cell:<20}")));
    text.push('\n');
}

fn by_operation(
    rows: &[LogRow],
    headings: [&str; 7],
    numbers: impl Fn(&LogRow) -> [Option<f64>; 4],
) -> String {
    let mut text = String::new();
    line(&mut text, &headings.map(str::to_owned));
    let mut last = "";
    for row in rows {
        if row.operation != last {
            text.push_str(&row.operation);
            text.push('\n');
            last = &row.operation;
        }
        let mut cells = vec![String::new(), readable_bytes(row.bytes as u64), row.count.to_string()];
        cells.extend(
            numbers(row).map(|value| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.2}"))),
        );
        line(&mut text, &cells);
    }
    text
}

/// How often, how long, how fast; where ranks are on several hosts, also how much this one sent to others, by operation.
pub fn table(rows: &[LogRow]) -> String {
    let headings = [
        "Comm. Op",
        "Message Size",
        "Count",
        "Total Latency(ms)",
        "Avg Latency(ms)",
        "tput_avg (Gbps)",
        "busbw_avg (Gbps)",
    ];
    let mut text = by_operation(rows, headings, |row| {
        [row.total_latency_ms, row.average_latency_ms, row.algorithm_gbps, row.bus_gbps].map(Some)
    });
    let mut crossed: BTreeMap<&str, u64> = BTreeMap::new();
    for row in rows.iter().filter(|row| row.crossed_bytes > 0) {
        *crossed.entry(&row.operation).or_default() += row.crossed_bytes;
    }
    if !crossed.is_empty() {
        line(&mut text, &["Sent to other hosts".to_owned()]);
    }
    for (operation, bytes) in crossed {
        line(&mut text, &[operation.to_owned(), readable_bytes(bytes)]);
    }
    text
}

/// How much of the time was the operation itself, and how much the wait for slower ranks; a dash where ranks did not all
/// do the same.
pub fn straggler_table(rows: &[LogRow]) -> String {
    let headings = [
        "Comm. Op",
        "Message Size",
        "Count",
        "Total comm lat(ms)",
        "Total straggler(ms)",
        "Avg comm lat(ms)",
        "Avg straggler(ms)",
    ];
    let body = by_operation(rows, headings, |row| match &row.stragglers {
        Some(found) => [
            found.total_latency_ms,
            found.total_straggler_ms,
            found.average_latency_ms,
            found.average_straggler_ms,
        ]
        .map(Some),
        None => [None; 4],
    });
    format!(
        "_______________________________\nBreakdown with straggler effect\n-------------------------------\n{body}"
    )
}
