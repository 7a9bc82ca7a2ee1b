//! 1-bit rules work in blocks and in few passes: they give the bits of one plain pass after the other.

use ferrospeed_config::{AutoValues, Config};
use ferrospeed_optim::one_bit::{Exchange, Memory, OneBit, Values, Whole};
use ferrospeed_optim::{Copy16, Gradient, GroupOptions, Optimizer};
use half::bf16;
use serde_json::{Value, json};

const STEPS: u64 = 14;
const FACTOR: f32 = 0.37;
/// One, and more than a few blocks.
const SIZES: [usize; 2] = [3, 3 * 4096 + 77];

/// Signs of one size for each tensor; blocks come in a length that fits nothing.
struct Signs;

const BLOCK: usize = 1000;

fn signs(values: &mut [f32]) {
    let size = values.iter().map(|value| value.abs()).sum::<f32>() / values.len() as f32;
    values.iter_mut().for_each(|value| *value = if *value >= 0.0 { size } else { -size });
}

impl Exchange for Signs {
    type Error = std::convert::Infallible;

    fn padded(&self, numel: usize) -> usize {
        numel.next_multiple_of(16)
    }

    fn average(&mut self, tensors: Vec<(usize, &mut dyn Values)>) -> Result<(), Self::Error> {
        for (_, tensor) in tensors {
            let mut values = vec![0.0; tensor.numel()];
            for (block, values) in values.chunks_mut(BLOCK).enumerate() {
                tensor.give(block * BLOCK, values);
            }
            signs(&mut values);
            for (block, values) in values.chunks(BLOCK).enumerate() {
                tensor.take(block * BLOCK, values);
            }
        }
        Ok(())
    }

    fn forget(&mut self) {}
}

/// What a parameter is before and after a step.
#[derive(Clone, Default)]
struct State {
    weights: Vec<f32>,
    states: [Vec<f32>; 3],
    /// 0/1 Adam: how far it went, and at which rates.
    travelled: Vec<f32>,
    rates: f64,
    /// 1-bit LAMB: the averaged ratio, its correction, and the scale of its momentum.
    ratio: [f64; 3],
}

fn each(numel: usize, out: &mut [f32], value: impl Fn(usize, f32) -> f32) {
    (0..numel).for_each(|at| out[at] = value(at, out[at]));
}

fn blend(average: &mut [f32], values: &[f32], beta: f64) {
    each(values.len(), average, |at, old| beta as f32 * old + (1.0 - beta) as f32 * values[at]);
}

fn blend_squares(average: &mut [f32], values: &[f32], beta: f64) {
    each(values.len(), average, |at, old| beta as f32 * old + (1.0 - beta) as f32 * values[at] * values[at]);
}

fn mask(values: &mut [f32], variance: &[f32]) {
    each(variance.len(), values, |at, value| if variance[at] == 0.0 { 0.0 } else { value });
}

fn norm(values: &[f32]) -> f64 {
    values.iter().map(|value| f64::from(*value) * f64::from(*value)).sum::<f64>().sqrt()
}

/// Moves the weights by their momentum; returns by how much.
fn walk(state: &mut State, options: &GroupOptions, eps: f64) -> Vec<f32> {
    let (lr, decay, eps) = (options.lr as f32, options.weight_decay as f32, eps as f32);
    let State { weights, states: [m, v, _], .. } = state;
    let step = |at: usize| lr * (m[at] / (v[at].sqrt() + eps) + decay * weights[at]);
    let steps: Vec<f32> = (0..weights.len()).map(step).collect();
    each(steps.len(), weights, |at, weight| weight - steps[at]);
    steps
}

fn adam(eps: f64, frozen: bool, state: &mut State, gradient: &[f32], options: &GroupOptions) {
    let [m, v, _] = &mut state.states;
    blend(m, gradient, options.betas[0]);
    if frozen {
        signs(m);
        mask(m, v);
    } else {
        blend_squares(v, gradient, options.betas[1]);
    }
    walk(state, options, eps);
}

/// `variance` and `meets` say what this step does, from the lists below.
fn zero_one(
    eps: f64,
    variance: bool,
    meets: Option<bool>,
    state: &mut State,
    gradient: &[f32],
    options: &GroupOptions,
) {
    let [m, v, _] = &mut state.states;
    if variance || meets.is_some() {
        blend(m, gradient, options.betas[0]);
    } else {
        let mut averaged = gradient.to_vec();
        signs(&mut averaged);
        mask(&mut averaged, v);
        blend(m, &averaged, options.betas[0]);
    }
    if variance {
        blend_squares(v, gradient, options.betas[1]);
    }
    let steps = walk(state, options, eps);
    let Some(meets) = meets else { return };
    state.travelled.resize(steps.len(), 0.0);
    each(steps.len(), &mut state.travelled, |at, way| way - steps[at]);
    state.rates += options.lr;
    if meets {
        let State { weights, states: [m, v, _], travelled, rates, .. } = state;
        let (root, rates) = (|at: usize| v[at].sqrt() + eps as f32, std::mem::take(rates) as f32);
        each(steps.len(), weights, |at, weight| weight - travelled[at]);
        each(steps.len(), travelled, |at, way| way * root(at));
        signs(travelled);
        mask(travelled, v);
        each(steps.len(), m, |at, _| -travelled[at] / rates);
        each(steps.len(), weights, |at, weight| weight + travelled[at] / root(at));
        travelled.fill(0.0);
    }
}

