//! Values as small integers: what travels and what is stored in 8 or 4 bits.
//!
//! Values are cut into groups of neighbours. Each group has a step (what one unit of its integers is worth) and, where it
//! is *asymmetric*, an offset: the middle of its range. With b bits, `q = clamp(round((x − offset) / step), −2^(b−1),
//! 2^(b−1) − 1)`, ties to even, and `x ≈ q · step + offset`. A symmetric step maps the largest magnitude to 2^(b−1), which
//! the clamp takes back by one where it is positive.
//!
//! Two 4-bit integers share a byte, the first in its upper half. A group that holds what is no number comes back as
//! nothing but NaN: a quantised gradient must not hide an overflow. Everything works on slices on the calling thread; a
//! group depends on its own values alone, so whoever has threads cuts between groups.
//!
//! ```
//! use ferrospeed_tensor::quantize::{Bits, Format, Quantized};
//!
//! let format = Format { bits: Bits::Four, symmetric: true };
//! let (mut packed, mut params) = ([0u8; 2], [0.0f32; 1]);
//! format.quantize(&[1.0f32, -4.0, 0.6, 0.0], 4, &mut packed, &mut params);
//! let mut back = [0.0f32; 4];
//! format.dequantize(Quantized { packed: &packed, params: &params }, 4, &mut back);
//! assert_eq!(back, [1.0, -4.0, 0.5, 0.0]);
//! ```

use crate::dtype::Float;
use crate::loops::ahead::ask_ahead;
use crate::loops::simd::vectorized;

/// Elements that are worked on at a time, on the stack. Even, so that no byte is cut.
const TILE: usize = 256;
/// Lanes of a maximum.
const LANES: usize = 64;
/// 1.5 · 2²³: see its use.
const ROUNDER: f32 = 12_582_912.0;

/// How large the integers are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bits {
    /// Two per byte.
    Four,
    /// One per byte.
    Eight,
}

/// How values become integers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Format {
    /// How large they are.
    pub bits: Bits,
    /// Whether zero is the middle of every group's range.
    pub symmetric: bool,
}

/// What [`Format::quantize`] made.
#[derive(Debug, Clone, Copy)]
pub struct Quantized<'a> {
    /// The integers.
    pub packed: &'a [u8],
    /// The steps, or steps and offsets in turn, by group.
    pub params: &'a [f32],
}

impl Format {
    /// Numbers that each group has beside its integers.
    pub const fn params_per_group(self) -> usize {
        if self.symmetric { 1 } else { 2 }
    }

    /// Bytes that so many elements take, in groups of an even number of elements.
    pub const fn packed_len(self, numel: usize) -> usize {
        match self.bits {
            Bits::Eight => numel,
            Bits::Four => numel.div_ceil(2),
        }
    }

    /// Numbers beside the integers of so many elements in groups of `group`; the last group may be shorter.
    pub const fn params_len(self, numel: usize, group: usize) -> usize {
        numel.div_ceil(group) * self.params_per_group()
    }

    /// Half the number of integers: the least is minus this, the largest one less.
    fn half_range(self) -> f32 {
        match self.bits {
            Bits::Four => 8.0,
            Bits::Eight => 128.0,
        }
    }

    /// # Panics
    /// When lengths do not fit, or a group of 4-bit integers would end inside a byte: a bug of the caller.
    fn check(self, numel: usize, group: usize, packed: usize, params: usize) {
        assert!(group > 0, "a group holds at least one element");
        assert!(self.bits == Bits::Eight || group.is_multiple_of(2), "a group of {group} ends inside a byte");
        assert_eq!(packed, self.packed_len(numel), "bytes of {numel} elements");
        assert_eq!(params, self.params_len(numel, group), "numbers of {numel} elements in groups of {group}");
    }

    /// Quantises values in groups of `group` elements.
    ///
    /// # Panics
    /// When lengths do not fit: a bug of the caller.
    pub fn quantize<T: Float>(self, values: &[T], group: usize, packed: &mut [u8], params: &mut [f32]) {
        self.quantize_by(values, group, packed, params, |values| match self.symmetric {
            true => (self.around_zero(values).0, 0.0),
            false => self.spanned(values),
        });
    }

