//! How likely the model held every answer before it was trained, which preferences are measured against.
//!
//! The weights that a run starts from are in place before a checkpoint replaces them, so that is when all rows are looked at: no second
//! model is ever held, and a run that goes on finds the same numbers. They are kept beside the tokens, in a file that says what it
//! was made of and has a checksum; whatever has changed, or is damaged, is made again.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ferrospeed_comm::ReduceOp;
use ferrospeed_data::Split;
use serde_json::{Value, json};

use super::listening::Listening;
use super::{Progress, Run};
use crate::checkpoint::StopRequests;
use crate::error::{Result, TrainError};
use crate::objective::Documents;

/// Of both documents of every row to train on, and to validate on.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Reference {
    train: Vec<[f64; 2]>,
    validation: Vec<[f64; 2]>,
}

/// A file of more is none of ours: rows are pairs of numbers.
const MAX_BYTES: u64 = 1 << 36;
/// Whoever waits reads how far it is.
const LINES_APART: Duration = Duration::from_secs(10);
const SPLITS: [Split; 2] = [Split::Train, Split::Validation];

impl Reference {
    /// Of a row.
    pub(super) fn of(&self, split: Split, row: u64) -> [f64; 2] {
        let rows = match split {
            Split::Train => &self.train,
            Split::Validation => &self.validation,
        };
        rows.get(row as usize).copied().unwrap_or_default()
    }

    fn numbers(&self) -> Vec<f64> {
        [&self.train[..], &self.validation[..]].concat().into_flattened()
    }

    fn of_numbers(numbers: &[f64], counts: [u64; 2]) -> Reference {
        let mut rows = numbers.chunks_exact(2).map(|pair| [pair[0], pair[1]]);
        let [train, validation] = counts.map(|count| rows.by_ref().take(count as usize).collect());
        Reference { train, validation }
    }
}

impl Run<'_> {
    /// Finds the reference of every row, or makes it from the weights as they are. All ranks call it together.
    pub(super) fn find_reference(
        &mut self,
        folder: &Path,
        made_from: &Value,
        requests: &StopRequests,
        progress: &mut dyn Progress,
    ) -> Result<Reference> {
        let counts = SPLITS.map(|split| self.sequences.count(split));
        let mut numbers = vec![0.0; 2 * (counts[0] + counts[1]) as usize];
        let leads = self.engine.world().rank() == 0;
        let path = file_for(folder, made_from);
        let found = if leads { read(&path, made_from, numbers.len()) } else { None };
        let mut is_found = [f32::from(u8::from(found.is_some()))];
        let group = self.engine.world().group();
        group.all_reduce(&mut is_found, ReduceOp::Max)?;
        if let Some(found) = found {
            numbers = found;
        }
        if is_found[0] > 0.0 {
            // Rank 0 alone has read it; the others add nothing.
            group.all_reduce(&mut numbers, ReduceOp::Sum)?;
            return Ok(Reference::of_numbers(&numbers, counts));
        }
        if leads {
            let rows = counts[0] + counts[1];
            progress.warning(&format!(
                "the reference is made first: how likely the start weights hold both answers of {rows} rows"
            ));
        }
        let made = self.make_reference(counts, requests, progress)?;
        if leads {
            write(&path, made_from, &made.numbers())?;
        }
        Ok(made)
    }

    /// Each rank looks at its share of the rows. Nothing is kept of what is stopped on the way.
    fn make_reference(
        &mut self,
        counts: [u64; 2],
        requests: &StopRequests,
        progress: &mut dyn Progress,
    ) -> Result<Reference> {
        let (rank, ranks) = (self.engine.data_rank() as u64, self.engine.data_ranks() as u64);
        let size = self.engine.train_micro_batch_size_per_gpu();
        let mut numbers = vec![0.0; 2 * (counts[0] + counts[1]) as usize];
        let mut listening = Listening::new(self.engine.world().group(), requests, None);
        let (leads, mut told) = (self.engine.world().rank() == 0, Instant::now());
        self.engine.eval();
        for (split, count) in SPLITS.into_iter().zip(counts) {
            let before = if split == Split::Train { 0 } else { counts[0] };
            for round in 0..count.div_ceil(ranks * size) {
                if let ControlFlow::Break(ending) = listening.round()? {
                    return Err(TrainError::StoppedAtOnce(ending));
                }
                if leads && told.elapsed() >= LINES_APART {
                    told = Instant::now();
                    let (done, all) = (before + round * ranks * size, counts[0] + counts[1]);
                    progress.warning(&format!("the reference is being made: {done} of {all} rows"));
                }
                let first = (round * ranks + rank) * size;
                let own: Vec<u64> = (first..(first + size).min(count)).collect();
                // Every rank takes part in every round: stage 3 gathers together.
                let indices = if own.is_empty() { vec![0] } else { own.clone() };
                let rows = self.rows_of(split, &indices, Documents::Both)?;
                for (index, row) in own.iter().zip(&rows) {
                    let place = 2 * (before + index) as usize;
                    numbers[place..place + 2]
                        .copy_from_slice(&row.documents.map(|document| document.answer.logprob));
                }
            }
        }
        self.engine.train();
        self.engine.world().group().all_reduce(&mut numbers, ReduceOp::Sum)?;
        Ok(Reference::of_numbers(&numbers, counts))
    }
}

