//! What a device takes for rows that are sorted by group, each group with a matrix of its own: the experts of a mixture.
//!
//! How many rows a group has stands in the device's memory, so that nobody waits for it. Buffers have room for all rows
//! that there could be; those behind the last group are zero in every result.

use super::{Matrix, MatrixOut};
use crate::out::Out;
use crate::tensor::Tensor;

/// `c[rows of g] = a[rows of g] · b[g] (+ bias[g])` for each group `g`; all other rows of `c` become zero.
#[derive(Debug)]
pub struct GroupedGemm<'a> {
    /// How many rows each group has, `[groups]` in `I64`. They follow each other from row 0 on.
    pub counts: &'a Tensor,
    /// `[rows, k]`.
    pub a: &'a Tensor,
    /// Of each group, k×n.
    pub b: &'a [Matrix<'a>],
    /// Of each group, `n` elements from its offset on; empty where there is none.
    pub bias: &'a [Matrix<'a>],
    /// `[rows, n]`.
    pub c: Out<'a>,
}

/// `c[g] = left[rows of g]ᵀ · right[rows of g]` for each group `g` that has a place for it; zero where it has no rows.
#[derive(Debug)]
pub struct GroupedOuter<'a> {
    /// As in [`GroupedGemm`].
    pub counts: &'a Tensor,
    /// `[rows, m]`.
    pub left: &'a Tensor,
    /// `[rows, n]`.
    pub right: &'a Tensor,
    /// Of each group, m×n from its offset on, contiguous.
    pub c: Vec<Option<MatrixOut<'a>>>,
}

/// Where the rows of tokens are once they are sorted by group. A token has `chosen` slots, one per group that it goes to.
#[derive(Debug, Clone, Copy)]
pub struct RoutedRows<'a> {
    /// Of each sorted row, its slot; -1 behind the last row. `I64`.
    pub order: &'a Tensor,
    /// Of each slot, its sorted row; -1 where it goes nowhere. `I64`.
    pub place: &'a Tensor,
    /// Slots per token.
    pub chosen: usize,
}
