//! Texts to train on, one document after the other, a bounded piece at a time.
//!
//! Files are read once from start to end; what is held is one piece. Everything that is not as it should be is
//! named with its file and its place in it.

mod json_lines;
mod parquet_column;
mod text;

pub(crate) use json_lines::JsonLinesTexts;
pub(crate) use parquet_column::{ParquetTexts, guarded};
pub(crate) use text::{Cut, TextFiles};

use crate::error::Result;

/// A line, and a piece between two places where text may be cut, is at most this long.
pub(crate) const MAX_PIECE_BYTES: usize = 64 << 20;

/// What [`Documents::next`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Piece {
    /// Some of a document; more of it follows.
    Part,
    /// A document, or the rest of one.
    Last,
    /// There is no more.
    End,
}

/// A source of documents.
pub(crate) trait Documents {
    /// Appends the next piece of text to `out`.
    fn next(&mut self, out: &mut Vec<u8>) -> Result<Piece>;

    /// Bytes of the files that were read so far.
    fn bytes_read(&self) -> u64;
}
