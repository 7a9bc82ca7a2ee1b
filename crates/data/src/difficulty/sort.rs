//! Sorts more pairs than memory has room for: runs are sorted in memory, written to a file without a name that stays, and merged.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::Path;

use crate::error::{DataError, Result};
use crate::new_file::New;
use crate::token_file::read_at;

/// A difficulty, and whose it is.
pub(super) type Pair = (u64, u32);

/// So many pairs, 64 MiB, are held at most.
pub(super) const HELD_PAIRS: usize = 4 << 20;
/// A pair in the file.
const PAIR_BYTES: usize = 12;
/// So many pairs of each run are read at a time.
const READ_PAIRS: u64 = 4096;

/// Takes pairs in any order.
pub(super) struct Sorter {
    held_at_most: usize,
    held: Vec<Pair>,
    spilled: Option<Spilled>,
}

/// Sorted runs, one after the other.
struct Spilled {
    new: New,
    out: BufWriter<File>,
    /// The pairs of each run.
    runs: Vec<Range<u64>>,
}

impl Sorter {
    pub(super) fn new(held_at_most: usize) -> Sorter {
        Sorter { held_at_most, held: Vec::new(), spilled: None }
    }

    /// Takes a pair; runs are written beside `place`.
    pub(super) fn push(&mut self, pair: Pair, place: &Path) -> Result<()> {
        self.held.push(pair);
        if self.held.len() >= self.held_at_most { self.spill(place) } else { Ok(()) }
    }

    fn spill(&mut self, place: &Path) -> Result<()> {
        self.held.sort_unstable();
        let spilled = match &mut self.spilled {
            Some(spilled) => spilled,
            None => {
                let (new, file) = New::beside(place)?;
                self.spilled.insert(Spilled { new, out: BufWriter::new(file), runs: Vec::new() })
            }
        };
        let start = spilled.runs.last().map_or(0, |run| run.end);
        for (difficulty, sample) in &self.held {
            let written = spilled.out.write_all(&difficulty.to_le_bytes());
            written
                .and_then(|()| spilled.out.write_all(&sample.to_le_bytes()))
                .map_err(DataError::io(&spilled.new.path))?;
        }
        spilled.runs.push(start..start + self.held.len() as u64);
        self.held.clear();
        Ok(())
    }

    /// Hands all pairs over in order.
    pub(super) fn finish(mut self, mut take: impl FnMut(Pair) -> Result<()>) -> Result<()> {
        self.held.sort_unstable();
        let Some(Spilled { new, out, runs }) = self.spilled else {
            return self.held.into_iter().try_for_each(take);
        };
        let file = out.into_inner().map_err(|error| DataError::io(&new.path)(error.into_error()))?;
        // What is still held is a run like the others.
        let mut runs: Vec<Run> =
            runs.into_iter().map(|rest| Run { rest, read: Vec::new().into_iter() }).collect();
        runs.push(Run { rest: 0..0, read: self.held.into_iter() });
        let mut first = BinaryHeap::new();
        for (index, run) in runs.iter_mut().enumerate() {
            first.extend(run.next(&new.path, &file)?.map(|pair| Reverse((pair, index))));
        }
        while let Some(Reverse((pair, index))) = first.pop() {
            take(pair)?;
            first.extend(runs[index].next(&new.path, &file)?.map(|pair| Reverse((pair, index))));
        }
        Ok(())
    }
}

/// A run that is read.
struct Run {
    rest: Range<u64>,
    read: std::vec::IntoIter<Pair>,
}

impl Run {
    fn next(&mut self, path: &Path, file: &File) -> Result<Option<Pair>> {
        if let Some(pair) = self.read.next() {
            return Ok(Some(pair));
        }
        let count = READ_PAIRS.min(self.rest.end - self.rest.start);
        let mut bytes = vec![0; count as usize * PAIR_BYTES];
        read_at(path, file, &mut bytes, self.rest.start * PAIR_BYTES as u64)?;
        self.rest.start += count;
        let pairs = bytes.chunks_exact(PAIR_BYTES).map(|pair| {
            let (difficulty, sample) = pair.split_at(8);
            let number = u64::from_le_bytes(difficulty.try_into().unwrap_or_default());
            (number, u32::from_le_bytes(sample.try_into().unwrap_or_default()))
        });
        self.read = pairs.collect::<Vec<_>>().into_iter();
        Ok(self.read.next())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampler::mix;

    #[test]
    fn pairs_come_in_order_however_few_are_held_and_nothing_of_them_stays() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("x");
        let pairs: Vec<Pair> = (0..20_000).map(|n| (mix(u64::from(n)) % 50, n)).collect();
        let mut wanted = pairs.clone();
        wanted.sort_unstable();
        for held in [1000, 6000, 20_000, 20_001] {
            let mut sorter = Sorter::new(held);
            pairs.iter().try_for_each(|&pair| sorter.push(pair, &place)).unwrap();
            let mut got = Vec::new();
            sorter
                .finish(|pair| {
                    got.push(pair);
                    Ok(())
                })
                .unwrap();
            assert_eq!(got, wanted, "{held} held");
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        }
    }
}
