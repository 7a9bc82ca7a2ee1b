//! 1-bit Adam: after `freeze_step` steps of Adam the second moment stays, and momenta are averaged compressed.

use super::{Exchange, Whole, blend, blend_squares, mask};

/// Its fixed options.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OneBitAdam {
    /// Added to the denominator.
    pub eps: f64,
    /// The last step with averaged gradients.
    pub freeze_step: u64,
}

impl OneBitAdam {
    pub(super) fn step<X: Exchange>(
        &self,
        params: &mut [Whole<'_>],
        step: u64,
        exchange: &mut X,
    ) -> Result<(), X::Error> {
        for (index, whole) in params.iter_mut().enumerate() {
            let Whole { weights, gradient, states, options } = whole;
            let [m, v] = &mut states[..] else { unreachable!("the number was checked") };
            blend(m, gradient, options.betas[0]);
            if step > self.freeze_step {
                exchange.average(index, m)?;
                mask(m, v);
            } else {
                blend_squares(v, gradient, options.betas[1]);
            }
            let (lr, decay, eps) = (options.lr as f32, options.weight_decay as f32, self.eps as f32);
            for ((weight, m), v) in weights.iter_mut().zip(m.iter()).zip(v.iter()) {
                *weight -= lr * (m / (v.sqrt() + eps) + decay * *weight);
            }
        }
        Ok(())
    }
}
