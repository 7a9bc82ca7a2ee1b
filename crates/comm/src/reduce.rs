//! Reduction kernels: fold the same elements of several ranks, in rank order, into one result.
//!
//! The order is always `((r0 ∘ r1) ∘ r2) ∘ …`, element by element, so neither the chunking, the backend nor the thread
//! that happens to do the work can change a bit. Half types are widened to `f32`, folded there and rounded once, to
//! nearest even. The loops are plain slices that the compiler vectorises; one dispatch per call picks AVX-512 or AVX2.
//!
//! A fold works through a block that fits the first-level cache: while a block is folded, every source line is
//! touched once, and the destinations (often the sources themselves) are written while their lines are still near.
//! Sums and averages of f32 and bf16, which training lives on, stay in registers until they are rounded.

mod kernels;

use half::{bf16, f16};

use crate::copy::copy_past_cache;
use crate::dtype::{DType, ReduceOp};
use kernels::{Accumulate, WholeSum, fold_block};

/// Bytes of accumulator per block: it stays in the first-level cache beside what flows through.
const BLOCK_BYTES: usize = 4 << 10;

/// Bytes of a sum from registers that are written past the cache together: each time all stores are waited for.
const STREAMED_BLOCK_BYTES: usize = 16 << 10;

/// Results from this size on are written past the cache. Measured with two ranks on cores with 2 MiB of second-level cache:
/// 0.85 times the speed of plain stores at 8 MiB, 1.1 to 1.2 times at 32.
pub(crate) const STREAM_FROM_BYTES: usize = 16 << 20;

/// Folds that read this much have their memory asked for early: below, it is in the second-level cache.
const FAR_FROM_BYTES: usize = 4 << 20;

/// Where a fold goes.
#[derive(Debug, Clone, Copy)]
pub(crate) enum End<'a> {
    /// It is complete, over so many ranks: rounded (and divided, for an average) into every destination.
    Rounded { ranks: usize, destinations: &'a [*mut u8] },
    /// It goes on elsewhere: the unrounded accumulator (see [`accumulator_bytes`]) is stored here.
    PassedOn { accumulator: *mut u8 },
}

/// Bytes per element of an accumulator: half types are folded in `f32`.
pub(crate) const fn accumulator_bytes(dtype: DType) -> usize {
    match dtype {
        DType::BF16 | DType::F16 => 4,
        other => other.size(),
    }
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
    ranks: usize,
) {
    debug_assert!(!sources.is_empty());
    // SAFETY: the caller's contract.
    unsafe { fold_onwards(dtype, op, None, sources, elements, End::Rounded { ranks, destinations }) }
}

/// Goes on with a fold whose accumulator over the ranks before is `carry`.
///
/// # Safety
/// As [`fold`]; `carry` and an accumulator that is passed on are valid for `elements` of [`accumulator_bytes`].
pub(crate) unsafe fn fold_onwards(
    dtype: DType,
    op: ReduceOp,
    carry: Option<*const u8>,
    sources: &[*const u8],
    elements: usize,
    end: End<'_>,
) {
    debug_assert!(op.supports(dtype));
    // SAFETY: the caller's contract is exactly that of `fold_typed`.
    unsafe {
        match dtype {
            DType::F32 => fold_typed::<f32>(op, carry, sources, elements, end),
            DType::F64 => fold_typed::<f64>(op, carry, sources, elements, end),
            DType::BF16 => fold_typed::<bf16>(op, carry, sources, elements, end),
            DType::F16 => fold_typed::<f16>(op, carry, sources, elements, end),
            DType::I8 => fold_typed::<i8>(op, carry, sources, elements, end),
            DType::I16 => fold_typed::<i16>(op, carry, sources, elements, end),
            DType::I32 => fold_typed::<i32>(op, carry, sources, elements, end),
            DType::I64 => fold_typed::<i64>(op, carry, sources, elements, end),
            DType::U8 => fold_typed::<u8>(op, carry, sources, elements, end),
            DType::Bool => fold_typed::<kernels::Flag>(op, carry, sources, elements, end),
        }
    }
}

