//! W&B's run file: a header, then records in blocks of 32 KiB.
//!
//! The layout is that of LevelDB's log with two differences: the header, and a plain CRC-32 (of the kind byte and the
//! bytes after it). A record that does not fit into what is left of a block goes on in the next.

use std::path::Path;

use crate::whole::WholeRecords;

const HEADER: [u8; 7] = *b":W&B\xe1\xbe\x00";
const BLOCK: usize = 32 << 10;
/// CRC, length and kind of a piece.
const PIECE_HEADER: usize = 4 + 2 + 1;

/// Whether a piece is a whole record, or which part of one.
#[derive(Clone, Copy)]
enum Piece {
    Whole = 1,
    First = 2,
    Middle = 3,
    Last = 4,
}

/// A run file that grows.
#[derive(Debug)]
pub(super) struct RunFile(WholeRecords);

impl RunFile {
    pub(super) fn create(path: &Path) -> std::io::Result<RunFile> {
        let mut file = WholeRecords::create_new(path)?;
        file.append(&HEADER)?;
        Ok(RunFile(file))
    }

    /// Adds a record.
    pub(super) fn append(&mut self, mut record: &[u8]) -> std::io::Result<()> {
        let mut out = Vec::with_capacity(record.len() + PIECE_HEADER);
        let mut is_first = true;
        // Bytes of the current block that are taken.
        let mut used = (self.0.end()? % BLOCK as u64) as usize;
        loop {
            let left = BLOCK - used;
            if left < PIECE_HEADER {
                out.resize(out.len() + left, 0);
                used = 0;
                continue;
            }
            let (now, rest) = record.split_at(record.len().min(left - PIECE_HEADER));
            let piece = match (is_first, rest.is_empty()) {
                (true, true) => Piece::Whole,
                (true, false) => Piece::First,
                (false, true) => Piece::Last,
                (false, false) => Piece::Middle,
            } as u8;
            out.extend_from_slice(&crc32(piece, now).to_le_bytes());
            out.extend_from_slice(&(now.len() as u16).to_le_bytes());
            out.push(piece);
            out.extend_from_slice(now);
            used += PIECE_HEADER + now.len();
            (record, is_first) = (rest, false);
            if record.is_empty() {
                return self.0.append(&out);
            }
        }
    }
}

/// CRC-32 (IEEE 802.3) of the kind and what follows it.
fn crc32(piece: u8, body: &[u8]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(&[piece]);
    crc.update(body);
    crc.finalize()
}

/// The records of a run file, for tests: what a reader of the format finds.
#[cfg(test)]
pub(super) fn read(bytes: &[u8]) -> Vec<Vec<u8>> {
    let (mut records, mut record) = (Vec::new(), Vec::new());
    assert_eq!(bytes[..HEADER.len()], HEADER);
    let mut at = HEADER.len();
    while at < bytes.len() {
        let left = BLOCK - at % BLOCK;
        if left < PIECE_HEADER {
            at += left;
            continue;
        }
        let crc = u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let length = usize::from(u16::from_le_bytes(bytes[at + 4..at + 6].try_into().unwrap()));
        let (kind, body) = (bytes[at + 6], &bytes[at + PIECE_HEADER..][..length]);
        assert_eq!(crc, crc32(kind, body));
        assert!(length + PIECE_HEADER <= left, "a piece crosses a block");
        record.extend_from_slice(body);
        if kind == Piece::Whole as u8 || kind == Piece::Last as u8 {
            records.push(std::mem::take(&mut record));
        }
        at += PIECE_HEADER + length;
    }
    records
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_of_any_length_read_back_across_blocks() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.wandb");
        let mut file = RunFile::create(&path).unwrap();
        // The second leaves five bytes of the first block, too few for another piece's header.
        let lengths = [0, BLOCK - 7 - 7 - 7 - 5, 1, 3 * BLOCK, 100, BLOCK - PIECE_HEADER, 2];
        for (index, length) in lengths.into_iter().enumerate() {
            file.append(&vec![index as u8; length]).unwrap();
        }
        let found = read(&std::fs::read(&path).unwrap());
        assert_eq!(found.iter().map(Vec::len).collect::<Vec<_>>(), lengths);
        assert!(
            found.iter().enumerate().all(|(index, record)| record.iter().all(|&byte| byte == index as u8))
        );
    }
}
