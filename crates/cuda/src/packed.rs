//! Products with weights of few bits. See `kernels/packed.cu`.

use ferrospeed_tensor::backend::{FewRows, FewRowsWeight, Gemm, Matrix, PackedLayer, PackedProducts};
use ferrospeed_tensor::packed::BLOCK;
use ferrospeed_tensor::{Activation, Category, DType, PackedBits, PackedWeight, Result, Tensor};

use crate::compile::Shared;
use crate::elementwise::activation_number;
use crate::{CudaBackend, Kernel, Source, at, at_option, at_out, gemm, launch, real};

const OP: &str = "gemm_packed";
/// From where on tensor cores multiply whole numbers of eight bits, and floats of eight bits.
const WHOLE_CAPABILITY: (i32, i32) = (8, 0);
const FLOAT_CAPABILITY: (i32, i32) = (8, 9);
/// Rows that the kernel takes, and what it is compiled with for them. With more, products are bound by multiplying, and the
/// library's by weights in full are faster.
const CHUNKS: [(usize, &str); 2] = [(8, "CHUNKS=1"), (16, "CHUNKS=2")];
/// Weights that one launch multiplies the same rows with.
const MOST_SIDES: usize = 3;
/// What the kernel is told of it.
pub(super) const SHARED: Shared =
    &[("MOST_SIDES", MOST_SIDES), ("BLOCK", BLOCK), ("WARPS", MOST_THREADS as usize / 32)];
/// Rows that the kernel rounds itself; more are rounded before.
const ROUNDED_BY_ALL: usize = 2;
/// Shared memory that the kernel has beside what it is given.
const OWN_SHARED_BYTES: usize = 17 << 10;

/// Matches `Sides` in the kernel.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Sides {
    lines: [u64; MOST_SIDES],
    scales: [u64; MOST_SIDES],
    biases: [u64; MOST_SIDES],
    results: [u64; MOST_SIDES],
    outputs: [u64; MOST_SIDES],
    ends: [u64; MOST_SIDES],
}

/// Matches `Rows` in the kernel.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Rows {
    x: u64,
    gain: u64,
    residual: u64,
    prepared: u64,
    blocks: u32,
    rows: u32,
    eps: f32,
    activation: i32,
    gated: i32,
    unused: i32,
}

/// Threads of a block,
const THREADS: u32 = 256;
/// and where there are so few blocks that the device takes them at once.
const MOST_THREADS: u32 = 512;

pub(super) fn takes(backend: &CudaBackend, bits: PackedBits) -> bool {
    let wanted = if bits == PackedBits::Float8 { FLOAT_CAPABILITY } else { WHOLE_CAPABILITY };
    backend.driver.capability >= wanted
}

fn define(bits: PackedBits) -> &'static str {
    match bits {
        PackedBits::Eight => "BITS=8",
        PackedBits::Four => "BITS=4",
        PackedBits::Float8 => "BITS=1",
    }
}

impl PackedProducts for CudaBackend {
    fn takes_packed(&self, bits: PackedBits) -> bool {
        takes(self, bits)
    }

    /// `y = f(x·Wᵀ + b)` with each of the weights; `false` where the device has no kernel for such bits.
    fn gemm_packed(
        &self,
        x: &Tensor,
        layers: Vec<PackedLayer<'_>>,
        activation: Option<Activation>,
    ) -> Result<bool> {
        let Some(first) = layers.first() else { return Ok(true) };
        let (bits, inputs) = (first.weight.bits(), first.weight.inputs());
        if !takes(self, bits) {
            return Ok(false);
        }
        let rows = x.numel() / inputs;
        if rows == 0 {
            return Ok(true);
        }
        let sides: Vec<Side<'_>> = layers
            .iter()
            .map(|layer| Side { weight: layer.weight, bias: at_option(layer.bias), result: at_out(&layer.y) })
            .collect();
        let products: Vec<Product<'_>> = sides
            .chunks(MOST_SIDES)
            .map(|sides| Product { x, norm: None, sides, activation, is_gated: false, residual: 0 })
            .collect();
        if let Some(at_once) = products[0].at_once(self)
            && products.iter().all(|product| product.at_once(self).is_some())
        {
            return products.iter().try_for_each(|product| product.run(self, at_once)).map(|()| true);
        }
        for layer in layers {
            let weight = widened(self, layer.weight, x)?;
            let (left, right) = (Matrix::whole(x), Matrix { transposed: true, ..Matrix::whole(&weight) });
            let plain =
                Gemm::plain(rows, layer.weight.outputs(), layer.weight.inputs(), left, right, layer.y);
            gemm::product(self, &Gemm { bias: layer.bias, activation, ..plain })?;
        }
        Ok(true)
    }
}

/// What so many rows take in eight bits. As the kernel places them.
fn shared_bytes(rows: usize, inputs: usize) -> usize {
    rows * (inputs + 16) + rows * (inputs / BLOCK) * 4
}

/// The most rows that [`few_rows`] takes.
pub(super) fn most_rows(backend: &CudaBackend, dtype: DType, bits: PackedBits) -> usize {
    let is_half = matches!(dtype, DType::BF16 | DType::F16);
    if is_half && takes(backend, bits) { CHUNKS[CHUNKS.len() - 1].0 } else { 0 }
}

