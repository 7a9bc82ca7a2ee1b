//! Reduction kernels: fold the same elements of several ranks, in rank order, into one result.
//!
//! The order is always `((r0 ∘ r1) ∘ r2) ∘ …`, element by element, so neither the chunking, the backend nor the thread
//! that happens to do the work can change a bit. Half types are widened to `f32`, folded there and rounded once, to
//! nearest even. The loops are plain slices that the compiler vectorises; one dispatch per call picks AVX-512 or AVX2.
//!
//! [`fold`] works through a block that fits the first-level cache: while a block is folded, every source line is
//! touched once, and the destinations (often the sources themselves) are written while their lines are still near.

mod kernels;

use half::{bf16, f16};

use crate::dtype::{DType, ReduceOp};
use kernels::{Accumulate, fold_block};

/// Bytes of accumulator per block: a third of a usual first-level cache.
const BLOCK_BYTES: usize = 16 << 10;

/// Whether a fold begins, continues or ends here.
///
/// A fold that runs over several hosts passes its unrounded accumulator from one to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Finish {
    /// The number of ranks in the whole fold: the divisor of an average.
    pub(crate) ranks: usize,
}

/// Folds `sources` (in this order) over `elements` elements and writes the result to every destination.
///
/// # Safety
/// Every pointer is valid for `elements` elements of `dtype` (reads for sources, writes for destinations), nobody else
/// touches them meanwhile, and a destination either equals a source exactly or overlaps none.
pub(crate) unsafe fn fold(
    dtype: DType,
    op: ReduceOp,
    sources: &[*const u8],
    destinations: &[*mut u8],
    elements: usize,
    finish: Finish,
) {
    debug_assert!(!sources.is_empty() && op.supports(dtype));
    // SAFETY: the caller's contract is exactly that of `fold_typed`.
    unsafe {
        match dtype {
            DType::F32 => fold_typed::<f32>(op, sources, destinations, elements, finish),
            DType::F64 => fold_typed::<f64>(op, sources, destinations, elements, finish),
            DType::BF16 => fold_typed::<bf16>(op, sources, destinations, elements, finish),
            DType::F16 => fold_typed::<f16>(op, sources, destinations, elements, finish),
            DType::I8 => fold_typed::<i8>(op, sources, destinations, elements, finish),
            DType::I16 => fold_typed::<i16>(op, sources, destinations, elements, finish),
            DType::I32 => fold_typed::<i32>(op, sources, destinations, elements, finish),
            DType::I64 => fold_typed::<i64>(op, sources, destinations, elements, finish),
            DType::U8 => fold_typed::<u8>(op, sources, destinations, elements, finish),
            DType::Bool => fold_typed::<kernels::Flag>(op, sources, destinations, elements, finish),
        }
    }
}

/// Folds slices: the safe face of [`fold`] for callers that own their memory.
///
/// # Panics
/// When the slices differ in length or hold a fraction of an element: both are bugs of the caller.
pub fn fold_slices(dtype: DType, op: ReduceOp, sources: &[&[u8]], destination: &mut [u8]) {
    assert!(!sources.is_empty() && op.supports(dtype), "{op} over {} sources of {dtype}", sources.len());
    assert!(
        sources.iter().all(|source| source.len() == destination.len()),
        "sources and destination differ in length"
    );
    assert_eq!(destination.len() % dtype.size(), 0, "a fraction of an element");
    let elements = destination.len() / dtype.size();
    let pointers: Vec<*const u8> = sources.iter().map(|source| source.as_ptr()).collect();
    // SAFETY: slices of equal length; the exclusive borrow keeps the destination apart from every source.
    unsafe {
        fold(dtype, op, &pointers, &[destination.as_mut_ptr()], elements, Finish { ranks: sources.len() })
    }
}

