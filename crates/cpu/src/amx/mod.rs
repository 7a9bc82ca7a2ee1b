//! Matrix products on Intel's Advanced Matrix Extensions: bf16, and f32 in three pieces of bf16.
//!
//! A tile register holds 16 rows of 64 bytes. One `TDPBF16PS` multiplies 16×32 bf16 values by 32×16 into 16×16
//! f32 sums. The left operand's tile is 16 rows of 32 consecutive `k`; the right operand's tile holds pairs of
//! `k` side by side (row `p` is `k = 2p, 2p+1` for 16 columns). The micro-kernel keeps a 32×32 block of sums in
//! four tiles.
//!
//! Reading order: this file (the registers), `pack` (bringing operands into tiles), `split` (the same for f32, which becomes
//! three pieces), `product` (blocking), `few_rows` (products that are bound by reading weights), `bytes` (whole numbers).

pub(crate) mod bytes;
pub(crate) mod few_rows;
mod pack;
mod product;
mod split;

pub(crate) use pack::Factor;
pub(crate) use product::{Problem, products};

use std::arch::asm;
use std::ops::Range;
use std::sync::OnceLock;

use ferrospeed_tensor::loops::simd::{Level, level, wants_tiles};
use half::bf16;

/// Rows and columns of a tile of sums.
pub(crate) const TILE: usize = 16;
/// Rows and columns of a block of sums: two tiles each way.
pub(crate) const BLOCK: usize = 2 * TILE;
/// `k` per tile.
pub(crate) const DEPTH: usize = 32;
/// Elements of a packed pair of tiles: a block's worth of one operand, `DEPTH` deep.
pub(crate) const PAIR: usize = BLOCK * DEPTH;

/// Parts that a product's depth is cut into where other work goes on beside it.
pub(crate) const PARTS: usize = 4;

/// Whether this process may use AMX for bf16.
pub(crate) fn available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| level() == Level::Avx512 && wants_tiles() && detected() && permitted())
}

