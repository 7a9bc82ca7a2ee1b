//! The manifest: what a checkpoint holds and where every element of it lies.
//!
//! One small JSON file per checkpoint. It is written last, so a folder that has it is whole. Whatever a manifest says
//! is checked before it is believed: pieces that overlap, leave gaps, lie outside their file or name another folder are
//! refused.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{CheckpointError, Result};
use crate::part::{Part, Places, check_cover};

/// The manifest's file name.
pub const MANIFEST_FILE: &str = "manifest.json";
/// What the manifest says it is.
pub const FORMAT: &str = "ferrospeed-checkpoint";
/// The newest version this crate writes and reads.
pub const VERSION: u32 = 4;
/// The last version without [`Kind::Rank`].
const WITHOUT_RANKS: u32 = 3;
/// The last version without [`Piece::part`]: what needs none is written so, and older releases read it.
const WITHOUT_PARTS: u32 = 2;
/// The first version whose manifests carry a checksum of themselves.
const CHECKED_FROM: u64 = 2;
/// The field with that checksum: CRC-32 of the manifest without it, as compact JSON.
const CHECKSUM: &str = "checksum";
/// Checksums cover blocks of at most this many bytes, so that part of a piece can be read and still be checked.
pub const BLOCK_BYTES: u64 = 4 << 20;
/// A manifest larger than this is not one of ours.
pub(crate) const MAX_MANIFEST_BYTES: u64 = 1 << 30;

/// An element type, by its name in safetensors headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names say it")]
pub enum Dtype {
    F32,
    F64,
    F16,
    BF16,
    I64,
    I32,
    I16,
    I8,
    U8,
    BOOL,
}

impl Dtype {
    /// Bytes per element.
    pub const fn size_bytes(self) -> u64 {
        match self {
            Dtype::F64 | Dtype::I64 => 8,
            Dtype::F32 | Dtype::I32 => 4,
            Dtype::F16 | Dtype::BF16 | Dtype::I16 => 2,
            Dtype::I8 | Dtype::U8 | Dtype::BOOL => 1,
        }
    }

    /// Widens or narrows little-endian elements of this type to `f32`. Integers are refused: they are no weights.
    pub fn to_f32(self, bytes: &[u8], out: &mut [f32]) -> Option<()> {
        fn each<const N: usize>(bytes: &[u8], out: &mut [f32], convert: impl Fn([u8; N]) -> f32) {
            for (out, chunk) in out.iter_mut().zip(bytes.as_chunks::<N>().0) {
                *out = convert(*chunk);
            }
        }
        match self {
            Dtype::F32 => each(bytes, out, f32::from_le_bytes),
            Dtype::F64 => each(bytes, out, |b| f64::from_le_bytes(b) as f32),
            Dtype::F16 => each(bytes, out, |b| half::f16::from_le_bytes(b).to_f32()),
            Dtype::BF16 => each(bytes, out, |b| half::bf16::from_le_bytes(b).to_f32()),
            _ => return None,
        }
        Some(())
    }

    /// Appends floats, rounded to this type. Integers are refused.
    pub fn append_f32(self, values: &[f32], out: &mut Vec<u8>) -> Option<()> {
        match self {
            Dtype::F32 => values.iter().for_each(|value| out.extend_from_slice(&value.to_le_bytes())),
            Dtype::F64 => {
                values.iter().for_each(|value| out.extend_from_slice(&f64::from(*value).to_le_bytes()))
            }
            Dtype::F16 => values
                .iter()
                .for_each(|value| out.extend_from_slice(&half::f16::from_f32(*value).to_le_bytes())),
            Dtype::BF16 => values
                .iter()
                .for_each(|value| out.extend_from_slice(&half::bf16::from_f32(*value).to_le_bytes())),
            _ => return None,
        }
        Some(())
    }

    /// Whether it is a type of floats.
    pub fn is_float(self) -> bool {
        matches!(self, Dtype::F32 | Dtype::F64 | Dtype::F16 | Dtype::BF16)
    }
}

