//! From which step on each sequence may be drawn: a pure function of indexes and schedules.
//!
//! Sequences lie in the order in which they come in, so that those that may be drawn at a step are the first so many. A list of
//! four bytes per sequence is held, and twelve more while it is made.

use serde::{Deserialize, Serialize};

use super::{IndexedData, MetricIndex};
use crate::error::{DataError, Result};

/// What a difficulty of a schedule means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// What was measured.
    Value,
    /// The part of the sequences, of `last` equal ones from the easiest to the hardest.
    Percentile {
        /// How many parts there are; at least 1.
        last: u64,
    },
}

/// A metric that sequences come in by.
pub struct MetricSchedule {
    /// Who is how hard.
    pub index: MetricIndex,
    /// On which scale.
    pub scale: Scale,
    /// The step, from 1, at which a difficulty is reached; `None` where it never is. Harder ones come no earlier.
    pub first_step: Box<dyn Fn(u64) -> Option<u64>>,
}

/// When sequences come in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Admission {
    samples: u64,
    order: Vec<u32>,
    /// From which step on how many of them are in, both rising, the first from step 1.
    growth: Vec<(u64, u64)>,
    digest: Digest,
}

/// Tells one admission from another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Digest(u32);

const NEVER: u64 = u64::MAX;

impl Admission {
    /// Each sequence comes in when all metrics have reached it; without any, from the start.
    pub fn new(data: &IndexedData, metrics: &[MetricSchedule]) -> Result<Admission> {
        let samples = u32::try_from(data.samples)
            .map_err(|_| DataError::TooManySequences { sequences: data.samples })?;
        let mut steps = vec![1u64; samples as usize];
        let mut sum = crc32fast::Hasher::new();
        for MetricSchedule { index, scale, first_step } in metrics {
            sum.update(&index.values().to_le_bytes());
            let mut latest = None;
            for (sample, difficulty) in index.difficulties(*scale) {
                let step = match latest {
                    Some((same, step)) if same == difficulty => step,
                    _ => first_step(difficulty).unwrap_or(NEVER),
                };
                latest = Some((difficulty, step));
                // An index was compared with the data: it has as many.
                if let Some(own) = steps.get_mut(sample as usize) {
                    *own = step.max(*own);
                }
            }
        }
        let step = |sample: u32| steps[sample as usize];
        let mut order: Vec<u32> = (0..samples).filter(|&sample| step(sample) != NEVER).collect();
        order.sort_by_key(|&sample| step(sample));
        let mut growth: Vec<(u64, u64)> = Vec::new();
        for (&sample, end) in order.iter().zip(1..) {
            match growth.last_mut() {
                Some(last) if last.0 == step(sample) => last.1 = end,
                _ => growth.push((step(sample), end)),
            }
        }
        if growth.first().is_none_or(|first| first.0 > 1) {
            let easiest = metrics.iter().filter_map(|metric| {
                let (_, difficulty) = metric.index.difficulties(metric.scale).next()?;
                Some(format!("{} {difficulty}", metric.index.metric()))
            });
            let (easiest, first) =
                (easiest.collect::<Vec<_>>().join(", "), growth.first().map(|first| first.0));
            return Err(DataError::NothingAdmitted { first, easiest });
        }
        growth.iter().for_each(|(step, end)| sum.update(&[step.to_le_bytes(), end.to_le_bytes()].concat()));
        Ok(Admission { samples: samples.into(), order, growth, digest: Digest(sum.finalize()) })
    }

    /// How many sequences are in at a step, from 1; at least one is.
    pub fn pool(&self, step: u64) -> u64 {
        let begun = self.growth.partition_point(|(from, _)| *from <= step).max(1);
        self.growth[begun - 1].1
    }

    /// How many sequences there are, whether they come in or not.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// How many of them never come in.
    pub fn left_out(&self) -> u64 {
        self.samples - self.order.len() as u64
    }

    /// Which sequence was the `place`-th to come in.
    pub(super) fn sequence(&self, place: u64) -> u64 {
        u64::from(self.order[place as usize])
    }

    /// Tells it from others.
    pub(super) fn digest(&self) -> Digest {
        self.digest
    }
}
