//! What a swap file should hold: a checksum of every stretch that was written, kept in memory.
//!
//! Disks, controllers and cables turn bits over and mostly notice; what they do not notice would go on as a weight or a moment,
//! and into every checkpoint after it. A swap file lives no longer than its process, so its checksums need no file. They
//! are made and compared by whoever ends a request (the thread of the ring, or one of the queue's), beside the caller.
//!
//! A stretch that is read in other bounds than it was written in is not judged.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The checksums of a file's stretches, which do not overlap, by where they begin.
#[derive(Debug, Default)]
pub(crate) struct Sums(Mutex<BTreeMap<u64, Stretch>>);

#[derive(Debug, Clone, Copy)]
struct Stretch {
    end: u64,
    sum: u32,
}

impl Sums {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Stretch>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// These bytes lie there now.
    pub(crate) fn note(&self, offset: u64, bytes: &[u8]) {
        let stretch = Stretch { end: offset + bytes.len() as u64, sum: crc32fast::hash(bytes) };
        let mut stretches = self.lock();
        forget(&mut stretches, offset, stretch.end);
        stretches.insert(offset, stretch);
    }

    /// Nobody knows what lies there.
    pub(crate) fn forget(&self, offset: u64, length: usize) {
        forget(&mut self.lock(), offset, offset + length as u64);
    }

    /// Whether these bytes can be what was written there.
    pub(crate) fn agree(&self, offset: u64, bytes: &[u8]) -> bool {
        let known = self.lock().get(&offset).copied();
        known.is_none_or(|known| {
            known.end != offset + bytes.len() as u64 || known.sum == crc32fast::hash(bytes)
        })
    }
}

fn forget(stretches: &mut BTreeMap<u64, Stretch>, begin: u64, end: u64) {
    let before = stretches.range(..begin).next_back().filter(|(_, stretch)| stretch.end > begin);
    let first = before.map_or(begin, |(start, _)| *start);
    let gone: Vec<u64> = stretches.range(first..end).map(|(start, _)| *start).collect();
    for start in gone {
        stretches.remove(&start);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_over_in_other_bounds_is_not_judged_any_more() {
        let sums = Sums::default();
        sums.note(0, &[1; 100]);
        sums.note(100, &[2; 100]);
        assert!(sums.agree(0, &[1; 100]) && !sums.agree(0, &[3; 100]));
        // Of other bounds nothing is known.
        assert!(sums.agree(0, &[3; 50]) && sums.agree(50, &[3; 100]));
        sums.note(50, &[4; 100]);
        assert!(sums.agree(0, &[3; 100]) && sums.agree(100, &[3; 100]) && !sums.agree(50, &[3; 100]));
        sums.forget(149, 1);
        assert!(sums.agree(50, &[3; 100]));
    }
}
