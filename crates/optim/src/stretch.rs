//! One stretch of flat memory that an optimizer updates, and the pass over it.

use std::ops::Range;

use ferrospeed_tensor::Device;
use ferrospeed_tensor::backend::Update;
use ferrospeed_tensor::dtype::Float;
use ferrospeed_tensor::loops::ahead::ask_ahead;
use ferrospeed_tensor::loops::past_cache::{STREAM_FROM_BYTES, Stream, streaming};
use ferrospeed_tensor::loops::simd::vectorized;
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

impl<'a> Gradient<'a> {
    /// How many values there are.
    pub(crate) fn len(self) -> usize {
        match self {
            Gradient::F32(values) => values.len(),
            Gradient::Bf16(values) => values.len(),
            Gradient::F16(values) => values.len(),
        }
    }

    /// Some of them.
    fn part(self, range: Range<usize>) -> Gradient<'a> {
        match self {
            Gradient::F32(values) => Gradient::F32(&values[range]),
            Gradient::Bf16(values) => Gradient::Bf16(&values[range]),
            Gradient::F16(values) => Gradient::F16(&values[range]),
        }
    }
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

impl<'a> Copy16<'a> {
    /// How many bytes it has.
    fn size_bytes(&self) -> usize {
        match self {
            Copy16::None => 0,
            Copy16::Bf16(copy) => size_of_val(*copy),
            Copy16::F16(copy) => size_of_val(*copy),
        }
    }

    /// Takes the first `count` elements off.
    ///
    /// # Panics
    /// When it has fewer: a bug of the caller.
    fn split_off(&mut self, count: usize) -> Copy16<'a> {
        const SHORT: &str = "as long as the weights";
        match self {
            Copy16::None => Copy16::None,
            Copy16::Bf16(copy) => Copy16::Bf16(copy.split_off_mut(..count).expect(SHORT)),
            Copy16::F16(copy) => Copy16::F16(copy.split_off_mut(..count).expect(SHORT)),
        }
    }
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
            Pass::Host { optimizer: Optimizer::ScheduleFree(free), options, step } => {
                free.apply(self, options, *step);
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
    let (gradient, factor) = (stretch.gradient, stretch.gradient_factor);
    assert_eq!(gradient.len(), length, "gradient and weights differ in length");
    let mut copy = std::mem::replace(&mut stretch.copy, Copy16::None);
    let streams = copy.size_bytes() >= STREAM_FROM_BYTES;
    // Each task takes its own blocks out of these lists, so no slice is shared.
    let mut states: Vec<_> = stretch.states.iter_mut().map(|state| state.chunks_mut(BLOCK)).collect();
    let weights = stretch.weights.chunks_mut(BLOCK).enumerate();
    let tasks: Vec<_> = weights
        .map(|(index, weights)| {
            let states: [&mut [f32]; STATES] =
                std::array::from_fn(|state| states[state].next().expect("as many blocks as the weights"));
            let copy = copy.split_off(weights.len());
            let start = index * BLOCK;
            let gradient = gradient.part(start..start + weights.len());
            std::sync::Mutex::new(Some(Block { weights, gradient, factor, states, copy }))
        })
        .collect();
    stretch.device.backend().parallel(tasks.len(), &|index| {
        let task = tasks[index].lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
        let mut block = task.expect("each task runs once");
        // The macro, not the function of that name: the whole loop is compiled for each instruction set.
        let mut run = |stream: Option<&Stream>| vectorized!(|| block.in_one_pass(stream, rule));
        if streams { streaming(|stream| run(Some(stream))) } else { run(None) }
    });
}

/// What one task updates. The types of gradient and copy are asked for in the loop, once per [`LANES`]: a loop for each pair
/// of them would be no faster, and there are many rules.
struct Block<'a, const STATES: usize> {
    weights: &'a mut [f32],
    gradient: Gradient<'a>,
    factor: f32,
    states: [&'a mut [f32]; STATES],
    copy: Copy16<'a>,
}

/// How many elements are taken out, updated and put back together. Arrays on the stack cannot overlap, which lets the
/// compiler vectorise the update; it does not know that of the slices. Enough for it to keep the loop a loop.
const LANES: usize = 64;

impl<const STATES: usize> Block<'_, STATES> {
    #[inline(always)]
    fn in_one_pass(&mut self, stream: Option<&Stream>, rule: &impl Rule<STATES>) {
        let length = self.weights.len();
        let whole = length - length % LANES;
        for start in (0..whole).step_by(LANES) {
            self.lanes::<LANES>(start, stream, rule);
        }
        for start in whole..length {
            self.lanes::<1>(start, None, rule);
        }
    }

    #[inline(always)]
    fn lanes<const N: usize>(&mut self, start: usize, stream: Option<&Stream>, rule: &impl Rule<STATES>) {
        let scaled = match self.gradient {
            Gradient::F32(values) => scaled::<N, _>(values, start, self.factor),
            Gradient::Bf16(values) => scaled::<N, _>(values, start, self.factor),
            Gradient::F16(values) => scaled::<N, _>(values, start, self.factor),
        };
        let mut new = taken::<N>(self.weights, start);
        let mut held = [[0.0f32; N]; STATES];
        for (held, state) in held.iter_mut().zip(&self.states) {
            *held = taken(state, start);
        }
        update(&mut new, &scaled, &mut held, rule);
        let range = start..start + N;
        self.weights[range.clone()].copy_from_slice(&new);
        for (held, state) in held.iter().zip(&mut self.states) {
            state[range.clone()].copy_from_slice(held);
        }
        match &mut self.copy {
            Copy16::None => {}
            Copy16::Bf16(copy) => round(&new, &mut copy[range], stream),
            Copy16::F16(copy) => round(&new, &mut copy[range], stream),
        }
    }
}

#[inline(always)]
fn taken<const N: usize>(values: &[f32], start: usize) -> [f32; N] {
    if N > 1 {
        ask_ahead::<f32, N>(values, start);
    }
    let mut taken = [0.0; N];
    taken.copy_from_slice(&values[start..start + N]);
    taken
}

#[inline(always)]
fn scaled<const N: usize, G: Float>(gradient: &[G], start: usize, factor: f32) -> [f32; N] {
    if N > 1 {
        ask_ahead::<G, N>(gradient, start);
    }
    let mut scaled = [0.0; N];
    for (scaled, gradient) in scaled.iter_mut().zip(&gradient[start..start + N]) {
        *scaled = gradient.widen() * factor;
    }
    scaled
}

#[inline(always)]
fn round<const N: usize, C: Float>(values: &[f32; N], copy: &mut [C], stream: Option<&Stream>) {
    let mut rounded = [C::narrow(0.0); N];
    for (rounded, &value) in rounded.iter_mut().zip(values) {
        *rounded = C::narrow(value);
    }
    match stream {
        Some(stream) => stream.write(copy, &rounded),
        None => copy.copy_from_slice(&rounded),
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
        let device = ferrospeed_cpu::device();
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
        let (numel, device) = (STREAM_FROM_BYTES / size_of::<bf16>() + 77, ferrospeed_cpu::with_threads(2));
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
