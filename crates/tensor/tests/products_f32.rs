//! f32 products as parts of larger tensors, with everything that can be fused into them, against plain f64 arithmetic.

use ferrospeed_tensor::backend::{Gemm, Matrix};
use ferrospeed_tensor::random::RandomKey;
use ferrospeed_tensor::{Activation, DType, Device, Tensor};

/// One product of a batch: where its operands lie, and what is fused.
#[derive(Debug, Clone, Copy)]
struct Case {
    m: usize,
    k: usize,
    n: usize,
    transposed: [bool; 2],
    batch: usize,
    alpha: f32,
    accumulate: bool,
    bias: bool,
    activation: Option<Activation>,
}

const PLAIN: Case = Case {
    m: 0,
    k: 0,
    n: 0,
    transposed: [false, false],
    batch: 1,
    alpha: 1.0,
    accumulate: false,
    bias: false,
    activation: None,
};

/// Elements in front of each matrix, and behind each of its rows.
const OFFSET: usize = 5;
const MARGIN: usize = 3;

/// A tensor that holds a batch of matrices of this size, apart from each other, in row order or in column order.
struct Held {
    tensor: Tensor,
    values: Vec<f32>,
    row_stride: usize,
    batch_stride: usize,
    transposed: bool,
}

impl Held {
    fn new(
        [rows, columns]: [usize; 2],
        transposed: bool,
        batch: usize,
        stream: u32,
        device: &Device,
    ) -> Held {
        let (lines, length) = if transposed { (columns, rows) } else { (rows, columns) };
        let row_stride = length + MARGIN;
        let batch_stride = lines * row_stride + MARGIN;
        let mut values = vec![0.0f32; OFFSET + batch * batch_stride];
        RandomKey::new(5, stream).fill_normal(0, &mut values);
        let tensor = Tensor::from_f32(&values, &[values.len()][..], DType::F32, device).unwrap();
        Held { tensor, values, row_stride, batch_stride, transposed }
    }

    fn matrix(&self) -> Matrix<'_> {
        Matrix {
            tensor: &self.tensor,
            offset: OFFSET,
            row_stride: self.row_stride,
            batch_stride: self.batch_stride,
            transposed: self.transposed,
        }
    }

    fn index(&self, batch: usize, row: usize, column: usize) -> usize {
        let (line, place) = if self.transposed { (column, row) } else { (row, column) };
        OFFSET + batch * self.batch_stride + line * self.row_stride + place
    }

    fn at(&self, batch: usize, row: usize, column: usize) -> f64 {
        f64::from(self.values[self.index(batch, row, column)])
    }
}

fn activated(activation: Option<Activation>, x: f64) -> f64 {
    match activation {
        None => x,
        Some(Activation::Relu) => x.max(0.0),
        Some(Activation::Silu) => x / (1.0 + (-x).exp()),
        Some(Activation::GeluTanh) => {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
        }
        Some(other) => panic!("{other:?} has no reference here"),
    }
}

