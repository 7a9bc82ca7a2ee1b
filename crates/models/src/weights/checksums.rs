//! Checksums of the parts of a weight file, each compared when something of its part is first read.
//!
//! Torch's files have one per array. Safetensors and GGUF have none.

use std::ops::Range;
use std::sync::OnceLock;

use ferrospeed_checkpoint::pt::zip::Entry;

/// A part of a file, and what its bytes should give.
#[derive(Debug)]
struct Part {
    entry: Entry,
    /// What they gave, once they were read.
    found: OnceLock<u32>,
}

/// The parts of a file that have a checksum, in order of their place.
#[derive(Debug, Default)]
pub(super) struct Checksums(Vec<Part>);

impl Checksums {
    pub(super) fn of_entries(entries: impl IntoIterator<Item = Entry>) -> Checksums {
        let has_checksum = |entry: &Entry| entry.crc32 != 0 && entry.bytes > 0;
        let mut entries: Vec<Entry> = entries.into_iter().filter(has_checksum).collect();
        entries.sort_by_key(|entry| entry.start);
        // Tensors may share an array.
        entries.dedup_by_key(|entry| entry.start);
        Checksums(entries.into_iter().map(|entry| Part { entry, found: OnceLock::new() }).collect())
    }

    /// Makes sure of the part that lies around `at`; `crc32` gives the checksum of a stretch of the file. An error says which part
    /// is damaged.
    pub(super) fn check<E>(
        &self,
        at: u64,
        crc32: impl FnOnce(Range<u64>) -> Result<u32, E>,
    ) -> Result<Result<(), String>, E> {
        let behind = self.0.partition_point(|part| part.entry.start <= at);
        let around = |part: &&Part| at < part.entry.start + part.entry.bytes;
        let Some(part) = self.0[..behind].last().filter(around) else { return Ok(Ok(())) };
        let Entry { name, start, bytes, crc32: expected } = &part.entry;
        let found = match part.found.get() {
            Some(found) => *found,
            None => {
                let found = crc32(*start..start + bytes)?;
                *part.found.get_or_init(|| found)
            }
        };
        if found == *expected {
            return Ok(Ok(()));
        }
        Ok(Err(format!(
            "its entry '{name}' is damaged (checksum {found:08x}, expected {expected:08x}): copy or save the file once more"
        )))
    }
}
