//! Element types.
//!
//! Floating-point work happens in `F32`, `BF16` and `F16`; the integer types carry indices, labels and masks.

use half::{bf16, f16};

/// The type of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// 32-bit float.
    F32,
    /// 16-bit brain float: the range of `F32`, 8 bits of precision.
    BF16,
    /// 16-bit IEEE float.
    F16,
    /// 64-bit signed integer.
    I64,
    /// 32-bit signed integer.
    I32,
    /// 8-bit unsigned integer.
    U8,
    /// One byte, 0 or 1.
    Bool,
}

impl DType {
    /// Bytes of one element.
    #[inline]
    pub const fn size_bytes(self) -> usize {
        match self {
            DType::I64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::BF16 | DType::F16 => 2,
            DType::U8 | DType::Bool => 1,
        }
    }

    /// Whether gradients can flow through this type.
    #[inline]
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::BF16 | DType::F16)
    }

    /// The short name used in messages and files.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::BF16 => "bf16",
            DType::F16 => "f16",
            DType::I64 => "i64",
            DType::I32 => "i32",
            DType::U8 => "u8",
            DType::Bool => "bool",
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A Rust type that a tensor can hold.
pub trait Element: bytemuck::Pod + Send + Sync + PartialEq + std::fmt::Debug {
    /// Its tag.
    const DTYPE: DType;
}

/// An element that computes: every kernel widens it to `f32`, works there and rounds once on the way out.
pub trait Float: Element {
    /// Widens, exactly.
    fn widen(self) -> f32;
    /// Rounds to nearest, ties to even.
    fn narrow(value: f32) -> Self;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
}
impl Element for bf16 {
    const DTYPE: DType = DType::BF16;
}
impl Element for f16 {
    const DTYPE: DType = DType::F16;
}
impl Element for i64 {
    const DTYPE: DType = DType::I64;
}
impl Element for i32 {
    const DTYPE: DType = DType::I32;
}
impl Element for u8 {
    const DTYPE: DType = DType::U8;
}

impl Float for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
    #[inline(always)]
    fn narrow(value: f32) -> f32 {
        value
    }
}

impl Float for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    // Integer arithmetic without branches, so that loops over it vectorise on every instruction set.
    #[inline(always)]
    fn narrow(value: f32) -> bf16 {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let quiet_nan = (bits >> 16) | 0x40;
        let is_nan = (bits & 0x7fff_ffff) > 0x7f80_0000;
        bf16::from_bits(if is_nan { quiet_nan } else { rounded } as u16)
    }
}

impl Float for f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        let bits = u32::from(self.to_bits());
        let sign = (bits & 0x8000) << 16;
        let magnitude = bits & 0x7fff;
        // Normal numbers: move the exponent over. Multiplying by 2^112 re-biases it and also scales subnormals exactly.
        let scaled = f32::from_bits(magnitude << 13) * f32::from_bits(0x7780_0000);
        let special = f32::from_bits((magnitude << 13) | 0x7f80_0000);
        let value = if magnitude >= 0x7c00 { special } else { scaled };
        f32::from_bits(value.to_bits() | sign)
    }
    #[inline(always)]
    fn narrow(value: f32) -> f16 {
        let bits = value.to_bits();
        let sign = (bits >> 16) & 0x8000;
        let magnitude = bits & 0x7fff_ffff;
        // Subnormal results: adding 0.5 lets the float adder round at the right bit.
        let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0x3f00_0000);
        let normal = magnitude.wrapping_add(0xc800_0fff_u32.wrapping_add((magnitude >> 13) & 1)) >> 13;
        let special = if magnitude > 0x7f80_0000 { 0x7e00 } else { 0x7c00 };
        let rounded = if magnitude >= 0x4780_0000 {
            special
        } else if magnitude < 0x3880_0000 {
            subnormal
        } else {
            normal
        };
        f16::from_bits((sign | rounded) as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_widens_and_narrows_like_the_half_crate() {
        for bits in 0..=u16::MAX {
            let value = f16::from_bits(bits);
            let wide = value.widen();
            assert!(
                wide.to_bits() == value.to_f32().to_bits() || (wide.is_nan() && value.is_nan()),
                "{bits:#x}: {wide}"
            );
            if !value.is_nan() {
                assert_eq!(<f16 as Float>::narrow(wide).to_bits(), bits);
            }
        }
    }

    #[test]
    fn narrowing_rounds_to_nearest_even_like_the_half_crate() {
        let mut bits = 0u32;
        for _ in 0..400_000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let value = f32::from_bits(bits);
            if value.is_nan() {
                assert!(<f16 as Float>::narrow(value).is_nan() && <bf16 as Float>::narrow(value).is_nan());
                continue;
            }
            assert_eq!(<f16 as Float>::narrow(value).to_bits(), f16::from_f32(value).to_bits(), "{value:e}");
            assert_eq!(
                <bf16 as Float>::narrow(value).to_bits(),
                bf16::from_f32(value).to_bits(),
                "{value:e}"
            );
        }
    }
}
