//! f32 products as parts of larger tensors, with everything that can be fused into them, against plain f64 arithmetic.

use ferrospeed_tensor::backend::{Gemm, Matrix, MatrixOut};
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

    fn out(&mut self) -> MatrixOut<'_> {
        let mut out = MatrixOut::whole(self.tensor.out().unwrap());
        (out.offset, out.row_stride, out.batch_stride) = (OFFSET, self.row_stride, self.batch_stride);
        out
    }

    fn index(&self, batch: usize, row: usize, column: usize) -> usize {
        let (line, place) = if self.transposed { (column, row) } else { (row, column) };
        OFFSET + batch * self.batch_stride + line * self.row_stride + place
    }

    fn at(&self, batch: usize, row: usize, column: usize) -> f64 {
        f64::from(self.values[self.index(batch, row, column)])
    }
}

/// `c = a·b`.
fn plain<'a>([m, n, k]: [usize; 3], a: &'a Held, b: &'a Held, c: &'a mut Held) -> Gemm<'a> {
    let (row_stride, batch_stride) = (c.row_stride, c.batch_stride);
    let mut gemm = Gemm::plain(m, n, k, a.matrix(), b.matrix(), c.tensor.out().unwrap());
    (gemm.c.offset, gemm.c.row_stride, gemm.c.batch_stride) = (OFFSET, row_stride, batch_stride);
    gemm
}

/// How far a result may be off, as a share of the sum of the sizes of its terms. Adding a thousand random terms one by one in
/// f32 stays below half of it; factors rounded to 16 bits do not.
const ROOM: f64 = 4.0 * f32::EPSILON as f64;

