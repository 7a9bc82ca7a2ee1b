//! Kernels that move elements: `kernels/move.cu`, `cast.cu`, `embedding.cu`.

use ferrospeed_tensor::backend::Rows;
use ferrospeed_tensor::dtype::Float;
use ferrospeed_tensor::moves::Axis;
use ferrospeed_tensor::{DType, Out, Result, Tensor, TensorError};

use crate::{BLOCK, CudaBackend, Kernel, Source, at, index_type, launch, op_number, permute, real};

/// A type of this many bytes, for kernels that only move.
pub(super) fn word(bytes: usize) -> &'static str {
    match bytes {
        16 => "REAL=uint4",
        8 => "REAL=u64",
        4 => "REAL=u32",
        2 => "REAL=u16",
        _ => "REAL=u8",
    }
}

fn mover(dtype: DType, index: &'static str, name: &'static str) -> Kernel {
    Kernel { source: Source::Move, defines: [word(dtype.size_bytes()), index, "EXACT"], name }
}

pub(super) fn fill(backend: &CudaBackend, target: &Tensor, value: f32) -> Result<()> {
    if value.to_bits() == 0 {
        return backend.zero_bytes(at(target), target.size_bytes());
    }
    let bits: u64 = match target.dtype() {
        DType::F32 => value.to_bits().into(),
        DType::BF16 => half::bf16::narrow(value).to_bits().into(),
        DType::F16 => half::f16::narrow(value).to_bits().into(),
        DType::I64 => value as i64 as u64,
        DType::I32 => (value as i32 as u32).into(),
        DType::U8 => (value as u8).into(),
        DType::Bool => (value != 0.0).into(),
    };
    let kernel = mover(target.dtype(), "INDEX=i64", "fill");
    // The kernel reads as many of the low bytes as its type has.
    launch!(
        backend,
        kernel,
        backend.grid_single(target.numel()),
        [BLOCK, 1, 1],
        0,
        target.numel() as u64,
        at(target),
        bits
    )
}

pub(super) fn cast(backend: &CudaBackend, x: &Tensor, y: &Tensor) -> Result<()> {
    if x.dtype() == y.dtype() {
        return backend.copy_bytes(at(x), at(y), x.size_bytes());
    }
    let (from, to) = from_to(x.dtype(), y.dtype());
    let convert = match (x.dtype(), y.dtype()) {
        (_, DType::Bool) => "CONVERT(v)=u8(widen(v)!=0.0f)",
        // Between integers f32 would lose digits.
        (DType::I64, DType::I32) | (DType::I32, DType::I64) => "CONVERT(v)=TO(v)",
        _ => "CONVERT(v)=narrow<TO>(widen(v))",
    };
    let kernel = Kernel { source: Source::Cast, defines: [from, to, convert], name: "cast" };
    launch!(backend, kernel, backend.grid(x.numel()), [BLOCK, 1, 1], 0, x.numel() as u64, at(x), at(y))
}

/// `FROM=` and `TO=` of a conversion.
fn from_to(from: DType, to: DType) -> (&'static str, &'static str) {
    let from = match from {
        DType::F32 => "FROM=float",
        DType::BF16 => "FROM=bf16",
        DType::F16 => "FROM=f16",
        DType::I64 => "FROM=i64",
        DType::I32 => "FROM=int",
        DType::U8 | DType::Bool => "FROM=u8",
    };
    let to = match to {
        DType::F32 => "TO=float",
        DType::BF16 => "TO=bf16",
        DType::F16 => "TO=f16",
        DType::I64 => "TO=i64",
        DType::I32 => "TO=int",
        DType::U8 | DType::Bool => "TO=u8",
    };
    (from, to)
}

pub(super) fn scale_by(
    backend: &CudaBackend,
    source: &Tensor,
    factor: &Tensor,
    target: &Tensor,
) -> Result<()> {
    real("scale_by", source.dtype())?;
    let (from, to) = from_to(source.dtype(), target.dtype());
    let defines = [from, to, "CONVERT(v)=narrow<TO>(widen(v))"];
    let kernel = Kernel { source: Source::Cast, defines, name: "scale_by" };
    let (grid, count) = (backend.grid(source.numel()), source.numel() as u64);
    launch!(backend, kernel, grid, [BLOCK, 1, 1], 0, count, at(source), at(factor), at(target))
}