fn detected() -> bool {
    let leaf7 = std::arch::x86_64::__cpuid_count(7, 0);
    let (bf16, tiles) = (leaf7.edx >> 22 & 1, leaf7.edx >> 24 & 1);
    bf16 == 1 && tiles == 1 && is_x86_feature_detected!("avx512bf16")
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

/// A 32-row left operand: packed pairs of tiles, or rows where they lie.
#[derive(Clone, Copy)]
pub(crate) struct Left {
    rows: Rows,
    /// What is wanted later and asked for meanwhile.
    ahead: Rows,
}

/// Rows of 64 bytes.
#[derive(Clone, Copy)]
struct Rows {
    pointer: *const bf16,
    row_bytes: usize,
    /// From one depth of 32 to the next.
    step_bytes: usize,
}

impl Left {
    /// Packed tiles.
    pub(crate) fn packed<T: Factor>(tiles: &[bf16]) -> Left {
        let rows = Rows { pointer: tiles.as_ptr(), row_bytes: 2 * DEPTH, step_bytes: 2 * T::PIECES * PAIR };
        Left { rows, ahead: rows }
    }

    /// 32 whole rows of `row_stride` elements, which are what tiles hold, read in place from `rows` on.
    pub(crate) fn in_place<T: Factor>(rows: &[T], row_stride: usize) -> Left {
        assert!(T::PIECES == 1 && size_of::<T>() == size_of::<bf16>());
        let rows = Rows { pointer: rows.as_ptr().cast(), row_bytes: 2 * row_stride, step_bytes: 2 * DEPTH };
        Left { rows, ahead: rows }
    }

    /// The same; what `next` will read is asked for meanwhile, by each block its part: two lines of the cache beside each product
    /// of a pair of tiles. More at once would wait for each other.
    pub(crate) fn asking<T: Factor>(self, next: &Left, block: usize) -> Left {
        let products = if T::PIECES == 1 { 1 } else { split::PRODUCTS };
        let first = block * 2 * products;
        if first >= T::PIECES * BLOCK {
            return self;
        }
        let pointer = next.rows.pointer.wrapping_byte_add(first * next.rows.row_bytes);
        Left { ahead: Rows { pointer, ..next.rows }, ..self }
    }
}

/// The tile registers of this thread, configured while this lives.
pub(crate) struct Tiles;

impl Tiles {
    pub(crate) fn configure() -> Tiles {
        debug_assert!(available());
        // SAFETY: `available` was checked before any product starts; the configuration is valid.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &FULL_TILES, options(nostack, readonly)) };
        Tiles
    }

    /// `sums = [sums +] a·b` for a 32×32 block, `depth` packed tile pairs deep; rows of sums are `sums_stride` apart.
    ///
    /// # Safety
    /// `a` reaches 32 rows of `depth` steps, `b` holds `depth` packed pairs, `sums` is 32 rows of 32 values that
    /// nobody else touches.
    #[inline(always)]
    pub(crate) unsafe fn multiply(
        &self,
        a: Left,
        b: *const bf16,
        depth: usize,
        sums: *mut f32,
        sums_stride: usize,
        accumulate: bool,
    ) {
        // SAFETY: passed on to the caller.
        unsafe {
            self.begin(accumulate.then_some(sums.cast_const()), sums_stride);
            self.advance(a, b, 0..depth);
            self.end(sums, sums_stride);
        }
    }

    /// The same with other work in between, a part of it after each of [`PARTS`] parts of the depth. The processor does
    /// both at once, where work after the whole product would leave the tiles idle.
    ///
    /// # Safety
    /// As for [`Tiles::multiply`]; `before` is a block of sums too, and `between` uses no tile.
    #[inline(always)]
    pub(crate) unsafe fn multiply_beside<T: Factor>(
        &self,
        a: Left,
        b: *const bf16,
        depth: usize,
        before: Option<*const f32>,
        sums: *mut f32,
        mut between: impl FnMut(usize),
    ) {
        // SAFETY: passed on to the caller.
        unsafe {
            self.begin(before, BLOCK);
            for part in 0..PARTS {
                let steps = part * depth / PARTS..(part + 1) * depth / PARTS;
                match T::PIECES {
                    1 => self.advance(a, b, steps),
                    _ => self.advance_split(a, b, steps),
                }
                between(part);
            }
            self.end(sums, BLOCK);
        }
    }

    /// Fills the tiles of sums, with zeros where there are none before.
    #[inline(always)]
    unsafe fn begin(&self, before: Option<*const f32>, sums_stride: usize) {
        // SAFETY: the tiles are configured; what is read is the caller's promise.
        unsafe {
            if let Some(sums) = before {
                asm!(
                    "tileloadd tmm0, [{c} + {row}*1]",
                    "tileloadd tmm1, [{c} + {row}*1 + 64]",
                    "tileloadd tmm2, [{lower} + {row}*1]",
                    "tileloadd tmm3, [{lower} + {row}*1 + 64]",
                    c = in(reg) sums,
                    lower = in(reg) sums.add(TILE * sums_stride),
                    row = in(reg) 4 * sums_stride,
                    options(nostack, preserves_flags)
                );
            } else {
                asm!(
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    options(nostack, preserves_flags)
                );
            }
        }
    }

    /// Adds the products of some steps of bf16 values to the tiles of sums. The right operand's tiles pass the first-level cache
    /// by: each is used once before its turn comes again, and would push out the left operand's, which the next block wants.
    #[inline(always)]
    unsafe fn advance(&self, a: Left, b: *const bf16, steps: Range<usize>) {
        if steps.is_empty() {
            return;
        }
        // SAFETY: the tiles are configured; what is read is the caller's promise.
        unsafe {
            let first = a.rows.pointer.byte_add(steps.start * a.rows.step_bytes);
            asm!(
                "2:",
                "tileloaddt1 tmm6, [{b} + {line}*1]",
                "tileloaddt1 tmm7, [{b} + {line}*1 + 1024]",
                "tileloadd tmm4, [{a} + {a_row}*1]",
                "tileloadd tmm5, [{a_lower} + {a_row}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "prefetcht1 [{ahead}]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "prefetcht1 [{ahead} + {ahead_row}*1]",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {a}, {step}",
                "add {a_lower}, {step}",
                "add {ahead}, {ahead_step}",
                "add {b}, 2048",
                "dec {steps}",
                "jnz 2b",
                a = inout(reg) first => _,
                a_lower = inout(reg) first.byte_add(TILE * a.rows.row_bytes) => _,
                a_row = in(reg) a.rows.row_bytes,
                step = in(reg) a.rows.step_bytes,
                ahead = inout(reg) a.ahead.pointer.wrapping_byte_add(steps.start * a.ahead.step_bytes) => _,
                ahead_row = in(reg) a.ahead.row_bytes,
                ahead_step = in(reg) a.ahead.step_bytes,
                b = inout(reg) b.add(steps.start * PAIR) => _,
                line = in(reg) 64usize,
                steps = inout(reg) steps.len() => _,
                options(nostack)
            );
        }
    }

    /// Adds six products of pieces of some steps of f32 values. Each but the first finds one operand's tiles loaded.
    #[inline(always)]
    unsafe fn advance_split(&self, a: Left, b: *const bf16, steps: Range<usize>) {
        macro_rules! products {
            ($($load:literal,)+) => {
                asm!(
                    "2:",
                    $(
                        $load,
                        "tdpbf16ps tmm0, tmm4, tmm6",
                        "prefetcht1 [{ahead}]",
                        "tdpbf16ps tmm1, tmm4, tmm7",
                        "tdpbf16ps tmm2, tmm5, tmm6",
                        "prefetcht1 [{ahead} + 64]",
                        "add {ahead}, 128",
                        "tdpbf16ps tmm3, tmm5, tmm7",
                    )+
                    "add {a}, 6144",
                    "add {ahead}, 5376",
                    "add {b}, 6144",
                    "dec {steps}",
                    "jnz 2b",
                    a = inout(reg) a.rows.pointer.byte_add(steps.start * a.rows.step_bytes) => _,
                    ahead = inout(reg) a.ahead.pointer.wrapping_byte_add(steps.start * a.ahead.step_bytes) => _,
                    b = inout(reg) b.add(steps.start * split::PIECES * PAIR) => _,
                    line = in(reg) 64usize,
                    steps = inout(reg) steps.len() => _,
                    options(nostack)
                )
            };
        }
        if steps.is_empty() {
            return;
        }
        // SAFETY: the tiles are configured; what is read is the caller's promise.
        unsafe {
            products!(
                // The left operand's third by the right one's first piece, and so on: 31, 21, 22, 12, 13, 11.
                "tileloadd tmm4, [{a} + {line}*1 + 4096]
                 tileloadd tmm6, [{b} + {line}*1]
                 tileloadd tmm7, [{b} + {line}*1 + 1024]
                 tileloadd tmm5, [{a} + {line}*1 + 5120]",
                "tileloadd tmm4, [{a} + {line}*1 + 2048]
                 tileloadd tmm5, [{a} + {line}*1 + 3072]",
                "tileloadd tmm6, [{b} + {line}*1 + 2048]
                 tileloadd tmm7, [{b} + {line}*1 + 3072]",
                "tileloadd tmm4, [{a} + {line}*1]
                 tileloadd tmm5, [{a} + {line}*1 + 1024]",
                "tileloadd tmm6, [{b} + {line}*1 + 4096]
                 tileloadd tmm7, [{b} + {line}*1 + 5120]",
                "tileloadd tmm6, [{b} + {line}*1]
                 tileloadd tmm7, [{b} + {line}*1 + 1024]",
            );
        }
    }

    /// Writes the tiles of sums.
    #[inline(always)]
    unsafe fn end(&self, sums: *mut f32, sums_stride: usize) {
        // SAFETY: the tiles are configured; what is written is the caller's promise.
        unsafe {
            asm!(
                "tilestored [{c} + {row}*1], tmm0",
                "tilestored [{c} + {row}*1 + 64], tmm1",
                "tilestored [{lower} + {row}*1], tmm2",
                "tilestored [{lower} + {row}*1 + 64], tmm3",
                c = in(reg) sums,
                lower = in(reg) sums.add(TILE * sums_stride),
                row = in(reg) 4 * sums_stride,
                options(nostack, preserves_flags)
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