/// Runs a case, compares it with the reference, and gives everything that was written.
fn check(case: Case, threads: usize) -> Vec<Vec<f32>> {
    let Case { m, k, n, batch, .. } = case;
    let device = Device::cpu_with_threads(threads);
    let a = Held::new([m, k], case.transposed[0], batch, 1, &device);
    let b = Held::new([k, n], case.transposed[1], batch, 2, &device);
    let c = Held::new([m, n], false, batch, 3, &device);
    let before = Held::new([m, n], false, batch, 4, &device);
    let bias = Held::new([1, n], false, 1, 5, &device);
    let bias_values: Vec<f32> = (0..n).map(|column| bias.at(0, 0, column) as f32).collect();
    let bias = Tensor::from_f32(&bias_values, &[n][..], DType::F32, &device).unwrap();
    let gemm = Gemm {
        m,
        n,
        k,
        batch,
        a: a.matrix(),
        b: b.matrix(),
        c: c.matrix(),
        alpha: case.alpha,
        accumulate: case.accumulate,
        bias: case.bias.then_some(&bias),
        activation: case.activation,
        before_activation: case.activation.map(|_| &before.tensor),
    };
    device.backend().gemm(&gemm).unwrap();
    let (ours, kept) = (c.tensor.to_vec_f32().unwrap(), before.tensor.to_vec_f32().unwrap());
    // What lies around the result is as it was.
    let (mut expected, mut expected_kept) = (widened(&c.values), widened(&before.values));
    for product in 0..batch {
        for row in 0..m {
            for column in 0..n {
                let sum: f64 = (0..k).map(|i| a.at(product, row, i) * b.at(product, i, column)).sum();
                let mut value = f64::from(case.alpha) * sum;
                if case.accumulate {
                    value += c.at(product, row, column);
                }
                if case.bias {
                    value += f64::from(bias_values[column]);
                }
                let place = c.index(product, row, column);
                expected[place] = activated(case.activation, value);
                if case.activation.is_some() {
                    expected_kept[place] = value;
                }
            }
        }
    }
    let room = 1e-6 * (k.max(4) as f64).sqrt();
    for (ours, expected) in [(&ours, &expected), (&kept, &expected_kept)] {
        for (i, (ours, expected)) in ours.iter().zip(expected).enumerate() {
            let off = (f64::from(*ours) - expected).abs();
            assert!(
                off <= room * expected.abs().max(1.0),
                "{case:?}: {i} is {ours}, the reference says {expected}"
            );
        }
    }
    vec![ours, kept]
}

fn widened(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(f64::from).collect()
}

const LAYOUTS: [[bool; 2]; 4] = [[false, false], [false, true], [true, false], [true, true]];

/// Around blocks of 14 rows and 16 or 32 columns, slices of 256 and more, and panels of 512 and 1024.
const SHAPES: [[usize; 3]; 12] = [
    [2, 5, 3],
    [13, 16, 15],
    [14, 17, 16],
    [15, 255, 17],
    [28, 256, 31],
    [29, 257, 32],
    [43, 384, 33],
    [16, 385, 63],
    [7, 800, 97],
    [1030, 3, 40],
    [30, 20, 1100],
    [520, 9, 520],
];

#[test]
fn views_match_the_reference_in_every_layout_and_touch_nothing_else() {
    for [m, k, n] in SHAPES {
        for transposed in LAYOUTS {
            check(Case { m, k, n, transposed, ..PLAIN }, 2);
        }
    }
}

#[test]
fn everything_fused_matches_the_reference() {
    let activations = [None, Some(Activation::Relu), Some(Activation::Silu), Some(Activation::GeluTanh)];
    for [m, k, n] in [[2, 5, 3], [29, 600, 50], [15, 17, 33]] {
        for (i, activation) in activations.into_iter().enumerate() {
            for [accumulate, bias] in LAYOUTS {
                let transposed = LAYOUTS[i];
                check(Case { m, k, n, transposed, alpha: 0.5, accumulate, bias, activation, batch: 1 }, 2);
            }
        }
    }
}

#[test]
fn a_batch_is_each_of_its_products() {
    for transposed in LAYOUTS {
        let case = Case { m: 17, k: 40, n: 35, batch: 3, transposed, alpha: -2.0, accumulate: true, ..PLAIN };
        check(case, 2);
    }
}

#[test]
fn nothing_to_sum_gives_what_is_added() {
    for [accumulate, bias] in LAYOUTS {
        check(Case { m: 15, k: 0, n: 33, accumulate, bias, ..PLAIN }, 1);
        check(Case { m: 0, k: 4, n: 33, accumulate, bias, ..PLAIN }, 1);
        check(Case { m: 15, k: 4, n: 0, accumulate, bias, ..PLAIN }, 1);
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for [m, k, n] in [[1030, 3, 40], [30, 700, 1100], [7, 800, 97]] {
        for transposed in LAYOUTS {
            let case = Case {
                m,
                k,
                n,
                transposed,
                alpha: 0.5,
                accumulate: true,
                bias: true,
                activation: Some(Activation::Silu),
                batch: 1,
            };
            let one = check(case, 1);
            for threads in [2, 3, 8] {
                assert_eq!(one, check(case, threads), "{case:?} on {threads} threads");
            }
        }
    }
}
