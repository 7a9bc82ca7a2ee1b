//! bf16 matrix products on Intel's Advanced Matrix Extensions.
//!
//! A tile register holds 16 rows of 64 bytes. One `TDPBF16PS` multiplies 16×32 bf16 values by 32×16 into 16×16
//! f32 sums. The left operand's tile is 16 rows of 32 consecutive `k`; the right operand's tile holds pairs of
//! `k` side by side (row `p` is `k = 2p, 2p+1` for 16 columns). The micro-kernel keeps a 32×32 block of sums in
//! four tiles over the whole of `k`, so a sum never leaves the registers before it is complete.

use std::arch::asm;
use std::sync::OnceLock;

use half::bf16;

use crate::cpu::gemm::{Epilogue, Operand, Output};
use crate::cpu::parallel::Threads;
use crate::cpu::simd::{Level, level, vectorized};
use crate::dtype::Float;

/// Rows and columns of a tile of sums.
const TILE: usize = 16;
/// Rows and columns of a block of sums: two tiles each way.
const BLOCK: usize = 2 * TILE;
/// `k` per tile.
const DEPTH: usize = 32;
/// Elements of a packed tile.
const TILE_ELEMENTS: usize = TILE * DEPTH;
/// Columns that one task packs and multiplies: its packed operand stays in the second-level cache.
const PANEL_COLUMNS: usize = 128;
/// Rows of one task.
const PANEL_ROWS: usize = 512;

/// Whether this process may use AMX for bf16.
pub(crate) fn available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| level() == Level::Avx512 && detected() && permitted())
}

#[cfg(target_arch = "x86_64")]
fn detected() -> bool {
    let leaf7 = std::arch::x86_64::__cpuid_count(7, 0);
    let (bf16, tiles) = (leaf7.edx >> 22 & 1, leaf7.edx >> 24 & 1);
    bf16 == 1 && tiles == 1
}

