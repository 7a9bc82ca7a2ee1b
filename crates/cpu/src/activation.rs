//! Activations and their derivatives over rows of values.
//!
//! A function of a 16-bit value has 65,536 results. They are computed once, by the arithmetic that f32 takes, and looked
//! up from then on, which gives the same bits in a quarter of the time: usual values take few lines of the table, and
//! those stay in the first-level cache.

use std::sync::OnceLock;

use ferrospeed_tensor::dtype::Float;
use ferrospeed_tensor::loops::simd::vectorized;
use ferrospeed_tensor::{Activation, DType};

use crate::math::{activate, activate_derivative, with_activation};

/// `f = activation(x)`.
pub(crate) fn values<T: Float>(activation: Activation, x: &[T], f: &mut [f32]) {
    match table::<T>(activation) {
        Some(table) => look_up(&table.values, bytemuck::cast_slice(x), f),
        None => compute_values(activation, bytemuck::cast_slice(x), f),
    }
}

/// `f = activation(x)` and `d = activation'(x)`.
pub(crate) fn values_and_derivatives<T: Float>(
    activation: Activation,
    x: &[T],
    f: &mut [f32],
    d: &mut [f32],
) {
    match table::<T>(activation) {
        Some(table) => look_up_pairs(&table.pairs, bytemuck::cast_slice(x), f, d),
        None => compute_both(activation, bytemuck::cast_slice(x), f, d),
    }
}

fn compute_values(activation: Activation, x: &[f32], f: &mut [f32]) {
    with_activation!(activation, KIND => vectorized!(|| {
        f.iter_mut().zip(x).for_each(|(f, x)| *f = activate(KIND, *x));
    }));
}

fn compute_both(activation: Activation, x: &[f32], f: &mut [f32], d: &mut [f32]) {
    with_activation!(activation, KIND => vectorized!(|| {
        for ((f, d), x) in f.iter_mut().zip(d.iter_mut()).zip(x) {
            *f = activate(KIND, *x);
            *d = activate_derivative(KIND, *x);
        }
    }));
}

/// `value` becomes `activation(value)`, `gradient` is multiplied by `activation'(value)`.
pub(crate) fn backward_in_place<T: Float>(activation: Activation, value: &mut [T], gradient: &mut [T]) {
    assert_eq!(value.len(), gradient.len());
    #[cfg(target_arch = "x86_64")]
    if let Some(table) = table::<T>(activation)
        && crate::avx512::available()
    {
        // SAFETY: the processor has AVX-512, and types with tables have 16 bits.
        return unsafe { wide::backward_in_place(&table.pairs, value, gradient) };
    }
    for (value, gradient) in value.chunks_mut(AT_ONCE).zip(gradient.chunks_mut(AT_ONCE)) {
        let (mut f, mut d) = ([0.0; AT_ONCE], [0.0; AT_ONCE]);
        let (f, d) = (&mut f[..value.len()], &mut d[..value.len()]);
        values_and_derivatives(activation, value, f, d);
        vectorized!(|| {
            for i in 0..value.len() {
                gradient[i] = T::narrow(gradient[i].widen() * d[i]);
                value[i] = T::narrow(f[i]);
            }
        });
    }
}

/// Values whose activation waits in the first-level cache for what else happens to them.
pub(crate) const AT_ONCE: usize = 256;

/// All results of one activation for one 16-bit type, by the value's bits.
pub(crate) struct Table {
    pub(crate) values: Results<f32>,
    /// Value and derivative: who wants both finds them in one line of the cache.
    pairs: Results<[f32; 2]>,
}

type Results<R> = Box<[R; COUNT]>;

/// Values of a 16-bit type.
const COUNT: usize = 1 << 16;

/// The table of an activation, for types of 16 bits.
#[inline(always)]
pub(crate) fn table<T: Float>(activation: Activation) -> Option<&'static Table> {
    const KINDS: usize = Activation::ALL.len();
    static OF_BF16: [OnceLock<Table>; KINDS] = [const { OnceLock::new() }; KINDS];
    static OF_F16: [OnceLock<Table>; KINDS] = [const { OnceLock::new() }; KINDS];
    let tables = match T::DTYPE {
        DType::BF16 => &OF_BF16,
        DType::F16 => &OF_F16,
        _ => return None,
    };
    Some(tables[activation as usize].get_or_init(|| compute::<T>(activation)))
}

