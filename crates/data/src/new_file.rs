//! Files that get their names when they are complete: whole, or not there.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::error::{DataError, Result};

/// A file in the making, under a name of its own, and gone where it never gets the one it is for.
pub(crate) struct New {
    pub(crate) path: PathBuf,
    /// Holds its lock, by which others know that somebody is at it, for as long as it has this name.
    _lock: File,
}

impl New {
    /// It is a new one, whatever lies there.
    pub(crate) fn beside(place: &Path) -> Result<(New, File)> {
        let (path, file) = ferrospeed_files::create_beside(place).map_err(DataError::io(place))?;
        let lock = file.try_clone().map_err(DataError::io(&path))?;
        Ok((New { path, _lock: lock }, file))
    }

    /// Gives it its name; a link that has it is replaced and leads nowhere.
    pub(crate) fn takes(self, place: &Path) -> Result<()> {
        std::fs::rename(&self.path, place).map_err(DataError::io(place))
    }
}

impl Drop for New {
    fn drop(&mut self) {
        // Best effort: what failed is what is reported, and who has its name is not here any more.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// A file that keeps the checksum of what is written to it.
pub(crate) struct Summed {
    file: File,
    sum: crc32fast::Hasher,
}

impl Summed {
    pub(crate) fn new(file: File) -> Summed {
        Summed { file, sum: crc32fast::Hasher::new() }
    }

    /// The checksum, once all of it is on the disk.
    pub(crate) fn finish(self) -> std::io::Result<crc32fast::Hasher> {
        self.file.sync_all()?;
        Ok(self.sum)
    }
}

impl Write for Summed {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let count = self.file.write(bytes)?;
        self.sum.update(&bytes[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.file.flush()
    }
}
