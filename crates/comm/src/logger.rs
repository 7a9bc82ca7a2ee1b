//! The communication logger: how often, how much, how fast.
//!
//! It is off until [`CommLog::start`]; then the collectives and messages of this rank are counted by kind and message
//! size: all of them, or the kinds that [`LogOptions`] names. Bandwidths follow the usual convention: the *algorithm*
//! bandwidth is the message over the time; the *bus* bandwidth scales it by what each rank must move at least, so that
//! it can be compared with a link's speed. Off, it costs one load per operation.

mod bandwidth;
mod spans;
mod table;

use std::collections::{BTreeMap, BTreeSet};
use std::panic::Location;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

pub use bandwidth::{Bandwidth, bandwidth, readable_bytes, trimmed_mean};
pub use spans::CommSpan;
use spans::Spans;
pub use table::{straggler_table, table};

use crate::dtype::ReduceOp;
use crate::error::Result;
use crate::group::Group;
use crate::op::Kind;

/// The share of the shortest and of the longest latencies that averages leave out.
const TRIMMED_SHARE: f64 = 0.1;
/// Latencies kept per row, for the averages; later ones only add to count and total.
const MAX_LATENCIES: usize = 4096;
/// Rows of which every size has its own; later sizes are counted as the next power of two.
const MAX_EXACT_ROWS: usize = 1024;

/// What is counted, and what is said at once.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LogOptions {
    /// Count only these kinds; all of them where there is none.
    pub only: Option<Vec<Kind>>,
    /// Log each operation of rank 0 as it ends.
    pub verbose: bool,
    /// Count operations by where in the source they were called, too.
    pub by_caller: bool,
}

/// The kind that a name means, ours or DeepSpeed's (`all_gather_into_tensor`, `reduce_scatter_fn`, `isend`, …).
pub fn kind_named(name: &str) -> Option<Kind> {
    let is_of = |kind: &Kind| {
        let rest = name.strip_prefix(kind.name());
        rest.is_some_and(|rest| {
            matches!(rest, "" | "_tensor" | "_fn" | "_base" | "_single" | "_object" | "_coalesced")
        })
    };
    match name {
        "isend" => Some(Kind::Send),
        "irecv" => Some(Kind::Recv),
        "inference_all_reduce" => Some(Kind::AllReduce),
        "all_gather_into_tensor" | "allgather_fn" => Some(Kind::AllGather),
        "monitored_barrier" => Some(Kind::Barrier),
        _ => Kind::ALL.into_iter().find(is_of),
    }
}

/// Counts the operations of one rank.
#[derive(Debug, Default)]
pub struct CommLog {
    on: AtomicBool,
    counts: Mutex<Counts>,
    spans: Spans,
}

#[derive(Debug, Default)]
struct Counts {
    options: LogOptions,
    rows: BTreeMap<Key, Tally>,
}

/// What is counted together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Key {
    kind: &'static str,
    caller: Option<&'static Location<'static>>,
    bytes: usize,
}

impl Key {
    fn name(&self) -> String {
        self.caller
            .map_or_else(|| self.kind.to_owned(), |caller| format!("{} | [Caller Func: {caller}]", self.kind))
    }
}

#[derive(Debug, Default, Clone)]
struct Tally {
    group_size: usize,
    count: u64,
    crossed_bytes: u64,
    total_ms: f64,
    latencies_ms: Vec<f64>,
}

/// One operation that ended.
pub(crate) struct Ended {
    pub(crate) kind: Kind,
    pub(crate) bytes: usize,
    pub(crate) crossed_bytes: u64,
    pub(crate) group_size: usize,
    pub(crate) started: Instant,
    pub(crate) call_site: &'static Location<'static>,
    pub(crate) rank: usize,
}

