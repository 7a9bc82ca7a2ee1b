//! Convolution and pooling: windows over images.

use crate::backend::Memory;
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

/// Windows over images.
pub trait Images: Memory {
    /// Patches of an NCHW image as rows: `[batch·oh·ow, channels·kh·kw]`.
    fn image_to_columns(&self, x: &Tensor, window: &Window2d, columns: Out<'_>) -> Result<()>;
    /// Its transpose: adds patches back.
    fn columns_to_image(&self, columns: &Tensor, window: &Window2d, x: Out<'_>) -> Result<()>;
    /// Maximum over windows of an NCHW image, with the flat index of each maximum.
    fn max_pool2d(&self, x: &Tensor, window: &Window2d, y: Out<'_>, indices: Out<'_>) -> Result<()>;
}
