//! Loading: any rank reads any stretch of any tensor, and every block it reads is checked.
//!
//! There is no conversion between layouts: a rank asks for the elements it owns now, wherever they were written.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crc32fast::Hasher;
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

use crate::error::{CheckpointError, Result};
use crate::manifest::{BLOCK_BYTES, Kind, MANIFEST_FILE, Manifest, Piece, TensorEntry};

/// An open checkpoint.
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    index: HashMap<Kind, HashMap<String, usize>>,
    files: Vec<OnceLock<File>>,
}

/// What [`Checkpoint::verify`] looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Verified {
    /// Files.
    pub files: usize,
    /// Tensors.
    pub tensors: usize,
    /// Bytes of all files.
    pub bytes: u64,
}

impl Checkpoint {
    /// Opens one checkpoint's folder: reads and checks the manifest, and that every file is there at full length.
    pub fn open(path: &Path) -> Result<Checkpoint> {
        let manifest = Manifest::read(&path.join(MANIFEST_FILE))?;
        for file in &manifest.files {
            let file_path = path.join(&file.name);
            let found = std::fs::metadata(&file_path).map_err(CheckpointError::io("read", &file_path))?.len();
            if found != file.bytes {
                let what = if found < file.bytes { "cut short" } else { "not the one that was written" };
                let why = format!(
                    "has {found} bytes, expected {}: it is {what}; load an older checkpoint",
                    file.bytes
                );
                return Err(CheckpointError::file(&file_path, why));
            }
        }
        let mut index: HashMap<Kind, HashMap<String, usize>> = HashMap::new();
        for (at, tensor) in manifest.tensors.iter().enumerate() {
            index.entry(tensor.kind.clone()).or_default().insert(tensor.name.clone(), at);
        }
        let files = manifest.files.iter().map(|_| OnceLock::new()).collect();
        Ok(Checkpoint { path: path.to_path_buf(), manifest, index, files })
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it holds.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The entry of a tensor, if it is there.
    pub fn entry(&self, kind: &Kind, name: &str) -> Option<&TensorEntry> {
        self.index.get(kind)?.get(name).map(|&at| &self.manifest.tensors[at])
    }

    /// The weights of a parameter, by any of its names: its f32 masters where it was trained, what kernels read where it
    /// was not.
    pub fn weights(&self, name: &str) -> Option<&TensorEntry> {
        let stored = |name: &str| self.entry(&Kind::Master, name).or_else(|| self.entry(&Kind::Weight, name));
        stored(name).or_else(|| stored(self.manifest.aliases.get(name)?))
    }

    fn file(&self, index: usize) -> Result<(&File, PathBuf)> {
        let path = self.path.join(&self.manifest.files[index].name);
        if let Some(file) = self.files[index].get() {
            return Ok((file, path));
        }
        let file = File::open(&path).map_err(CheckpointError::io("open", &path))?;
        Ok((self.files[index].get_or_init(|| file), path))
    }

    /// Reads elements `range` of a tensor, in its own type, block by block; `take` gets them in order.
    fn blocks(
        &self,
        tensor: &TensorEntry,
        range: Range<u64>,
        take: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        if range.start > range.end || range.end > tensor.numel() {
            let why = format!("'{}' has {} elements, {range:?} were asked for", tensor.name, tensor.numel());
            return Err(CheckpointError::Request(why));
        }
        let size = tensor.dtype.size_bytes();
        let first = tensor.pieces.partition_point(|piece| piece.start + piece.len <= range.start);
        let mut block = Vec::new();
        for piece in tensor.pieces[first..].iter().take_while(|piece| piece.start < range.end) {
            let start = (range.start.max(piece.start) - piece.start) * size;
            let end = (range.end.min(piece.start + piece.len) - piece.start) * size;
            let mut at = start / BLOCK_BYTES * BLOCK_BYTES;
            while at < end {
                let length = (piece.len * size - at).min(BLOCK_BYTES);
                self.block(tensor, piece, at, length, &mut block)?;
                let from = start.saturating_sub(at) as usize;
                let to = (end - at).min(length) as usize;
                take(&block[from..to])?;
                at += length;
            }
        }
        Ok(())
    }

    /// Reads and checks the block that starts `at` bytes into a piece.
    fn block(
        &self,
        tensor: &TensorEntry,
        piece: &Piece,
        at: u64,
        length: u64,
        block: &mut Vec<u8>,
    ) -> Result<()> {
        let (file, path) = self.file(piece.file)?;
        block.resize(length as usize, 0);
        let start = piece.offset + at;
        // The next block comes while this one is checked. A hint: a system that does not take it is only slower.
        let next = (start + length) as i64;
        let _ = posix_fadvise(file, next, BLOCK_BYTES as i64, PosixFadviseAdvice::POSIX_FADV_WILLNEED);
        if let Err(error) = file.read_exact_at(block, start) {
            let why = format!("cannot read '{}' at byte {start}: {error}", tensor.name);
            return Err(CheckpointError::file(&path, why));
        }
        let mut crc = Hasher::new();
        crc.update(block);
        let (found, expected) = (crc.finalize(), piece.crc32[(at / BLOCK_BYTES) as usize]);
        if found != expected {
            let tensor = format!("{} ({})", tensor.name, tensor.kind);
            return Err(CheckpointError::Damaged {
                path,
                tensor,
                start,
                end: start + length,
                found,
                expected,
            });
        }
        Ok(())
    }

    /// Appends elements `range` of a tensor, as stored, to `out`.
    pub fn read_bytes(&self, tensor: &TensorEntry, range: Range<u64>, out: &mut Vec<u8>) -> Result<()> {
        self.blocks(tensor, range, &mut |bytes| {
            out.extend_from_slice(bytes);
            Ok(())
        })
    }

    /// Reads elements `range` of a tensor of floats into `out`, which has their number.
    pub fn read_f32(&self, tensor: &TensorEntry, range: Range<u64>, out: &mut [f32]) -> Result<()> {
        if range.end.saturating_sub(range.start) != out.len() as u64 {
            let why = format!("{range:?} of '{}' do not fit into {} elements", tensor.name, out.len());
            return Err(CheckpointError::Request(why));
        }
        let mut done = 0;
        self.each_f32(tensor, range, &mut |values| {
            out[done..done + values.len()].copy_from_slice(values);
            done += values.len();
            Ok(())
        })
    }

    /// Reads elements `range` of a tensor of floats, each block once, and gives them to `take` in order.
    pub fn each_f32(
        &self,
        tensor: &TensorEntry,
        range: Range<u64>,
        take: &mut dyn FnMut(&mut [f32]) -> Result<()>,
    ) -> Result<()> {
        let size = tensor.dtype.size_bytes() as usize;
        let mut values = Vec::new();
        self.blocks(tensor, range, &mut |bytes| {
            values.resize(bytes.len() / size, 0.0);
            if tensor.dtype.to_f32(bytes, &mut values).is_none() {
                let why = format!("'{}' is {:?}, expected a float type", tensor.name, tensor.dtype);
                return Err(CheckpointError::file(&self.path, why));
            }
            take(&mut values)
        })
    }

    /// Reads everything and compares every checksum.
    pub fn verify(&self) -> Result<Verified> {
        let mut verified = Verified::default();
        for tensor in &self.manifest.tensors {
            self.blocks(tensor, 0..tensor.numel(), &mut |_| Ok(()))?;
            verified.tensors += 1;
        }
        let mut block = vec![0; BLOCK_BYTES as usize];
        for (index, entry) in self.manifest.files.iter().enumerate() {
            let (file, path) = self.file(index)?;
            let mut crc = Hasher::new();
            let mut at = 0;
            while at < entry.bytes {
                let length = (entry.bytes - at).min(BLOCK_BYTES);
                let block = &mut block[..length as usize];
                file.read_exact_at(block, at).map_err(CheckpointError::io("read", &path))?;
                crc.update(block);
                at += length;
            }
            let found = crc.finalize();
            if found != entry.crc32 {
                // Every tensor is whole, so it is the file's own header.
                let why = format!(
                    "its header is damaged (checksum of the file {found:08x}, expected {:08x})",
                    entry.crc32
                );
                return Err(CheckpointError::file(&path, why));
            }
            verified.files += 1;
            verified.bytes += entry.bytes;
        }
        Ok(verified)
    }
}
