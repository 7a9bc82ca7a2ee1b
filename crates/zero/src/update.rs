//! One pass of an optimizer over what of this rank's part is updated where kernels work.
//!
//! That is all of it, unless states are offloaded; then it is what stays with the device (twin-flow), and [`crate::away`]
//! updates the rest.

use ferrospeed_optim::{Copy16, Optimizer, Pass, Stretch};
use ferrospeed_tensor::backend::{Update, UpdateOperands};
use ferrospeed_tensor::{Category, DType, Tensor};

use crate::error::{Result, ZeroError};
use crate::memory::part;
use crate::reducer::Segment;
use crate::step::gradient_of;
use crate::store::{Share, ZeroStore};

/// What of some segments is updated where kernels work: each with where that starts in the part, and its length.
pub(crate) fn kept<'a>(
    share: &Share,
    segments: &'a [&Segment],
) -> impl Iterator<Item = (&'a Segment, usize, usize)> + use<'a> {
    let range = share.kept();
    segments
        .iter()
        .filter_map(move |segment| segment.within(&range).map(|(start, len)| (*segment, start, len)))
}

impl ZeroStore {
    /// What an update of some segments of a group reads and writes; `states` begin where what is kept does.
    pub(crate) fn operands(
        &self,
        share: &Share,
        states: &[Tensor],
        segments: &[&Segment],
        changes_weights: bool,
    ) -> Result<Vec<UpdateOperands>> {
        let in_place = share.values.is_here(&self.device);
        let first = share.kept().start;
        let mut pieces = Vec::with_capacity(segments.len());
        for (segment, start, len) in kept(share, segments) {
            let copy = match (changes_weights && self.dtype != DType::F32, in_place) {
                (false, _) => None,
                (true, true) => Some(share.values.read(share.placed.own_start + start, len, &self.device)?),
                (true, false) => Some(Tensor::empty_in([len], self.dtype, &self.device, Category::Buffers)?),
            };
            pieces.push(UpdateOperands {
                weights: share.kept_weights(start, len, &self.device)?,
                gradient: part(&segment.values, start - segment.in_part, len)?,
                states: states.iter().map(|flat| part(flat, start - first, len)).collect::<Result<_>>()?,
                copy,
            });
        }
        Ok(pieces)
    }

    /// Updates the weights of some segments of a group.
    pub(crate) fn update(
        &self,
        share: &Share,
        states: &[Tensor],
        segments: &[&Segment],
        gradient_factor: f32,
        pass: &Pass,
    ) -> Result<()> {
        // The first pass of LAMB leaves weights and their copy alone.
        let changes_weights = !matches!(pass, Pass::Kernel(Update::LambDirection { .. }));
        let pieces = self.operands(share, states, segments, changes_weights)?;
        self.apply(&pieces, gradient_factor, pass)?;
        if !changes_weights || !share.placed.is_away() {
            return Ok(());
        }
        let in_place = share.values.is_here(&self.device);
        for ((_, start, _), piece) in kept(share, segments).zip(&pieces) {
            match &piece.copy {
                Some(copy) if !in_place => share.values.write(share.placed.own_start + start, copy)?,
                None if share.master.is_some() => {
                    share.values.write(share.placed.own_start + start, &piece.weights)?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// One pass over some operands, where kernels work.
    pub(crate) fn apply(&self, pieces: &[UpdateOperands], gradient_factor: f32, pass: &Pass) -> Result<()> {
        if pieces.is_empty() {
            return Ok(());
        }
        if !self.device.backend().is_host() {
            let Pass::Kernel(update) = pass else {
                let name = self.optimizer.as_ref().map_or("none", Optimizer::name);
                return Err(ZeroError::Request(format!("the optimizer {name} runs on the host only")));
            };
            return Ok(self.device.backend().update(update, gradient_factor, pieces)?);
        }
        for piece in pieces {
            // SAFETY: master, states and values are this store's own, the lock on its state is held, no collective over
            // them is in flight, and segments are disjoint.
            unsafe {
                let mut stretch = Stretch {
                    weights: piece.weights.host_mut()?,
                    gradient: gradient_of(&piece.gradient)?,
                    gradient_factor,
                    states: piece.states.iter().map(|state| state.host_mut()).collect::<Result<_, _>>()?,
                    copy: match &piece.copy {
                        Some(copy) if self.dtype == DType::BF16 => Copy16::Bf16(copy.host_mut()?),
                        Some(copy) => Copy16::F16(copy.host_mut()?),
                        None => Copy16::None,
                    },
                    device: &self.device,
                };
                stretch.pass(pass);
            }
        }
        Ok(())
    }
}
