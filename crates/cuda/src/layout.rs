//! Kernels that move elements: `kernels/move.cu`, `cast.cu`, `embedding.cu`.

use ferrospeed_tensor::backend::Comparison;
use ferrospeed_tensor::dtype::Float;
use ferrospeed_tensor::moves::Axis;
use ferrospeed_tensor::{DType, Result, Tensor, TensorError};

use crate::elementwise::Broadcast;
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

pub(super) fn compare(
    backend: &CudaBackend,
    op: Comparison,
    a: &Tensor,
    b: &Tensor,
    y: &Tensor,
) -> Result<()> {
    let op = match op {
        Comparison::Equal => 0i32,
        Comparison::Less => 1,
        Comparison::LessEqual => 2,
    };
    // Floats compare as floats, integers exactly.
    let defines = match a.dtype() {
        DType::I64 => ["REAL=i64", "INDEX=i64", "EXACT"],
        DType::I32 => ["REAL=int", "INDEX=i64", "EXACT"],
        DType::U8 | DType::Bool => ["REAL=u8", "INDEX=i64", "EXACT"],
        dtype => [real("compare", dtype)?, "INDEX=i64", ""],
    };
    let kernel = Kernel { source: Source::Move, defines, name: "compare" };
    let shape = Broadcast::new(y.shape(), &[a.shape(), b.shape()]);
    let grid = backend.grid_single(y.numel());
    launch!(backend, kernel, grid, [BLOCK, 1, 1], 0, y.numel() as u64, at(a), at(b), at(y), op, shape)
}

pub(super) fn copy_blocks(
    backend: &CudaBackend,
    (source, source_offset, source_stride): (&Tensor, usize, usize),
    (target, target_offset, target_stride): (&Tensor, usize, usize),
    rows: usize,
    width: usize,
) -> Result<()> {
    let size = source.dtype().size_bytes();
    let (from, to) = (at(source) + (source_offset * size) as u64, at(target) + (target_offset * size) as u64);
    if rows == 1 || (source_stride == width && target_stride == width) {
        return backend.copy_bytes(from, to, rows * width * size);
    }
    let rows = Axis { size: rows, from: source_stride, to: target_stride };
    permute::move_words(backend, [from, to], size, &[rows, Axis { size: width, from: 1, to: 1 }])
}

/// Matches `Parts` in the kernels.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Parts {
    at: [u64; 3],
    width: [u64; 3],
}

pub(super) fn split_columns(backend: &CudaBackend, x: &Tensor, parts: &[&Tensor]) -> Result<()> {
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
    let kernel =
        Kernel { source: Source::Move, defines: [word(bytes), "INDEX=i64", "EXACT"], name: "split_columns" };
    let grid = backend.grid_single(rows * stride * size / bytes);
    launch!(backend, kernel, grid, [BLOCK, 1, 1], 0, rows as u64, at(x), all)
}

pub(super) fn index_select(
    backend: &CudaBackend,
    x: &Tensor,
    indices: &Tensor,
    outer: usize,
    size: usize,
    inner: usize,
    y: &Tensor,
) -> Result<()> {
    const OP: &str = "index_select";
    let (picked, count) = (indices.numel(), outer * indices.numel() * inner);
    let kernel = mover(x.dtype(), index_type(OP, indices.dtype())?, OP);
    launch!(
        backend,
        kernel,
        backend.grid_single(count),
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
        backend.fault
    )
}

pub(super) fn gather(backend: &CudaBackend, x: &Tensor, indices: &Tensor, y: &Tensor) -> Result<()> {
    const OP: &str = "gather";
    let (picked, width) = (indices.shape().last() as u64, x.shape().last() as u64);
    let kernel = mover(x.dtype(), index_type(OP, indices.dtype())?, OP);
    launch!(
        backend,
        kernel,
        backend.grid_single(y.numel()),
        [BLOCK, 1, 1],
        0,
        y.numel() as u64,
        at(x),
        at(indices),
        picked,
        width,
        at(y),
        op_number(OP),
        backend.fault
    )
}

fn adder(op: &'static str, dtype: DType, indices: DType, name: &'static str) -> Result<Kernel> {
    Ok(Kernel { source: Source::Embedding, defines: [real(op, dtype)?, index_type(op, indices)?, ""], name })
}

pub(super) fn index_add(
    backend: &CudaBackend,
    dy: &Tensor,
    indices: &Tensor,
    outer: usize,
    size: usize,
    inner: usize,
    dx: &Tensor,
) -> Result<()> {
    const OP: &str = "index_add";
    let count = outer * size * inner;
    let kernel = adder(OP, dy.dtype(), indices.dtype(), OP)?;
    launch!(
        backend,
        kernel,
        backend.grid_single(count),
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
        backend.fault
    )
}

pub(super) fn scatter_add(backend: &CudaBackend, dy: &Tensor, indices: &Tensor, dx: &Tensor) -> Result<()> {
    let (picked, width) = (indices.shape().last() as u64, dx.shape().last() as u64);
    let kernel = adder("gather", dy.dtype(), indices.dtype(), "scatter_add")?;
    launch!(
        backend,
        kernel,
        backend.grid_single(dx.numel()),
        [BLOCK, 1, 1],
        0,
        dx.numel() as u64,
        at(dy),
        at(indices),
        picked,
        width,
        at(dx),
        op_number("gather"),
        backend.fault
    )
}

/// Threads for a row: a pack each, whole warps.
fn row_threads(width: usize) -> u32 {
    (width.div_ceil(8).next_multiple_of(32)).clamp(32, 256) as u32
}

pub(super) fn embedding(backend: &CudaBackend, table: &Tensor, ids: &Tensor, out: &Tensor) -> Result<()> {
    const OP: &str = "embedding";
    if ids.numel() == 0 {
        return Ok(());
    }
    let (limit, width) = (table.shape()[0], table.shape().last());
    let kernel = adder(OP, table.dtype(), ids.dtype(), OP)?;
    launch!(
        backend,
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
        backend.fault
    )
}

pub(super) fn embedding_backward(
    backend: &CudaBackend,
    ids: &Tensor,
    dout: &Tensor,
    dtable: &Tensor,
) -> Result<()> {
    const OP: &str = "embedding";
    let (limit, width, count) = (dtable.shape()[0], dtable.shape().last(), ids.numel());
    if limit == 0 {
        return Ok(());
    }
    // counts, starts, next: one word per row; bucket, sorted: one per position.
    let words = backend.scratch((3 * limit + 2 * count) * 4)?;
    let place = |start: usize| words.address() + (start * 4) as u64;
    let (counts, starts, next) = (place(0), place(limit), place(2 * limit));
    let (bucket, sorted) = (place(3 * limit), place(3 * limit + count));
    backend.zero_bytes(counts, limit * 4)?;
    let kernel = |name| adder(OP, dout.dtype(), ids.dtype(), name);
    let (n, rows) = (count as u64, limit as u64);
    let (grid, block) = (backend.grid_single(count), [BLOCK, 1, 1]);
    launch!(
        backend,
        kernel("count_ids")?,
        grid,
        block,
        0,
        n,
        rows,
        at(ids),
        counts,
        op_number(OP),
        backend.fault
    )?;
    launch!(backend, kernel("scan_counts")?, [1, 1, 1], [1024, 1, 1], 0, rows, counts, starts, next)?;
    launch!(backend, kernel("drop_positions")?, grid, block, 0, n, rows, at(ids), next, bucket)?;
    launch!(
        backend,
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
        backend,
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
