//! The zip container: the directory at the end says where each stored entry lies.
//!
//! Only what torch writes is read: stored entries, with the 64-bit extension for large files. Compressed, encrypted,
//! split, overlapping or escaping entries are refused before any of their bytes is used.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crc32fast::Hasher;

use crate::error::{CheckpointError, Result};

/// More entries than this are refused: a model has a few thousand tensors.
pub const MAX_ENTRIES: u64 = 1 << 20;
/// A larger directory is refused.
const MAX_DIRECTORY_BYTES: u64 = 256 << 20;
const END: u32 = 0x0605_4b50;
const END_64: u32 = 0x0606_4b50;
const END_64_LOCATOR: u32 = 0x0706_4b50;
const CENTRAL: u32 = 0x0201_4b50;
const LOCAL: u32 = 0x0403_4b50;
/// How files of torch before 1.6 begin: a pickle of their magic number.
const LEGACY: [u8; 15] =
    [0x80, 2, 0x8a, 10, 0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19, b'.'];

/// One stored entry.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Its name, folders included.
    pub name: String,
    /// Where its bytes start in the file.
    pub start: u64,
    /// How many there are.
    pub bytes: u64,
    /// Their CRC-32; 0 where torch was told to take none (`set_crc32_options`).
    pub crc32: u32,
}

/// An open zip file.
pub struct ZipFile {
    path: PathBuf,
    file: File,
    entries: Vec<Entry>,
    index: HashMap<String, usize>,
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?)))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?)))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

/// Where the directory lies: (offset, bytes, entries).
type Directory = (u64, u64, u64);

impl ZipFile {
    /// Opens a file and reads its directory.
    pub fn open(path: &Path) -> Result<ZipFile> {
        let file = ferrospeed_files::open(path).map_err(CheckpointError::io("open", path))?;
        let length = file.metadata().map_err(CheckpointError::io("read", path))?.len();
        let mut zip = ZipFile { path: path.to_path_buf(), file, entries: Vec::new(), index: HashMap::new() };
        let (offset, bytes, count) = zip.find_directory(length)?;
        zip.read_directory(offset, bytes, count)?;
        zip.locate(length)?;
        Ok(zip)
    }

    fn fail(&self, why: impl ToString) -> CheckpointError {
        CheckpointError::file(&self.path, why)
    }

    fn read_at(&self, start: u64, bytes: u64) -> Result<Vec<u8>> {
        let mut buffer = vec![0; bytes as usize];
        self.file.read_exact_at(&mut buffer, start).map_err(CheckpointError::io("read", &self.path))?;
        Ok(buffer)
    }

    fn find_directory(&self, length: u64) -> Result<Directory> {
        let not_zip = || {
            match self.read_at(0, length.min(LEGACY.len() as u64)) {
            Ok(begin) if begin == LEGACY => self.fail(
                "is in the format of torch before 1.6: load it with torch and save it anew (torch.save), or as safetensors",
            ),
            _ => self.fail(
                "is not a complete zip file (its end is missing): not written by torch, or cut short",
            ),
        }
        };
        let tail_bytes = length.min(22 + 65_535);
        let tail = self.read_at(length - tail_bytes, tail_bytes)?;
        let last = tail.len().checked_sub(22).ok_or_else(not_zip)?;
        let end = (0..=last).rev().find(|&at| {
            u32_at(&tail, at) == Some(u64::from(END))
                && u16_at(&tail, at + 20) == Some((tail.len() - at - 22) as u64)
        });
        let end = end.ok_or_else(not_zip)?;
        let field16 = |at| u16_at(&tail, end + at).unwrap_or(0);
        let field32 = |at| u32_at(&tail, end + at).unwrap_or(0);
        let end_at = length - tail_bytes + end as u64;
        let plain = (field32(16), field32(12), field16(10));
        let wide = plain.0 == u64::from(u32::MAX)
            || plain.1 == u64::from(u32::MAX)
            || plain.2 == u64::from(u16::MAX);
        let (offset, bytes, count) = match end_at.checked_sub(20).filter(|_| wide) {
            None => plain,
            Some(at) => self.wide_directory(at, length)?,
        };
        if offset.checked_add(bytes).is_none_or(|end| end > end_at) || bytes > MAX_DIRECTORY_BYTES {
            return Err(
                self.fail(format!("its directory of {bytes} bytes at {offset} does not fit into the file"))
            );
        }
        if count > MAX_ENTRIES || count * 46 > bytes {
            return Err(self.fail(format!("its directory of {bytes} bytes cannot hold {count} entries")));
        }
        Ok((offset, bytes, count))
    }

    fn wide_directory(&self, locator_at: u64, length: u64) -> Result<Directory> {
        let bad = || self.fail("its 64-bit directory is damaged");
        let locator = self.read_at(locator_at, 20)?;
        if u32_at(&locator, 0) != Some(u64::from(END_64_LOCATOR)) {
            return Err(bad());
        }
        let at = u64_at(&locator, 8)
            .filter(|at| at.checked_add(56).is_some_and(|end| end <= length))
            .ok_or_else(bad)?;
        let record = self.read_at(at, 56)?;
        if u32_at(&record, 0) != Some(u64::from(END_64)) {
            return Err(bad());
        }
        let field = |at| u64_at(&record, at).ok_or_else(bad);
        Ok((field(48)?, field(40)?, field(32)?))
    }

