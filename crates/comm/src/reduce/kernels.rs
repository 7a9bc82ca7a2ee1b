//! The inner loops of a fold, written once and compiled for AVX-512, AVX2 and the baseline.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::dtype::ReduceOp;

/// A type that reductions know: how it widens to its accumulator, combines there and rounds back.
pub(super) trait Accumulate: bytemuck::Pod {
    /// The type in which it is folded.
    type Accumulator: bytemuck::Pod;
    /// Widens `source` into `accumulator`.
    fn load(source: &[Self], accumulator: &mut [Self::Accumulator]);
    /// `accumulator = accumulator ∘ source`.
    fn combine(op: ReduceOp, accumulator: &mut [Self::Accumulator], source: &[Self]);
    /// `accumulator = first + second`; types that training reduces have a loop of their own for it.
    fn add(first: &[Self], second: &[Self], accumulator: &mut [Self::Accumulator]) {
        Self::load(first, accumulator);
        Self::combine(ReduceOp::Sum, accumulator, second);
    }
    /// Rounds into `out`, dividing first when the operator is an average over `ranks`.
    fn finish(op: ReduceOp, accumulator: &mut [Self::Accumulator], out: &mut [Self], ranks: usize);
    /// Sums all sources and divides by a number, to the same bits as the other functions but without an accumulator in memory.
    const SUM_WHOLE: Option<SumWhole<Self>> = None;
}

/// A sum that stays in registers, divided by the number where there is one.
pub(super) type SumWhole<T> = fn(&WholeSum<'_, T>, Option<f32>);

/// Stretches of all ranks and where their sum goes.
pub(super) struct WholeSum<'a, T> {
    sources: &'a [*const u8],
    offset: usize,
    out: *mut T,
    count: usize,
    /// Whether the data is beyond the caches and worth asking for early.
    far: bool,
}

impl<'a, T> WholeSum<'a, T> {
    /// # Safety
    /// Every source is readable for `count` elements from the byte `offset` on and aligned there, `out` is writable and aligned,
    /// and either equals such a source exactly or overlaps none.
    pub(super) unsafe fn new(
        sources: &'a [*const u8],
        offset: usize,
        out: *mut T,
        count: usize,
        far: bool,
    ) -> Self {
        WholeSum { sources, offset, out, count, far }
    }
}

/// Folds one block of every source, in order, into `accumulator`, which may already hold the ranks before.
///
/// # Safety
/// Every source is readable for `accumulator.len()` elements from the byte `offset` on.
pub(super) unsafe fn fold_block<T: Accumulate>(
    op: ReduceOp,
    begun: bool,
    sources: &[*const u8],
    offset: usize,
    accumulator: &mut [T::Accumulator],
    scratch: &mut [[T; 2]],
) {
    let count = accumulator.len();
    // Unaligned data is copied first.
    let (first_copy, second_copy) = scratch.as_flattened_mut().split_at_mut(count);
    let aligned = |source: *const u8, copied: *mut T| {
        // SAFETY: readable by the caller's contract; the alignment is checked before a slice is made of it, and the
        // copies have room for this many elements.
        unsafe {
            let mut values = source.add(offset).cast::<T>();
            if !values.is_aligned() {
                std::ptr::copy_nonoverlapping(
                    values.cast::<u8>(),
                    copied.cast::<u8>(),
                    count * size_of::<T>(),
                );
                values = copied;
            }
            std::slice::from_raw_parts(values, count)
        }
    };
    let rest = match sources {
        [first, second, rest @ ..] if !begun => {
            let first = aligned(*first, first_copy.as_mut_ptr());
            let second = aligned(*second, second_copy.as_mut_ptr());
            match op {
                ReduceOp::Sum | ReduceOp::Avg => T::add(first, second, accumulator),
                _ => {
                    T::load(first, accumulator);
                    T::combine(op, accumulator, second);
                }
            }
            rest
        }
        [first, rest @ ..] if !begun => {
            T::load(aligned(*first, first_copy.as_mut_ptr()), accumulator);
            rest
        }
        rest => rest,
    };
    for source in rest {
        T::combine(op, accumulator, aligned(*source, first_copy.as_mut_ptr()));
    }
}

