//! Rows and elements by index: look-ups, choices, orders of dimensions, windows of images.

use crate::backend::{Memory, RoutedRows};
use crate::error::{Result, TensorError};
use crate::out::Out;
use crate::shape::Shape;
use crate::tensor::Tensor;

/// A two-dimensional convolution or pooling window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window2d {
    /// Height and width of the window.
    pub kernel: [usize; 2],
    /// Steps between windows.
    pub stride: [usize; 2],
    /// Zeros around the image.
    pub padding: [usize; 2],
}

impl Window2d {
    /// Height and width of the result on an image of this size.
    pub fn output_size(&self, op: &'static str, image: &Shape) -> Result<[usize; 2]> {
        if image.dims() != 4 {
            return Err(TensorError::shape(op, "the image", *image, "[batch, channels, height, width]"));
        }
        let mut sizes = [0; 2];
        for axis in 0..2 {
            let padded = image[2 + axis] + 2 * self.padding[axis];
            if self.stride[axis] == 0 || self.kernel[axis] == 0 || padded < self.kernel[axis] {
                return Err(TensorError::argument(
                    op,
                    format!("{self:?} does not fit an image of shape {image}"),
                ));
            }
            sizes[axis] = (padded - self.kernel[axis]) / self.stride[axis] + 1;
        }
        Ok(sizes)
    }
}

/// Rows by index on a device.
pub trait Rows: Memory {
    /// Looks rows up.
    fn embedding(&self, table: &Tensor, ids: &Tensor, out: Out<'_>) -> Result<()>;
    /// Scatter-adds rows in a fixed order; `dtable` is overwritten.
    fn embedding_backward(&self, ids: &Tensor, dout: &Tensor, dtable: Out<'_>) -> Result<()>;
    /// Reorders dimensions.
    fn permute(&self, x: &Tensor, order: &[usize], y: Out<'_>) -> Result<()>;
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
    /// The `k` largest of each row, largest first, lowest index first among equals.
    fn top_k(&self, x: &Tensor, k: usize, values: Out<'_>, indices: Out<'_>) -> Result<()>;
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
    /// Gradients of [`Rows::collect_rows`] from `[x, weights, dy]`.
    fn collect_rows_backward(
        &self,
        inputs: [&Tensor; 3],
        rows: &RoutedRows<'_>,
        dx: Out<'_>,
        dweights: Out<'_>,
    ) -> Result<()>;
    /// Patches of an NCHW image as rows: `[batch·oh·ow, channels·kh·kw]`.
    fn image_to_columns(&self, x: &Tensor, window: &Window2d, columns: Out<'_>) -> Result<()>;
    /// Its transpose: adds patches back.
    fn columns_to_image(&self, columns: &Tensor, window: &Window2d, x: Out<'_>) -> Result<()>;
    /// Maximum over windows of an NCHW image, with the flat index of each maximum.
    fn max_pool2d(&self, x: &Tensor, window: &Window2d, y: Out<'_>, indices: Out<'_>) -> Result<()>;
}
