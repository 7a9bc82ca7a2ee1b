//! 0/1 Adam: the second moment is updated ever more rarely, then frozen, and from then on ranks go several steps on their
//! own before they exchange how far they went.
//!
//! Between two updates of the second moment gradients are averaged compressed. After the freeze each rank walks alone for
//! an interval, goes back to where it started, and all take the average of their ways instead; so weights differ between
//! ranks until the interval ends. Both intervals follow from the number of the step.

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
        memory: &mut Memory,
        params: &mut [Whole<'_>],
        step: u64,
        exchange: &mut X,
    ) -> Result<(), X::Error> {
        let frozen = self.is_frozen(step);
        if step == self.var_freeze_step.saturating_add(2) {
            exchange.forget();
        }
        if frozen && memory.travelled.len() != params.len() {
            memory.travelled = params.iter().map(|whole| vec![0.0; whole.weights.len()]).collect();
            memory.rates = vec![0.0; params.len()];
        }
        for (index, whole) in params.iter_mut().enumerate() {
            self.moments(index, whole, step, exchange)?;
            let Whole { weights, states, options, .. } = whole;
            let [m, v] = &mut states[..] else { unreachable!("the number was checked") };
            let (lr, decay, eps) = (options.lr as f32, options.weight_decay as f32, self.eps as f32);
            let travelled = memory.travelled.get_mut(index).filter(|_| frozen);
            let Some(travelled) = travelled else {
                for ((weight, m), v) in weights.iter_mut().zip(m.iter()).zip(v.iter()) {
                    *weight -= lr * (m / (v.sqrt() + eps) + decay * *weight);
                }
                continue;
            };
            for (((weight, m), v), way) in
                weights.iter_mut().zip(m.iter()).zip(v.iter()).zip(travelled.iter_mut())
            {
                let update = lr * (m / (v.sqrt() + eps) + decay * *weight);
                *weight -= update;
                *way -= update;
            }
            memory.rates[index] += options.lr;
            // Without a rate nobody went anywhere.
            if step.is_multiple_of(self.local_interval(step)) && memory.rates[index] > 0.0 {
                let rates = std::mem::take(&mut memory.rates[index]) as f32;
                for ((weight, v), way) in weights.iter_mut().zip(v.iter()).zip(travelled.iter_mut()) {
                    *weight -= *way;
                    *way *= v.sqrt() + eps;
                }
                exchange.average(index, travelled)?;
                mask(travelled, v);
                for (((weight, m), v), way) in
                    weights.iter_mut().zip(m.iter_mut()).zip(v.iter()).zip(travelled)
                {
                    *m = -*way / rates;
                    *weight += *way / (v.sqrt() + eps);
                    *way = 0.0;
                }
            }
        }
        Ok(())
    }

    /// Updates the moments of a parameter.
    fn moments<X: Exchange>(
        &self,
        index: usize,
        whole: &mut Whole<'_>,
        step: u64,
        exchange: &mut X,
    ) -> Result<(), X::Error> {
        let [beta1, beta2] = whole.options.betas;
        let [m, v] = &mut whole.states[..] else { unreachable!("the number was checked") };
        if self.is_frozen(step) {
            blend(m, whole.gradient, beta1);
        } else if self.updates_variance(step) {
            blend(m, whole.gradient, beta1);
            blend_squares(v, whole.gradient, beta2);
        } else {
            let mut averaged = whole.gradient.to_vec();
            exchange.average(index, &mut averaged)?;
            mask(&mut averaged, v);
            blend(m, &averaged, beta1);
        }
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
