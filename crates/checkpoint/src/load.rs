//! Loading: any rank reads any stretch of any tensor, and every block it reads is checked.
//!
//! There is no conversion between layouts: a rank asks for the elements it owns now, wherever they were written.

use std::collections::HashMap;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crc32fast::Hasher;
use ferrospeed_io::{OpenFile, Queue, QueueOptions};

use crate::deepspeed::Foreign;
use crate::disk::{self, Stretch, Window};
use crate::error::{CheckpointError, Result};
use crate::manifest::{BLOCK_BYTES, Dtype, Kind, MANIFEST_FILE, Manifest, TensorEntry};
use crate::part::{Part, Places};
use crate::pt::Unknown;

/// Files smaller than this are read through the system's cache.
const DIRECT_FROM_BYTES: u64 = 16 << 20;

/// Who wrote what was not written here.
pub(crate) const FOREIGN: &str = "DeepSpeed";

/// A file, opened at most once in each way.
#[derive(Default)]
struct Opened {
    direct: OnceLock<OpenFile>,
    cached: OnceLock<OpenFile>,
}

/// Who reads a stretch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readers {
    /// This rank alone: its bytes need not stay in the system's cache.
    This,
    /// Other ranks too: the first to read brings them into the cache, for all of this host.
    Several,
}

/// A stretch of a tensor to be read.
#[derive(Debug, Clone)]
pub struct Wanted<'c> {
    /// The tensor.
    pub tensor: &'c TensorEntry,
    /// Of which part of it; of the whole where there is none.
    pub part: Option<Part>,
    /// Which elements of that.
    pub elements: Range<u64>,
    /// Who reads them.
    pub readers: Readers,
}

