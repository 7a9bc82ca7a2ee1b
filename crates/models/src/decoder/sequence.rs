//! Sequences of a decoder that several ranks share: each runs its part of the tokens, and all come to one loss.
//!
//! Every rank is given whole sequences and takes its part of them, so positions, masks and labels are those of the whole: the
//! last token of one part predicts the first of the next.

use ferrospeed_collective::ops as collective;
use ferrospeed_nn::{SequenceParallel, SequencePart};
use ferrospeed_tensor::{DType, Tensor, TensorError, ops};

use super::{Decoder, RouterLogits, Tokens};
use crate::error::Result;

impl Decoder {
    /// Shares sequences with the ranks of a group, all of which are given the same ones. Hidden states are then those of this
    /// rank's part, and losses those of the whole. Decoding from a cache is not shared.
    pub fn set_sequence_parallel(&mut self, sequence: Option<SequenceParallel>) {
        self.sequence = sequence;
    }

    /// This rank's part of sequences with these labels, where they are shared.
    pub(super) fn shared(&self, labels: &Tensor) -> Result<Option<SequencePart>> {
        Ok(self.sequence.as_ref().map(|sequence| sequence.divide(labels.shape().last())).transpose()?)
    }
}

fn counted(targets: &Tensor, ignored: i64) -> Result<Tensor> {
    let mut count = Tensor::empty([], DType::I64, targets.device())?;
    targets.device().backend().count_targets(targets, ignored, count.out()?)?;
    Ok(ops::cast(&count, DType::F32)?)
}

/// The mean over the counted tokens of all parts, from the mean `loss` over those of this one. Each rank knows all labels, so
/// how many count is not asked.
pub(super) fn whole_mean(
    part: &SequencePart,
    loss: &Tensor,
    own: &Tensor,
    all: &Tensor,
    ignored: i64,
) -> Result<Tensor> {
    let one = Tensor::full([], 1.0, DType::F32, loss.device())?;
    let share = ops::div(&counted(own, ignored)?, &ops::maximum(&counted(all, ignored)?, &one)?)?;
    let own = ops::mul(loss, &share)?;
    Ok(collective::leave(&own, part.group()).map_err(TensorError::from)?)
}

/// The router logits `[tokens, experts]` of all parts, for a loss that all ranks compute alike.
pub(super) fn joined_routers(
    part: &SequencePart,
    routers: &RouterLogits,
    tokens: &Tokens,
) -> Result<RouterLogits> {
    let group = part.group();
    if tokens.mask.is_some() || !part.whole().is_multiple_of(2 * group.size()) {
        let why = format!(
            "the balance of experts is taken over whole sequences: without masks, and of a multiple of {} tokens; leave \
             padding out, or the balancing loss (router_aux_loss_coef 0)",
            2 * group.size()
        );
        return Err(TensorError::argument("sequence parallel", why).into());
    }
    let join = |logits: &Tensor| collective::join(logits, 0, group).map_err(TensorError::from);
    Ok(routers.iter().map(join).collect::<Result<_, _>>()?)
}
