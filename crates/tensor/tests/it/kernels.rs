//! Kernels against their plain reference over odd shapes and all float types, and the same bits on any number of threads.

use super::reference;
use super::reference::{Array, Visibility};
use ferrospeed_tensor::backend::{Gemm, Matrix};
use ferrospeed_tensor::ops::{self, AttentionOptions};
use ferrospeed_tensor::random::RandomKey;
use ferrospeed_tensor::{Activation, DType, Device, Tensor, autograd};

const TYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

fn random(shape: &[usize], stream: u32, dtype: DType, device: &Device) -> Tensor {
    let mut values = vec![0.0f32; shape.iter().product()];
    RandomKey::new(8, stream).fill_normal(0, &mut values);
    Tensor::from_f32(&values, shape, dtype, device).unwrap()
}

/// The values as the kernel sees them, after rounding to the type.
fn array(tensor: &Tensor) -> Array {
    Array::new(tensor.sizes(), tensor.to_vec_f32().unwrap().into_iter().map(f64::from).collect())
}

/// Half a unit in the last place of the type, with room for a sum in f32.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 2e-6,
        DType::BF16 => 1.0 / 256.0,
        _ => 1.0 / 2048.0,
    }
}

fn close(ours: &Tensor, truth: &Array, tolerance: f64, what: &str) {
    let ours = ours.to_vec_f32().unwrap();
    assert_eq!(ours.len(), truth.data.len(), "{what}");
    let scale = truth.data.iter().fold(1.0, |a: f64, b| a.max(b.abs()));
    for (i, (a, b)) in ours.iter().zip(&truth.data).enumerate() {
        assert!(
            (f64::from(*a) - b).abs() <= tolerance * scale,
            "{what}: element {i} is {a}, the reference says {b}"
        );
    }
}

/// Shapes around every block size of the kernels: tiles of 16, blocks of 32, slices of 1024, panels of 128, 256, 512.
const PRODUCTS: [[usize; 3]; 13] = [
    [1, 1, 1],
    [1, 70, 33],
    [8, 64, 50],
    [31, 33, 17],
    [32, 32, 32],
    [33, 31, 65],
    [64, 513, 40],
    [70, 1030, 130],
    [0, 3, 4],
    [3, 0, 4],
    [3, 4, 0],
    [513, 40, 259],
    [600, 33, 300],
];

fn product(dtype: DType, [m, k, n]: [usize; 3], layout: &str, threads: usize) -> (Tensor, Array) {
    let device = ferrospeed_cpu::with_threads(threads);
    let a = random(&if layout == "TN" { [k, m] } else { [m, k] }, 1, dtype, &device);
    let b = random(&if layout == "NT" { [n, k] } else { [k, n] }, 2, dtype, &device);
    let mut c = Tensor::full([m, n], f32::NAN, dtype, &device).unwrap();
    let left = Matrix { transposed: layout == "TN", ..Matrix::whole(&a) };
    let right = Matrix { transposed: layout == "NT", ..Matrix::whole(&b) };
    device.backend().gemm(Gemm::plain(m, n, k, left, right, c.out().unwrap())).unwrap();
    let turn = |tensor: &Tensor, turned: bool| {
        let array = array(tensor);
        if turned { reference::transposed(&array) } else { array }
    };
    (c, reference::matmul(&turn(&a, layout == "TN"), &turn(&b, layout == "NT")))
}

#[test]
fn products_match_the_reference_in_every_layout() {
    for dtype in TYPES {
        for shape in PRODUCTS {
            for layout in ["NN", "NT", "TN"] {
                let (ours, truth) = product(dtype, shape, layout, 2);
                close(&ours, &truth, tolerance(dtype), &format!("{dtype} {layout} {shape:?}"));
            }
        }
    }
}