fn directions(state: &State, options: &GroupOptions, eps: f64) -> Vec<f32> {
    let [m, v, _] = &state.states;
    let direction =
        |at: usize| m[at] / (v[at].sqrt() + eps as f32) + options.weight_decay as f32 * state.weights[at];
    (0..m.len()).map(direction).collect()
}

fn lamb_plain(
    rule: &ferrospeed_optim::one_bit::OneBitLamb,
    last: bool,
    state: &mut State,
    gradient: &[f32],
    options: &GroupOptions,
) {
    let [m, v, fresh] = &mut state.states;
    blend(m, gradient, options.betas[0]);
    blend_squares(v, gradient, options.betas[1]);
    if last {
        fresh.copy_from_slice(v);
    }
    let directions = directions(state, options, rule.eps);
    let trust = (norm(&state.weights) / norm(&directions)).clamp(rule.min_coeff, rule.max_coeff);
    state.ratio[0] = rule.coeff_beta * state.ratio[0] + (1.0 - rule.coeff_beta) * trust;
    let step_size = (options.lr * trust) as f32;
    each(directions.len(), &mut state.weights, |at, weight| weight - step_size * directions[at]);
}

fn lamb_frozen(
    rule: &ferrospeed_optim::one_bit::OneBitLamb,
    state: &mut State,
    averaged: &[f32],
    options: &GroupOptions,
) {
    let (eps, scale) = (rule.eps as f32, state.ratio[2] as f32);
    let (beta, rest) = (options.betas[0] as f32, (1.0 - options.betas[0]) as f32);
    let [m, v, fresh] = &mut state.states;
    let mut new: Vec<f32> = averaged.iter().map(|value| value / scale).collect();
    mask(&mut new, v);
    let gradient: Vec<f32> = m.iter().zip(&new).map(|(m, new)| (new - beta * m) / rest).collect();
    blend_squares(fresh, &gradient, options.betas[1]);
    m.copy_from_slice(&new);
    let drifts = v.iter().zip(fresh.iter()).map(|(v, fresh)| (v.sqrt() + eps) / (fresh.sqrt() + eps));
    let drift = f64::from(drifts.fold(0.0, f32::max));
    let undecayed = GroupOptions { weight_decay: 0.0, ..*options };
    let (of_momentum, directions) =
        (norm(&directions(state, &undecayed, rule.eps)), directions(state, options, rule.eps));
    let share = (of_momentum / norm(&directions)).min(1.0);
    let factor = (drift * share + (1.0 - share)).clamp(rule.factor_min, rule.factor_max);
    let near = |sign: f64| state.ratio[1] * (1.0 + sign * rule.factor_threshold);
    state.ratio[1] = factor.clamp(near(-1.0), near(1.0));
    let step_size = (options.lr * state.ratio[0] * state.ratio[1]) as f32;
    each(directions.len(), &mut state.weights, |at, weight| weight - step_size * directions[at]);
}

/// One step of all parameters in plain passes.
fn plain(
    rule: &OneBit,
    params: &mut [State],
    gradients: &[Vec<f32>],
    fused: &mut Vec<f32>,
    options: &GroupOptions,
    step: u64,
) {
    match rule {
        OneBit::Adam(rule) => {
            let each = params.iter_mut().zip(gradients);
            each.for_each(|(state, gradient)| {
                adam(rule.eps, step >= rule.freeze_step, state, gradient, options)
            });
        }
        OneBit::ZeroOne(rule) => {
            // As the options below have it: the second moment is updated in these steps, and ranks meet in those.
            let variance = [1, 2, 3, 5].contains(&step);
            let meets = (step > 5).then(|| [6, 7, 8, 9, 11, 13].contains(&step));
            let each = params.iter_mut().zip(gradients);
            each.for_each(|(state, gradient)| zero_one(rule.eps, variance, meets, state, gradient, options));
        }
        OneBit::Lamb(rule) if step < rule.freeze_step => {
            let (each, last) = (params.iter_mut().zip(gradients), step + 1 == rule.freeze_step);
            each.for_each(|(state, gradient)| lamb_plain(rule, last, state, gradient, options));
        }
        OneBit::Lamb(rule) => {
            let size = |state: &State| norm(&state.states[0]) / (state.weights.len() as f64).sqrt();
            let mean = params.iter().map(size).sum::<f64>() / params.len() as f64;
            if step == rule.freeze_step {
                params.iter_mut().for_each(|state| state.ratio[2] = mean / size(state));
            }
            let numel: usize = gradients.iter().map(Vec::len).sum();
            fused.resize(Signs.padded(numel), 0.0);
            let mut start = 0;
            for (state, gradient) in params.iter().zip(gradients) {
                let mut momentum = state.states[0].clone();
                blend(&mut momentum, gradient, options.betas[0]);
                each(momentum.len(), &mut fused[start..], |at, _| momentum[at] * state.ratio[2] as f32);
                start += momentum.len();
            }
            signs(fused);
            let mut rest = &fused[..];
            for state in params {
                let averaged = rest.split_off(..state.weights.len()).unwrap();
                lamb_frozen(rule, state, averaged, options);
            }
        }
    }
}

