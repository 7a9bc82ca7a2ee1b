//! Bias and activation of a finished block, while it lies in the first-level cache.

use ferrospeed_tensor::Activation;

use crate::gemm::{Epilogue, Output};
use crate::math::{activate, with_activation};

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
        if let Some(bias) = epilogue.bias {
            c.iter_mut().zip(&bias[columns.clone()]).for_each(|(c, bias)| *c += bias);
        }
        if let Some(before) = before {
            before.copy_from_slice(c);
        }
        if let Some(activation) = epilogue.activation {
            with_activation!(activation, KIND => c.iter_mut().for_each(|c| *c = activate(KIND, *c)));
        }
    }
}