/// What a tensor is to the training run.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// The f32 weights of a trained parameter. (Its 16-bit copy is their rounding and is not stored.)
    Master,
    /// The weights of a parameter that is not trained, in the type that kernels read.
    Weight,
    /// A state of the optimizer, by its name.
    State(String),
    /// A value that belongs to the model but is no parameter.
    Buffer,
    /// What the optimizer of one rank holds and no other has, by the rank's number: of use to as many ranks alone.
    Rank(usize),
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kind::Master => f.write_str("master"),
            Kind::Weight => f.write_str("weight"),
            Kind::State(name) => write!(f, "state.{name}"),
            Kind::Buffer => f.write_str("buffer"),
            Kind::Rank(rank) => write!(f, "rank.{rank}"),
        }
    }
}

/// A stretch of a tensor in one file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Piece {
    /// Index into [`Manifest::files`].
    pub file: usize,
    /// Where it starts in the file, in bytes.
    pub offset: u64,
    /// Of which part of the tensor it is a stretch; of the whole where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<Part>,
    /// Where it starts in that part, flattened, in elements.
    pub start: u64,
    /// How many elements.
    pub len: u64,
    /// CRC-32 of each block of [`BLOCK_BYTES`], the last one shorter.
    pub crc32: Vec<u32>,
}

/// One tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// Its global name.
    pub name: String,
    /// What it is.
    pub kind: Kind,
    /// Its whole shape.
    pub shape: Vec<u64>,
    /// Its type.
    pub dtype: Dtype,
    /// Where its elements lie, in order: part by part.
    pub pieces: Vec<Piece>,
}

impl TensorEntry {
    /// Elements of the whole tensor. (Checked not to overflow when the manifest is read.)
    pub fn numel(&self) -> u64 {
        self.shape.iter().product()
    }
}

/// One file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Its name in the checkpoint's folder.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// CRC-32 of the whole file.
    pub crc32: u32,
}

/// Everything that is no tensor.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct TrainingState {
    /// Steps taken, skipped ones included.
    pub global_steps: u64,
    /// Samples that all ranks took.
    pub global_samples: u64,
    /// Steps that changed nothing.
    pub skipped_steps: u64,
    /// How many of them were the last ones.
    pub skipped_in_a_row: u64,
    /// Micro-batches that each rank took.
    pub micro_steps: u64,
    /// Updates the optimizer made: Adam's `t`.
    pub optimizer_steps: u64,
    /// The norm of the last applied gradient.
    pub last_grad_norm: Option<f64>,
    /// Where random numbers start; their other keys are the counters above. Unknown in what others wrote.
    pub seed: Option<u64>,
    /// Samples the data loader has given out: where it goes on.
    pub data_position: u64,
    /// Options of each parameter group: learning rate, decay, betas.
    pub groups: Vec<GroupState>,
    /// The schedule's counter.
    pub scheduler: Option<Value>,
    /// The loss scaler.
    pub loss_scaler: Option<Value>,
    /// What the optimizer keeps of whole parameters, by name: the ratios of 1-bit LAMB.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub per_parameter: BTreeMap<String, Vec<f64>>,
    /// What layers keep besides parameters, by name: the bias that balances a router.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub layer_states: BTreeMap<String, Vec<f32>>,
    /// What training prunes, by technique and module: a hexadecimal digit for every four units, the first in its lowest bit, and
    /// a one for each that is kept.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub masks: BTreeMap<String, String>,
}

/// The options of one parameter group.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GroupState {
    /// The names of its parameters, in order.
    pub params: Vec<String>,
    /// Learning rate.
    pub lr: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// The two decay rates.
    pub betas: [f64; 2],
}

/// The run that wrote a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Origin {
    /// How many ranks.
    pub ranks: usize,
    /// The ZeRO stage.
    pub stage: u8,
    /// The type kernels read weights in.
    pub dtype: Dtype,
    /// The optimizer's name, if there was one.
    pub optimizer: Option<String>,
    /// Whose kernels computed it, where that is known: bits depend on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernels: Option<String>,
}

