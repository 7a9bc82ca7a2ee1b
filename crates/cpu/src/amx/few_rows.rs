//! Few rows times columns that are consecutive in memory (`x·Wᵀ` of an `[out, in]` weight), as decoding makes them.
//!
//! Such a product is bound by reading its right operand. Its lines are what a left operand's tile holds, so it is read where it
//! lies and takes that part, while the few rows, in pairs of `k`, take the other. A tile adds the same products in the same order
//! either way round: every element has the bits that [`super::products`] gives it.

use std::arch::asm;

use ferrospeed_tensor::DType;
use ferrospeed_tensor::backend::Gemm;
use ferrospeed_tensor::dtype::Float;
use ferrospeed_tensor::loops::threads::Threads;
use half::bf16;

use super::{BLOCK, DEPTH, TILE, TileConfig};
use crate::gemm::{Epilogue, Operand, Output};

/// Rows, at most: the columns of a tile.
pub(crate) const MOST_ROWS: usize = TILE;
/// Tiles of columns of a task.
const TILES: usize = 4;

/// Computes a product of at most [`MOST_ROWS`] rows whose `k` is a multiple of 32.
pub(crate) fn product<C: Float>(
    threads: &Threads,
    gemm: &Gemm<'_>,
    epilogue: &Epilogue<'_>,
    output: &Output<C>,
) {
    let (a, b) = (Operand::<bf16>::new(&gemm.a, 0), Operand::<bf16>::new(&gemm.b, 0));
    let (m, n, k) = (gemm.m, gemm.n, gemm.k);
    assert!((1..=MOST_ROWS).contains(&m) && k.is_multiple_of(DEPTH) && k > 0 && b.row_stride == 1);
    // Pairs of `k`, each for all rows.
    let mut pairs = vec![bf16::ZERO; k * m];
    for row in 0..m {
        for i in 0..k {
            pairs[(i / 2 * m + row) * 2 + i % 2] = a.elements[a.index(row, i)];
        }
    }
    threads.blocks(n.div_ceil(TILE), TILES, |tiles| {
        let _configured = Configured::new(m);
        for tile in tiles {
            let first = tile * TILE;
            let width = TILE.min(n - first);
            let mut sums = [[0.0f32; TILE]; TILE];
            let mut copied = Vec::new();
            let lines = if width == TILE {
                &b.elements[b.index(0, first)..]
            } else {
                // A tile reads sixteen lines: the last ones, which are not there, become zeros.
                copied.resize(TILE * k, bf16::ZERO);
                for (line, to) in copied.chunks_mut(k).take(width).enumerate() {
                    to.copy_from_slice(&b.elements[b.index(0, first + line)..][..k]);
                }
                &copied[..]
            };
            let stride = if width == TILE { b.column_stride } else { k };
            assert!(lines.len() >= (TILE - 1) * stride + k);
            // SAFETY: tiles are configured; sixteen lines of `k` values can be read, as was asserted, and `k` pairs of rows;
            // the sums are sixteen rows of 64 bytes.
            unsafe { multiply(lines, stride, &pairs, m, k / DEPTH, &mut sums) };
            for row in 0..m {
                let mut line: [f32; TILE] = std::array::from_fn(|column| sums[column][row]);
                let columns = first..first + width;
                // SAFETY: these columns belong to this task alone.
                let (c, before) = unsafe { output.row(row, columns.clone()) };
                store(epilogue, &mut line[..width], columns.start, n, c, before);
            }
        }
    });
}

/// Stores as [`super::products`] does: whole blocks of fresh bf16 results take denormals for zero.
fn store<C: Float>(
    epilogue: &Epilogue<'_>,
    sums: &mut [f32],
    first: usize,
    n: usize,
    c: &mut [C],
    before: Option<&mut [C]>,
) {
    let whole_block = first / BLOCK * BLOCK + BLOCK <= n;
    if !(C::DTYPE == DType::BF16 && whole_block && epilogue.is_fresh()) {
        return epilogue.store_row(sums, first, c, before);
    }
    if let Some(bias) = epilogue.bias {
        sums.iter_mut().zip(&bias[first..]).for_each(|(sum, bias)| *sum += bias);
    }
    sums.iter_mut().filter(|sum| sum.is_subnormal()).for_each(|sum| *sum = 0.0f32.copysign(*sum));
    Epilogue { bias: None, ..*epilogue }.store_row(sums, first, c, before);
}

/// # Safety
/// Tiles are configured for `m` rows. `lines` holds sixteen lines of `steps` · 32 values, `stride` apart; `pairs` as many values
/// for each of `m` rows.
unsafe fn multiply(
    lines: &[bf16],
    stride: usize,
    pairs: &[bf16],
    m: usize,
    steps: usize,
    sums: &mut [[f32; TILE]; TILE],
) {
    // SAFETY: passed on to the caller.
    unsafe {
        asm!(
            "tilezero tmm0",
            "2:",
            "tileloadd tmm1, [{lines} + {stride}*1]",
            "tileloadd tmm2, [{pairs} + {pair}*1]",
            "tdpbf16ps tmm0, tmm1, tmm2",
            "add {lines}, 64",
            "add {pairs}, {step}",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{sums} + {line}*1], tmm0",
            lines = inout(reg) lines.as_ptr() => _,
            stride = in(reg) 2 * stride,
            pairs = inout(reg) pairs.as_ptr() => _,
            pair = in(reg) 4 * m,
            step = in(reg) 2 * DEPTH * m,
            steps = inout(reg) steps => _,
            sums = in(reg) sums.as_mut_ptr(),
            line = in(reg) 4 * TILE,
            options(nostack)
        );
    }
}

/// This thread's tiles: sums and pairs as wide as there are rows, lines of weights whole.
struct Configured;

impl Configured {
    fn new(m: usize) -> Configured {
        let (narrow, mut row_bytes, mut rows) = (4 * m as u16, [0; 16], [0; 16]);
        row_bytes[..3].copy_from_slice(&[narrow, 64, narrow]);
        rows[..3].fill(TILE as u8);
        let shapes = TileConfig { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows };
        // SAFETY: only called where AMX is; the configuration is valid.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &shapes, options(nostack, readonly)) };
        Configured
    }
}

impl Drop for Configured {
    fn drop(&mut self) {
        // SAFETY: gives this thread's tile state back.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}
