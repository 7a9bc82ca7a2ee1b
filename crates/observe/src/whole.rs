//! A file that grows by whole records or not at all.
//!
//! A disk that is full takes the first bytes of a record and refuses the rest. What came behind such a half would be glued to
//! it, or could not be read any more. So a record that did not go in whole is cut off again, at the latest before the next.

use std::fs::{File, OpenOptions};
use std::io::{Result, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// What records are added to.
pub(crate) trait Growing: Write {
    /// Its bytes.
    fn length(&self) -> Result<u64>;
    /// Takes away what is behind so many bytes; the next write goes there.
    fn cut(&mut self, length: u64) -> Result<()>;
}

/// For files that are opened to append.
impl Growing for File {
    fn length(&self) -> Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn cut(&mut self, length: u64) -> Result<()> {
        self.set_len(length)
    }
}

/// A file of whole records.
#[derive(Debug)]
pub(crate) struct WholeRecords<F = File> {
    file: F,
    /// Where a half-written record begins that could not be cut off yet.
    torn_at: Option<u64>,
}

impl WholeRecords {
    /// Opens a file, which is made if it is not there, to be read and to grow.
    pub(crate) fn open(path: &Path) -> Result<WholeRecords> {
        let options = OpenOptions::new().read(true).append(true).create(true).clone();
        Ok(WholeRecords::new(ferrospeed_files::open_to_write(path, &options)?))
    }

    /// Makes a file that is not there yet.
    pub(crate) fn create_new(path: &Path) -> Result<WholeRecords> {
        Ok(WholeRecords::new(OpenOptions::new().append(true).create_new(true).open(path)?))
    }

    /// Whether the file has no name any more: what goes into it is lost.
    pub(crate) fn is_unlinked(&self) -> bool {
        self.file.metadata().is_ok_and(|about| about.nlink() == 0)
    }

    /// The file, to look at.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }
}

impl<F: Growing> WholeRecords<F> {
    fn new(file: F) -> WholeRecords<F> {
        WholeRecords { file, torn_at: None }
    }

    /// Takes away what is behind so many bytes.
    pub(crate) fn cut(&mut self, length: u64) -> Result<()> {
        self.file.cut(length)
    }

    /// Where the next record begins: behind the last whole one. The length is asked for each time, for others may write
    /// into the file, or empty it.
    pub(crate) fn end(&mut self) -> Result<u64> {
        let length = self.file.length()?;
        let end = self.torn_at.unwrap_or(length).min(length);
        if end < length {
            self.file.cut(end)?;
        }
        self.torn_at = None;
        Ok(end)
    }

    /// Adds a record: in one write, so that a reader beside the run sees whole ones.
    pub(crate) fn append(&mut self, record: &[u8]) -> Result<()> {
        let end = self.end()?;
        let written = self.file.write_all(record);
        if written.is_err() {
            self.torn_at = Some(end);
            // Where this fails too, the next record tries it again.
            let _ = self.end();
        }
        written
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Error, ErrorKind};

    use super::*;

    /// A disk with so much room, on which files can be cut or not.
    #[derive(Default)]
    struct Disk {
        content: Vec<u8>,
        room: usize,
        is_stuck: bool,
    }

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> Result<usize> {
            let fits = bytes.len().min(self.room - self.content.len());
            self.content.extend_from_slice(&bytes[..fits]);
            if fits == 0 { Err(ErrorKind::StorageFull.into()) } else { Ok(fits) }
        }

        fn flush(&mut self) -> Result<()> {
            Ok(())
        }
    }

    impl Growing for Disk {
        fn length(&self) -> Result<u64> {
            Ok(self.content.len() as u64)
        }

        fn cut(&mut self, length: u64) -> Result<()> {
            if self.is_stuck {
                return Err(Error::other("stuck"));
            }
            self.content.truncate(length as usize);
            Ok(())
        }
    }

    #[test]
    fn a_disk_that_is_full_for_a_moment_costs_whole_records() {
        let mut records = WholeRecords::new(Disk { room: 10, ..Disk::default() });
        records.append(b"first;").unwrap();
        assert_eq!(records.append(b"second;").unwrap_err().kind(), ErrorKind::StorageFull);
        assert_eq!(records.file.content, b"first;", "what did not go in whole is cut off at once");
        records.append(b"2nd;").unwrap();
        records.file.room = 100;
        records.append(b"third;").unwrap();
        assert_eq!(records.file.content, b"first;2nd;third;");
    }

    #[test]
    fn a_half_that_cannot_be_cut_off_is_tried_again_before_anything_is_added() {
        let mut records = WholeRecords::new(Disk { room: 10, ..Disk::default() });
        records.append(b"first;").unwrap();
        records.file.is_stuck = true;
        assert_eq!(records.append(b"second;").unwrap_err().kind(), ErrorKind::StorageFull);
        records.file.room = 100;
        assert_eq!(records.append(b"third;").unwrap_err().to_string(), "stuck");
        assert_eq!(records.file.content, b"first;seco", "nothing comes behind a half");
        records.file.is_stuck = false;
        records.append(b"fourth;").unwrap();
        assert_eq!(records.file.content, b"first;fourth;");
    }

    #[test]
    fn a_file_that_somebody_has_emptied_is_not_filled_with_zeros() {
        let mut records = WholeRecords::new(Disk { room: 10, is_stuck: true, ..Disk::default() });
        records.append(b"first;").unwrap();
        records.append(b"second;").unwrap_err();
        records.file.content.clear();
        records.append(b"third;").unwrap();
        assert_eq!(records.file.content, b"third;");
    }
}
