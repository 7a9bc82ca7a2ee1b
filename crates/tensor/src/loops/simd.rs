//! Runtime choice of instruction set.
//!
//! Kernels are plain loops over `f32`, compiled three times: portable, AVX2 and AVX-512. They use no fused
//! multiply-add and reduce over sixteen fixed lanes, so all three give the same bits. (Matrix products do not, nor does
//! attention in bf16, which is made of them: there the instruction set decides how sums are grouped.)

use std::sync::OnceLock;

/// Which instructions the kernels use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Whatever the target guarantees.
    Portable,
    /// 256-bit vectors.
    Avx2,
    /// 512-bit vectors.
    Avx512,
}

/// What [`level`] and [`wants_tiles`] are lowered to where a user says so.
fn wanted() -> Option<String> {
    std::env::var("FERROSPEED_CPU_KERNELS").ok()
}

/// Whether tiles (AMX) may be used where they are: `FERROSPEED_CPU_KERNELS` names no family below them.
pub fn wants_tiles() -> bool {
    !matches!(wanted().as_deref(), Some("portable" | "avx2" | "avx512" | "avx512_bf16"))
}

/// Whether instructions for pairs of bf16 may be used where they are.
pub fn wants_pairs() -> bool {
    static WANTED: OnceLock<bool> = OnceLock::new();
    *WANTED.get_or_init(|| !matches!(wanted().as_deref(), Some("portable" | "avx2" | "avx512")))
}

/// The best level of this machine, or the lower one that `FERROSPEED_CPU_KERNELS` (portable, avx2, avx512, avx512_bf16) names.
#[inline]
pub fn level() -> Level {
    static LEVEL: OnceLock<Level> = OnceLock::new();
    *LEVEL.get_or_init(|| {
        let wanted = match wanted().as_deref() {
            Some("portable") => Level::Portable,
            Some("avx2") => Level::Avx2,
            _ => Level::Avx512,
        };
        wanted.min(detect())
    })
}

#[cfg(target_arch = "x86_64")]
fn detect() -> Level {
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    if avx512 {
        Level::Avx512
    } else if is_x86_feature_detected!("avx2") {
        Level::Avx2
    } else {
        Level::Portable
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> Level {
    Level::Portable
}

/// Runs a closure's body compiled for [`level`]. Everything it calls must be `#[inline(always)]` to be compiled along.
///
/// A macro, so that each level gets a closure of its own: one closure called from three places is not inlined into
/// any of them once it is large, and would silently be compiled for the baseline.
#[macro_export]
macro_rules! vectorized {
    (|| $body:expr) => {
        match $crate::loops::simd::level() {
            $crate::loops::simd::Level::Avx512 => {
                let kernel = || $body;
                // SAFETY: `level` never names more than the machine was found to have.
                unsafe { $crate::loops::simd::avx512(kernel) }
            }
            $crate::loops::simd::Level::Avx2 => {
                let kernel = || $body;
                // SAFETY: as above.
                unsafe { $crate::loops::simd::avx2(kernel) }
            }
            $crate::loops::simd::Level::Portable => $crate::loops::simd::baseline(|| $body),
        }
    };
}
pub use crate::vectorized;

/// Runs `kernel` compiled for [`level`]: the form of [`vectorized!`] for closures small enough to be inlined anyway.
#[inline(always)]
pub fn vectorized<R>(kernel: impl FnOnce() -> R) -> R {
    match level() {
        // SAFETY: `level` never names more than the machine was found to have.
        Level::Avx512 => unsafe { avx512(kernel) },
        // SAFETY: as above.
        Level::Avx2 => unsafe { avx2(kernel) },
        Level::Portable => kernel(),
    }
}

/// Runs `kernel` with what the target guarantees.
#[doc(hidden)]
#[inline]
pub fn baseline<R>(kernel: impl FnOnce() -> R) -> R {
    kernel()
}

/// Runs `kernel` with 512-bit vectors.
///
/// # Safety
/// The machine has them: [`level`] says [`Level::Avx512`].
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2"))]
#[doc(hidden)]
#[inline]
pub unsafe fn avx512<R>(kernel: impl FnOnce() -> R) -> R {
    kernel()
}

/// Runs `kernel` with 256-bit vectors.
///
/// # Safety
/// The machine has them: [`level`] says at least [`Level::Avx2`].
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2"))]
#[doc(hidden)]
#[inline]
pub unsafe fn avx2<R>(kernel: impl FnOnce() -> R) -> R {
    kernel()
}

/// The width that every reduction is spread over, whatever the registers.
pub const LANES: usize = 16;

/// Sums `f(i, value)` over a row in the fixed lane order.
#[inline(always)]
pub fn sum_by(row: &[f32], mut f: impl FnMut(usize, f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let mut chunks = row.chunks_exact(LANES);
    let mut base = 0;
    for chunk in &mut chunks {
        for lane in 0..LANES {
            lanes[lane] += f(base + lane, chunk[lane]);
        }
        base += LANES;
    }
    for (lane, (sum, value)) in lanes.iter_mut().zip(chunks.remainder()).enumerate() {
        *sum += f(base + lane, *value);
    }
    fold(lanes, |a, b| a + b)
}

/// Replaces every value of a row by `f(value)` and sums the new ones in the fixed lane order.
#[inline(always)]
pub fn map_and_sum(row: &mut [f32], f: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let mut chunks = row.chunks_exact_mut(LANES);
    for chunk in &mut chunks {
        for lane in 0..LANES {
            chunk[lane] = f(chunk[lane]);
            lanes[lane] += chunk[lane];
        }
    }
    for (sum, value) in lanes.iter_mut().zip(chunks.into_remainder()) {
        *value = f(*value);
        *sum += *value;
    }
    fold(lanes, |a, b| a + b)
}

/// The sum of products of two rows of one length, in the fixed lane order.
#[inline(always)]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (mut left, mut right) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    for (a, b) in (&mut left).zip(&mut right) {
        for lane in 0..LANES {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    for (lane, (a, b)) in lanes.iter_mut().zip(left.remainder().iter().zip(right.remainder())) {
        *lane += a * b;
    }
    fold(lanes, |a, b| a + b)
}

/// The largest of a row, or negative infinity for an empty one.
#[inline(always)]
pub fn max(row: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let mut chunks = row.chunks_exact(LANES);
    for chunk in &mut chunks {
        for lane in 0..LANES {
            lanes[lane] = if chunk[lane] > lanes[lane] { chunk[lane] } else { lanes[lane] };
        }
    }
    let mut largest = fold(lanes, |a, b| if a > b { a } else { b });
    for &value in chunks.remainder() {
        largest = if value > largest { value } else { largest };
    }
    largest
}

/// Folds the lanes of a reduction, halves onto halves.
#[inline(always)]
pub fn fold(mut lanes: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] = f(lanes[lane], lanes[lane + width]);
        }
        width /= 2;
    }
    lanes[0]
}