/// Defines a function over slices that is compiled three times and dispatched on the processor's features.
macro_rules! dispatched {
    ($(#[$meta:meta])* $visibility:vis fn $name:ident $(<$generic:ident: $bound:path>)? ($($argument:ident: $kind:ty),* $(,)?) $body:block) => {
        $(#[$meta])*
        $visibility fn $name $(<$generic: $bound>)? ($($argument: $kind),*) {
            #[inline(always)]
            fn body $(<$generic: $bound>)? ($($argument: $kind),*) $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,f16c")]
                fn avx512 $(<$generic: $bound>)? ($($argument: $kind),*) { body($($argument),*) }
                #[target_feature(enable = "avx2,f16c")]
                fn avx2 $(<$generic: $bound>)? ($($argument: $kind),*) { body($($argument),*) }

                if is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
                {
                    // SAFETY: the processor has the features.
                    return unsafe { avx512($($argument),*) };
                }
                if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
                    // SAFETY: the processor has the features.
                    return unsafe { avx2($($argument),*) };
                }
            }
            body($($argument),*)
        }
    };
}

macro_rules! each {
    ($accumulator:ident, $source:ident, |$a:ident, $b:ident| $value:expr) => {
        for (slot, item) in $accumulator.iter_mut().zip($source) {
            let ($a, $b) = (*slot, *item);
            *slot = $value;
        }
    };
}

macro_rules! pairs {
    ($accumulator:ident, $first:ident, $second:ident, |$a:ident, $b:ident| $value:expr) => {
        for ((slot, first), second) in $accumulator.iter_mut().zip($first).zip($second) {
            let ($a, $b) = (*first, *second);
            *slot = $value;
        }
    };
}

/// Arithmetic of the plain float types, so that `f32` and `f64` share their loops.
trait Float:
    Copy + PartialOrd + std::ops::Add<Output = Self> + std::ops::Mul<Output = Self> + std::ops::Div<Output = Self>
{
}
impl Float for f32 {}
impl Float for f64 {}

/// `a` when it is smaller or NaN; `a != a` is NaN's own mark.
#[allow(clippy::eq_op)]
#[inline(always)]
fn min_or_nan<F: Float>(a: F, b: F) -> F {
    if a < b || a != a { a } else { b }
}

/// `a` when it is larger or NaN.
#[allow(clippy::eq_op)]
#[inline(always)]
fn max_or_nan<F: Float>(a: F, b: F) -> F {
    if a > b || a != a { a } else { b }
}

dispatched! {
    fn combine_floats<F: Float>(op: ReduceOp, accumulator: &mut [F], source: &[F]) {
        match op {
            ReduceOp::Sum | ReduceOp::Avg => each!(accumulator, source, |a, b| a + b),
            ReduceOp::Product => each!(accumulator, source, |a, b| a * b),
            ReduceOp::Min => each!(accumulator, source, |a, b| min_or_nan(a, b)),
            ReduceOp::Max => each!(accumulator, source, |a, b| max_or_nan(a, b)),
            ReduceOp::BitAnd | ReduceOp::BitOr => unreachable!("refused before any data moves"),
        }
    }
}

dispatched! {
    fn divide_floats<F: Float>(accumulator: &mut [F], ranks: F) {
        accumulator.iter_mut().for_each(|sum| *sum = *sum / ranks);
    }
}

dispatched! {
    fn add_floats<F: Float>(first: &[F], second: &[F], accumulator: &mut [F]) {
        pairs!(accumulator, first, second, |a, b| a + b)
    }
}

macro_rules! float {
    ($type:ty, $sum_whole:expr) => {
        impl Accumulate for $type {
            type Accumulator = $type;
            const SUM_WHOLE: Option<SumWhole<Self>> = $sum_whole;

            fn load(source: &[Self], accumulator: &mut [Self]) {
                accumulator.copy_from_slice(source);
            }

            fn combine(op: ReduceOp, accumulator: &mut [Self], source: &[Self]) {
                combine_floats(op, accumulator, source);
            }

            fn add(first: &[Self], second: &[Self], accumulator: &mut [Self]) {
                add_floats(first, second, accumulator);
            }

            fn finish(op: ReduceOp, accumulator: &mut [Self], out: &mut [Self], ranks: usize) {
                if op == ReduceOp::Avg {
                    divide_floats(accumulator, ranks as $type);
                }
                out.copy_from_slice(accumulator);
            }
        }
    };
}

float!(f32, Some(sum_lanes));
float!(f64, None);

