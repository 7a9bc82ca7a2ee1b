//! Token ids as numbers in a file: nanoGPT's `.bin`, Megatron's `.bin`, and what [`crate::cache`] writes.
//!
//! Sequences are read where they lie, one `pread` each: nothing is held, the page cache serves all ranks of a host,
//! and a file that somebody cuts off during a run is an error and not a signal, as it would be with a mapping.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::TokenStream;
use crate::error::{DataError, Result};

/// So many tokens at the start of a file tell whether it has another type, and no fewer pairs than these.
const LOOKED_AT_TOKENS: u64 = 1 << 16;
const MIN_PAIRS: usize = 32;

/// How a token is written; little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TokenType {
    /// One byte.
    U8,
    /// One byte with a sign.
    I8,
    /// Two bytes: what nanoGPT writes.
    U16,
    /// Two bytes with a sign.
    I16,
    /// Four bytes.
    U32,
    /// Four bytes with a sign.
    I32,
    /// Eight bytes with a sign.
    I64,
}

impl TokenType {
    /// The smallest type for ids below `vocabulary`.
    pub fn for_vocabulary(vocabulary: u64) -> TokenType {
        match vocabulary {
            0..=0x100 => TokenType::U8,
            0x101..=0x1_0000 => TokenType::U16,
            _ => TokenType::U32,
        }
    }

    /// Bytes per token.
    pub fn bytes(self) -> u64 {
        match self {
            TokenType::U8 | TokenType::I8 => 1,
            TokenType::U16 | TokenType::I16 => 2,
            TokenType::U32 | TokenType::I32 => 4,
            TokenType::I64 => 8,
        }
    }

    fn decode(self, bytes: &[u8], out: &mut [i64]) {
        fn each<const N: usize>(bytes: &[u8], out: &mut [i64], decode: impl Fn([u8; N]) -> i64) {
            for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<N>().0) {
                *out = decode(*bytes);
            }
        }
        match self {
            TokenType::U8 => each(bytes, out, |b: [u8; 1]| b[0].into()),
            TokenType::I8 => each(bytes, out, |b| i8::from_le_bytes(b).into()),
            TokenType::U16 => each(bytes, out, |b| u16::from_le_bytes(b).into()),
            TokenType::I16 => each(bytes, out, |b| i16::from_le_bytes(b).into()),
            TokenType::U32 => each(bytes, out, |b| u32::from_le_bytes(b).into()),
            TokenType::I32 => each(bytes, out, |b| i32::from_le_bytes(b).into()),
            TokenType::I64 => each(bytes, out, i64::from_le_bytes),
        }
    }
}

/// Tokens that lie one after the other in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stretch {
    /// Which token of the stream is the first.
    pub(crate) first: u64,
    /// Where it lies.
    pub(crate) byte: u64,
}

/// A file of tokens.
#[derive(Debug)]
pub struct TokenFile {
    path: PathBuf,
    file: File,
    kind: TokenType,
    /// In order; the first starts at token 0.
    stretches: Vec<Stretch>,
    len: u64,
}

impl TokenFile {
    /// A file that is tokens from its first byte to its last.
    pub fn open(path: &Path, kind: TokenType) -> Result<TokenFile> {
        let (file, bytes) = open(path)?;
        if bytes == 0 {
            return Err(DataError::bad_file(path, "is empty: it holds no token"));
        }
        let extra = bytes % kind.bytes();
        if extra != 0 {
            let why = format!(
                "ends in the middle of a token of {} bytes: it was cut off, or is of another type; copy or write it anew, or set \
                 data.token_type",
                kind.bytes()
            );
            return Err(DataError::bad_place(path, format!("byte {}", bytes - extra), why));
        }
        let stretches = vec![Stretch { first: 0, byte: 0 }];
        Ok(TokenFile { path: path.to_path_buf(), file, kind, stretches, len: bytes / kind.bytes() })
    }

    /// Refuses a file whose tokens are wider than it is said: every second number is then the empty half of one.
    pub(crate) fn expect_width(self) -> Result<TokenFile> {
        let mut start = vec![0; LOOKED_AT_TOKENS.min(self.len) as usize / 2 * 2];
        self.read(0, &mut start)?;
        let pairs = start.as_chunks::<2>().0;
        let is_half = |&[low, high]: &[i64; 2]| (0..16).contains(&high) && low >= 0;
        let has_empty_halves = pairs.iter().all(|pair| pair[1] == 0) && pairs.iter().any(|pair| pair[0] != 0);
        // From 65536 tokens on the upper halves are not all empty.
        let has_small_halves = pairs.iter().all(is_half) && pairs.iter().any(|pair| pair[0] > 255);
        if pairs.len() < MIN_PAIRS || !(has_empty_halves || has_small_halves) {
            return Ok(self);
        }
        let why = match self.kind {
            TokenType::U16 => "they are tokens of 4 bytes: set data.token_type = \"u32\"",
            _ => "they are tokens of 8 bytes: write them as u32",
        };
        let read = self.kind.bytes();
        Err(DataError::bad_file(
            &self.path,
            format!("read as tokens of {read} bytes, every second one is next to nothing; {why}"),
        ))
    }

