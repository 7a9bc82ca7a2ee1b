//! Images: `kernels/image.cu`.

use ferrospeed_tensor::backend::Window2d;
use ferrospeed_tensor::{DType, Result, Shape, Tensor};

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

pub(super) fn image_to_columns(
    backend: &CudaBackend,
    x: &Tensor,
    window: &Window2d,
    columns: &Tensor,
) -> Result<()> {
    const OP: &str = "image_to_columns";
    let window = device_window(OP, window, x.shape())?;
    let (grid, count) = (backend.grid_single(columns.numel()), columns.numel() as u64);
    launch!(backend, kernel(OP, x.dtype(), OP)?, grid, [BLOCK, 1, 1], 0, count, at(x), at(columns), window)
}

pub(super) fn columns_to_image(
    backend: &CudaBackend,
    columns: &Tensor,
    window: &Window2d,
    x: &Tensor,
) -> Result<()> {
    const OP: &str = "columns_to_image";
    let window = device_window(OP, window, x.shape())?;
    let (grid, count) = (backend.grid_single(x.numel()), x.numel() as u64);
    launch!(backend, kernel(OP, x.dtype(), OP)?, grid, [BLOCK, 1, 1], 0, count, at(columns), at(x), window)
}

pub(super) fn max_pool2d(
    backend: &CudaBackend,
    x: &Tensor,
    window: &Window2d,
    y: &Tensor,
    indices: &Tensor,
) -> Result<()> {
    const OP: &str = "max_pool2d";
    let window = device_window(OP, window, x.shape())?;
    let (grid, count) = (backend.grid_single(y.numel()), y.numel() as u64);
    launch!(
        backend,
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
