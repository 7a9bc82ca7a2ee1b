//! Attention over a cache in blocks (`kernels/attention_pages.cu`), for types of 16 bits and heads of 64 or 128 channels.

use ferrospeed_tensor::backend::PagedAttention;
use ferrospeed_tensor::pages::{PagedSpec, TILE_NUMBERS, most_chunks};
use ferrospeed_tensor::{DType, Out, Result, Tensor, TensorError};

use crate::compile::Shared;
use crate::{BLOCK, CudaBackend, Kernel, Source, at, at_option, few_rows, launch, real};

const OP: &str = "attention_paged";
/// Warps of a block.
const WARPS: usize = 4;
/// What the kernels are told of it.
pub(super) const SHARED: Shared = &[("WARPS", WARPS)];
/// Zeros on the device by which blocks of threads find out who is the last of some: so many tiles times key heads are worked on
/// by one launch.
pub(super) const ARRIVALS: usize = 1 << 16;
/// Blocks of threads that a multiprocessor has room for.
const BLOCKS_AT_ONCE: usize = 4;
/// How often chunks are doubled where there are many tiles, at most.
const MOST_DOUBLINGS: u32 = 2;
/// Keys that a warp takes at once: blocks of the cache hold a multiple.
const STEP: usize = 16;

/// Matches `Spec` in the kernels.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct DeviceSpec {
    heads: u64,
    kv_heads: u64,
    width: u64,
    block_tokens: u32,
    chunk_doublings: u32,
    part_heads: u32,
    parts: u32,
    scale: f32,
    window: u32,
    slopes: u64,
    places: u64,
    table_of: u64,
    tables: u64,
    tiles: u64,
    cos: u64,
    sin: u64,
}

impl PagedAttention for CudaBackend {
    fn reads_pages(&self, dtype: DType, dim: usize) -> bool {
        matches!(dtype, DType::BF16 | DType::F16) && matches!(dim, 64 | 128)
    }

    fn turns_pages(&self) -> bool {
        true
    }

    fn attention_paged(
        &self,
        spec: &PagedSpec<'_>,
        new: [&Tensor; 3],
        caches: [Out<'_>; 2],
        out: Out<'_>,
    ) -> Result<()> {
        let [q, k, v] = new;
        let [keys, values] = caches.map(Out::into_tensor);
        let out = out.into_tensor();
        let Some(map) = spec.map else {
            return Err(TensorError::argument(OP, "the device was not told where the rows lie"));
        };
        if !spec.block_tokens.is_multiple_of(STEP) {
            return Err(TensorError::argument(
                OP,
                format!("blocks hold a multiple of {STEP} tokens on CUDA"),
            ));
        }
        let group = spec.heads / spec.kv_heads;
        let part_heads = map.tile_heads();
        let parts = group.div_ceil(part_heads);
        let [places, table_of, spread, whole, tables] =
            map.parts().map(|offset| at(map.values()) + (offset * DType::I32.size_bytes()) as u64);
        let device = DeviceSpec {
            heads: spec.heads as u64,
            kv_heads: spec.kv_heads as u64,
            width: map.width() as u64,
            block_tokens: spec.block_tokens as u32,
            chunk_doublings: 0,
            part_heads: part_heads as u32,
            parts: parts as u32,
            scale: spec.scale,
            window: spec.window.map_or(0, |window| u32::try_from(window).unwrap_or(0)),
            slopes: at_option(spec.alibi_slopes),
            places,
            table_of,
            tables,
            tiles: spread,
            cos: at_option(spec.turn.map(|[cos, _]| cos)),
            sin: at_option(spec.turn.map(|[_, sin]| sin)),
        };
        let kernel = |name| kernel(q.dtype(), spec.dim, name);
        let [spread_tiles, whole_tiles] = map.tiles();
        let (threads, across) = ([32 * WARPS as u32, 1, 1], spec.kv_heads * parts);
        if whole_tiles > 0 {
            let eights = map.rows() * spec.kv_heads * spec.dim / 8;
            launch!(
                overlapping self,
                kernel("append_pages")?,
                self.grid_single(eights),
                [BLOCK, 1, 1],
                0,
                device,
                eights as u64,
                at(k),
                at(v),
                at(keys),
                at(values)
            )?;
            let device = DeviceSpec { tiles: whole, ..device };
            launch!(
                self,
                kernel("attend_whole")?,
                [whole_tiles.div_ceil(WARPS) as u32, across as u32, 1],
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
        // Where no kernel before has appended keys, those that attend do.
        let [new_keys, new_values] = if whole_tiles > 0 { [0, 0] } else { [at(k), at(v)] };
        let at_once = (ARRIVALS / across).min(spread_tiles);
        let places = BLOCKS_AT_ONCE * self.driver.multiprocessors as usize;
        let chunks = most_chunks(map.longest());
        // Many tiles fill the device without being cut so small.
        let is_full = |doublings: u32| at_once * across * chunks.div_ceil(1 << doublings) > 2 * places;
        let doublings = match map.rows() > few_rows::MOST_ROWS {
            true => (0..MOST_DOUBLINGS).find(|&doublings| !is_full(doublings)).unwrap_or(MOST_DOUBLINGS),
            false => 0,
        };
        let chunks = chunks.div_ceil(1 << doublings);
        // Blocks of a tile: as many as there are places for on the device, each of which takes every so-manieth chunk.
        let tiles = (at_once * across).max(1);
        let blocks = if places.div_ceil(tiles) >= chunks { chunks } else { (places / tiles).max(1) };
        // A chunk leaves 16 rows of sums, with their total and largest score.
        let left = self.scratch(at_once * across * chunks * 16 * (spec.dim + 2) * 4)?;
        for first in (0..spread_tiles).step_by(at_once.max(1)) {
            let device = DeviceSpec {
                chunk_doublings: doublings,
                tiles: spread + (TILE_NUMBERS * first * DType::I32.size_bytes()) as u64,
                ..device
            };
            launch!(
                overlapping self,
                kernel("attend_chunks")?,
                [blocks as u32, across as u32, at_once.min(spread_tiles - first) as u32],
                threads,
                0,
                device,
                at(q),
                new_keys,
                new_values,
                at(keys),
                at(values),
                at(out),
                chunks as u64,
                left.address(),
                self.arrivals
            )?;
        }
        Ok(())
    }
}

fn kernel(dtype: DType, dim: usize, name: &'static str) -> Result<Kernel> {
    let half = if dtype == DType::BF16 { "HALF=1" } else { "HALF=2" };
    let width = if dim == 64 { "DIM=64" } else { "DIM=128" };
    Ok(Kernel { source: Source::AttentionPages, defines: [real(OP, dtype)?, half, width], name })
}