/// The kernel gives the tile state only to processes that ask for it.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: asks the kernel for a permission; touches no memory.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// The shapes of the eight tile registers, in the layout that `LDTILECFG` reads.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Full tiles everywhere. Edges are padded with zeros when packing.
static FULL_TILES: TileConfig = TileConfig {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// The tile registers of this thread, configured while this lives.
struct Tiles;

impl Tiles {
    fn configure() -> Tiles {
        // SAFETY: `available` was checked before any product starts; the configuration is valid.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &FULL_TILES, options(nostack, readonly)) };
        Tiles
    }

    /// `sums = a·b` for a 32×32 block, `depth` packed tile pairs deep.
    fn multiply(&self, a: &[bf16], b: &[bf16], depth: usize, sums: &mut [f32; BLOCK * BLOCK]) {
        assert!(a.len() >= depth * 2 * TILE_ELEMENTS && b.len() >= depth * 2 * TILE_ELEMENTS && depth > 0);
        // SAFETY: the tiles are configured; the loop reads `depth` pairs of packed tiles from each operand, which
        // the assertion covers, and stores four 16×16 blocks to `sums`, whose rows are 128 bytes apart.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "2:",
                "tileloadd tmm4, [{a} + {line}*1]",
                "tileloadd tmm6, [{b} + {line}*1]",
                "tileloadd tmm7, [{b} + {line}*1 + 1024]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm5, [{a} + {line}*1 + 1024]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {a}, 2048",
                "add {b}, 2048",
                "dec {depth}",
                "jnz 2b",
                "tilestored [{c} + {row}*1], tmm0",
                "tilestored [{c} + {row}*1 + 64], tmm1",
                "tilestored [{c} + {row}*1 + 2048], tmm2",
                "tilestored [{c} + {row}*1 + 2112], tmm3",
                a = inout(reg) a.as_ptr() => _,
                b = inout(reg) b.as_ptr() => _,
                c = in(reg) sums.as_mut_ptr(),
                line = in(reg) 64usize,
                row = in(reg) 128usize,
                depth = inout(reg) depth => _,
                options(nostack)
            );
        }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: gives this thread's tile state back.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// `c = a·b` with an epilogue, `[m, n, k]`.
pub(crate) fn product<C: Float>(
    threads: &Threads,
    [m, n, k]: [usize; 3],
    a: &Operand<'_, bf16>,
    b: &Operand<'_, bf16>,
    epilogue: &Epilogue<'_>,
    output: &Output<C>,
) {
    let depth = k.div_ceil(DEPTH).max(1);
    let (down, across) = (m.div_ceil(PANEL_ROWS), n.div_ceil(PANEL_COLUMNS));
    threads.run(down * across, |task| {
        let (row0, column0) = (task % down * PANEL_ROWS, task / down * PANEL_COLUMNS);
        let (row1, column1) = ((row0 + PANEL_ROWS).min(m), (column0 + PANEL_COLUMNS).min(n));
        let columns = (column1 - column0).div_ceil(BLOCK);
        let block_elements = depth * 2 * TILE_ELEMENTS;
        let mut packed_a = vec![bf16::ZERO; block_elements];
        let mut packed_b = vec![bf16::ZERO; columns * block_elements];
        let mut sums = [0.0f32; BLOCK * BLOCK];
        vectorized(|| {
            for block in 0..columns {
                let target = &mut packed_b[block * block_elements..(block + 1) * block_elements];
                pack_right(b, k, column0 + block * BLOCK, column1, target);
            }
        });
        let tiles = Tiles::configure();
        for block_row in (row0..row1).step_by(BLOCK) {
            vectorized(|| pack_left(a, k, block_row, row1, &mut packed_a));
            for block in 0..columns {
                let column = column0 + block * BLOCK;
                tiles.multiply(&packed_a, &packed_b[block * block_elements..], depth, &mut sums);
                let width = BLOCK.min(column1 - column);
                vectorized(|| {
                    for r in 0..BLOCK.min(row1 - block_row) {
                        // SAFETY: this task alone writes these rows and columns.
                        let (c, before) = unsafe { output.row(block_row + r, column..column + width) };
                        epilogue.store(&mut sums[r * BLOCK..r * BLOCK + width], column, c, before);
                    }
                });
            }
        }
    });
}

/// Packs rows `row..row + 32` (zeros from `end` on) as pairs of tiles along `k`.
#[inline(always)]
fn pack_left(a: &Operand<'_, bf16>, k: usize, row: usize, end: usize, packed: &mut [bf16]) {
    for (d, pair) in packed.chunks_mut(2 * TILE_ELEMENTS).enumerate() {
        let k0 = d * DEPTH;
        let width = DEPTH.min(k.saturating_sub(k0));
        for (r, line) in pair.chunks_mut(DEPTH).enumerate() {
            if row + r >= end || width == 0 {
                line.fill(bf16::ZERO);
                continue;
            }
            let start = a.index(row + r, k0);
            if a.column_stride == 1 {
                line[..width].copy_from_slice(&a.elements[start..start + width]);
            } else {
                for (i, value) in line[..width].iter_mut().enumerate() {
                    *value = a.elements[start + i * a.column_stride];
                }
            }
            line[width..].fill(bf16::ZERO);
        }
    }
}

/// Packs columns `column..column + 32` (zeros from `end` on) as pairs of tiles along `k`, pairs of `k` side by side.
#[inline(always)]
fn pack_right(b: &Operand<'_, bf16>, k: usize, column: usize, end: usize, packed: &mut [bf16]) {
    for (d, pair) in packed.chunks_mut(2 * TILE_ELEMENTS).enumerate() {
        for (half, tile) in pair.chunks_mut(TILE_ELEMENTS).enumerate() {
            let first = column + half * TILE;
            let width = TILE.min(end.saturating_sub(first));
            for (p, line) in tile.chunks_mut(DEPTH).enumerate() {
                let k0 = d * DEPTH + 2 * p;
                for c in 0..TILE {
                    for i in 0..2 {
                        let inside = c < width && k0 + i < k;
                        line[2 * c + i] =
                            if inside { b.elements[b.index(k0 + i, first + c)] } else { bf16::ZERO };
                    }
                }
            }
        }
    }
}