    fn read_directory(&mut self, offset: u64, bytes: u64, count: u64) -> Result<()> {
        let directory = self.read_at(offset, bytes)?;
        let mut at = 0;
        for number in 0..count {
            let entry = self.directory_entry(&directory, &mut at);
            let entry =
                entry.ok_or_else(|| self.fail(format!("entry {number} of its directory is damaged")))??;
            if let Some(first) = self.index.insert(entry.name.clone(), self.entries.len()) {
                return Err(
                    self.fail(format!("entries {first} and {number} are both called '{}'", entry.name))
                );
            }
            self.entries.push(entry);
        }
        Ok(())
    }

    /// One entry of the directory; its start is still that of its local header.
    fn directory_entry(&self, directory: &[u8], at: &mut usize) -> Option<Result<Entry>> {
        let head = directory.get(*at..)?;
        if u32_at(head, 0)? != u64::from(CENTRAL) {
            return None;
        }
        let (flags, method) = (u16_at(head, 8)?, u16_at(head, 10)?);
        let (name_bytes, extra_bytes, comment_bytes) =
            (u16_at(head, 28)? as usize, u16_at(head, 30)? as usize, u16_at(head, 32)? as usize);
        let name = std::str::from_utf8(head.get(46..46 + name_bytes)?).ok()?.to_owned();
        let mut extra = head.get(46 + name_bytes..46 + name_bytes + extra_bytes)?;
        let mut sizes = [u32_at(head, 24)?, u32_at(head, 20)?, u32_at(head, 42)?];
        while extra.len() >= 4 {
            let (id, length) = (u16_at(extra, 0)?, u16_at(extra, 2)? as usize);
            let mut body = extra.get(4..4 + length)?;
            if id == 1 {
                for size in sizes.iter_mut().filter(|size| **size == u64::from(u32::MAX)) {
                    *size = u64_at(body, 0)?;
                    body = &body[8..];
                }
            }
            extra = &extra[4 + length..];
        }
        *at += 46 + name_bytes + extra_bytes + comment_bytes;
        let [bytes, stored, start] = sizes;
        let refuse = |why: String| Some(Err(self.fail(format!("entry '{name}' {why}"))));
        if method != 0 || bytes != stored {
            return refuse(
                "is compressed: torch stores tensors as they are, so this file is not torch's".into(),
            );
        }
        if flags & 1 != 0 {
            return refuse("is encrypted".into());
        }
        if name.starts_with('/') || name.contains('\\') || name.split('/').any(|part| part == "..") {
            return refuse("leads out of the file".into());
        }
        Some(Ok(Entry { name, start, bytes, crc32: u32_at(head, 16)? as u32 }))
    }

    /// Follows every local header to the bytes behind it, and checks that no two entries share bytes.
    fn locate(&mut self, length: u64) -> Result<()> {
        let mut entries = std::mem::take(&mut self.entries);
        let mut spans = Vec::with_capacity(entries.len());
        for entry in &mut entries {
            let outside = || self.fail(format!("entry '{}' lies outside the file", entry.name));
            let header_at = entry.start;
            if header_at.checked_add(30).is_none_or(|end| end > length) {
                return Err(outside());
            }
            let head = self.read_at(header_at, 30)?;
            let skip = u16_at(&head, 26).zip(u16_at(&head, 28)).map(|(name, extra)| name + extra);
            let skip = skip.filter(|_| u32_at(&head, 0) == Some(u64::from(LOCAL)));
            let skip =
                skip.ok_or_else(|| self.fail(format!("the header of entry '{}' is damaged", entry.name)))?;
            let start = header_at + 30 + skip;
            let end = start.checked_add(entry.bytes).filter(|end| *end <= length).ok_or_else(outside)?;
            spans.push((header_at, end, entry.name.clone()));
            entry.start = start;
        }
        spans.sort();
        for pair in spans.windows(2) {
            if pair[0].1 > pair[1].0 {
                return Err(self.fail(format!("entries '{}' and '{}' overlap", pair[0].2, pair[1].2)));
            }
        }
        self.entries = entries;
        Ok(())
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All entries.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// An entry by its name.
    pub fn entry(&self, name: &str) -> Option<&Entry> {
        self.index.get(name).map(|&at| &self.entries[at])
    }

    /// Reads bytes of an entry, unchecked: [`ZipFile::check`] compares its checksum.
    pub fn read(&self, entry: &Entry, from: u64, buffer: &mut [u8]) -> Result<()> {
        if from.checked_add(buffer.len() as u64).is_none_or(|end| end > entry.bytes) {
            let why =
                format!("entry '{}' has {} bytes, more were asked for at {from}", entry.name, entry.bytes);
            return Err(self.fail(why));
        }
        self.file.read_exact_at(buffer, entry.start + from).map_err(CheckpointError::io("read", &self.path))
    }

    /// Compares an entry's checksum, where it has one.
    pub fn check(&self, entry: &Entry) -> Result<()> {
        if entry.crc32 == 0 {
            return Ok(());
        }
        let mut buffer = vec![0; entry.bytes.min(1 << 20) as usize];
        let mut crc = Hasher::new();
        let mut at = 0;
        while at < entry.bytes {
            let length = (entry.bytes - at).min(buffer.len() as u64) as usize;
            self.read(entry, at, &mut buffer[..length])?;
            crc.update(&buffer[..length]);
            at += length as u64;
        }
        let found = crc.finalize();
        if found == entry.crc32 {
            return Ok(());
        }
        Err(CheckpointError::Damaged {
            path: self.path.clone(),
            tensor: entry.name.clone(),
            start: entry.start,
            end: entry.start + entry.bytes,
            found,
            expected: entry.crc32,
        })
    }
}
