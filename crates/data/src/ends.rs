//! Where documents end in a token file that was made here: a file of numbers beside it, searched where it lies, since there
//! may be more documents than memory has room for.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use crate::error::{DataError, Result};
use crate::new_file::Summed;
use crate::token_file::read_at;

/// An end is a u64, little-endian: the number of tokens up to it.
const END_BYTES: u64 = 8;

/// The ends of documents, in order.
#[derive(Debug)]
pub(crate) struct Ends {
    path: PathBuf,
    file: File,
    count: u64,
}

impl Ends {
    /// `None` unless the file is there with so many ends.
    pub(crate) fn open(path: &Path, count: u64) -> Result<Option<Ends>> {
        let Ok(file) = ferrospeed_files::open(path) else { return Ok(None) };
        let bytes = file.metadata().map_err(DataError::io(path))?.len();
        let is_whole = Some(bytes) == count.checked_mul(END_BYTES);
        Ok(is_whole.then(|| Ends { path: path.to_path_buf(), file, count }))
    }

    fn at(&self, index: u64) -> Result<u64> {
        let mut end = [0; END_BYTES as usize];
        read_at(&self.path, &self.file, &mut end, index * END_BYTES)?;
        Ok(u64::from_le_bytes(end))
    }

    /// How many ends are not behind a token.
    fn up_to(&self, token: u64) -> Result<u64> {
        let (mut low, mut high) = (0, self.count);
        while low < high {
            let middle = low + (high - low) / 2;
            if self.at(middle)? <= token {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        Ok(low)
    }

    /// The ends behind `start` and before `start + count`.
    pub(crate) fn within(&self, start: u64, count: u64) -> Result<Vec<u64>> {
        let (first, end) = (self.up_to(start)?, start.saturating_add(count));
        let mut ends = Vec::new();
        for index in first..self.count {
            match self.at(index)? {
                found if found < end => ends.push(found),
                _ => break,
            }
        }
        Ok(ends)
    }
}

/// Writes the ends of documents as they come.
pub(crate) struct EndsWriter {
    path: PathBuf,
    out: BufWriter<Summed>,
    count: u64,
}

impl EndsWriter {
    pub(crate) fn new(path: &Path, file: File) -> EndsWriter {
        EndsWriter { path: path.to_path_buf(), out: BufWriter::new(Summed::new(file)), count: 0 }
    }

    pub(crate) fn write(&mut self, end: u64) -> Result<()> {
        self.count += 1;
        self.out.write_all(&end.to_le_bytes()).map_err(DataError::io(&self.path))
    }

    /// How many there are, and their checksum, once they are on the disk.
    pub(crate) fn finish(self) -> Result<(u64, crc32fast::Hasher)> {
        let summed = self.out.into_inner().map_err(|error| DataError::io(&self.path)(error.into_error()))?;
        Ok((self.count, summed.finish().map_err(DataError::io(&self.path))?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_found_where_they_lie() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.ends");
        let mut writer = EndsWriter::new(&path, File::create_new(&path).unwrap());
        let all = [3u64, 10, 11, 40, 100];
        all.iter().for_each(|&end| writer.write(end).unwrap());
        assert_eq!(writer.finish().unwrap().0, 5);
        let ends = Ends::open(&path, 5).unwrap().unwrap();
        for start in 0..110 {
            for count in [0, 1, 2, 8, 200] {
                let wanted: Vec<u64> =
                    all.iter().copied().filter(|&end| end > start && end < start + count).collect();
                assert_eq!(ends.within(start, count).unwrap(), wanted, "{start}, {count}");
            }
        }
        assert!(Ends::open(&path, 6).unwrap().is_none(), "cut off");
        assert!(Ends::open(&folder.path().join("none"), 0).unwrap().is_none());
    }
}
