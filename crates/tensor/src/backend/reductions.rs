//! Sums, largest values, softmax and running sums.

use crate::backend::Memory;
use crate::error::Result;
use crate::out::Out;
use crate::tensor::Tensor;

/// Reductions over a contiguous middle dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduction {
    /// The sum, accumulated in f32 in a fixed order.
    Sum,
    /// The largest value.
    Max,
    /// The smallest value.
    Min,
}

/// What is made of many elements.
pub trait Reductions: Memory {
    /// Sums a `[rows, columns]` matrix over its rows.
    fn sum_rows(&self, x: &Tensor, target: Out<'_>) -> Result<()>;
    /// Views `x` as `[outer, size, inner]` and reduces `size` away.
    fn reduce(
        &self,
        op: Reduction,
        x: &Tensor,
        outer: usize,
        size: usize,
        inner: usize,
        y: Out<'_>,
    ) -> Result<()>;
    /// Softmax over the last dimension (`log`: its logarithm).
    fn softmax(&self, x: &Tensor, y: Out<'_>, log: bool) -> Result<()>;
    /// Gradient of [`Reductions::softmax`] from its result.
    fn softmax_backward(&self, y: &Tensor, dy: &Tensor, dx: Out<'_>, log: bool) -> Result<()>;
    /// Running sums along the last dimension (`reverse`: from the end).
    fn cumsum(&self, x: &Tensor, y: Out<'_>, reverse: bool) -> Result<()>;
    /// The `k` largest of each row, largest first, lowest index first among equals.
    fn top_k(&self, x: &Tensor, k: usize, values: Out<'_>, indices: Out<'_>) -> Result<()>;
}
