//! Products of few rows with what stands before and behind them, as one kernel (`kernels/few_rows.cu`), for types of 16 bits. Where
//! there are more than it takes, the norm is a kernel of its own, and [`some_rows`] does the rest.

use ferrospeed_tensor::backend::{FewRows, FewRowsProducts, FewRowsWeight};
use ferrospeed_tensor::{Activation, DType, NormKind, PackedBits, Result, Tensor};

use crate::compile::Shared;
use crate::elementwise::activation_number;
use crate::{CudaBackend, Kernel, Source, at, at_option, at_out, launch, norm, packed, real, some_rows};

const OP: &str = "few_rows";
/// Rows that the kernel takes, and what it is compiled with for them: with more, reading them would take longer than reading weights.
const TILES: [(usize, &str); 2] = [(8, "TILES=1"), (16, "TILES=2")];
/// Weights that one launch multiplies the same rows with.
pub(super) const MOST_SIDES: usize = 3;
/// The most rows that this kernel takes.
pub(super) const MOST_ROWS: usize = TILES[TILES.len() - 1].0;
/// From where on a device brings weights to shared memory by itself.
const CAPABILITY: (i32, i32) = (9, 0);
/// Warps of a block that multiply,
const WARPS: u32 = 8;
/// and its threads: one more warp brings the weights.
const THREADS: u32 = 32 * (WARPS + 1);
/// By the number of tiles, inputs of a stage and stages that are under way: as many as registers and shared memory have room for, for
/// two blocks.
const PARTS: [u32; 2] = [1024, 512];
const STAGES: [u32; 2] = [2, 4];
/// What the kernel is told of it.
pub(super) const SHARED: Shared = &[
    ("MOST_SIDES", MOST_SIDES),
    ("WARPS", WARPS as usize),
    ("PART_1", PARTS[0] as usize),
    ("PART_2", PARTS[1] as usize),
    ("STAGES_1", STAGES[0] as usize),
    ("STAGES_2", STAGES[1] as usize),
];
/// Shared memory of a stage: sixteen rows of values and a gap.
const fn stage_bytes(part: u32) -> u32 {
    16 * (2 * part + 64)
}
const SHARED_BYTES: [u32; 2] = [STAGES[0] * stage_bytes(PARTS[0]), STAGES[1] * stage_bytes(PARTS[1])];
/// Outputs of a tile; of a gated pair, of both together.
const TILE_OUTPUTS: usize = 16;

/// One weight `[outputs, inputs]` and where its result goes, by their addresses.
#[derive(Debug, Clone, Copy)]
pub(super) struct Side {
    pub(super) weight: u64,
    pub(super) bias: u64,
    pub(super) result: u64,
    pub(super) outputs: usize,
}

/// All that the kernel is told.
pub(super) struct Product<'a> {
    pub(super) dtype: DType,
    pub(super) rows: usize,
    pub(super) inputs: usize,
    pub(super) x: u64,
    /// The gain of the norm of `x` that comes first, and what is added to the mean square.
    pub(super) norm: Option<(u64, f32)>,
    pub(super) sides: &'a [Side],
    /// Of a gated pair, of the gate.
    pub(super) activation: Option<Activation>,
    /// Whether the first of two weights gates the second; the result is the first's.
    pub(super) gated: bool,
    /// What the result is added to.
    pub(super) residual: u64,
}

/// Weights, as a kernel finds them, and where their results go. Matches the kernels'.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Sides<W> {
    weights: [W; MOST_SIDES],
    biases: [u64; MOST_SIDES],
    results: [u64; MOST_SIDES],
    outputs: [u64; MOST_SIDES],
    /// The tiles of the first, of the first two, of all.
    ends: [u64; MOST_SIDES],
}

impl<W: Copy> Sides<W> {
    /// With the number of all tiles, of so many outputs. Of a gated pair a tile holds as many of both together.
    pub(super) fn of(
        product: &Product<'_>,
        tile_outputs: usize,
        no_weight: W,
        mut weight: impl FnMut(&Side) -> Result<W>,
    ) -> Result<(Sides<W>, usize)> {
        let (weights, none) = ([no_weight; MOST_SIDES], [0; MOST_SIDES]);
        let mut sides = Sides { weights, biases: none, results: none, outputs: none, ends: none };
        let mut tiles = 0;
        for (number, side) in product.sides.iter().enumerate() {
            sides.weights[number] = weight(side)?;
            sides.biases[number] = side.bias;
            sides.results[number] = side.result;
            sides.outputs[number] = side.outputs as u64;
            tiles += match (product.gated, number) {
                (false, _) => side.outputs.div_ceil(tile_outputs),
                (true, 0) => side.outputs.div_ceil(tile_outputs / 2),
                (true, _) => 0,
            };
            sides.ends[number..].fill(tiles as u64);
        }
        Ok((sides, tiles))
    }
}

/// Matches the kernel's.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Rows {
    x: u64,
    gain: u64,
    residual: u64,
    inputs: u64,
    rows: u32,
    eps: f32,
    activation: i32,
    gated: i32,
}