fn file_for(folder: &Path, made_from: &Value) -> PathBuf {
    let key = crc32fast::hash(made_from.to_string().as_bytes());
    folder.join(format!("reference-{key:08x}.bin"))
}

/// The numbers of a file, where it is whole and made of the same.
fn read(path: &Path, made_from: &Value, count: usize) -> Option<Vec<f64>> {
    let bytes = ferrospeed_files::read(path, MAX_BYTES).ok()?;
    let end = bytes.iter().position(|&byte| byte == b'\n')?;
    let (head, numbers) = (serde_json::from_slice::<Value>(&bytes[..end]).ok()?, &bytes[end + 1..]);
    let is_whole = head["made_from"] == *made_from
        && head["checksum"] == crc32fast::hash(numbers)
        && numbers.len() == 8 * count;
    is_whole.then(|| {
        numbers.chunks_exact(8).filter_map(|n| Some(f64::from_le_bytes(n.try_into().ok()?))).collect()
    })
}

fn write(path: &Path, made_from: &Value, numbers: &[f64]) -> Result<()> {
    let numbers: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    let head = json!({ "made_from": made_from, "checksum": crc32fast::hash(&numbers) });
    let mut bytes = format!("{head}\n").into_bytes();
    bytes.extend(numbers);
    if let Some(folder) = path.parent() {
        ferrospeed_files::create_folder(folder).map_err(TrainError::io(folder))?;
    }
    ferrospeed_files::write(path, bytes).map_err(TrainError::io(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_other_weights_or_with_another_byte_is_not_believed() {
        let folder = tempfile::tempdir().unwrap();
        let (path, made_from) = (folder.path().join("a.bin"), json!({ "weights": 1 }));
        let numbers = [1.5, -2.25, f64::MIN_POSITIVE, 0.0];
        write(&path, &made_from, &numbers).unwrap();
        assert_eq!(read(&path, &made_from, 4).unwrap(), numbers);
        assert_eq!(read(&path, &made_from, 2), None);
        assert_eq!(read(&path, &json!({ "weights": 2 }), 4), None);
        let whole = std::fs::read(&path).unwrap();
        for at in (0..whole.len()).step_by(5).chain([whole.len() - 1]) {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            std::fs::write(&path, &damaged).unwrap();
            assert_eq!(read(&path, &made_from, 4), None, "byte {at}");
            std::fs::write(&path, &whole[..at]).unwrap();
            assert_eq!(read(&path, &made_from, 4), None, "cut at {at}");
        }
        let reference = Reference::of_numbers(&numbers, [1, 1]);
        assert_eq!(
            (reference.of(Split::Train, 0), reference.of(Split::Validation, 0)),
            ([1.5, -2.25], [f64::MIN_POSITIVE, 0.0])
        );
    }
}