/// An element of a product, and the sum of the sizes of its terms.
fn sum(a: &Held, b: &Held, k: usize, [product, row, column]: [usize; 3]) -> (f64, f64) {
    let terms = (0..k).map(|i| a.at(product, row, i) * b.at(product, i, column));
    terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()))
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
    let device = ferrospeed_cpu::with_threads(threads);
    let a = Held::new([m, k], case.transposed[0], batch, 1, &device);
    let b = Held::new([k, n], case.transposed[1], batch, 2, &device);
    let mut c = Held::new([m, n], false, batch, 3, &device);
    let mut before = Held::new([m, n], false, batch, 4, &device);
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
        c: c.out(),
        alpha: case.alpha,
        accumulate: case.accumulate,
        bias: case.bias.then_some(&bias),
        activation: case.activation,
        before_activation: case.activation.map(|_| before.tensor.out().unwrap()),
    };
    device.backend().gemm(gemm).unwrap();
    let (ours, kept) = (c.tensor.to_vec_f32().unwrap(), before.tensor.to_vec_f32().unwrap());
    // What lies around the result is as it was.
    let (mut expected, mut expected_kept) = (widened(&c.values), widened(&before.values));
    let mut sizes = vec![0.0; expected.len()];
    for product in 0..batch {
        for row in 0..m {
            for column in 0..n {
                let (sum, size) = sum(&a, &b, k, [product, row, column]);
                let added = [
                    c.at(product, row, column) * f64::from(u8::from(case.accumulate)),
                    f64::from(bias_values[column]) * f64::from(u8::from(case.bias)),
                ];
                let alpha = f64::from(case.alpha);
                let value = alpha * sum + added[0] + added[1];
                let place = c.index(product, row, column);
                sizes[place] = alpha.abs() * size + added[0].abs() + added[1].abs();
                expected[place] = activated(case.activation, value);
                if case.activation.is_some() {
                    expected_kept[place] = value;
                }
            }
        }
    }
    for (ours, expected) in [(&ours, &expected), (&kept, &expected_kept)] {
        for (i, (ours, expected)) in ours.iter().zip(expected).enumerate() {
            let off = (f64::from(*ours) - expected).abs();
            assert!(off <= ROOM * sizes[i], "{case:?}: {i} is {ours}, the reference says {expected}");
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

/// For tiles: around blocks of 32, slices of 768, panels of 256 columns and 512 rows, and parts of 1024 of `k` and of the rows.
const TILED: [[usize; 3]; 7] = [
    [128, 128, 128],
    [130, 161, 129],
    [161, 769, 131],
    [129, 800, 290],
    [1030, 130, 135],
    [1030, 1020, 130],
    [128, 2100, 128],
];

#[test]
fn views_match_the_reference_in_every_layout_and_touch_nothing_else() {
    for [m, k, n] in SHAPES.into_iter().chain(TILED) {
        for transposed in LAYOUTS {
            check(Case { m, k, n, transposed, ..PLAIN }, 2);
        }
    }
}

/// Large products keep the accuracy of f32, whatever they are made of: adding one by one is typically off by 0.17 to 0.24 of
/// the last place here, and factors of 16 bits would be by more than three.
#[test]
fn large_products_are_as_accurate_as_f32() {
    let [m, k, n] = [128, 512, 128];
    let device = ferrospeed_cpu::with_threads(1);
    let [a, b, mut c] = [([m, k], 1), ([k, n], 2), ([m, n], 3)]
        .map(|(size, stream)| Held::new(size, false, 1, stream, &device));
    let gemm = plain([m, n, k], &a, &b, &mut c);
    device.backend().gemm(gemm).unwrap();
    let ours = c.tensor.to_vec_f32().unwrap();
    let mut squares = 0.0;
    for row in 0..m {
        for column in 0..n {
            let (sum, size) = sum(&a, &b, k, [0, row, column]);
            let off = (f64::from(ours[c.index(0, row, column)]) - sum) / (f64::from(f32::EPSILON) * size);
            assert!(
                off.abs() < 4.0,
                "[{row}, {column}] is off by {off} of the last place of the sum of sizes"
            );
            squares += off * off;
        }
    }
    let typical = (squares / (m * n) as f64).sqrt();
    assert!(typical < 0.3, "typically off by {typical}");
}

/// What has no pieces (infinities, NaN), what is cut off by rounding to bf16 (the largest values) and what is left of the
/// smallest, each where the others of its row and column are ordinary.
#[test]
fn extreme_values_stay_where_they_are() {
    // In the second of two slices, when the sums of the first are there.
    let ([m, k, n], extreme_k) = ([140, 900, 150], 890);
    let device = ferrospeed_cpu::with_threads(2);
    for transposed in LAYOUTS {
        for extreme in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, f32::MIN_POSITIVE] {
            for left in [true, false] {
                let mut a = Held::new([m, k], transposed[0], 1, 1, &device);
                let mut b = Held::new([k, n], transposed[1], 1, 2, &device);
                let mut c = Held::new([m, n], false, 1, 3, &device);
                let held = if left { &mut a } else { &mut b };
                let place = if left { held.index(0, 77, extreme_k) } else { held.index(0, extreme_k, 77) };
                held.values[place] = extreme;
                held.tensor =
                    Tensor::from_f32(&held.values, &[held.values.len()][..], DType::F32, &device).unwrap();
                // Smaller factors, so that the largest value does not overflow.
                for i in 0..if left { n } else { m } {
                    let other = if left { &mut b } else { &mut a };
                    let place =
                        if left { other.index(0, extreme_k, i) } else { other.index(0, i, extreme_k) };
                    other.values[place] = 0.5;
                }
                let other = if left { &mut b } else { &mut a };
                other.tensor =
                    Tensor::from_f32(&other.values, &[other.values.len()][..], DType::F32, &device).unwrap();
                let gemm = plain([m, n, k], &a, &b, &mut c);
                device.backend().gemm(gemm).unwrap();
                let ours = c.tensor.to_vec_f32().unwrap();
                for row in 0..m {
                    for column in 0..n {
                        let (sum, size) = sum(&a, &b, k, [0, row, column]);
                        let ours = f64::from(ours[c.index(0, row, column)]);
                        let same = if sum.is_finite() {
                            (ours - sum).abs() <= ROOM * size
                        } else {
                            ours.to_bits() == sum.to_bits() || (ours.is_nan() && sum.is_nan())
                        };
                        assert!(same, "{extreme} {transposed:?}: [{row}, {column}] is {ours}, not {sum}");
                    }
                }
            }
        }
    }
}

#[test]
fn everything_fused_matches_the_reference() {
    let activations = [None, Some(Activation::Relu), Some(Activation::Silu), Some(Activation::GeluTanh)];
    for [m, k, n] in [[2, 5, 3], [29, 600, 50], [15, 17, 33], [130, 1100, 131]] {
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
        for [m, k, n] in [[17, 40, 35], [600, 600, 130]] {
            let case = Case { m, k, n, batch: 3, transposed, alpha: -2.0, accumulate: true, ..PLAIN };
            check(case, 2);
        }
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
    for [m, k, n] in [[1030, 3, 40], [30, 700, 1100], [7, 800, 97], [530, 150, 300]] {
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