    /// A file of which an index says where its tokens lie.
    pub(crate) fn with_stretches(
        path: &Path,
        kind: TokenType,
        stretches: Vec<Stretch>,
        len: u64,
    ) -> Result<TokenFile> {
        let (file, bytes) = open(path)?;
        let ends = stretches.iter().skip(1).map(|next| next.first).chain([len]);
        for (stretch, end) in stretches.iter().zip(ends) {
            let end_byte = stretch.byte.checked_add((end - stretch.first).saturating_mul(kind.bytes()));
            if end_byte.is_none_or(|end_byte| end_byte > bytes) {
                let why = format!(
                    "has {bytes} bytes, but its index places tokens {}..{end} at byte {}: it was cut off, or the index \
                     is another file's; copy or write both anew",
                    stretch.first, stretch.byte
                );
                return Err(DataError::bad_file(path, why));
            }
        }
        Ok(TokenFile { path: path.to_path_buf(), file, kind, stretches, len })
    }

    fn stretch(&self, token: u64) -> usize {
        self.stretches.partition_point(|stretch| stretch.first <= token).saturating_sub(1)
    }

    fn byte(&self, token: u64) -> u64 {
        let stretch = self.stretches[self.stretch(token)];
        stretch.byte + (token - stretch.first) * self.kind.bytes()
    }
}

fn open(path: &Path) -> Result<(File, u64)> {
    let file = ferrospeed_files::open(path).map_err(DataError::io(path))?;
    let bytes = file.metadata().map_err(DataError::io(path))?.len();
    Ok((file, bytes))
}

/// Reads a part of a file that had it when it was opened.
pub(crate) fn read_at(path: &Path, file: &File, out: &mut [u8], start: u64) -> Result<()> {
    file.read_exact_at(out, start).map_err(|error| match (error.kind(), file.metadata()) {
        (ErrorKind::UnexpectedEof, Ok(now)) => {
            let end = start + out.len() as u64;
            DataError::Shortened { path: path.to_path_buf(), start, end, now: now.len() }
        }
        _ => DataError::io(path)(error),
    })
}

impl TokenStream for TokenFile {
    fn len(&self) -> u64 {
        self.len
    }

    fn vocabulary(&self) -> Option<u64> {
        None
    }

    fn read(&self, start: u64, out: &mut [i64]) -> Result<()> {
        let end = start.saturating_add(out.len() as u64);
        if end > self.len {
            return Err(DataError::OutOfRange { start, end, len: self.len });
        }
        let mut bytes = Vec::new();
        let (mut token, mut out) = (start, out);
        while !out.is_empty() {
            let index = self.stretch(token);
            let stretch_end = self.stretches.get(index + 1).map_or(self.len, |next| next.first);
            let count = (out.len() as u64).min(stretch_end - token) as usize;
            bytes.resize(count * self.kind.bytes() as usize, 0);
            read_at(&self.path, &self.file, &mut bytes, self.byte(token))?;
            let (now, later) = out.split_at_mut(count);
            self.kind.decode(&bytes, now);
            (token, out) = (token + count as u64, later);
        }
        Ok(())
    }

    fn place(&self, token: u64) -> String {
        format!("{}: token {token} (byte {})", self.path.display(), self.byte(token))
    }
}

/// Streams end to end.
pub(crate) struct Joined {
    parts: Vec<Box<dyn TokenStream>>,
    /// Where each ends.
    ends: Vec<u64>,
}

impl Joined {
    pub(crate) fn new(parts: Vec<Box<dyn TokenStream>>) -> Joined {
        let ends = parts
            .iter()
            .scan(0, |end: &mut u64, part| {
                *end = end.saturating_add(part.len());
                Some(*end)
            })
            .collect();
        Joined { parts, ends }
    }

    /// The part that holds a token, and where that part starts.
    fn part(&self, token: u64) -> (usize, u64) {
        let index = self.ends.partition_point(|&end| end <= token).min(self.parts.len() - 1);
        (index, if index == 0 { 0 } else { self.ends[index - 1] })
    }
}

