//! Muon (Jordan, Jin, Boza, You, Cesista, Newhouse, Bernstein: "Muon: an optimizer for hidden layers in neural networks", 2024).
//!
//! A matrix moves by the orthogonal matrix nearest to its momentum, as a Newton–Schulz iteration finds it. That needs the
//! whole matrix, so a step is three things: [`Muon::direction`] updates the momentum, a stretch at a time, and leaves what is
//! to be made orthogonal; somebody who has all of a matrix calls [`orthogonal`]; [`Muon::apply`] moves the weights. Both
//! passes are those of gradient descent, so every device has kernels for them. What is no hidden matrix is AdamW's, in groups of its own.

use ferrospeed_tensor::backend::{Gemm, Matrix, Unary, Update};
use ferrospeed_tensor::{Category, DType, Result, Tensor};

use crate::adam::Adam;
use crate::norm::{Magnitude, SquareSum};
use crate::{Gradient, GroupOptions};

/// Muon's fixed options.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Muon {
    /// The learning rate of matrices, where a group has no other.
    pub lr: f64,
    /// The decay of their momentum.
    pub momentum: f64,
    /// The rule of all others.
    pub adam: Adam,
}

/// Words in names of parameters that are no hidden matrices, in small letters.
const NOT_HIDDEN: [&str; 2] = ["embed", "lm_head"];
/// How often a matrix is brought nearer to an orthogonal one.
const ITERATIONS: usize = 5;
/// The coefficients of X, XXᵀX and XXᵀXXᵀX: steep at zero, and never far from one after five iterations.
const COEFFICIENTS: [f32; 3] = [3.4445, -4.7750, 2.0315];
/// Added to the norm that a matrix is divided by.
const SMALLEST_NORM: f64 = 1e-7;

impl Muon {
    /// Whether a parameter of this name and shape is a hidden matrix: whatever has two dimensions or more, but for embeddings
    /// and the head, by the words that DeepSpeed goes by.
    pub fn takes(name: &str, dims: usize) -> bool {
        let name = name.to_lowercase();
        dims >= 2 && !NOT_HIDDEN.iter().any(|word| name.contains(word))
    }

    /// Whether a group with these options is one of matrices: it has a momentum, and no second moment to decay.
    pub fn moves(options: &GroupOptions) -> bool {
        options.betas[1] == 0.0
    }

    /// The options of the matrices of a group whose others have these. `configured` are those that all groups begin with: a
    /// rate that differs from theirs is the group's own, and holds for its matrices too.
    pub fn of_matrices(&self, options: &GroupOptions, configured: &GroupOptions) -> GroupOptions {
        let lr = if options.lr == configured.lr { self.lr } else { options.lr };
        GroupOptions { lr, betas: [self.momentum, 0.0], ..*options }
    }

    /// The first pass, over directions that begin as zeros in place of weights, with gradients times [`Muon::entering`]: it
    /// updates the momentum and leaves the mean of gradient and momentum, which looks one step ahead (Nesterov).
    pub fn direction(&self, options: &GroupOptions) -> Update {
        Update::Sgd { lr: -1.0, decay: 0.0, momentum: options.betas[0] as f32, entering: 1.0, nesterov: true }
    }

    /// What gradients are multiplied by as they enter the momentum.
    pub fn entering(&self, options: &GroupOptions) -> f32 {
        (1.0 - options.betas[0]) as f32
    }

    /// The last pass, whose gradients are the directions.
    pub fn apply(&self, options: &GroupOptions) -> Update {
        let decay = options.weight_decay as f32;
        Update::Sgd { lr: options.lr as f32, decay, momentum: 0.0, entering: 1.0, nesterov: false }
    }
}

/// What a parameter of some shape is as matrices: how many, their rows and columns, and the factor of their update.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Matrices {
    /// How many follow each other.
    pub count: usize,
    /// Rows of each.
    pub rows: usize,
    /// Columns of each.
    pub columns: usize,
    /// Multiplies what was made orthogonal: the root of rows by columns where those are more.
    pub factor: f32,
}

