//! Bias and activation of a finished block, while it lies in the first-level cache.

use super::BLOCK_COLUMNS;
use crate::backend::Activation;
use crate::cpu::gemm::{Epilogue, Output};
use crate::cpu::math::{activate, with_activation};

/// Adds the bias to rows and columns of the result, which hold everything else, keeps the value before the activation
/// and applies the activation.
///
/// # Safety
/// The processor has AVX-512; these rows and columns belong to the caller.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2")]
pub(super) unsafe fn finish(
    epilogue: &Epilogue<'_>,
    output: &Output<f32>,
    rows: std::ops::Range<usize>,
    columns: std::ops::Range<usize>,
) {
    for row in rows {
        // SAFETY: passed on to the caller.
        let (c, before) = unsafe { output.row(row, columns.clone()) };
        let bias = epilogue.bias.map(|bias| &bias[columns.clone()]);
        // A width that the compiler knows becomes whole registers without a loop.
        match columns.len() {
            BLOCK_COLUMNS => finish_row(epilogue.activation, bias, c, before, BLOCK_COLUMNS),
            width => finish_row(epilogue.activation, bias, c, before, width),
        }
    }
}

#[inline(always)]
fn finish_row(
    activation: Option<Activation>,
    bias: Option<&[f32]>,
    c: &mut [f32],
    before: Option<&mut [f32]>,
    width: usize,
) {
    let c = &mut c[..width];
    if let Some(bias) = bias {
        c.iter_mut().zip(&bias[..width]).for_each(|(c, bias)| *c += bias);
    }
    if let Some(before) = before {
        before[..width].copy_from_slice(c);
    }
    if let Some(activation) = activation {
        with_activation!(activation, KIND => c.iter_mut().for_each(|c| *c = activate(KIND, *c)));
    }
}
