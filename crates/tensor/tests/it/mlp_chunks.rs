//! Perceptrons in chunks of rows: their values, their gradients, and what they hold.

use super::reference;
use super::reference::Array;
use super::reference::check::{check, random};
use ferrospeed_tensor::ops::{self, Inwards, LayerOperands, MlpWeights, WeightLayout};
use ferrospeed_tensor::random::RandomKey;
use ferrospeed_tensor::{Activation, Category, DType, Operand, Tensor, autograd};

const LAYOUT: WeightLayout = WeightLayout::InOut;

/// How the inner values are made.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Plain,
    Gated,
    Packed,
}

const KINDS: [Kind; 3] = [Kind::Plain, Kind::Gated, Kind::Packed];

fn layer(x: &[Tensor], i: usize) -> LayerOperands {
    (Operand::from(&x[i]), Some(Operand::from(&x[i + 1])))
}

fn operands(x: &[Tensor], kind: Kind) -> MlpWeights {
    match kind {
        Kind::Plain => MlpWeights { inwards: Inwards::Up(layer(x, 1)), down: layer(x, 3) },
        Kind::Packed => MlpWeights { inwards: Inwards::Packed(layer(x, 1)), down: layer(x, 3) },
        Kind::Gated => {
            MlpWeights { inwards: Inwards::Gated { gate: layer(x, 1), up: layer(x, 3) }, down: layer(x, 5) }
        }
    }
}

#[test]
fn values_and_gradients_are_those_of_the_whole() {
    let (rows, width, inner) = (7, 3, 5);
    let affine =
        |x: &Array, weight: &Array, bias: &Array| reference::matmul(x, weight).zip(bias, |y, b| y + b);
    let silu = |x: f64| x * reference::sigmoid(x);
    for kind in KINDS {
        let into = |stream, outputs| [random(&[width, outputs], stream), random(&[outputs], stream + 1)];
        let mut inputs = vec![random(&[rows, width], 1)];
        match kind {
            Kind::Plain => inputs.extend(into(4, inner)),
            Kind::Gated => inputs.extend(into(2, inner).into_iter().chain(into(4, inner))),
            Kind::Packed => inputs.extend(into(4, 2 * inner)),
        }
        inputs.extend([random(&[inner, width], 6), random(&[width], 7)]);
        for chunk in [1, 2, 3, 7, 100] {
            check(
                &format!("mlp in chunks of {chunk}, {kind:?}"),
                &inputs,
                |x| ops::mlp_in_chunks(&x[0], operands(x, kind), LAYOUT, Activation::Silu, chunk),
                |x| {
                    let last = x.len() - 2;
                    let up = affine(&x[0], &x[last - 2], &x[last - 1]);
                    let hidden = match kind {
                        Kind::Plain => up.map(silu),
                        Kind::Gated => affine(&x[0], &x[1], &x[2]).zip(&up, |gate, up| silu(gate) * up),
                        Kind::Packed => {
                            let gated = |both: &[f64]| -> Vec<f64> {
                                (0..inner).map(|at| silu(both[at]) * both[inner + at]).collect()
                            };
                            let data = up.data.chunks(2 * inner).flat_map(gated).collect();
                            Array::new(&[rows, inner], data)
                        }
                    };
                    affine(&hidden, &x[last], &x[last + 1])
                },
            );
        }
    }
}

