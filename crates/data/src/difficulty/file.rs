//! One file of an index: a header that says what it is of, records of one size, and a checksum of all.

use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::IndexedData;
use crate::error::{DataError, Result};
use crate::new_file::New;

const MAGIC: &[u8; 8] = b"FSPINDEX";
const VERSION: u32 = 1;
/// Magic, version, length of the header.
const START_BYTES: u64 = 16;
const SUM_BYTES: u64 = 4;
const MAX_HEADER_BYTES: u32 = 64 << 10;
/// What helps against most of what may be wrong.
pub(super) const MAKE_ANEW: &str = "make it anew with `ferrospeed data analyze`";

/// What the records are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Holds {
    /// Sequences by rising difficulty.
    Samples,
    /// Difficulties, and how many sequences are no harder.
    Difficulties,
}

impl Holds {
    fn record_bytes(self) -> u64 {
        match self {
            Holds::Samples => 4,
            Holds::Difficulties => 16,
        }
    }

    /// How the key of a configuration calls the file, and its name ends.
    pub(super) fn name(self) -> &'static str {
        match self {
            Holds::Samples => "index_to_sample",
            Holds::Difficulties => "index_to_metric",
        }
    }
}

/// What a file says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Header {
    pub(super) holds: Holds,
    pub(super) metric: String,
    /// CRC-32 of the difficulties of all sequences in turn: the same in both files of an index.
    pub(super) values: u32,
    pub(super) of: IndexedData,
}

/// A file in the making.
pub(super) struct IndexWriter {
    place: PathBuf,
    new: New,
    out: BufWriter<File>,
    sum: crc32fast::Hasher,
}

impl IndexWriter {
    pub(super) fn new(place: &Path, header: &Header) -> Result<IndexWriter> {
        let (new, file) = New::beside(place)?;
        let sum = crc32fast::Hasher::new();
        let mut writer = IndexWriter {
            place: place.to_path_buf(),
            new,
            out: BufWriter::with_capacity(1 << 18, file),
            sum,
        };
        let header = serde_json::to_vec(header).map_err(|error| DataError::io(place)(error.into()))?;
        writer.write(MAGIC)?;
        writer.write(&VERSION.to_le_bytes())?;
        writer.write(&(header.len() as u32).to_le_bytes())?;
        writer.write(&header)?;
        Ok(writer)
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.sum.update(bytes);
        self.out.write_all(bytes).map_err(DataError::io(&self.place))
    }

    /// Gives the file its name, once it is on the disk.
    pub(super) fn finish(mut self) -> Result<()> {
        let sum = self.sum.finalize().to_le_bytes();
        self.out.write_all(&sum).map_err(DataError::io(&self.place))?;
        let file = self.out.into_inner().map_err(|error| DataError::io(&self.place)(error.into_error()))?;
        file.sync_all().map_err(DataError::io(&self.place))?;
        self.new.takes(&self.place)
    }
}

/// A file whose beginning was read.
pub(super) struct IndexReader {
    path: PathBuf,
    file: BufReader<File>,
    sum: crc32fast::Hasher,
    records: u64,
    pub(super) header: Header,
}

impl IndexReader {
    pub(super) fn open(path: &Path, holds: Holds) -> Result<IndexReader> {
        let bad = |why: String| DataError::bad_file(path, why);
        let file = ferrospeed_files::open(path).map_err(|error| match is_deepspeeds(path) {
            true => bad(format!(
                "is an index of DeepSpeed, whose numbers are those of its own data set; {MAKE_ANEW}, and name the file"
            )),
            false => DataError::io(path)(error),
        })?;
        let bytes = file.metadata().map_err(DataError::io(path))?.len();
        let mut file = BufReader::with_capacity(1 << 18, file);
        let mut start = [0; START_BYTES as usize];
        let begun = bytes >= START_BYTES;
        if begun {
            file.read_exact(&mut start).map_err(DataError::io(path))?;
        }
        if !start.starts_with(MAGIC) {
            return Err(bad(format!(
                "is no index of difficulties: it does not begin with FSPINDEX; {MAKE_ANEW}"
            )));
        }
        let number = |at: usize| u32::from_le_bytes(start[at..at + 4].try_into().unwrap_or_default());
        if number(8) != VERSION {
            return Err(bad(format!(
                "is an index of version {}, and only version {VERSION} is known; {MAKE_ANEW}",
                number(8)
            )));
        }
        let length = number(12);
        let rest = bytes.checked_sub(START_BYTES + u64::from(length) + SUM_BYTES);
        let (Some(record_bytes), true) = (rest, length <= MAX_HEADER_BYTES) else {
            return Err(bad(format!(
                "has {bytes} bytes, and byte 12 says that its header alone has {length}: it is damaged or cut off; {MAKE_ANEW}"
            )));
        };
        let mut text = vec![0; length as usize];
        file.read_exact(&mut text).map_err(DataError::io(path))?;
        let header: Header = serde_json::from_slice(&text).map_err(|error| {
            bad(format!("byte {START_BYTES}: its header is damaged: {error}; {MAKE_ANEW}"))
        })?;
        if header.holds != holds {
            return Err(bad(format!("is the {}, and {} is wanted here", header.holds.name(), holds.name())));
        }
        let records = record_bytes / holds.record_bytes();
        let (least, most) = match holds {
            Holds::Samples => (header.of.samples, header.of.samples),
            Holds::Difficulties => (1, header.of.samples),
        };
        if record_bytes % holds.record_bytes() != 0 || !(least..=most).contains(&records) {
            return Err(bad(format!(
                "has {record_bytes} bytes of records, which is not what {} sequences make: it is cut off or damaged; {MAKE_ANEW}",
                header.of.samples
            )));
        }
        let mut sum = crc32fast::Hasher::new();
        sum.update(&start);
        sum.update(&text);
        Ok(IndexReader { path: path.to_path_buf(), file, sum, records, header })
    }

    /// Refuses a file of other data.
    pub(super) fn expect(self, run: &IndexedData) -> Result<IndexReader> {
        match self.header.of.difference(run) {
            Some(how) => Err(DataError::bad_file(&self.path, format!("{how}; {MAKE_ANEW}"))),
            None => Ok(self),
        }
    }

    /// Reads all records, and compares the checksum.
    pub(super) fn records<const N: usize>(mut self) -> Result<Vec<[u8; N]>> {
        let mut records = vec![[0; N]; usize::try_from(self.records).unwrap_or(usize::MAX)];
        let bytes = records.as_flattened_mut();
        let mut stored = [0; SUM_BYTES as usize];
        let read = self.file.read_exact(bytes).and_then(|()| self.file.read_exact(&mut stored));
        read.map_err(DataError::io(&self.path))?;
        self.sum.update(bytes);
        match self.sum.finalize() == u32::from_le_bytes(stored) {
            true => Ok(records),
            false => {
                let why = format!("is damaged: its checksum is not that of its content; {MAKE_ANEW}");
                Err(DataError::bad_file(&self.path, why))
            }
        }
    }
}

/// Whether the name is what DeepSpeed would add `.idx` and `.bin` to.
fn is_deepspeeds(path: &Path) -> bool {
    let mut index = path.as_os_str().to_owned();
    index.push(".idx");
    Path::new(&index).is_file()
}
