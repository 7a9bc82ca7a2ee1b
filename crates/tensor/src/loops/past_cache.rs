//! Stores past the cache.
//!
//! An ordinary store first fetches the line that it overwrites. Where much is written that nobody reads soon, that fetch
//! is traffic for nothing: such a result may be streamed instead. What is streamed is the same to the last bit.

use crate::dtype::Element;

/// Results of this many bytes are not read again before they have left the cache.
pub const STREAM_FROM_BYTES: usize = 32 << 20;

/// Runs `work`, which may stream. When this returns, everything that was streamed is there for other threads.
pub fn streaming<R>(work: impl FnOnce(&Stream) -> R) -> R {
    work(&Stream(()))
}

/// What [`streaming`] lends out.
#[derive(Debug)]
pub struct Stream(());

impl Stream {
    /// Copies `values` to `target`, past the cache where its start is aligned for that.
    ///
    /// # Panics
    /// When the lengths differ: a bug of the caller.
    #[inline(always)]
    pub fn write<T: Element, const N: usize>(&self, target: &mut [T], values: &[T; N]) {
        assert_eq!(target.len(), N);
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
            let to = target.as_mut_ptr().cast::<__m128i>();
            if to.is_aligned() && size_of_val(values).is_multiple_of(size_of::<__m128i>()) {
                let from = values.as_ptr().cast::<__m128i>();
                for at in 0..size_of_val(values) / size_of::<__m128i>() {
                    // SAFETY: both hold that many registers; the target is aligned and borrowed alone, and before it is
                    // another thread's to read, `drop` fences.
                    unsafe { _mm_stream_si128(to.add(at), _mm_loadu_si128(from.add(at))) };
                }
                return;
            }
        }
        target.copy_from_slice(values);
    }
}

impl Drop for Stream {
    #[inline(always)]
    fn drop(&mut self) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: every processor of this kind has the instruction.
        unsafe {
            std::arch::x86_64::_mm_sfence();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_arrives_and_no_other_is_touched() {
        for offset in 0..20 {
            let mut target = vec![7i32; 64];
            let values: [i32; 32] = std::array::from_fn(|i| i as i32 - 5);
            streaming(|stream| stream.write(&mut target[offset..offset + 32], &values));
            assert_eq!(target[offset..offset + 32], values);
            assert!(target[..offset].iter().chain(&target[offset + 32..]).all(|&value| value == 7));
        }
    }
}
