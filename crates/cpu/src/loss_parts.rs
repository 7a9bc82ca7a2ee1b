//! The same loss where each part of the classes is elsewhere: what a part tells the others, and what it makes of all that was told.

use ferrospeed_tensor::backend::{ClassPart, LossGradient, LossParts};
use ferrospeed_tensor::loops::simd::{map_and_sum, max, vectorized};
use ferrospeed_tensor::{Out, Result, Tensor};

use crate::loss::{Slope, checked_targets};
use crate::math::exp_down;
use crate::parallel::{Shared, row_block};
use crate::{CpuBackend, float_kernel, read, write};

const NUMBERS: usize = ClassPart::NUMBERS;

impl LossParts for CpuBackend {
    /// Leaves the exponentials in the logits' place.
    fn cross_entropy_part(
        &self,
        part: &ClassPart,
        logits: Out<'_>,
        targets: &Tensor,
        told: Out<'_>,
    ) -> Result<()> {
        let threads = &self.threads;
        let classes = logits.shape().last();
        let targets = checked_targets(targets, part.ignore_index, part.all)?;
        let (logits, told) = (Shared::new(write::<f32>(logits)), Shared::new(write::<f32>(told)));
        threads.blocks(targets.len(), row_block(classes), |range| {
            for r in range {
                // SAFETY: rows are disjoint.
                let row = unsafe { logits.range(r * classes..(r + 1) * classes) };
                // SAFETY: as above.
                let told = unsafe { told.range(r * NUMBERS..(r + 1) * NUMBERS) };
                told.copy_from_slice(&vectorized!(|| tell(part, targets[r], row)));
            }
        });
        Ok(())
    }

    fn cross_entropy_of_parts(
        &self,
        part: &ClassPart,
        told: &Tensor,
        logits: Out<'_>,
        targets: &Tensor,
        losses: Out<'_>,
        gradient: LossGradient<'_>,
    ) -> Result<()> {
        let threads = &self.threads;
        let classes = logits.shape().last();
        let all = Rows { part, told: read::<f32>(told), targets: read::<i64>(targets), classes };
        let (logits, losses) = (Shared::new(write::<f32>(logits)), Shared::new(write::<f32>(losses)));
        // SAFETY: rows are disjoint.
        let row = |r: usize| unsafe { logits.range(r * classes..(r + 1) * classes) };
        let over_rows = |work: &(dyn Fn(usize, Slope) + Send + Sync)| {
            threads.blocks(all.targets.len(), row_block(classes), |range| {
                for r in range {
                    let (loss, slope) = all.loss_and_slope(r);
                    // SAFETY: as above.
                    let own = unsafe { losses.range(r..r + 1) };
                    own[0] = loss;
                    work(r, slope);
                }
            });
        };
        match gradient {
            LossGradient::Nowhere => over_rows(&|_, _| ()),
            LossGradient::OverLogits => over_rows(&|r, slope| vectorized!(|| slope.over(row(r)))),
            LossGradient::Into(target) => {
                return float_kernel!("cross_entropy", target.dtype(), T => {
                    let target = Shared::new(write::<T>(target));
                    over_rows(&|r, slope| vectorized!(|| {
                        // SAFETY: as above.
                        slope.beside(row(r), unsafe { target.range(r * classes..(r + 1) * classes) });
                    }));
                });
            }
        }
        Ok(())
    }
}

#[inline(always)]
fn tell(part: &ClassPart, target: i64, row: &mut [f32]) -> [f32; NUMBERS] {
    if target == part.ignore_index {
        row.fill(0.0);
        return [0.0; NUMBERS];
    }
    let target_logit = place(part, target, row.len()).map_or(0.0, |place| row[place]);
    // Finite, so that a difference to it is a number: a part without any finite logit adds nothing.
    let largest = max(row).max(f32::MIN);
    let total = map_and_sum(row, |v| exp_down(v - largest));
    [largest, total, target_logit]
}

/// Where a target that counts is in the part, if it is there.
#[inline(always)]
fn place(part: &ClassPart, target: i64, classes: usize) -> Option<usize> {
    (target as usize).checked_sub(part.first).filter(|&place| place < classes)
}

/// What the losses of all rows share.
struct Rows<'a> {
    part: &'a ClassPart,
    /// `[parts, rows, NUMBERS]`
    told: &'a [f32],
    targets: &'a [i64],
    classes: usize,
}

impl Rows<'_> {
    /// The loss, and what turns the part's exponentials into its gradient.
    fn loss_and_slope(&self, r: usize) -> (f32, Slope) {
        if self.targets[r] == self.part.ignore_index {
            return (0.0, Slope { scale: 0.0, uniform: 0.0, target: None });
        }
        // In the order of parts, so that all get the same bits.
        let of = |number: usize| &self.told[(number * self.targets.len() + r) * NUMBERS..][..NUMBERS];
        let parts = || (0..self.told.len() / (self.targets.len() * NUMBERS)).map(of);
        let largest = parts().fold(f32::MIN, |largest, told| largest.max(told[0]));
        let (mut total, mut target_logit) = (0.0, 0.0);
        for told in parts() {
            total += told[1] * exp_down(told[0] - largest);
            target_logit += told[2];
        }
        let slope = Slope {
            scale: exp_down(of(self.part.number)[0] - largest) / total,
            uniform: 0.0,
            target: place(self.part, self.targets[r], self.classes).map(|place| (place, 1.0)),
        };
        (largest + total.ln() - target_logit, slope)
    }
}
