//! Cross-entropy over tokens that lie on several ranks.
//!
//! Each rank makes the logits of its own tokens, a chunk of rows at a time. All that ranks tell each other is three numbers per
//! row: the largest logit, the sum of exponentials of the distances to it, and the target's logit from whoever has it. The rest
//! is what one rank does with all tokens.

use ferrospeed_collective::ops::all_gather;
use ferrospeed_comm::Group;
use ferrospeed_tensor::backend::{ClassPart, LossGradient};
use ferrospeed_tensor::ops::{self, RowLoss, WeightLayout};
use ferrospeed_tensor::{DType, Out, Param, Result, Tensor, TensorError};

use super::Slices;

/// An error for the first id that no rank holds: a sum over nothing would look like a value.
pub(crate) fn expect_entries(op: &'static str, ids: impl Iterator<Item = i64>, limit: usize) -> Result<()> {
    let is_outside = |id: i64| usize::try_from(id).map_or(true, |id| id >= limit);
    match ids.enumerate().find(|&(_, id)| is_outside(id)) {
        Some((position, index)) => Err(TensorError::IndexOutOfRange { op, index, position, limit }),
        None => Ok(()),
    }
}

/// The loss over a group's tokens, by the logits of this rank's.
struct Together<'a> {
    part: ClassPart,
    group: &'a Group,
}

impl<'a> Together<'a> {
    /// Of `all` tokens, this rank's begin with `first`.
    fn new([first, all]: [usize; 2], ignore_index: i64, group: &'a Group) -> Together<'a> {
        Together { part: ClassPart { ignore_index, number: group.rank(), first, all }, group }
    }
}

impl RowLoss for Together<'_> {
    fn ignore_index(&self) -> i64 {
        self.part.ignore_index
    }

    /// Some ranks have a token more than others, and yet all must tell each other of the same rows.
    fn classes(&self, _own: usize) -> usize {
        self.part.all.div_ceil(self.group.size())
    }

    fn rows(
        &self,
        logits: &mut Tensor,
        _classes: usize,
        targets: &Tensor,
        losses: Out<'_>,
        gradient: LossGradient<'_>,
    ) -> Result<()> {
        let device = logits.device().clone();
        let backend = device.backend();
        let mut told = Tensor::empty([1, logits.shape().rows(), ClassPart::NUMBERS], DType::F32, &device)?;
        backend.cross_entropy_part(&self.part, logits.out()?, targets, told.out()?)?;
        let told = all_gather(&told, 0, self.group)?;
        backend.cross_entropy_of_parts(&self.part, &told, logits.out()?, targets, losses, gradient)
    }
}

/// The mean loss of predicting `targets [rows]` by `x·Wᵀ`, where this rank's rows of `W [tokens, width]` are `weight`, a slice
/// along dim 0; targets of `ignored` do not count. `x` is what ranks have between the cuts; all get the same loss.
pub fn linear_cross_entropy(
    x: &Tensor,
    weight: &Param,
    targets: &Tensor,
    ignored: i64,
    slices: &Slices,
) -> Result<Tensor> {
    let Some(slice) = weight.slice() else {
        return Err(TensorError::shape(
            "sliced loss",
            "the weight",
            *weight.shape(),
            "a slice of [tokens, width]",
        ));
    };
    let together = Together::new([slice.ranges()[0].start, slice.whole()[0]], ignored, slices.group());
    let x = slices.enter(x)?;
    let x = ops::reshape(&x, [x.shape().rows(), x.shape().last()])?;
    ops::linear_cross_entropy(x, weight, WeightLayout::OutIn, targets, together)
}

/// The mean loss of logits `[.., tokens]` of this rank's tokens, the first of which is `first` among `all`; as
/// [`linear_cross_entropy`], for heads that make their logits by themselves.
pub fn cross_entropy(
    logits: &Tensor,
    [first, all]: [usize; 2],
    targets: &Tensor,
    ignored: i64,
    group: &Group,
) -> Result<Tensor> {
    ops::cross_entropy(logits, targets, Together::new([first, all], ignored, group))
}