impl Rows for CudaBackend {
    fn split_columns(&self, x: &Tensor, parts: Vec<Out<'_>>) -> Result<()> {
        let parts: Vec<&Tensor> = parts.into_iter().map(Out::into_tensor).collect();
        let parts = &parts;
        let size = x.dtype().size_bytes();
        let (rows, stride) = (x.shape().rows(), x.shape().last());
        if parts.len() > 3 {
            return Err(TensorError::argument("split_columns", "rows are taken apart in up to three"));
        }
        let mut all = Parts { at: [0; 3], width: [0; 3] };
        // The widest word that divides all distances.
        let mut everything = at(x);
        for part in parts {
            everything |= at(part) | (part.shape().last() * size) as u64;
        }
        let bytes = (1usize << everything.trailing_zeros().min(3)).max(size);
        for (index, part) in parts.iter().enumerate() {
            (all.at[index], all.width[index]) = (at(part), (part.shape().last() * size / bytes) as u64);
        }
        let kernel = Kernel {
            source: Source::Move,
            defines: [word(bytes), "INDEX=i64", "EXACT"],
            name: "split_columns",
        };
        let grid = self.grid_single(rows * stride * size / bytes);
        launch!(self, kernel, grid, [BLOCK, 1, 1], 0, rows as u64, at(x), all)
    }

    fn embedding(&self, table: &Tensor, ids: &Tensor, out: Out<'_>) -> Result<()> {
        let out = out.into_tensor();
        const OP: &str = "embedding";
        if ids.numel() == 0 {
            return Ok(());
        }
        let (limit, width) = (table.shape()[0], table.shape().last());
        let kernel = adder(OP, table.dtype(), ids.dtype(), OP)?;
        launch!(
            self,
            kernel,
            [ids.numel() as u32, 1, 1],
            [row_threads(width), 1, 1],
            0,
            width as u64,
            limit as u64,
            at(table),
            at(ids),
            at(out),
            op_number(OP),
            self.fault
        )
    }

