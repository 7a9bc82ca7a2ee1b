//! JSON lines: one object per line, the text in one of its fields.

use std::borrow::Cow;
use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use serde::de::{DeserializeSeed, Error as _, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::{Documents, MAX_PIECE_BYTES, Piece};
use crate::error::{DataError, Result};

struct OpenFile {
    path: PathBuf,
    reader: BufReader<File>,
    line: u64,
    /// Where the next line starts.
    offset: u64,
}

/// Texts of JSON lines files.
pub(crate) struct JsonLinesTexts {
    files: std::vec::IntoIter<PathBuf>,
    current: Option<OpenFile>,
    field: String,
    line: Vec<u8>,
    bytes_read: u64,
}

impl JsonLinesTexts {
    pub(crate) fn new(files: Vec<PathBuf>, field: &str) -> JsonLinesTexts {
        JsonLinesTexts {
            files: files.into_iter(),
            current: None,
            field: field.to_owned(),
            line: Vec::new(),
            bytes_read: 0,
        }
    }
}

impl Documents for JsonLinesTexts {
    fn next(&mut self, out: &mut Vec<u8>) -> Result<Piece> {
        loop {
            if self.current.is_none() {
                let Some(path) = self.files.next() else { return Ok(Piece::End) };
                let file = ferrospeed_files::open(&path).map_err(DataError::io(&path))?;
                self.current = Some(OpenFile {
                    path,
                    reader: BufReader::with_capacity(1 << 18, file),
                    line: 0,
                    offset: 0,
                });
            }
            let Some(file) = &mut self.current else { continue };
            self.line.clear();
            let read = (&mut file.reader)
                .take(MAX_PIECE_BYTES as u64 + 1)
                .read_until(b'\n', &mut self.line)
                .map_err(DataError::io(&file.path))?;
            if read == 0 {
                self.current = None;
                continue;
            }
            let start = file.offset;
            file.line += 1;
            file.offset += read as u64;
            self.bytes_read += read as u64;
            if read > MAX_PIECE_BYTES {
                let why =
                    format!("is longer than {} MiB; one object per line is read", MAX_PIECE_BYTES >> 20);
                return Err(DataError::bad_place(&file.path, place(file.line, start), why));
            }
            let mut line = &self.line[..];
            if start == 0 {
                line = line.strip_prefix("\u{feff}".as_bytes()).unwrap_or(line);
            }
            if line.trim_ascii().is_empty() {
                continue;
            }
            let text = text_of(line, &self.field, &file.path, file.line, start)?;
            out.extend_from_slice(text.as_bytes());
            return Ok(Piece::Last);
        }
    }

    fn bytes_read(&self) -> u64 {
        self.bytes_read
    }
}

/// Where chats keep their turns: lists of objects, which no setting makes a text of.
const CHAT_FIELDS: [&str; 2] = ["messages", "conversations"];

fn place(line: u64, byte: u64) -> String {
    format!("line {line} (byte {byte})")
}

fn text_of<'a>(line: &'a [u8], field: &str, path: &Path, number: u64, start: u64) -> Result<Cow<'a, str>> {
    let text = std::str::from_utf8(line).map_err(|error| {
        let byte = start + error.valid_up_to() as u64;
        DataError::bad_place(path, place(number, byte), "is not UTF-8, which JSON has to be")
    })?;
    let mut json = serde_json::Deserializer::from_str(text);
    let found = Field(field).deserialize(&mut json).and_then(|found| json.end().map(|()| found));
    found.map_err(|error| {
        // serde_json counts lines within the one it was given.
        let why = error.to_string();
        let why = why.split(" at line ").next().unwrap_or(&why);
        DataError::bad_place(path, place(number, start + error.column() as u64), why)
    })
}