/// The whole manifest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`FORMAT`].
    pub format: String,
    /// [`VERSION`].
    pub version: u32,
    /// The release that wrote it.
    pub written_by: String,
    /// The checkpoint's name.
    pub tag: String,
    /// When it was written, in seconds since 1970: which of several is the newest.
    pub unix_time_s: u64,
    /// The run that wrote it.
    pub origin: Origin,
    /// Counters, scheduler, loss scaler, positions.
    pub training: TrainingState,
    /// What the caller wants back.
    pub client_state: Value,
    /// The configuration of the run.
    pub config: Value,
    /// Other names of tied parameters: each to the name under which the parameter is stored.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub aliases: BTreeMap<String, String>,
    /// The files.
    pub files: Vec<FileEntry>,
    /// The tensors, in the model's order.
    pub tensors: Vec<TensorEntry>,
}

impl Manifest {
    /// Reads and checks a manifest.
    pub fn read(path: &Path) -> Result<Manifest> {
        let text =
            ferrospeed_files::read(path, MAX_MANIFEST_BYTES).map_err(CheckpointError::io("read", path))?;
        let mut head: Value = serde_json::from_slice(&text)
            .map_err(|error| CheckpointError::file(path, format!("is not readable JSON: {error}")))?;
        if head["format"] != FORMAT {
            return Err(CheckpointError::file(path, "is not a manifest of this format"));
        }
        match head["version"].as_u64() {
            Some(version) if version <= u64::from(VERSION) => {}
            version => {
                let why =
                    format!("has version {version:?}; this release reads up to {VERSION}: use a newer one");
                return Err(CheckpointError::file(path, why));
            }
        }
        check_sum(&mut head).map_err(|why| CheckpointError::file(path, why))?;
        let manifest: Manifest = serde_json::from_value(head)
            .map_err(|error| CheckpointError::file(path, format!("is not a valid manifest: {error}")))?;
        manifest.check().map_err(|why| CheckpointError::file(path, why))?;
        Ok(manifest)
    }

    /// The version that readers of these tensors must know.
    pub(crate) fn version_of(tensors: &[TensorEntry]) -> u32 {
        let in_parts = tensors.iter().flat_map(|tensor| &tensor.pieces).any(|piece| piece.part.is_some());
        let of_ranks = tensors.iter().any(|tensor| matches!(tensor.kind, Kind::Rank(_)));
        match (of_ranks, in_parts) {
            (true, _) => VERSION,
            (false, true) => WITHOUT_RANKS,
            (false, false) => WITHOUT_PARTS,
        }
    }

    /// The manifest's file: JSON with a checksum of itself.
    pub(crate) fn to_text(&self) -> Result<Vec<u8>, serde_json::Error> {
        let mut value = serde_json::to_value(self)?;
        let sum = crc32fast::hash(&serde_json::to_vec(&value)?);
        value[CHECKSUM] = format!("{sum:08x}").into();
        serde_json::to_vec_pretty(&value)
    }

