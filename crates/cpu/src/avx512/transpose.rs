//! Turning a square of 16 registers.

use std::arch::x86_64::*;

use super::LANES;

/// The transpose of 16×16 double words: pairs, quads and lanes are exchanged in turn.
#[target_feature(enable = "avx512f")]
#[inline]
pub(crate) fn transposed(r: [__m512i; LANES]) -> [__m512i; LANES] {
    let mut t = r;
    for i in 0..8 {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    let mut u = t;
    for i in 0..4 {
        u[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        u[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        u[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        u[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    let mut out = u;
    for i in 0..4 {
        let even = _mm512_shuffle_i32x4::<0x88>(u[i], u[4 + i]);
        let odd = _mm512_shuffle_i32x4::<0xdd>(u[i], u[4 + i]);
        let even_high = _mm512_shuffle_i32x4::<0x88>(u[8 + i], u[12 + i]);
        let odd_high = _mm512_shuffle_i32x4::<0xdd>(u[8 + i], u[12 + i]);
        out[i] = _mm512_shuffle_i32x4::<0x88>(even, even_high);
        out[8 + i] = _mm512_shuffle_i32x4::<0xdd>(even, even_high);
        out[4 + i] = _mm512_shuffle_i32x4::<0x88>(odd, odd_high);
        out[12 + i] = _mm512_shuffle_i32x4::<0xdd>(odd, odd_high);
    }
    out
}
