//! Reductions: `kernels/reduce.cu`.

use ferrospeed_tensor::backend::{Reduction, Reductions};
use ferrospeed_tensor::{DType, Out, Result, Tensor};

use crate::{BLOCK, CudaBackend, Kernel, Source, at, launch, real};

fn kernel(op: &'static str, dtype: DType, name: &'static str) -> Result<Kernel> {
    Ok(Kernel { source: Source::Reduce, defines: [real(op, dtype)?, "", ""], name })
}

/// Sums each `partial [slices, width]` into its target; at most two.
pub(super) fn finish_rows(
    backend: &CudaBackend,
    slices: usize,
    width: usize,
    sums: &[(u64, &Tensor)],
) -> Result<()> {
    let [first, rest @ ..] = sums else { return Ok(()) };
    let second = rest.first().unwrap_or(first);
    let kernel = kernel("sum_rows", first.1.dtype(), "sum_rows_finish")?;
    let grid = [width.div_ceil(32) as u32, sums.len() as u32, 1];
    let (slices, width) = (slices as u64, width as u64);
    launch!(
        overlapping backend,
        kernel,
        grid,
        [32, 32, 1],
        0,
        slices,
        width,
        first.0,
        at(first.1),
        second.0,
        at(second.1)
    )
}

/// So few rows, if they are so long, are summed without partial sums: there are columns enough for all threads.
const FEW_ROWS: usize = 64;
const LONG_ROW: usize = 1 << 18;

pub(super) fn sum_rows(backend: &CudaBackend, x: &Tensor, target: &Tensor) -> Result<()> {
    let (rows, width) = (x.shape().rows(), x.shape().last());
    if width == 0 {
        return Ok(());
    }
    if rows <= FEW_ROWS && width >= LONG_ROW {
        let kernel = kernel("sum_rows", x.dtype(), "sum_few_rows")?;
        let grid = backend.grid(width);
        return launch!(
            backend,
            kernel,
            grid,
            [BLOCK, 1, 1],
            0,
            rows as u64,
            width as u64,
            at(x),
            at(target)
        );
    }
    let tiles = Tiles::new(backend, rows, width, 4);
    let partial = backend.scratch(tiles.slices * width * 4)?;
    let kernel = kernel("sum_rows", x.dtype(), "sum_rows_partial")?;
    launch!(
        overlapping backend,
        kernel,
        tiles.grid(),
        Tiles::BLOCK,
        0,
        rows as u64,
        width as u64,
        tiles.slice_rows as u64,
        at(x),
        partial.address()
    )?;
    finish_rows(backend, tiles.slices, width, &[(partial.address(), target)])
}

/// How a pass that sums columns spreads a matrix: tiles of 256 columns, slices of rows.
pub(super) struct Tiles {
    tiles: usize,
    pub(super) slices: usize,
    pub(super) slice_rows: usize,
}

impl Tiles {
    pub(super) const BLOCK: [u32; 3] = [32, 8, 1];

    /// About so many blocks for each multiprocessor, but no slice under 64 rows.
    pub(super) fn new(backend: &CudaBackend, rows: usize, width: usize, per_multiprocessor: usize) -> Tiles {
        let tiles = width.div_ceil(256);
        let blocks = backend.driver.multiprocessors as usize * per_multiprocessor;
        let slices = blocks.div_ceil(tiles).min(rows.div_ceil(64)).max(1);
        Tiles { tiles, slices, slice_rows: rows.div_ceil(slices).max(1) }
    }

    pub(super) fn grid(&self) -> [u32; 3] {
        [self.tiles as u32, self.slices as u32, 1]
    }
}

/// Threads for a block that walks a row.
fn row_threads(width: usize) -> u32 {
    (width.div_ceil(4).next_multiple_of(32)).clamp(32, 1024) as u32
}

impl Reductions for CudaBackend {
    fn sum_rows(&self, x: &Tensor, target: Out<'_>) -> Result<()> {
        sum_rows(self, x, target.into_tensor())
    }

    fn top_k(&self, x: &Tensor, k: usize, values: Out<'_>, indices: Out<'_>) -> Result<()> {
        let values = values.into_tensor();
        let indices = indices.into_tensor();
        let (rows, width) = (x.shape().rows(), x.shape().last());
        if rows * k == 0 {
            return Ok(());
        }
        let kernel = kernel("top_k", x.dtype(), "top_k")?;
        let block = [row_threads(width), 1, 1];
        launch!(
            self,
            kernel,
            [rows as u32, 1, 1],
            block,
            0,
            width as u64,
            k as u64,
            at(x),
            at(values),
            at(indices)
        )
    }

    fn reduce(
        &self,
        op: Reduction,
        x: &Tensor,
        outer: usize,
        size: usize,
        inner: usize,
        y: Out<'_>,
    ) -> Result<()> {
        let y = y.into_tensor();
        let op = match op {
            Reduction::Sum => 0i32,
            Reduction::Max => 1,
            Reduction::Min => 2,
        };
        if outer * inner == 0 {
            return Ok(());
        }
        if inner == 1 {
            let kernel = kernel("reduce", x.dtype(), "reduce_rows")?;
            let block = [row_threads(size), 1, 1];
            return launch!(self, kernel, [outer as u32, 1, 1], block, 0, size as u64, at(x), at(y), op);
        }
        let kernel = kernel("reduce", x.dtype(), "reduce_middle")?;
        let grid = self.grid_single(outer * inner);
        launch!(
            self,
            kernel,
            grid,
            [BLOCK, 1, 1],
            0,
            outer as u64,
            size as u64,
            inner as u64,
            at(x),
            at(y),
            op
        )
    }

    fn softmax(&self, x: &Tensor, y: Out<'_>, log: bool) -> Result<()> {
        let y = y.into_tensor();
        let (rows, width) = (x.shape().rows(), x.shape().last());
        if x.numel() == 0 {
            return Ok(());
        }
        let kernel = kernel("softmax", x.dtype(), "softmax")?;
        let block = [row_threads(width), 1, 1];
        launch!(self, kernel, [rows as u32, 1, 1], block, 0, width as u64, at(x), at(y), i32::from(log))
    }

    fn softmax_backward(&self, y: &Tensor, dy: &Tensor, dx: Out<'_>, log: bool) -> Result<()> {
        let dx = dx.into_tensor();
        let (rows, width) = (y.shape().rows(), y.shape().last());
        if y.numel() == 0 {
            return Ok(());
        }
        let kernel = kernel("softmax_backward", y.dtype(), "softmax_backward")?;
        let block = [row_threads(width), 1, 1];
        launch!(
            self,
            kernel,
            [rows as u32, 1, 1],
            block,
            0,
            width as u64,
            at(y),
            at(dy),
            at(dx),
            i32::from(log)
        )
    }

    fn cumsum(&self, x: &Tensor, y: Out<'_>, reverse: bool) -> Result<()> {
        let y = y.into_tensor();
        let (rows, width) = (x.shape().rows(), x.shape().last());
        let kernel = kernel("cumsum", x.dtype(), "cumsum")?;
        let grid = self.grid_single(rows);
        launch!(
            self,
            kernel,
            grid,
            [BLOCK, 1, 1],
            0,
            rows as u64,
            width as u64,
            at(x),
            at(y),
            i32::from(reverse)
        )
    }
}
