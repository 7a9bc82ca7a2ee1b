//! Fake quantisation: values rounded to the few levels that a model will have when it is stored in few bits, in the type that
//! kernels read (Jacob et al., "Quantization and training of neural networks for efficient integer-arithmetic-only inference",
//! 2018, section 3; with one or two bits: Rastegari et al., "XNOR-Net", 2016, section 3.1, and Li, Zhang, Liu, "Ternary weight
//! networks", 2016, section 2).
//!
//! A tensor is cut into groups of as many neighbours, each with levels of its own. With b ≥ 3 bits they are
//! - symmetric: `clamp(round(x / s), −2^(b−1), 2^(b−1) − 1) · s` with `s = 2 · max|x| / 2^b`;
//! - asymmetric: `clamp(round((x − z) / s), 0, 2^b − 1) · s + z` with `s = (max − min) / 2^b` and `z = round(min / s) · s`.
//!
//! Two bits are ternary, `{−a, 0, a}` with the threshold `0.7 · mean|x|` and `a` the mean of what lies above it; one bit is
//! `sign(x) · mean|x|`. Rounding is to nearest, ties to even, or stochastic. A group without a spread stays as it is: of zeros
//! come zeros.
//!
//! Its gradient is that of the identity (the straight-through estimator of Bengio, Léonard, Courville, 2013), so whoever records
//! it hands gradients through. It runs on the host; results do not depend on the number of threads.

use crate::dtype::{DType, Float};
use crate::error::{Result, TensorError};
use crate::random::RandomKey;
use crate::tensor::Tensor;

/// Values per task: enough to be worth a thread.
const BLOCK: usize = 16 * 1024;
/// What the magnitudes of a ternary group are compared with, as a share of their mean.
const TERNARY_THRESHOLD: f64 = 0.7;

/// Where the levels of a group lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Levels {
    /// Around zero, `2^bits` of them.
    Symmetric {
        /// From 3.
        bits: u32,
    },
    /// From the smallest value to the largest, `2^bits` of them.
    Asymmetric {
        /// From 3.
        bits: u32,
    },
    /// Three: zero, and one magnitude with either sign.
    Ternary,
    /// Two: one magnitude with either sign.
    Binary,
}

impl Levels {
    /// The levels of so many bits, or why there are none.
    pub fn of(bits: u64, symmetric: bool) -> Result<Levels, String> {
        match (bits, symmetric) {
            (0, _) => Err("no value has 0 bits; at least 1".to_owned()),
            (17.., _) => Err(format!(
                "{bits} bits are more than a 16-bit weight has, so nothing would be quantised; at most 16"
            )),
            (1 | 2, false) => Err(format!("{bits} bits are symmetric only; asymmetric needs at least 3")),
            (1, true) => Ok(Levels::Binary),
            (2, true) => Ok(Levels::Ternary),
            (bits, true) => Ok(Levels::Symmetric { bits: bits as u32 }),
            (bits, false) => Ok(Levels::Asymmetric { bits: bits as u32 }),
        }
    }
}

/// How a tensor is quantised.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FakeQuantizer {
    /// The levels of each group.
    pub levels: Levels,
    /// How many groups; they divide the tensor.
    pub groups: usize,
    /// Where the numbers of stochastic rounding come from; `None` rounds to nearest. One or two bits are not rounded.
    pub noise: Option<RandomKey>,
    /// How much of the exact value is mixed in, from 0 to 1.
    pub exact_share: f32,
    /// The smallest and the largest value of every group, where they are known beforehand.
    pub range: Option<[f32; 2]>,
}

impl FakeQuantizer {
    /// Rounds to nearest, with the range that each group has, and mixes nothing in.
    pub fn new(levels: Levels, groups: usize) -> FakeQuantizer {
        FakeQuantizer { levels, groups, noise: None, exact_share: 0.0, range: None }
    }

