//! 0/1 Adam: the second moment is updated ever more rarely, then frozen, and from then on ranks go several steps on their
//! own before they exchange how far they went.
//!
//! Between two updates of the second moment gradients are averaged compressed. After the freeze each rank walks alone for
//! an interval, goes back to where it started, and all take the average of their ways instead; so weights differ between
//! ranks until the interval ends. Both intervals follow from the number of the step.

use ferrospeed_tensor::Device;
use ferrospeed_tensor::loops::simd::vectorized;

use super::{BLOCK, Exchange, Memory, Pace, Phase, Values, Whole, blend, blend_squares, blocks, known, walk};

/// Its fixed options.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ZeroOneAdam {
    /// Added to the denominator.
    pub eps: f64,
    /// The last step but one that may update the second moment.
    pub var_freeze_step: u64,
    /// Updates of the second moment before their interval doubles.
    pub var_update_scaler: u64,
    /// Local steps before their interval doubles.
    pub local_step_scaler: u64,
    /// The longest interval of local steps.
    pub local_step_clipper: u64,
}

impl ZeroOneAdam {
    /// What a step does; steps as the rules count them.
    pub(super) fn phase(&self, step: u64) -> Phase {
        if self.is_frozen(step) {
            let begins = step == self.var_freeze_step.saturating_add(2);
            return Phase::Way { begins, meets: step.is_multiple_of(self.local_interval(step)) };
        }
        match self.updates_variance(step) {
            true => Phase::Averaged { freezes: false },
            false => Phase::Gradient,
        }
    }

    fn is_frozen(&self, step: u64) -> bool {
        step > self.var_freeze_step.saturating_add(1)
    }

    fn updates_variance(&self, step: u64) -> bool {
        step.is_multiple_of(self.variance_interval(step))
    }

    /// The interval of updates of the second moment that is in force at a step.
    fn variance_interval(&self, step: u64) -> u64 {
        let (mut interval, mut at) = (1u64, 1u64);
        let last_before = step.saturating_sub(1).min(self.var_freeze_step.saturating_add(1));
        loop {
            // The update after which the interval doubles.
            let first = (at / interval + 1).saturating_mul(interval);
            let last = first.saturating_add((self.var_update_scaler - 1).saturating_mul(interval));
            if last > last_before || last == u64::MAX {
                return interval;
            }
            (at, interval) = (last, interval.saturating_mul(2));
        }
    }

    /// The interval of local steps that is in force at a step.
    fn local_interval(&self, step: u64) -> u64 {
        let frozen = step.saturating_sub(self.var_freeze_step.saturating_add(2));
        let doublings = u32::try_from(frozen / self.local_step_scaler).unwrap_or(u32::MAX);
        1u64.checked_shl(doublings).unwrap_or(u64::MAX).min(self.local_step_clipper)
    }

