//! Finding the largest products of a vector with the rows of a matrix without reading all of the matrix.
//!
//! Decoding is bound by reading weights, and a head, a row for each word, is a third of a small model's; yet only the
//! words with the largest products can be chosen. A copy of the head in 8 bits, a scale for each row, gives every product
//! with a bound on its error. A row whose upper bound lies below the lower bounds of as many others as are asked for
//! cannot be among the largest. The few rows left are multiplied exactly, by the kernel that makes the whole product. So
//! the result is proved to be the whole product's, not likely to be.
//!
//! With `w` a row, `w̃` its copy, `e = w − w̃`, and `u` the unit vector along the mean of some examples of `x`:
//! `w·x = w̃·x + α e·u + e·(x − αu)` for any `α`. The last term is at most `|e||x − αu|` (Cauchy and Schwarz), and `e·u` is
//! kept for each row. Hidden states of trained models point mostly one way, so `x − αu` is much shorter than `x`.
//!
//! Everything is f32, so the bounds also count the rounding of both sums. A sum over `n` products in [`LANES`] lanes, each
//! rounded by 2⁻²⁴, differs from the true one by at most about `(n/LANES + 5)·2⁻²⁴` of the product of the norms (Higham,
//! "Accuracy and Stability of Numerical Algorithms", 2002, section 3.1); `rounding` is more than twice that.

use std::ops::Range;

use ferrospeed_tensor::backend::Screen;
use ferrospeed_tensor::dtype::Float;
use ferrospeed_tensor::loops::simd::{LANES, dot, max, vectorized};
use ferrospeed_tensor::loops::threads::Threads;
use ferrospeed_tensor::{Category, DType, Result, Tensor, TensorError};

use crate::one_row::{dots, rows_at};
use crate::parallel::Shared;
use crate::{float_kernel, read, write};

/// Rows of one task: the copy is read in as many places at once as a weight is.
const LINES: usize = 8;
const IN_TURN: usize = 16;
const BLOCK: usize = LINES * IN_TURN;

/// Rows with larger weights, or with some that are no numbers, are always multiplied exactly.
const LARGEST_WEIGHT: f32 = (1u64 << 40) as f32;
/// Rows whose weights are all smaller have zeros for a copy: what they lose is too small to matter.
const SMALLEST_WEIGHT: f32 = 1.0 / (1u64 << 40) as f32;
/// More than squares that are too small for f32 can add to a norm.
const NORM_FLOOR: f32 = 1.0 / (1u64 << 60) as f32;
/// The norms of `x` for which no step of the bounds leaves the range of f32.
const NORMS: Range<f64> = 1.0 / (1u64 << 60) as f64..(1u64 << 60) as f64;
/// Adding it rounds a number of few digits to an integer, which its lowest byte then holds.
const ROUNDER: f32 = 12_582_912.0;

/// A matrix's copy in 8 bits, and what is known of it.
pub(crate) struct RowScreen {
    threads: Threads,
    rows: usize,
    width: usize,
    dtype: DType,
    /// `[rows, width]`: signed bytes.
    codes: Tensor,
    /// `[4, rows]` of f32: see [`Facts`].
    facts: Tensor,
    /// `u`, or zeros where there is none.
    usual: Vec<f32>,
    /// Bounds of each product, the lower and the upper.
    bounds: [Vec<f32>; 2],
}

/// What is known of one row.
#[derive(Clone, Copy)]
struct Facts {
    /// What its codes are multiplied by.
    scale: f32,
    /// At least `|e|`; infinite where the row has no copy.
    error: f32,
    /// At least `|w|`.
    norm: f32,
    /// `e·u`.
    usual_error: f32,
}

impl RowScreen {
    /// Copies `weight`, `[rows, width]`; the rows of `examples` are vectors such as will come.
    pub(crate) fn new(threads: &Threads, weight: &Tensor, examples: &Tensor) -> Result<RowScreen> {
        let (rows, width) = (weight.shape().rows(), weight.shape().last());
        if width == 0 || examples.shape().last() != width || examples.dtype() != weight.dtype() {
            let what = format!("{weight:?} cannot be multiplied by vectors like {examples:?}");
            return Err(TensorError::argument("screen", what));
        }
        let empty =
            |shape: [usize; 2], dtype| Tensor::empty_in(shape, dtype, weight.device(), Category::Buffers);
        let mut screen = RowScreen {
            threads: threads.clone(),
            rows,
            width,
            dtype: weight.dtype(),
            codes: empty([rows, width], DType::U8)?,
            facts: empty([4, rows], DType::F32)?,
            usual: unit_mean(&examples.to_vec_f32()?, width),
            bounds: [vec![0.0; rows], vec![0.0; rows]],
        };
        float_kernel!("screen", weight.dtype(), T => screen.copy_rows::<T>(weight)?)?;
        Ok(screen)
    }

