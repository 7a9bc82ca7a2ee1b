//! What a GGUF file says of itself: metadata, and where each tensor lies. Every tensor lies inside the file, at a place that is
//! aligned, and none over another.

use std::collections::BTreeMap;
use std::fs::File;

use super::reader::{Reader, Refusal, Value};
use crate::weights::BlockForm;

/// How a file begins.
pub(super) const MAGIC: [u8; 4] = *b"GGUF";
/// The first had other lengths; the format has been the same since the second.
const VERSIONS: std::ops::RangeInclusive<u32> = 2..=3;
const MAX_TENSORS: u64 = 1 << 18;
const MAX_KEYS: u64 = 1 << 16;
const MAX_DIMS: u32 = 4;
const DEFAULT_ALIGNMENT: u64 = 32;
const MAX_ALIGNMENT: u64 = 1 << 20;

/// How a tensor's numbers are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TensorType {
    F32,
    F16,
    Bf16,
    Blocks(BlockForm),
}

/// The names of other types, by their numbers, for messages.
const OTHER_TYPES: [(u32, &str); 27] = [
    (3, "Q4_1"),
    (6, "Q5_0"),
    (7, "Q5_1"),
    (9, "Q8_1"),
    (10, "Q2_K"),
    (11, "Q3_K"),
    (13, "Q5_K"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (40, "NVFP4"),
    (31, "Q4_0_4_4"),
];

impl TensorType {
    fn of(number: u32) -> Result<TensorType, Refusal> {
        Ok(match number {
            0 => TensorType::F32,
            1 => TensorType::F16,
            2 => TensorType::Blocks(BlockForm::Q4_0),
            8 => TensorType::Blocks(BlockForm::Q8_0),
            12 => TensorType::Blocks(BlockForm::Q4K),
            14 => TensorType::Blocks(BlockForm::Q6K),
            30 => TensorType::Bf16,
            other => {
                let name = OTHER_TYPES.iter().find(|(number, _)| *number == other);
                let name = name.map_or_else(|| format!("number {other}"), |(_, name)| (*name).to_owned());
                return Err(format!(
                    "has the type {name}; F32, F16, BF16, Q8_0, Q4_0, Q4_K and Q6_K are read"
                ));
            }
        })
    }

    /// Values and bytes of the smallest piece.
    fn piece(self) -> [u64; 2] {
        match self {
            TensorType::F32 => [1, 4],
            TensorType::F16 | TensorType::Bf16 => [1, 2],
            TensorType::Blocks(form) => [form.values() as u64, form.bytes() as u64],
        }
    }
}

/// A tensor and where it lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TensorEntry {
    pub(super) form: TensorType,
    /// Outermost first, as everywhere here; files have it the other way round.
    pub(super) shape: Vec<usize>,
    /// In the data part.
    pub(super) bytes: std::ops::Range<usize>,
}

/// A header that is sound.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) metadata: BTreeMap<String, Value>,
    pub(super) tensors: BTreeMap<String, TensorEntry>,
    /// Where the data part begins.
    pub(super) data_start: u64,
}

impl Header {
    pub(super) fn read(file: File, file_bytes: u64) -> Result<Header, Refusal> {
        let mut reader = Reader::new(file, file_bytes);
        let magic = reader.u32().map_err(|_| "is no GGUF file: it is too short".to_owned())?.to_le_bytes();
        if magic != MAGIC {
            return Err("is no GGUF file: it does not begin with 'GGUF'".into());
        }
        let version = reader.u32()?;
        if !VERSIONS.contains(&version) {
            return Err(format!("has the version {version} of GGUF; 2 and 3 are read, little-endian"));
        }
        let (tensor_count, key_count) = (reader.u64()?, reader.u64()?);
        if tensor_count > MAX_TENSORS || key_count > MAX_KEYS {
            return Err(format!(
                "announces {tensor_count} tensors and {key_count} keys; at most {MAX_TENSORS} and {MAX_KEYS} are read"
            ));
        }
        let mut metadata = BTreeMap::new();
        for _ in 0..key_count {
            let key = reader.name()?;
            let value = reader.value().map_err(|why| format!("'{key}': {why}"))?;
            if metadata.contains_key(&key) {
                return Err(format!("says '{key}' twice"));
            }
            metadata.insert(key, value);
        }
        let alignment = alignment(metadata.get("general.alignment"))?;
        let mut tensors = BTreeMap::new();
        for _ in 0..tensor_count {
            let name = reader.name()?;
            let entry = entry(&mut reader, alignment).map_err(|why| format!("'{name}' {why}"))?;
            if tensors.contains_key(&name) {
                return Err(format!("has two tensors called '{name}'"));
            }
            tensors.insert(name, entry);
        }
        let data_start = reader.position().next_multiple_of(alignment);
        check_places(&tensors, file_bytes.saturating_sub(data_start))?;
        Ok(Header { metadata, tensors, data_start })
    }
}

fn alignment(said: Option<&Value>) -> Result<u64, Refusal> {
    match said {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(Value::Unsigned(bytes)) if bytes.is_power_of_two() && (8..=MAX_ALIGNMENT).contains(bytes) => {
            Ok(*bytes)
        }
        Some(other) => {
            Err(format!("'general.alignment' is {other:?}, not a power of two from 8 to {MAX_ALIGNMENT}"))
        }
    }
}

fn entry(reader: &mut Reader, alignment: u64) -> Result<TensorEntry, Refusal> {
    let dims = reader.u32()?;
    if !(1..=MAX_DIMS).contains(&dims) {
        return Err(format!("has {dims} dimensions; 1 to {MAX_DIMS} are read"));
    }
    let mut sizes = Vec::new();
    for _ in 0..dims {
        sizes.push(reader.u64()?);
    }
    let form = TensorType::of(reader.u32()?)?;
    let offset = reader.u64()?;
    let [values, piece_bytes] = form.piece();
    let too_large = || format!("has the sizes {sizes:?}, more than can be counted");
    let numel = sizes.iter().try_fold(1u64, |all, &size| all.checked_mul(size)).ok_or_else(too_large)?;
    if numel == 0 || !sizes[0].is_multiple_of(values) {
        return Err(format!("has the sizes {sizes:?}, which are not cut into blocks of {values}"));
    }
    if !offset.is_multiple_of(alignment) {
        return Err(format!("lies at {offset}, which is no multiple of the alignment {alignment}"));
    }
    let bytes = (numel / values).checked_mul(piece_bytes).ok_or_else(too_large)?;
    let end = offset.checked_add(bytes).ok_or_else(too_large)?;
    let size = |value: u64| usize::try_from(value).map_err(|_| too_large());
    let mut shape = sizes.iter().map(|&value| size(value)).collect::<Result<Vec<_>, _>>()?;
    shape.reverse();
    Ok(TensorEntry { form, shape, bytes: size(offset)?..size(end)? })
}

fn check_places(tensors: &BTreeMap<String, TensorEntry>, data_bytes: u64) -> Result<(), Refusal> {
    let mut order: Vec<(&String, &TensorEntry)> = tensors.iter().collect();
    order.sort_by_key(|(_, entry)| entry.bytes.start);
    for (name, entry) in &order {
        if entry.bytes.end as u64 > data_bytes {
            return Err(format!(
                "is cut short: '{name}' ends at {} of the data, which has {data_bytes} bytes",
                entry.bytes.end
            ));
        }
    }
    match order.windows(2).find(|pair| pair[0].1.bytes.end > pair[1].1.bytes.start) {
        Some(pair) => Err(format!("'{}' and '{}' overlap", pair[0].0, pair[1].0)),
        None => Ok(()),
    }
}