#[inline(always)]
fn widen_bf16(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

dispatched! {
    fn load_bf16(source: &[bf16], accumulator: &mut [f32]) {
        for (slot, value) in accumulator.iter_mut().zip(source) {
            *slot = widen_bf16(*value);
        }
    }
}

dispatched! {
    fn combine_bf16(op: ReduceOp, accumulator: &mut [f32], source: &[bf16]) {
        match op {
            ReduceOp::Sum | ReduceOp::Avg => each!(accumulator, source, |a, b| a + widen_bf16(b)),
            ReduceOp::Product => each!(accumulator, source, |a, b| a * widen_bf16(b)),
            ReduceOp::Min => each!(accumulator, source, |a, b| min_or_nan(a, widen_bf16(b))),
            ReduceOp::Max => each!(accumulator, source, |a, b| max_or_nan(a, widen_bf16(b))),
            ReduceOp::BitAnd | ReduceOp::BitOr => unreachable!("refused before any data moves"),
        }
    }
}

/// Rounds to nearest even by integer arithmetic; a NaN stays a quiet NaN.
#[inline(always)]
fn rounded_bf16(value: f32) -> bf16 {
    let bits = value.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
    let quiet = ((bits >> 16) as u16) | 0x40;
    bf16::from_bits(if bits & 0x7fff_ffff > 0x7f80_0000 { quiet } else { rounded })
}

dispatched! {
    pub(super) fn round_bf16(values: &[f32], out: &mut [bf16]) {
        out.iter_mut().zip(values).for_each(|(slot, value)| *slot = rounded_bf16(*value));
    }
}

dispatched! {
    fn add_bf16(first: &[bf16], second: &[bf16], accumulator: &mut [f32]) {
        pairs!(accumulator, first, second, |a, b| widen_bf16(a) + widen_bf16(b))
    }
}

impl Accumulate for bf16 {
    type Accumulator = f32;
    const SUM_WHOLE: Option<SumWhole<Self>> = Some(sum_lanes);

    fn load(source: &[Self], accumulator: &mut [f32]) {
        load_bf16(source, accumulator);
    }

    fn combine(op: ReduceOp, accumulator: &mut [f32], source: &[Self]) {
        combine_bf16(op, accumulator, source);
    }

    fn add(first: &[Self], second: &[Self], accumulator: &mut [f32]) {
        add_bf16(first, second, accumulator);
    }

    fn finish(op: ReduceOp, accumulator: &mut [f32], out: &mut [Self], ranks: usize) {
        if op == ReduceOp::Avg {
            divide_floats(accumulator, ranks as f32);
        }
        round_bf16(accumulator, out);
    }
}

impl Accumulate for f16 {
    type Accumulator = f32;

    fn load(source: &[Self], accumulator: &mut [f32]) {
        source.convert_to_f32_slice(accumulator);
    }

    fn combine(op: ReduceOp, accumulator: &mut [f32], source: &[Self]) {
        const STEP: usize = 1024;
        let mut wide = [0.0f32; STEP];
        for (slots, values) in accumulator.chunks_mut(STEP).zip(source.chunks(STEP)) {
            values.convert_to_f32_slice(&mut wide[..values.len()]);
            combine_floats(op, slots, &wide[..values.len()]);
        }
    }

    fn finish(op: ReduceOp, accumulator: &mut [f32], out: &mut [Self], ranks: usize) {
        if op == ReduceOp::Avg {
            divide_floats(accumulator, ranks as f32);
        }
        out.convert_from_f32_slice(accumulator);
    }
}

/// What is summed in registers of f32.
trait Lane: Copy {
    fn widen(self) -> f32;
    fn narrow(sum: f32) -> Self;
}

impl Lane for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
    #[inline(always)]
    fn narrow(sum: f32) -> f32 {
        sum
    }
}

impl Lane for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        widen_bf16(self)
    }
    #[inline(always)]
    fn narrow(sum: f32) -> bf16 {
        rounded_bf16(sum)
    }
}

/// Elements that are summed together, in a few registers.
const LANES: usize = 64;
/// How far ahead memory is asked for, by whoever reads several stretches of it at once: the processor notices by itself that memory
/// is read in order, but begins anew at each 4 KiB.
const AHEAD_BYTES: usize = 2048;

dispatched! {
    fn sum_lanes<T: Lane>(sum: &WholeSum<'_, T>, divisor: Option<f32>) {
        let whole = sum.count - sum.count % LANES;
        for at in (0..whole).step_by(LANES) {
            lanes::<T, LANES>(sum, at, divisor);
        }
        for at in whole..sum.count {
            lanes::<T, 1>(sum, at, divisor);
        }
    }
}