/// One line of the summary: the operations of one kind and message size.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct LogRow {
    /// The kind of operation; with [`LogOptions::by_caller`], also who called it.
    pub operation: String,
    /// Bytes of the message: the whole buffer, or this rank's part of it for all_gather and reduce_scatter.
    pub bytes: usize,
    /// How often.
    pub count: u64,
    /// Bytes that this rank sent to other hosts in all of them, over sockets or MPI: its part, not its host's.
    pub crossed_bytes: u64,
    /// All of it.
    pub total_latency_ms: f64,
    /// The mean without the extremes.
    pub average_latency_ms: f64,
    /// Mean algorithm bandwidth.
    pub algorithm_gbps: f64,
    /// Mean bus bandwidth.
    pub bus_gbps: f64,
    /// Known after [`CommLog::summary_across`], where all ranks counted as many of these.
    pub stragglers: Option<Stragglers>,
}

/// Of the time of some operations, how much was waiting: the last rank to arrive waits least, so that what a rank spent
/// beyond the quickest one was the wait for others.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Stragglers {
    /// The quickest rank's times, added up.
    pub total_latency_ms: f64,
    /// What this rank spent beyond them.
    pub total_straggler_ms: f64,
    /// The mean of the quickest times, without the extremes.
    pub average_latency_ms: f64,
    /// The mean wait, without the extremes.
    pub average_straggler_ms: f64,
}

impl CommLog {
    /// Begins to count all operations.
    pub fn start(&self) {
        self.start_with(LogOptions::default());
    }

    /// Begins to count those that the options choose.
    pub fn start_with(&self, options: LogOptions) {
        self.counts().options = options;
        self.on.store(true, Ordering::Relaxed);
    }

    /// Stops counting; what was counted stays.
    pub fn stop(&self) {
        self.on.store(false, Ordering::Relaxed);
    }

    /// Whether it counts.
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Forgets what was counted.
    pub fn clear(&self) {
        self.counts().rows.clear();
    }

    fn counts(&self) -> std::sync::MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to keep when operations run, of at most so many.
    pub fn keep_spans(&self, most: usize) {
        self.spans.keep(most);
    }

    /// What was kept, in the order of its end; no more is.
    pub fn take_spans(&self) -> Vec<CommSpan> {
        self.spans.take()
    }

    pub(crate) fn add(&self, ended: &Ended) {
        self.spans.add(ended.kind, ended.bytes, ended.started);
        if !self.is_on() {
            return;
        }
        let mut counts = self.counts();
        let Counts { options, rows } = &mut *counts;
        if options.only.as_ref().is_some_and(|only| !only.contains(&ended.kind)) {
            return;
        }
        let caller = options.by_caller.then_some(ended.call_site);
        let mut key = Key { kind: ended.kind.name(), caller, bytes: ended.bytes };
        let latency_ms = ended.started.elapsed().as_secs_f64() * 1e3;
        let line = (options.verbose && ended.rank == 0).then(|| {
            let speed = bandwidth(ended.kind.name(), ended.bytes, latency_ms, ended.group_size);
            format!(
                "comm op: {} | time (ms): {latency_ms:.2} | msg size: {} | algbw (Gbps): {:.2} | busbw (Gbps): {:.2}",
                key.name(),
                readable_bytes(ended.bytes as u64),
                speed.algorithm_gbps,
                speed.bus_gbps
            )
        });
        if rows.len() >= MAX_EXACT_ROWS && !rows.contains_key(&key) {
            key.bytes = key.bytes.next_power_of_two();
        }
        let tally = rows.entry(key).or_default();
        tally.group_size = ended.group_size;
        tally.count += 1;
        tally.crossed_bytes += ended.crossed_bytes;
        tally.total_ms += latency_ms;
        if tally.latencies_ms.len() < MAX_LATENCIES {
            tally.latencies_ms.push(latency_ms);
        }
        drop(counts);
        if let Some(line) = line {
            crate::tell(&line);
        }
    }

    /// What was counted on this rank, by operation and size.
    pub fn summary(&self) -> Vec<LogRow> {
        self.counts().rows.iter().map(|(key, tally)| tally.row(key)).collect()
    }

    /// As [`CommLog::summary`], with the time this rank waited for slower ones. Collective: all ranks of the group ask
    /// together, and what that takes is not counted.
    pub fn summary_across(&self, group: &Group) -> Result<Vec<LogRow>> {
        let was_on = self.on.swap(false, Ordering::Relaxed);
        let rows = self.compare(group);
        self.on.store(was_on, Ordering::Relaxed);
        rows
    }