/// The most rows that this kernel takes of a type.
fn own_rows(backend: &CudaBackend, dtype: DType, normed: bool) -> usize {
    // Rows are multiplied by a gain before they are normalised, which can leave what f16 holds.
    let knows = dtype == DType::BF16 || dtype == DType::F16 && !normed;
    if knows && backend.driver.capability >= CAPABILITY { MOST_ROWS } else { 0 }
}

/// The most rows that either kernel takes of a type.
pub(super) fn most_rows(backend: &CudaBackend, dtype: DType, normed: bool) -> usize {
    own_rows(backend, dtype, normed).max(some_rows::most_rows(backend, dtype))
}

/// Whether one of the kernels computes it.
pub(super) fn takes(backend: &CudaBackend, product: &Product<'_>) -> bool {
    if product.rows > MOST_ROWS {
        return some_rows::takes(backend, product);
    }
    let is_aligned = |address: u64| address.is_multiple_of(16);
    let gain = product.norm.map_or(0, |(gain, _)| gain);
    (1..=own_rows(backend, product.dtype, product.norm.is_some())).contains(&product.rows)
        && (1..=MOST_SIDES).contains(&product.sides.len())
        && product.inputs > 0
        && product.inputs.is_multiple_of(8)
        && is_aligned(product.x)
        && is_aligned(gain)
        && product.sides.iter().all(|side| is_aligned(side.weight))
}

/// Runs what [`takes`] has said yes to.
pub(super) fn run(backend: &CudaBackend, product: &Product<'_>) -> Result<()> {
    if product.rows > MOST_ROWS {
        return some_rows::run(backend, product);
    }
    let (sides, tiles) = Sides::of(product, TILE_OUTPUTS, 0u64, |side| Ok(side.weight))?;
    let (gain, eps) = product.norm.unwrap_or((0, 0.0));
    let rows = Rows {
        x: product.x,
        gain,
        residual: product.residual,
        inputs: product.inputs as u64,
        rows: product.rows as u32,
        eps,
        activation: product.activation.map_or(-1, activation_number),
        gated: i32::from(product.gated),
    };
    let size = usize::from(product.rows > TILES[0].0);
    let half = if product.dtype == DType::BF16 { "HALF=1" } else { "HALF=2" };
    // As many blocks as are on the device at once: each goes on to a next tile.
    let blocks = tiles.min(2 * backend.driver.multiprocessors as usize);
    launch!(
        overlapping backend,
        Kernel { source: Source::FewRows, defines: [real(OP, product.dtype)?, half, TILES[size].1], name: "few_rows" },
        [blocks as u32, 1, 1],
        [THREADS, 1, 1],
        SHARED_BYTES[size],
        sides,
        rows
    )
}

/// `false` where there is no kernel for it, and nothing was done.
pub(super) fn few_rows(backend: &CudaBackend, step: &FewRows<'_>) -> Result<bool> {
    let mut sides = Vec::with_capacity(step.layers.len());
    for (number, (weight, bias)) in step.layers.iter().enumerate() {
        // A gated pair has one result.
        let result = step.results.get(number).map_or(0, at_out);
        let FewRowsWeight::Whole(weight) = weight else { return Ok(false) };
        sides.push(Side { weight: at(weight), bias: at_option(*bias), result, outputs: weight.sizes()[0] });
    }
    let normed = match step.norm {
        Some((gain, eps)) if step.x.shape().rows() > MOST_ROWS => Some(normed(backend, step.x, gain, eps)?),
        _ => None,
    };
    let product = Product {
        dtype: step.x.dtype(),
        rows: step.x.shape().rows(),
        inputs: step.x.shape().last(),
        x: at(normed.as_ref().unwrap_or(step.x)),
        norm: step.norm.filter(|_| normed.is_none()).map(|(gain, eps)| (at(gain), eps)),
        sides: &sides,
        activation: step.activation,
        gated: step.is_gated,
        residual: at_option(step.residual),
    };
    if !takes(backend, &product) {
        return Ok(false);
    }
    run(backend, &product).map(|()| true)
}

/// Rows divided by the root of their mean square, times a gain.
fn normed(backend: &CudaBackend, x: &Tensor, gain: &Tensor, eps: f32) -> Result<Tensor> {
    let y = Tensor::empty(*x.shape(), x.dtype(), x.device())?;
    let [mean, rstd] = [(); 2].map(|()| Tensor::empty([x.shape().rows()], DType::F32, x.device()));
    norm::norm(backend, NormKind::Rms, eps, x, None, Some(gain), None, &y, &mean?, &rstd?)?;
    Ok(y)
}

impl FewRowsProducts for CudaBackend {
    fn most_few_rows(&self, dtype: DType, normed: bool, bits: Option<PackedBits>) -> usize {
        match bits {
            None => most_rows(self, dtype, normed),
            Some(bits) => packed::most_rows(self, dtype, bits),
        }
    }

    fn few_rows(&self, step: FewRows<'_>) -> Result<bool> {
        Ok(few_rows(self, &step)? || packed::few_rows(self, &step)?)
    }
}
