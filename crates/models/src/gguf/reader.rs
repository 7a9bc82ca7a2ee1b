//! The bytes of a GGUF header, read forward. Whatever they claim, no more is read or allocated than the file holds and
//! [`MAX_HEADER_BYTES`] allow.

use std::fs::File;
use std::io::{BufReader, Read};

/// Vocabularies of 256 thousand tokens with their merges take a tenth of it.
const MAX_HEADER_BYTES: u64 = 256 << 20;
/// Keys and names are short.
const MAX_NAME_BYTES: u64 = 1 << 16;

/// Why a header makes no sense.
pub(super) type Refusal = String;

/// A value of the metadata.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    Floats(Vec<f32>),
    /// Whole numbers of any width.
    Numbers(Vec<i64>),
    Flags(Vec<bool>),
}

/// The types of values, by their numbers in files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Unsigned(usize),
    Signed(usize),
    F32,
    F64,
    Bool,
    Text,
    Array,
}

impl Kind {
    fn of(number: u32) -> Result<Kind, Refusal> {
        Ok(match number {
            0 => Kind::Unsigned(1),
            1 => Kind::Signed(1),
            2 => Kind::Unsigned(2),
            3 => Kind::Signed(2),
            4 => Kind::Unsigned(4),
            5 => Kind::Signed(4),
            6 => Kind::F32,
            7 => Kind::Bool,
            8 => Kind::Text,
            9 => Kind::Array,
            10 => Kind::Unsigned(8),
            11 => Kind::Signed(8),
            12 => Kind::F64,
            other => return Err(format!("a value has the type {other}, which there is not")),
        })
    }

    /// What a value takes at least.
    fn least_bytes(self) -> u64 {
        match self {
            Kind::Unsigned(bytes) | Kind::Signed(bytes) => bytes as u64,
            Kind::F32 => 4,
            Kind::F64 | Kind::Text => 8,
            Kind::Bool => 1,
            Kind::Array => 12,
        }
    }
}

/// Reads on from where it stands.
pub(super) struct Reader {
    file: BufReader<File>,
    position: u64,
    end: u64,
}

impl Reader {
    pub(super) fn new(file: File, file_bytes: u64) -> Reader {
        Reader { file: BufReader::new(file), position: 0, end: file_bytes.min(MAX_HEADER_BYTES) }
    }

    /// Bytes read so far.
    pub(super) fn position(&self) -> u64 {
        self.position
    }

    /// An error where fewer bytes than this are left.
    pub(super) fn expect(&self, bytes: u64, what: &str) -> Result<(), Refusal> {
        match bytes <= self.end - self.position {
            true => Ok(()),
            false => Err(format!(
                "{what} reaches beyond the header: {bytes} bytes from {} on, of {} in the file or allowed",
                self.position, self.end
            )),
        }
    }

    fn fill(&mut self, out: &mut [u8]) -> Result<(), Refusal> {
        self.expect(out.len() as u64, "a value")?;
        self.file.read_exact(out).map_err(|error| format!("cannot be read: {error}"))?;
        self.position += out.len() as u64;
        Ok(())
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Refusal> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, Refusal> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(super) fn u64(&mut self) -> Result<u64, Refusal> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A key or the name of a tensor.
    pub(super) fn name(&mut self) -> Result<String, Refusal> {
        self.text(MAX_NAME_BYTES)
    }

    fn text(&mut self, most: u64) -> Result<String, Refusal> {
        let length = self.u64()?;
        if length > most {
            return Err(format!("a text of {length} bytes is longer than {most}"));
        }
        self.expect(length, "a text")?;
        let mut bytes = vec![0; length as usize];
        self.fill(&mut bytes)?;
        String::from_utf8(bytes).map_err(|error| format!("a text is not UTF-8: {error}"))
    }

    /// A value with its type before it.
    pub(super) fn value(&mut self) -> Result<Value, Refusal> {
        match Kind::of(self.u32()?)? {
            Kind::Array => self.values(),
            kind => self.single(kind),
        }
    }

    fn single(&mut self, kind: Kind) -> Result<Value, Refusal> {
        Ok(match kind {
            Kind::Unsigned(bytes) => Value::Unsigned(self.unsigned(bytes)?),
            Kind::Signed(bytes) => Value::Signed(self.signed(bytes)?),
            Kind::F32 => Value::Float(f32::from_le_bytes(self.array()?).into()),
            Kind::F64 => Value::Float(f64::from_le_bytes(self.array()?)),
            Kind::Bool => Value::Bool(self.flag()?),
            Kind::Text => Value::Text(self.text(MAX_HEADER_BYTES)?),
            Kind::Array => return Err("an array stands where a value was expected".into()),
        })
    }

    fn values(&mut self) -> Result<Value, Refusal> {
        let kind = Kind::of(self.u32()?)?;
        let count = self.u64()?;
        self.expect(count.saturating_mul(kind.least_bytes()), "an array")?;
        let all = 0..count;
        Ok(match kind {
            Kind::Text => Value::Texts(all.map(|_| self.text(MAX_HEADER_BYTES)).collect::<Result<_, _>>()?),
            Kind::F32 => Value::Floats(
                all.map(|_| Ok(f32::from_le_bytes(self.array()?))).collect::<Result<_, Refusal>>()?,
            ),
            Kind::F64 => Value::Floats(
                all.map(|_| Ok(f64::from_le_bytes(self.array()?) as f32)).collect::<Result<_, Refusal>>()?,
            ),
            Kind::Bool => Value::Flags(all.map(|_| self.flag()).collect::<Result<_, _>>()?),
            Kind::Signed(bytes) => {
                Value::Numbers(all.map(|_| self.signed(bytes)).collect::<Result<_, Refusal>>()?)
            }
            Kind::Unsigned(bytes) => {
                let number = |value: u64| i64::try_from(value).map_err(|_| format!("{value} is too large"));
                Value::Numbers(all.map(|_| number(self.unsigned(bytes)?)).collect::<Result<_, Refusal>>()?)
            }
            Kind::Array => return Err("has an array of arrays, which no model needs".into()),
        })
    }

    fn flag(&mut self) -> Result<bool, Refusal> {
        Ok(self.array::<1>()?[0] != 0)
    }

    fn unsigned(&mut self, bytes: usize) -> Result<u64, Refusal> {
        let mut wide = [0; 8];
        self.fill(&mut wide[..bytes])?;
        Ok(u64::from_le_bytes(wide))
    }

    fn signed(&mut self, bytes: usize) -> Result<i64, Refusal> {
        let unused = 64 - 8 * bytes as u32;
        Ok((self.unsigned(bytes)? as i64) << unused >> unused)
    }
}