/// Reads one text field of an object and passes over the others.
struct Field<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for Field<'_> {
    type Value = Cow<'de, str>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Cow<'de, str>, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Field<'_> {
    type Value = Cow<'de, str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object with a text in '{}'", self.0)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Cow<'de, str>, A::Error> {
        let mut found = None;
        let mut others = Vec::new();
        while let Some(key) = map.next_key::<Cow<'de, str>>()? {
            if key != self.0 {
                map.next_value::<IgnoredAny>()?;
                others.push(key);
            } else if found.replace(map.next_value::<Text<'de>>()?.0).is_some() {
                return Err(A::Error::custom(format!("has '{}' twice", self.0)));
            }
        }
        found.ok_or_else(|| A::Error::custom(missing(self.0, &others)))
    }
}

/// What to do about an object without the field.
fn missing(field: &str, others: &[Cow<'_, str>]) -> String {
    if let Some(chat) = others.iter().find(|name| CHAT_FIELDS.contains(&&***name)) {
        return format!(
            "is a chat (it has '{chat}' and no '{field}'): name its file in data.samples, which learns what the assistant says, \
             and not in data.jsonl"
        );
    }
    format!("has no '{field}', but {}; set data.field", others.join(", "))
}

/// A text that is borrowed where it has no escapes.
struct Text<'a>(Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextVisitor;
        impl<'de> Visitor<'de> for TextVisitor {
            type Value = Cow<'de, str>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text")
            }
            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
                Ok(Cow::Borrowed(text))
            }
            fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
                Ok(Cow::Owned(text.to_owned()))
            }
        }
        deserializer.deserialize_str(TextVisitor).map(Text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(content: &[u8]) -> Result<Vec<String>> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.jsonl");
        std::fs::write(&path, content).unwrap();
        let mut files = JsonLinesTexts::new(vec![path], "text");
        let mut all = Vec::new();
        loop {
            let mut out = Vec::new();
            match files.next(&mut out)? {
                Piece::End => return Ok(all),
                _ => all.push(String::from_utf8(out).unwrap()),
            }
        }
    }

    #[test]
    fn the_field_is_read_whatever_stands_around_it() {
        let lines = "\u{feff}{\"id\": [1, {\"text\": 2}], \"text\": \"a\\n\\u00e9\\ud83d\\ude00\"}\r\n\n   \n{\"text\":\"\"}\n{\"text\": \"last\"}";
        assert_eq!(texts(lines.as_bytes()).unwrap(), ["a\né😀", "", "last"]);
    }

    #[test]
    fn what_is_wrong_is_said_with_its_line_and_byte() {
        let first = "{\"text\": \"fine\"}\n";
        for (line, message) in [
            (&b"{\"body\": \"x\", \"n\": 1}"[..], "has no 'text', but body, n; set data.field"),
            (b"{\"messages\": [{\"role\": \"user\"}]}", "is a chat (it has 'messages' and no 'text')"),
            (b"{\"text\": 3}", "line 2 (byte 27): invalid type: integer `3`, expected a text"),
            (b"[1]", "expected an object with a text in 'text'"),
            (b"{\"text\": \"x\"", "line 2 (byte 29): EOF while parsing an object"),
            (b"{\"text\": \"x\"} {}", "trailing characters"),
            (b"{\"text\": \"x\", \"text\": \"y\"}", "has 'text' twice"),
            (b"{\"text\": \"\xff\"}", "x.jsonl: line 2 (byte 27): is not UTF-8"),
            (b"{\"text\": \"\\ud800\"}", "unexpected end of hex escape"),
        ] {
            let error = texts(&[first.as_bytes(), line].concat()).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
            assert!(error.contains("line 2 (byte "), "{error}");
        }
    }

    #[test]
    fn a_giant_line_is_refused_before_it_is_read_whole() {
        let mut content = b"{\"text\": \"ok\"}\n{\"text\": \"".to_vec();
        content.resize(MAX_PIECE_BYTES + 100, b'x');
        let error = texts(&content).unwrap_err().to_string();
        assert!(error.contains("line 2 (byte 15): is longer than 64 MiB"), "{error}");
    }
}
