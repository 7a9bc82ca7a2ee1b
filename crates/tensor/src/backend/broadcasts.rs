//! Operations on tensors whose shapes meet, and back.

use crate::backend::Memory;
use crate::error::Result;
use crate::out::Out;
use crate::tensor::Tensor;

/// Elementwise functions of two operands, with broadcasting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Binary {
    /// `a + b`
    Add,
    /// `a - b`
    Sub,
    /// `a · b`
    Mul,
    /// `a / b`
    Div,
    /// `max(a, b)`
    Max,
    /// `min(a, b)`
    Min,
}

/// Comparisons, with broadcasting; the result is `Bool`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Comparison {
    /// `a = b`
    Equal,
    /// `a < b`
    Less,
    /// `a ≤ b`
    LessEqual,
}

/// Element by element of tensors that differ in shape.
pub trait Broadcasts: Memory {
    /// Elementwise with broadcasting.
    fn binary(&self, op: Binary, a: &Tensor, b: &Tensor, y: Out<'_>) -> Result<()>;
    /// Elementwise comparison with broadcasting.
    fn compare(&self, op: Comparison, a: &Tensor, b: &Tensor, y: Out<'_>) -> Result<()>;
    /// `y = condition ? a : b` with broadcasting of all three.
    fn select(&self, condition: &Tensor, a: &Tensor, b: &Tensor, y: Out<'_>) -> Result<()>;
    /// Sums `x` down to `y`'s shape, undoing a broadcast.
    fn sum_to(&self, x: &Tensor, y: Out<'_>) -> Result<()>;
}
