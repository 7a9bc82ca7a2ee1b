//! Norms of gradients, clipping, and the search for what is no number.
//!
//! A norm is `None` when an element is infinite or NaN. DeepSpeed says −1 instead, and scales gradients by it, which
//! turns their sign around; here nothing is scaled and the caller learns why. Sums are f64 and scaled by the largest
//! magnitude, so that gradients whose squares overflow still have a norm.

use ferrospeed_tensor::Device;
use ferrospeed_tensor::dtype::Float;

use crate::error::{OptimError, Result};
use crate::norm::{Magnitude, SquareSum};
use crate::stretch::Gradient;

/// Which norm.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum NormType {
    /// The root of the sum of squares: the only one whose bits do not depend on how vectors are cut.
    Two,
    /// The `p`-th root of the sum of `p`-th powers.
    P(f64),
    /// The largest magnitude.
    Infinity,
}

impl NormType {
    /// The norm of this degree, which is positive and may be infinite.
    pub fn new(degree: f64) -> Result<NormType> {
        if degree == 2.0 {
            Ok(NormType::Two)
        } else if degree == f64::INFINITY {
            Ok(NormType::Infinity)
        } else if degree > 0.0 {
            Ok(NormType::P(degree))
        } else {
            Err(OptimError::Value {
                what: "the degree of a norm",
                value: degree.to_string(),
                why: "it is a positive number or infinity",
            })
        }
    }
}

/// Added to a norm that is divided by, as every framework does.
const NORM_EPS: f64 = 1e-6;

/// The norm of several gradients taken as one vector, 0 for none; `None` when an element is no number.
pub fn norm(gradients: &[Gradient<'_>], norm_type: NormType, device: &Device) -> Option<f64> {
    let whole = gradients.iter().fold(Magnitude::ZERO, |most, &one| most.max(Magnitude::of(one, device)));
    if !whole.is_finite() {
        return None;
    }
    let largest = f64::from(whole.value());
    Some(match norm_type {
        NormType::Infinity => largest,
        NormType::Two => {
            let sum = gradients.iter().map(|&one| SquareSum::of(one, whole, device));
            sum.fold(SquareSum::default(), |sum, one| sum + one).norm(whole)
        }
        NormType::P(_) if largest == 0.0 => 0.0,
        NormType::P(degree) => {
            let powers = gradients.iter().map(|&one| match one {
                Gradient::F32(values) => sum_of_powers(values, largest, degree),
                Gradient::Bf16(values) => sum_of_powers(values, largest, degree),
                Gradient::F16(values) => sum_of_powers(values, largest, degree),
            });
            largest * powers.sum::<f64>().powf(1.0 / degree)
        }
    })
}

fn sum_of_powers<T: Float>(values: &[T], largest: f64, degree: f64) -> f64 {
    values.iter().map(|value| (f64::from(value.widen()).abs() / largest).powf(degree)).sum()
}

/// The norm of a whole from the norms of its parts; `None` when a part has none.
pub fn combine(parts: &[Option<f64>], norm_type: NormType) -> Option<f64> {
    let parts = parts.iter().copied().collect::<Option<Vec<f64>>>()?;
    let largest = parts.iter().copied().fold(0.0, f64::max);
    let root = |degree: f64| {
        largest * parts.iter().map(|part| (part / largest).powf(degree)).sum::<f64>().powf(1.0 / degree)
    };
    Some(match norm_type {
        _ if largest == 0.0 => 0.0,
        NormType::Infinity => largest,
        NormType::Two => root(2.0),
        NormType::P(degree) => root(degree),
    })
}

/// What gradients of this norm are multiplied by so that it does not exceed `max_norm`.
pub fn coefficient(norm: f64, max_norm: f64) -> f64 {
    (max_norm / (norm + NORM_EPS)).min(1.0)
}

/// Scales gradients in place so that their norm does not exceed `max_norm`, and gives the norm they had.
///
/// Gradients that hold something that is no number are an error and stay as they are.
pub fn clip(
    gradients: &mut [&mut [f32]],
    max_norm: f64,
    norm_type: NormType,
    device: &Device,
) -> Result<f64> {
    if !(max_norm.is_finite() && max_norm > 0.0) {
        return Err(OptimError::Value {
            what: "the largest norm",
            value: max_norm.to_string(),
            why: "it is a positive number",
        });
    }
    let seen: Vec<Gradient<'_>> = gradients.iter().map(|values| Gradient::F32(values)).collect();
    let Some(total) = norm(&seen, norm_type, device) else {
        let bad = gradients.iter().position(|values| has_inf_or_nan(Gradient::F32(values), device));
        return Err(OptimError::NotANumber { gradient: bad.unwrap_or_default() });
    };
    let factor = coefficient(total, max_norm) as f32;
    if factor < 1.0 {
        gradients.iter_mut().for_each(|values| values.iter_mut().for_each(|value| *value *= factor));
    }
    Ok(total)
}

/// Whether an element is infinite or NaN. Each element is looked at: finite ones never count, however large their sum.
pub fn has_inf_or_nan(gradient: Gradient<'_>, device: &Device) -> bool {
    !Magnitude::of(gradient, device).is_finite()
}

/// How many elements are exactly zero.
pub fn zeros(gradients: &[Gradient<'_>]) -> u64 {
    fn count<T: Float>(values: &[T]) -> u64 {
        values.iter().filter(|value| value.widen() == 0.0).count() as u64
    }
    gradients
        .iter()
        .map(|&gradient| match gradient {
            Gradient::F32(values) => count(values),
            Gradient::Bf16(values) => count(values),
            Gradient::F16(values) => count(values),
        })
        .sum()
}
