//! Parquet: one column of texts. Only that column's pages are read, a few hundred rows at a time.

use std::cell::Cell;
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Once;

use parquet::basic::{Compression, Type as PhysicalType};
use parquet::column::reader::{ColumnReader, get_typed_column_reader};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};

use super::{Documents, Piece};
use crate::error::{DataError, Result};

/// Rows read at a time.
const BATCH_ROWS: usize = 256;

struct OpenFile {
    path: PathBuf,
    reader: SerializedFileReader<File>,
    column: usize,
    group: usize,
    /// Rows of this file that were handed out or passed over, and of the open group, those still to come.
    rows_done: u64,
    column_reader: Option<parquet::column::reader::ColumnReaderImpl<ByteArrayType>>,
    batch: std::vec::IntoIter<ByteArray>,
    bytes: u64,
}

/// Texts of Parquet files.
pub(crate) struct ParquetTexts {
    files: std::vec::IntoIter<PathBuf>,
    current: Option<OpenFile>,
    column: String,
    bytes_read: u64,
}

impl ParquetTexts {
    pub(crate) fn new(files: Vec<PathBuf>, column: &str) -> ParquetTexts {
        ParquetTexts { files: files.into_iter(), current: None, column: column.to_owned(), bytes_read: 0 }
    }
}

thread_local! {
    /// Whether a panic of this thread is caught and told as an error.
    static IS_GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Keeps panics that are caught here off the terminal; all others are told as before.
fn quiet_guarded_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let others = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !IS_GUARDED.get() {
                others(panic);
            }
        }));
    });
}

/// Damaged files are the parquet crate's to refuse; where it gives up with a panic, that is an error here too.
pub(crate) fn guarded<T>(
    path: &Path,
    place: impl Fn() -> String,
    act: impl FnOnce() -> Result<T, ParquetError>,
) -> Result<T> {
    quiet_guarded_panics();
    IS_GUARDED.set(true);
    let outcome = catch_unwind(AssertUnwindSafe(act));
    IS_GUARDED.set(false);
    match outcome {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(DataError::bad_place(path, place(), format!("is damaged or cut off: {error}"))),
        Err(_) => Err(DataError::bad_place(path, place(), "is damaged: its pages contradict its header")),
    }
}

impl OpenFile {
    fn open(path: PathBuf, wanted: &str) -> Result<OpenFile> {
        let file = ferrospeed_files::open(&path).map_err(DataError::io(&path))?;
        let bytes = file.metadata().map_err(DataError::io(&path))?.len();
        if bytes == 0 {
            return Err(DataError::bad_file(&path, "is empty; a Parquet file has at least a footer"));
        }
        let reader = guarded(&path, || format!("footer (byte {bytes})"), || SerializedFileReader::new(file))?;
        let schema = reader.metadata().file_metadata().schema_descr();
        let names: Vec<String> = schema.columns().iter().map(|column| column.path().string()).collect();
        let Some(column) = names.iter().position(|name| name == wanted) else {
            let why = format!("has no column '{wanted}', but {}; set data.column", names.join(", "));
            return Err(DataError::bad_file(&path, why));
        };
        let found = schema.column(column);
        if found.physical_type() != PhysicalType::BYTE_ARRAY || found.max_rep_level() > 0 {
            let kind =
                if found.max_rep_level() > 0 { "lists".into() } else { found.physical_type().to_string() };
            let why = format!("column '{wanted}' holds {kind}, not texts");
            return Err(DataError::bad_file(&path, why));
        }
        for group in reader.metadata().row_groups() {
            if group.column(column).compression() == Compression::LZO {
                let why = format!(
                    "column '{wanted}' is compressed by LZO, which is not read here; write it with zstd, snappy, \
                     gzip, brotli, lz4 or uncompressed"
                );
                return Err(DataError::bad_file(&path, why));
            }
        }
        Ok(OpenFile {
            path,
            reader,
            column,
            group: 0,
            rows_done: 0,
            column_reader: None,
            batch: Vec::new().into_iter(),
            bytes,
        })
    }

    /// The next text of this file that is not null.
    fn next(&mut self) -> Result<Option<ByteArray>> {
        loop {
            if let Some(text) = self.batch.next() {
                self.rows_done += 1;
                return Ok(Some(text));
            }
            let (row, group, column) = (self.rows_done, self.group, self.column);
            let place = || format!("row group {group}, near row {row}");
            let Some(reader) = &mut self.column_reader else {
                if group == self.reader.num_row_groups() {
                    return Ok(None);
                }
                let opened = guarded(&self.path, place, || {
                    self.reader.get_row_group(group).and_then(|rows| rows.get_column_reader(column))
                })?;
                let ColumnReader::ByteArrayColumnReader(_) = &opened else {
                    return Err(DataError::bad_place(&self.path, place(), "changes the column's type"));
                };
                self.column_reader = Some(get_typed_column_reader(opened));
                continue;
            };
            let (mut values, mut levels) = (Vec::new(), Vec::new());
            let (records, _, _) = guarded(&self.path, place, || {
                reader.read_records(BATCH_ROWS, Some(&mut levels), None, &mut values)
            })?;
            if records == 0 {
                self.column_reader = None;
                self.group += 1;
            }
            // Nulls have a level and no value.
            self.rows_done += records.saturating_sub(values.len()) as u64;
            self.batch = values.into_iter();
        }
    }
}

impl Documents for ParquetTexts {
    fn next(&mut self, out: &mut Vec<u8>) -> Result<Piece> {
        loop {
            if self.current.is_none() {
                let Some(path) = self.files.next() else { return Ok(Piece::End) };
                self.current = Some(OpenFile::open(path, &self.column)?);
            }
            let Some(file) = &mut self.current else { continue };
            let Some(text) = file.next()? else {
                self.bytes_read += file.bytes;
                self.current = None;
                continue;
            };
            if let Err(error) = std::str::from_utf8(text.data()) {
                let place = format!("row {}, byte {} of its text", file.rows_done - 1, error.valid_up_to());
                return Err(DataError::bad_place(&file.path, place, "is not UTF-8"));
            }
            out.extend_from_slice(text.data());
            return Ok(Piece::Last);
        }
    }

    fn bytes_read(&self) -> u64 {
        self.bytes_read
    }
}
