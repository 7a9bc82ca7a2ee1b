//! Which blocks of queries see which blocks of keys.
//!
//! Sequences are cut into blocks of as many tokens; of a layout's square of blocks, rows are those of queries and columns those
//! of keys. Attention visits what is active and nothing else, so that time follows the number of active blocks. Nothing of the
//! size of the square is kept: a row is the few stretches of its active columns.
//!
//! ```
//! use ferrospeed_tensor::BlockLayout;
//!
//! // Every block sees itself and the first.
//! let layout = BlockLayout::new(16.try_into().unwrap(), 4, 1, |_head, row, columns| {
//!     columns[0] = true;
//!     columns[row] = true;
//! });
//! assert!(layout.is_active(0, 3, 0) && !layout.is_active(0, 3, 1));
//! assert_eq!(layout.active(0), 7);
//! ```

use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;

use crate::error::{Result, TensorError};

/// A square of blocks, alike for all heads or one for each. Cloning copies a handle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockLayout {
    block: usize,
    blocks: usize,
    heads: Arc<[HeadLayout]>,
}

/// One head's square, row by row.
#[derive(Debug, PartialEq, Eq)]
struct HeadLayout {
    /// Where each row's stretches begin among all, and behind them how many there are.
    first: Vec<usize>,
    /// Columns that follow each other, in their order; none is empty and none touches the next.
    stretches: Vec<Range<usize>>,
}

impl BlockLayout {
    /// From blocks of so many tokens, so many of them in a row, and what `activate(head, row, columns)` sets in each row of each of
    /// `heads` squares. One square serves any number of heads.
    pub fn new(
        block: NonZeroUsize,
        blocks: usize,
        heads: usize,
        mut activate: impl FnMut(usize, usize, &mut [bool]),
    ) -> BlockLayout {
        let mut columns = vec![false; blocks];
        let mut square = |head: usize| {
            let (mut first, mut stretches) = (vec![0], Vec::new());
            for row in 0..blocks {
                columns.fill(false);
                activate(head, row, &mut columns);
                let mut start = 0;
                for alike in columns.chunk_by(|a, b| a == b) {
                    if alike[0] {
                        stretches.push(start..start + alike.len());
                    }
                    start += alike.len();
                }
                first.push(stretches.len());
            }
            HeadLayout { first, stretches }
        };
        BlockLayout { block: block.get(), blocks, heads: (0..heads).map(&mut square).collect() }
    }

    /// Tokens of a block.
    pub fn block(&self) -> usize {
        self.block
    }

    /// Blocks in a row and in a column.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// How many squares there are: one for all heads, or one for each.
    pub fn squares(&self) -> usize {
        self.heads.len()
    }

    fn square(&self, head: usize) -> &HeadLayout {
        &self.heads[if self.heads.len() == 1 { 0 } else { head }]
    }

    /// The columns that a row of a head sees: stretches in their order, with a gap before each next.
    #[inline]
    pub fn row(&self, head: usize, row: usize) -> &[Range<usize>] {
        let square = self.square(head);
        &square.stretches[square.first[row]..square.first[row + 1]]
    }

    /// Whether the queries of block `row` see the keys of block `column`.
    pub fn is_active(&self, head: usize, row: usize, column: usize) -> bool {
        self.row(head, row).iter().any(|stretch| stretch.contains(&column))
    }

    /// How many blocks of a head are active.
    pub fn active(&self, head: usize) -> usize {
        self.square(head).stretches.iter().map(ExactSizeIterator::len).sum()
    }

    /// The share of all pairs of a query and a key over `tokens` tokens that lies in active blocks.
    pub fn share(&self, tokens: usize) -> f64 {
        let squares = self.heads.len();
        self.pairs(squares, tokens, false) as f64 / (squares * tokens * tokens).max(1) as f64
    }

    /// How many pairs of a query and a key lie in the active blocks of `heads` heads over `tokens` tokens; with `causal`, blocks of
    /// later keys do not count.
    pub(crate) fn pairs(&self, heads: usize, tokens: usize, causal: bool) -> usize {
        let within = |blocks: Range<usize>| {
            let end = (blocks.end * self.block).min(tokens);
            end.saturating_sub(blocks.start * self.block)
        };
        let of_row = |head: usize, row: usize| -> usize {
            let end = if causal { row + 1 } else { self.blocks };
            let seen = self.row(head, row).iter().map(|columns| within(columns.start..columns.end.min(end)));
            within(row..row + 1) * seen.sum::<usize>()
        };
        let of_head = |head: usize| (0..self.blocks).map(|row| of_row(head, row)).sum::<usize>();
        match self.heads.len() {
            1 => heads * of_head(0),
            _ => (0..heads).map(of_head).sum(),
        }
    }