impl<'c> Wanted<'c> {
    /// A stretch of the whole that only this process reads.
    pub fn of(tensor: &'c TensorEntry, elements: Range<u64>) -> Wanted<'c> {
        Wanted { tensor, part: None, elements, readers: Readers::This }
    }
}

/// What a block is to those who asked for it.
struct Block {
    /// Index of the stretch that it belongs to.
    wanted: usize,
    /// Which of its bytes belong to that.
    part: Range<usize>,
    /// Its checksum; blocks of other programs' files have none.
    crc32: Option<u32>,
    /// Where it was written as another part than is wanted: its piece, and which elements of that piece's part it has.
    scattered: Option<(usize, Range<u64>)>,
}

/// A stretch that is put together from blocks of other parts.
struct Gathering {
    bytes: Vec<u8>,
    /// Blocks that are still to come.
    left: usize,
}

/// An open checkpoint.
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    index: HashMap<Kind, HashMap<String, usize>>,
    files: Vec<Opened>,
    queue: OnceLock<Queue>,
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
        Ok(Checkpoint::of_manifest(path.to_path_buf(), manifest))
    }

    /// Opens one checkpoint's folder, of our format or of DeepSpeed's.
    pub fn open_any(path: &Path) -> Result<Checkpoint> {
        if !path.join(MANIFEST_FILE).exists() && Foreign::is_one(path) {
            return Foreign::open(path, Unknown::Refuse)?.into_checkpoint();
        }
        Checkpoint::open(path)
    }

    /// A checkpoint whose files are known to be there.
    pub(crate) fn of_manifest(path: PathBuf, manifest: Manifest) -> Checkpoint {
        let mut index: HashMap<Kind, HashMap<String, usize>> = HashMap::new();
        for (at, tensor) in manifest.tensors.iter().enumerate() {
            index.entry(tensor.kind.clone()).or_default().insert(tensor.name.clone(), at);
        }
        let files = manifest.files.iter().map(|_| Opened::default()).collect();
        Checkpoint { path, manifest, index, files, queue: OnceLock::new() }
    }

    /// Whether another program wrote it: its blocks have no checksums.
    pub fn is_foreign(&self) -> bool {
        self.manifest.written_by == FOREIGN
    }

    /// Calls the parameters of another program's checkpoint by the names of a model's, where it has the spelling that
    /// transformers 5 has in memory.
    pub fn spelled_as(self, names: &[&str]) -> Checkpoint {
        let Checkpoint { path, mut manifest, .. } = self;
        crate::deepspeed::spell_as(&mut manifest, names);
        Checkpoint::of_manifest(path, manifest)
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

    fn file_path(&self, index: usize) -> PathBuf {
        self.path.join(&self.manifest.files[index].name)
    }

    /// A file, opened as it is best read.
    fn file(&self, index: usize, readers: Readers) -> Result<&OpenFile> {
        let direct = readers == Readers::This && self.manifest.files[index].bytes >= DIRECT_FROM_BYTES;
        let place = if direct { &self.files[index].direct } else { &self.files[index].cached };
        if let Some(file) = place.get() {
            return Ok(file);
        }
        let path = self.file_path(index);
        let file = disk::open(&path, direct).map_err(CheckpointError::io("open", &path))?;
        Ok(place.get_or_init(|| file))
    }

    /// Reads stretches of tensors, in their own types; `take` gets the elements of each in order, in parts, with the
    /// stretch's index. The next blocks come while `take` works, across tensors.
    pub(crate) fn stream(
        &self,
        wanted: &[Wanted<'_>],
        take: &mut dyn FnMut(usize, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let mut blocks = Vec::new();
        for (index, wanted) in wanted.iter().enumerate() {
            self.list_blocks(index, wanted, &mut blocks)?;
        }
        let mut gathering: HashMap<usize, Gathering> = HashMap::new();
        for block in blocks.iter().filter(|block| block.known_by.scattered.is_some()) {
            let begin = || Gathering { bytes: Vec::new(), left: 0 };
            gathering.entry(block.known_by.wanted).or_insert_with(begin).left += 1;
        }
        disk::read(
            self.queue.get_or_init(|| Queue::new(QueueOptions::default())),
            &Window::gather(blocks),
            &|stretch| self.file(stretch.file, wanted[stretch.known_by.wanted].readers),
            &|stretch, error| {
                let tensor = &wanted[stretch.known_by.wanted].tensor.name;
                let why = format!("cannot read '{tensor}' at byte {}: {error}", stretch.start);
                CheckpointError::file(&self.file_path(stretch.file), why)
            },
            &mut |stretch, bytes| {
                let block = &stretch.known_by;
                self.check(wanted[block.wanted].tensor, stretch, bytes)?;
                let (Some(from), Some(whole)) = (&block.scattered, gathering.get_mut(&block.wanted)) else {
                    return take(block.wanted, &mut bytes[block.part.clone()]);
                };
                scatter(&wanted[block.wanted], from, bytes, &mut whole.bytes);
                whole.left -= 1;
                if whole.left > 0 {
                    return Ok(());
                }
                let mut whole = std::mem::take(&mut whole.bytes);
                take(block.wanted, &mut whole)
            },
        )
    }

    /// The blocks that hold a stretch of a tensor.
    fn list_blocks(&self, index: usize, wanted: &Wanted<'_>, blocks: &mut Vec<Stretch<Block>>) -> Result<()> {
        let Wanted { tensor, part, elements, .. } = wanted;
        let places = Places::of(&tensor.shape, part.as_ref());
        if elements.start > elements.end || elements.end > places.numel() {
            let why =
                format!("'{}' has {} elements, {elements:?} were asked for", tensor.name, places.numel());
            return Err(CheckpointError::Request(why));
        }
        let size = tensor.dtype.size_bytes();
        let of_part = tensor.pieces.partition_point(|piece| piece.part < *part);
        let alike = &tensor.pieces[of_part..];
        let alike = &alike[..alike.partition_point(|piece| piece.part == *part)];
        if alike.is_empty() {
            self.list_scattered(index, wanted, &places, blocks);
            return Ok(());
        }
        let first = alike.partition_point(|piece| piece.start + piece.len <= elements.start);
        for piece in alike[first..].iter().take_while(|piece| piece.start < elements.end) {
            let start = (elements.start.max(piece.start) - piece.start) * size;
            let end = (elements.end.min(piece.start + piece.len) - piece.start) * size;
            let mut at = start / BLOCK_BYTES * BLOCK_BYTES;
            while at < end {
                let bytes = (piece.len * size - at).min(BLOCK_BYTES);
                let part = start.saturating_sub(at) as usize..(end - at).min(bytes) as usize;
                let crc32 = piece.crc32.get((at / BLOCK_BYTES) as usize).copied();
                let known_by = Block { wanted: index, part, crc32, scattered: None };
                blocks.push(Stretch { file: piece.file, start: piece.offset + at, bytes, known_by });
                at += bytes;
            }
        }
        Ok(())
    }

    /// The blocks of other parts that hold anything of a stretch, each once.
    fn list_scattered(
        &self,
        index: usize,
        wanted: &Wanted<'_>,
        places: &Places,
        blocks: &mut Vec<Stretch<Block>>,
    ) {
        let (tensor, size) = (wanted.tensor, wanted.tensor.dtype.size_bytes());
        for (number, piece) in tensor.pieces.iter().enumerate() {
            let source = Places::of(&tensor.shape, piece.part.as_ref());
            for at in (0..piece.len * size).step_by(BLOCK_BYTES as usize) {
                let bytes = (piece.len * size - at).min(BLOCK_BYTES);
                let held = piece.start + at / size..piece.start + (at + bytes) / size;
                let mut has_some = false;
                places.each_common(&wanted.elements, &source, held.clone(), |_, _, _| {
                    has_some = true;
                    false
                });
                if has_some {
                    let crc32 = piece.crc32.get((at / BLOCK_BYTES) as usize).copied();
                    let scattered = Some((number, held));
                    let known_by = Block { wanted: index, part: 0..bytes as usize, crc32, scattered };
                    blocks.push(Stretch { file: piece.file, start: piece.offset + at, bytes, known_by });
                }
            }
        }
    }

    /// Compares the checksum of a block.
    fn check(&self, tensor: &TensorEntry, stretch: &Stretch<Block>, bytes: &[u8]) -> Result<()> {
        let Some(expected) = stretch.known_by.crc32 else { return Ok(()) };
        let found = crc32fast::hash(bytes);
        if found == expected {
            return Ok(());
        }
        Err(CheckpointError::Damaged {
            path: self.file_path(stretch.file),
            tensor: format!("{} ({})", tensor.name, tensor.kind),
            start: stretch.start,
            end: stretch.start + stretch.bytes,
            found,
            expected,
        })
    }

    /// Appends elements `range` of a tensor, as stored, to `out`.
    pub fn read_bytes(&self, tensor: &TensorEntry, range: Range<u64>, out: &mut Vec<u8>) -> Result<()> {
        self.stream(&[Wanted::of(tensor, range)], &mut |_, bytes| {
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
        self.each_f32(&[Wanted::of(tensor, range)], &mut |_, values| {
            out[done..done + values.len()].copy_from_slice(values);
            done += values.len();
            Ok(())
        })
    }

    /// Reads stretches of tensors of floats, each block once. `take` gets the elements of each in order, in parts, with
    /// the stretch's index in `wanted`; the next ones are on their way meanwhile.
    pub fn each_f32(
        &self,
        wanted: &[Wanted<'_>],
        take: &mut dyn FnMut(usize, &mut [f32]) -> Result<()>,
    ) -> Result<()> {
        let mut converted = Vec::new();
        self.stream(wanted, &mut |index, bytes| {
            let tensor = wanted[index].tensor;
            // What is stored as it is used is used where it lies.
            if tensor.dtype == Dtype::F32
                && cfg!(target_endian = "little")
                && let Ok(values) = bytemuck::try_cast_slice_mut(bytes)
            {
                return take(index, values);
            }
            converted.resize(bytes.len() / tensor.dtype.size_bytes() as usize, 0.0);
            if tensor.dtype.to_f32(bytes, &mut converted).is_none() {
                let why = format!("'{}' is {:?}, expected a float type", tensor.name, tensor.dtype);
                return Err(CheckpointError::file(&self.path, why));
            }
            take(index, &mut converted)
        })
    }

    /// Reads everything and compares every checksum.
    pub fn verify(&self) -> Result<Verified> {
        let whole = |tensor| Wanted::of(tensor, 0..TensorEntry::numel(tensor));
        let everything: Vec<Wanted<'_>> = self.manifest.tensors.iter().map(whole).collect();
        self.stream(&everything, &mut |_, _| Ok(()))?;
        let mut blocks = Vec::new();
        for wanted in &everything {
            self.list_blocks(0, wanted, &mut blocks)?;
        }
        blocks.sort_unstable_by_key(|block| (block.file, block.start));
        let mut verified = Verified { tensors: everything.len(), ..Verified::default() };
        for (index, entry) in self.manifest.files.iter().enumerate() {
            let found = self.file_checksum(index, blocks.iter().filter(|block| block.file == index))?;
            if found != entry.crc32 {
                // Every tensor is whole, so it is the file's own header.
                let why = format!(
                    "its header is damaged (checksum of the file {found:08x}, expected {:08x})",
                    entry.crc32
                );
                return Err(CheckpointError::file(&self.file_path(index), why));
            }
            verified.files += 1;
            verified.bytes += entry.bytes;
        }
        Ok(verified)
    }

    /// The checksum of a whole file whose blocks, given in order, are known to be right: only what is between them is
    /// read.
    fn file_checksum<'b>(
        &self,
        index: usize,
        blocks: impl Iterator<Item = &'b Stretch<Block>>,
    ) -> Result<u32> {
        let (file, path) = (self.file(index, Readers::Several)?, self.file_path(index));
        let mut crc = Hasher::new();
        let mut at = 0;
        let mut between = Vec::new();
        let mut read_until = |at: u64, end: u64, crc: &mut Hasher| {
            for start in (at..end).step_by(BLOCK_BYTES as usize) {
                between.resize((end - start).min(BLOCK_BYTES) as usize, 0);
                file.file().read_exact_at(&mut between, start).map_err(CheckpointError::io("read", &path))?;
                crc.update(&between);
            }
            Ok::<(), CheckpointError>(())
        };
        for block in blocks {
            read_until(at, block.start, &mut crc)?;
            let Some(known) = block.known_by.crc32 else { continue };
            crc.combine(&Hasher::new_with_initial_len(known, block.bytes));
            at = block.start + block.bytes;
        }
        read_until(at, self.manifest.files[index].bytes, &mut crc)?;
        Ok(crc.finalize())
    }
}

/// Puts what a block of another part has of a stretch into its places.
fn scatter(wanted: &Wanted<'_>, (piece, held): &(usize, Range<u64>), block: &[u8], out: &mut Vec<u8>) {
    let (tensor, elements) = (wanted.tensor, &wanted.elements);
    let size = tensor.dtype.size_bytes() as usize;
    out.resize((elements.end - elements.start) as usize * size, 0);
    let places = Places::of(&tensor.shape, wanted.part.as_ref());
    let source = Places::of(&tensor.shape, tensor.pieces[*piece].part.as_ref());
    places.each_common(elements, &source, held.clone(), |from, to, count| {
        let (from, to, bytes) = (from as usize * size, to as usize * size, count as usize * size);
        out[to..to + bytes].copy_from_slice(&block[from..from + bytes]);
        true
    });
}
