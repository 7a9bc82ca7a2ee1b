//! Sixteen neighbours as f32, whatever they are stored as: 16-bit values are widened on their way into a register.

use std::arch::x86_64::*;

use half::{bf16, f16};

use crate::dtype::Float;

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