    pub(super) fn step<X: Exchange>(
        &self,
        device: &Device,
        memory: &mut Memory,
        params: &mut [Whole<'_>],
        phase: Phase,
        exchange: &mut X,
    ) -> Result<(), X::Error> {
        if let Phase::Way { begins, meets } = phase {
            if begins {
                exchange.forget();
            }
            return self.frozen(device, memory, params, meets, exchange);
        }
        if phase == Phase::Gradient {
            let mut gradients: Vec<Gradient<'_, '_>> =
                params.iter_mut().map(|whole| Gradient { whole, eps: self.eps }).collect();
            let gradients = gradients.iter_mut().map(|gradient| gradient as &mut dyn Values);
            return exchange.average(gradients.enumerate().collect());
        }
        device.each(params.iter_mut(), |_, whole| {
            let (mut gradient, options) = ([0.0; BLOCK], whole.options);
            for range in blocks(whole.numel()) {
                let gradient = &mut gradient[..range.len()];
                whole.read_gradient(range.start, gradient);
                let (weights, [m, v]) = whole.parts(range.clone());
                blend(m, gradient, options.betas[0]);
                blend_squares(v, gradient, options.betas[1]);
                walk(weights, m, v, Pace::of(&options, self.eps));
                whole.round(range);
            }
        });
        Ok(())
    }

    /// A step on this rank's own way, at the end of which ranks may meet.
    fn frozen<X: Exchange>(
        &self,
        device: &Device,
        memory: &mut Memory,
        params: &mut [Whole<'_>],
        meets: bool,
        exchange: &mut X,
    ) -> Result<(), X::Error> {
        let Memory { travelled, rates, .. } = memory;
        if travelled.len() != params.len() {
            *travelled = params.iter().map(|whole| vec![0.0; whole.numel()]).collect();
            *rates = vec![0.0; params.len()];
        }
        device.each(params.iter_mut().zip(travelled.iter_mut()), |_, (whole, travelled)| {
            let (mut gradient, options) = ([0.0; BLOCK], whole.options);
            for range in blocks(whole.numel()) {
                let gradient = &mut gradient[..range.len()];
                whole.read_gradient(range.start, gradient);
                let (weights, [m, v]) = whole.parts(range.clone());
                blend(m, gradient, options.betas[0]);
                travel(weights, m, v, Pace::of(&options, self.eps), &mut travelled[range.clone()]);
                whole.round(range);
            }
        });
        rates.iter_mut().zip(params.iter()).for_each(|(rates, whole)| *rates += whole.options.lr);
        if !meets {
            return Ok(());
        }
        let ways = params.iter_mut().zip(travelled.iter_mut()).zip(rates.iter_mut()).enumerate();
        // Without a rate nobody went anywhere.
        let mut ways: Vec<(usize, Way<'_, '_>)> = ways
            .filter(|(_, (_, rates))| **rates > 0.0)
            .map(|(at, ((whole, travelled), rates))| {
                (at, Way { whole, travelled, rates: std::mem::take(rates) as f32, eps: self.eps as f32 })
            })
            .collect();
        exchange.average(ways.iter_mut().map(|(at, way)| (*at, way as &mut dyn Values)).collect())
    }
}

/// The gradient of a parameter while its second moment stays: what comes back enters the momentum.
struct Gradient<'a, 'b> {
    whole: &'a mut Whole<'b>,
    eps: f64,
}

impl Values for Gradient<'_, '_> {
    fn numel(&self) -> usize {
        self.whole.numel()
    }

    fn give(&mut self, start: usize, block: &mut [f32]) {
        self.whole.read_gradient(start, block);
    }

    fn take(&mut self, start: usize, block: &[f32]) {
        let range = start..start + block.len();
        let options = self.whole.options;
        let (weights, [m, v]) = self.whole.parts(range.clone());
        let (beta, rest) = (options.betas[0] as f32, (1.0 - options.betas[0]) as f32);
        vectorized!(|| for ((m, v), averaged) in m.iter_mut().zip(&*v).zip(block) {
            *m = beta * *m + rest * known(*averaged, *v);
        });
        walk(weights, m, v, Pace::of(&options, self.eps));
        self.whole.round(range);
    }
}

/// How far a parameter has gone since ranks last met, in units of its momentum: it goes back, and takes the average way.
struct Way<'a, 'b> {
    whole: &'a mut Whole<'b>,
    travelled: &'a mut [f32],
    rates: f32,
    eps: f32,
}

impl Values for Way<'_, '_> {
    fn numel(&self) -> usize {
        self.whole.numel()
    }

    fn give(&mut self, start: usize, block: &mut [f32]) {
        let (range, eps) = (start..start + block.len(), self.eps);
        let (weights, [_, v]) = self.whole.parts(range.clone());
        let travelled = &self.travelled[range];
        vectorized!(
            || for (((weight, v), way), out) in weights.iter_mut().zip(&*v).zip(travelled).zip(block) {
                *weight -= way;
                *out = way * (v.sqrt() + eps);
            }
        );
    }

    fn take(&mut self, start: usize, block: &[f32]) {
        let (range, rates, eps) = (start..start + block.len(), self.rates, self.eps);
        let (weights, [m, v]) = self.whole.parts(range.clone());
        vectorized!(|| for (((weight, m), v), way) in weights.iter_mut().zip(m).zip(&*v).zip(block) {
            let way = known(*way, *v);
            *m = -way / rates;
            *weight += way / (v.sqrt() + eps);
        });
        self.travelled[range.clone()].fill(0.0);
        self.whole.round(range);
    }
}

/// Moves weights by their momentum, and notes how far they went.
fn travel(weights: &mut [f32], m: &[f32], v: &[f32], pace: Pace, travelled: &mut [f32]) {
    vectorized!(|| for (((weight, m), v), way) in weights.iter_mut().zip(m).zip(v).zip(travelled) {
        let step = pace.step(*weight, *m, *v);
        *weight -= step;
        *way -= step;
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The intervals as they come about step by step.
    fn walked(rule: &ZeroOneAdam, until: u64) -> Vec<(u64, u64)> {
        let (mut variance, mut updates, mut local, mut locals) = (1, 0, 1, 0);
        let mut found = Vec::new();
        for step in 2..until {
            found.push((variance, local));
            if !rule.is_frozen(step) {
                if step % variance == 0 {
                    updates += 1;
                    if updates == rule.var_update_scaler {
                        (updates, variance) = (0, variance * 2);
                    }
                }
            } else {
                locals += 1;
                if locals == rule.local_step_scaler {
                    (locals, local) = (0, (local * 2).min(rule.local_step_clipper));
                }
            }
        }
        found
    }

    #[test]
    fn intervals_follow_from_the_step_alone() {
        for (freeze, updates, locals, clipper) in [(6, 2, 2, 4), (100, 1, 3, 1), (3, 4, 3, 2), (50, 3, 7, 16)]
        {
            let rule = ZeroOneAdam {
                eps: 1e-8,
                var_freeze_step: freeze,
                var_update_scaler: updates,
                local_step_scaler: locals,
                local_step_clipper: clipper,
            };
            let found = (2..200).map(|step| (rule.variance_interval(step), rule.local_interval(step)));
            assert!(found.eq(walked(&rule, 200)), "{rule:?}");
        }
    }

    #[test]
    fn intervals_of_any_step_are_found_at_once() {
        let rule = ZeroOneAdam {
            eps: 1e-8,
            var_freeze_step: u64::MAX,
            var_update_scaler: 1,
            local_step_scaler: 1,
            local_step_clipper: 16,
        };
        assert!(rule.variance_interval(u64::MAX) > 1 << 60);
        assert_eq!(ZeroOneAdam { var_freeze_step: 1, ..rule }.local_interval(u64::MAX), 16);
    }
}
