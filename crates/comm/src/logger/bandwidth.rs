//! The arithmetic of the logger: bandwidths, averages, sizes in words.

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
