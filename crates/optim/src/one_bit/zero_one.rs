//! 0/1 Adam: the second moment is updated ever more rarely, then frozen, and from then on ranks go several steps on their
//! own before they exchange how far they went.
//!
//! Between two updates of the second moment gradients are averaged compressed. After the freeze each rank walks alone for
//! an interval, goes back to where it started, and all take the average of their ways instead; so weights differ between
//! ranks until the interval ends. Both intervals follow from the number of the step.

use ferrospeed_tensor::Device;

use super::{Exchange, Memory, Whole, blend, blend_squares, mask};

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
    pub(super) fn is_frozen(&self, step: u64) -> bool {
        step > self.var_freeze_step.saturating_add(1)
    }

    pub(super) fn updates_variance(&self, step: u64) -> bool {
        step.is_multiple_of(self.variance_interval(step))
    }

    /// The interval of updates of the second moment that is in force at a step.
    pub(super) fn variance_interval(&self, step: u64) -> u64 {
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
    pub(super) fn local_interval(&self, step: u64) -> u64 {
        let frozen = step.saturating_sub(self.var_freeze_step.saturating_add(2));
        let doublings = u32::try_from(frozen / self.local_step_scaler).unwrap_or(u32::MAX);
        1u64.checked_shl(doublings).unwrap_or(u64::MAX).min(self.local_step_clipper)
    }

    pub(super) fn step<X: Exchange>(
        &self,
        device: &Device,
        memory: &mut Memory,
        params: &mut [Whole<'_>],
        step: u64,
        exchange: &mut X,
    ) -> Result<(), X::Error> {
        let frozen = self.is_frozen(step);
        if step == self.var_freeze_step.saturating_add(2) {
            exchange.forget();
        }
        self.moments(device, params, step, exchange)?;
        if !frozen {
            device.each(params.iter_mut(), |_, whole| self.walk(whole, |_, _| ()));
            return Ok(());
        }
        let Memory { travelled, rates, .. } = memory;
        if travelled.len() != params.len() {
            *travelled = params.iter().map(|whole| vec![0.0; whole.weights.len()]).collect();
            *rates = vec![0.0; params.len()];
        }
        device.each(params.iter_mut().zip(travelled.iter_mut()), |_, (whole, travelled)| {
            self.walk(whole, |at, update| travelled[at] -= update);
        });
        rates.iter_mut().zip(params.iter()).for_each(|(rates, whole)| *rates += whole.options.lr);
        if step.is_multiple_of(self.local_interval(step)) {
            self.meet(device, travelled, rates, params, exchange)?;
        }
        Ok(())
    }

    /// Moves a parameter's weights by its momentum, and tells by how much.
    fn walk(&self, whole: &mut Whole<'_>, mut tell: impl FnMut(usize, f32)) {
        let Whole { weights, states, options, .. } = whole;
        let [m, v] = &mut states[..] else { unreachable!("the number was checked") };
        let (lr, decay, eps) = (options.lr as f32, options.weight_decay as f32, self.eps as f32);
        for (at, ((weight, m), v)) in weights.iter_mut().zip(m.iter()).zip(v.iter()).enumerate() {
            let update = lr * (m / (v.sqrt() + eps) + decay * *weight);
            *weight -= update;
            tell(at, update);
        }
    }

    /// Ranks average how far they have gone since they last met, and go on from there.
    fn meet<X: Exchange>(
        &self,
        device: &Device,
        travelled: &mut [Vec<f32>],
        rates: &mut [f64],
        params: &mut [Whole<'_>],
        exchange: &mut X,
    ) -> Result<(), X::Error> {
        let eps = self.eps as f32;
        // Without a rate nobody went anywhere.
        let moved: Vec<bool> = rates.iter().map(|rates| *rates > 0.0).collect();
        let parts = params.iter_mut().zip(travelled.iter_mut()).zip(&moved);
        device.each(parts.filter(|(_, moved)| **moved), |_, ((whole, travelled), _)| {
            let weights = whole.weights.iter_mut().zip(whole.states[1].iter());
            for ((weight, v), way) in weights.zip(travelled.iter_mut()) {
                *weight -= *way;
                *way *= v.sqrt() + eps;
            }
        });
        let ways = travelled.iter_mut().enumerate().filter(|(at, _)| moved[*at]);
        exchange.average(ways.map(|(at, way)| (at, &mut way[..])).collect())?;
        let parts = params.iter_mut().zip(travelled.iter_mut()).zip(rates.iter_mut());
        device.each(parts.filter(|((_, _), rates)| **rates > 0.0), |_, ((whole, travelled), rates)| {
            let [m, v] = &mut whole.states[..] else { unreachable!("the number was checked") };
            mask(travelled, v);
            let rates = std::mem::take(rates) as f32;
            let weights = whole.weights.iter_mut().zip(m.iter_mut()).zip(v.iter());
            for (((weight, m), v), way) in weights.zip(travelled.iter_mut()) {
                *m = -*way / rates;
                *weight += *way / (v.sqrt() + eps);
                *way = 0.0;
            }
        });
        Ok(())
    }

    /// Updates the moments of all parameters.
    fn moments<X: Exchange>(
        &self,
        device: &Device,
        params: &mut [Whole<'_>],
        step: u64,
        exchange: &mut X,
    ) -> Result<(), X::Error> {
        let updates_variance = !self.is_frozen(step) && self.updates_variance(step);
        if self.is_frozen(step) || updates_variance {
            device.each(params.iter_mut(), |_, whole| {
                let [m, v] = &mut whole.states[..] else { unreachable!("the number was checked") };
                blend(m, whole.gradient, whole.options.betas[0]);
                if updates_variance {
                    blend_squares(v, whole.gradient, whole.options.betas[1]);
                }
            });
            return Ok(());
        }
        let mut averaged: Vec<Vec<f32>> = params.iter().map(|whole| whole.gradient.to_vec()).collect();
        exchange.average(averaged.iter_mut().map(|values| &mut values[..]).enumerate().collect())?;
        device.each(params.iter_mut().zip(&mut averaged), |_, (whole, averaged)| {
            let [m, v] = &mut whole.states[..] else { unreachable!("the number was checked") };
            mask(averaged, v);
            blend(m, averaged, whole.options.betas[0]);
        });
        Ok(())
    }
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