impl Matrices {
    /// Of a parameter of at least two dimensions. A convolution's filters (four dimensions) are a matrix with a row each;
    /// others are as many matrices as their leading dimensions say.
    pub fn of(sizes: &[usize]) -> Matrices {
        let [.., last_rows, last] = *sizes else {
            return Matrices { count: 1, rows: 1, columns: sizes.iter().product(), factor: 1.0 };
        };
        let factor =
            if last_rows > last { (last_rows as f64 / last.max(1) as f64).sqrt() as f32 } else { 1.0 };
        let numel: usize = sizes.iter().product();
        match sizes.len() {
            4 => Matrices { count: 1, rows: sizes[0], columns: numel / sizes[0].max(1), factor },
            _ => {
                let count = numel / (last_rows * last).max(1);
                Matrices { count, rows: last_rows, columns: last, factor }
            }
        }
    }
}

/// Makes a matrix orthogonal, nearly: its singular values come to between 0.7 and 1.2, its singular vectors stay. In f32, with
/// the products of its device; `x` is flat or `[rows, columns]`.
pub fn orthogonal(x: &Tensor, matrix: &Matrices) -> Result<Tensor> {
    let (device, [rows, columns]) = (x.device().clone(), [matrix.rows, matrix.columns]);
    let backend = device.backend();
    let buffer = |sizes: [usize; 2]| Tensor::empty_in(sizes, DType::F32, &device, Category::Buffers);
    let short = rows.min(columns);
    let (mut x, mut next) = (scaled(&x.view([rows, columns])?, norm_factor(x)?)?, buffer([rows, columns])?);
    let (mut square, mut step) = (buffer([short, short])?, buffer([short, short])?);
    let times = |scale| Unary::Affine { scale, shift: 0.0 };
    let [a, b, c] = COEFFICIENTS;
    for _ in 0..ITERATIONS {
        // Of the shorter side: XXᵀ, or XᵀX, with which X is multiplied from the other side.
        let (left, right) = match rows <= columns {
            true => (Matrix::whole(&x), Matrix::transposed(&x)),
            false => (Matrix::transposed(&x), Matrix::whole(&x)),
        };
        backend.gemm(Gemm::plain(short, short, rows.max(columns), left, right, square.out()?))?;
        backend.unary(times(b), &square, step.out()?)?;
        let of_square = Matrix::whole(&square);
        let product = Gemm::plain(short, short, short, of_square, of_square, step.out()?);
        backend.gemm(Gemm { alpha: c, accumulate: true, ..product })?;
        backend.unary(times(a), &x, next.out()?)?;
        let (left, right) = match rows <= columns {
            true => (Matrix::whole(&step), Matrix::whole(&x)),
            false => (Matrix::whole(&x), Matrix::whole(&step)),
        };
        let product = Gemm::plain(rows, columns, short, left, right, next.out()?);
        backend.gemm(Gemm { accumulate: true, ..product })?;
        std::mem::swap(&mut x, &mut next);
    }
    if matrix.factor == 1.0 { Ok(x) } else { scaled(&x, matrix.factor) }
}

/// One over the norm of a whole matrix: sums of integers, so that no order changes it.
fn norm_factor(x: &Tensor) -> Result<f32> {
    let (device, backend) = (x.device(), x.device().backend());
    let norm = if backend.is_host() {
        let values = Gradient::F32(x.host()?);
        let magnitude = Magnitude::of(values, device);
        SquareSum::of(values, magnitude, device).norm(magnitude)
    } else {
        let magnitude = Magnitude::from_value(backend.largest_magnitude(&[x])?);
        SquareSum::from_sum(backend.sum_of_squares(&[x], magnitude.grid())?).norm(magnitude)
    };
    Ok((1.0 / (norm + SMALLEST_NORM)) as f32)
}

