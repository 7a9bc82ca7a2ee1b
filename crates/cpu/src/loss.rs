//! Softmax cross-entropy over rows of f32 logits, with the gradient over them or beside them.

use ferrospeed_tensor::backend::{CrossEntropyOptions, LossGradient, Losses};
use ferrospeed_tensor::dtype::Float;
use ferrospeed_tensor::loops::simd::{map_and_sum, max, sum_by, vectorized};
use ferrospeed_tensor::{Out, Result, Tensor, TensorError};

use crate::math::exp_down;
use crate::parallel::{Shared, row_block};
use crate::{CpuBackend, float_kernel, read, write};

impl Losses for CpuBackend {
    fn cross_entropy_rows(
        &self,
        options: &CrossEntropyOptions,
        logits: Out<'_>,
        classes: usize,
        targets: &Tensor,
        losses: Out<'_>,
        gradient: LossGradient<'_>,
    ) -> Result<()> {
        let threads = &self.threads;
        let columns = logits.shape().last();
        let targets = checked_targets(targets, options.ignore_index, classes)?;
        let all = Rows { options, targets, classes };
        let (logits, losses) = (Shared::new(write::<f32>(logits)), Shared::new(write::<f32>(losses)));
        // SAFETY: rows are disjoint.
        let row = |r: usize| unsafe { logits.range(r * columns..r * columns + classes) };
        // SAFETY: as above.
        let loss = |r: usize| unsafe { &mut losses.range(r..r + 1)[0] };
        let over_rows = |work: &(dyn Fn(usize) + Send + Sync)| {
            threads.blocks(all.targets.len(), row_block(classes), |range| range.for_each(work));
        };
        match gradient {
            LossGradient::Nowhere => over_rows(&|r| *loss(r) = vectorized!(|| all.loss(r, row(r)))),
            LossGradient::OverLogits => over_rows(&|r| {
                vectorized!(|| {
                    let row = row(r);
                    let (value, slope) = all.loss_and_slope(r, row);
                    *loss(r) = value;
                    slope.over(row);
                });
            }),
            LossGradient::Into(target) => {
                return float_kernel!("cross_entropy", target.dtype(), T => {
                    let target = Shared::new(write::<T>(target));
                    over_rows(&|r| vectorized!(|| {
                        let row = row(r);
                        let (value, slope) = all.loss_and_slope(r, row);
                        *loss(r) = value;
                        // SAFETY: as above.
                        slope.beside(row, unsafe { target.range(r * columns..r * columns + classes) });
                    }));
                });
            }
        }
        Ok(())
    }

    fn count_targets(&self, targets: &Tensor, ignore_index: i64, target: Out<'_>) -> Result<()> {
        let counted = read::<i64>(targets).iter().filter(|&&target| target != ignore_index).count();
        write::<i64>(target)[0] = counted as i64;
        Ok(())
    }

    fn mean_loss(&self, losses: &Tensor, counted: &Tensor, target: Out<'_>) -> Result<()> {
        let total: f64 = read::<f32>(losses).iter().copied().map(f64::from).sum();
        write::<f32>(target)[0] = (total / read::<i64>(counted)[0].max(1) as f64) as f32;
        Ok(())
    }
}

/// Targets that are classes, or do not count.
pub(super) fn checked_targets(targets: &Tensor, ignored: i64, limit: usize) -> Result<&[i64]> {
    let targets = read::<i64>(targets);
    let is_bad = |index: i64| index != ignored && usize::try_from(index).map_or(true, |index| index >= limit);
    match targets.iter().position(|&index| is_bad(index)) {
        Some(position) => {
            let index = targets[position];
            Err(TensorError::IndexOutOfRange { op: "cross_entropy", index, position, limit })
        }
        None => Ok(targets),
    }
}

/// What the losses of all rows share.
struct Rows<'a> {
    options: &'a CrossEntropyOptions,
    targets: &'a [i64],
    classes: usize,
}

impl Rows<'_> {
    /// The class that row `r` should have, unless it does not count.
    #[inline(always)]
    fn target(&self, r: usize) -> Option<usize> {
        (self.targets[r] != self.options.ignore_index).then_some(self.targets[r] as usize)
    }

    #[inline(always)]
    fn loss(&self, r: usize, row: &[f32]) -> f32 {
        let Some(target) = self.target(r) else { return 0.0 };
        let largest = max(row);
        let total = sum_by(row, |_, v| exp_down(v - largest));
        self.value(row[target], self.logit_sum(row), largest + total.ln())
    }

    /// The loss, and what turns the row, which now holds exponentials, into its gradient.
    #[inline(always)]
    fn loss_and_slope(&self, r: usize, row: &mut [f32]) -> (f32, Slope) {
        let Some(target) = self.target(r) else {
            row.fill(0.0);
            return (0.0, Slope { scale: 0.0, uniform: 0.0, target: None });
        };
        let (largest, target_logit, logit_sum) = (max(row), row[target], self.logit_sum(row));
        let total = map_and_sum(row, |v| exp_down(v - largest));
        let log_total = largest + total.ln();
        // d loss / d logit = p·(1 + 2·z·logsumexp) - (1-s)·[target] - s/classes
        let smoothing = self.options.label_smoothing;
        let slope = Slope {
            scale: (1.0 + 2.0 * self.options.z_loss * log_total) / total,
            uniform: smoothing / self.classes as f32,
            target: Some((target, 1.0 - smoothing)),
        };
        (self.value(target_logit, logit_sum, log_total), slope)
    }

    /// The sum of the logits, where smoothing wants it.
    #[inline(always)]
    fn logit_sum(&self, row: &[f32]) -> f32 {
        if self.options.label_smoothing > 0.0 { sum_by(row, |_, v| v) } else { 0.0 }
    }

    #[inline(always)]
    fn value(&self, target_logit: f32, logit_sum: f32, log_total: f32) -> f32 {
        let (smoothing, mean_logit) = (self.options.label_smoothing, logit_sum / self.classes as f32);
        log_total - (1.0 - smoothing) * target_logit - smoothing * mean_logit
            + self.options.z_loss * log_total * log_total
    }
}

/// The gradient of a row whose exponentials are known.
pub(super) struct Slope {
    pub(super) scale: f32,
    pub(super) uniform: f32,
    /// The right class, and what is taken off there.
    pub(super) target: Option<(usize, f32)>,
}

impl Slope {
    /// The gradient in the exponentials' place.
    #[inline(always)]
    pub(super) fn over(&self, row: &mut [f32]) {
        for value in row.iter_mut() {
            *value = *value * self.scale - self.uniform;
        }
        if let Some((target, share)) = self.target {
            row[target] -= share;
        }
    }

    /// The gradient in another place, rounded.
    #[inline(always)]
    pub(super) fn beside<T: Float>(&self, row: &[f32], gradient: &mut [T]) {
        for (gradient, value) in gradient.iter_mut().zip(row) {
            *gradient = T::narrow(value * self.scale - self.uniform);
        }
        if let Some((target, share)) = self.target {
            gradient[target] = T::narrow(row[target] * self.scale - self.uniform - share);
        }
    }
}