/// A product with what stands before and behind it; `false` where there is no kernel for it, and nothing was done.
pub(super) fn few_rows(backend: &CudaBackend, step: &FewRows<'_>) -> Result<bool> {
    let mut sides = Vec::with_capacity(step.layers.len());
    for (number, (weight, bias)) in step.layers.iter().enumerate() {
        let FewRowsWeight::Packed(weight) = weight else { return Ok(false) };
        // A gated pair has one result.
        let result = step.results.get(number).map_or(0, at_out);
        sides.push(Side { weight, bias: at_option(*bias), result });
    }
    let product = Product {
        x: step.x,
        norm: step.norm.map(|(gain, eps)| (at(gain), eps)),
        sides: &sides,
        activation: step.activation,
        is_gated: step.is_gated,
        residual: at_option(step.residual),
    };
    match product.at_once(backend) {
        Some(at_once) => product.run(backend, at_once).map(|()| true),
        None => Ok(false),
    }
}

/// A weight, and where its bias lies and its result goes.
#[derive(Debug, Clone, Copy)]
struct Side<'a> {
    weight: &'a PackedWeight,
    bias: u64,
    result: u64,
}

/// All that the kernel is told.
struct Product<'a> {
    x: &'a Tensor,
    /// The gain of the norm of `x` that comes first, and what is added to the mean square.
    norm: Option<(u64, f32)>,
    sides: &'a [Side<'a>],
    activation: Option<Activation>,
    is_gated: bool,
    /// What the result is added to.
    residual: u64,
}

impl Product<'_> {
    /// For how many rows the kernel is compiled that computes it, and what it is compiled with; `None` where it does not.
    fn at_once(&self, backend: &CudaBackend) -> Option<(usize, &'static str)> {
        let first = self.sides.first()?.weight;
        let (bits, inputs) = (first.bits(), first.inputs());
        let alike = |side: &Side<'_>| side.weight.bits() == bits && side.weight.inputs() == inputs;
        let rows = self.x.numel() / inputs;
        let chunks = CHUNKS.iter().find(|(most, _)| (1..=*most).contains(&rows))?;
        let fits = shared_bytes(chunks.0, inputs) + OWN_SHARED_BYTES <= backend.driver.shared_bytes;
        let is_aligned = |address: u64| address.is_multiple_of(16);
        let aligned = is_aligned(at(self.x)) && is_aligned(self.norm.map_or(0, |(gain, _)| gain));
        let knows = takes(backend, bits) && self.sides.len() <= MOST_SIDES;
        (knows && fits && aligned && self.sides.iter().all(alike)).then_some(*chunks)
    }

    fn run(&self, backend: &CudaBackend, (at_once, chunks): (usize, &'static str)) -> Result<()> {
        let weight = self.sides[0].weight;
        let (bits, inputs, none) = (weight.bits(), weight.inputs(), [0; MOST_SIDES]);
        let mut sides =
            Sides { lines: none, scales: none, biases: none, results: none, outputs: none, ends: none };
        let mut end = 0;
        for (number, side) in self.sides.iter().enumerate() {
            let [lines, scales] = side.weight.on(self.x.device())?;
            sides.lines[number] = at(lines);
            sides.scales[number] = at(scales);
            sides.biases[number] = side.bias;
            sides.results[number] = side.result;
            sides.outputs[number] = side.weight.outputs() as u64;
            // Groups of a gated pair are computed side by side.
            end += if self.is_gated && number > 0 { 0 } else { side.weight.groups() as u64 };
            sides.ends[number..].fill(end);
        }
        let rows = self.x.numel() / inputs;
        let bytes = shared_bytes(at_once, inputs);
        let defines = [real(OP, self.x.dtype())?, define(bits), chunks];
        let (gain, eps) = self.norm.unwrap_or((0, 0.0));
        let mut told = Rows {
            x: at(self.x),
            gain,
            residual: self.residual,
            prepared: 0,
            blocks: (inputs / BLOCK) as u32,
            rows: rows as u32,
            eps,
            activation: self.activation.map_or(-1, activation_number),
            gated: i32::from(self.is_gated),
            unused: 0,
        };
        // A row or two are rounded by all blocks of threads for themselves.
        let prepared = (rows > ROUNDED_BY_ALL)
            .then(|| Tensor::empty_in([bytes], DType::U8, self.x.device(), Category::Buffers))
            .transpose()?;
        if let Some(prepared) = &prepared {
            launch!(
                overlapping backend,
                Kernel { source: Source::Packed, defines, name: "prepare_rows" },
                [rows as u32, 1, 1],
                [THREADS, 1, 1],
                0,
                told,
                at(prepared)
            )?;
            told.prepared = at(prepared);
        }
        launch!(
            overlapping backend,
            Kernel { source: Source::Packed, defines, name: "packed_product" },
            [end as u32, 1, 1],
            [if end <= 2 * u64::from(backend.driver.multiprocessors) { MOST_THREADS } else { THREADS }, 1, 1],
            bytes as u32,
            sides,
            told
        )
    }
}

/// A weight in full, `[outputs, inputs]`, in the type of `x`.
fn widened(backend: &CudaBackend, weight: &PackedWeight, x: &Tensor) -> Result<Tensor> {
    let [lines, scales] = weight.on(x.device())?;
    let (outputs, inputs) = (weight.outputs(), weight.inputs());
    let full = Tensor::empty_in([outputs, inputs], x.dtype(), x.device(), Category::Buffers)?;
    let warps = weight.groups() * (inputs / BLOCK);
    launch!(
        overlapping backend,
        Kernel { source: Source::Packed, defines: [real(OP, x.dtype())?, define(weight.bits()), "CHUNKS=1"], name: "widen_weight" },
        [warps.div_ceil(THREADS as usize / 32) as u32, 1, 1],
        [THREADS, 1, 1],
        0,
        outputs as u64,
        (inputs / BLOCK) as u64,
        at(lines),
        at(scales),
        at(&full)
    )?;
    Ok(full)
}