    /// Checks that every tensor is covered once, by pieces that lie inside their files and apart from one another.
    pub(crate) fn check(&self) -> Result<(), String> {
        for file in &self.files {
            let plain = Path::new(&file.name).file_name().is_some_and(|only| only == file.name.as_str());
            if !plain {
                return Err(format!("file '{}' lies outside the checkpoint's folder", file.name));
            }
        }
        let mut seen = BTreeMap::new();
        let mut used: Vec<(usize, u64, u64, &str)> = Vec::new();
        for tensor in &self.tensors {
            let name = &tensor.name;
            if seen.insert((name, &tensor.kind), ()).is_some() {
                return Err(format!("'{name}' ({}) is listed twice", tensor.kind));
            }
            let numel = tensor.shape.iter().try_fold(1u64, |product, size| product.checked_mul(*size));
            let size = tensor.dtype.size_bytes();
            let numel = numel.filter(|numel| numel.checked_mul(size).is_some_and(|bytes| bytes < 1 << 60));
            let numel = numel.ok_or_else(|| format!("'{name}' has the absurd shape {:?}", tensor.shape))?;
            let mut parts: Vec<Option<&Part>> =
                tensor.pieces.iter().map(|piece| piece.part.as_ref()).collect();
            parts.dedup();
            if !parts.windows(2).all(|pair| pair[0] < pair[1]) {
                return Err(format!("the parts of '{name}' ({}) are not in order", tensor.kind));
            }
            check_cover(&tensor.shape, &parts).map_err(|why| format!("'{name}' ({}) {why}", tensor.kind))?;
            let mut next = 0;
            for (index, piece) in tensor.pieces.iter().enumerate() {
                if index > 0 && tensor.pieces[index - 1].part != piece.part {
                    next = 0;
                }
                if piece.start != next {
                    let what = if piece.start < next { "overlap" } else { "leave a gap" };
                    return Err(format!("the pieces of '{name}' ({}) {what} at element {next}", tensor.kind));
                }
                let numel = Places::of(&tensor.shape, piece.part.as_ref()).numel();
                next = piece.start.checked_add(piece.len).filter(|end| *end <= numel).ok_or_else(|| {
                    format!("a piece of '{name}' ({}) ends after its {numel} elements", tensor.kind)
                })?;
                let is_last = tensor.pieces.get(index + 1).is_none_or(|after| after.part != piece.part);
                if is_last && next != numel {
                    return Err(format!("'{name}' ({}) lacks its elements {next} to {numel}", tensor.kind));
                }
                let bytes = piece.len * size;
                let file = self.files.get(piece.file);
                let file =
                    file.ok_or_else(|| format!("'{name}' lies in file {}, which is not listed", piece.file))?;
                let end = piece.offset.checked_add(bytes).filter(|end| *end <= file.bytes);
                let end = end.ok_or_else(|| {
                    format!(
                        "'{name}' ends after byte {} of {} ({} bytes)",
                        piece.offset, file.name, file.bytes
                    )
                })?;
                if piece.crc32.len() as u64 != bytes.div_ceil(BLOCK_BYTES) {
                    return Err(format!("'{name}' has {} checksums for {bytes} bytes", piece.crc32.len()));
                }
                if bytes > 0 {
                    used.push((piece.file, piece.offset, end, name));
                }
            }
            if tensor.pieces.is_empty() && numel > 0 {
                return Err(format!("'{name}' ({}) lacks its elements 0 to {numel}", tensor.kind));
            }
        }
        for alias in self.aliases.keys() {
            if seen.contains_key(&(alias, &Kind::Master)) || seen.contains_key(&(alias, &Kind::Weight)) {
                return Err(format!(
                    "'{alias}' is stored, and also another name of '{}'",
                    self.aliases[alias]
                ));
            }
        }
        used.sort_unstable();
        for pair in used.windows(2) {
            if pair[0].0 == pair[1].0 && pair[0].2 > pair[1].1 {
                return Err(format!("'{}' and '{}' overlap at byte {}", pair[0].3, pair[1].3, pair[1].1));
            }
        }
        Ok(())
    }
}

/// Takes the checksum out of a manifest and compares it. What was written before there was one has none.
fn check_sum(manifest: &mut Value) -> Result<(), String> {
    let version = manifest["version"].as_u64().unwrap_or(0);
    let said = manifest.as_object_mut().and_then(|fields| fields.shift_remove(CHECKSUM));
    let Some(said) = said else {
        return if version < CHECKED_FROM {
            Ok(())
        } else {
            Err(format!("has no '{CHECKSUM}': it was changed after it was written; load an older checkpoint"))
        };
    };
    let text = serde_json::to_vec(manifest).map_err(|error| error.to_string())?;
    let found = format!("{:08x}", crc32fast::hash(&text));
    if said == found.as_str() {
        return Ok(());
    }
    Err(format!(
        "was changed after it was written (checksum {found}, expected {said}): counters and positions in it cannot be trusted; load an older checkpoint"
    ))
}
