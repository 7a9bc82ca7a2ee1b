//! Plain files: each is a document.

use std::fs::File;
use std::io::Read;
use std::path::PathBuf;

use super::{Documents, MAX_PIECE_BYTES, Piece};
use crate::error::{DataError, Result};

/// How much is read at a time.
const BLOCK_BYTES: usize = 1 << 20;

/// Where a long file may be cut into pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Anywhere: bytes are their own tokens.
    Anywhere,
    /// After a newline that is followed by something visible, and only where the file is longer than a block: a cut is where
    /// a tokenizer has to be told that a text goes on. The text must be UTF-8.
    AtLines,
}

/// Files, one after the other.
pub(crate) struct TextFiles {
    files: std::vec::IntoIter<PathBuf>,
    current: Option<(PathBuf, File)>,
    cut: Cut,
    /// What was read and not yet handed out, and where in the file it starts.
    pending: Vec<u8>,
    pending_start: u64,
    bytes_read: u64,
}

impl TextFiles {
    pub(crate) fn new(files: Vec<PathBuf>, cut: Cut) -> TextFiles {
        TextFiles {
            files: files.into_iter(),
            current: None,
            cut,
            pending: Vec::new(),
            pending_start: 0,
            bytes_read: 0,
        }
    }

    /// Hands out the first `count` pending bytes.
    fn take(&mut self, count: usize, path: &std::path::Path, out: &mut Vec<u8>) -> Result<()> {
        let piece = &self.pending[..count];
        if self.cut == Cut::AtLines
            && let Err(error) = std::str::from_utf8(piece)
        {
            let at = self.pending_start + error.valid_up_to() as u64;
            let why = "is not UTF-8; convert the file, or train on bytes, for which any file will do";
            return Err(DataError::bad_place(path, format!("byte {at}"), why));
        }
        out.extend_from_slice(piece);
        self.pending.drain(..count);
        self.pending_start += count as u64;
        Ok(())
    }
}

impl Documents for TextFiles {
    fn next(&mut self, out: &mut Vec<u8>) -> Result<Piece> {
        let (path, mut file) = match self.current.take() {
            Some(current) => current,
            None => {
                let Some(path) = self.files.next() else { return Ok(Piece::End) };
                let file = ferrospeed_files::open(&path).map_err(DataError::io(&path))?;
                self.pending_start = 0;
                (path, file)
            }
        };
        loop {
            let read = (&mut file)
                .take(BLOCK_BYTES as u64)
                .read_to_end(&mut self.pending)
                .map_err(DataError::io(&path))?;
            self.bytes_read += read as u64;
            if read == 0 {
                self.take(self.pending.len(), &path, out)?;
                return Ok(Piece::Last);
            }
            let end = match self.cut {
                Cut::Anywhere => Some(self.pending.len()),
                // It may be the whole file: the next read tells.
                Cut::AtLines if self.pending.len() <= BLOCK_BYTES => None,
                Cut::AtLines => self
                    .pending
                    .windows(2)
                    .rposition(|pair| pair[0] == b'\n' && !pair[1].is_ascii_whitespace())
                    .map(|newline| newline + 1),
            };
            if let Some(end) = end {
                self.take(end, &path, out)?;
                self.current = Some((path, file));
                return Ok(Piece::Part);
            }
            if self.pending.len() > MAX_PIECE_BYTES {
                let place = format!("byte {}", self.pending_start);
                let why = format!("no line ends within {} MiB; is this text?", MAX_PIECE_BYTES >> 20);
                return Err(DataError::bad_place(&path, place, why));
            }
        }
    }

    fn bytes_read(&self) -> u64 {
        self.bytes_read
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(content: &[u8], cut: Cut) -> Result<Vec<(Piece, Vec<u8>)>> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text");
        std::fs::write(&path, content).unwrap();
        let mut files = TextFiles::new(vec![path], cut);
        let mut all = Vec::new();
        loop {
            let mut out = Vec::new();
            match files.next(&mut out)? {
                Piece::End => return Ok(all),
                piece => all.push((piece, out)),
            }
        }
    }

    #[test]
    fn a_long_text_is_cut_after_lines_and_loses_nothing() {
        let text = "a line of some length\n  and one that is indented\n".repeat(100_000).into_bytes();
        for cut in [Cut::Anywhere, Cut::AtLines] {
            let found = pieces(&text, cut).unwrap();
            assert!(found.len() > 2);
            assert_eq!(found.iter().flat_map(|piece| piece.1.clone()).collect::<Vec<u8>>(), text);
            assert_eq!(found.last().unwrap().0, Piece::Last);
            let parts = found.iter().filter(|piece| piece.0 == Piece::Part);
            if cut == Cut::AtLines {
                assert!(parts.clone().all(|piece| piece.1.ends_with(b"indented\n")));
            }
            assert!(parts.map(|piece| piece.1.len()).max().unwrap() <= 2 * BLOCK_BYTES);
        }
    }

    #[test]
    fn a_short_text_is_one_piece() {
        for text in ["one line", "two\nlines\n", "a\n\nb\nc"] {
            assert_eq!(
                pieces(text.as_bytes(), Cut::AtLines).unwrap(),
                [(Piece::Last, text.as_bytes().to_vec())]
            );
        }
    }

    #[test]
    fn bytes_that_are_no_text_are_refused_with_their_place_unless_bytes_are_wanted() {
        let mut text = "äöü\n".repeat(200_000).into_bytes();
        text[1_200_000] = 0xff;
        let error = pieces(&text, Cut::AtLines).unwrap_err().to_string();
        assert!(error.contains("text: byte 1200000: is not UTF-8"), "{error}");
        assert!(pieces(&text, Cut::Anywhere).is_ok());
    }

    #[test]
    fn a_line_without_an_end_is_refused_with_its_place() {
        let mut text = b"short\n".to_vec();
        text.resize(MAX_PIECE_BYTES + (3 << 20), b'x');
        let error = pieces(&text, Cut::AtLines).unwrap_err().to_string();
        assert!(error.contains("text: byte 6: no line ends within 64 MiB"), "{error}");
    }
}
