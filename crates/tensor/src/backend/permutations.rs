//! Dimensions in another order.

use crate::backend::Memory;
use crate::error::Result;
use crate::out::Out;
use crate::tensor::Tensor;

/// Other orders of dimensions.
pub trait Permutations: Memory {
    /// Reorders dimensions.
    fn permute(&self, x: &Tensor, order: &[usize], y: Out<'_>) -> Result<()>;
}
