//! The 2-norm of a vector that is spread over ranks, the same to the last bit however it is spread.
//!
//! Floating-point sums depend on their order; sums of integers do not. The squares are therefore scaled by a power
//! of two taken from the largest magnitude of the *whole* vector, rounded to integers, and added as integers. The
//! rounding of one square loses less than 2⁻⁵⁰ of the largest square.
//!
//! A global norm is two exchanges: the maximum of [`Magnitude`], then the sum of [`SquareSum`].

use ferrospeed_tensor::Device;
use ferrospeed_tensor::dtype::Float;
use ferrospeed_tensor::loops::ahead::{TOGETHER, ask_ahead};
use ferrospeed_tensor::loops::simd::{LANES, vectorized};

use crate::stretch::Gradient;

/// The largest magnitude of a vector, or the fact that it holds something that is no number.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Magnitude(f32);

impl Magnitude {
    /// Of no element.
    pub const ZERO: Magnitude = Magnitude(0.0);

    /// As a number to exchange; infinity or NaN somewhere is infinity.
    pub fn value(self) -> f32 {
        self.0
    }

    /// Back from an exchanged number.
    pub fn from_value(value: f32) -> Magnitude {
        Magnitude(if value.is_nan() { f32::INFINITY } else { value })
    }

    /// Whether every element is a number.
    pub fn is_finite(self) -> bool {
        self.0.is_finite()
    }

    /// What squares are multiplied by: the power of two that brings the largest to between 2⁵⁰ and 2⁵².
    pub fn grid(self) -> f64 {
        if self.0 == 0.0 || !self.is_finite() {
            return 1.0;
        }
        let exponent = f64::from(self.0).log2().floor() as i32;
        2f64.powi(50 - 2 * exponent)
    }

    /// The larger of two.
    pub fn max(self, other: Magnitude) -> Magnitude {
        Magnitude(self.0.max(other.0))
    }

    /// Of a gradient.
    pub fn of(gradient: Gradient<'_>, device: &Device) -> Magnitude {
        match gradient {
            Gradient::F32(values) => largest(values, device),
            Gradient::Bf16(values) => largest(values, device),
            Gradient::F16(values) => largest(values, device),
        }
    }
}

const BLOCK: usize = 64 * 1024;

fn largest<T: Float>(values: &[T], device: &Device) -> Magnitude {
    let blocks = values.len().div_ceil(BLOCK);
    let found: Vec<std::sync::atomic::AtomicU32> = (0..blocks).map(|_| Default::default()).collect();
    device.backend().parallel(blocks, &|index| {
        let block = &values[index * BLOCK..((index + 1) * BLOCK).min(values.len())];
        // Among non-negative floats the order is that of their bits, and NaN and infinity are above all numbers.
        let bits = vectorized!(|| largest_bits(block));
        found[index].store(bits, std::sync::atomic::Ordering::Relaxed);
    });
    let bits = found.into_iter().map(std::sync::atomic::AtomicU32::into_inner).max().unwrap_or(0);
    Magnitude::from_value(f32::from_bits(bits))
}

/// The largest of values without their signs, as bits.
#[inline(always)]
fn largest_bits<T: Float>(values: &[T]) -> u32 {
    let bits = |value: &T| value.widen().to_bits() & 0x7fff_ffff;
    let mut lanes = [0u32; TOGETHER];
    let (rows, rest) = values.as_chunks::<TOGETHER>();
    for row in rows {
        ask_ahead::<T, TOGETHER>(row, 0);
        lanes.iter_mut().zip(row).for_each(|(most, value)| *most = (*most).max(bits(value)));
    }
    lanes.into_iter().chain(rest.iter().map(bits)).max().unwrap_or(0)
}

/// How many words carry a [`SquareSum`] in an exchange.
pub const WORDS: usize = 4;

/// A sum of squares as integers on a grid that [`Magnitude`] fixed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SquareSum(i128);

impl SquareSum {
    /// Of a gradient, on the grid of the whole vector's magnitude.
    pub fn of(gradient: Gradient<'_>, whole: Magnitude, device: &Device) -> SquareSum {
        match gradient {
            Gradient::F32(values) => squares(values, whole, device),
            Gradient::Bf16(values) => squares(values, whole, device),
            Gradient::F16(values) => squares(values, whole, device),
        }
    }

    /// A sum that a device has taken, on the grid of [`Magnitude::grid`].
    pub fn from_sum(sum: i128) -> SquareSum {
        SquareSum(sum)
    }

    /// Words whose sums over ranks, each taken as an integer, are the words of the summed value.
    pub fn to_words(self) -> [i64; WORDS] {
        // 31 bits per word leave room for 2³² ranks.
        std::array::from_fn(|word| ((self.0 >> (31 * word)) & 0x7fff_ffff) as i64)
    }

    /// Back from summed words.
    pub fn from_words(words: [i64; WORDS]) -> SquareSum {
        SquareSum(words.iter().enumerate().map(|(word, &value)| i128::from(value) << (31 * word)).sum())
    }

