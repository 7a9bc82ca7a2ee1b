//! A trace of a run: what every rank did when, on one clock, for Chrome's and Perfetto's timelines.
//!
//! Off, it costs a look at an option per phase. On, modules are timed on the host at every change, without waiting for a
//! device: on a GPU their slices are those of submission.

use std::time::Instant;

use ferrospeed_comm::ReduceOp;
use ferrospeed_observe::trace::{Activity, MAX_SPANS, Timeline, document, unix_ns};
use ferrospeed_tensor::profile;

use crate::engine::Engine;
use crate::error::Result;

/// How often ranks of different hosts compare their clocks.
const CLOCK_ROUNDS: usize = 16;

impl Engine {
    /// Begins a trace. All ranks call it together: they agree on a clock.
    pub fn start_trace(&mut self) -> Result<()> {
        let group = self.world.group();
        let mut zero = [unix_ns()];
        group.broadcast(&mut zero, 0)?;
        let ahead = self.clock_ahead_ns()?;
        self.timeline = Some(Timeline::new(self.world.rank(), zero[0] + ahead));
        self.world.log().keep_spans(MAX_SPANS);
        self.store.keep_disk_spans(MAX_SPANS);
        Ok(())
    }

    /// How far this host's clock is ahead of rank 0's: the median of what ranks read as they leave a barrier. Ranks of one
    /// host read the same clock.
    fn clock_ahead_ns(&self) -> Result<i64> {
        if self.world.hosts().len() <= 1 {
            return Ok(0);
        }
        let group = self.world.group();
        let mut ahead = Vec::with_capacity(CLOCK_ROUNDS);
        for _ in 0..CLOCK_ROUNDS {
            group.barrier()?;
            let own = unix_ns();
            let mut first = [own];
            group.broadcast(&mut first, 0)?;
            ahead.push(own - first[0]);
        }
        ahead.sort_unstable();
        Ok(ahead[CLOCK_ROUNDS / 2])
    }

    /// Adds a slice to the trace, where there is one: what this rank did since `begin`.
    pub fn trace(&mut self, activity: Activity, name: &str, begin: Instant) {
        if let Some(timeline) = &mut self.timeline {
            timeline.add(activity, name.to_owned(), begin, Instant::now(), None);
        }
    }

    /// Runs a phase, and traces the modules in it where there is a trace.
    pub(crate) fn traced<R>(&mut self, work: impl FnOnce(&mut Engine) -> R) -> R {
        if self.timeline.is_none() {
            return work(self);
        }
        let device = self.device().clone();
        let (result, segments) = profile::timeline(&device, MAX_SPANS, || work(self));
        if let Some(timeline) = &mut self.timeline {
            for segment in segments {
                timeline.add(Activity::Compute, segment.module, segment.begin, segment.end, None);
            }
        }
        result
    }

    /// Ends the trace; rank 0 gets the file. All ranks call it together.
    pub fn finish_trace(&mut self) -> Result<Option<String>> {
        let Some(mut timeline) = self.timeline.take() else { return Ok(None) };
        for span in self.world.log().take_spans() {
            let name = span.kind.name().to_owned();
            timeline.add(Activity::Communication, name, span.begin, span.end, Some(span.bytes as u64));
        }
        for (tier, span) in self.store.take_disk_spans() {
            let name = format!("{} {tier} (nvme)", if span.is_read { "read" } else { "write" });
            timeline.add(Activity::Files, name, span.begin, span.end, Some(span.bytes));
        }
        if timeline.left_out() > 0 {
            let (rank, left_out) = (self.world.rank(), timeline.left_out());
            tracing::warn!(
                "the trace of rank {rank} is full: {left_out} slices were left out; trace fewer steps"
            );
        }
        let own = timeline.into_events();
        let group = self.world.group();
        let mut lengths = vec![0i64; group.size()];
        lengths[group.rank()] = own.len() as i64;
        group.all_reduce(&mut lengths, ReduceOp::Sum)?;
        if group.rank() != 0 {
            group.send(own.as_bytes(), 0, 0)?;
            return Ok(None);
        }
        let mut ranks = vec![own];
        for (rank, length) in lengths.into_iter().enumerate().skip(1) {
            let mut bytes = vec![0u8; length as usize];
            group.recv(&mut bytes, rank, 0)?;
            ranks.push(String::from_utf8_lossy(&bytes).into_owned());
        }
        Ok(Some(document(&ranks)))
    }
}