    fn compare(&self, group: &Group) -> Result<Vec<LogRow>> {
        let (keys, tallies): (Vec<Key>, Vec<Tally>) = self.counts().rows.clone().into_iter().unzip();
        let own: Vec<u64> = keys.iter().zip(&tallies).map(|(key, tally)| digest(key, tally)).collect();
        let common = common_to_all(group, &own)?;
        let is_common: Vec<bool> = own.iter().map(|digest| common.contains(digest)).collect();
        // Every rank has the common rows in the same order, since the order is that of names and sizes.
        let compared =
            || tallies.iter().zip(&is_common).filter(|(_, is_common)| **is_common).map(|(tally, _)| tally);
        let mut least: Vec<f64> = compared().flat_map(|tally| tally.latencies_ms.iter().copied()).collect();
        if !least.is_empty() {
            group.all_reduce(&mut least, ReduceOp::Min)?;
        }
        let mut least = least.as_slice();
        let mut rows = Vec::with_capacity(tallies.len());
        for ((key, tally), is_common) in keys.iter().zip(&tallies).zip(is_common) {
            let mut row = tally.row(key);
            if is_common {
                let (of_row, rest) = least.split_at(tally.latencies_ms.len());
                row.stragglers = Some(tally.stragglers(of_row));
                least = rest;
            }
            rows.push(row);
        }
        Ok(rows)
    }
}

impl Tally {
    fn row(&self, key: &Key) -> LogRow {
        let mean = |value: fn(Bandwidth) -> f64| {
            let of = |latency: &f64| value(bandwidth(key.kind, key.bytes, *latency, self.group_size));
            trimmed_mean(&self.latencies_ms.iter().map(of).collect::<Vec<_>>(), TRIMMED_SHARE)
        };
        LogRow {
            operation: key.name(),
            bytes: key.bytes,
            count: self.count,
            crossed_bytes: self.crossed_bytes,
            total_latency_ms: self.total_ms,
            average_latency_ms: trimmed_mean(&self.latencies_ms, TRIMMED_SHARE),
            algorithm_gbps: mean(|bandwidth| bandwidth.algorithm_gbps),
            bus_gbps: mean(|bandwidth| bandwidth.bus_gbps),
            stragglers: None,
        }
    }

    fn stragglers(&self, least_ms: &[f64]) -> Stragglers {
        let waits_ms: Vec<f64> =
            self.latencies_ms.iter().zip(least_ms).map(|(own, least)| own - least).collect();
        Stragglers {
            total_latency_ms: least_ms.iter().sum(),
            total_straggler_ms: waits_ms.iter().sum(),
            average_latency_ms: trimmed_mean(least_ms, TRIMMED_SHARE),
            average_straggler_ms: trimmed_mean(&waits_ms, TRIMMED_SHARE),
        }
    }
}

/// Equal where two ranks counted as many operations of one row.
fn digest(key: &Key, tally: &Tally) -> u64 {
    use std::hash::{Hash, Hasher};
    // Keyed alike in every process of one build, which is all that ranks of a job are.
    let mut hasher = std::hash::DefaultHasher::new();
    (key, tally.count, tally.group_size).hash(&mut hasher);
    hasher.finish()
}

/// The digests that every rank of the group has.
fn common_to_all(group: &Group, own: &[u64]) -> Result<BTreeSet<u64>> {
    let mut longest = [own.len() as i64];
    group.all_reduce(&mut longest, ReduceOp::Max)?;
    let longest = longest[0] as usize;
    if longest == 0 {
        return Ok(BTreeSet::new());
    }
    let mut padded: Vec<i64> = own.iter().map(|digest| *digest as i64).collect();
    padded.resize(longest, 0);
    let mut all = vec![0i64; longest * group.size()];
    group.all_gather(&padded, &mut all)?;
    let mut common: BTreeSet<u64> = own.iter().copied().collect();
    for rank in all.chunks(longest) {
        let theirs: BTreeSet<u64> = rank.iter().map(|digest| *digest as u64).collect();
        common.retain(|digest| theirs.contains(digest));
    }
    Ok(common)
}
