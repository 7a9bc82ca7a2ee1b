//! Softmax cross-entropy over rows of f32 logits, the gradient written over them.

use crate::backend::CrossEntropyOptions;
use crate::cpu::math::exp;
use crate::cpu::parallel::{Shared, Threads, row_block};
use crate::cpu::simd::{max, sum_by, vectorized};
use crate::cpu::{read, write};
use crate::error::{Result, TensorError};
use crate::tensor::Tensor;

pub(crate) fn cross_entropy_rows(
    threads: &Threads,
    options: &CrossEntropyOptions,
    logits: &Tensor,
    targets: &Tensor,
    losses: &Tensor,
    with_gradient: bool,
) -> Result<()> {
    let CrossEntropyOptions { ignore_index, label_smoothing: smoothing, z_loss } = *options;
    let (rows, classes) = (logits.shape().rows(), logits.shape().last());
    let targets = read::<i64>(targets);
    for (position, &index) in targets.iter().enumerate() {
        if index != ignore_index && !usize::try_from(index).is_ok_and(|index| index < classes) {
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
    threads.blocks(rows, row_block(classes), |range| {
        vectorized!(|| {
            for r in range {
                // SAFETY: rows are disjoint.
                let (row, loss) =
                    unsafe { (logits.range(r * classes..(r + 1) * classes), &mut losses.range(r..r + 1)[0]) };
                if targets[r] == ignore_index {
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
                    let scale = (1.0 + 2.0 * z_loss * log_total) / total;
                    let uniform = smoothing / classes as f32;
                    for value in row.iter_mut() {
                        *value = *value * scale - uniform;
                    }
                    row[target] -= 1.0 - smoothing;
                }
            }
        });
    });
    Ok(())
}