#[test]
fn products_give_the_same_bits_on_any_number_of_threads() {
    for dtype in TYPES {
        for shape in [[33, 31, 65], [70, 1030, 130], [600, 33, 300]] {
            for layout in ["NN", "NT", "TN"] {
                let one = product(dtype, shape, layout, 1).0.to_vec_f32().unwrap();
                for threads in [2, 3, 8] {
                    let more = product(dtype, shape, layout, threads).0.to_vec_f32().unwrap();
                    assert_eq!(one, more, "{dtype} {layout} {shape:?} on {threads} threads");
                }
            }
        }
    }
}

#[test]
fn products_accumulate_scale_and_activate() {
    let device = ferrospeed_cpu::with_threads(2);
    for dtype in TYPES {
        let (m, n, k) = (37, 45, 50);
        let (a, b) = (random(&[m, k], 1, dtype, &device), random(&[k, n], 2, dtype, &device));
        let bias = random(&[n], 3, dtype, &device);
        let plain = reference::matmul(&array(&a), &array(&b));
        let mut sum = random(&[m, n], 4, DType::F32, &device);
        let expected = array(&sum).zip(&plain, |c, p| c + 0.5 * p);
        let gemm = Gemm::plain(m, n, k, Matrix::whole(&a), Matrix::whole(&b), sum.out().unwrap());
        device.backend().gemm(Gemm { accumulate: true, alpha: 0.5, ..gemm }).unwrap();
        close(&sum, &expected, 2e-6, &format!("{dtype} accumulated in f32"));

        let (mut c, mut before) =
            (Tensor::empty([m, n], dtype, &device).unwrap(), Tensor::empty([m, n], dtype, &device).unwrap());
        let gemm = Gemm::plain(m, n, k, Matrix::whole(&a), Matrix::whole(&b), c.out().unwrap());
        let fused = Gemm {
            bias: Some(&bias),
            activation: Some(Activation::Relu),
            before_activation: Some(before.out().unwrap()),
            ..gemm
        };
        device.backend().gemm(fused).unwrap();
        let biased = plain.zip(&array(&bias), |p, b| p + b);
        let mut only_biased = Tensor::empty([m, n], dtype, &device).unwrap();
        let gemm = Gemm::plain(m, n, k, Matrix::whole(&a), Matrix::whole(&b), only_biased.out().unwrap());
        device.backend().gemm(Gemm { bias: Some(&bias), ..gemm }).unwrap();
        close(&only_biased, &biased, tolerance(dtype), &format!("{dtype} with a bias"));
        close(&before, &biased, tolerance(dtype), &format!("{dtype} before the activation"));
        close(&c, &biased.map(|x| x.max(0.0)), tolerance(dtype), &format!("{dtype} after the activation"));
    }
}

/// Output and gradients of attention.
fn attention(dtype: DType, [batch, tokens, dim]: [usize; 3], threads: usize) -> Vec<Tensor> {
    let device = ferrospeed_cpu::with_threads(threads);
    let inputs = [1, 2, 3].map(|i| random(&[batch, tokens, 2, dim], i, dtype, &device).tracked());
    let options = AttentionOptions { causal: true, window: Some(tokens.max(2) - 1), ..Default::default() };
    let y = ops::attention(&inputs[0], &inputs[1], &inputs[2], &options).unwrap();
    let gradient = random(y.sizes(), 4, dtype, &device);
    autograd::backward_with(&[(y.clone(), gradient)]).unwrap();
    let mut results = vec![y.detach()];
    results.extend(inputs.iter().map(|input| input.grad().unwrap()));
    results.extend(inputs.iter().map(Tensor::detach));
    results
}

