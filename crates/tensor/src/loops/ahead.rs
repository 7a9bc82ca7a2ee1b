//! Asking for memory before it is needed.
//!
//! The processor notices by itself that memory is read in order, but begins anew at each 4 KiB, inside huge pages too. A pass
//! over several long arrays that asks for what comes later runs half as fast again (AdamW over four of them on one core:
//! 22 to 34 GB/s).

/// Elements that a loop takes at a time, asking for what comes later of as many.
pub const TOGETHER: usize = 64;

/// How far ahead: 1.5 to 3 KiB are alike, 768 bytes are too little.
const DISTANCE_BYTES: usize = 2048;

/// Asks for what lies a fixed distance after `array[start..start + N]`, which may be past its end.
#[inline(always)]
pub fn ask_ahead<T, const N: usize>(array: &[T], start: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        const LINE_BYTES: usize = 64;
        let first = array.as_ptr().wrapping_add(start).wrapping_byte_add(DISTANCE_BYTES);
        for offset in (0..size_of::<[T; N]>()).step_by(LINE_BYTES) {
            // SAFETY: asking for memory touches nothing.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(first.wrapping_byte_add(offset).cast()) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (array, start);
}
