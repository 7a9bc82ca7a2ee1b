//! Strided copies and other orders of dimensions: `kernels/permute.cu`.

use ferrospeed_tensor::backend::Permutations;
use ferrospeed_tensor::moves::{self, Axis};
use ferrospeed_tensor::shape::MAX_DIMS;
use ferrospeed_tensor::{Out, Result, Tensor};

use crate::compile::Shared;
use crate::layout::word;
use crate::{BLOCK, CudaBackend, Kernel, Source, at, launch};

/// Matches `Axis` in the kernels.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct WordAxis {
    size: u64,
    from: u64,
    to: u64,
    multiplier: u32,
    shift: u32,
}

impl From<&Axis> for WordAxis {
    fn from(axis: &Axis) -> WordAxis {
        let [size, from, to] = [axis.size, axis.from, axis.to].map(|value| value as u64);
        let (multiplier, shift) = divisor(size);
        WordAxis { size, from, to, multiplier, shift }
    }
}

/// The multiplier `m` and the shift `s` by which `n / size` is `(⌊n·m / 2³²⌋ + n) >> s` for all `n` below 2³¹.
fn divisor(size: u64) -> (u32, u32) {
    let shift = size.next_power_of_two().trailing_zeros();
    let multiplier = (((1u128 << shift) - u128::from(size)) << 32) / u128::from(size) + 1;
    (multiplier as u32, shift)
}

/// Matches `Axes` in the kernels.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Axes {
    count: u64,
    axis: [WordAxis; MAX_DIMS],
}

impl Axes {
    /// Of axes whose last one changes fastest.
    fn new(axes: &[Axis]) -> Axes {
        let mut axis = [WordAxis::default(); MAX_DIMS];
        axis.iter_mut().zip(axes.iter().rev()).for_each(|(word, axis)| *word = axis.into());
        Axes { count: axes.len() as u64, axis }
    }
}

/// Indices of words from here on need 64 bits.
const NEAR: usize = 1 << 31;

/// Copies elements of `size` bytes along `axes`: where neighbours along the last one are next to each other in source and
/// target, by the widest words that divide all distances, else one by one.
pub(super) fn move_words(
    backend: &CudaBackend,
    [from, to]: [u64; 2],
    size: usize,
    axes: &[Axis],
) -> Result<()> {
    let count: usize = axes.iter().map(|axis| axis.size).product();
    let Some((inner, outer)) = axes.split_last().filter(|_| count > 0) else { return Ok(()) };
    if outer.is_empty() && inner.from == 1 && inner.to == 1 {
        return backend.copy_bytes(from, to, count * size);
    }
    let mut axes = axes.to_vec();
    let mut bytes = size;
    if inner.from == 1 && inner.to == 1 {
        let distances = outer.iter().fold(inner.size, |all, axis| all | axis.from | axis.to);
        let everything = from | to | (distances * size) as u64;
        bytes = (1usize << everything.trailing_zeros().min(4)).max(size);
        let words = |elements: &mut usize| *elements = *elements * size / bytes;
        if let Some((inner, outer)) = axes.split_last_mut() {
            words(&mut inner.size);
            outer.iter_mut().for_each(|axis| [&mut axis.from, &mut axis.to].into_iter().for_each(words));
        }
    }
    let count = count * size / bytes;
    let far = if count < NEAR { "" } else { "FAR" };
    let kernel = Kernel { source: Source::Permute, defines: [word(bytes), far, ""], name: "move_words" };
    let grid = backend.grid_single(count);
    launch!(backend, kernel, grid, [BLOCK, 1, 1], 0, count as u64, from, to, Axes::new(&axes))
}

/// Below this many places an axis would leave most of a tile empty.
const TILED: usize = 16;
/// Sides of a tile.
const TILE: usize = 32;
/// What the kernels are told of it.
pub(super) const SHARED: Shared = &[("MAX_DIMS", MAX_DIMS), ("TILE", TILE)];

impl Permutations for CudaBackend {
    fn permute(&self, x: &Tensor, order: &[usize], y: Out<'_>) -> Result<()> {
        let y = y.into_tensor();
        if x.numel() == 0 {
            return Ok(());
        }
        let (axes, size) = (moves::axes(x.shape(), order), x.dtype().size_bytes());
        let near = axes.iter().position(|axis| axis.from == 1);
        match (near, axes.split_last()) {
            (Some(near), Some((inner, outer)))
                if near < outer.len() && inner.size.min(outer[near].size) >= TILED =>
            {
                let others: Vec<Axis> = [&outer[..near], &outer[near + 1..]].concat();
                turn_tiles(self, [x, y], outer[near], *inner, &others)
            }
            _ => move_words(self, [at(x), at(y)], size, &axes),
        }
    }
}

/// `a` is the axis along which the source's neighbours lie, `b` that of the target's.
fn turn_tiles(backend: &CudaBackend, [x, y]: [&Tensor; 2], a: Axis, b: Axis, others: &[Axis]) -> Result<()> {
    let kernel = Kernel {
        source: Source::Permute,
        defines: [word(x.dtype().size_bytes()), "", ""],
        name: "turn_tiles",
    };
    let places: usize = others.iter().map(|axis| axis.size).product();
    let tiles = places * a.size.div_ceil(TILE) * b.size.div_ceil(TILE);
    launch!(
        backend,
        kernel,
        [tiles as u32, 1, 1],
        [TILE as u32, 8, 1],
        0,
        at(x),
        at(y),
        a.size as u64,
        a.to as u64,
        b.size as u64,
        b.from as u64,
        Axes::new(others)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_division_by_a_product_is_exact() {
        let divided = |n: u32, (multiplier, shift): (u32, u32)| {
            let high = ((u64::from(n) * u64::from(multiplier)) >> 32) as u32;
            high.checked_add(n).unwrap() >> shift
        };
        let sizes =
            (1..2000).chain([4095, 4096, 4097, 50_257, 65_535, 1 << 20, (1 << 30) + 1, (1 << 31) - 1]);
        for size in sizes {
            let near = |n: u64| [n.saturating_sub(1), n, n + 1];
            let multiples = [0, 1, 2, 3, 1000, ((1 << 31) - 1) / size].map(|times| near(times * size));
            for n in multiples.into_iter().flatten().chain(near((1 << 31) - 2)).filter(|&n| n < 1 << 31) {
                assert_eq!(u64::from(divided(n as u32, divisor(size))), n / size, "{n} / {size}");
            }
        }
    }
}
