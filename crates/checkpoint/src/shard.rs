//! One rank's file: a safetensors file written as a stream, checksummed as it goes.
//!
//! What a rank writes is known before the first byte, so the header comes first, and no more than a few blocks
//! are in memory at a time: one is asked for and checksummed while others go to the disk.

use std::ops::Range;
use std::path::Path;

use crc32fast::Hasher;
use serde::{Deserialize, Serialize};
use serde_json::{Map, json};

use crate::disk;
use crate::error::{CheckpointError, Result};
use crate::fs::FileSystem;
use crate::manifest::{BLOCK_BYTES, Dtype, FileEntry, Kind, Piece};
use crate::part::Part;

/// A stretch of a tensor that this rank writes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PieceSpec {
    /// The tensor's global name.
    pub name: String,
    /// What it is.
    pub kind: Kind,
    /// Its whole shape.
    pub shape: Vec<u64>,
    /// Its type.
    pub dtype: Dtype,
    /// The tensor's place in the model: manifests list tensors in this order.
    pub place: u64,
    /// Of which part of the tensor it is a stretch; of the whole where there is none.
    pub part: Option<Part>,
    /// The first element of the stretch.
    pub start: u64,
    /// How many elements.
    pub len: u64,
}

impl PieceSpec {
    /// Its length in the file.
    pub fn size_bytes(&self) -> u64 {
        self.len * self.dtype.size_bytes()
    }

    /// Its name in the rank's file.
    fn name_in_file(&self) -> String {
        // Several parts of a tensor may lie in one file, and each starts with its first element.
        let part = self.part.as_ref().and_then(|part| part.ranges.first());
        let part = part.map_or(String::new(), |[start, _]| format!("@{start}"));
        format!("{}/{}{part}@{}", self.kind, self.name, self.start)
    }
}

/// Gives the bytes of a piece: (which piece, which of its elements, where they are appended).
pub type PieceBytes<'a> = dyn FnMut(usize, Range<u64>, &mut Vec<u8>) -> Result<(), String> + 'a;

/// A file that was written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Written {
    pub(crate) file: FileEntry,
    /// As the specifications, in their order; the file's index is not known here and is 0.
    pub(crate) pieces: Vec<Piece>,
}

/// Bytes of the file that [`write`] makes, header included.
pub(crate) fn file_bytes(specs: &[PieceSpec]) -> u64 {
    header(specs).len() as u64 + specs.iter().map(PieceSpec::size_bytes).sum::<u64>()
}

fn header(specs: &[PieceSpec]) -> Vec<u8> {
    let mut map = Map::new();
    map.insert("__metadata__".into(), json!({"format": crate::manifest::FORMAT}));
    let mut offset = 0;
    for spec in specs {
        let end = offset + spec.size_bytes();
        let entry = json!({"dtype": spec.dtype, "shape": [spec.len], "data_offsets": [offset, end]});
        map.insert(spec.name_in_file(), entry);
        offset = end;
    }
    let mut text = serde_json::Value::Object(map).to_string().into_bytes();
    // Data starts at a multiple of 64 bytes.
    text.resize((text.len() + 8).next_multiple_of(64) - 8, b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.append(&mut text);
    header
}

/// Writes a file that was not there, and brings it to the disk.
pub(crate) fn write(
    fs: &dyn FileSystem,
    path: &Path,
    specs: &[PieceSpec],
    bytes: &mut PieceBytes<'_>,
) -> Result<Written> {
    let file = fs.create_file(path).map_err(CheckpointError::io("create", path))?;
    let mut whole = Hasher::new();
    let mut offset = 0;
    let pieces = disk::write(fs, path, file, |output| {
        // Headers grow with the number of tensors, and may be longer than a block.
        for part in header(specs).chunks(BLOCK_BYTES as usize) {
            whole.update(part);
            let append = |to: &mut Vec<u8>| {
                to.extend_from_slice(part);
                Ok(())
            };
            output.append(append, |_| Ok(()))?;
            offset += part.len() as u64;
        }
        let mut pieces = Vec::with_capacity(specs.len());
        for (index, spec) in specs.iter().enumerate() {
            let mut crc32 = Vec::new();
            let block_numel = BLOCK_BYTES / spec.dtype.size_bytes();
            let mut done = 0;
            while done < spec.len {
                let elements = done..(done + block_numel).min(spec.len);
                done = elements.end;
                let crc = output.append(
                    |to| {
                        bytes(index, elements.clone(), to)
                            .map_err(|why| CheckpointError::Request(format!("'{}': {why}", spec.name)))
                    },
                    |block| checksum(spec, elements.end - elements.start, block),
                )?;
                whole.combine(&crc);
                crc32.push(crc.finalize());
            }
            let part = spec.part.clone();
            pieces.push(Piece { file: 0, offset, part, start: spec.start, len: spec.len, crc32 });
            offset += spec.size_bytes();
        }
        Ok(pieces)
    })?;
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    Ok(Written { file: FileEntry { name, bytes: offset, crc32: whole.finalize() }, pieces })
}

/// The checksum of a block, if it has the length it should have.
fn checksum(spec: &PieceSpec, numel: u64, block: &[u8]) -> Result<Hasher> {
    let expected = numel * spec.dtype.size_bytes();
    if block.len() as u64 != expected {
        let why = format!("'{}' gave {} bytes, expected {expected}", spec.name, block.len());
        return Err(CheckpointError::Request(why));
    }
    let mut crc = Hasher::new();
    crc.update(block);
    Ok(crc)
}