#[inline(always)]
fn lanes<T: Lane, const N: usize>(sum: &WholeSum<'_, T>, at: usize, divisor: Option<f32>) {
    let values = |source: *const u8| {
        let start = source.wrapping_add(sum.offset).cast::<T>().wrapping_add(at);
        #[cfg(target_arch = "x86_64")]
        if sum.far && N > 1 {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            for line in (0..size_of::<[T; N]>()).step_by(64) {
                // SAFETY: asking for memory touches nothing.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(start.wrapping_byte_add(AHEAD_BYTES + line).cast()) };
            }
        }
        // SAFETY: readable and aligned, as `WholeSum::new` was promised; nothing is written while this is borrowed.
        unsafe { &*start.cast::<[T; N]>() }
    };
    let mut total = [0.0f32; N];
    for (index, source) in sum.sources.iter().enumerate() {
        let values = values(*source);
        match index {
            0 => total.iter_mut().zip(values).for_each(|(total, value)| *total = value.widen()),
            _ => total.iter_mut().zip(values).for_each(|(total, value)| *total += value.widen()),
        }
    }
    if let Some(divisor) = divisor {
        total.iter_mut().for_each(|total| *total /= divisor);
    }
    // SAFETY: writable and aligned, as was promised.
    unsafe { sum.out.add(at).cast::<[T; N]>().write(total.map(T::narrow)) };
}

/// Arithmetic of the integer types.
trait Integer: Copy + Ord + std::ops::BitAnd<Output = Self> + std::ops::BitOr<Output = Self> {
    fn sum(self, other: Self) -> Self;
    fn product(self, other: Self) -> Self;
}

dispatched! {
    fn combine_integers<I: Integer>(op: ReduceOp, accumulator: &mut [I], source: &[I]) {
        match op {
            ReduceOp::Sum => each!(accumulator, source, |a, b| a.sum(b)),
            ReduceOp::Product => each!(accumulator, source, |a, b| a.product(b)),
            ReduceOp::Min => each!(accumulator, source, |a, b| a.min(b)),
            ReduceOp::Max => each!(accumulator, source, |a, b| a.max(b)),
            ReduceOp::BitAnd => each!(accumulator, source, |a, b| a & b),
            ReduceOp::BitOr => each!(accumulator, source, |a, b| a | b),
            ReduceOp::Avg => unreachable!("refused before any data moves"),
        }
    }
}

macro_rules! integer {
    ($type:ty) => {
        impl Integer for $type {
            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            #[inline(always)]
            fn product(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
        }

        impl Accumulate for $type {
            type Accumulator = $type;

            fn load(source: &[Self], accumulator: &mut [Self]) {
                accumulator.copy_from_slice(source);
            }

            fn combine(op: ReduceOp, accumulator: &mut [Self], source: &[Self]) {
                combine_integers(op, accumulator, source);
            }

            fn finish(_op: ReduceOp, accumulator: &mut [Self], out: &mut [Self], _ranks: usize) {
                out.copy_from_slice(accumulator);
            }
        }
    };
}

integer!(i8);
integer!(i16);
integer!(i32);
integer!(i64);
integer!(u8);

/// A boolean byte; any non-zero byte counts as true, and results are 0 or 1.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub(super) struct Flag(u8);

impl Accumulate for Flag {
    type Accumulator = u8;

    fn load(source: &[Self], accumulator: &mut [u8]) {
        accumulator.iter_mut().zip(source).for_each(|(slot, flag)| *slot = u8::from(flag.0 != 0));
    }

    fn combine(op: ReduceOp, accumulator: &mut [u8], source: &[Self]) {
        match op {
            ReduceOp::Sum | ReduceOp::Max | ReduceOp::BitOr => {
                each!(accumulator, source, |a, b| a | u8::from(b.0 != 0))
            }
            ReduceOp::Product | ReduceOp::Min | ReduceOp::BitAnd => {
                each!(accumulator, source, |a, b| a & u8::from(b.0 != 0))
            }
            ReduceOp::Avg => unreachable!("refused before any data moves"),
        }
    }

    fn finish(_op: ReduceOp, accumulator: &mut [u8], out: &mut [Self], _ranks: usize) {
        out.iter_mut().zip(accumulator.iter()).for_each(|(slot, flag)| *slot = Flag(*flag));
    }
}