fn compute<T: Float>(activation: Activation) -> Table {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    let all: Vec<f32> = bytemuck::cast_slice::<u16, T>(&all).iter().map(|x| x.widen()).collect();
    let mut table = Table { values: Box::new([0.0; COUNT]), pairs: Box::new([[0.0; 2]; COUNT]) };
    let mut derivatives = vec![0.0; COUNT];
    compute_both(activation, &all, &mut table.values[..], &mut derivatives);
    for (pair, (f, d)) in table.pairs.iter_mut().zip(table.values.iter().zip(derivatives)) {
        *pair = [*f, d];
    }
    table
}

/// `y[i] = results[x[i]]`.
fn look_up(results: &[f32; COUNT], x: &[u16], y: &mut [f32]) {
    assert_eq!(x.len(), y.len());
    #[cfg(target_arch = "x86_64")]
    if crate::avx512::available() {
        // SAFETY: the processor has AVX-512.
        return unsafe { wide::look_up(results, x, y) };
    }
    y.iter_mut().zip(x).for_each(|(y, x)| *y = results[usize::from(*x)]);
}

/// `[f[i], d[i]] = pairs[x[i]]`.
fn look_up_pairs(pairs: &[[f32; 2]; COUNT], x: &[u16], f: &mut [f32], d: &mut [f32]) {
    assert!(x.len() == f.len() && x.len() == d.len());
    #[cfg(target_arch = "x86_64")]
    if crate::avx512::available() {
        // SAFETY: the processor has AVX-512.
        return unsafe { wide::look_up_pairs(pairs, x, f, d) };
    }
    f.iter_mut().zip(d).zip(x).for_each(|((f, d), x)| [*f, *d] = pairs[usize::from(*x)]);
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod wide {
    //! Sixteen values at once.

    use std::arch::x86_64::*;

    use super::COUNT;
    use ferrospeed_tensor::dtype::Float;

    const LANES: usize = 16;

    /// The results for sixteen values.
    #[target_feature(enable = "avx512f")]
    #[inline]
    pub(crate) fn results(results: &[f32; COUNT], x: __m256i) -> __m512 {
        // SAFETY: sixteen bits name no place outside the table.
        unsafe { _mm512_i32gather_ps::<4>(_mm512_cvtepu16_epi32(x), results.as_ptr()) }
    }

    /// The results of both kinds for sixteen values.
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn pair_results(pairs: &[[f32; 2]; COUNT], x: __m256i) -> [__m512; 2] {
        let places = _mm512_cvtepu16_epi32(x);
        // SAFETY: sixteen bits name no place outside the table.
        let [low, high] = unsafe {
            [_mm512_castsi512_si256(places), _mm512_extracti64x4_epi64::<1>(places)]
                .map(|half| _mm512_castpd_ps(_mm512_i32gather_pd::<8>(half, pairs.as_ptr().cast())))
        };
        let first = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
        let second = _mm512_or_si512(first, _mm512_set1_epi32(1));
        [_mm512_permutex2var_ps(low, first, high), _mm512_permutex2var_ps(low, second, high)]
    }

    /// See the function of this name outside.
    ///
    /// # Safety
    /// `T` has 16 bits.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2")]
    pub(super) unsafe fn backward_in_place<T: Float>(
        pairs: &[[f32; 2]; COUNT],
        value: &mut [T],
        gradient: &mut [T],
    ) {
        let (mut values, mut gradients) = (value.chunks_exact_mut(LANES), gradient.chunks_exact_mut(LANES));
        for (value, gradient) in (&mut values).zip(&mut gradients) {
            let (mut f, mut d) = ([0.0f32; LANES], [0.0f32; LANES]);
            // SAFETY: all are sixteen values long, those of `value` of 16 bits.
            unsafe {
                let pair = pair_results(pairs, _mm256_loadu_si256(value.as_ptr().cast()));
                _mm512_storeu_ps(f.as_mut_ptr(), pair[0]);
                _mm512_storeu_ps(d.as_mut_ptr(), pair[1]);
            }
            for lane in 0..LANES {
                gradient[lane] = T::narrow(gradient[lane].widen() * d[lane]);
            }
            for lane in 0..LANES {
                value[lane] = T::narrow(f[lane]);
            }
        }
        for (value, gradient) in values.into_remainder().iter_mut().zip(gradients.into_remainder()) {
            let [f, d] = pairs[usize::from(bytemuck::cast::<T, u16>(*value))];
            *gradient = T::narrow(gradient.widen() * d);
            *value = T::narrow(f);
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    pub(super) fn look_up_pairs(table: &[[f32; 2]; COUNT], x: &[u16], f: &mut [f32], d: &mut [f32]) {
        let mut x = x.chunks_exact(LANES);
        let (mut f, mut d) = (f.chunks_exact_mut(LANES), d.chunks_exact_mut(LANES));
        for ((x, f), d) in (&mut x).zip(&mut f).zip(&mut d) {
            // SAFETY: all are sixteen values long.
            unsafe {
                let pair = pair_results(table, _mm256_loadu_si256(x.as_ptr().cast()));
                _mm512_storeu_ps(f.as_mut_ptr(), pair[0]);
                _mm512_storeu_ps(d.as_mut_ptr(), pair[1]);
            }
        }
        let rest = f.into_remainder().iter_mut().zip(d.into_remainder());
        rest.zip(x.remainder()).for_each(|((f, d), x)| [*f, *d] = table[usize::from(*x)]);
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    pub(super) fn look_up(table: &[f32; COUNT], x: &[u16], y: &mut [f32]) {
        let (mut x, mut y) = (x.chunks_exact(LANES), y.chunks_exact_mut(LANES));
        for (x, y) in (&mut x).zip(&mut y) {
            // SAFETY: both are sixteen values long.
            unsafe {
                _mm512_storeu_ps(y.as_mut_ptr(), results(table, _mm256_loadu_si256(x.as_ptr().cast())));
            }
        }
        x.remainder().iter().zip(y.into_remainder()).for_each(|(x, y)| *y = table[usize::from(*x)]);
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    /// Every value of 16 bits gives the bits that the arithmetic gives, wherever it stands in a row.
    #[test]
    fn looked_up_results_are_the_computed_ones() {
        fn same(a: f32, b: f32) -> bool {
            a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
        }
        fn check<T: Float>(from_bits: fn(u16) -> T) {
            let x: Vec<T> = (0..=u16::MAX).map(from_bits).chain([from_bits(0x3c01)]).collect();
            let (mut f, mut d) = (vec![0.0; x.len()], vec![0.0; x.len()]);
            for activation in Activation::ALL {
                values(activation, &x, &mut d);
                values_and_derivatives(activation, &x, &mut f, &mut vec![0.0; x.len()]);
                assert!(f.iter().zip(&d).all(|(f, alone)| same(*f, *alone)), "{activation:?}");
                values_and_derivatives(activation, &x, &mut f, &mut d);
                let (mut value, mut gradient) = (x.clone(), vec![T::narrow(-0.75); x.len()]);
                backward_in_place(activation, &mut value, &mut gradient);
                for i in 0..x.len() {
                    assert!(same(value[i].widen(), T::narrow(f[i]).widen()), "{activation:?} of {:?}", x[i]);
                    let expected = T::narrow(-0.75 * d[i]).widen();
                    assert!(same(gradient[i].widen(), expected), "{activation:?}' of {:?}", x[i]);
                }
                for ((x, f), d) in x.iter().zip(&f).zip(&d) {
                    let x = x.widen();
                    assert!(same(*f, activate(activation, x)), "{activation:?} of {x} is {f}");
                    assert!(same(*d, activate_derivative(activation, x)), "{activation:?}' of {x} is {d}");
                }
            }
        }
        check(bf16::from_bits);
        check(f16::from_bits);
    }
}