    fn copy_rows<T: Float>(&mut self, weight: &Tensor) -> Result<()> {
        let weight = read::<T>(weight);
        let codes = Shared::new(write::<u8>(self.codes.out()?));
        let facts = Shared::new(write::<f32>(self.facts.out()?));
        self.threads.blocks(self.rows, BLOCK, |block| {
            let (mut line, mut errors) = (vec![0.0f32; self.width], vec![0.0f32; self.width]);
            for row in block {
                let span = row * self.width..(row + 1) * self.width;
                // SAFETY: each row belongs to one task.
                let codes = unsafe { codes.range(span.clone()) };
                let source = &weight[span];
                let known = vectorized!(|| {
                    line.iter_mut().zip(source).for_each(|(wide, weight)| *wide = weight.widen());
                    encode(&line, &self.usual, codes, &mut errors)
                });
                let known = [known.scale, known.error, known.norm, known.usual_error];
                for (fact, known) in known.into_iter().enumerate() {
                    let place = fact * self.rows + row;
                    // SAFETY: as above.
                    unsafe { facts.range(place..place + 1)[0] = known };
                }
            }
        });
        Ok(())
    }

    /// Bounds of the products of all rows with `x`; `None` where `x` is too large, too small or no vector of numbers.
    fn find_bounds(&mut self, x: &[f32]) -> Option<()> {
        let norm_of =
            |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
        let wide = |values: &[f32]| values.iter().map(|&value| f64::from(value)).collect::<Vec<f64>>();
        let (exact_x, usual) = (wide(x), wide(&self.usual));
        let x_norm = norm_of(&mut exact_x.iter().copied());
        if !NORMS.contains(&x_norm) {
            return None;
        }
        let along = exact_x.iter().zip(&usual).map(|(x, u)| x * u).sum::<f64>() as f32;
        let across = norm_of(&mut exact_x.iter().zip(&usual).map(|(x, u)| x - f64::from(along) * u));
        let rounding = (self.width / LANES + 32) as f64 / f64::from(1 << 23);
        let at_least = |value: f64| (value * (1.0 + 1e-6)) as f32;
        let per_error = at_least(across + rounding * (x_norm + f64::from(along.abs())) * (1.0 + 1e-6));
        let per_norm = at_least(2.0 * rounding * x_norm);

        let (rows, width) = (self.rows, self.width);
        let codes: &[i8] = bytemuck::cast_slice(read::<u8>(&self.codes));
        let mut facts = read::<f32>(&self.facts).chunks(rows);
        let mut fact = || facts.next().unwrap_or_default();
        let (scales, errors, norms, usual_errors) = (fact(), fact(), fact(), fact());
        let [lower, upper] = self.bounds.each_mut().map(|bounds| Shared::new(bounds));
        self.threads.blocks(rows, BLOCK, |block| {
            let mut sums = [0.0f32; BLOCK];
            let line = |row: usize| &codes[(block.start + row) * width..][..width];
            if block.len() == BLOCK {
                for turn in 0..IN_TURN {
                    let lines: [&[i8]; LINES] = std::array::from_fn(|i| line(i * IN_TURN + turn));
                    let found = vectorized!(|| dots(x, &lines, f32::from));
                    found.into_iter().enumerate().for_each(|(i, sum)| sums[i * IN_TURN + turn] = sum);
                }
            } else {
                for (row, sum) in sums[..block.len()].iter_mut().enumerate() {
                    [*sum] = vectorized!(|| dots(x, &[line(row)], f32::from));
                }
            }
            // SAFETY: each row belongs to one task.
            let (lower, upper) = unsafe { (lower.range(block.clone()), upper.range(block.clone())) };
            let [scales, errors, norms, usual_errors] =
                [scales, errors, norms, usual_errors].map(|fact| &fact[block.clone()]);
            vectorized!(|| {
                for i in 0..lower.len() {
                    let about = scales[i] * sums[i] + along * usual_errors[i];
                    let bound = errors[i] * per_error + norms[i] * per_norm;
                    let bound = bound * 1.000_001 + f32::MIN_POSITIVE;
                    (lower[i], upper[i]) = (about - bound, about + bound);
                }
            });
        });
        Some(())
    }

    /// A number that `count` products reach.
    fn reached(&self, count: usize) -> Option<f32> {
        let [lower, _] = &self.bounds;
        if count == 1 {
            return Some(vectorized!(|| max(lower))).filter(|reached| reached.is_finite());
        }
        let mut finite: Vec<f32> = lower.iter().copied().filter(|bound| bound.is_finite()).collect();
        if finite.len() < count {
            return None;
        }
        Some(*finite.select_nth_unstable_by(count - 1, |a, b| b.total_cmp(a)).1)
    }