    /// Refuses what it does not describe. The last block may be short.
    pub(crate) fn expect(&self, op: &'static str, heads: usize, tokens: usize) -> Result<()> {
        let fail = |what: String| Err(TensorError::argument(op, what));
        if self.heads.len() != 1 && self.heads.len() != heads {
            return fail(format!(
                "a layout of {} heads for {heads}: give one for all, or as many",
                self.heads.len()
            ));
        }
        if self.blocks != tokens.div_ceil(self.block) {
            return fail(format!(
                "a layout of {0} × {0} blocks of {1} tokens for {tokens} tokens, which are {2} blocks; make one for that length",
                self.blocks,
                self.block,
                tokens.div_ceil(self.block)
            ));
        }
        Ok(())
    }

    /// The keys that any query of `queries` may see in a head, as stretches apart from each other in their order.
    pub fn keys_of(&self, head: usize, queries: Range<usize>) -> Vec<Range<usize>> {
        let rows = queries.start / self.block..queries.end.div_ceil(self.block);
        let mut all: Vec<Range<usize>> = rows.flat_map(|row| self.row(head, row)).cloned().collect();
        all.sort_unstable_by_key(|columns| columns.start);
        let mut joined: Vec<Range<usize>> = Vec::new();
        for columns in all {
            match joined.last_mut() {
                Some(last) if columns.start <= last.end => last.end = last.end.max(columns.end),
                _ => joined.push(columns),
            }
        }
        joined.iter().map(|columns| columns.start * self.block..columns.end * self.block).collect()
    }

    /// Makes minus infinity of the scores of a query at `position` over keys from `first` on that its block does not see.
    #[inline(always)]
    pub fn hide(&self, head: usize, position: usize, first: usize, scores: &mut [f32]) {
        let mut shown = 0;
        for columns in self.row(head, position / self.block) {
            let place = |block: usize| (block * self.block).saturating_sub(first).min(scores.len());
            let (start, end) = (place(columns.start), place(columns.end));
            if start > shown {
                scores[shown..start].fill(f32::NEG_INFINITY);
            }
            shown = shown.max(end);
        }
        scores[shown..].fill(f32::NEG_INFINITY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn striped() -> BlockLayout {
        BlockLayout::new(NonZeroUsize::new(4).unwrap(), 5, 2, |head, row, columns| {
            columns[0] = true;
            columns[row] = true;
            columns[4] |= head == 1;
        })
    }

    #[test]
    fn rows_are_stretches_of_what_was_set() {
        let layout = striped();
        assert_eq!(layout.row(0, 0), std::slice::from_ref(&(0..1)));
        assert_eq!(layout.row(0, 1), std::slice::from_ref(&(0..2)));
        assert_eq!(layout.row(1, 3), [0..1, 3..5]);
        assert_eq!([layout.active(0), layout.active(1)], [9, 13]);
    }

    #[test]
    fn pairs_are_those_of_tokens_that_there_are() {
        // 18 tokens: the last block has two.
        let layout = striped();
        let mut pairs = 0;
        for (query, key) in (0..18).flat_map(|query| (0..18).map(move |key| (query, key))) {
            pairs += (0..2).filter(|head| layout.is_active(*head, query / 4, key / 4)).count();
        }
        assert_eq!(layout.pairs(2, 18, false), pairs);
        assert!(layout.pairs(2, 18, true) < pairs);
        assert!(layout.expect("op", 2, 18).is_ok() && layout.expect("op", 3, 18).is_err());
        assert!(layout.expect("op", 2, 21).is_err() && layout.expect("op", 2, 16).is_err());
    }

    #[test]
    fn hidden_scores_are_those_of_blocks_that_are_not_active() {
        let layout = striped();
        for (position, first, width) in [(13, 0, 18), (13, 2, 9), (13, 5, 4), (0, 3, 15), (17, 17, 1)] {
            let mut scores = vec![1.0; width];
            layout.hide(0, position, first, &mut scores);
            for (at, score) in scores.iter().enumerate() {
                let seen = layout.is_active(0, position / 4, (first + at) / 4);
                assert_eq!(*score == 1.0, seen, "query {position}, key {}", first + at);
            }
        }
    }

    #[test]
    fn queries_of_several_rows_share_what_any_of_them_sees() {
        assert_eq!(striped().keys_of(0, 6..13), std::slice::from_ref(&(0..16)));
        assert_eq!(striped().keys_of(0, 12..16), [0..4, 12..16]);
    }
}
