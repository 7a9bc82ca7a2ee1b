//! Products of one row, and of the few rows beside it, against plain f64 arithmetic: every layout, type and epilogue.

use super::reference;
use super::reference::Array;
use ferrospeed_tensor::backend::{Gemm, Matrix};
use ferrospeed_tensor::random::RandomKey;
use ferrospeed_tensor::{Activation, DType, Device, Tensor};

fn random(shape: &[usize], stream: u32, dtype: DType, device: &Device) -> Tensor {
    let mut values = vec![0.0f32; shape.iter().product()];
    RandomKey::new(8, stream).fill_normal(0, &mut values);
    Tensor::from_f32(&values, shape, dtype, device).unwrap()
}

fn array(tensor: &Tensor) -> Array {
    Array::new(tensor.sizes(), tensor.to_vec_f32().unwrap().into_iter().map(f64::from).collect())
}

/// The fused product, accumulated onto ones, and what it should be.
fn product(
    [m, k, n]: [usize; 3],
    layout: &str,
    [from, to]: [DType; 2],
    threads: usize,
) -> (Tensor, Tensor, [Array; 2]) {
    let device = ferrospeed_cpu::with_threads(threads);
    let a = random(&if layout == "TN" { [k, m] } else { [m, k] }, 1, from, &device);
    let b = random(&if layout == "NT" { [n, k] } else { [k, n] }, 2, from, &device);
    let bias = random(&[n], 3, to, &device);
    let (mut c, mut before) = (
        Tensor::full([m, n], 1.0, to, &device).unwrap(),
        Tensor::full([m, n], f32::NAN, to, &device).unwrap(),
    );
    let left = Matrix { transposed: layout == "TN", ..Matrix::whole(&a) };
    let right = Matrix { transposed: layout == "NT", ..Matrix::whole(&b) };
    let gemm = Gemm {
        alpha: 0.5,
        accumulate: true,
        bias: Some(&bias),
        activation: Some(Activation::Relu),
        before_activation: Some(before.out().unwrap()),
        ..Gemm::plain(m, n, k, left, right, c.out().unwrap())
    };
    device.backend().gemm(gemm).unwrap();
    let turn = |tensor: &Tensor, turned: bool| {
        let array = array(tensor);
        if turned { reference::transposed(&array) } else { array }
    };
    let plain = reference::matmul(&turn(&a, layout == "TN"), &turn(&b, layout == "NT"));
    let expected = plain.map(|p| 1.0 + 0.5 * p).zip(&array(&bias), |p, b| p + b);
    let activated = expected.map(|x| x.max(0.0));
    (c, before, [expected, activated])
}

fn close(ours: &Tensor, truth: &Array, tolerance: f64, what: &str) {
    let scale = truth.data.iter().fold(1.0, |a: f64, b| a.max(b.abs()));
    for (i, (a, b)) in ours.to_vec_f32().unwrap().iter().zip(&truth.data).enumerate() {
        assert!(
            (f64::from(*a) - b).abs() <= tolerance * scale,
            "{what}: element {i} is {a}, the reference says {b}"
        );
    }
}

/// Depths and widths around the blocks of 16, 64, 128 and 2048.
const SIZES: [[usize; 2]; 8] =
    [[1, 1], [3, 5], [16, 64], [17, 65], [130, 33], [30, 2070], [1100, 17], [0, 7]];

#[test]
fn one_row_and_two_match_the_reference() {
    use DType::{BF16, F16, F32};
    for types in [[F32, F32], [BF16, BF16], [F16, F16], [BF16, F32]] {
        let tolerance = match types[1] {
            F32 => 4e-6,
            BF16 => 1.0 / 256.0,
            _ => 1.0 / 2048.0,
        };
        for m in [1, 2] {
            for [k, n] in SIZES {
                for layout in ["NN", "NT", "TN"] {
                    let (c, before, [expected, activated]) = product([m, k, n], layout, types, 2);
                    let what = format!("{types:?} {layout} {m}x{k}x{n}");
                    close(&before, &expected, tolerance, &format!("{what}, before the activation"));
                    close(&c, &activated, tolerance, &what);
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_on_any_number_of_threads() {
    for dtype in [DType::F32, DType::BF16] {
        for layout in ["NN", "NT"] {
            let bits = |threads| product([1, 700, 2100], layout, [dtype; 2], threads).0.to_vec_f32().unwrap();
            let one = bits(1);
            for threads in [2, 3, 8] {
                assert_eq!(one, bits(threads), "{dtype} {layout} on {threads} threads");
            }
        }
    }
}
