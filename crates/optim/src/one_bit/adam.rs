//! 1-bit Adam: after `freeze_step` steps of Adam the second moment stays, and momenta are averaged compressed.

use std::ops::Range;

use ferrospeed_tensor::Device;
use ferrospeed_tensor::loops::ahead::{TOGETHER, ask_ahead};
use ferrospeed_tensor::loops::simd::vectorized;

use super::{BLOCK, Exchange, Pace, Phase, Values, Whole, blend, blend_squares, blocks, known, walk};

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
        phase: Phase,
        exchange: &mut X,
    ) -> Result<(), X::Error> {
        if phase == Phase::Momentum {
            let mut momenta: Vec<Momentum<'_, '_>> =
                params.iter_mut().map(|whole| Momentum { whole, eps: self.eps }).collect();
            let momenta = momenta.iter_mut().map(|momentum| momentum as &mut dyn Values);
            return exchange.average(momenta.enumerate().collect());
        }
        device.each(params.iter_mut(), |_, whole| {
            let mut gradient = [0.0; BLOCK];
            for range in blocks(whole.numel()) {
                let gradient = &mut gradient[..range.len()];
                whole.read_gradient(range.start, gradient);
                let betas = whole.options.betas;
                let (_, [m, v]) = whole.parts(range.clone());
                blend(m, gradient, betas[0]);
                blend_squares(v, gradient, betas[1]);
                step_weights(whole, self.eps, range);
            }
        });
        Ok(())
    }
}

/// The momentum of a parameter: what comes back moves the weights.
struct Momentum<'a, 'b> {
    whole: &'a mut Whole<'b>,
    eps: f64,
}

impl Values for Momentum<'_, '_> {
    fn numel(&self) -> usize {
        self.whole.numel()
    }

    fn give(&mut self, start: usize, block: &mut [f32]) {
        self.whole.read_momentum(start, 1.0, block);
    }

    fn take(&mut self, start: usize, block: &[f32]) {
        let range = start..start + block.len();
        let (_, [m, v]) = self.whole.parts(range.clone());
        let moments = m.chunks_mut(TOGETHER).zip(v.chunks(TOGETHER));
        vectorized!(|| for ((m, v), block) in moments.zip(block.chunks(TOGETHER)) {
            ask_ahead::<f32, TOGETHER>(m, 0);
            ask_ahead::<f32, TOGETHER>(v, 0);
            let all = m.iter_mut().zip(v).zip(block);
            all.for_each(|((m, v), averaged)| *m = known(*averaged, *v));
        });
        step_weights(self.whole, self.eps, range);
    }
}

/// Moves some weights by their momentum.
fn step_weights(whole: &mut Whole<'_>, eps: f64, range: Range<usize>) {
    let options = whole.options;
    let (weights, [m, v]) = whole.parts(range.clone());
    walk(weights, m, v, Pace::of(&options, eps));
    whole.round(range);
}
