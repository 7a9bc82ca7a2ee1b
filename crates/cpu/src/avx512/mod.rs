//! Matrix products with AVX-512, in f32; 16-bit operands are widened while they are packed, or, of bf16 where the processor has
//! an instruction for that, packed in pairs along `k`, which are multiplied at once.
//!
//! A block of sums, 14 rows by two registers of 16 columns, stays in 28 of the 32 registers while `k` goes by. Each
//! step of `k` loads two registers of the right operand and multiplies them by 14 values of the left one, each spread
//! over a register: 16 loads for 28 multiplications, so the multipliers and not the loads are the limit. Both operands are
//! packed in the order in which the block reads them.
//!
//! An element's sum runs through a slice of `k` in order, in one register, whatever block it falls into. Only the
//! slices, which the shape decides, group it.
//!
//! Reading order: this file (the registers), `pack` (bringing operands into order), `product` (slices, panels, tasks),
//! `finish` (what happens to a block that is complete), `dots` (few rows and columns that are consecutive in memory).

mod dots;
mod finish;
mod lanes;
mod pack;
mod product;
mod transpose;

use std::arch::x86_64::*;

pub(crate) use lanes::{Pairs, Wide};
pub(crate) use product::{multiply, products, products_16_bit};
pub(crate) use transpose::transposed;

use ferrospeed_tensor::loops::simd::{Level, level, wants_pairs};
use lanes::Words;

/// Values of a register.
pub(crate) const LANES: usize = 16;
/// Rows of a block of sums, at most.
const BLOCK_ROWS: usize = 14;
/// Registers across a block of sums, at most.
const BLOCK_REGISTERS: usize = 2;
/// Columns of a block of sums, at most.
const BLOCK_COLUMNS: usize = BLOCK_REGISTERS * LANES;

/// Words of `k` between two requests for memory that is wanted later: more at once would wait for each other.
const PART: usize = 16;
/// Steps of `k` that the right operand is asked for ahead, in which it comes from the second-level cache.
const RIGHT_AHEAD: usize = 8;

/// Whether these kernels are used.
pub(crate) fn available() -> bool {
    level() == Level::Avx512
}

/// Whether bf16 is multiplied in pairs.
pub(crate) fn has_pairs() -> bool {
    available() && wants_pairs() && is_x86_feature_detected!("avx512bf16")
}

/// The first `count` lanes of a register.
fn first_lanes(count: usize) -> __mmask16 {
    if count >= LANES { !0 } else { (1 << count) - 1 }
}

/// One block of sums: what is multiplied, and where the result goes.
struct Block {
    /// `depth` times one word for each row.
    left: *const f32,
    /// `depth` times one register of words, or two, of columns, this far apart.
    right: *const f32,
    right_stride: usize,
    depth: usize,
    target: *mut f32,
    target_stride: usize,
    rows: usize,
    columns: usize,
    alpha: f32,
    /// What is wanted next, asked for one line at a time, a line for each [`PART`] of `k`.
    ahead: *const u8,
    ahead_bytes: usize,
    /// Whether the sums are added to what the target holds.
    add: bool,
}

impl Block {
    /// `target = [target +] alpha · left · right`.
    ///
    /// # Safety
    /// The processor has AVX-512, and what the words need. The operands are as deep as they say, and the target's rows and columns belong to the
    /// caller. There are 1 to [`BLOCK_ROWS`] rows and 1 to [`BLOCK_COLUMNS`] columns.
    unsafe fn multiply<W: Words>(&self) {
        type Kernel = unsafe fn(&Block);
        macro_rules! kernels {
            ($of:ident: $($rows:literal)*) => { [$([$of::<W, $rows, 1> as Kernel, $of::<W, $rows, 2> as Kernel]),*] };
        }
        // Compiled for what their words need: what is not inlined into a kernel would be called for every step.
        let kernels: [[Kernel; BLOCK_REGISTERS]; BLOCK_ROWS] = match W::VALUES {
            1 => kernels!(block_of_values: 1 2 3 4 5 6 7 8 9 10 11 12 13 14),
            _ => kernels!(block_of_pairs: 1 2 3 4 5 6 7 8 9 10 11 12 13 14),
        };
        // SAFETY: passed on to the caller.
        unsafe { kernels[self.rows - 1][(self.columns - 1) / LANES](self) }
    }
}

/// [`block`] of words that are one value.
///
/// # Safety
/// As there.
#[target_feature(enable = "avx512f")]
unsafe fn block_of_values<W: Words, const ROWS: usize, const REGISTERS: usize>(of: &Block) {
    // SAFETY: passed on to the caller.
    unsafe { block::<W, ROWS, REGISTERS>(of) }
}

/// [`block`] of words that are pairs.
///
/// # Safety
/// As there.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn block_of_pairs<W: Words, const ROWS: usize, const REGISTERS: usize>(of: &Block) {
    // SAFETY: passed on to the caller.
    unsafe { block::<W, ROWS, REGISTERS>(of) }
}

/// [`Block::multiply`] for a block of this size. The last register of columns may stand for fewer.
///
/// # Safety
/// As there.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn block<W: Words, const ROWS: usize, const REGISTERS: usize>(block: &Block) {
    let (mut left, mut right, mut ahead) = (block.left, block.right, block.ahead);
    let mut sums = [[_mm512_setzero_ps(); REGISTERS]; ROWS];
    let place =
        |row: usize, register: usize| block.target.wrapping_add(row * block.target_stride + register * LANES);
    let parts = block.depth.div_ceil(PART);
    for part in 0..parts {
        _mm_prefetch::<_MM_HINT_T1>(ahead.cast());
        ahead = ahead.wrapping_add(block.ahead_bytes);
        // The target's rows are wanted when the sums are done, one by one and not too early.
        if let Some(row) = (part + ROWS).checked_sub(parts) {
            for register in 0..REGISTERS {
                _mm_prefetch::<_MM_HINT_T0>(place(row, register).cast());
            }
        }
        for _ in 0..PART.min(block.depth - part * PART) {
            let mut line = [_mm512_setzero_ps(); REGISTERS];
            // SAFETY: both operands are `depth` deep.
            unsafe {
                for (register, line) in line.iter_mut().enumerate() {
                    *line = _mm512_loadu_ps(right.add(register * LANES));
                    _mm_prefetch::<_MM_HINT_T0>(
                        right.wrapping_add(RIGHT_AHEAD * block.right_stride + register * LANES).cast(),
                    );
                }
                for (row, sums) in sums.iter_mut().enumerate() {
                    let factor = _mm512_set1_ps(*left.add(row));
                    for (sum, line) in sums.iter_mut().zip(line) {
                        *sum = W::add(*sum, factor, line);
                    }
                }
                left = left.add(ROWS);
                right = right.wrapping_add(block.right_stride);
            }
        }
    }
    let alpha = _mm512_set1_ps(block.alpha);
    let last_lanes = first_lanes(block.columns - (REGISTERS - 1) * LANES);
    for (row, sums) in sums.into_iter().enumerate() {
        for (register, sum) in sums.into_iter().enumerate() {
            let lanes = if register + 1 == REGISTERS { last_lanes } else { !0 };
            let place = place(row, register);
            // SAFETY: only the block's own rows and columns are touched: masked lanes are neither read nor written.
            unsafe {
                let value = if block.add {
                    _mm512_fmadd_ps(sum, alpha, _mm512_maskz_loadu_ps(lanes, place))
                } else {
                    _mm512_mul_ps(sum, alpha)
                };
                _mm512_mask_storeu_ps(place, lanes, value);
            }
        }
    }
}