    /// As [`Format::quantize`] for a symmetric format, with a negative step in groups whose largest magnitude is positive:
    /// it becomes the least integer, which there is, so that it is not clamped. Integers of four bits lose an eighth of
    /// it otherwise, and what is quantised again shrinks each time.
    ///
    /// # Panics
    /// When lengths do not fit, or the format is not symmetric: a bug of the caller.
    pub fn quantize_turned<T: Float>(
        self,
        values: &[T],
        group: usize,
        packed: &mut [u8],
        params: &mut [f32],
    ) {
        assert!(self.symmetric, "only what lies around zero can be turned");
        self.quantize_by(values, group, packed, params, |values| {
            let (scale, is_positive) = self.around_zero(values);
            (if is_positive { -scale } else { scale }, 0.0)
        });
    }

    /// Quantises groups by the scale and the offset of each.
    fn quantize_by<T: Float>(
        self,
        values: &[T],
        group: usize,
        packed: &mut [u8],
        params: &mut [f32],
        range: impl Fn(&[T]) -> (f32, f32),
    ) {
        self.check(values.len(), group, packed.len(), params.len());
        let params = params.chunks_exact_mut(self.params_per_group());
        let packed = packed.chunks_mut(self.packed_len(group));
        for ((values, packed), params) in values.chunks(group).zip(packed).zip(params) {
            let (scale, offset) = range(values);
            params[0] = 1.0 / scale;
            if let Some(at) = params.get_mut(1) {
                *at = offset;
            }
            vectorized!(|| self.pack(values, scale, offset, packed));
        }
    }

    /// The scale of a symmetric group, and whether its largest magnitude is that of a positive value.
    fn around_zero<T: Float>(self, values: &[T]) -> (f32, bool) {
        // As integers, magnitudes are ordered as they are, and NaN comes after all.
        let mut lanes = [0u32; LANES];
        vectorized!(|| largest_bits(values, &mut lanes));
        let found = lanes.into_iter().max().unwrap_or(0);
        let largest = f32::from_bits(found >> 1);
        let scale = if largest == 0.0 { 1.0 } else { 2.0 * self.half_range() / (2.0 * largest) };
        (if largest.is_finite() { scale } else { f32::NAN }, found & 1 == 1)
    }

    /// The scale and the offset of an asymmetric group.
    fn spanned<T: Float>(self, values: &[T]) -> (f32, f32) {
        let (mut least, mut most) = (f32::INFINITY, f32::NEG_INFINITY);
        for value in values {
            let value = value.widen();
            if !value.is_finite() {
                return (f32::NAN, f32::NAN);
            }
            (least, most) = (least.min(value), most.max(value));
        }
        let scale = if most == least { 1.0 } else { 2.0 * self.half_range() / (most - least) };
        (scale, (most + least) / 2.0)
    }

    #[inline(always)]
    fn pack<T: Float>(self, values: &[T], scale: f32, offset: f32, packed: &mut [u8]) {
        let (least, most) = (-self.half_range(), self.half_range() - 1.0);
        let mut integers = [0u8; TILE];
        for (values, packed) in values.chunks(TILE).zip(packed.chunks_mut(self.packed_len(TILE))) {
            let integers = &mut integers[..values.len().next_multiple_of(2)];
            for (integer, value) in integers.iter_mut().zip(values) {
                let scaled = (value.widen() - offset) * scale;
                let scaled = if scaled > least { scaled } else { least };
                let scaled = if scaled < most { scaled } else { most };
                // Beside a number this large an f32 has no digits after the point: the sum rounds, ties to even, and its
                // lowest byte is the integer.
                *integer = (scaled + ROUNDER).to_bits() as u8;
            }
            match self.bits {
                Bits::Eight => packed.copy_from_slice(&integers[..values.len()]),
                Bits::Four => {
                    integers[values.len()..].fill(0);
                    // As words of both, whose halves become bytes in one instruction.
                    for (byte, &both) in packed.iter_mut().zip(integers.as_chunks::<2>().0) {
                        let both = u16::from_le_bytes(both);
                        *byte = (both << 4 | both >> 8 & 0xf) as u8;
                    }
                }
            }
        }
    }

    /// Gives the values back, as nearly as they were kept.
    ///
    /// # Panics
    /// When lengths do not fit: a bug of the caller.
    pub fn dequantize<T: Float>(self, source: Quantized<'_>, group: usize, out: &mut [T]) {
        self.dequantize_sum(&[source], group, 1.0, out);
    }

