//! Products with weights of few bits. See `kernels/packed.cu`.

use crate::backend::{Activation, Gemm, Matrix, PackedLayer};
use crate::cuda::elementwise::activation_number;
use crate::cuda::{CudaBackend, Kernel, Source, at, at_option, gemm, launch, real};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Category;
use crate::packed::{BLOCK, PackedBits, PackedWeight};
use crate::tensor::Tensor;

const OP: &str = "gemm_packed";
/// From where on tensor cores multiply whole numbers of eight bits, and floats of eight bits.
const WHOLE_CAPABILITY: (i32, i32) = (8, 0);
const FLOAT_CAPABILITY: (i32, i32) = (8, 9);
/// Rows that the kernel takes, and what it is compiled with for them. With more, products are bound by multiplying, and the
/// library's by weights in full are faster.
const CHUNKS: [(usize, &str); 2] = [(8, "CHUNKS=1"), (16, "CHUNKS=2")];
/// Weights that one launch multiplies the same rows with. Matches `Sides` in the kernel.
const MOST_SIDES: usize = 3;
/// Rows that the kernel rounds itself; more are rounded before.
const ROUNDED_BY_ALL: usize = 2;
/// Shared memory that the kernel has beside what it is given.
const OWN_SHARED_BYTES: usize = 16 << 10;

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

/// `y = f(x·Wᵀ + b)` with each of the weights; `false` where the device has no kernel for such bits.
pub(super) fn products(
    backend: &CudaBackend,
    x: &Tensor,
    layers: Vec<PackedLayer<'_>>,
    activation: Option<Activation>,
) -> Result<bool> {
    let Some(first) = layers.first() else { return Ok(true) };
    let (bits, inputs) = (first.weight.bits(), first.weight.inputs());
    if !takes(backend, bits) {
        return Ok(false);
    }
    let rows = x.numel() / inputs;
    if rows == 0 {
        return Ok(true);
    }
    let alike = |layer: &PackedLayer<'_>| layer.weight.bits() == bits && layer.weight.inputs() == inputs;
    let chunks = CHUNKS.iter().find(|(most, _)| rows <= *most);
    if let Some(&(at_once, chunks)) = chunks
        && layers.iter().all(alike)
        && shared_bytes(at_once, inputs) + OWN_SHARED_BYTES <= backend.driver.shared_bytes
    {
        for layers in layers.chunks(MOST_SIDES) {
            few_rows(backend, x, layers, activation, (at_once, chunks))?;
        }
        return Ok(true);
    }
    for layer in layers {
        let weight = widened(backend, layer.weight, x)?;
        let (left, right) = (Matrix::whole(x), Matrix { transposed: true, ..Matrix::whole(&weight) });
        let plain = Gemm::plain(rows, layer.weight.outputs(), layer.weight.inputs(), left, right, layer.y);
        gemm::gemm(backend, &Gemm { bias: layer.bias, activation, ..plain })?;
    }
    Ok(true)
}

/// What so many rows take in eight bits. As the kernel places them.
fn shared_bytes(rows: usize, inputs: usize) -> usize {
    rows * (inputs + 16) + rows * (inputs / BLOCK) * 4
}

/// Up to [`MOST_SIDES`] weights by the same few rows.
fn few_rows(
    backend: &CudaBackend,
    x: &Tensor,
    layers: &[PackedLayer<'_>],
    activation: Option<Activation>,
    (at_once, chunks): (usize, &'static str),
) -> Result<()> {
    let inputs = layers[0].weight.inputs();
    let none = [0; MOST_SIDES];
    let mut sides =
        Sides { lines: none, scales: none, biases: none, results: none, outputs: none, ends: none };
    let mut end = 0;
    for side in 0..MOST_SIDES {
        if let Some(layer) = layers.get(side) {
            let [lines, scales] = layer.weight.on(x.device())?;
            sides.lines[side] = at(lines);
            sides.scales[side] = at(scales);
            sides.biases[side] = at_option(layer.bias);
            sides.results[side] = at(layer.y.tensor);
            sides.outputs[side] = layer.weight.outputs() as u64;
            end += layer.weight.groups() as u64;
        }
        sides.ends[side] = end;
    }
    let (blocks, rows) = (inputs / BLOCK, x.numel() / inputs);
    let bytes = shared_bytes(at_once, inputs);
    let defines = [real(OP, x.dtype())?, define(layers[0].weight.bits()), chunks];
    // A row or two are rounded by all blocks of threads for themselves.
    let prepared = (rows > ROUNDED_BY_ALL)
        .then(|| Tensor::empty_in([bytes], DType::U8, x.device(), Category::Buffers))
        .transpose()?;
    if let Some(prepared) = &prepared {
        launch!(
            overlapping backend,
            Kernel { source: Source::Packed, defines, name: "prepare_rows" },
            [(rows * blocks * 4).div_ceil(256) as u32, 1, 1],
            [256, 1, 1],
            0,
            blocks as u32,
            rows as u32,
            at(x),
            at(prepared)
        )?;
    }
    launch!(
        overlapping backend,
        Kernel { source: Source::Packed, defines, name: "packed_product" },
        [end as u32, 1, 1],
        [256, 1, 1],
        bytes as u32,
        sides,
        blocks as u32,
        rows as u32,
        at(x),
        at_option(prepared.as_ref()),
        activation.map_or(-1, activation_number)
    )
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
        [warps.div_ceil(8) as u32, 1, 1],
        [256, 1, 1],
        0,
        outputs as u64,
        (inputs / BLOCK) as u64,
        at(lines),
        at(scales),
        at(&full)
    )?;
    Ok(full)
}
