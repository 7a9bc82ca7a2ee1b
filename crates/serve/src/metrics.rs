//! Counters for Prometheus. Observing changes no token.

use std::fmt::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Upper ends of the histograms' buckets, in milliseconds.
const BUCKETS_MS: [u64; 12] = [1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 5000, 30_000];

/// Durations by size.
#[derive(Debug, Default)]
pub struct Histogram {
    buckets: [AtomicU64; BUCKETS_MS.len()],
    count: AtomicU64,
    total_us: AtomicU64,
}

impl Histogram {
    /// Counts one.
    pub fn observe(&self, duration: Duration) {
        let us = duration.as_micros() as u64;
        if let Some(place) = BUCKETS_MS.iter().position(|&end| us <= end * 1000) {
            self.buckets[place].fetch_add(1, Relaxed);
        }
        self.count.fetch_add(1, Relaxed);
        self.total_us.fetch_add(us, Relaxed);
    }
}

macro_rules! metrics {
    ($($(#[$doc:meta])* $kind:ident $field:ident => $name:literal, $help:literal;)*) => {
        /// Everything that is counted.
        #[derive(Debug, Default)]
        pub struct Metrics {
            $($(#[$doc])* pub $field: AtomicU64,)*
            /// From a request's arrival to its first token.
            pub first_token: Histogram,
            /// Between two tokens of an answer.
            pub between_tokens: Histogram,
            /// Of every pass, in milliseconds, where somebody asked for them.
            pass_times_ms: Mutex<Option<Vec<f64>>>,
        }

        impl Metrics {
            fn plain(&self) -> Vec<(&'static str, &'static str, &'static str, u64)> {
                vec![$((stringify!($kind), $name, $help, self.$field.load(Relaxed)),)*]
            }
        }
    };
}

metrics! {
    /// Taken in.
    counter requests => "requests_total", "Requests that were taken in.";
    /// Not taken in.
    counter refused => "requests_refused_total", "Requests that were refused: too long, or too many.";
    /// Answered to the end.
    counter finished => "requests_finished_total", "Requests that were answered to the end.";
    /// Given up by their client.
    counter cancelled => "requests_cancelled_total", "Requests whose client went away.";
    /// Cut off.
    counter failed => "requests_failed_total", "Requests that were cut off: time, shutdown, failures.";
    /// Of prompts.
    counter prompt_tokens => "prompt_tokens_total", "Tokens of prompts that were taken in.";
    /// Of answers.
    counter generated_tokens => "generated_tokens_total", "Tokens that were generated.";
    /// Not computed again.
    counter shared_tokens => "prefix_shared_tokens_total", "Tokens whose keys and values were found in the cache.";
    /// Through the model.
    counter passes => "passes_total", "Passes through the model.";
    /// Rows of passes.
    counter pass_tokens => "pass_tokens_total", "Tokens that passes have computed.";
    /// Computed on suspicion.
    counter guessed_tokens => "guessed_tokens_total", "Tokens that were computed because they might follow.";
    /// Of those, kept.
    counter accepted_tokens => "guessed_tokens_accepted_total", "Guessed tokens that were chosen.";
    /// Blocks taken away.
    counter preemptions => "preemptions_total", "Sequences that had to give their blocks back and wait.";
    /// Contents given up.
    counter evictions => "cache_evictions_total", "Blocks whose shared content was given up.";
    /// Now.
    gauge running => "sequences_running", "Sequences that hold blocks.";
    /// Now.
    gauge waiting => "sequences_waiting", "Sequences that wait.";
    /// Now.
    gauge blocks_held => "cache_blocks_held", "Blocks of the cache that are held.";
    /// For ever.
    gauge blocks => "cache_blocks", "Blocks of the cache.";
}

/// Times that are kept until somebody takes them, at most.
const MAX_PASS_TIMES: usize = 1 << 20;

impl Metrics {
    /// From now on the time of every pass is kept until it is taken.
    pub fn keep_pass_times(&self) {
        if let Ok(mut times) = self.pass_times_ms.lock() {
            times.get_or_insert_default();
        }
    }

    /// The times that were kept; `None` where nobody asked for them.
    pub fn take_pass_times(&self) -> Option<Vec<f64>> {
        self.pass_times_ms.lock().ok()?.as_mut().map(std::mem::take)
    }

    /// Counts a pass.
    pub(crate) fn passed(&self, tokens: usize, time: Duration) {
        self.passes.fetch_add(1, Relaxed);
        self.pass_tokens.fetch_add(tokens as u64, Relaxed);
        if let Ok(mut times) = self.pass_times_ms.lock()
            && let Some(times) = times.as_mut().filter(|times| times.len() < MAX_PASS_TIMES)
        {
            times.push(time.as_secs_f64() * 1e3);
        }
    }

    /// In the text format of Prometheus.
    pub fn render(&self) -> String {
        let mut out = String::new();
        for (kind, name, help, value) in self.plain() {
            let name = format!("ferrospeed_{name}");
            // Writing to a string cannot fail.
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}");
        }
        let first = (
            "time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            &self.first_token,
        );
        let between =
            ("time_between_tokens_seconds", "Between two tokens of an answer.", &self.between_tokens);
        for (name, help, histogram) in [first, between] {
            let name = format!("ferrospeed_{name}");
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} histogram");
            let mut below = 0;
            for (end_ms, bucket) in BUCKETS_MS.iter().zip(&histogram.buckets) {
                below += bucket.load(Relaxed);
                let _ = writeln!(out, "{name}_bucket{{le=\"{}\"}} {below}", *end_ms as f64 / 1000.0);
            }
            let count = histogram.count.load(Relaxed);
            let total_s = histogram.total_us.load(Relaxed) as f64 / 1e6;
            let _ = writeln!(
                out,
                "{name}_bucket{{le=\"+Inf\"}} {count}\n{name}_sum {total_s}\n{name}_count {count}"
            );
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_counted_is_told_in_prometheus_words() {
        let metrics = Metrics::default();
        metrics.requests.fetch_add(3, Relaxed);
        metrics.first_token.observe(Duration::from_millis(7));
        metrics.first_token.observe(Duration::from_secs(60));
        let text = metrics.render();
        for line in [
            "# TYPE ferrospeed_requests_total counter",
            "ferrospeed_requests_total 3",
            "ferrospeed_time_to_first_token_seconds_bucket{le=\"0.005\"} 0",
            "ferrospeed_time_to_first_token_seconds_bucket{le=\"0.01\"} 1",
            "ferrospeed_time_to_first_token_seconds_bucket{le=\"30\"} 1",
            "ferrospeed_time_to_first_token_seconds_bucket{le=\"+Inf\"} 2",
            "ferrospeed_time_to_first_token_seconds_count 2",
        ] {
            assert!(text.lines().any(|said| said == line), "{line} is not in\n{text}");
        }
    }
}
