//! What a device takes for rows that are sorted by group, each group with a matrix of its own: the experts of a mixture.
//!
//! How many rows a group has stands in the device's memory, so that nobody waits for it. Buffers have room for all rows
//! that there could be; those behind the last group are zero in every result.

use crate::backend::{Activation, Matrix, MatrixOut, Memory};
use crate::error::Result;
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

/// Work on rows that are sorted by group.
pub trait Grouped: Memory {
    /// Sorts slots by their group `ids`, in order within each: how many each group has into `counts`, and the two directions
    /// of [`RoutedRows`]. A slot whose id is the number of groups goes nowhere.
    fn sort_groups(&self, ids: &Tensor, counts: Out<'_>, order: Out<'_>, place: Out<'_>) -> Result<()>;
    /// `y[row] = x[token of row]`, zero behind the last row.
    fn spread_rows(&self, x: &Tensor, rows: &RoutedRows<'_>, y: Out<'_>) -> Result<()>;
    /// `y[token] = Σ weight·x[row]` over the token's slots in order, summed in f32; without weights each is one.
    fn collect_rows(
        &self,
        x: &Tensor,
        rows: &RoutedRows<'_>,
        weights: Option<&Tensor>,
        y: Out<'_>,
    ) -> Result<()>;
    /// Gradients of [`Grouped::collect_rows`] from `[x, weights, dy]`.
    fn collect_rows_backward(
        &self,
        inputs: [&Tensor; 3],
        rows: &RoutedRows<'_>,
        dx: Out<'_>,
        dweights: Out<'_>,
    ) -> Result<()>;
    /// Products of groups of rows, each with a matrix of its own.
    fn grouped_gemm(&self, grouped: GroupedGemm<'_>) -> Result<()>;
    /// Of each group of rows, the product of one tensor's transposed with another's.
    fn grouped_outer(&self, grouped: GroupedOuter<'_>) -> Result<()>;
    /// Of each group of rows that has a place for it, their sum.
    fn grouped_sums(&self, counts: &Tensor, x: &Tensor, targets: Vec<Option<MatrixOut<'_>>>) -> Result<()>;
    /// As `Pointwise::gated_backward_in_place`, with `rebuilds`, of rows `[gate, up, dy]` each of which counts with the weight
    /// of its slot: `dy` is the gradient of what is weighted. All three become weighted, and `dweights` the gradients of the
    /// weights; those of slots without a row are zero. Rows without a slot are zero.
    fn weighted_gated_backward(
        &self,
        activation: Activation,
        rows: &RoutedRows<'_>,
        weights: &Tensor,
        values: [Out<'_>; 3],
        dweights: Out<'_>,
    ) -> Result<()>;
}
