//! One stretch of flat memory that an optimizer updates, and the pass over it.

use ferrospeed_tensor::Device;
use ferrospeed_tensor::backend::Update;
use ferrospeed_tensor::cpu::ahead::ask_ahead;
use ferrospeed_tensor::cpu::past_cache::{STREAM_FROM_BYTES, Stream, streaming};
use ferrospeed_tensor::cpu::simd::vectorized;
use ferrospeed_tensor::dtype::Float;
use half::{bf16, f16};

use crate::adagrad::Squares;
use crate::adam::Moments;
use crate::lamb::{Apply, Direction};
use crate::lion::Sign;
use crate::own::{OwnOptimizer, Slices};
use crate::sgd::{Momentum, Plain};
use crate::{GroupOptions, Optimizer, Pass};

/// Gradients in the type they arrived in.
#[derive(Debug, Clone, Copy)]
pub enum Gradient<'a> {
    /// 32-bit.
    F32(&'a [f32]),
    /// Brain float.
    Bf16(&'a [bf16]),
    /// Half.
    F16(&'a [f16]),
}

/// Where the rounded copy of the new weights goes.
#[derive(Debug)]
pub enum Copy16<'a> {
    /// Nowhere: the weights themselves are what kernels read.
    None,
    /// Brain float.
    Bf16(&'a mut [bf16]),
    /// Half.
    F16(&'a mut [f16]),
}

/// A stretch of weights with everything its update reads and writes; all slices have one length.
#[derive(Debug)]
pub struct Stretch<'a> {
    /// f32 master weights.
    pub weights: &'a mut [f32],
    /// Their gradient.
    pub gradient: Gradient<'a>,
    /// Multiplies the gradient first: one over the loss scale, times the clipping factor.
    pub gradient_factor: f32,
    /// The optimizer's states.
    pub states: Vec<&'a mut [f32]>,
    /// Where the 16-bit copy goes.
    pub copy: Copy16<'a>,
    /// Whose threads do the work.
    pub device: &'a Device,
}

impl Stretch<'_> {
    /// Runs any pass of a step over the stretch.
    ///
    /// # Panics
    /// When the stretch does not hold the states of the optimizer: a bug of the caller.
    pub fn pass(&mut self, pass: &Pass) {
        match pass {
            Pass::Kernel(update) => self.apply(update),
            Pass::Host { optimizer: Optimizer::Torch(torch), options, step } => {
                torch.apply(self, options, *step);
            }
            Pass::Host { optimizer: Optimizer::Own(own), options, step } => {
                run_own(self, &*own.0, options, *step);
            }
            Pass::Host { optimizer, options, step } => self.apply(&optimizer.update(options, *step)),
        }
    }

    /// Runs one step over the stretch.
    ///
    /// # Panics
    /// When the stretch does not hold the states of the update: a bug of the caller.
    pub fn apply(&mut self, update: &Update) {
        match *update {
            Update::Adam { decoupled: true, betas, rest, eps, decay, step_size, inverse_root_correction } => {
                run(self, &Moments::<true> { betas, rest, eps, decay, step_size, inverse_root_correction });
            }
            Update::Adam {
                decoupled: false,
                betas,
                rest,
                eps,
                decay,
                step_size,
                inverse_root_correction,
            } => {
                run(self, &Moments::<false> { betas, rest, eps, decay, step_size, inverse_root_correction });
            }
            Update::Sgd { lr, decay, .. } if self.states.is_empty() => run(self, &Plain { lr, decay }),
            Update::Sgd { lr, decay, momentum, entering, nesterov } => {
                run(self, &Momentum { lr, decay, momentum, entering, nesterov });
            }
            Update::Adagrad { lr, decay, eps } => run(self, &Squares { lr, decay, eps }),
            Update::Lion { lr, shrink, betas, rest } => run(self, &Sign { lr, shrink, betas, rest }),
            Update::LambDirection { betas, rest, eps, eps_inside_sqrt: eps_inside, decay } => {
                run(self, &Direction { betas, rest, eps, eps_inside, decay });
            }
            Update::LambApply { step_size } => run(self, &Apply { step_size }),
        }
    }
}

/// Elements per task: four f32 streams of this length fit the second-level cache.
const BLOCK: usize = 32 * 1024;

/// Runs an optimizer of the program's own over a stretch, block by block on the device's threads.
fn run_own(stretch: &mut Stretch<'_>, own: &dyn OwnOptimizer, options: &GroupOptions, step: u64) {
    let factor = stretch.gradient_factor;
    let widened: Vec<f32> = match stretch.gradient {
        Gradient::F32(gradient) => gradient.iter().map(|value| value * factor).collect(),
        Gradient::Bf16(gradient) => gradient.iter().map(|value| value.to_f32() * factor).collect(),
        Gradient::F16(gradient) => gradient.iter().map(|value| value.to_f32() * factor).collect(),
    };
    let mut states: Vec<_> = stretch.states.iter_mut().map(|state| state.chunks_mut(BLOCK)).collect();
    let tasks: Vec<_> = stretch
        .weights
        .chunks_mut(BLOCK)
        .zip(widened.chunks(BLOCK))
        .map(|(weights, gradient)| {
            let states: Vec<&mut [f32]> =
                states.iter_mut().map(|state| state.next().expect("as long as the weights")).collect();
            std::sync::Mutex::new(Some((weights, gradient, states)))
        })
        .collect();
    stretch.device.backend().parallel(tasks.len(), &|index| {
        let task = tasks[index].lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
        let (weights, gradient, mut states) = task.expect("each task runs once");
        own.update(Slices { weights, gradient, states: &mut states }, options, step);
    });
    drop(tasks);
    match &mut stretch.copy {
        Copy16::None => {}
        Copy16::Bf16(copy) => {
            copy.iter_mut().zip(&*stretch.weights).for_each(|(copy, weight)| *copy = bf16::from_f32(*weight));
        }
        Copy16::F16(copy) => {
            copy.iter_mut().zip(&*stretch.weights).for_each(|(copy, weight)| *copy = f16::from_f32(*weight));
        }
    }
}

/// An update of one element: (weight, gradient, states) in, weight out.
pub(crate) trait Rule<const STATES: usize>: Sync {
    fn update(&self, weight: f32, gradient: f32, states: &mut [f32; STATES]) -> f32;
}

/// Runs a rule over a stretch in one pass, in blocks on the device's threads.
///
/// # Panics
/// When the slices differ in length or number: a bug of the caller.
pub(crate) fn run<const STATES: usize>(stretch: &mut Stretch<'_>, rule: &impl Rule<STATES>) {
    let length = stretch.weights.len();
    assert_eq!(
        stretch.states.len(),
        STATES,
        "the stretch holds {} states, the rule {STATES}",
        stretch.states.len()
    );
    assert!(stretch.states.iter().all(|state| state.len() == length), "states and weights differ in length");
    match stretch.gradient {
        Gradient::F32(gradient) => with_copy(stretch, gradient, rule),
        Gradient::Bf16(gradient) => with_copy(stretch, gradient, rule),
        Gradient::F16(gradient) => with_copy(stretch, gradient, rule),
    }
}

fn with_copy<const STATES: usize, G: Float>(
    stretch: &mut Stretch<'_>,
    gradient: &[G],
    rule: &impl Rule<STATES>,
) {
    assert_eq!(gradient.len(), stretch.weights.len(), "gradient and weights differ in length");
    match std::mem::replace(&mut stretch.copy, Copy16::None) {
        Copy16::None => pass::<STATES, G, bf16>(stretch, gradient, None, rule),
        Copy16::Bf16(copy) => pass(stretch, gradient, Some(copy), rule),
        Copy16::F16(copy) => pass(stretch, gradient, Some(copy), rule),
    }
}

fn pass<const STATES: usize, G: Float, C: Float>(
    stretch: &mut Stretch<'_>,
    gradient: &[G],
    copy: Option<&mut [C]>,
    rule: &impl Rule<STATES>,
) {
    let factor = stretch.gradient_factor;
    let streams = copy.as_deref().is_some_and(|copy| size_of_val(copy) >= STREAM_FROM_BYTES);
    // Each task takes its own blocks out of these lists, so no slice is shared.
    let mut weights = stretch.weights.chunks_mut(BLOCK);
    let mut states: Vec<_> = stretch.states.iter_mut().map(|state| state.chunks_mut(BLOCK)).collect();
    let mut copies = copy.map(|copy| copy.chunks_mut(BLOCK));
    let tasks: Vec<_> = gradient
        .chunks(BLOCK)
        .map(|gradient| {
            let weights = weights.next().expect("as many blocks as the gradient");
            let states: [&mut [f32]; STATES] =
                std::array::from_fn(|index| states[index].next().expect("as many blocks as the gradient"));
            let copy = copies.as_mut().map(|copies| copies.next().expect("as many blocks as the gradient"));
            std::sync::Mutex::new(Some((weights, gradient, states, copy)))
        })
        .collect();
    stretch.device.backend().parallel(tasks.len(), &|index| {
        let task = tasks[index].lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
        let (weights, gradient, mut states, copy) = task.expect("each task runs once");
        let run = |stream: Option<&Stream>| block(weights, gradient, factor, &mut states, copy, stream, rule);
        if streams { streaming(|stream| run(Some(stream))) } else { run(None) }
    });
}

fn block<const STATES: usize, G: Float, C: Float>(
    weights: &mut [f32],
    gradient: &[G],
    factor: f32,
    states: &mut [&mut [f32]; STATES],
    copy: Option<&mut [C]>,
    stream: Option<&Stream>,
    rule: &impl Rule<STATES>,
) {
    // The macro, not the function of that name: the whole loop is compiled for each instruction set.
    vectorized!(|| in_one_pass(weights, gradient, factor, states, copy, stream, rule));
}

#[inline(always)]
fn in_one_pass<const STATES: usize, G: Float, C: Float>(
    weights: &mut [f32],
    gradient: &[G],
    factor: f32,
    states: &mut [&mut [f32]; STATES],
    mut copy: Option<&mut [C]>,
    stream: Option<&Stream>,
    rule: &impl Rule<STATES>,
) {
    let length = weights.len();
    let whole = length - length % LANES;
    for start in (0..whole).step_by(LANES) {
        let copy = copy.as_deref_mut();
        lanes::<STATES, LANES, G, C>(start, weights, gradient, factor, states, copy, stream, rule);
    }
    for start in whole..length {
        lanes::<STATES, 1, G, C>(start, weights, gradient, factor, states, copy.as_deref_mut(), None, rule);
    }
}

/// How many elements are taken out, updated and put back together. Arrays on the stack cannot overlap, which lets the
/// compiler vectorise the update; it does not know that of the slices. Enough for it to keep the loop a loop.
const LANES: usize = 64;

#[inline(always)]
fn lanes<const STATES: usize, const N: usize, G: Float, C: Float>(
    start: usize,
    weights: &mut [f32],
    gradient: &[G],
    factor: f32,
    states: &mut [&mut [f32]; STATES],
    copy: Option<&mut [C]>,
    stream: Option<&Stream>,
    rule: &impl Rule<STATES>,
) {
    let range = start..start + N;
    if N > 1 {
        ask_ahead::<f32, N>(weights, start);
        ask_ahead::<G, N>(gradient, start);
        states.iter().for_each(|state| ask_ahead::<f32, N>(state, start));
    }
    let mut held = [[0.0f32; N]; STATES];
    for (held, state) in held.iter_mut().zip(states.iter()) {
        held.copy_from_slice(&state[range.clone()]);
    }
    let mut new = [0.0f32; N];
    new.copy_from_slice(&weights[range.clone()]);
    let mut scaled = [0.0f32; N];
    for (scaled, gradient) in scaled.iter_mut().zip(&gradient[range.clone()]) {
        *scaled = gradient.widen() * factor;
    }
    update(&mut new, &scaled, &mut held, rule);
    weights[range.clone()].copy_from_slice(&new);
    for (held, state) in held.iter().zip(states.iter_mut()) {
        state[range.clone()].copy_from_slice(held);
    }
    match (copy, stream) {
        (None, _) => {}
        (Some(copy), None) => {
            for (copy, &value) in copy[range].iter_mut().zip(&new) {
                *copy = C::narrow(value);
            }
        }
        (Some(copy), Some(stream)) => {
            let mut rounded = [C::narrow(0.0); N];
            for (rounded, &value) in rounded.iter_mut().zip(&new) {
                *rounded = C::narrow(value);
            }
            stream.write(&mut copy[range], &rounded);
        }
    }
}

#[inline(always)]
fn update<const STATES: usize, const N: usize>(
    weights: &mut [f32; N],
    gradient: &[f32; N],
    states: &mut [[f32; N]; STATES],
    rule: &impl Rule<STATES>,
) {
    for lane in 0..N {
        let mut own: [f32; STATES] = std::array::from_fn(|state| states[state][lane]);
        weights[lane] = rule.update(weights[lane], gradient[lane], &mut own);
        for state in 0..STATES {
            states[state][lane] = own[state];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{adam, lion, sgd};

    const OPTIONS: GroupOptions = GroupOptions { lr: 0.1, weight_decay: 0.01, betas: [0.9, 0.99] };
    const COUNT: usize = 2 * BLOCK + 77;

    fn values(seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 8_388_608.0 - 1.0
        };
        (0..COUNT).map(|_| next()).collect()
    }

    /// Three steps with the stretch cut at `cuts`: all bits of the weights and of their copy.
    fn train(optimizer: &Optimizer, cuts: &[usize]) -> (Vec<u32>, Vec<u16>) {
        let device = Device::cpu();
        let mut weights = values(1);
        let mut states = vec![vec![0.0f32; COUNT]; optimizer.state_names(&OPTIONS).len()];
        let mut copy = vec![bf16::ZERO; COUNT];
        let ends = cuts.iter().copied().chain([COUNT]);
        for step in 1..=3 {
            let gradient: Vec<bf16> = values(step as u32 + 1).into_iter().map(bf16::from_f32).collect();
            let mut start = 0;
            for end in ends.clone() {
                let mut stretch = Stretch {
                    weights: &mut weights[start..end],
                    gradient: Gradient::Bf16(&gradient[start..end]),
                    gradient_factor: 0.5,
                    states: states.iter_mut().map(|state| &mut state[start..end]).collect(),
                    copy: Copy16::Bf16(&mut copy[start..end]),
                    device: &device,
                };
                stretch.apply(&optimizer.update(&OPTIONS, step));
                start = end;
            }
        }
        (weights.iter().map(|w| w.to_bits()).collect(), copy.iter().map(|c| c.to_bits()).collect())
    }

    #[test]
    fn a_stretch_may_be_cut_anywhere_and_its_copy_is_its_rounded_self() {
        for optimizer in [
            Optimizer::Adam(adam::Adam { eps: 1e-8, bias_correction: true, decoupled: true }),
            Optimizer::Lion(lion::Lion),
            Optimizer::Sgd(sgd::Sgd { dampening: 0.0, nesterov: true }),
        ] {
            let (weights, copy) = train(&optimizer, &[]);
            for cuts in [&[1][..], &[63, 64, 130], &[BLOCK + 5, 2 * BLOCK]] {
                assert!((weights.clone(), copy.clone()) == train(&optimizer, cuts), "{optimizer:?} {cuts:?}");
            }
            let rounded = weights.iter().map(|&bits| bf16::from_f32(f32::from_bits(bits)).to_bits());
            assert!(rounded.eq(copy), "{optimizer:?}");
        }
    }

    #[test]
    fn a_copy_that_is_streamed_is_the_rounded_weights_too() {
        let (numel, device) = (STREAM_FROM_BYTES / size_of::<bf16>() + 77, Device::cpu_with_threads(2));
        let mut weights: Vec<f32> = (0..numel).map(|i| (i % 1013) as f32 / 7.0 - 50.0).collect();
        let gradient: Vec<f32> = (0..numel).map(|i| (i % 97) as f32 - 48.0).collect();
        let mut copy = vec![bf16::ZERO; numel];
        let mut stretch = Stretch {
            weights: &mut weights,
            gradient: Gradient::F32(&gradient),
            gradient_factor: 1.0,
            states: Vec::new(),
            copy: Copy16::Bf16(&mut copy),
            device: &device,
        };
        let sgd = Optimizer::Sgd(sgd::Sgd { dampening: 0.0, nesterov: false });
        stretch.apply(&sgd.update(&GroupOptions { betas: [0.0; 2], ..OPTIONS }, 1));
        assert!(weights.iter().zip(&copy).all(|(weight, copy)| bf16::from_f32(*weight) == *copy));
    }
}
