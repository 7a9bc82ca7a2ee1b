//! Every differentiable op against plain f64 arithmetic: its value, and its gradient by central differences of the
//! reference, over shapes that include empty, single and odd ones.

use super::reference;
use super::reference::check::{check, random};
use super::reference::{Array, Visibility};
use ferrospeed_tensor::ops::{self, AttentionOptions, CrossEntropyOptions, WeightLayout};
use ferrospeed_tensor::{Activation, DType, Operand, Result, Tensor, autograd};

const SHAPES: [[usize; 2]; 6] = [[0, 5], [1, 1], [3, 7], [5, 16], [2, 33], [7, 1]];

#[test]
fn elementwise_functions() {
    type Function = (&'static str, fn(&Tensor) -> Result<Tensor>, fn(f64) -> f64, bool);
    let functions: [Function; 15] = [
        ("neg", |x| ops::neg(x), |x| -x, false),
        ("exp", |x| ops::exp(x), f64::exp, false),
        ("log", |x| ops::log(x), f64::ln, true),
        ("sqrt", |x| ops::sqrt(x), f64::sqrt, true),
        ("square", |x| ops::square(x), |x| x * x, false),
        ("reciprocal", |x| ops::reciprocal(x), |x| 1.0 / x, true),
        ("abs", |x| ops::abs(x), f64::abs, true),
        ("tanh", |x| ops::tanh(x), f64::tanh, false),
        ("sigmoid", |x| ops::sigmoid(x), reference::sigmoid, false),
        ("silu", |x| ops::silu(x), |x| x * reference::sigmoid(x), false),
        ("relu", |x| ops::relu(x), |x| x.max(0.0), true),
        ("gelu", |x| ops::gelu(x), reference::gelu_erf, false),
        ("gelu_tanh", |x| ops::gelu_tanh(x), reference::gelu_tanh, false),
        ("affine", |x| ops::affine(x, 1.5, -0.25), |x| 1.5 * x - 0.25, false),
        ("power", |x| ops::power(x, 3.0), |x| x.powi(3), true),
    ];
    for (name, ours, truth, positive) in functions {
        for shape in SHAPES {
            let x = random(&shape, 1).map(|x| if positive { x.abs() + 0.2 } else { x });
            check(&format!("{name} {shape:?}"), &[x], |x| ours(&x[0]), |x| x[0].map(truth));
        }
    }
}

#[test]
fn broadcast_arithmetic() {
    type Function = (&'static str, fn(&Tensor, &Tensor) -> Result<Tensor>, fn(f64, f64) -> f64);
    let functions: [Function; 6] = [
        ("add", |a, b| ops::add(a, b), |a, b| a + b),
        ("sub", |a, b| ops::sub(a, b), |a, b| a - b),
        ("mul", |a, b| ops::mul(a, b), |a, b| a * b),
        ("div", |a, b| ops::div(a, b), |a, b| a / b),
        ("maximum", |a, b| ops::maximum(a, b), f64::max),
        ("minimum", |a, b| ops::minimum(a, b), f64::min),
    ];
    for (name, ours, truth) in functions {
        for [rows, width] in SHAPES {
            for right in [vec![rows, width], vec![width], vec![]] {
                let a = random(&[rows, width], 1);
                let b = random(&right, 2).map(|x| x + 0.5 * x.signum());
                check(
                    &format!("{name} [{rows}, {width}] and {right:?}"),
                    &[a, b],
                    |x| ours(&x[0], &x[1]),
                    |x| x[0].zip(&x[1], truth),
                );
            }
        }
    }
}

#[test]
fn products() {
    for [m, k, n] in [[1, 1, 1], [3, 5, 2], [7, 33, 17], [0, 4, 3], [2, 0, 3], [33, 2, 1]] {
        for layout in [WeightLayout::InOut, WeightLayout::OutIn] {
            let weight = if layout == WeightLayout::InOut { [k, n] } else { [n, k] };
            let inputs = [random(&[m, k], 1), random(&weight, 2), random(&[n], 3)];
            let what = format!("linear {m}x{k}x{n} {layout:?}");
            let truth = move |x: &[Array]| {
                let weight =
                    if layout == WeightLayout::InOut { x[1].clone() } else { reference::transposed(&x[1]) };
                reference::matmul(&x[0], &weight).zip(&x[2], |y, b| y + b)
            };
            check(&what, &inputs, |x| ops::linear(&x[0], &x[1], Some(Operand::from(&x[2])), layout), truth);
            let activated = |x: &[Tensor]| {
                ops::linear_activation(
                    &x[0],
                    &x[1],
                    Some(Operand::from(&x[2])),
                    layout,
                    Some(Activation::GeluTanh),
                )
            };
            check(&format!("{what} gelu"), &inputs, activated, |x| truth(x).map(reference::gelu_tanh));
        }
    }
    let inputs =
        [random(&[5, 6], 1), random(&[6, 9], 2), random(&[9], 3), random(&[9, 4], 4), random(&[4], 5)];
    let perceptron = |x: &[Tensor]| {
        let up = (Operand::from(&x[1]), Some(Operand::from(&x[2])));
        let down = (Operand::from(&x[3]), Some(Operand::from(&x[4])));
        ops::mlp(&x[0], up, down, WeightLayout::InOut, Activation::Silu)
    };
    check("mlp", &inputs, perceptron, |x| {
        let hidden =
            reference::matmul(&x[0], &x[1]).zip(&x[2], |y, b| y + b).map(|x| x * reference::sigmoid(x));
        reference::matmul(&hidden, &x[3]).zip(&x[4], |y, b| y + b)
    });
}

#[test]
fn layers_that_share_their_input() {
    let weights = |x: &Tensor, b: &Tensor| (Operand::from(x), Some(Operand::from(b)));
    for [rows, width, inner] in [[0, 3, 4], [1, 2, 1], [5, 7, 9], [33, 16, 20]] {
        let inputs = [
            random(&[rows, width], 1),
            random(&[width, inner], 2),
            random(&[inner], 3),
            random(&[width, inner], 4),
            random(&[inner], 5),
            random(&[inner, width], 6),
            random(&[width], 7),
        ];
        let product = |x: &Array, w: &Array, b: &Array| reference::matmul(x, w).zip(b, |y, b| y + b);
        check(
            &format!("gated_mlp [{rows}, {width}, {inner}]"),
            &inputs,
            |x| {
                let layers = [weights(&x[1], &x[2]), weights(&x[3], &x[4]), weights(&x[5], &x[6])];
                ops::gated_mlp(&x[0], layers, WeightLayout::InOut, Activation::Silu)
            },
            |x| {
                let gate = product(&x[0], &x[1], &x[2]).map(|g| g * reference::sigmoid(g));
                product(&gate.zip(&product(&x[0], &x[3], &x[4]), |g, u| g * u), &x[5], &x[6])
            },
        );
        check(
            &format!("linears [{rows}, {width}, {inner}]"),
            &inputs[..5],
            |x| {
                let layers = [weights(&x[1], &x[2]), weights(&x[3], &x[4])];
                let [left, right] = ops::linears(&x[0], layers, WeightLayout::InOut)?;
                ops::mul(&left, &right)
            },
            |x| product(&x[0], &x[1], &x[2]).zip(&product(&x[0], &x[3], &x[4]), |l, r| l * r),
        );
    }
}

/// A layer whose result nobody uses gets no gradient, and the others' are right.
#[test]
fn a_layer_that_is_not_used_leaves_the_others_alone() {
    let tensor = |shape: &[usize], stream| {
        let array = random(shape, stream);
        let values: Vec<f32> = array.data.iter().map(|&v| v as f32).collect();
        Tensor::from_f32(&values, shape, DType::F32, &ferrospeed_cpu::device()).unwrap().tracked()
    };
    let (x, used, unused) = (tensor(&[4, 3], 1), tensor(&[5, 3], 2), tensor(&[6, 3], 3));
    let layers = [(Operand::from(&unused), None), (Operand::from(&used), None)];
    let [_, y] = ops::linears(&x, layers, WeightLayout::OutIn).unwrap();
    let seed = tensor(&[4, 5], 4);
    autograd::backward_with(&[(y, seed.detach())]).unwrap();
    assert!(unused.grad().is_none());
    let alone = x.detach().tracked();
    let y = ops::linear(&alone, used.detach(), None, WeightLayout::OutIn).unwrap();
    autograd::backward_with(&[(y, seed.detach())]).unwrap();
    assert_eq!(x.grad().unwrap().to_vec_f32().unwrap(), alone.grad().unwrap().to_vec_f32().unwrap());
}

#[test]
fn norms_and_softmax() {
    for [rows, width] in [[0, 5], [1, 2], [3, 7], [5, 16], [2, 33]] {
        let [x, r, w, b] =
            [random(&[rows, width], 1), random(&[rows, width], 2), random(&[width], 3), random(&[width], 4)];
        let what = format!("[{rows}, {width}]");
        check(
            &format!("layer_norm {what}"),
            &[x.clone(), w.clone(), b.clone()],
            |x| ops::layer_norm(&x[0], Some((&x[1]).into()), Some((&x[2]).into()), 1e-5),
            |x| reference::layer_norm(&x[0], &x[1], &x[2], 1e-5),
        );
        check(
            &format!("rms_norm {what}"),
            &[x.clone(), w.clone()],
            |x| ops::rms_norm(&x[0], Some((&x[1]).into()), 1e-5),
            |x| reference::rms_norm(&x[0], &x[1], 1e-5),
        );
        check(
            &format!("add_layer_norm {what}"),
            &[x.clone(), r, w, b],
            |x| {
                let (sum, y) = ops::add_layer_norm(
                    &x[0],
                    Some((&x[1]).into()),
                    Some((&x[2]).into()),
                    Some((&x[3]).into()),
                    1e-5,
                )?;
                ops::add(&sum, &y)
            },
            |x| {
                let sum = x[0].zip(&x[1], |a, b| a + b);
                sum.zip(&reference::layer_norm(&sum, &x[2], &x[3], 1e-5), |a, b| a + b)
            },
        );
        check(
            &format!("softmax {what}"),
            std::slice::from_ref(&x),
            |x| ops::softmax(&x[0]),
            |x| x[0].by_row(reference::softmax),
        );
        check(
            &format!("log_softmax {what}"),
            std::slice::from_ref(&x),
            |x| ops::log_softmax(&x[0]),
            |x| x[0].by_row(|row| reference::softmax(row).into_iter().map(f64::ln).collect()),
        );
        check(
            &format!("swiglu {what}"),
            &[x.clone(), x],
            |x| ops::gated(Activation::Silu, &x[0], &x[1]),
            |x| x[0].zip(&x[1], |g, u| g * reference::sigmoid(g) * u),
        );
    }
}

#[test]
fn attention_with_every_rule() {
    let rules = [
        Visibility::default(),
        Visibility { causal: true, ..Default::default() },
        Visibility { causal: true, window: Some(2), ..Default::default() },
        Visibility { alibi: Some(vec![0.5, 0.25, 0.1, 0.05]), causal: true, ..Default::default() },
    ];
    for [batch, queries, keys, kv_heads, dim] in
        [[1, 1, 1, 1, 1], [2, 3, 5, 2, 3], [1, 7, 7, 4, 5], [1, 0, 3, 2, 2]]
    {
        for rule in &rules {
            let mut rules = vec![rule.clone()];
            let mask: Vec<bool> = (0..batch * keys).map(|i| i % keys != 1 % keys || keys == 1).collect();
            rules.push(Visibility { key_mask: Some(mask), ..rule.clone() });
            for rule in rules {
                let inputs = [
                    random(&[batch, queries, 4, dim], 1),
                    random(&[batch, keys, kv_heads, dim], 2),
                    random(&[batch, keys, kv_heads, dim], 3),
                ];
                let what = format!("attention {batch} {queries} {keys} {kv_heads} {dim} {rule:?}");
                check(
                    &what,
                    &inputs,
                    |x| {
                        let device = x[0].device();
                        let options = AttentionOptions {
                            causal: rule.causal,
                            window: rule.window,
                            key_mask: rule.key_mask.as_ref().map(|mask| {
                                let bytes: Vec<u8> = mask.iter().map(|&seen| u8::from(seen)).collect();
                                Tensor::from_slice(&bytes, [batch, keys], device).unwrap()
                            }),
                            alibi_slopes: rule.alibi.as_ref().map(|slopes| {
                                let slopes: Vec<f32> = slopes.iter().map(|&s| s as f32).collect();
                                Tensor::from_slice(&slopes, [4], device).unwrap()
                            }),
                            ..Default::default()
                        };
                        ops::attention(&x[0], &x[1], &x[2], &options)
                    },
                    |x| reference::attention(&x[0], &x[1], &x[2], &rule),
                );
            }
        }
    }
}

#[test]
fn losses() {
    for (smoothing, z_loss) in [(0.0, 0.0), (0.1, 0.0), (0.1, 1e-2)] {
        for [rows, inputs, classes] in [[1, 1, 2], [5, 3, 7], [4, 2, 33]] {
            let targets: Vec<i64> =
                (0..rows).map(|i| if i == 2 { -100 } else { (i * 5 % classes) as i64 }).collect();
            let options = CrossEntropyOptions { label_smoothing: smoothing, z_loss, ..Default::default() };
            let device = ferrospeed_cpu::with_threads(2);
            let target = Tensor::from_slice(&targets, [rows], &device).unwrap();
            let (s, z) = (f64::from(smoothing), f64::from(z_loss));
            check(
                "cross_entropy",
                &[random(&[rows, classes], 1)],
                |x| ops::cross_entropy(&x[0], &target, options),
                |x| Array::new(&[], vec![reference::cross_entropy(&x[0], &targets, -100, s, z)]),
            );
            check(
                "linear_cross_entropy",
                &[random(&[rows, inputs], 1), random(&[classes, inputs], 2)],
                |x| ops::linear_cross_entropy(&x[0], &x[1], WeightLayout::OutIn, &target, options),
                |x| {
                    let logits = reference::matmul(&x[0], &reference::transposed(&x[1]));
                    Array::new(&[], vec![reference::cross_entropy(&logits, &targets, -100, s, z)])
                },
            );
        }
    }
}

#[test]
fn lookups_and_layout() {
    let device = ferrospeed_cpu::with_threads(2);
    let ids = [4i64, 0, 4, 2];
    let indices = Tensor::from_slice(&ids, [4], &device).unwrap();
    let pick = |x: &Array| {
        let width = x.width();
        let data = ids
            .iter()
            .flat_map(|&id| x.data[id as usize * width..(id as usize + 1) * width].to_vec())
            .collect();
        Array::new(&[4, width], data)
    };
    for width in [1, 3, 17] {
        let x = [random(&[5, width], 1)];
        check("embedding", &x, |x| ops::embedding(&x[0], &indices), |x| pick(&x[0]));
        check("index_select", &x, |x| ops::index_select(&x[0], 0, &indices), |x| pick(&x[0]));
        check("transpose", &x, |x| ops::transpose(&x[0], 0, 1), |x| reference::transposed(&x[0]));
        check(
            "cumsum",
            &x,
            |x| ops::cumsum(&x[0]),
            |x| {
                x[0].by_row(|row| {
                    row.iter()
                        .scan(0.0, |sum, x| {
                            *sum += x;
                            Some(*sum)
                        })
                        .collect()
                })
            },
        );
        check("sum", &x, |x| ops::sum(&x[0]), |x| Array::new(&[], vec![x[0].data.iter().sum()]));
        check(
            "mean",
            &x,
            |x| ops::mean(&x[0]),
            |x| Array::new(&[], vec![x[0].data.iter().sum::<f64>() / x[0].data.len() as f64]),
        );
        check(
            "concat",
            &[x[0].clone(), random(&[2, width], 2)],
            |x| ops::concat(x, 0),
            |x| Array::new(&[7, width], [x[0].data.clone(), x[1].data.clone()].concat()),
        );
        check(
            "narrow",
            &x,
            |x| ops::narrow(&x[0], 0, 1, 3),
            |x| Array::new(&[3, width], x[0].data[width..4 * width].to_vec()),
        );
    }
}
