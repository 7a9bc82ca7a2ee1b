//! Rows that a file holds in another order than parameters have them.

use std::ops::Range;

use crate::error::Result;

/// The order of a stored tensor's rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum RowOrder {
    /// As parameters have them.
    #[default]
    Same,
    /// The two channels of a head that rotary positions turn together lie side by side, where parameters have all first ones
    /// and then all second ones: GGUF's queries and keys of LLaMA.
    PairsTogether {
        /// Channels of a head; even.
        head_dim: usize,
    },
}

impl RowOrder {
    /// Where a parameter's row lies in the file.
    fn stored(self, row: usize) -> usize {
        match self {
            RowOrder::Same => row,
            RowOrder::PairsTogether { head_dim } => {
                let (half, within) = (head_dim / 2, row % head_dim);
                row - within + 2 * (within % half) + within / half
            }
        }
    }

    /// Calls `read` with every run of elements that lie side by side in the file, and where they go.
    pub(super) fn each_run(
        self,
        row_length: usize,
        range: Range<usize>,
        out: &mut [f32],
        mut read: impl FnMut(Range<usize>, &mut [f32]) -> Result<()>,
    ) -> Result<()> {
        if self == RowOrder::Same {
            return read(range, out);
        }
        let (mut place, mut out) = (range.start, out);
        while place < range.end {
            let (row, within) = (place / row_length, place % row_length);
            let count = (row_length - within).min(range.end - place);
            let (here, rest) = out.split_at_mut(count);
            let start = self.stored(row) * row_length + within;
            read(start..start + count, here)?;
            (place, out) = (place + count, rest);
        }
        Ok(())
    }

    /// Rows of so many bytes, from the file's order into that of parameters.
    pub(super) fn sorted(self, bytes: Vec<u8>, row_bytes: usize) -> Vec<u8> {
        if self == RowOrder::Same {
            return bytes;
        }
        let rows = 0..bytes.len() / row_bytes.max(1);
        rows.flat_map(|row| &bytes[self.stored(row) * row_bytes..][..row_bytes]).copied().collect()
    }
}
