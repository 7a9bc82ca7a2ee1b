//! 1-bit LAMB: after `freeze_step` steps of LAMB second moments and trust ratios are frozen, and the momenta of all
//! parameters are averaged compressed, as one tensor.
//!
//! Momenta of different sizes share one scale per rank, so each is brought to the common size first. The frozen ratio is
//! corrected by how much a second moment that goes on, from gradients reconstructed out of momenta, has moved away.

use ferrospeed_tensor::Device;
use ferrospeed_tensor::loops::simd::{LANES, vectorized};

use super::{BLOCK, Exchange, Memory, Norm, Phase, Values, Whole, blend, blend_squares, blocks, known};

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

impl Ratio {
    /// Of three numbers as a checkpoint keeps them, if a step can go on with them.
    pub fn from_numbers(numbers: &[f64]) -> Option<Ratio> {
        match numbers {
            &[frozen, factor, scale] if numbers.iter().all(|number| number.is_finite()) && factor > 0.0 => {
                Some(Ratio { frozen, factor, scale })
            }
            _ => None,
        }
    }
}

impl OneBitLamb {
    pub(super) fn step<X: Exchange>(
        &self,
        device: &Device,
        memory: &mut Memory,
        params: &mut [Whole<'_>],
        phase: Phase,
        exchange: &mut X,
    ) -> Result<(), X::Error> {
        memory.ratios.resize(params.len(), Ratio::default());
        let Phase::Averaged { freezes } = phase else {
            return self.compressed(device, memory, params, exchange);
        };
        device.each(params.iter_mut().zip(&mut memory.ratios), |_, (whole, ratio)| {
            self.plain(whole, ratio, freezes);
        });
        Ok(())
    }

    /// The trust ratio of a plain step with these norms, which enters the averaged one.
    pub fn trust(&self, ratio: &mut Ratio, of_weights: f64, of_update: f64) -> f64 {
        let trust = match of_weights > 0.0 && of_update > 0.0 {
            true => (of_weights / of_update).clamp(self.min_coeff, self.max_coeff),
            false => 1.0,
        };
        if trust != 1.0 {
            ratio.frozen = self.coeff_beta * ratio.frozen + (1.0 - self.coeff_beta) * trust;
        }
        trust
    }

    /// What brings momenta of these root mean squares to a common size. One that is nothing needs no scale.
    pub fn set_scales(ratios: &mut [Ratio], sizes: &[f64]) {
        let mean = sizes.iter().sum::<f64>() / sizes.len().max(1) as f64;
        for (ratio, &size) in ratios.iter_mut().zip(sizes) {
            ratio.scale = if size > 0.0 { mean / size } else { 1.0 };
        }
    }

    /// Corrects the frozen ratio by how far second moments have drifted apart. Where weights decay, `of_momentum` and `of_all` are
    /// the norms of directions without the decay and with it.
    pub fn correct(&self, ratio: &mut Ratio, drift: f64, decays: bool, of_momentum: f64, of_all: f64) {
        let mut factor = drift;
        if decays {
            let share = if of_all > 0.0 { (of_momentum / of_all).min(1.0) } else { 1.0 };
            factor = factor * share + (1.0 - share);
        }
        let near = |sign: f64| ratio.factor * (1.0 + sign * self.factor_threshold);
        ratio.factor =
            factor.clamp(self.factor_min, self.factor_max.max(self.factor_min)).clamp(near(-1.0), near(1.0));
    }

    fn plain(&self, whole: &mut Whole<'_>, ratio: &mut Ratio, freezes: bool) {
        let (mut room, options) = ([0.0; BLOCK], whole.options);
        let (eps, decay) = (self.eps as f32, options.weight_decay as f32);
        let (mut of_weights, mut of_update) = (Norm::default(), Norm::default());
        for range in blocks(whole.numel()) {
            let room = &mut room[..range.len()];
            whole.read_gradient(range.start, room);
            let (weights, [m, v, fresh]) = whole.parts(range);
            blend(m, room, options.betas[0]);
            blend_squares(v, room, options.betas[1]);
            if freezes {
                fresh.copy_from_slice(v);
            }
            of_weights.add(weights);
            direct(weights, m, v, eps, decay, room);
            of_update.add(room);
        }
        let trust = self.trust(ratio, of_weights.get(), of_update.get());
        let step_size = (options.lr * trust) as f32;
        for range in blocks(whole.numel()) {
            let room = &mut room[..range.len()];
            let (weights, [m, v, _]) = whole.parts(range.clone());
            direct(weights, m, v, eps, decay, room);
            follow(weights, step_size, room);
            whole.round(range);
        }
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
            let sizes: Vec<f64> = params.iter().map(size).collect();
            OneBitLamb::set_scales(ratios, &sizes);
        }
        let numel: usize = params.iter().map(|whole| whole.weights.len()).sum();
        // What lies beyond the last momentum stays from step to step, as DeepSpeed has it.
        fused.resize(exchange.padded(numel), 0.0);
        let mut rest = &mut fused[..];
        let places = params.iter().map(|whole| take(&mut rest, whole.weights.len()));
        device.each(params.iter().zip(ratios.iter()).zip(places), |_, ((whole, ratio), place)| {
            for range in blocks(whole.numel()) {
                whole.read_momentum(range.start, ratio.scale as f32, &mut place[range]);
            }
        });
        exchange.average(vec![(0, &mut Fused(fused))])?;
        let mut rest = &mut fused[..];
        let places: Vec<&mut [f32]> =
            params.iter().map(|whole| take(&mut rest, whole.weights.len())).collect();
        device.each(params.iter_mut().zip(ratios).zip(places), |_, ((whole, ratio), averaged)| {
            self.corrected(whole, ratio, averaged);
        });
        Ok(())
    }

