//! Attention over a cache in blocks (`kernels/attention_pages.cu`), for types of 16 bits and heads of 64 or 128 channels.

use crate::cuda::{BLOCK, CudaBackend, Kernel, Source, at, at_option, launch, real};
use crate::dtype::DType;
use crate::error::{Result, TensorError};
use crate::pages::{CHUNK, PagedSpec};
use crate::tensor::Tensor;

const OP: &str = "attention_paged";
/// Warps of a block. Matches the kernels.
const WARPS: usize = 4;
/// Keys that a warp takes at once: blocks of the cache hold a multiple.
const STEP: usize = 16;

/// Matches `Spec` in the kernels.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct DeviceSpec {
    heads: u64,
    kv_heads: u64,
    block_tokens: u64,
    width: u64,
    part_heads: u32,
    parts: u32,
    scale: f32,
    window: u32,
    slopes: u64,
    places: u64,
    table_of: u64,
    tables: u64,
    tiles: u64,
}

pub(super) fn knows(dtype: DType, dim: usize) -> bool {
    matches!(dtype, DType::BF16 | DType::F16) && matches!(dim, 64 | 128)
}

fn kernel(dtype: DType, dim: usize, name: &'static str) -> Result<Kernel> {
    let half = if dtype == DType::BF16 { "HALF=1" } else { "HALF=2" };
    let width = if dim == 64 { "DIM=64" } else { "DIM=128" };
    Ok(Kernel { source: Source::AttentionPages, defines: [real(OP, dtype)?, half, width], name })
}

pub(super) fn forward(
    backend: &CudaBackend,
    spec: &PagedSpec<'_>,
    [q, k, v]: [&Tensor; 3],
    [keys, values]: [&Tensor; 2],
    out: &Tensor,
) -> Result<()> {
    let Some(map) = spec.map else {
        return Err(TensorError::argument(OP, "the device was not told where the rows lie"));
    };
    if !spec.block_tokens.is_multiple_of(STEP) {
        return Err(TensorError::argument(OP, format!("blocks hold a multiple of {STEP} tokens on CUDA")));
    }
    let group = spec.heads / spec.kv_heads;
    let part_heads = map.tile_heads();
    let parts = group.div_ceil(part_heads);
    let [places, table_of, spread, whole, tables] =
        map.parts().map(|offset| at(map.values()) + (offset * DType::I32.size_bytes()) as u64);
    let device = DeviceSpec {
        heads: spec.heads as u64,
        kv_heads: spec.kv_heads as u64,
        block_tokens: spec.block_tokens as u64,
        width: map.width() as u64,
        part_heads: part_heads as u32,
        parts: parts as u32,
        scale: spec.scale,
        window: spec.window.map_or(0, |window| u32::try_from(window).unwrap_or(0)),
        slopes: at_option(spec.alibi_slopes),
        places,
        table_of,
        tables,
        tiles: spread,
    };
    let kernel = |name| kernel(q.dtype(), spec.dim, name);
    let eights = map.rows() * spec.kv_heads * spec.dim / 8;
    launch!(
        overlapping backend,
        kernel("append_pages")?,
        backend.grid_single(eights),
        [BLOCK, 1, 1],
        0,
        device,
        eights as u64,
        at(k),
        at(v),
        at(keys),
        at(values)
    )?;
    let [spread_tiles, whole_tiles] = map.tiles();
    let (threads, across) = ([32 * WARPS as u32, 1, 1], (spec.kv_heads * parts) as u32);
    if whole_tiles > 0 {
        let device = DeviceSpec { tiles: whole, ..device };
        launch!(
            backend,
            kernel("attend_whole")?,
            [whole_tiles.div_ceil(WARPS) as u32, across, 1],
            threads,
            0,
            device,
            whole_tiles as u64,
            at(q),
            at(keys),
            at(values),
            at(out)
        )?;
    }
    if spread_tiles == 0 {
        return Ok(());
    }
    let chunks = map.longest().div_ceil(CHUNK).max(1);
    // A block leaves 16 rows of sums, with their total and largest score.
    let left = backend.scratch(spread_tiles * across as usize * chunks * 16 * (spec.dim + 2) * 4)?;
    launch!(
        overlapping backend,
        kernel("attend_chunks")?,
        [chunks as u32, across, spread_tiles as u32],
        threads,
        0,
        device,
        at(q),
        at(keys),
        at(values),
        at(out),
        left.address()
    )?;
    if chunks == 1 {
        return Ok(());
    }
    launch!(
        overlapping backend,
        kernel("join_chunks")?,
        [spread_tiles as u32, across, 1],
        threads,
        0,
        device,
        chunks as u64,
        left.address(),
        at(out)
    )
}
