//! f32 values as sums of three bf16 values, so that tiles multiply them.
//!
//! An f32 has 24 significant bits and a bf16 has 8. The first piece is a value cut after 8 bits, the second the rest
//! rounded to 8 bits, and the third what is left then, which fits: the three add up to the value exactly. Of the nine products
//! of two values' pieces, the tiles add the six that a sum in f32 can hold. Those left out (second by third and third by third)
//! are together below 2⁻²² of the whole, mostly far below, and of either sign: over a sum they are less than what rounding
//! takes. (Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype for Higher-Precision
//! Computations", 2019.)
//!
//! Infinities and NaN have no pieces: packing says when it meets one. Pieces below 2⁻¹²⁶ count as zero in a product.
//!
//! A packed operand is as in `pack`, with three pairs of tiles for each depth of 32, one for each piece. A double word of a tile
//! holds `k` and `k + 16` of its depth, which both operands agree on.

use std::arch::x86_64::*;

use half::bf16;

use super::pack::{Factor, ask_beyond, check};
use super::{DEPTH, PAIR, TILE};
use crate::avx512::transposed;
use crate::gemm::Operand;

/// Pieces of a value.
pub(super) const PIECES: usize = 3;
/// 16 lines of 16 f32 values.
type Square = [__m512i; TILE];
/// Products of pieces that count.
pub(super) const PRODUCTS: usize = 6;

impl Factor for f32 {
    const PIECES: usize = PIECES;

    fn pack_left(
        a: &Operand<'_, f32>,
        span: [usize; 2],
        row: usize,
        end: usize,
        packed: &mut [bf16],
    ) -> bool {
        check(a, row, end, span, packed, |a, row, k| a.index(row, k));
        // SAFETY: only called where AMX is, which implies AVX-512 and its rounding to bf16; `check` has proved the bounds.
        unsafe {
            if a.column_stride == 1 {
                pack_lines(a.elements, a.row_stride, span, row, end, false, packed)
            } else {
                pack_rows(a.elements, a.column_stride, span, row, end, true, packed)
            }
        }
    }

    fn pack_right(
        b: &Operand<'_, f32>,
        span: [usize; 2],
        column: usize,
        end: usize,
        packed: &mut [bf16],
    ) -> bool {
        check(b, column, end, span, packed, |b, column, k| b.index(k, column));
        // SAFETY: as above.
        unsafe {
            if b.column_stride == 1 {
                pack_rows(b.elements, b.row_stride, span, column, end, false, packed)
            } else {
                pack_lines(b.elements, b.column_stride, span, column, end, true, packed)
            }
        }
    }
}

/// Lines of consecutive `k` stay lines, or are turned into columns.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn pack_lines(
    elements: &[f32],
    stride: usize,
    [k0, k1]: [usize; 2],
    line: usize,
    end: usize,
    turn: bool,
    packed: &mut [bf16],
) -> bool {
    let mut finite = Finite::new();
    for (step, k) in (k0..k1).step_by(DEPTH).enumerate() {
        for half in 0..2 {
            let first = line + half * TILE;
            let part = |k: usize| {
                std::array::from_fn(|i| {
                    let lanes = if first + i < end { first_lanes(k1.saturating_sub(k)) } else { 0 };
                    // SAFETY: `check` covers the lines below `end` and `k` below `k1`; masked lanes are not read.
                    unsafe { load(lanes, elements.as_ptr().wrapping_add((first + i) * stride + k)) }
                })
            };
            let target = &mut packed[step * PIECES * PAIR + half * TILE * DEPTH..];
            store(part(k), part(k + TILE), turn, &mut finite, target);
        }
    }
    finite.all()
}

/// Rows of `k` with consecutive lines are paired; a left operand's are turned into lines first.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn pack_rows(
    elements: &[f32],
    stride: usize,
    [k0, k1]: [usize; 2],
    line: usize,
    end: usize,
    turn: bool,
    packed: &mut [bf16],
) -> bool {
    let mut finite = Finite::new();
    for (step, k) in (k0..k1).step_by(DEPTH).enumerate() {
        for half in 0..2 {
            let first = line + half * TILE;
            let part = |k: usize| {
                std::array::from_fn(|p| {
                    let lanes = if k + p < k1 { first_lanes(end.saturating_sub(first)) } else { 0 };
                    // SAFETY: as in `pack_lines`.
                    unsafe { load(lanes, elements.as_ptr().wrapping_add((k + p) * stride + first)) }
                })
            };
            let target = &mut packed[step * PIECES * PAIR + half * TILE * DEPTH..];
            store(part(k), part(k + TILE), turn, &mut finite, target);
        }
    }
    finite.all()
}