    /// The sum of what several ranks quantised, times `factor`, in one pass. Each rank's values are rounded to the type of
    /// the result first; the sum is in f32, in the order of the sources.
    ///
    /// # Panics
    /// When lengths do not fit: a bug of the caller.
    pub fn dequantize_sum<T: Float>(
        self,
        sources: &[Quantized<'_>],
        group: usize,
        factor: f32,
        out: &mut [T],
    ) {
        self.sum_into::<T, T>(sources, group, factor, out);
    }

    /// The same without that rounding: values are added up in f32 as they come.
    ///
    /// # Panics
    /// When lengths do not fit: a bug of the caller.
    pub fn dequantize_exact_sum<T: Float>(
        self,
        sources: &[Quantized<'_>],
        group: usize,
        factor: f32,
        out: &mut [T],
    ) {
        self.sum_into::<f32, T>(sources, group, factor, out);
    }

    /// Adds up values that are rounded to `R` first.
    fn sum_into<R: Float, T: Float>(
        self,
        sources: &[Quantized<'_>],
        group: usize,
        factor: f32,
        out: &mut [T],
    ) {
        sources.iter().for_each(|s| self.check(out.len(), group, s.packed.len(), s.params.len()));
        for (index, out) in out.chunks_mut(group).enumerate() {
            vectorized!(|| self.sum_group::<R, T>(sources, index, group, factor, out));
        }
    }

    #[inline(always)]
    fn sum_group<R: Float, T: Float>(
        self,
        sources: &[Quantized<'_>],
        index: usize,
        group: usize,
        factor: f32,
        out: &mut [T],
    ) {
        let per_group = self.params_per_group();
        for (tile, out) in out.chunks_mut(TILE).enumerate() {
            let bytes = self.packed_len(index * group + tile * TILE);
            let bytes = bytes..bytes + self.packed_len(out.len());
            let mut sum = [0.0f32; TILE];
            ask_ahead::<T, TILE>(out, 0);
            for source in sources {
                let params = &source.params[index * per_group..(index + 1) * per_group];
                let (step, offset) = (params[0], params.get(1).copied().unwrap_or(0.0));
                self.add::<R>(&source.packed[bytes.clone()], step, offset, &mut sum[..out.len()]);
            }
            out.iter_mut().zip(&sum).for_each(|(out, sum)| *out = T::narrow(sum * factor));
        }
    }

    #[inline(always)]
    fn add<R: Float>(self, packed: &[u8], step: f32, offset: f32, sum: &mut [f32]) {
        let value = |integer: i8| R::narrow(f32::from(integer) * step + offset).widen();
        match self.bits {
            Bits::Eight => {
                sum.iter_mut().zip(packed).for_each(|(sum, &byte)| *sum += value(byte as i8));
            }
            Bits::Four => {
                let (pairs, rest) = sum.as_chunks_mut::<2>();
                for ([first, second], &byte) in pairs.iter_mut().zip(packed) {
                    *first += value(byte as i8 >> 4);
                    *second += value((byte << 4) as i8 >> 4);
                }
                if let ([last], Some(&byte)) = (rest, packed.last()) {
                    *last += value(byte as i8 >> 4);
                }
            }
        }
    }
}

/// The largest magnitude's bits, and below them whether it is positive. Lanes are put together by the caller: with that in it, it
/// was too large to be compiled into what chooses the instructions.
#[inline(always)]
fn largest_bits<T: Float>(values: &[T], found: &mut [u32; LANES]) {
    let bits = |value: &T| {
        let bits = value.widen().to_bits();
        bits << 1 | (!bits >> 31)
    };
    // A variable of its own stays in registers.
    let mut lanes = *found;
    let mut rows = values.chunks_exact(LANES);
    for row in &mut rows {
        // Here a group is read from memory; packing finds it in the cache.
        ask_ahead::<T, LANES>(row, 0);
        for (lane, value) in lanes.iter_mut().zip(row) {
            *lane = (*lane).max(bits(value));
        }
    }
    for (lane, value) in lanes.iter_mut().zip(rows.remainder()) {
        *lane = (*lane).max(bits(value));
    }
    *found = lanes;
}