/// Folds slices: the reduction of every backend, for tests.
#[cfg(test)]
fn fold_slices(dtype: DType, op: ReduceOp, sources: &[&[u8]], destination: &mut [u8]) {
    assert!(!sources.is_empty() && op.supports(dtype), "{op} over {} sources of {dtype}", sources.len());
    assert!(
        sources.iter().all(|source| source.len() == destination.len()),
        "sources and destination differ in length"
    );
    assert_eq!(destination.len() % dtype.size(), 0, "a fraction of an element");
    let elements = destination.len() / dtype.size();
    let pointers: Vec<*const u8> = sources.iter().map(|source| source.as_ptr()).collect();
    // SAFETY: slices of equal length; the exclusive borrow keeps the destination apart from every source.
    unsafe { fold(dtype, op, &pointers, &[destination.as_mut_ptr()], elements, sources.len()) }
}

/// # Safety
/// As [`fold_onwards`], with `T` the Rust type of the data.
unsafe fn fold_typed<T: Accumulate>(
    op: ReduceOp,
    carry: Option<*const u8>,
    sources: &[*const u8],
    elements: usize,
    end: End<'_>,
) {
    let wide = size_of::<T::Accumulator>();
    // A large result is not read soon, and its lines need not be fetched, unless they just were as those of a source.
    let past_cache = elements * size_of::<T>() >= STREAM_FROM_BYTES
        && matches!(end, End::Rounded { destinations: [only], .. } if !sources.contains(&only.cast_const()));
    // Where all is at hand, sums never leave the registers.
    let is_at_hand = carry.is_none()
        && matches!(end, End::Rounded { .. })
        && sources.iter().all(|source| source.cast::<T>().is_aligned());
    let sum_whole = T::SUM_WHOLE.filter(|_| is_at_hand && matches!(op, ReduceOp::Sum | ReduceOp::Avg));
    let far = elements * size_of::<T>() * sources.len() >= FAR_FROM_BYTES;
    let block_elements = match sum_whole {
        Some(_) if past_cache => STREAMED_BLOCK_BYTES / size_of::<T>(),
        _ => BLOCK_BYTES / wide,
    };
    let mut accumulator =
        vec![<T::Accumulator as bytemuck::Zeroable>::zeroed(); block_elements.min(elements)];
    // Room for copies of two sources that are not aligned, and for a result that goes past the cache.
    let mut scratch = vec![[<T as bytemuck::Zeroable>::zeroed(); 2]; block_elements.min(elements)];
    let mut at = 0;
    while at < elements {
        let count = block_elements.min(elements - at);
        let offset = at * size_of::<T>();
        let (accumulator, scratch) = (&mut accumulator[..count], &mut scratch[..count]);
        // SAFETY: `at + count` elements lie inside every range by the caller's contract; accumulators are copied
        // bytewise, so their alignment does not matter.
        unsafe {
            if let Some(carry) = carry {
                std::ptr::copy_nonoverlapping(
                    carry.add(at * wide),
                    accumulator.as_mut_ptr().cast(),
                    count * wide,
                );
            }
            if sum_whole.is_none() {
                fold_block::<T>(op, carry.is_some(), sources, offset, accumulator, scratch);
            }
            match end {
                End::PassedOn { accumulator: to } => {
                    std::ptr::copy_nonoverlapping(
                        accumulator.as_ptr().cast(),
                        to.add(at * wide),
                        count * wide,
                    );
                }
                End::Rounded { ranks, destinations } => {
                    let Some(first) = destinations.first().map(|first| first.add(offset)) else { return };
                    let bytes = count * size_of::<T>();
                    let mut round_to = |out: *mut T| match sum_whole {
                        Some(sum_whole) => {
                            let divisor = (op == ReduceOp::Avg).then_some(ranks as f32);
                            sum_whole(&WholeSum::new(sources, offset, out, count, far), divisor);
                        }
                        None => T::finish(op, accumulator, std::slice::from_raw_parts_mut(out, count), ranks),
                    };
                    if past_cache || !first.cast::<T>().is_aligned() {
                        let rounded = scratch.as_mut_ptr().cast::<T>();
                        round_to(rounded);
                        match past_cache {
                            true => copy_past_cache(rounded.cast(), first, bytes),
                            false => std::ptr::copy_nonoverlapping(rounded.cast(), first, bytes),
                        }
                    } else {
                        round_to(first.cast::<T>());
                    }
                    for destination in &destinations[1..] {
                        std::ptr::copy_nonoverlapping(first, destination.add(offset), bytes);
                    }
                }
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
    fn sums_in_registers_have_the_bits_of_those_in_memory() {
        /// Folds rows that lie `shift` bytes off; where that is odd nothing is aligned, and the sums are kept in memory.
        fn fold_shifted(dtype: DType, op: ReduceOp, rows: &[Vec<u8>], shift: usize) -> Vec<u8> {
            let bytes = rows[0].len();
            let mut rooms = vec![vec![0u64; bytes / 8 + 2]; rows.len()];
            for (room, row) in rooms.iter_mut().zip(rows) {
                bytemuck::cast_slice_mut(room)[shift..shift + bytes].copy_from_slice(row);
            }
            let sources: Vec<&[u8]> =
                rooms.iter().map(|room| &bytemuck::cast_slice(room)[shift..shift + bytes]).collect();
            let mut out = vec![0; bytes];
            fold_slices(dtype, op, &sources, &mut out);
            out
        }
        let value = |rank: usize, at: usize| ((at * 37 + rank * 101) % 997) as f32 / 7.0 - 60.0;
        for (ranks, elements) in [(1, 1), (2, 63), (2, 64), (3, 1000), (4, 1025), (5, 4159)] {
            let rows = |bytes: &dyn Fn(f32) -> Vec<u8>| -> Vec<Vec<u8>> {
                (0..ranks).map(|rank| (0..elements).flat_map(|at| bytes(value(rank, at))).collect()).collect()
            };
            let wide = rows(&|value| value.to_ne_bytes().to_vec());
            let half = rows(&|value| bf16::from_f32(value).to_ne_bytes().to_vec());
            for (dtype, rows) in [(DType::F32, wide), (DType::BF16, half)] {
                for op in [ReduceOp::Sum, ReduceOp::Avg] {
                    let [in_registers, in_memory] = [0, 1].map(|shift| fold_shifted(dtype, op, &rows, shift));
                    assert!(in_registers == in_memory, "{op} of {elements} {dtype} over {ranks} ranks");
                }
            }
        }
    }

    #[test]
    fn a_fold_passed_on_between_hosts_gives_the_bits_of_a_whole_one() {
        let rows: Vec<Vec<bf16>> = (0..5)
            .map(|row| (0..7000).map(|at| bf16::from_f32((at * 37 % 101 + row * 13) as f32 / 7.0)).collect())
            .collect();
        let sources: Vec<*const u8> = rows.iter().map(|row| row.as_ptr().cast()).collect();
        let (mut whole, mut parts) = (vec![bf16::ZERO; 7000], vec![bf16::ZERO; 7000]);
        let mut carry = vec![0u8; 7000 * accumulator_bytes(DType::BF16)];
        let accumulator = carry.as_mut_ptr();
        // SAFETY: every buffer holds 7000 elements of its type.
        unsafe {
            fold(DType::BF16, ReduceOp::Avg, &sources, &[whole.as_mut_ptr().cast()], 7000, 5);
            let passed_on = End::PassedOn { accumulator };
            fold_onwards(DType::BF16, ReduceOp::Avg, None, &sources[..2], 7000, passed_on);
            fold_onwards(DType::BF16, ReduceOp::Avg, Some(accumulator), &sources[2..3], 7000, passed_on);
            let destinations = [parts.as_mut_ptr().cast()];
            let end = End::Rounded { ranks: 5, destinations: &destinations };
            fold_onwards(DType::BF16, ReduceOp::Avg, Some(accumulator), &sources[3..], 7000, end);
        }
        assert_eq!(whole, parts);
    }

    #[test]
    fn average_divides_before_rounding() {
        let rows = [vec![1.0f32], vec![1.0], vec![0.0]];
        assert_eq!(fold_f32(ReduceOp::Avg, &rows)[0], 2.0f32 / 3.0);
    }
}
