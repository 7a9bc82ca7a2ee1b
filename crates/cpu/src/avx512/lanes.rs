//! What a packed word of 32 bits is, and how operands are brought into such words.
//!
//! Mostly it is one value as f32: 16-bit values are widened on their way into a register. Where the processor multiplies pairs of
//! bf16 (`VDPBF16PS`), a word is two of them, neighbours along `k`, and a step multiplies both.

use std::arch::x86_64::*;

use ferrospeed_tensor::dtype::Float;
use half::{bf16, f16};

use super::first_lanes;

/// An element type whose values are loaded as f32.
pub(crate) trait Lanes: Float {
    /// The chosen ones of sixteen values, zero elsewhere.
    ///
    /// # Safety
    /// The processor has AVX-512; the chosen values may be read.
    unsafe fn load(lanes: __mmask16, from: *const Self) -> __m512;
}

impl Lanes for f32 {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    unsafe fn load(lanes: __mmask16, from: *const f32) -> __m512 {
        // SAFETY: passed on to the caller.
        unsafe { _mm512_maskz_loadu_ps(lanes, from) }
    }
}

impl Lanes for bf16 {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    unsafe fn load(lanes: __mmask16, from: *const bf16) -> __m512 {
        // SAFETY: passed on to the caller.
        let halves = unsafe { _mm256_maskz_loadu_epi16(lanes, from.cast()) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
    }
}

impl Lanes for f16 {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    unsafe fn load(lanes: __mmask16, from: *const f16) -> __m512 {
        // SAFETY: passed on to the caller.
        _mm512_cvtph_ps(unsafe { _mm256_maskz_loadu_epi16(lanes, from.cast()) })
    }
}

/// What operands are packed into.
///
/// # Safety
/// Of all functions: the processor has AVX-512, and for [`Pairs`] its bf16; the values that are named may be read.
pub(crate) trait Words {
    /// What the operands hold.
    type Element: Lanes;
    /// Values along `k` of a word.
    const VALUES: usize;
    /// Words of `count` values that follow each other along `k`, at most sixteen words; zero behind them.
    unsafe fn along(from: *const Self::Element, count: usize) -> __m512;
    /// A word of each of the chosen lines across `k`, with the values `stride` further on where a word has two and `k` goes on.
    unsafe fn across(lanes: __mmask16, from: *const Self::Element, stride: Option<usize>) -> __m512;
    /// `sum + factor · line`.
    unsafe fn add(sum: __m512, factor: __m512, line: __m512) -> __m512;
}

/// A word is one value as f32.
pub(crate) struct Wide<T>(std::marker::PhantomData<T>);

impl<T: Lanes> Words for Wide<T> {
    type Element = T;
    const VALUES: usize = 1;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    unsafe fn along(from: *const T, count: usize) -> __m512 {
        // SAFETY: passed on to the caller.
        unsafe { T::load(first_lanes(count), from) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    unsafe fn across(lanes: __mmask16, from: *const T, _stride: Option<usize>) -> __m512 {
        // SAFETY: passed on to the caller.
        unsafe { T::load(lanes, from) }
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn add(sum: __m512, factor: __m512, line: __m512) -> __m512 {
        _mm512_fmadd_ps(factor, line, sum)
    }
}

/// A word is two values of bf16.
pub(crate) struct Pairs;

impl Words for Pairs {
    type Element = bf16;
    const VALUES: usize = 2;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    unsafe fn along(from: *const bf16, count: usize) -> __m512 {
        let values = if count >= 32 { !0 } else { (1u32 << count) - 1 };
        // SAFETY: passed on to the caller.
        _mm512_castsi512_ps(unsafe { _mm512_maskz_loadu_epi16(values, from.cast()) })
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    unsafe fn across(lanes: __mmask16, from: *const bf16, stride: Option<usize>) -> __m512 {
        // SAFETY: passed on to the caller.
        let line = |from: *const bf16| unsafe {
            _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from.cast()))
        };
        let (first, second) = (line(from), stride.map(|stride| line(from.wrapping_add(stride))));
        let pair = second.map_or(first, |second| _mm512_or_si512(first, _mm512_slli_epi32::<16>(second)));
        _mm512_castsi512_ps(pair)
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    #[inline]
    unsafe fn add(sum: __m512, factor: __m512, line: __m512) -> __m512 {
        // SAFETY: all three are 512 bits of anything.
        let [factor, line] =
            [factor, line].map(|words| unsafe { std::mem::transmute::<__m512, __m512bh>(words) });
        _mm512_dpbf16_ps(sum, factor, line)
    }
}
