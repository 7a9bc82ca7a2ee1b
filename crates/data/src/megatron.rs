//! Megatron-LM's indexed datasets: `PREFIX.bin` holds tokens, `PREFIX.idx` says where each sequence of them lies.
//!
//! The index (little-endian): `MMIDIDX\0\0`, version u64 = 1, token type u8, count of sequences u64, count of document
//! bounds u64, then per sequence its length (i32), per sequence its byte in the `.bin` (i64), then the bounds of
//! documents (i64, sequence numbers from 0 to the count). Sequences are read one after the other as one stream;
//! Megatron's own `--append-eod` has put a token between documents. The index is read through once; of it, only the
//! places where the stream does not go on at the next byte are kept.

use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use crate::error::{DataError, Result};
use crate::token_file::{Stretch, TokenFile, TokenType};

const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
/// Of the format before that, whose index is unlike this one.
const OLD_MAGIC: &[u8; 6] = b"TNTIDX";
/// What to do about an index that is not whole.
const ANEW: &str = "copy it anew, or write it anew from its texts";
const HEADER_BYTES: u64 = 9 + 8 + 1 + 8 + 8;

/// Opens the dataset of a prefix, a `.bin` or an `.idx` file.
pub(crate) fn open(path: &Path) -> Result<TokenFile> {
    let (index, tokens) = files(path);
    let (kind, stretches, len) = read_index(&index)?;
    if len == 0 {
        return Err(DataError::bad_file(&index, "is empty: its sequences hold no token"));
    }
    TokenFile::with_stretches(&tokens, kind, stretches, len)
}

/// The two files that a path stands for: index, tokens.
pub(crate) fn files(path: &Path) -> (PathBuf, PathBuf) {
    let is_file = path.extension().is_some_and(|extension| extension == "bin" || extension == "idx");
    let prefix = if is_file { path.with_extension("") } else { path.to_path_buf() };
    let with = |extension: &str| {
        let mut name = prefix.clone().into_os_string();
        name.push(extension);
        PathBuf::from(name)
    };
    (with(".idx"), with(".bin"))
}

fn read_index(path: &Path) -> Result<(TokenType, Vec<Stretch>, u64)> {
    let file = ferrospeed_files::open(path).map_err(DataError::io(path))?;
    let bytes = file.metadata().map_err(DataError::io(path))?.len();
    let mut reader = BufReader::with_capacity(1 << 18, file);
    let bad = |place: u64, why: String| DataError::bad_place(path, format!("byte {place}"), why);
    let mut header = [0; HEADER_BYTES as usize];
    let start = header.len().min(bytes as usize);
    reader.read_exact(&mut header[..start]).map_err(DataError::io(path))?;
    if header.starts_with(OLD_MAGIC) {
        let why = "is of the format that Megatron wrote before 2021; write it anew with --dataset-impl mmap";
        return Err(bad(0, why.into()));
    }
    if !header.starts_with(MAGIC) {
        return Err(bad(0, "is no Megatron index: it does not start with MMIDIDX".into()));
    }
    if bytes < HEADER_BYTES {
        return Err(bad(
            bytes,
            format!("ends inside its header of {HEADER_BYTES} bytes: it was cut off; {ANEW}"),
        ));
    }
    let number = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().unwrap_or_default());
    if number(9) != 1 {
        return Err(bad(9, format!("is of version {}, and only version 1 is known", number(9))));
    }
    let kind = match header[17] {
        1 => TokenType::U8,
        2 => TokenType::I8,
        3 => TokenType::I16,
        4 => TokenType::I32,
        5 => TokenType::I64,
        8 => TokenType::U16,
        code => return Err(bad(17, format!("names token type {code}, which is no integer type"))),
    };
    let (sequences, bounds) = (number(18), number(26));
    // u128: a damaged count must not overflow into a plausible size.
    let needed = u128::from(HEADER_BYTES) + u128::from(sequences) * 12 + u128::from(bounds) * 8;
    if needed > u128::from(bytes) {
        let why = format!(
            "ends after {bytes} bytes, but {sequences} sequences and {bounds} document bounds need {needed}: it was cut off; {ANEW}"
        );
        return Err(bad(bytes, why));
    }
    let mut pointers =
        BufReader::with_capacity(1 << 18, ferrospeed_files::open(path).map_err(DataError::io(path))?);
    let pointers_start = HEADER_BYTES + sequences * 4;
    pointers.seek(SeekFrom::Start(pointers_start)).map_err(DataError::io(path))?;
    let (mut stretches, mut tokens, mut next_byte) = (Vec::<Stretch>::new(), 0u64, None);
    for sequence in 0..sequences {
        let (mut size, mut pointer) = ([0; 4], [0; 8]);
        reader.read_exact(&mut size).map_err(DataError::io(path))?;
        pointers.read_exact(&mut pointer).map_err(DataError::io(path))?;
        let (size, byte) = (i32::from_le_bytes(size), i64::from_le_bytes(pointer));
        let size = u64::try_from(size).map_err(|_| {
            bad(HEADER_BYTES + sequence * 4, format!("sequence {sequence} has a length of {size}"))
        })?;
        let byte = u64::try_from(byte).map_err(|_| {
            bad(pointers_start + sequence * 8, format!("sequence {sequence} starts at byte {byte}"))
        })?;
        if size == 0 {
            continue;
        }
        if next_byte != Some(byte) {
            stretches.push(Stretch { first: tokens, byte });
        }
        tokens += size;
        next_byte = byte.checked_add(size * kind.bytes());
    }
    Ok((kind, stretches, tokens))
}
