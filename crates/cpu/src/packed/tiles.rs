//! Many rows by 32 columns in tiles of bytes (AMX): a block's products of 16 rows and 16 columns are one instruction.
//!
//! What is left for vectors is to scale a block's sums and to add them up, in the order that `group.rs` says: the same bits. They
//! do so with the sums of two blocks while tiles make those of the next two. Tiles multiply signed bytes by signed ones, so weights
//! are brought into such first, once for all rows.

use std::arch::x86_64::*;

use ferrospeed_tensor::PackedBits;
use ferrospeed_tensor::packed::{BLOCK, GROUP, LINE};
use half::f16;

use super::group::{GroupWeights, Rows, TILE_ROWS};
use crate::aligned::Aligned;
use crate::amx::bytes::{self, ByteTiles, OPERAND, SUMS};

/// Blocks whose sums are made at a time.
const STEP: usize = 2;
/// Rows of a last tile that are not worth it.
const FEW_ROWS: usize = 8;

/// How many of the rows [`multiply`] takes: those of whole tiles, and of the last one where it has many.
pub(super) fn taken(rows: &Rows) -> usize {
    let rest = rows.count % TILE_ROWS;
    match bytes::available() && rows.blocks.is_multiple_of(STEP) {
        false => 0,
        true if rest > FEW_ROWS => rows.count,
        true => rows.count - rest,
    }
}

/// What a task works in.
#[derive(Default)]
pub(super) struct Room {
    /// The signed lines of two groups.
    lines: [Aligned<i8>; 2],
    /// Of each of two turns, four pairs of tiles: the sums of each block.
    sums: Aligned<i32>,
    /// Sixteen rows of each of the four pairs.
    totals: Aligned<f32>,
}

/// Rows `0..taken` by the columns of one or two groups; `out` has, for each group, [`GROUP`] values for each of all rows.
///
/// # Safety
/// The processor has AVX-512 and, as [`taken`] has found, tiles of bytes.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn multiply(
    groups: &[GroupWeights<'_>],
    rows: &Rows,
    taken: usize,
    room: &mut Room,
    out: &mut [f32],
) {
    assert!((1..=2).contains(&groups.len()) && out.len() == groups.len() * rows.count * GROUP);
    assert!(rows.blocks.is_multiple_of(STEP) && groups.iter().all(|group| group.blocks() == rows.blocks));
    for (group, lines) in groups.iter().zip(&mut room.lines) {
        signed(group, lines.at_least(rows.blocks * OPERAND));
    }
    room.sums.resize(2 * 4 * STEP * SUMS);
    let configured = ByteTiles::configure();
    let tiles = taken.div_ceil(TILE_ROWS);
    for first in (0..tiles).step_by(2) {
        // Where there is no second tile or group, the first one is multiplied twice, and what comes of it is left.
        let pair = [first, (first + 1).min(tiles - 1)];
        // SAFETY: passed on to the caller; tiles are configured.
        unsafe { two_tiles(&configured, groups, rows, pair, room) };
        for (place, totals) in room.totals.chunks(SUMS).enumerate() {
            let (tile, group) = (first + place / 2, place % 2);
            if tile >= tiles || group >= groups.len() {
                continue;
            }
            let count = TILE_ROWS.min(taken - tile * TILE_ROWS) * GROUP;
            let start = (group * rows.count + tile * TILE_ROWS) * GROUP;
            out[start..start + count].copy_from_slice(&totals[..count]);
        }
    }
}

/// Weights less what stands for zero, four bits brought apart.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn signed(group: &GroupWeights<'_>, out: &mut [i8]) {
    let zero = group.bits.zero() as u8;
    let lines = group.lines.chunks_exact(group.bits.lines() * LINE);
    for (block, out) in lines.zip(out.chunks_exact_mut(OPERAND)) {
        if group.bits == PackedBits::Four {
            let (low, high) = out.split_at_mut(OPERAND / 2);
            for ((byte, low), high) in block.iter().zip(low).zip(high) {
                (*low, *high) = ((byte & 15).wrapping_sub(zero) as i8, (byte >> 4).wrapping_sub(zero) as i8);
            }
        } else {
            block.iter().zip(out).for_each(|(byte, out)| *out = byte.wrapping_sub(zero) as i8);
        }
    }
}