impl TokenStream for Joined {
    fn len(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    fn vocabulary(&self) -> Option<u64> {
        self.parts.iter().map(|part| part.vocabulary()).max().flatten()
    }

    fn read(&self, start: u64, out: &mut [i64]) -> Result<()> {
        let end = start.saturating_add(out.len() as u64);
        if end > self.len() {
            return Err(DataError::OutOfRange { start, end, len: self.len() });
        }
        let (mut token, mut out) = (start, out);
        while !out.is_empty() {
            let (index, first) = self.part(token);
            let count = (out.len() as u64).min(self.ends[index] - token) as usize;
            let (now, later) = out.split_at_mut(count);
            self.parts[index].read(token - first, now)?;
            (token, out) = (token + count as u64, later);
        }
        Ok(())
    }

    fn place(&self, token: u64) -> String {
        let (index, first) = self.part(token);
        self.parts[index].place(token - first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.bin");
        std::fs::write(&path, bytes).unwrap();
        (folder, path)
    }

    #[test]
    fn every_type_reads_back() {
        for (kind, bytes, expected) in [
            (TokenType::U8, &[1u8, 255][..], [1, 255]),
            (TokenType::I8, &[1, 255], [1, -1]),
            (TokenType::U16, &[1, 0, 0, 255], [1, 65280]),
            (TokenType::I16, &[1, 0, 255, 255], [1, -1]),
            (TokenType::U32, &[1, 0, 0, 0, 255, 255, 255, 255], [1, 4294967295]),
            (TokenType::I32, &[1, 0, 0, 0, 255, 255, 255, 255], [1, -1]),
            (TokenType::I64, &[1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0], [1, 4294967298]),
        ] {
            let (_folder, path) = file(bytes);
            let tokens = TokenFile::open(&path, kind).unwrap();
            let mut out = [0; 2];
            tokens.read(0, &mut out).unwrap();
            assert_eq!((tokens.len(), out), (2, expected), "{kind:?}");
        }
    }

    #[test]
    fn empty_and_cut_files_are_refused_with_their_place() {
        let (_folder, path) = file(&[]);
        assert!(TokenFile::open(&path, TokenType::U16).unwrap_err().to_string().contains("x.bin: is empty"));
        let (_folder, path) = file(&[1, 2, 3]);
        let error = TokenFile::open(&path, TokenType::U16).unwrap_err().to_string();
        assert!(error.contains("x.bin: byte 2: ends in the middle of a token of 2 bytes"), "{error}");
    }

    #[test]
    fn tokens_that_are_wider_than_said_are_refused() {
        let wide = |count: u32, largest: u32| -> Vec<u8> {
            (0..count).flat_map(|n| (n * 7919 % largest + 1).to_le_bytes()).collect()
        };
        for largest in [100, 50_000, 128_000] {
            let (_folder, path) = file(&wide(1000, largest));
            let refused =
                TokenFile::open(&path, TokenType::U16).unwrap().expect_width().unwrap_err().to_string();
            assert!(refused.contains("set data.token_type = \"u32\""), "{refused}");
            assert!(TokenFile::open(&path, TokenType::U32).unwrap().expect_width().is_ok());
        }
        let eight: Vec<u8> = (0..1000u64).flat_map(|n| (n * 31 % 997).to_le_bytes()).collect();
        let (_folder, path) = file(&eight);
        for kind in [TokenType::U16, TokenType::U32] {
            assert!(TokenFile::open(&path, kind).unwrap().expect_width().is_err(), "{kind:?}");
        }
        // Ordinary tokens, nothing but zeros, and too little to tell.
        let ordinary: Vec<u8> = (0..1000u16).flat_map(|n| (n.wrapping_mul(31) % 997).to_le_bytes()).collect();
        for bytes in [ordinary, vec![0; 1000], wide(20, 100)] {
            let (_folder, path) = file(&bytes);
            assert!(TokenFile::open(&path, TokenType::U16).unwrap().expect_width().is_ok());
        }
    }

    #[test]
    fn a_file_that_shrinks_during_a_run_is_an_error() {
        let (_folder, path) = file(&[0; 64]);
        let tokens = TokenFile::open(&path, TokenType::U8).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(10).unwrap();
        let error = tokens.read(8, &mut [0; 8]).unwrap_err().to_string();
        assert!(error.contains("x.bin: has 10 bytes now, and bytes 8..16 were in it"), "{error}");
        assert!(error.contains("--resume"), "{error}");
    }

    #[test]
    fn parts_are_read_across_their_borders() {
        let (_one, first) = file(&[0, 1, 2]);
        let (_two, second) = file(&[3, 4]);
        let parts = [first, second]
            .map(|path| -> Box<dyn TokenStream> { Box::new(TokenFile::open(&path, TokenType::U8).unwrap()) });
        let joined = Joined::new(parts.into());
        let mut out = [0; 4];
        joined.read(1, &mut out).unwrap();
        assert_eq!(out, [1, 2, 3, 4]);
        assert!(joined.place(4).contains("token 1 (byte 1)"), "{}", joined.place(4));
        assert!(matches!(joined.read(2, &mut out), Err(DataError::OutOfRange { start: 2, end: 6, len: 5 })));
    }
}
