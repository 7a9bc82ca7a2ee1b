//! What looks at whole rows: norms, reductions, softmax, losses.

use crate::backend::Memory;
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::Tensor;

/// Which normalisation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NormKind {
    /// Mean and variance, with weight and bias.
    Layer,
    /// Root mean square, with weight.
    Rms,
}

/// Reductions over a contiguous middle dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduction {
    /// The sum, accumulated in f32 in a fixed order.
    Sum,
    /// The largest value.
    Max,
    /// The smallest value.
    Min,
}

/// How a cross-entropy is taken.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CrossEntropyOptions {
    /// Targets with this value count for nothing.
    pub ignore_index: i64,
    /// Share of the probability spread over all classes.
    pub label_smoothing: f32,
    /// Weight of the squared log-partition term.
    pub z_loss: f32,
}

/// Where the gradient of each row's own loss goes: not of their mean, which small types could not hold.
#[derive(Debug, Clone, Copy)]
pub enum LossGradient<'a> {
    /// It is not wanted.
    Nowhere,
    /// It takes the place of the logits.
    OverLogits,
    /// Into a tensor of their shape, rounded to its type.
    Into(&'a Tensor),
}

impl Default for CrossEntropyOptions {
    fn default() -> Self {
        CrossEntropyOptions { ignore_index: -100, label_smoothing: 0.0, z_loss: 0.0 }
    }
}

/// Work on whole rows on a device.
pub trait Sums: Memory {
    /// Normalises rows of `x`, or of `x + residual` (then kept in `sum`); statistics go to `mean` and `rstd` (f32).
    fn norm(
        &self,
        kind: NormKind,
        eps: f32,
        x: &Tensor,
        residual: Option<(&Tensor, &Tensor)>,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        y: &Tensor,
        mean: &Tensor,
        rstd: &Tensor,
    ) -> Result<()>;
    /// Gradients of [`Sums::norm`]; `dsum` is what reaches the sum by other ways and is added to `dx`.
    fn norm_backward(
        &self,
        kind: NormKind,
        x: &Tensor,
        weight: Option<&Tensor>,
        mean: &Tensor,
        rstd: &Tensor,
        dy: &Tensor,
        dsum: Option<&Tensor>,
        dx: &Tensor,
        dweight: Option<&Tensor>,
        dbias: Option<&Tensor>,
    ) -> Result<()>;
    /// The type in which logits of a model in `dtype` are held.
    fn logits_dtype(&self, _dtype: DType) -> DType {
        DType::F32
    }
    /// How many rows of logits, each of this many bytes, a loss should hold at once: enough that the product which makes
    /// them is worth bringing the weight into order for, and little memory beyond that.
    fn logits_rows(&self, row_bytes: usize) -> usize {
        let fitting = |bytes: usize| bytes / row_bytes.max(1);
        fitting(16 << 20).max(fitting(64 << 20).min(256))
    }
    /// Per row of `logits [rows, classes]`, in [`Sums::logits_dtype`]: the loss into `losses [rows]`, and its gradient
    /// where it is wanted. The logits are lost where there is a gradient.
    fn cross_entropy_rows(
        &self,
        options: &CrossEntropyOptions,
        logits: &Tensor,
        targets: &Tensor,
        losses: &Tensor,
        gradient: LossGradient<'_>,
    ) -> Result<()>;
    /// How many of `targets` differ from `ignore_index`, as one `I64`.
    fn count_targets(&self, targets: &Tensor, ignore_index: i64, target: &Tensor) -> Result<()>;
    /// The sum of `losses` in f64 over `counted`, as one f32; zero when none counts.
    fn mean_loss(&self, losses: &Tensor, counted: &Tensor, target: &Tensor) -> Result<()>;
    /// Views `x` as `[outer, size, inner]` and reduces `size` away.
    fn reduce(
        &self,
        op: Reduction,
        x: &Tensor,
        outer: usize,
        size: usize,
        inner: usize,
        y: &Tensor,
    ) -> Result<()>;
    /// Sums `x` down to `y`'s shape, undoing a broadcast.
    fn sum_to(&self, x: &Tensor, y: &Tensor) -> Result<()>;
    /// Softmax over the last dimension (`log`: its logarithm).
    fn softmax(&self, x: &Tensor, y: &Tensor, log: bool) -> Result<()>;
    /// Gradient of [`Sums::softmax`] from its result.
    fn softmax_backward(&self, y: &Tensor, dy: &Tensor, dx: &Tensor, log: bool) -> Result<()>;
    /// Running sums along the last dimension (`reverse`: from the end).
    fn cumsum(&self, x: &Tensor, y: &Tensor, reverse: bool) -> Result<()>;
}