    /// The values as they would be in few bits, in the same type, off the tape.
    pub fn apply(&self, x: &Tensor) -> Result<Tensor> {
        if self.groups == 0 || !x.numel().is_multiple_of(self.groups) {
            let what = format!("{} values cannot be cut into {} groups alike", x.numel(), self.groups);
            return Err(TensorError::argument("fake quantisation", what));
        }
        let mut out = Tensor::empty(*x.shape(), x.dtype(), x.device())?;
        match x.dtype() {
            DType::F32 => self.fill::<f32>(x, &mut out)?,
            DType::BF16 => self.fill::<half::bf16>(x, &mut out)?,
            DType::F16 => self.fill::<half::f16>(x, &mut out)?,
            dtype => {
                let (op, what, expected) = ("fake quantisation", "the operand", "a float type");
                return Err(TensorError::BadDType { op, what, dtype, expected });
            }
        }
        Ok(out)
    }

    fn fill<T: Float>(&self, x: &Tensor, out: &mut Tensor) -> Result<()> {
        let values = x.host::<T>()?;
        if values.is_empty() {
            return Ok(());
        }
        let pieces = Pieces::new(values.len(), self.groups);
        let grids = self.grids(x, values, &pieces);
        let whole = out.out()?.into_host::<T>()?;
        let parts = whole.chunks_mut(pieces.per_task * pieces.size).flat_map(|some| some.chunks_mut(BLOCK));
        x.device().each(parts, |task, part| {
            let mut start = pieces.start(task * pieces.per_task);
            for own in part.chunks_mut(pieces.size) {
                let grid = grids[start / pieces.size];
                for (at, value) in own.iter_mut().enumerate() {
                    let exact = values[start + at].widen();
                    let noise = self.noise.map_or(0.0, |key| key.uniform((start + at) as u64) - 0.5);
                    let coarse = grid.of(exact, noise);
                    *value = T::narrow(match self.exact_share {
                        0.0 => coarse,
                        share => share * exact + (1.0 - share) * coarse,
                    });
                }
                start += own.len();
            }
        });
        Ok(())
    }

    /// The levels of each group.
    fn grids<T: Float>(&self, x: &Tensor, values: &[T], pieces: &Pieces) -> Vec<Grid> {
        let measured = |above: &(dyn Fn(usize) -> f64 + Send + Sync)| -> Vec<Extent> {
            let mut extents = vec![Extent::default(); pieces.count()];
            x.device().each(extents.chunks_mut(pieces.per_task), |task, own| {
                for (at, extent) in own.iter_mut().enumerate() {
                    let piece = task * pieces.per_task + at;
                    *extent = Extent::of(&values[pieces.range(piece)], above(piece / pieces.per_group));
                }
            });
            extents.chunks(pieces.per_group).map(Extent::joined).collect()
        };
        let is_known = matches!(self.levels, Levels::Symmetric { .. } | Levels::Asymmetric { .. });
        if let Some(range) = self.range.filter(|_| is_known) {
            return vec![Grid::of_range(self.levels, range); self.groups];
        }
        let extents = measured(&|_| -1.0);
        let means: Vec<f64> = extents.iter().map(|extent| extent.sum / pieces.size as f64).collect();
        match self.levels {
            Levels::Symmetric { .. } | Levels::Asymmetric { .. } => {
                extents.iter().map(|extent| Grid::of_range(self.levels, [extent.min, extent.max])).collect()
            }
            Levels::Binary => {
                means.iter().map(|mean| Grid::Signed { threshold: 0.0, magnitude: *mean as f32 }).collect()
            }
            Levels::Ternary => {
                // The threshold is an f32, as values are.
                let threshold = |group: usize| (TERNARY_THRESHOLD * means[group]) as f32;
                let above = measured(&|group| f64::from(threshold(group)));
                let grid = |(group, above): (usize, &Extent)| Grid::Signed {
                    threshold: threshold(group),
                    magnitude: (above.sum / (above.count.max(1) as f64)) as f32,
                };
                above.iter().enumerate().map(grid).collect()
            }
        }
    }
}

