//! What a file held when tokens were made from it. Its time says nothing of that: an editor, a copy or an archive may give new content
//! the old one.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};

use crate::error::{DataError, Result};
use crate::sampler::mix;

/// Files of so many bytes together are read whole, which takes a second or two; of more, blocks that are spread evenly.
const READ_BYTES: u64 = 4 << 30;
const BLOCK_BYTES: u64 = 1 << 20;

/// A file as it was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileStamp {
    pub(crate) path: PathBuf,
    pub(crate) bytes: u64,
    /// Of its content, or of some blocks of it.
    digest: u64,
    /// Its time, where not all of it is read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    modified_ns: Option<u64>,
}

/// The stamps of files that belong together.
pub(crate) fn stamps(paths: &[PathBuf]) -> Result<Vec<FileStamp>> {
    stamps_within(paths, READ_BYTES)
}

/// The same, where so many bytes are read.
pub(crate) fn stamps_within(paths: &[PathBuf], read_bytes: u64) -> Result<Vec<FileStamp>> {
    let sizes = paths.iter().map(|path| Ok(std::fs::metadata(path).map_err(DataError::io(path))?.len()));
    let total: u64 = sizes.collect::<Result<Vec<_>>>()?.iter().sum();
    // One block of so many.
    let stride = total.div_ceil(read_bytes.max(1)).max(1);
    paths.iter().map(|path| FileStamp::of(path, stride)).collect()
}

impl FileStamp {
    /// Whether it is the same file, wherever it lies.
    pub(crate) fn is_of_the_same(&self, other: &FileStamp) -> bool {
        let content = |stamp: &FileStamp| (stamp.bytes, stamp.digest, stamp.modified_ns);
        content(self) == content(other)
    }

    /// One block of `stride` counts, and the last.
    fn of(path: &Path, stride: u64) -> Result<FileStamp> {
        let file = ferrospeed_files::open(path).map_err(DataError::io(path))?;
        let about = file.metadata().map_err(DataError::io(path))?;
        let bytes = about.len();
        let modified_ns = match stride {
            1 => None,
            _ => {
                let modified = about.modified().map_err(DataError::io(path))?;
                Some(modified.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64))
            }
        };
        let blocks = bytes.div_ceil(BLOCK_BYTES);
        let counted = (0..blocks).filter(|block| block % stride == 0 || block + 1 == blocks);
        let mut buffer = vec![0; BLOCK_BYTES.min(bytes) as usize];
        let mut digest = 0;
        for block in counted {
            let start = block * BLOCK_BYTES;
            let buffer = &mut buffer[..BLOCK_BYTES.min(bytes - start) as usize];
            read_block(&file, buffer, start).map_err(DataError::io(path))?;
            digest = mix(digest ^ u64::from(crc32fast::hash(buffer)));
        }
        let path = std::path::absolute(path).map_err(DataError::io(path))?;
        Ok(FileStamp { path, bytes, digest, modified_ns })
    }
}

/// A file that has become shorter meanwhile has another content, which the digest shows.
fn read_block(file: &File, buffer: &mut [u8], start: u64) -> std::io::Result<()> {
    match file.read_exact_at(buffer, start) {
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Ok(()),
        read => read,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_counts_and_of_what_is_too_large_the_blocks_that_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text");
        let blocks = 8;
        let mut text = vec![b'a'; (blocks * BLOCK_BYTES) as usize + 5];
        std::fs::write(&path, &text).unwrap();
        let time = std::fs::metadata(&path).unwrap().modified().unwrap();
        let stamps = |read_bytes: u64| stamps_within(std::slice::from_ref(&path), read_bytes).unwrap();
        let (all, some) = (stamps(READ_BYTES), stamps(3 * BLOCK_BYTES));
        assert!(all[0].modified_ns.is_none() && some[0].modified_ns.is_some());
        for (place, is_read) in
            [(0, true), (3 * BLOCK_BYTES, true), (4 * BLOCK_BYTES, false), (blocks * BLOCK_BYTES + 4, true)]
        {
            text[place as usize] = b'b';
            std::fs::write(&path, &text).unwrap();
            std::fs::File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
            assert_ne!(stamps(READ_BYTES), all, "byte {place}");
            assert_eq!(stamps(3 * BLOCK_BYTES) != some, is_read, "byte {place}");
            text[place as usize] = b'a';
        }
    }
}
