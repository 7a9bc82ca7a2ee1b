//! Softmax cross-entropy over rows of f32 logits, the gradient written over them.

use crate::backend::CrossEntropySpec;
use crate::cpu::math::exp;
use crate::cpu::parallel::{Shared, Threads, row_block};
use crate::cpu::simd::{max, sum_by, vectorized};
use crate::cpu::{read, write};
use crate::error::{Result, TensorError};
use crate::tensor::Tensor;

pub(crate) fn cross_entropy_rows(
    threads: &Threads,
    spec: &CrossEntropySpec<'_>,
    logits: &Tensor,
    targets: &Tensor,
    losses: &Tensor,
    with_gradient: bool,
) -> Result<()> {
    let (rows, classes) = (logits.shape().rows(), logits.shape().last());
    let targets = read::<i64>(targets);
    for (position, &index) in targets.iter().enumerate() {
        if index != spec.ignore_index && !usize::try_from(index).is_ok_and(|index| index < classes) {
            return Err(TensorError::IndexOutOfRange {
                op: "cross_entropy",
                index,
                position,
                limit: classes,
            });
        }
    }
    let logits = Shared::new(write::<f32>(logits));
    let losses = Shared::new(write::<f32>(losses));
    let CrossEntropySpec { label_smoothing: smoothing, z_loss, .. } = *spec;
    let gradient_scale = 1.0 / read::<i64>(spec.counted)[0].max(1) as f32;
    threads.blocks(rows, row_block(classes), |range| {
        vectorized!(|| {
            for r in range {
                // SAFETY: rows are disjoint.
                let (row, loss) =
                    unsafe { (logits.range(r * classes..(r + 1) * classes), &mut losses.range(r..r + 1)[0]) };
                if targets[r] == spec.ignore_index {
                    *loss = 0.0;
                    if with_gradient {
                        row.fill(0.0);
                    }
                    continue;
                }
                let target = targets[r] as usize;
                let largest = max(row);
                let target_logit = row[target];
                let logit_sum = if smoothing > 0.0 { sum_by(row, |_, v| v) } else { 0.0 };
                let total = if with_gradient {
                    for value in row.iter_mut() {
                        *value = exp(*value - largest);
                    }
                    sum_by(row, |_, v| v)
                } else {
                    sum_by(row, |_, v| exp(v - largest))
                };
                let log_total = largest + total.ln();
                let mean_logit = logit_sum / classes as f32;
                *loss = log_total - (1.0 - smoothing) * target_logit - smoothing * mean_logit
                    + z_loss * log_total * log_total;
                if with_gradient {
                    // d loss / d logit = p·(1 + 2·z·logsumexp) - (1-s)·[target] - s/classes
                    let scale = gradient_scale * (1.0 + 2.0 * z_loss * log_total) / total;
                    let uniform = gradient_scale * smoothing / classes as f32;
                    for value in row.iter_mut() {
                        *value = *value * scale - uniform;
                    }
                    row[target] -= gradient_scale * (1.0 - smoothing);
                }
            }
        });
    });
    Ok(())
}
