//! Perceptrons in chunks of rows: their values, their gradients, and what they hold.

mod reference;

use ferrospeed_tensor::ops::{self, MlpWeights, WeightLayout};
use ferrospeed_tensor::random::RandomKey;
use ferrospeed_tensor::{Activation, Category, DType, Device, Operand, Tensor, autograd};
use reference::Array;
use reference::check::{check, random};

const LAYOUT: WeightLayout = WeightLayout::InOut;

fn operands(x: &[Tensor]) -> MlpWeights {
    let layer = |i: usize| (Operand::from(&x[i]), Some(Operand::from(&x[i + 1])));
    match x.len() {
        7 => MlpWeights { gate: Some(layer(1)), up: layer(3), down: layer(5) },
        _ => MlpWeights { gate: None, up: layer(1), down: layer(3) },
    }
}

#[test]
fn values_and_gradients_are_those_of_the_whole() {
    let (rows, width, inner) = (7, 3, 5);
    let affine =
        |x: &Array, weight: &Array, bias: &Array| reference::matmul(x, weight).zip(bias, |y, b| y + b);
    let silu = |x: f64| x * reference::sigmoid(x);
    for gated in [false, true] {
        let into = |stream| [random(&[width, inner], stream), random(&[inner], stream + 1)];
        let mut inputs = vec![random(&[rows, width], 1)];
        if gated {
            inputs.extend(into(2));
        }
        inputs.extend(into(4));
        inputs.extend([random(&[inner, width], 6), random(&[width], 7)]);
        for chunk in [1, 2, 3, 7, 100] {
            check(
                &format!("mlp in chunks of {chunk}, gated: {gated}"),
                &inputs,
                |x| ops::mlp_in_chunks(&x[0], operands(x), LAYOUT, Activation::Silu, chunk),
                |x| {
                    let last = x.len() - 2;
                    let up = affine(&x[0], &x[last - 2], &x[last - 1]);
                    let hidden = match gated {
                        true => affine(&x[0], &x[1], &x[2]).zip(&up, |gate, up| silu(gate) * up),
                        false => up.map(silu),
                    };
                    affine(&hidden, &x[last], &x[last + 1])
                },
            );
        }
    }
}

/// Value, gradients, and the most that was held beside them.
fn measured(dtype: DType, gated: bool, chunk: Option<usize>) -> (Vec<Tensor>, usize) {
    let (rows, width, inner) = (1000, 32, 256);
    let device = Device::cpu_with_threads(2);
    let tensor = |shape: &[usize], stream: u32, scale: f32| {
        let mut values = vec![0.0f32; shape.iter().product()];
        RandomKey::new(13, stream).fill_normal(0, &mut values);
        values.iter_mut().for_each(|value| *value *= scale);
        Tensor::from_f32(&values, shape, dtype, &device).unwrap().tracked()
    };
    let mut x = vec![tensor(&[rows, width], 1, 1.0)];
    for stream in if gated { 2..4 } else { 3..4 } {
        x.extend([tensor(&[width, inner], stream, 0.2), tensor(&[inner], 10 + stream, 0.2)]);
    }
    x.extend([tensor(&[inner, width], 4, 0.1), tensor(&[width], 14, 0.1)]);
    let gradient = tensor(&[rows, width], 5, 1.0).detach();
    device.backend().reset_peak_memory();
    let before = device.memory_usage().current(Category::Activations);
    let MlpWeights { gate, up, down } = operands(&x);
    let y = match (chunk, gate) {
        (Some(chunk), gate) => {
            ops::mlp_in_chunks(&x[0], MlpWeights { gate, up, down }, LAYOUT, Activation::GeluTanh, chunk)
        }
        (None, Some(gate)) => ops::gated_mlp(&x[0], [gate, up, down], LAYOUT, Activation::GeluTanh),
        (None, None) => ops::mlp(&x[0], up, down, LAYOUT, Activation::GeluTanh),
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
        for gated in [false, true] {
            let (whole, _) = measured(dtype, gated, None);
            let (parts, _) = measured(dtype, gated, Some(300));
            for (index, (part, whole)) in parts.iter().zip(&whole).enumerate() {
                let (part, whole) = (part.to_vec_f32().unwrap(), whole.to_vec_f32().unwrap());
                if index < 2 {
                    assert!(part == whole, "{dtype}, gated {gated}: the result or its input's gradient");
                    continue;
                }
                let most = whole.iter().fold(0.0f32, |most, value| most.max(value.abs()));
                for (a, b) in part.iter().zip(&whole) {
                    assert!(
                        (a - b).abs() <= tolerance * most,
                        "{dtype}, gated {gated}, result {index}: {a}, {b}"
                    );
                }
            }
            let again = measured(dtype, gated, Some(300)).0;
            for (once, twice) in parts.iter().zip(&again) {
                assert_eq!(once.to_vec_f32().unwrap(), twice.to_vec_f32().unwrap());
            }
        }
    }
}

#[test]
fn what_is_held_grows_with_the_chunk() {
    for gated in [false, true] {
        let held = |chunk| measured(DType::F32, gated, chunk).1;
        let (whole, fifth, tenth) = (held(None), held(Some(200)), held(Some(100)));
        // Of 1000 rows: result and gradient of the input (32 wide each), and inside 256 wide values.
        let outside = 3 * 1000 * 32 * 4;
        assert!(tenth < fifth && fifth < whole / 2, "{whole}, {fifth}, {tenth}");
        assert!(tenth <= outside + 4 * 100 * 256 * 4, "{tenth}");
    }
}

#[test]
fn chunks_of_nothing_are_refused() {
    let x = Tensor::zeros([2, 2], DType::F32, &Device::cpu()).unwrap();
    let layer = || (Operand::from(&x), None);
    let weights = MlpWeights { gate: None, up: layer(), down: layer() };
    let error = ops::mlp_in_chunks(&x, weights, LAYOUT, Activation::Relu, 0).unwrap_err().to_string();
    assert!(error.contains("chunks of no rows"), "{error}");
}
