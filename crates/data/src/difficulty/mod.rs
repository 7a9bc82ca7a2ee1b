//! Which sequences are hard, and an order in which the easy ones come first.
//!
//! [`analyze`] gives every sequence to train on a number, its difficulty by a [`Metric`], and writes it down as an index: two
//! files that a [`MetricIndex`] reads again. [`Admission`] says from which step on each sequence may be drawn, where one or
//! several such metrics have to be reached; a [`PoolSampler`] draws from those that may be, each once per pass.
//!
//! # The files of an index
//! All numbers are little-endian.
//!
//! | bytes | content |
//! | --- | --- |
//! | 8 | `FSPINDEX` |
//! | 4 | version, 1 |
//! | 4 | length of the header, at most 64 KiB |
//! | … | header, JSON: what the records are, the metric, a checksum of all difficulties, and of which data they are |
//! | … | records |
//! | 4 | CRC-32 of all that comes before |
//!
//! Of `METRIC_index_to_sample.index` a record is a sequence's number (u32), by rising difficulty, equals by rising number. Of
//! `METRIC_index_to_metric.index` it is a difficulty (u64) and how many sequences are no harder (u64). A file gets its name when it
//! is whole. An index of other data, of other sequences, or of another analysis than its twin is refused.

mod admission;
mod analysis;
mod file;
mod index;
mod pool;
mod sort;
mod weights;

use serde::{Deserialize, Serialize};

use crate::error::{DataError, Result};
use crate::fingerprint::Fingerprint;
use crate::sequences::{Sequences, Split};

pub use admission::{Admission, MetricSchedule, Scale};
pub use analysis::{Analysis, Metric, analyze};
pub use index::MetricIndex;
pub use pool::{Pass, PoolSampler};

/// What an index numbers: the sequences of some data that are trained on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IndexedData {
    /// Their tokens.
    data: Fingerprint,
    /// Tokens per sequence.
    sequence: u64,
    /// How many are trained on.
    samples: u64,
    /// How many of the same data are kept for validation, between the others.
    validation: u64,
}

impl IndexedData {
    /// Reads some of the data.
    pub fn of(sequences: &Sequences) -> Result<IndexedData> {
        let (data, of_validation) = sequences.fingerprints()?;
        let samples = sequences.count(Split::Train);
        // They are held as such.
        if samples > u64::from(u32::MAX) {
            return Err(DataError::TooManySequences { sequences: samples });
        }
        let validation = if of_validation.is_some() { 0 } else { sequences.count(Split::Validation) };
        Ok(IndexedData { data, sequence: sequences.length(), samples, validation })
    }

    /// How many sequences are trained on.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// Tokens per sequence.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// In what the data of an index is not that of a run.
    fn difference(&self, run: &IndexedData) -> Option<String> {
        if self.sequence != run.sequence {
            return Some(format!(
                "is of sequences of {} tokens, and here they have {}",
                self.sequence, run.sequence
            ));
        }
        if (self.samples, self.validation) != (run.samples, run.validation) {
            return Some(format!(
                "is of {} sequences to train on with {} kept for validation, and here there are {} and {}",
                self.samples, self.validation, run.samples, run.validation
            ));
        }
        (self.data != run.data).then(|| "is of other tokens than these, though as many".to_owned())
    }
}