/// # Safety
/// As [`fold`], with `T` the Rust type of the data.
unsafe fn fold_typed<T: Accumulate>(
    op: ReduceOp,
    sources: &[*const u8],
    destinations: &[*mut u8],
    elements: usize,
    finish: Finish,
) {
    let block_elements = BLOCK_BYTES / size_of::<T::Accumulator>();
    let mut accumulator = vec![T::ZERO; block_elements.min(elements)];
    let mut rounded = vec![<T as bytemuck::Zeroable>::zeroed(); block_elements.min(elements)];
    let mut at = 0;
    while at < elements {
        let count = block_elements.min(elements - at);
        let offset = at * size_of::<T>();
        // SAFETY: `offset + count` elements lie inside every range by the caller's contract; unaligned data is copied
        // bytewise inside `fold_block`.
        unsafe {
            fold_block::<T>(
                op,
                sources,
                offset,
                &mut accumulator[..count],
                &mut rounded[..count],
                finish.ranks,
            );
            for destination in destinations {
                std::ptr::copy_nonoverlapping(
                    rounded.as_ptr().cast::<u8>(),
                    destination.add(offset),
                    count * size_of::<T>(),
                );
            }
        }
        at += count;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fold_f32(op: ReduceOp, rows: &[Vec<f32>]) -> Vec<f32> {
        let sources: Vec<&[u8]> = rows.iter().map(|row| bytemuck::cast_slice(row)).collect();
        let mut out = vec![0.0f32; rows[0].len()];
        fold_slices(DType::F32, op, &sources, bytemuck::cast_slice_mut(&mut out));
        out
    }

    #[test]
    fn sum_is_taken_in_rank_order() {
        let rows = [vec![1e8f32; 10_000], vec![1.0; 10_000], vec![-1e8; 10_000]];
        assert!(fold_f32(ReduceOp::Sum, &rows).iter().all(|sum| *sum == (1e8f32 + 1.0) + -1e8));
        let rows = [vec![1e8f32; 10_000], vec![-1e8; 10_000], vec![1.0; 10_000]];
        assert!(fold_f32(ReduceOp::Sum, &rows).iter().all(|sum| *sum == 1.0));
    }

    #[test]
    fn half_types_round_once_after_an_f32_fold() {
        // 1 + 2⁻⁸ + 2⁻⁸: folding in bf16 would lose both small terms.
        let small = bf16::from_f32(1.0 / 256.0);
        let rows = [vec![bf16::ONE; 5000], vec![small; 5000], vec![small; 5000]];
        let sources: Vec<&[u8]> = rows.iter().map(|row| bytemuck::cast_slice(row)).collect();
        let mut out = vec![bf16::ZERO; 5000];
        fold_slices(DType::BF16, ReduceOp::Sum, &sources, bytemuck::cast_slice_mut(&mut out));
        assert!(out.iter().all(|sum| *sum == bf16::from_f32(1.0 + 2.0 / 256.0)));
    }

    #[test]
    fn bf16_rounding_agrees_with_the_half_crate_on_every_kind_of_value() {
        let values: Vec<f32> = (0..=u32::MAX).step_by(65_521).map(f32::from_bits).collect();
        let mut rounded = vec![bf16::ZERO; values.len()];
        kernels::round_bf16(&values, &mut rounded);
        for (value, fast) in values.iter().zip(&rounded) {
            let reference = bf16::from_f32(*value);
            assert!(
                fast.to_bits() == reference.to_bits() || (fast.is_nan() && reference.is_nan()),
                "{value:e}"
            );
        }
    }

    #[test]
    fn min_and_max_keep_a_nan_of_any_rank() {
        for position in 0..3 {
            let mut rows = [vec![1.0f32], vec![2.0], vec![3.0]];
            rows[position][0] = f32::NAN;
            assert!(fold_f32(ReduceOp::Min, &rows)[0].is_nan() && fold_f32(ReduceOp::Max, &rows)[0].is_nan());
        }
    }

    #[test]
    fn booleans_stay_booleans() {
        let (a, b) = ([0u8, 1, 1, 7], [0u8, 0, 1, 0]);
        let mut out = [9u8; 4];
        fold_slices(DType::Bool, ReduceOp::Sum, &[&a, &b], &mut out);
        assert_eq!(out, [0, 1, 1, 1]);
        fold_slices(DType::Bool, ReduceOp::Product, &[&a, &b], &mut out);
        assert_eq!(out, [0, 0, 1, 0]);
    }

    #[test]
    fn unaligned_sources_are_folded_like_aligned_ones() {
        let a: Vec<u8> = (0..4001u32).map(|i| (i * 7) as u8).collect();
        let mut aligned = vec![0u8; 4000];
        let mut unaligned = vec![0u8; 4000];
        let shifted: Vec<u8> = a[1..].to_vec();
        fold_slices(DType::I32, ReduceOp::Sum, &[&shifted, &shifted], &mut aligned);
        fold_slices(DType::I32, ReduceOp::Sum, &[&a[1..], &a[1..]], &mut unaligned);
        assert_eq!(aligned, unaligned);
    }

    #[test]
    fn average_divides_before_rounding() {
        let rows = [vec![1.0f32], vec![1.0], vec![0.0]];
        assert_eq!(fold_f32(ReduceOp::Avg, &rows)[0], 2.0f32 / 3.0);
    }
}