/// Value, gradients, and the most that was held beside them.
fn measured(dtype: DType, kind: Kind, chunk: Option<usize>) -> (Vec<Tensor>, usize) {
    let (rows, width, inner) = (1000, 32, 256);
    let device = ferrospeed_cpu::with_threads(2);
    let tensor = |shape: &[usize], stream: u32, scale: f32| {
        let mut values = vec![0.0f32; shape.iter().product()];
        RandomKey::new(13, stream).fill_normal(0, &mut values);
        values.iter_mut().for_each(|value| *value *= scale);
        Tensor::from_f32(&values, shape, dtype, &device).unwrap().tracked()
    };
    let mut x = vec![tensor(&[rows, width], 1, 1.0)];
    let outputs = if kind == Kind::Packed { 2 * inner } else { inner };
    for stream in if kind == Kind::Gated { 2..4 } else { 3..4 } {
        x.extend([tensor(&[width, outputs], stream, 0.2), tensor(&[outputs], 10 + stream, 0.2)]);
    }
    x.extend([tensor(&[inner, width], 4, 0.1), tensor(&[width], 14, 0.1)]);
    let gradient = tensor(&[rows, width], 5, 1.0).detach();
    device.backend().reset_peak_memory();
    let before = device.memory_usage().current(Category::Activations);
    let MlpWeights { inwards, down } = operands(&x, kind);
    const ACTIVATION: Activation = Activation::GeluTanh;
    let y = match (chunk, inwards) {
        (Some(chunk), inwards) => {
            ops::mlp_in_chunks(&x[0], MlpWeights { inwards, down }, LAYOUT, ACTIVATION, chunk)
        }
        (None, Inwards::Gated { gate, up }) => ops::gated_mlp(&x[0], [gate, up, down], LAYOUT, ACTIVATION),
        (None, Inwards::Up(up)) => ops::mlp(&x[0], up, down, LAYOUT, ACTIVATION),
        (None, Inwards::Packed((weight, bias))) => {
            let both = ops::linear(&x[0], weight, bias, LAYOUT).unwrap();
            let parts = ops::split(&both, 1, &[inner; 2]).unwrap();
            let hidden = ops::gated(ACTIVATION, &parts[0], &parts[1]).unwrap();
            ops::linear(&hidden, down.0, down.1, LAYOUT)
        }
    };
    let y = y.unwrap();
    autograd::backward_with(&[(y.clone(), gradient)]).unwrap();
    let peak = device.memory_usage().peak(Category::Activations) - before;
    let all = std::iter::once(y.detach()).chain(x.iter().map(|x| x.grad().unwrap())).collect();
    (all, peak)
}

#[test]
fn rows_have_the_bits_of_the_whole_and_sums_are_near() {
    for dtype in [DType::F32, DType::BF16] {
        // Sums in another order; in bf16 both are rounded once, and may fall to either side.
        let tolerance = if dtype == DType::F32 { 1e-5 } else { 1e-2 };
        for kind in KINDS {
            let (whole, _) = measured(dtype, kind, None);
            let (parts, _) = measured(dtype, kind, Some(300));
            for (index, (part, whole)) in parts.iter().zip(&whole).enumerate() {
                let (part, whole) = (part.to_vec_f32().unwrap(), whole.to_vec_f32().unwrap());
                if index < 2 {
                    assert!(part == whole, "{dtype}, {kind:?}: the result or its input's gradient");
                    continue;
                }
                let most = whole.iter().fold(0.0f32, |most, value| most.max(value.abs()));
                for (a, b) in part.iter().zip(&whole) {
                    assert!((a - b).abs() <= tolerance * most, "{dtype}, {kind:?}, result {index}: {a}, {b}");
                }
            }
            let again = measured(dtype, kind, Some(300)).0;
            for (once, twice) in parts.iter().zip(&again) {
                assert_eq!(once.to_vec_f32().unwrap(), twice.to_vec_f32().unwrap());
            }
        }
    }
}

#[test]
fn what_is_held_grows_with_the_chunk() {
    for kind in KINDS {
        let held = |chunk| measured(DType::F32, kind, chunk).1;
        let (whole, fifth, tenth) = (held(None), held(Some(200)), held(Some(100)));
        // Of 1000 rows: result and gradient of the input (32 wide each), and inside 256 wide values.
        let outside = 3 * 1000 * 32 * 4;
        assert!(tenth < fifth && fifth < whole / 2, "{whole}, {fifth}, {tenth}");
        // Both halves lie beside each other, too, before they are taken apart and after they are joined.
        let inside = if kind == Kind::Packed { 6 } else { 4 };
        assert!(tenth <= outside + inside * 100 * 256 * 4, "{kind:?}: {tenth}");
    }
}

#[test]
fn chunks_of_nothing_are_refused() {
    let x = Tensor::zeros([2, 2], DType::F32, &ferrospeed_cpu::device()).unwrap();
    let layer = || (Operand::from(&x), None);
    let weights = MlpWeights { inwards: Inwards::Up(layer()), down: layer() };
    let error = ops::mlp_in_chunks(&x, weights, LAYOUT, Activation::Relu, 0).unwrap_err().to_string();
    assert!(error.contains("chunks of no rows"), "{error}");
}