fn scaled(x: &Tensor, factor: f32) -> Result<Tensor> {
    let mut y = Tensor::empty_in(*x.shape(), DType::F32, x.device(), Category::Buffers)?;
    x.device().backend().unary(Unary::Affine { scale: factor, shift: 0.0 }, x, y.out()?)?;
    Ok(y)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(numel: usize) -> Vec<f32> {
        (0..numel).map(|i| ((i * 7919 % 1013) as f32 - 506.0) / 37.0).collect()
    }

    /// `y·yᵀ`, or `yᵀ·y` where that is smaller.
    fn gram(y: &[f32], rows: usize, columns: usize) -> Vec<f64> {
        let short = rows.min(columns);
        let at = |i: usize, k: usize| {
            f64::from(if rows <= columns { y[i * columns + k] } else { y[k * columns + i] })
        };
        let dot = |i, j| (0..rows.max(columns)).map(|k| at(i, k) * at(j, k)).sum();
        (0..short * short).map(|ij| dot(ij / short, ij % short)).collect()
    }

    #[test]
    fn what_comes_out_is_nearly_orthogonal_whichever_side_is_longer() {
        let device = ferrospeed_cpu::with_threads(2);
        for [rows, columns] in [[3, 17], [17, 3], [8, 8], [1, 5], [5, 1]] {
            let x = Tensor::from_slice(&values(rows * columns), [rows * columns], &device).unwrap();
            let y = orthogonal(&x, &Matrices { count: 1, rows, columns, factor: 1.0 }).unwrap();
            let y = y.to_vec_f32().unwrap();
            let gram = gram(&y, rows, columns);
            let trace: f64 = (0..rows.min(columns)).map(|i| gram[i * rows.min(columns) + i]).sum();
            let mean = trace / rows.min(columns) as f64;
            assert!((0.3..1.5).contains(&mean), "{rows} x {columns}: mean square of singular values {mean}");
        }
    }

    #[test]
    fn a_transposed_matrix_gives_the_transposed_result() {
        let device = ferrospeed_cpu::with_threads(1);
        let (rows, columns) = (5, 9);
        let x = values(rows * columns);
        let turned: Vec<f32> = (0..columns * rows).map(|i| x[i % rows * columns + i / rows]).collect();
        let of = |x: &[f32], rows, columns| {
            let x = Tensor::from_slice(x, [x.len()], &device).unwrap();
            orthogonal(&x, &Matrices { count: 1, rows, columns, factor: 1.0 }).unwrap().to_vec_f32().unwrap()
        };
        let (straight, turned) = (of(&x, rows, columns), of(&turned, columns, rows));
        for i in 0..rows * columns {
            let other = turned[i % columns * rows + i / columns];
            assert!((straight[i] - other).abs() < 1e-5, "{i}: {} and {other}", straight[i]);
        }
    }

    #[test]
    fn zeros_stay_zeros() {
        let device = ferrospeed_cpu::with_threads(1);
        let x = Tensor::zeros([12], DType::F32, &device).unwrap();
        let y = orthogonal(&x, &Matrices::of(&[3, 4])).unwrap();
        assert!(y.to_vec_f32().unwrap().iter().all(|y| *y == 0.0));
    }

    #[test]
    fn hidden_matrices_are_told_by_name_and_dimensions() {
        assert!(Muon::takes("model.layers.0.self_attn.q_proj.weight", 2));
        assert!(!Muon::takes("model.embed_tokens.weight", 2));
        assert!(!Muon::takes("LM_Head.weight", 2));
        assert!(!Muon::takes("model.norm.weight", 1));
        let of = |sizes: &[usize]| {
            let Matrices { count, rows, columns, factor } = Matrices::of(sizes);
            (count, rows, columns, factor)
        };
        assert_eq!(of(&[8, 2]), (1, 8, 2, 2.0));
        assert_eq!(of(&[2, 8]), (1, 2, 8, 1.0));
        assert_eq!(of(&[5, 4, 1]), (5, 4, 1, 2.0));
        assert_eq!(of(&[16, 3, 2, 2]), (1, 16, 12, 1.0));
    }
}
