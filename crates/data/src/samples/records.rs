//! Objects of files, one after the other: lines of JSON, one JSON array, or rows of Parquet; also compressed by gzip or zstd.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{Field, Row};
use serde::de::{DeserializeSeed, SeqAccess, Visitor};
use serde_json::Value;

use crate::documents::{MAX_PIECE_BYTES, guarded};
use crate::error::{DataError, Result};

/// Which files of folders are read, by how their names end.
pub(crate) const EXTENSIONS: [&str; 6] = ["jsonl", "ndjson", "json", "parquet", "gz", "zst"];

/// A record and where it stands.
#[derive(Debug)]
pub struct Record<'a> {
    /// The file.
    pub path: &'a Path,
    /// What it says.
    pub value: Value,
    /// `line`, `sample` or `row`, and its number.
    what: &'static str,
    number: u64,
}

impl Record<'_> {
    /// Which line, sample or row of the file it is.
    pub fn place(&self) -> String {
        format!("{} {}", self.what, self.number)
    }
}

/// Who takes records, and may want no more.
pub(crate) type Take<'a> = &'a mut dyn FnMut(Record<'_>) -> Result<ControlFlow<()>>;

/// Hands out all records of some files, in order.
pub fn each_record(files: &[PathBuf], take: Take<'_>) -> Result<()> {
    for path in files {
        let flow = match path.extension().is_some_and(|extension| extension == "parquet") {
            true => rows(path, take)?,
            false => objects(path, take)?,
        };
        if flow.is_break() {
            break;
        }
    }
    Ok(())
}

/// Opens a file, and unpacks it as its name says.
fn unpacked(path: &Path) -> Result<Box<dyn BufRead>> {
    let file = BufReader::with_capacity(1 << 18, ferrospeed_files::open(path).map_err(DataError::io(path))?);
    let reader: Box<dyn Read> = match path.extension().and_then(|extension| extension.to_str()) {
        Some("gz") => Box::new(flate2::bufread::MultiGzDecoder::new(file)),
        Some("zst") => Box::new(zstd::Decoder::with_buffer(file).map_err(DataError::io(path))?),
        _ => return Ok(Box::new(file)),
    };
    Ok(Box::new(BufReader::with_capacity(1 << 18, reader)))
}

/// Of a file of JSON: an array if it begins with a bracket, else lines.
fn objects(path: &Path, take: Take<'_>) -> Result<ControlFlow<()>> {
    let mut reader = unpacked(path)?;
    let (mut lines, mut skipped) = (0, 0);
    loop {
        let start = reader.fill_buf().map_err(DataError::io(path))?;
        let blank = |byte: &u8| byte.is_ascii_whitespace() || b"\xef\xbb\xbf".contains(byte);
        let count = start.iter().take_while(|byte| blank(byte)).count();
        lines += start[..count].iter().filter(|&&byte| byte == b'\n').count() as u64;
        let first = start.get(count).copied();
        let is_empty = start.is_empty();
        reader.consume(count);
        skipped += count;
        match first {
            Some(b'[') => return array(path, reader, take),
            Some(_) => return json_lines(path, reader, lines, take),
            None if is_empty || skipped > MAX_PIECE_BYTES => return Ok(ControlFlow::Continue(())),
            None => {}
        }
    }
}

fn json_lines(
    path: &Path,
    mut reader: Box<dyn BufRead>,
    before: u64,
    take: Take<'_>,
) -> Result<ControlFlow<()>> {
    let (mut line, mut number) = (Vec::new(), before);
    loop {
        line.clear();
        let read = (&mut reader).take(MAX_PIECE_BYTES as u64 + 1).read_until(b'\n', &mut line);
        if read.map_err(DataError::io(path))? == 0 {
            return Ok(ControlFlow::Continue(()));
        }
        number += 1;
        let bad = |why: String| DataError::bad_place(path, format!("line {number}"), why);
        if line.len() > MAX_PIECE_BYTES {
            return Err(bad(format!(
                "is longer than {} MiB; one object per line is read",
                MAX_PIECE_BYTES >> 20
            )));
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        let value = serde_json::from_slice(&line).map_err(|error| bad(not_json(&error)))?;
        if take(Record { path, value, what: "line", number })?.is_break() {
            return Ok(ControlFlow::Break(()));
        }
    }
}

/// What is wrong within a line, which is counted elsewhere.
fn not_json(error: &serde_json::Error) -> String {
    let why = error.to_string();
    let why = why.split(" at line ").next().unwrap_or(&why);
    format!("is no JSON object: {why} (column {}); mend the line or take it out", error.column())
}

fn array(path: &Path, reader: Box<dyn BufRead>, take: Take<'_>) -> Result<ControlFlow<()>> {
    let mut found = Ok(ControlFlow::Continue(()));
    let mut json = serde_json::Deserializer::from_reader(reader);
    let elements = Elements { path, take, found: &mut found };
    // What stands behind the array would be lost without a word.
    let read = elements.deserialize(&mut json).and_then(|()| json.end());
    match (read, found) {
        (_, Err(error)) => Err(error),
        (_, Ok(ControlFlow::Break(()))) => Ok(ControlFlow::Break(())),
        (Ok(()), flow) => flow,
        (Err(error), Ok(_)) => {
            let why = error.to_string();
            let why = why.split(" at line ").next().unwrap_or(&why);
            let place = format!("line {}, column {}", error.line(), error.column());
            Err(DataError::bad_place(path, place, format!("is no JSON: {why}")))
        }
    }
}

/// Hands out the elements of an array as they are read.
struct Elements<'a, 'b> {
    path: &'a Path,
    take: Take<'b>,
    found: &'a mut Result<ControlFlow<()>>,
}

impl<'de> DeserializeSeed<'de> for Elements<'_, '_> {
    type Value = ();
    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Elements<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an array of objects")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        let mut number = 0;
        while let Some(value) = list.next_element()? {
            number += 1;
            *self.found = (self.take)(Record { path: self.path, value, what: "sample", number });
            if !matches!(self.found, Ok(ControlFlow::Continue(()))) {
                return Err(serde::de::Error::custom("no more is wanted"));
            }
        }
        Ok(())
    }
}

fn rows(path: &Path, take: Take<'_>) -> Result<ControlFlow<()>> {
    let file: File = ferrospeed_files::open(path).map_err(DataError::io(path))?;
    let place = || "rows".to_owned();
    let reader = guarded(path, place, || SerializedFileReader::new(file))?;
    let mut rows = guarded(path, place, || reader.get_row_iter(None))?;
    let mut number = 0;
    loop {
        let place = || format!("row {number}");
        let Some(row) = guarded(path, place, || rows.next().transpose())? else {
            return Ok(ControlFlow::Continue(()));
        };
        if take(Record { path, value: object(&row), what: "row", number })?.is_break() {
            return Ok(ControlFlow::Break(()));
        }
        number += 1;
    }
}

fn object(row: &Row) -> Value {
    // Of an object whose rows differ in their fields, Parquet holds all of them, most of them empty.
    let given = row.get_column_iter().filter(|(_, field)| !matches!(field, Field::Null));
    Value::Object(given.map(|(name, field)| (name.clone(), value(field))).collect())
}

fn value(field: &Field) -> Value {
    match field {
        Field::Bool(value) => (*value).into(),
        Field::Byte(value) => (*value).into(),
        Field::Short(value) => (*value).into(),
        Field::Int(value) => (*value).into(),
        Field::Long(value) => (*value).into(),
        Field::Float(value) => (*value).into(),
        Field::Double(value) => (*value).into(),
        Field::Str(text) => text.as_str().into(),
        Field::Bytes(bytes) => String::from_utf8_lossy(bytes.data()).into_owned().into(),
        Field::Group(row) => object(row),
        Field::ListInternal(list) => list.elements().iter().map(value).collect(),
        _ => Value::Null,
    }
}