/// How groups are cut into pieces, or joined into tasks: by their sizes alone.
struct Pieces {
    /// Values of a group.
    size: usize,
    groups: usize,
    /// Pieces of a group.
    per_group: usize,
    /// Groups, each of one piece, or pieces of a task.
    per_task: usize,
}

impl Pieces {
    fn new(values: usize, groups: usize) -> Pieces {
        let size = values / groups;
        Pieces { size, groups, per_group: size.div_ceil(BLOCK), per_task: (BLOCK / size).max(1) }
    }

    fn count(&self) -> usize {
        self.groups * self.per_group
    }

    fn start(&self, piece: usize) -> usize {
        piece / self.per_group * self.size + piece % self.per_group * BLOCK
    }

    fn range(&self, piece: usize) -> std::ops::Range<usize> {
        let end = (piece / self.per_group + 1) * self.size;
        let start = self.start(piece);
        start..end.min(start + BLOCK)
    }
}

/// What is to be known of a group.
#[derive(Debug, Clone, Copy)]
struct Extent {
    min: f32,
    max: f32,
    /// Of magnitudes above a threshold.
    sum: f64,
    count: usize,
}

impl Default for Extent {
    fn default() -> Extent {
        Extent { min: f32::INFINITY, max: f32::NEG_INFINITY, sum: 0.0, count: 0 }
    }
}

impl Extent {
    fn of<T: Float>(values: &[T], above: f64) -> Extent {
        let mut extent = Extent::default();
        for value in values {
            let value = value.widen();
            extent.min = extent.min.min(value);
            extent.max = extent.max.max(value);
            if f64::from(value.abs()) > above {
                extent.sum += f64::from(value.abs());
                extent.count += 1;
            }
        }
        extent
    }

    fn joined(parts: &[Extent]) -> Extent {
        parts.iter().fold(Extent::default(), |all, part| Extent {
            min: all.min.min(part.min),
            max: all.max.max(part.max),
            sum: all.sum + part.sum,
            count: all.count + part.count,
        })
    }
}

/// The levels of one group.
#[derive(Debug, Clone, Copy)]
enum Grid {
    /// Equal steps.
    Even { scale: f32, zero: f32, low: f32, high: f32 },
    /// One magnitude.
    Signed { threshold: f32, magnitude: f32 },
}

impl Grid {
    fn of_range(levels: Levels, [min, max]: [f32; 2]) -> Grid {
        match levels {
            Levels::Asymmetric { bits } => {
                let count = (1u32 << bits) as f32;
                let scale = (max - min) / count;
                let zero = if scale > 0.0 { (min / scale).round_ties_even() * scale } else { 0.0 };
                Grid::Even { scale, zero, low: 0.0, high: count - 1.0 }
            }
            Levels::Symmetric { bits } => {
                let count = (1u32 << bits) as f32;
                let scale = 2.0 * min.abs().max(max) / count;
                Grid::Even { scale, zero: 0.0, low: -count / 2.0, high: count / 2.0 - 1.0 }
            }
            Levels::Ternary | Levels::Binary => Grid::Signed { threshold: 0.0, magnitude: 0.0 },
        }
    }

    /// The level of a value; `noise` moves it by less than half a step before it is rounded.
    fn of(&self, x: f32, noise: f32) -> f32 {
        match *self {
            Grid::Even { scale: 0.0, .. } => x,
            Grid::Even { scale, zero, low, high } => {
                ((x - zero) / scale + noise).round_ties_even().clamp(low, high) * scale + zero
            }
            Grid::Signed { .. } if x.is_nan() => x,
            Grid::Signed { threshold, magnitude } if x.abs() > threshold => magnitude.copysign(x),
            Grid::Signed { .. } => 0.0,
        }
    }
}