#[test]
fn attention_matches_the_reference_and_itself_in_f32() {
    for shape in [[1, 1, 8], [2, 9, 5], [1, 65, 32], [1, 300, 40], [2, 70, 64]] {
        let window = Some(shape[1].max(2) - 1);
        let exact = attention(DType::F32, shape, 1);
        for dtype in TYPES {
            let ours = attention(dtype, shape, 2);
            let [q, k, v] = [4, 5, 6].map(|i| array(&ours[i]));
            let truth =
                reference::attention(&q, &k, &v, &Visibility { causal: true, window, ..Default::default() });
            close(&ours[0], &truth, 3.0 * tolerance(dtype), &format!("{dtype} attention {shape:?}"));
            // The gradient checks hold f32 to central differences; the other types are held to f32.
            for i in 1..4 {
                let room = if dtype == DType::F32 { 1e-5 } else { 8.0 * tolerance(dtype) };
                close(
                    &ours[i],
                    &array(&exact[i]),
                    room,
                    &format!("{dtype} attention gradient {i} {shape:?}"),
                );
            }
        }
    }
}

#[test]
fn attention_gives_the_same_bits_on_any_number_of_threads() {
    for dtype in TYPES {
        let bits = |threads: usize| -> Vec<Vec<f32>> {
            attention(dtype, [2, 70, 40], threads).iter().map(|t| t.to_vec_f32().unwrap()).collect()
        };
        let one = bits(1);
        for threads in [2, 3, 8] {
            assert_eq!(one, bits(threads), "{dtype} on {threads} threads");
        }
    }
}

#[test]
fn rows_match_the_reference_in_every_type() {
    let device = ferrospeed_cpu::with_threads(2);
    for dtype in TYPES {
        for shape in [[0, 4], [1, 1], [3, 15], [5, 16], [4, 17], [2, 1000]] {
            let x = random(&shape, 1, dtype, &device);
            let [w, b] = [2, 3].map(|i| random(&[shape[1]], i, dtype, &device));
            let what = format!("{dtype} {shape:?}");
            let y = ops::layer_norm(&x, Some((&w).into()), Some((&b).into()), 1e-5).unwrap();
            let truth = reference::layer_norm(&array(&x), &array(&w), &array(&b), 1e-5);
            close(&y, &truth, 2.0 * tolerance(dtype), &format!("layer_norm {what}"));
            let y = ops::rms_norm(&x, Some((&w).into()), 1e-5).unwrap();
            let truth = reference::rms_norm(&array(&x), &array(&w), 1e-5);
            close(&y, &truth, 2.0 * tolerance(dtype), &format!("rms_norm {what}"));
            let y = ops::softmax(&x).unwrap();
            close(&y, &array(&x).by_row(reference::softmax), tolerance(dtype), &format!("softmax {what}"));
            let y = ops::gated(Activation::GeluErf, &x, &x).unwrap();
            let truth = array(&x).map(|x| reference::gelu_erf(x) * x);
            close(&y, &truth, tolerance(dtype), &format!("geglu {what}"));
        }
    }
}

#[test]
fn small_gradients_of_a_loss_over_many_rows_survive_f16() {
    // All classes are equally likely and have the same weights: their gradients of 1/classes/rows each, which f16 cannot
    // hold to 3 %, cancel that of the target.
    let (rows, classes, width) = (2048, 1000, 8);
    let device = ferrospeed_cpu::with_threads(2);
    let full = |shape: [usize; 2]| Tensor::full(shape, 1.0, DType::F16, &device).unwrap();
    let (x, w) = (full([rows, width]).tracked(), full([classes, width]));
    let targets: Vec<i64> = (0..rows as i64).map(|row| row % classes as i64).collect();
    let targets = Tensor::from_slice(&targets, [rows], &device).unwrap();
    let options = ops::CrossEntropyOptions::default();
    let loss = ops::linear_cross_entropy(&x, &w, ops::WeightLayout::OutIn, &targets, options).unwrap();
    let scale = 65_536.0;
    autograd::backward_with(&[(loss, Tensor::scalar(scale, &device).unwrap())]).unwrap();
    let largest =
        x.grad().unwrap().to_vec_f32().unwrap().into_iter().fold(0.0f32, |most, g| most.max(g.abs()));
    assert!(largest < 1e-3 * scale / rows as f32, "the gradients add up to {largest} instead of zero");
}