    /// The rows whose products, rounded to `T`, may reach `reached`; `None` for more than `limit`.
    fn candidates<T: Float>(&self, reached: f32, limit: usize) -> Option<Vec<usize>> {
        // Rounding keeps the order, but may make equals of two that differ. NaN is what a row without a copy has.
        let reached = T::narrow(reached).widen();
        let may_reach = |upper: f32| upper.is_nan() | (T::narrow(upper).widen() >= reached);
        let mut rows = Vec::new();
        for (block, upper) in self.bounds[1].chunks(BLOCK).enumerate() {
            if vectorized!(|| upper.iter().fold(false, |any, &upper| any | may_reach(upper))) {
                let found = upper.iter().enumerate().filter(|&(_, &upper)| may_reach(upper));
                rows.extend(found.map(|(row, _)| block * BLOCK + row));
                if rows.len() > limit {
                    return None;
                }
            }
        }
        Some(rows)
    }
}

impl Screen for RowScreen {
    fn largest(&mut self, weight: &Tensor, x: &Tensor, count: usize) -> Result<Option<Vec<(usize, f32)>>> {
        if weight.shape().rows() != self.rows
            || weight.shape().last() != self.width
            || x.numel() != self.width
            || [weight.dtype(), x.dtype()] != [self.dtype; 2]
        {
            let made_of = format!("{} [{}, {}]", self.dtype, self.rows, self.width);
            let what = format!("a screen of {made_of} cannot multiply {weight:?} by {x:?}");
            return Err(TensorError::argument("screen", what));
        }
        // Beyond this, reading rows here and there saves too little.
        let limit = self.rows * self.dtype.size_bytes() / 16;
        let count = count.max(1);
        let x = x.to_vec_f32()?;
        if count > limit || self.find_bounds(&x).is_none() {
            return Ok(None);
        }
        let Some(reached) = self.reached(count) else { return Ok(None) };
        float_kernel!("screen", self.dtype, T => {
            self.candidates::<T>(reached, limit).and_then(|rows| {
                let products = rows_at::<T>(&self.threads, &x, read::<T>(weight), &rows);
                let found: Vec<(usize, f32)> = rows.into_iter().zip(products).collect();
                found.iter().all(|(_, product)| !product.is_nan()).then_some(found)
            })
        })
    }
}

/// The mean of rows of `width`, made as long as 1; zeros where it has no direction.
fn unit_mean(examples: &[f32], width: usize) -> Vec<f32> {
    let mut mean = vec![0.0f64; width];
    for example in examples.chunks_exact(width) {
        mean.iter_mut().zip(example).for_each(|(mean, &value)| *mean += f64::from(value));
    }
    let norm = mean.iter().map(|value| value * value).sum::<f64>().sqrt();
    match norm.is_normal() {
        true => mean.iter().map(|value| (value / norm) as f32).collect(),
        false => vec![0.0; width],
    }
}

/// Writes the codes of a row; `errors` is scratch of its length.
#[inline(always)]
fn encode(line: &[f32], usual: &[f32], codes: &mut [u8], errors: &mut [f32]) -> Facts {
    errors.iter_mut().zip(line).for_each(|(magnitude, weight)| *magnitude = weight.abs());
    let (largest, square) = (max(errors), dot(line, line));
    if !(largest <= LARGEST_WEIGHT && square.is_finite()) {
        codes.fill(0);
        return Facts { scale: 0.0, error: f32::INFINITY, norm: 0.0, usual_error: 0.0 };
    }
    let (scale, inverse) = match largest < SMALLEST_WEIGHT {
        true => (0.0, 0.0),
        // Sixteen digits, rounded up: then a code times the scale is exact.
        false => {
            let scale = f32::from_bits((largest / 127.0).to_bits().wrapping_add(0xff) & !0xff);
            (scale, 1.0 / scale)
        }
    };
    for ((code, error), &weight) in codes.iter_mut().zip(errors.iter_mut()).zip(line) {
        let shifted = weight * inverse + ROUNDER;
        *code = shifted.to_bits() as u8;
        *error = weight - scale * (shifted - ROUNDER);
    }
    let slack = 1.0 + line.len() as f32 / (1 << 22) as f32;
    let at_least = |square: f32| square.sqrt() * slack + NORM_FLOOR;
    Facts {
        scale,
        error: at_least(dot(errors, errors)),
        norm: at_least(square),
        usual_error: dot(errors, usual),
    }
}
