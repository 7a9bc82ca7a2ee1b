//! One safetensors file, or the data part of another kind: its header is read and checked when it is opened, tensors are read
//! on demand.
//!
//! Files are read with positioned reads, never mapped: reading a model then needs the memory of the buffers alone,
//! and a file that shrinks while it is read gives an error instead of a signal.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crc32fast::Hasher;
use ferrospeed_tensor::loops::threads;
use safetensors::tensor::Metadata;

use crate::error::{ModelError, Result};
use crate::json;
use crate::weights::checksums::Checksums;

/// Longer headers are refused, as the format's own library does.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// What one thread fills at a time.
const SHARE_BYTES: usize = 2 << 20;
/// Bytes that wait to be widened.
const STAGING_BYTES: usize = 256 << 10;

/// An open file whose header is sound.
#[derive(Debug)]
pub(crate) struct WeightFile {
    pub(super) path: PathBuf,
    pub(super) file: File,
    data_start: u64,
    checksums: Checksums,
}

impl WeightFile {
    /// A file whose header somebody else has read and found sound.
    pub(crate) fn of_data(path: &Path, file: File, data_start: u64) -> WeightFile {
        WeightFile { path: path.to_path_buf(), file, data_start, checksums: Checksums::default() }
    }

    /// The same file, with what parts of it should give.
    pub(super) fn checked_by(self, checksums: Checksums) -> WeightFile {
        WeightFile { checksums, ..self }
    }

    /// Opens a file: every tensor its header names lies inside it, and no two overlap.
    pub(super) fn open(path: &Path) -> Result<(WeightFile, Metadata)> {
        let refuse = |why: String| ModelError::file(path, why);
        let file = ferrospeed_files::open(path).map_err(ModelError::io(path))?;
        let file_bytes = file.metadata().map_err(ModelError::io(path))?.len();
        let mut length = [0; 8];
        if file_bytes < 8 {
            return Err(refuse(format!("is no safetensors file: it has {file_bytes} bytes")));
        }
        file.read_exact_at(&mut length, 0).map_err(ModelError::io(path))?;
        let header_bytes = u64::from_le_bytes(length);
        if header_bytes > MAX_HEADER_BYTES {
            return Err(refuse(format!(
                "is no safetensors file: it announces a header of {header_bytes} bytes, more than {MAX_HEADER_BYTES}"
            )));
        }
        if header_bytes > file_bytes - 8 {
            return Err(refuse(format!(
                "is cut short: its header has {header_bytes} bytes, the whole file {file_bytes}"
            )));
        }
        let mut header = vec![0; header_bytes as usize];
        file.read_exact_at(&mut header, 8).map_err(ModelError::io(path))?;
        let metadata: Metadata = json::parse(&header)
            .and_then(serde_json::from_value)
            .map_err(|error| refuse(format!("has a bad safetensors header: {error}")))?;
        let expected_bytes = 8 + header_bytes + metadata.data_len() as u64;
        if expected_bytes != file_bytes {
            let what = if file_bytes < expected_bytes {
                "is cut short"
            } else {
                "has bytes that belong to no tensor"
            };
            return Err(refuse(format!(
                "{what}: its header describes {expected_bytes} bytes, the file has {file_bytes}"
            )));
        }
        Ok((WeightFile::of_data(path, file, 8 + header_bytes), metadata))
    }

    /// Reads bytes of the data part.
    pub(crate) fn read(&self, start: usize, out: &mut [u8]) -> Result<()> {
        self.make_sure_of(start)?;
        self.in_shares(out, |first, share| self.read_here(start + first, share))
    }

    /// Reads numbers of two bytes from the data part and widens them.
    pub(super) fn read_widened(
        &self,
        start: usize,
        out: &mut [f32],
        widen: impl Fn([u8; 2]) -> f32 + Sync,
    ) -> Result<()> {
        self.make_sure_of(start)?;
        self.in_shares(out, |first, share| {
            let mut staging = vec![0; STAGING_BYTES.min(2 * share.len())];
            let mut position = start + 2 * first;
            for part in share.chunks_mut(STAGING_BYTES / 2) {
                let bytes = &mut staging[..2 * part.len()];
                self.read_here(position, bytes)?;
                position += bytes.len();
                for (value, pair) in part.iter_mut().zip(bytes.as_chunks().0) {
                    *value = widen(*pair);
                }
            }
            Ok(())
        })
    }

    /// Compares the checksum of what lies around a place of the data part, the first time that something of it is read.
    fn make_sure_of(&self, start: usize) -> Result<()> {
        let checked = self.checksums.check(self.data_start + start as u64, |part| self.crc32(part))?;
        checked.map_err(|why| ModelError::file(&self.path, why))
    }

    /// The checksum of a stretch of the file, whose parts are read with all threads.
    fn crc32(&self, stretch: Range<u64>) -> Result<u32> {
        let share = STAGING_BYTES as u64;
        let starts = (stretch.start..stretch.end).step_by(STAGING_BYTES);
        let mut parts: Vec<Hasher> = starts.map(|_| Hasher::new()).collect();
        // An element is a share, so that each is one thread's.
        self.in_shares_of(1, &mut parts, |first, part| {
            let begin = stretch.start + first as u64 * share;
            let mut bytes = vec![0; (stretch.end - begin).min(share) as usize];
            self.file.read_exact_at(&mut bytes, begin)?;
            part.iter_mut().for_each(|hasher| hasher.update(&bytes));
            Ok(())
        })?;
        let mut whole = Hasher::new();
        parts.iter().for_each(|part| whole.combine(part));
        Ok(whole.finalize())
    }

    fn read_here(&self, start: usize, out: &mut [u8]) -> std::io::Result<()> {
        self.file.read_exact_at(out, self.data_start + start as u64)
    }

    /// Fills `out`, where it is long with all threads: one alone cannot bring pages into memory as fast as the system's cache
    /// gives them. `fill` is given a share and the place of its first element.
    fn in_shares<T: Send>(
        &self,
        out: &mut [T],
        fill: impl Fn(usize, &mut [T]) -> std::io::Result<()> + Sync,
    ) -> Result<()> {
        self.in_shares_of(SHARE_BYTES / size_of::<T>(), out, fill)
    }

    /// The same in shares of so many elements.
    fn in_shares_of<T: Send>(
        &self,
        length: usize,
        out: &mut [T],
        fill: impl Fn(usize, &mut [T]) -> std::io::Result<()> + Sync,
    ) -> Result<()> {
        let first_error = Mutex::new(None);
        let shares: Vec<Mutex<&mut [T]>> = out.chunks_mut(length).map(Mutex::new).collect();
        let fill = |share: usize| {
            if let Err(error) = fill(share * length, &mut lock(&shares[share])) {
                lock(&first_error).get_or_insert(error);
            }
        };
        match shares.len() {
            0 => {}
            1 => fill(0),
            count => threads::shared().run(count, fill),
        }
        lock(&first_error).take().map_or(Ok(()), |error| Err(ModelError::io(&self.path)(error)))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
