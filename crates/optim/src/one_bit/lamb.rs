//! 1-bit LAMB: after `freeze_step` steps of LAMB second moments and trust ratios are frozen, and the momenta of all
//! parameters are averaged compressed, as one tensor.
//!
//! Momenta of different sizes share one scale per rank, so each is brought to the common size first. The frozen ratio is
//! corrected by how much a second moment that goes on, from gradients reconstructed out of momenta, has moved away.

use ferrospeed_tensor::Device;

use super::{Exchange, Memory, Whole, blend, blend_squares, mask, norm};

/// Its fixed options.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OneBitLamb {
    /// Added to the denominator.
    pub eps: f64,
    /// The last step with averaged gradients.
    pub freeze_step: u64,
    /// The largest trust ratio.
    pub max_coeff: f64,
    /// The smallest.
    pub min_coeff: f64,
    /// Decay of the averaged ratio.
    pub coeff_beta: f64,
    /// The largest correction of the frozen ratio.
    pub factor_max: f64,
    /// The smallest.
    pub factor_min: f64,
    /// The largest change of the correction per step, as a share of it.
    pub factor_threshold: f64,
}

/// What is kept of one parameter as a whole.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ratio {
    /// The averaged trust ratio.
    pub frozen: f64,
    /// Its last correction.
    pub factor: f64,
    /// What brings the momentum to the common size; 0 before that is known.
    pub scale: f64,
}

impl Default for Ratio {
    fn default() -> Ratio {
        Ratio { frozen: 0.0, factor: 1.0, scale: 0.0 }
    }
}

