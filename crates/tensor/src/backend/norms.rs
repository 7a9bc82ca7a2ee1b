//! Norms of rows.

use crate::backend::Memory;
use crate::error::Result;
use crate::out::Out;
use crate::tensor::Tensor;

/// Which normalisation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NormKind {
    /// Mean and variance, with weight and bias.
    Layer,
    /// Root mean square, with weight.
    Rms,
}

/// Normalised rows.
pub trait Norms: Memory {
    /// Normalises rows of `x`, or of `x + residual` (then kept in `sum`); statistics go to `mean` and `rstd` (f32).
    fn norm(
        &self,
        kind: NormKind,
        eps: f32,
        x: &Tensor,
        residual: Option<(&Tensor, Out<'_>)>,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        y: Out<'_>,
        mean: Out<'_>,
        rstd: Out<'_>,
    ) -> Result<()>;
    /// Gradients of [`Norms::norm`]; `dsum` is what reaches the sum by other ways and is added to `dx`.
    fn norm_backward(
        &self,
        kind: NormKind,
        x: &Tensor,
        weight: Option<&Tensor>,
        mean: &Tensor,
        rstd: &Tensor,
        dy: &Tensor,
        dsum: Option<&Tensor>,
        dx: Out<'_>,
        dweight: Option<Out<'_>>,
        dbias: Option<Out<'_>>,
    ) -> Result<()>;
}