fn rule(optimizer: &Value) -> (OneBit, GroupOptions) {
    let json = json!({"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer});
    let config = Config::from_value("test", &json).unwrap();
    let config = config.resolve(1.try_into().unwrap(), &AutoValues::new()).unwrap().0;
    match Optimizer::from_config(config.optimizer.as_ref().unwrap()) {
        Some((Optimizer::OneBit(rule), options)) => (rule, options),
        other => panic!("{other:?}"),
    }
}

#[test]
fn blocks_give_the_bits_of_plain_passes() {
    let common = json!({"lr": 0.01, "weight_decay": 0.1, "betas": [0.9, 0.95]});
    for (name, own) in [
        ("OneBitAdam", json!({"freeze_step": 5})),
        (
            "ZeroOneAdam",
            json!({"var_freeze_step": 5, "var_update_scaler": 2, "local_step_scaler": 3, "local_step_clipper": 2}),
        ),
        ("OneBitLamb", json!({"freeze_step": 5})),
    ] {
        let mut params = common.clone();
        own.as_object().unwrap().iter().for_each(|(key, value)| params[key] = value.clone());
        let (rule, options) = rule(&json!({"type": name, "params": params}));
        let count = rule.state_names().len();
        let value = |at: usize, seed: usize| ((at * 37 + seed * 101) as f32 * 0.61).sin();
        let mut expected: Vec<State> = SIZES
            .iter()
            .map(|&numel| State {
                weights: (0..numel).map(|at| value(at, 1)).collect(),
                states: std::array::from_fn(|_| vec![0.0; numel]),
                ratio: [0.0, 1.0, 0.0],
                ..State::default()
            })
            .collect();
        let mut found = expected.clone();
        let mut copies: Vec<Vec<bf16>> = SIZES.iter().map(|&numel| vec![bf16::ZERO; numel]).collect();
        let (mut memory, mut fused) = (Memory::default(), Vec::new());
        for step in 1..=STEPS {
            // The second weight never has a gradient.
            let gradient = |numel: usize| -> Vec<bf16> {
                let value = |at: usize| if at == 1 { 0.0 } else { value(at, 2 + step as usize) };
                (0..numel).map(|at| bf16::from_f32(value(at))).collect()
            };
            let gradients: Vec<Vec<bf16>> = SIZES.iter().map(|&numel| gradient(numel)).collect();
            let wide = |gradient: &Vec<bf16>| gradient.iter().map(|value| value.to_f32() * FACTOR).collect();
            let wide: Vec<Vec<f32>> = gradients.iter().map(wide).collect();
            plain(&rule, &mut expected, &wide, &mut fused, &options, step);
            let mut wholes: Vec<Whole<'_>> = found
                .iter_mut()
                .zip(&gradients)
                .zip(&mut copies)
                .map(|((state, gradient), copy)| Whole {
                    weights: &mut state.weights,
                    gradient: Gradient::Bf16(gradient),
                    gradient_factor: FACTOR,
                    states: state.states.iter_mut().take(count).map(|state| &mut state[..]).collect(),
                    copy: Copy16::Bf16(copy),
                    options,
                })
                .collect();
            rule.step(&ferrospeed_cpu::device(), &mut memory, &mut wholes, step, &mut Signs).unwrap();
            drop(wholes);
            for ((found, expected), copy) in found.iter().zip(&expected).zip(&copies) {
                let case = format!("{name}, step {step}, {} elements", copy.len());
                let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
                assert!(bits(&found.weights) == bits(&expected.weights), "{case}: weights");
                for (index, (found, expected)) in found.states.iter().zip(&expected.states).enumerate() {
                    assert!(bits(found) == bits(expected), "{case}: state {index}");
                }
                let rounded = |weight: &f32| bf16::from_f32(*weight);
                assert!(found.weights.iter().map(rounded).eq(copy.iter().copied()), "{case}: the copy");
            }
        }
    }
}