    /// Moves the weights by an averaged momentum, times its scale, with the frozen ratio corrected.
    fn corrected(&self, whole: &mut Whole<'_>, ratio: &mut Ratio, averaged: &mut [f32]) {
        let options = whole.options;
        let (eps, decay, scale) = (self.eps as f32, options.weight_decay as f32, ratio.scale as f32);
        let (mut of_momentum, mut of_all) = (Norm::default(), Norm::default());
        let (mut room, mut factor) = ([0.0; BLOCK], 0.0f32);
        for range in blocks(whole.numel()) {
            let (room, averaged) = (&mut room[..range.len()], &mut averaged[range.clone()]);
            let (weights, [m, v, fresh]) = whole.parts(range);
            replace_momentum(m, averaged, scale, v, options.betas[0], room);
            blend_squares(fresh, room, options.betas[1]);
            factor = factor.max(drift(v, fresh, eps));
            vectorized!(|| for ((direction, m), v) in averaged.iter_mut().zip(&*m).zip(&*v) {
                *direction = m / (v.sqrt() + eps);
            });
            of_momentum.add(averaged);
            if decay > 0.0 {
                vectorized!(|| for (direction, weight) in averaged.iter_mut().zip(&*weights) {
                    *direction += decay * weight;
                });
                of_all.add(averaged);
            }
        }
        let (drift, decays) = (f64::from(factor), decay > 0.0);
        self.correct(ratio, drift, decays, of_momentum.get(), of_all.get());
        let step_size = (options.lr * ratio.frozen * ratio.factor) as f32;
        for range in blocks(whole.numel()) {
            let (weights, [_, _, _]) = whole.parts(range.clone());
            follow(weights, step_size, &averaged[range.clone()]);
            whole.round(range);
        }
    }
}

/// The momenta of all parameters end to end.
struct Fused<'a>(&'a mut [f32]);

impl Values for Fused<'_> {
    fn numel(&self) -> usize {
        self.0.len()
    }

    fn give(&mut self, start: usize, block: &mut [f32]) {
        block.copy_from_slice(&self.0[start..start + block.len()]);
    }

    fn take(&mut self, start: usize, block: &[f32]) {
        self.0[start..start + block.len()].copy_from_slice(block);
    }
}

/// The root mean square of a momentum.
fn size(whole: &Whole<'_>) -> f64 {
    let mut norm = Norm::default();
    norm.add(whole.states[0]);
    norm.get() / (whole.numel().max(1) as f64).sqrt()
}

/// The directions in which weights go.
fn direct(weights: &[f32], m: &[f32], v: &[f32], eps: f32, decay: f32, out: &mut [f32]) {
    vectorized!(|| for (((out, weight), m), v) in out.iter_mut().zip(weights).zip(m).zip(v) {
        *out = m / (v.sqrt() + eps) + decay * weight;
    });
}

fn follow(weights: &mut [f32], step_size: f32, directions: &[f32]) {
    vectorized!(|| for (weight, direction) in weights.iter_mut().zip(directions) {
        *weight -= step_size * direction;
    });
}

/// Puts an averaged momentum, times its scale, in the place of the old one; of both it follows which gradient led from one
/// to the other.
fn replace_momentum(m: &mut [f32], averaged: &[f32], scale: f32, v: &[f32], beta: f64, gradient: &mut [f32]) {
    let (beta, one_less) = (beta as f32, (1.0 - beta) as f32);
    vectorized!(|| for (((m, averaged), v), gradient) in m.iter_mut().zip(averaged).zip(v).zip(gradient) {
        let new = known(averaged / scale, *v);
        *gradient = (new - beta * *m) / one_less;
        *m = new;
    });
}

/// How much larger a frozen second moment makes a step than the one that goes on would, at most.
fn drift(v: &[f32], fresh: &[f32], eps: f32) -> f32 {
    let mut largest = [0.0f32; LANES];
    vectorized!(|| for (v, fresh) in v.chunks(LANES).zip(fresh.chunks(LANES)) {
        for ((largest, v), fresh) in largest.iter_mut().zip(v).zip(fresh) {
            *largest = largest.max((v.sqrt() + eps) / (fresh.sqrt() + eps));
        }
    });
    largest.into_iter().fold(0.0, f32::max)
}

/// The first `count` of what is left.
fn take<'a>(rest: &mut &'a mut [f32], count: usize) -> &'a mut [f32] {
    let (first, others) = std::mem::take(rest).split_at_mut(count);
    *rest = others;
    first
}
