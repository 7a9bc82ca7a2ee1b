//! 1-bit Adam: after `freeze_step` steps of Adam the second moment stays, and momenta are averaged compressed.

use ferrospeed_tensor::Device;

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
        device: &Device,
        params: &mut [Whole<'_>],
        step: u64,
        exchange: &mut X,
    ) -> Result<(), X::Error> {
        let frozen = step > self.freeze_step;
        device.each(params.iter_mut(), |_, whole| {
            let [m, v] = &mut whole.states[..] else { unreachable!("the number was checked") };
            blend(m, whole.gradient, whole.options.betas[0]);
            if !frozen {
                blend_squares(v, whole.gradient, whole.options.betas[1]);
            }
        });
        if frozen {
            let momenta = params.iter_mut().map(|whole| &mut *whole.states[0]);
            exchange.average(momenta.enumerate().collect())?;
        }
        device.each(params.iter_mut(), |_, whole| {
            let Whole { weights, states, options, .. } = whole;
            let [m, v] = &mut states[..] else { unreachable!("the number was checked") };
            if frozen {
                mask(m, v);
            }
            let (lr, decay, eps) = (options.lr as f32, options.weight_decay as f32, self.eps as f32);
            for ((weight, m), v) in weights.iter_mut().zip(m.iter()).zip(v.iter()) {
                *weight -= lr * (m / (v.sqrt() + eps) + decay * *weight);
            }
        });
        Ok(())
    }
}