    fn embedding_backward(&self, ids: &Tensor, dout: &Tensor, dtable: Out<'_>) -> Result<()> {
        let dtable = dtable.into_tensor();
        const OP: &str = "embedding";
        let (limit, width, count) = (dtable.shape()[0], dtable.shape().last(), ids.numel());
        if limit == 0 {
            return Ok(());
        }
        // counts, starts, next: one word per row; bucket, sorted: one per position.
        let words = self.scratch((3 * limit + 2 * count) * 4)?;
        let place = |start: usize| words.address() + (start * 4) as u64;
        let (counts, starts, next) = (place(0), place(limit), place(2 * limit));
        let (bucket, sorted) = (place(3 * limit), place(3 * limit + count));
        self.zero_bytes(counts, limit * 4)?;
        let kernel = |name| adder(OP, dout.dtype(), ids.dtype(), name);
        let (n, rows) = (count as u64, limit as u64);
        let (grid, block) = (self.grid_single(count), [BLOCK, 1, 1]);
        launch!(
            self,
            kernel("count_ids")?,
            grid,
            block,
            0,
            n,
            rows,
            at(ids),
            counts,
            op_number(OP),
            self.fault
        )?;
        launch!(self, kernel("scan_counts")?, [1, 1, 1], [1024, 1, 1], 0, rows, counts, starts, next)?;
        launch!(self, kernel("drop_positions")?, grid, block, 0, n, rows, at(ids), next, bucket)?;
        launch!(
            self,
            kernel("rank_positions")?,
            grid,
            block,
            0,
            n,
            rows,
            at(ids),
            counts,
            starts,
            bucket,
            sorted
        )?;
        launch!(
            self,
            kernel("add_rows")?,
            [limit as u32, 1, 1],
            [row_threads(width), 1, 1],
            0,
            width as u64,
            counts,
            starts,
            sorted,
            at(dout),
            at(dtable)
        )
    }

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
    ) -> Result<()> {
        let (from, to) =
            ((source, source_offset, source_stride), (target.into_tensor(), target_offset, target_stride));
        let (source, source_offset, source_stride) = from;
        let (target, target_offset, target_stride) = to;
        let size = source.dtype().size_bytes();
        let (from, to) =
            (at(source) + (source_offset * size) as u64, at(target) + (target_offset * size) as u64);
        if rows == 1 || (source_stride == width && target_stride == width) {
            return self.copy_bytes(from, to, rows * width * size);
        }
        let rows = Axis { size: rows, from: source_stride, to: target_stride };
        permute::move_words(self, [from, to], size, &[rows, Axis { size: width, from: 1, to: 1 }])
    }

    fn index_select(
        &self,
        x: &Tensor,
        indices: &Tensor,
        outer: usize,
        size: usize,
        inner: usize,
        y: Out<'_>,
    ) -> Result<()> {
        let y = y.into_tensor();
        const OP: &str = "index_select";
        let (picked, count) = (indices.numel(), outer * indices.numel() * inner);
        let kernel = mover(x.dtype(), index_type(OP, indices.dtype())?, OP);
        launch!(
            self,
            kernel,
            self.grid_single(count),
            [BLOCK, 1, 1],
            0,
            count as u64,
            at(x),
            at(indices),
            picked as u64,
            size as u64,
            inner as u64,
            at(y),
            op_number(OP),
            self.fault
        )
    }

    fn index_add(
        &self,
        dy: &Tensor,
        indices: &Tensor,
        outer: usize,
        size: usize,
        inner: usize,
        dx: Out<'_>,
    ) -> Result<()> {
        let dx = dx.into_tensor();
        const OP: &str = "index_add";
        let count = outer * size * inner;
        let kernel = adder(OP, dy.dtype(), indices.dtype(), OP)?;
        launch!(
            self,
            kernel,
            self.grid_single(count),
            [BLOCK, 1, 1],
            0,
            count as u64,
            at(dy),
            at(indices),
            indices.numel() as u64,
            size as u64,
            inner as u64,
            at(dx),
            op_number(OP),
            self.fault
        )
    }

    fn gather(&self, x: &Tensor, indices: &Tensor, y: Out<'_>) -> Result<()> {
        let y = y.into_tensor();
        const OP: &str = "gather";
        let (picked, width) = (indices.shape().last() as u64, x.shape().last() as u64);
        let kernel = mover(x.dtype(), index_type(OP, indices.dtype())?, OP);
        launch!(
            self,
            kernel,
            self.grid_single(y.numel()),
            [BLOCK, 1, 1],
            0,
            y.numel() as u64,
            at(x),
            at(indices),
            picked,
            width,
            at(y),
            op_number(OP),
            self.fault
        )
    }

    fn scatter_add(&self, dy: &Tensor, indices: &Tensor, dx: Out<'_>) -> Result<()> {
        let dx = dx.into_tensor();
        let (picked, width) = (indices.shape().last() as u64, dx.shape().last() as u64);
        let kernel = adder("gather", dy.dtype(), indices.dtype(), "scatter_add")?;
        launch!(
            self,
            kernel,
            self.grid_single(dx.numel()),
            [BLOCK, 1, 1],
            0,
            dx.numel() as u64,
            at(dy),
            at(indices),
            picked,
            width,
            at(dx),
            op_number("gather"),
            self.fault
        )
    }
}

/// Matches `Parts` in the kernels.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Parts {
    at: [u64; 3],
    width: [u64; 3],
}

fn adder(op: &'static str, dtype: DType, indices: DType, name: &'static str) -> Result<Kernel> {
    Ok(Kernel { source: Source::Embedding, defines: [real(op, dtype)?, index_type(op, indices)?, ""], name })
}

/// Threads for a row: a pack each, whole warps.
fn row_threads(width: usize) -> u32 {
    (width.div_ceil(8).next_multiple_of(32)).clamp(32, 256) as u32
}