/// Two tiles of rows by one or two groups, into the totals.
///
/// # Safety
/// As [`multiply`]; the room's lines are those of the groups.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn two_tiles(
    configured: &ByteTiles,
    groups: &[GroupWeights<'_>],
    rows: &Rows,
    pair: [usize; 2],
    room: &mut Room,
) {
    room.totals.at_least(4 * SUMS).fill(0.0);
    let last = groups.len() - 1;
    let starts = pair.map(|tile| rows.place(tile * TILE_ROWS, 0));
    let x = starts.map(|start| rows.values[start * BLOCK..].as_ptr());
    let columns = [0, last].map(|group| room.lines[group].as_ptr());
    assert!(starts.iter().all(|start| (start + rows.blocks * TILE_ROWS) * BLOCK <= rows.values.len()));
    assert!(room.lines[..=last].iter().all(|lines| lines.len() >= rows.blocks * OPERAND));
    assert!(room.sums.len() >= 2 * 4 * STEP * SUMS);
    let sums = room.sums.as_mut_ptr();
    // Sums of block `block` of pair `place`, of two turns.
    let at = |turn: usize, place: usize, block: usize| {
        sums.wrapping_add(((turn % 2 * 4 + place) * STEP + block) * SUMS)
    };
    let start = |turn: usize| {
        for block in 0..STEP {
            let far = (turn * STEP + block) * OPERAND;
            let targets = std::array::from_fn(|place| at(turn, place, block));
            // SAFETY: operands have as many blocks, and the sums room for two turns, as was asserted.
            unsafe {
                configured.multiply(x.map(|x| x.add(far)), columns.map(|lines| lines.add(far)), targets)
            };
        }
    };
    let turns = rows.blocks / STEP;
    start(0);
    for turn in 0..turns {
        if turn + 1 < turns {
            start(turn + 1);
        }
        for (place, totals) in room.totals.chunks_mut(SUMS).enumerate() {
            if place % 2 > last || (place > 1 && pair[0] == pair[1]) {
                continue;
            }
            let first = turn * STEP;
            let scales = &groups[place % 2].scales[first * GROUP..(first + STEP) * GROUP];
            let of_rows = starts[place / 2] + first * TILE_ROWS;
            let x_scales = &rows.scales[of_rows..of_rows + STEP * TILE_ROWS];
            // SAFETY: the sums of two blocks lie there.
            unsafe { add(at(turn, place, 0), scales, x_scales, totals) };
        }
    }
}

/// Scales the sums of two blocks and adds them to the totals.
///
/// # Safety
/// The processor has AVX-512, and `sums` reaches [`STEP`] tiles.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn add(sums: *const i32, scales: &[f16], x_scales: &[f32], totals: &mut [f32]) {
    assert!(scales.len() == STEP * GROUP && x_scales.len() == STEP * TILE_ROWS && totals.len() == SUMS);
    // SAFETY: sixteen values of each of sixteen rows, as was asserted; sums as the caller promises. Pointers, so that no check
    // keeps the totals out of registers.
    unsafe {
        let (totals, x_scales) = (totals.as_mut_ptr(), x_scales.as_ptr());
        let mut kept = [_mm512_setzero_ps(); TILE_ROWS];
        for (row, total) in kept.iter_mut().enumerate() {
            *total = _mm512_loadu_ps(totals.add(row * GROUP));
        }
        for block in 0..STEP {
            let scales = _mm512_cvtph_ps(_mm256_loadu_si256(scales.as_ptr().add(block * GROUP).cast()));
            for (row, total) in kept.iter_mut().enumerate() {
                let scale = _mm512_mul_ps(scales, _mm512_set1_ps(*x_scales.add(block * TILE_ROWS + row)));
                let sum = _mm512_loadu_si512(sums.add(block * SUMS + row * GROUP).cast());
                *total = _mm512_add_ps(*total, _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale));
            }
        }
        for (row, total) in kept.into_iter().enumerate() {
            _mm512_storeu_ps(totals.add(row * GROUP), total);
        }
    }
}
