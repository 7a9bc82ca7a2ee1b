//! Element types and reduction operators.
//!
//! `comm` moves bytes; it needs an element type only where it reduces, and in the fingerprint that guards every
//! operation. [`Element`] ties a Rust type to its [`DType`] for the calls on typed slices. `bool` has no `Element`:
//! a byte that a peer sends may be neither 0 nor 1, so booleans travel as `u8` with [`DType::Bool`].

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The type of one element.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum DType {
    /// IEEE single precision.
    F32 = 1,
    /// IEEE double precision.
    F64,
    /// bfloat16; reductions accumulate in `f32` and round once.
    BF16,
    /// IEEE half precision; reductions accumulate in `f32` and round once.
    F16,
    /// Signed 8-bit integer; sums and products wrap, as for every integer type.
    I8,
    /// Signed 16-bit integer.
    I16,
    /// Signed 32-bit integer.
    I32,
    /// Signed 64-bit integer.
    I64,
    /// Unsigned 8-bit integer.
    U8,
    /// One byte, 0 or 1: sum, max and or are logical OR; product, min and and are logical AND.
    Bool,
}

impl DType {
    /// Every type.
    pub const ALL: [DType; 10] = [
        DType::F32,
        DType::F64,
        DType::BF16,
        DType::F16,
        DType::I8,
        DType::I16,
        DType::I32,
        DType::I64,
        DType::U8,
        DType::Bool,
    ];

    /// Bytes per element.
    pub const fn size(self) -> usize {
        match self {
            DType::I8 | DType::U8 | DType::Bool => 1,
            DType::BF16 | DType::F16 | DType::I16 => 2,
            DType::F32 | DType::I32 => 4,
            DType::F64 | DType::I64 => 8,
        }
    }

    /// Whether this is a floating-point type.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F64 | DType::BF16 | DType::F16)
    }

    /// The lower-case name, as it appears in fingerprints and reports.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::BF16 => "bf16",
            DType::F16 => "f16",
            DType::I8 => "i8",
            DType::I16 => "i16",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::U8 => "u8",
            DType::Bool => "bool",
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<DType> {
        DType::ALL.into_iter().find(|dtype| *dtype as u8 == code)
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.name())
    }
}

/// How elements of several ranks become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum ReduceOp {
    /// `((r0 + r1) + r2) + …`, always in this order.
    Sum = 1,
    /// The sum divided by the number of ranks, before the one rounding. Floating-point types only.
    Avg,
    /// The smallest element; a NaN on any rank gives NaN.
    Min,
    /// The largest element; a NaN on any rank gives NaN.
    Max,
    /// `((r0 · r1) · r2) · …`.
    Product,
    /// Bitwise and. Integer types and booleans only.
    BitAnd,
    /// Bitwise or. Integer types and booleans only.
    BitOr,
}

impl ReduceOp {
    /// Every operator.
    pub const ALL: [ReduceOp; 7] = [
        ReduceOp::Sum,
        ReduceOp::Avg,
        ReduceOp::Min,
        ReduceOp::Max,
        ReduceOp::Product,
        ReduceOp::BitAnd,
        ReduceOp::BitOr,
    ];

    /// Whether the operator is defined on the type.
    pub const fn supports(self, dtype: DType) -> bool {
        match self {
            ReduceOp::Avg => dtype.is_float(),
            ReduceOp::BitAnd | ReduceOp::BitOr => !dtype.is_float(),
            ReduceOp::Sum | ReduceOp::Min | ReduceOp::Max | ReduceOp::Product => true,
        }
    }

    pub(crate) fn check(self, dtype: DType) -> Result<()> {
        if self.supports(dtype) { Ok(()) } else { Err(Error::UnsupportedReduction { op: self, dtype }) }
    }

    /// The name in fingerprints and reports.
    pub const fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Avg => "avg",
            ReduceOp::Min => "min",
            ReduceOp::Max => "max",
            ReduceOp::Product => "product",
            ReduceOp::BitAnd => "bit_and",
            ReduceOp::BitOr => "bit_or",
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<ReduceOp> {
        ReduceOp::ALL.into_iter().find(|op| *op as u8 == code)
    }
}

impl std::fmt::Display for ReduceOp {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.name())
    }
}

/// A Rust type that the typed calls accept.
pub trait Element: bytemuck::Pod {
    /// Its element type.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($rust:ty => $dtype:ident),* $(,)?) => {
        $(impl Element for $rust {
            const DTYPE: DType = DType::$dtype;
        })*
    };
}

elements! {
    f32 => F32, f64 => F64, bf16 => BF16, f16 => F16,
    i8 => I8, i16 => I16, i32 => I32, i64 => I64, u8 => U8,
}