impl OneBitLamb {
    pub(super) fn step<X: Exchange>(
        &self,
        device: &Device,
        memory: &mut Memory,
        params: &mut [Whole<'_>],
        step: u64,
        exchange: &mut X,
    ) -> Result<(), X::Error> {
        memory.ratios.resize(params.len(), Ratio::default());
        if step > self.freeze_step {
            return self.compressed(device, memory, params, exchange);
        }
        device.each(params.iter_mut().zip(&mut memory.ratios), |_, (whole, ratio)| {
            self.plain(whole, ratio, step);
        });
        Ok(())
    }

    fn plain(&self, whole: &mut Whole<'_>, ratio: &mut Ratio, step: u64) {
        let Whole { weights, gradient, states, options } = whole;
        let [m, v, fresh] = &mut states[..] else { unreachable!("the number was checked") };
        blend(m, gradient, options.betas[0]);
        blend_squares(v, gradient, options.betas[1]);
        if step == self.freeze_step {
            fresh.copy_from_slice(v);
        }
        let (eps, decay) = (self.eps as f32, options.weight_decay as f32);
        let directions = |weights: &[f32]| -> Vec<f32> {
            let moments = m.iter().zip(v.iter());
            moments.zip(weights).map(|((m, v), weight)| m / (v.sqrt() + eps) + decay * weight).collect()
        };
        let directions = directions(weights);
        let norms = (norm(weights.iter().copied()), norm(directions.iter().copied()));
        let trust = match norms {
            (of_weights, of_update) if of_weights > 0.0 && of_update > 0.0 => {
                (of_weights / of_update).clamp(self.min_coeff, self.max_coeff)
            }
            _ => 1.0,
        };
        if trust != 1.0 {
            ratio.frozen = self.coeff_beta * ratio.frozen + (1.0 - self.coeff_beta) * trust;
        }
        let step_size = (options.lr * trust) as f32;
        weights.iter_mut().zip(&directions).for_each(|(weight, direction)| *weight -= step_size * direction);
    }

    fn compressed<X: Exchange>(
        &self,
        device: &Device,
        memory: &mut Memory,
        params: &mut [Whole<'_>],
        exchange: &mut X,
    ) -> Result<(), X::Error> {
        let Memory { ratios, fused, .. } = memory;
        if ratios.iter().all(|ratio| ratio.scale == 0.0) {
            self.find_scales(ratios, params);
        }
        let numel: usize = params.iter().map(|whole| whole.weights.len()).sum();
        // What lies beyond the last momentum stays from step to step, as DeepSpeed has it.
        fused.resize(exchange.padded(numel), 0.0);
        let mut rest = &mut fused[..];
        let places = params.iter().map(|whole| take(&mut rest, whole.weights.len()));
        device.each(params.iter().zip(ratios.iter()).zip(places), |_, ((whole, ratio), place)| {
            let beta = whole.options.betas[0];
            let (beta, one_less, scale) = (beta as f32, (1.0 - beta) as f32, ratio.scale as f32);
            for ((place, m), gradient) in place.iter_mut().zip(whole.states[0].iter()).zip(whole.gradient) {
                *place = (beta * m + one_less * gradient) * scale;
            }
        });
        exchange.average(vec![(0, &mut fused[..])])?;
        let mut rest = &mut fused[..];
        let places: Vec<&mut [f32]> =
            params.iter().map(|whole| take(&mut rest, whole.weights.len())).collect();
        device.each(params.iter_mut().zip(ratios).zip(places), |_, ((whole, ratio), averaged)| {
            averaged.iter_mut().for_each(|value| *value /= ratio.scale as f32);
            self.corrected(whole, ratio, averaged);
        });
        Ok(())
    }

    /// The sizes of momenta against their mean. One that is nothing needs no scale.
    fn find_scales(&self, ratios: &mut [Ratio], params: &[Whole<'_>]) {
        let size = |whole: &Whole<'_>| {
            norm(whole.states[0].iter().copied()) / (whole.weights.len().max(1) as f64).sqrt()
        };
        let sizes: Vec<f64> = params.iter().map(size).collect();
        let mean = sizes.iter().sum::<f64>() / sizes.len().max(1) as f64;
        for (ratio, size) in ratios.iter_mut().zip(sizes) {
            ratio.scale = if size > 0.0 { mean / size } else { 1.0 };
        }
    }

    /// Moves the weights by an averaged momentum, with the frozen ratio corrected.
    fn corrected(&self, whole: &mut Whole<'_>, ratio: &mut Ratio, averaged: &mut [f32]) {
        let Whole { weights, states, options, .. } = whole;
        let [m, v, fresh] = &mut states[..] else { unreachable!("the number was checked") };
        mask(averaged, v);
        let (beta, one_less) = (options.betas[0] as f32, (1.0 - options.betas[0]) as f32);
        // Until its new value takes its place the old momentum tells which gradient led from one to the other.
        for (m, new) in m.iter_mut().zip(averaged.iter()) {
            *m = (new - beta * *m) / one_less;
        }
        blend_squares(fresh, m, options.betas[1]);
        m.copy_from_slice(averaged);

        let (eps, decay) = (self.eps as f32, options.weight_decay as f32);
        let mut factor = 0.0f32;
        for (v, fresh) in v.iter().zip(fresh.iter()) {
            factor = factor.max((v.sqrt() + eps) / (fresh.sqrt() + eps));
        }
        let mut factor = f64::from(factor);
        let directions = averaged;
        let of_momentum = {
            directions.iter_mut().zip(v.iter()).for_each(|(direction, v)| *direction /= v.sqrt() + eps);
            norm(directions.iter().copied())
        };
        if decay > 0.0 {
            directions.iter_mut().zip(weights.iter()).for_each(|(direction, w)| *direction += decay * w);
            let whole = norm(directions.iter().copied());
            let share = if whole > 0.0 { (of_momentum / whole).min(1.0) } else { 1.0 };
            factor = factor * share + (1.0 - share);
        }
        let near = |sign: f64| ratio.factor * (1.0 + sign * self.factor_threshold);
        ratio.factor =
            factor.clamp(self.factor_min, self.factor_max.max(self.factor_min)).clamp(near(-1.0), near(1.0));
        let step_size = (options.lr * ratio.frozen * ratio.factor) as f32;
        weights.iter_mut().zip(directions).for_each(|(weight, direction)| *weight -= step_size * *direction);
    }
}

/// The first `count` of what is left.
fn take<'a>(rest: &mut &'a mut [f32], count: usize) -> &'a mut [f32] {
    let (first, others) = std::mem::take(rest).split_at_mut(count);
    *rest = others;
    first
}
