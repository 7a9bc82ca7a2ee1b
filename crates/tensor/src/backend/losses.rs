//! Cross-entropies, whole and in parts.

use crate::backend::Memory;
use crate::dtype::DType;
use crate::error::Result;
use crate::out::Out;
use crate::tensor::Tensor;

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

impl Default for CrossEntropyOptions {
    fn default() -> Self {
        CrossEntropyOptions { ignore_index: -100, label_smoothing: 0.0, z_loss: 0.0 }
    }
}

/// Where the gradient of each row's own loss goes: not of their mean, which small types could not hold.
#[derive(Debug)]
pub enum LossGradient<'a> {
    /// It is not wanted.
    Nowhere,
    /// It takes the place of the logits.
    OverLogits,
    /// Into a tensor of their shape, rounded to its type.
    Into(Out<'a>),
}

/// One of several parts of the classes, each with neighbouring ones, whose losses together are the loss of all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClassPart {
    /// Targets with this value count for nothing.
    pub ignore_index: i64,
    /// Which part it is.
    pub number: usize,
    /// Its first class.
    pub first: usize,
    /// How many classes all parts have.
    pub all: usize,
}

impl ClassPart {
    /// What parts tell each other of a row: the largest logit, the sum of exponentials of the distances to it, and the
    /// target's logit, which is zero where the target is in another part.
    pub const NUMBERS: usize = 3;
}

/// Losses of rows of logits.
pub trait Losses: Memory {
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
    /// How many columns logits of so many classes are held in, where whoever makes them may choose: as many, or more where
    /// rows that begin anywhere would be multiplied slowly.
    fn logits_columns(&self, classes: usize) -> usize {
        classes
    }
    /// Per row of `logits [rows, columns]`, in [`Losses::logits_dtype`], of which the first `classes` columns count: the loss
    /// into `losses [rows]`, and its gradient where it is wanted. The logits are lost where there is a gradient; what the other
    /// columns hold is finite if it was.
    fn cross_entropy_rows(
        &self,
        options: &CrossEntropyOptions,
        logits: Out<'_>,
        classes: usize,
        targets: &Tensor,
        losses: Out<'_>,
        gradient: LossGradient<'_>,
    ) -> Result<()>;
    /// How many of `targets` differ from `ignore_index`, as one `I64`.
    fn count_targets(&self, targets: &Tensor, ignore_index: i64, target: Out<'_>) -> Result<()>;
    /// The sum of `losses` in f64 over `counted`, as one f32; zero when none counts.
    fn mean_loss(&self, losses: &Tensor, counted: &Tensor, target: Out<'_>) -> Result<()>;
}

/// Losses of rows of which each rank has some of the classes.
pub trait LossParts: Losses {
    /// Per row of `logits [rows, classes of the part]`, in [`Losses::logits_dtype`]: what the part tells the others into
    /// `told [rows, NUMBERS]`. From then on the logits belong to [`LossParts::cross_entropy_of_parts`], where they may be held in another form.
    fn cross_entropy_part(
        &self,
        part: &ClassPart,
        logits: Out<'_>,
        targets: &Tensor,
        told: Out<'_>,
    ) -> Result<()>;
    /// As [`Losses::cross_entropy_rows`], of one part, from what all `told [parts, rows, NUMBERS]`: every part gets the whole
    /// loss, to the same bits, and the gradient of its own logits.
    fn cross_entropy_of_parts(
        &self,
        part: &ClassPart,
        told: &Tensor,
        logits: Out<'_>,
        targets: &Tensor,
        losses: Out<'_>,
        gradient: LossGradient<'_>,
    ) -> Result<()>;
}
