//! Products of few rows with a weight, as in decoding, by kernels of our own: the weight is read once, at the memory's speed.

use ferrospeed_tensor::Result;
use ferrospeed_tensor::backend::{Gemm, Unary};

use super::{OP, address, product};
use crate::compile::Shared;
use crate::elementwise::activation_number;
use crate::{CudaBackend, Kernel, Source, at_option, at_out, few_rows, launch, real, some_rows, written};

/// The most rows on the left that our own kernels of any type take; of 16 bits, see [`few_rows`].
pub(crate) const FEW_ROWS: usize = 4;
/// The most rows for which a product takes so little time that one instead of several is worth a pass over its result.
pub(crate) const JOINED_ROWS: usize = 256;

/// Weights that one launch multiplies the same rows with.
const MOST_SIDES: usize = 3;
/// What the kernels are told of it.
pub(crate) const SHARED: Shared = &[("MOST_SIDES", MOST_SIDES)];
const ROWS: [&str; FEW_ROWS] = ["ROWS=1", "ROWS=2", "ROWS=3", "ROWS=4"];

/// Matches `Sides` in the kernels.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Sides {
    weights: [u64; MOST_SIDES],
    biases: [u64; MOST_SIDES],
    results: [u64; MOST_SIDES],
    /// The columns of the first, of the first two, of all.
    ends: [u64; MOST_SIDES],
}

/// Whether a product is one of few rows times a weight, as in decoding.
fn has_few_rows(gemm: &Gemm<'_>) -> bool {
    let (m, n, k) = (gemm.m, gemm.n, gemm.k);
    let dtype = gemm.a.tensor.dtype();
    let plain = gemm.batch == 1
        && gemm.alpha == 1.0
        && !gemm.accumulate
        && !gemm.a.transposed
        && gemm.c.out.dtype() == dtype;
    let packed = gemm.a.row_stride == k
        && gemm.c.row_stride == n
        && gemm.b.row_stride == if gemm.b.transposed { k } else { n };
    let addresses = [address(&gemm.a), address(&gemm.b), address(&written(&gemm.c))];
    let aligned =
        k.is_multiple_of(8) && n.is_multiple_of(8) && addresses.iter().all(|a| a.is_multiple_of(16));
    m <= some_rows::MOST_ROWS && k > 0 && plain && packed && aligned
}

/// What is kept from before the activation is what the kernel writes; the activation follows.
fn side(gemm: &Gemm<'_>) -> few_rows::Side {
    let result = gemm.before_activation.as_ref().map_or_else(|| address(&written(&gemm.c)), at_out);
    let weight = address(&gemm.b);
    few_rows::Side { weight, bias: at_option(gemm.bias), result, outputs: gemm.n }
}

/// Products of the same few rows of 16-bit values with weights `[outputs, inputs]`, which have a kernel of their own.
fn of_halves<'a>(
    backend: &CudaBackend,
    first: &Gemm<'_>,
    sides: &'a [few_rows::Side],
) -> Option<few_rows::Product<'a>> {
    let product = few_rows::Product {
        dtype: first.a.tensor.dtype(),
        rows: first.m,
        inputs: first.k,
        x: address(&first.a),
        norm: None,
        sides,
        activation: first.activation.filter(|_| first.before_activation.is_none()),
        gated: false,
        residual: 0,
    };
    (first.b.transposed && few_rows::takes(backend, &product)).then_some(product)
}

pub(crate) fn gemms(backend: &CudaBackend, products: &[Gemm<'_>]) -> Result<()> {
    let Some(first) = products.first() else { return Ok(()) };
    let together = (2..=MOST_SIDES).contains(&products.len())
        && products.iter().all(|one| {
            has_few_rows(one)
                && one.b.transposed
                && (one.m, one.k) == (first.m, first.k)
                && address(&one.a) == address(&first.a)
                && one.activation.is_none()
                && one.before_activation.is_none()
        });
    let sides: Vec<few_rows::Side> = products.iter().map(side).collect();
    match together {
        true if let Some(product) = of_halves(backend, first, &sides) => few_rows::run(backend, &product),
        true if first.m <= FEW_ROWS => few_rows_out_in(backend, products),
        _ => products.iter().try_for_each(|one| product(backend, one)),
    }
}

/// Products of the same rows with weights `[outputs, inputs]`. With one product, its activation.
fn few_rows_out_in(backend: &CudaBackend, products: &[Gemm<'_>]) -> Result<()> {
    let first = &products[0];
    let none = [0; MOST_SIDES];
    let mut sides = Sides { weights: none, biases: none, results: none, ends: none };
    let mut end = 0;
    for side in 0..MOST_SIDES {
        if let Some(one) = products.get(side) {
            sides.weights[side] = address(&one.b);
            sides.biases[side] = at_option(one.bias);
            sides.results[side] = address(&written(&one.c));
            end += one.n as u64;
        }
        sides.ends[side] = end;
    }
    let defines = [real(OP, first.a.tensor.dtype())?, ROWS[first.m - 1], "ACROSS=1"];
    launch!(
        overlapping backend,
        Kernel { source: Source::Product, defines, name: "few_rows_out_in" },
        [end.div_ceil(8) as u32, 1, 1],
        [256, 1, 1],
        0,
        sides,
        first.k as u64,
        address(&first.a),
        first.before_activation.as_ref().map_or(0, at_out),
        first.activation.map_or(-1, activation_number)
    )
}

/// Decoding: few rows times a weight. `false` when the product is of another kind.
pub(super) fn by_own_kernel(backend: &CudaBackend, gemm: &Gemm<'_>) -> Result<bool> {
    if !has_few_rows(gemm) {
        return Ok(false);
    }
    let sides = [side(gemm)];
    if let Some(product) = of_halves(backend, gemm, &sides) {
        few_rows::run(backend, &product)?;
        // The same sums as where nothing is kept: a block that is computed again gets the bits of the first time.
        if let (Some(activation), Some(before)) = (gemm.activation, &gemm.before_activation) {
            backend.unary_into(Unary::Activation(activation), before.on_device(), gemm.c.out.on_device())?;
        }
        return Ok(true);
    }
    if gemm.m > FEW_ROWS {
        return Ok(false);
    }
    if gemm.b.transposed {
        return few_rows_out_in(backend, std::slice::from_ref(gemm)).map(|()| true);
    }
    let (m, n, k) = (gemm.m, gemm.n, gemm.k);
    let dtype = gemm.a.tensor.dtype();
    // Narrow results are cut finer, so that enough of the device takes part.
    let (across, define) = match n {
        0..=1024 => (1, "ACROSS=1"),
        1025..=4096 => (2, "ACROSS=2"),
        _ => (4, "ACROSS=4"),
    };
    let defines = [real(OP, dtype)?, ROWS[m - 1], define];
    let kernel = Kernel { source: Source::Product, defines, name: "few_rows_in_out" };
    let activation = gemm.activation.map_or(-1, activation_number);
    let [a, b, c] = [address(&gemm.a), address(&gemm.b), address(&written(&gemm.c))];
    let (bias, before) = (at_option(gemm.bias), gemm.before_activation.as_ref().map_or(0, at_out));
    launch!(
        overlapping backend,
        kernel,
        [n.div_ceil(8 * across) as u32, 1, 1],
        [512, 1, 1],
        0,
        n as u64,
        k as u64,
        a,
        b,
        bias,
        c,
        before,
        activation
    )?;
    Ok(true)
}
