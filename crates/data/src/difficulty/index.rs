//! An index, read: who is how hard.

use std::path::{Path, PathBuf};

use super::file::{Holds, IndexReader, MAKE_ANEW};
use super::{IndexedData, Scale};
use crate::error::{DataError, Result};

/// The sequences of a run by rising difficulty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetricIndex {
    metric: String,
    values: u32,
    order: Vec<u32>,
    /// Each difficulty, and how many sequences are no harder; read where difficulties count.
    rows: Vec<(u64, u64)>,
}

impl MetricIndex {
    /// The two files of a metric's index in a folder: of sequences, of difficulties.
    pub fn files(folder: &Path, metric: &str) -> [PathBuf; 2] {
        [Holds::Samples, Holds::Difficulties]
            .map(|holds| folder.join(format!("{metric}_{}.index", holds.name())))
    }

    /// Looks at the beginning of an index's files, where the data is not there to compare them with; says what was measured.
    pub fn look(samples: &Path, difficulties: Option<&Path>, sequence: u64) -> Result<String> {
        let mut readers = vec![(samples, IndexReader::open(samples, Holds::Samples)?)];
        if let Some(path) = difficulties {
            readers.push((path, IndexReader::open(path, Holds::Difficulties)?));
        }
        for (path, reader) in &readers {
            let of = reader.header.of;
            if let Some(how) = of.difference(&IndexedData { sequence, ..of }) {
                return Err(DataError::bad_file(path, format!("{how}; {MAKE_ANEW}")));
            }
        }
        Ok(readers.swap_remove(0).1.header.metric)
    }

    /// Reads an index of this data. Difficulties are needed where they count, and not for percentiles.
    pub fn open(samples: &Path, difficulties: Option<&Path>, of: &IndexedData) -> Result<MetricIndex> {
        let reader = IndexReader::open(samples, Holds::Samples)?.expect(of)?;
        let header = reader.header.clone();
        let order = reader.records::<4>()?.into_iter().map(u32::from_le_bytes).collect::<Vec<_>>();
        let mut seen = vec![false; order.len()];
        for (place, &sample) in order.iter().enumerate() {
            match seen.get_mut(sample as usize) {
                Some(seen) if !*seen => *seen = true,
                _ => {
                    let why =
                        format!("names sequence {sample} twice, or has none of that number; {MAKE_ANEW}");
                    return Err(DataError::bad_place(samples, format!("record {place}"), why));
                }
            }
        }
        let mut rows = Vec::new();
        if let Some(path) = difficulties {
            let reader = IndexReader::open(path, Holds::Difficulties)?.expect(of)?;
            if (&reader.header.metric, reader.header.values) != (&header.metric, header.values) {
                let why = format!(
                    "is of {}, and {} of {}: they are not of one analysis; {MAKE_ANEW}",
                    reader.header.metric,
                    samples.display(),
                    header.metric
                );
                return Err(DataError::bad_file(path, why));
            }
            rows = reader.records::<16>()?.into_iter().map(row).collect();
            let rises = rows.is_sorted_by(|one: &(u64, u64), next| one.0 < next.0 && one.1 < next.1);
            let is_all = rows.last().is_some_and(|row| row.1 == order.len() as u64) && rows[0].1 > 0;
            if !rises || !is_all {
                return Err(DataError::bad_file(path, format!("its difficulties do not rise; {MAKE_ANEW}")));
            }
        }
        Ok(MetricIndex { metric: header.metric, values: header.values, order, rows })
    }

    /// What was measured.
    pub fn metric(&self) -> &str {
        &self.metric
    }

    /// A checksum of the difficulties of all sequences.
    pub(super) fn values(&self) -> u32 {
        self.values
    }

    /// Each sequence with its difficulty on a scale, the easiest first.
    pub(super) fn difficulties(&self, scale: Scale) -> impl Iterator<Item = (u32, u64)> {
        let (samples, mut row) = (self.order.len() as u64, 0);
        self.order.iter().zip(0u64..).map(move |(&sample, place)| {
            let difficulty = match scale {
                Scale::Value => {
                    while self.rows.get(row).is_some_and(|(_, end)| *end <= place) {
                        row += 1;
                    }
                    self.rows.get(row).map_or(u64::MAX, |(difficulty, _)| *difficulty)
                }
                // Of `last` parts of equal size, up to rounding, the one that it is in, from 1.
                Scale::Percentile { last } => {
                    let part = (u128::from(place + 1) * u128::from(last)).div_ceil(u128::from(samples));
                    u64::try_from(part).unwrap_or(u64::MAX)
                }
            };
            (sample, difficulty)
        })
    }
}

fn row(bytes: [u8; 16]) -> (u64, u64) {
    let all = u128::from_le_bytes(bytes);
    (all as u64, (all >> 64) as u64)
}