    /// The norm.
    pub fn norm(self, whole: Magnitude) -> f64 {
        if !whole.is_finite() {
            return f64::INFINITY;
        }
        (self.0 as f64 / whole.grid()).sqrt()
    }
}

impl std::ops::Add for SquareSum {
    type Output = SquareSum;
    fn add(self, other: SquareSum) -> SquareSum {
        SquareSum(self.0 + other.0)
    }
}

/// The squares of `scale · value`, each rounded to an integer below 2⁵², summed in lanes that become vectors. `scale` is a power of
/// two, so that nothing is rounded before. No sum of so few overflows; to test for it would take longer than the sum.
#[inline(always)]
fn sum_of_squares<T: Float>(values: &[T], scale: f64) -> i64 {
    // From 2⁵² on a float's last bit is worth one: adding this rounds, and leaves the integer in the last bits. A conversion would
    // test for what cannot be. The bits above are taken off all at once.
    const UNIT: f64 = (1u64 << 52) as f64;
    let square = |value: &T| {
        let scaled = f64::from(value.widen()) * scale;
        (scaled * scaled + UNIT).to_bits()
    };
    let mut lanes = [0u64; LANES];
    let (rows, rest) = values.as_chunks::<TOGETHER>();
    for row in rows {
        ask_ahead::<T, TOGETHER>(row, 0);
        for row in row.as_chunks::<LANES>().0 {
            lanes.iter_mut().zip(row).for_each(|(lane, value)| *lane = lane.wrapping_add(square(value)));
        }
    }
    let sum = lanes.into_iter().chain(rest.iter().map(square)).fold(0, u64::wrapping_add);
    sum.wrapping_sub(UNIT.to_bits().wrapping_mul(values.len() as u64)) as i64
}

fn squares<T: Float>(values: &[T], whole: Magnitude, device: &Device) -> SquareSum {
    if !whole.is_finite() {
        return SquareSum::default();
    }
    // An even power of two has an exact root.
    let scale = whole.grid().sqrt();
    let blocks = values.len().div_ceil(BLOCK);
    let found: Vec<std::sync::Mutex<i128>> = (0..blocks).map(|_| Default::default()).collect();
    device.backend().parallel(blocks, &|index| {
        let block = &values[index * BLOCK..((index + 1) * BLOCK).min(values.len())];
        // A 64-bit sum holds 2¹⁰ squares below 2⁵³.
        let sum =
            block.chunks(1024).map(|chunk| i128::from(vectorized!(|| sum_of_squares(chunk, scale)))).sum();
        *found[index].lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = sum;
    });
    let sums = found.into_iter().map(|sum| sum.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()));
    SquareSum(sums.sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(count: usize) -> Vec<f32> {
        let mut state = 1u32;
        (0..count)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / 8_388_608.0 - 1.0
            })
            .collect()
    }

    #[test]
    fn any_split_gives_the_same_bits_and_the_true_norm() {
        let (values, device) = (values(300_001), ferrospeed_cpu::device());
        let truth = values.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>().sqrt();
        let whole = Magnitude::of(Gradient::F32(&values), &device);
        let once = SquareSum::of(Gradient::F32(&values), whole, &device).norm(whole);
        assert!((once - truth).abs() < 1e-9 * truth);
        for cut in [1, 17, 100_000, 299_999] {
            let (left, right) = values.split_at(cut);
            let parts =
                [left, right].map(|part| SquareSum::of(Gradient::F32(part), whole, &device).to_words());
            let summed = std::array::from_fn(|word| parts[0][word] + parts[1][word]);
            assert_eq!(SquareSum::from_words(summed).norm(whole).to_bits(), once.to_bits());
        }
    }

    /// As it is defined, without vectors: 1,031 values are whole rows, lanes and a rest.
    #[test]
    fn each_square_is_rounded_to_the_grid() {
        let device = ferrospeed_cpu::device();
        for scale in [1.0, 3e-30, 7e30] {
            let values: Vec<f32> = values(1_031).into_iter().map(|value| value * scale).collect();
            let whole = Magnitude::of(Gradient::F32(&values), &device);
            assert_eq!(whole.value(), values.iter().fold(0.0, |most: f32, value| most.max(value.abs())));
            let square = |value: f32| (f64::from(value).powi(2) * whole.grid()).round_ties_even() as i128;
            let expected = SquareSum(values.iter().map(|&value| square(value)).sum());
            assert_eq!(SquareSum::of(Gradient::F32(&values), whole, &device), expected, "times {scale}");
        }
    }

    #[test]
    fn what_is_no_number_is_found() {
        let device = ferrospeed_cpu::device();
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(!Magnitude::of(Gradient::F32(&[1.0, bad, 2.0]), &device).is_finite());
        }
        let zero = Magnitude::of(Gradient::F32(&[0.0; 5]), &device);
        assert_eq!(SquareSum::of(Gradient::F32(&[0.0; 5]), zero, &device).norm(zero), 0.0);
        let tiny = Magnitude::of(Gradient::F32(&[1e-40]), &device);
        let norm = SquareSum::of(Gradient::F32(&[1e-40]), tiny, &device).norm(tiny);
        assert!((norm - 1e-40).abs() < 1e-44, "{norm:e}");
    }
}
