//! Rows and elements by index: look-ups, choices, orders of dimensions, windows of images.

use crate::backend::Memory;
use crate::error::{Result, TensorError};
use crate::out::Out;
use crate::tensor::Tensor;

/// Rows that are looked up and put together.
pub trait Rows: Memory {
    /// Looks rows up.
    fn embedding(&self, table: &Tensor, ids: &Tensor, out: Out<'_>) -> Result<()>;
    /// Scatter-adds rows in a fixed order; `dtable` is overwritten.
    fn embedding_backward(&self, ids: &Tensor, dout: &Tensor, dtable: Out<'_>) -> Result<()>;
    /// Copies `rows` blocks of `width` elements between strided places.
    fn copy_blocks(
        &self,
        source: &Tensor,
        source_offset: usize,
        source_stride: usize,
        target: Out<'_>,
        target_offset: usize,
        target_stride: usize,
        rows: usize,
        width: usize,
    ) -> Result<()>;
    /// Takes rows of `x` apart into up to three: `parts[i]` gets as many columns as it is wide, from left to right. For devices
    /// with `Products::joined_rows`.
    fn split_columns(&self, _x: &Tensor, _parts: Vec<Out<'_>>) -> Result<()> {
        Err(TensorError::argument("split_columns", "this device has no kernel for it"))
    }
    /// `y[o, i, :] = x[o, indices[i], :]` with `x` as `[outer, size, inner]`.
    fn index_select(
        &self,
        x: &Tensor,
        indices: &Tensor,
        outer: usize,
        size: usize,
        inner: usize,
        y: Out<'_>,
    ) -> Result<()>;
    /// The gradient of [`Rows::index_select`]: adds rows in index order onto zeros.
    fn index_add(
        &self,
        dy: &Tensor,
        indices: &Tensor,
        outer: usize,
        size: usize,
        inner: usize,
        dx: Out<'_>,
    ) -> Result<()>;
    /// `y[r, j] = x[r, indices[r, j]]` over the last dimension.
    fn gather(&self, x: &Tensor, indices: &Tensor, y: Out<'_>) -> Result<()>;
    /// The gradient of [`Rows::gather`].
    fn scatter_add(&self, dy: &Tensor, indices: &Tensor, dx: Out<'_>) -> Result<()>;
}
