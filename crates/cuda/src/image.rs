//! Images: `kernels/image.cu`.

use ferrospeed_tensor::backend::{Images, Window2d};
use ferrospeed_tensor::{DType, Out, Result, Shape, Tensor};

use crate::{BLOCK, CudaBackend, Kernel, Source, at, launch, real};

/// Matches `Window` in the kernels.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct DeviceWindow {
    image: [u64; 4],
    out: [u64; 2],
    kernel: [u64; 2],
    stride: [u64; 2],
    padding: [u64; 2],
}

fn device_window(op: &'static str, window: &Window2d, image: &Shape) -> Result<DeviceWindow> {
    let pair = |sizes: [usize; 2]| sizes.map(|size| size as u64);
    Ok(DeviceWindow {
        out: pair(window.output_size(op, image)?),
        image: [image[0], image[1], image[2], image[3]].map(|size| size as u64),
        kernel: pair(window.kernel),
        stride: pair(window.stride),
        padding: pair(window.padding),
    })
}

fn kernel(op: &'static str, dtype: DType, name: &'static str) -> Result<Kernel> {
    Ok(Kernel { source: Source::Image, defines: [real(op, dtype)?, "", ""], name })
}

impl Images for CudaBackend {
    fn image_to_columns(&self, x: &Tensor, window: &Window2d, columns: Out<'_>) -> Result<()> {
        let columns = columns.into_tensor();
        const OP: &str = "image_to_columns";
        let window = device_window(OP, window, x.shape())?;
        let (grid, count) = (self.grid_single(columns.numel()), columns.numel() as u64);
        launch!(self, kernel(OP, x.dtype(), OP)?, grid, [BLOCK, 1, 1], 0, count, at(x), at(columns), window)
    }

    fn columns_to_image(&self, columns: &Tensor, window: &Window2d, x: Out<'_>) -> Result<()> {
        let x = x.into_tensor();
        const OP: &str = "columns_to_image";
        let window = device_window(OP, window, x.shape())?;
        let (grid, count) = (self.grid_single(x.numel()), x.numel() as u64);
        launch!(self, kernel(OP, x.dtype(), OP)?, grid, [BLOCK, 1, 1], 0, count, at(columns), at(x), window)
    }

    fn max_pool2d(&self, x: &Tensor, window: &Window2d, y: Out<'_>, indices: Out<'_>) -> Result<()> {
        let y = y.into_tensor();
        let indices = indices.into_tensor();
        const OP: &str = "max_pool2d";
        let window = device_window(OP, window, x.shape())?;
        let (grid, count) = (self.grid_single(y.numel()), y.numel() as u64);
        launch!(
            self,
            kernel(OP, x.dtype(), "max_pool")?,
            grid,
            [BLOCK, 1, 1],
            0,
            count,
            at(x),
            at(y),
            at(indices),
            window
        )
    }
}
