//! Products of bytes in tiles: whole numbers, so that their order does not matter.
//!
//! One `TDPBSSD` multiplies 16×32 signed bytes by 32×16 into 16×16 sums. The left operand's tile is 16 rows of 32 consecutive
//! bytes; the right operand's is eight lines with four neighbours along the depth for each of 16 columns.

use std::arch::asm;
use std::sync::OnceLock;

use super::{TILE, TileConfig};

/// Bytes of a tile of either operand.
pub(crate) const OPERAND: usize = 16 * 32;
/// Numbers of a tile of sums.
pub(crate) const SUMS: usize = TILE * TILE;

/// Sums in the first four tiles, rows in the next two, columns in the last two.
static SHAPES: TileConfig = TileConfig {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 32, 32, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 8, 8, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// Whether this process may use AMX for bytes.
pub(crate) fn available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    let has_bytes = || std::arch::x86_64::__cpuid_count(7, 0).edx >> 25 & 1 == 1;
    *AVAILABLE.get_or_init(|| super::available() && has_bytes())
}

/// The tile registers of this thread, configured while this lives.
pub(crate) struct ByteTiles;

impl ByteTiles {
    pub(crate) fn configure() -> ByteTiles {
        debug_assert!(available());
        // SAFETY: `available` was checked before any product starts; the configuration is valid.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &SHAPES, options(nostack, readonly)) };
        ByteTiles
    }

    /// Two tiles of rows by two of columns: `sums[2·i + j] = rows[i]·columns[j]`.
    ///
    /// # Safety
    /// Operands reach [`OPERAND`] bytes, sums [`SUMS`] numbers that nobody else touches.
    #[inline(always)]
    pub(crate) unsafe fn multiply(&self, rows: [*const i8; 2], columns: [*const i8; 2], sums: [*mut i32; 4]) {
        // SAFETY: the tiles are configured; what is read and written is the caller's promise.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tileloadd tmm4, [{upper} + {row}*1]",
                "tileloadd tmm6, [{left} + {line}*1]",
                "tdpbssd tmm0, tmm4, tmm6",
                "tilezero tmm1",
                "tileloadd tmm7, [{right} + {line}*1]",
                "tdpbssd tmm1, tmm4, tmm7",
                "tilezero tmm2",
                "tileloadd tmm5, [{lower} + {row}*1]",
                "tilestored [{c0} + {line}*1], tmm0",
                "tdpbssd tmm2, tmm5, tmm6",
                "tilezero tmm3",
                "tilestored [{c1} + {line}*1], tmm1",
                "tdpbssd tmm3, tmm5, tmm7",
                "tilestored [{c2} + {line}*1], tmm2",
                "tilestored [{c3} + {line}*1], tmm3",
                upper = in(reg) rows[0],
                lower = in(reg) rows[1],
                left = in(reg) columns[0],
                right = in(reg) columns[1],
                c0 = in(reg) sums[0],
                c1 = in(reg) sums[1],
                c2 = in(reg) sums[2],
                c3 = in(reg) sums[3],
                row = in(reg) 32usize,
                line = in(reg) 64usize,
                options(nostack, preserves_flags)
            );
        }
    }
}

impl Drop for ByteTiles {
    fn drop(&mut self) {
        // SAFETY: gives this thread's tile state back.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}