/// Some of 16 values, the rest zeros; asks for what follows them.
///
/// # Safety
/// These values may be read.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn load(lanes: __mmask16, from: *const f32) -> __m512i {
    ask_beyond(from);
    // SAFETY: passed on to the caller.
    unsafe { _mm512_castps_si512(_mm512_maskz_loadu_ps(lanes, from)) }
}

/// The first `count` lanes of a register.
fn first_lanes(count: usize) -> __mmask16 {
    if count >= TILE { !0 } else { (1 << count) - 1 }
}

/// Stores a tile of each piece of the values of `low` and, in the upper halves of double words, `high`. What is turned is so as
/// values: their pieces are half as many again.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
#[inline]
fn store(low: Square, high: Square, turn: bool, finite: &mut Finite, target: &mut [bf16]) {
    let (low, high) = if turn { (transposed(low), transposed(high)) } else { (low, high) };
    assert!(target.len() >= (PIECES - 1) * PAIR + TILE * DEPTH);
    for (i, (low, high)) in low.into_iter().zip(high).enumerate() {
        let pieces = pieces(_mm512_castsi512_ps(low), _mm512_castsi512_ps(high), finite);
        for (piece, line) in pieces.into_iter().enumerate() {
            // SAFETY: inside, as was asserted.
            unsafe { _mm512_storeu_si512(target.as_mut_ptr().add(piece * PAIR + i * DEPTH).cast(), line) };
        }
    }
}

/// Whether all values that went by were finite: the rest of one that is not is NaN, and so is anything it is added to.
struct Finite(__m512);

impl Finite {
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn new() -> Finite {
        Finite(_mm512_setzero_ps())
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    fn see(&mut self, rest: __m512) {
        self.0 = _mm512_fmadd_ps(rest, _mm512_setzero_ps(), self.0);
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    fn all(self) -> bool {
        _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0) == 0
    }
}

/// The pieces of 32 values: those of `low` in the low halves of double words, those of `high` in the high ones.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
#[inline]
fn pieces(low: __m512, high: __m512, finite: &mut Finite) -> [__m512i; PIECES] {
    let upper = _mm512_set1_epi32(!0xffff);
    let cut = |value: __m512| _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(value), upper));
    let first = upper_halves(low, high);
    let (low, high) = (_mm512_sub_ps(low, cut(low)), _mm512_sub_ps(high, cut(high)));
    // SAFETY: the same 512 bits under another name.
    let rounded: __m512i = unsafe { std::mem::transmute(_mm512_cvtne2ps_pbh(high, low)) };
    let second = _mm512_permutexvar_epi16(halves_by_turns(), rounded);
    let low = _mm512_sub_ps(low, _mm512_castsi512_ps(_mm512_slli_epi32::<16>(second)));
    let high = _mm512_sub_ps(high, _mm512_castsi512_ps(_mm512_and_si512(second, upper)));
    finite.see(low);
    finite.see(high);
    [first, second, upper_halves(low, high)]
}

/// Double words of the upper halves of both.
#[target_feature(enable = "avx512f")]
#[inline]
fn upper_halves(low: __m512, high: __m512) -> __m512i {
    /// `a | (b & c)`.
    const CHOICE: i32 = 0xf8;
    let low = _mm512_srli_epi32::<16>(_mm512_castps_si512(low));
    _mm512_ternarylogic_epi32::<CHOICE>(low, _mm512_castps_si512(high), _mm512_set1_epi32(!0xffff))
}

/// The words 0, 16, 1, 17, … 31.
#[target_feature(enable = "avx512f")]
#[inline]
fn halves_by_turns() -> __m512i {
    const ORDER: [u16; 2 * TILE] = {
        let mut order = [0; 2 * TILE];
        let mut i = 0;
        while i < 2 * TILE {
            order[i] = (i / 2 + i % 2 * TILE) as u16;
            i += 1;
        }
        order
    };
    // SAFETY: the table is 64 bytes long.
    unsafe { _mm512_loadu_si512(ORDER.as_ptr().cast()) }
}
