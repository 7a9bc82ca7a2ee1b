//! Elementary functions without branches or library calls, so that loops over them vectorise.
//!
//! Largest errors over all of f32's range of interest, against f64: `exp` 2 ulp, `tanh` 3 ulp,
//! `erf` 2e-7 absolute.

use ferrospeed_tensor::Activation;

/// `eˣ`; zero below -87.3, infinity above 88.7.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    let clamped = if x < LEAST_EXPONENT { LEAST_EXPONENT } else { x };
    let clamped = if clamped > 88.7 { 88.7 } else { clamped };
    let (value, exponent) = exp_parts(clamped);
    // Two steps keep the exponent in range at both ends.
    let half = exponent >> 1;
    let first = f32::from_bits((half.wrapping_add(127) << 23) as u32);
    let second = f32::from_bits(((exponent.wrapping_sub(half)).wrapping_add(127) << 23) as u32);
    let scaled = value * first * second;
    let scaled = if x < LEAST_EXPONENT { 0.0 } else { scaled };
    let scaled = if x > 88.7 { f32::INFINITY } else { scaled };
    if x.is_nan() { x } else { scaled }
}

/// [`exp`] of what is not above zero, to the last bit, in fewer instructions.
#[inline(always)]
pub(crate) fn exp_down(x: f32) -> f32 {
    let clamped = if x < LEAST_EXPONENT { LEAST_EXPONENT } else { x };
    let (value, power) = exp_parts(clamped);
    // The power is that of a normal number, so one step is enough.
    let scaled = value * f32::from_bits((power.wrapping_add(127) << 23) as u32);
    if x < LEAST_EXPONENT { 0.0 } else { scaled }
}

/// Below it, `eˣ` counts as zero.
const LEAST_EXPONENT: f32 = -87.3;

/// `eˣ` as a value near one and the power of two that it is to be multiplied by.
#[inline(always)]
fn exp_parts(x: f32) -> (f32, i32) {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding and subtracting 1.5·2²³ rounds to the nearest integer.
    const ROUND: f32 = 12_582_912.0;
    let rounded = x * LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = x - n * LN2_HIGH - n * LN2_LOW;
    let mut p = 1.987_569_2e-4f32;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 5e-1;
    (p * r * r + r + 1.0, rounded.to_bits().wrapping_sub(ROUND.to_bits()) as i32)
}

/// `eˣ` for `x` up to 88, in half the instructions of [`exp`]: multiplications and additions are fused, so that only
/// kernels which one instruction set has may use it. Within 2 ulp; zero below -87.3.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) fn fused_exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0;
    let clamped = if x < -87.3 { -87.3 } else { x };
    let rounded = clamped.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = rounded - ROUND;
    let r = n.mul_add(2.121_944_4e-4, n.mul_add(-0.693_359_4, clamped));
    let mut p = 1.987_569_2e-4f32;
    p = p.mul_add(r, 1.398_199_9e-3);
    p = p.mul_add(r, 8.333_452e-3);
    p = p.mul_add(r, 4.166_579_6e-2);
    p = p.mul_add(r, 1.666_666_5e-1);
    p = p.mul_add(r, 5e-1);
    let value = (p * r).mul_add(r, r) + 1.0;
    let power = f32::from_bits(rounded.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23);
    if x < -87.3 { 0.0 } else { value * power }
}

/// Hyperbolic tangent by a rational minimax approximation.
#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    let clamped = x.clamp(-7.905_311, 7.905_311);
    let x2 = clamped * clamped;
    let mut p = -2.760_768_5e-16f32;
    p = p * x2 + 2.000_188e-13;
    p = p * x2 - 8.604_672e-11;
    p = p * x2 + 5.122_297e-8;
    p = p * x2 + 1.485_722_4e-5;
    p = p * x2 + 6.372_619_3e-4;
    p = p * x2 + 4.893_524_6e-3;
    let mut q = 1.198_258_4e-6f32;
    q = q * x2 + 1.185_347_1e-4;
    q = q * x2 + 2.268_434_6e-3;
    q = q * x2 + 4.893_525e-3;
    clamped * p / q
}

/// The logistic function.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// The error function (Abramowitz and Stegun, 7.1.26).
#[inline(always)]
pub(crate) fn erf(x: f32) -> f32 {
    let magnitude = x.abs();
    let t = 1.0 / (1.0 + 0.327_591_1 * magnitude);
    let mut p = 1.061_405_4f32;
    p = p * t - 1.453_152;
    p = p * t + 1.421_413_8;
    p = p * t - 0.284_496_74;
    p = p * t + 0.254_829_6;
    let value = 1.0 - p * t * exp(-magnitude * magnitude);
    value.copysign(x)
}

const SQRT_2_OVER_PI: f32 = 0.797_884_6;
const GELU_CUBIC: f32 = 0.044_715;
const INV_SQRT_2: f32 = std::f32::consts::FRAC_1_SQRT_2;
const INV_SQRT_2_PI: f32 = 0.398_942_3;

/// `f(x)`.
#[inline(always)]
pub(crate) fn activate(activation: Activation, x: f32) -> f32 {
    match activation {
        Activation::GeluErf => 0.5 * x * (1.0 + erf(x * INV_SQRT_2)),
        Activation::GeluTanh => 0.5 * x * (1.0 + tanh(SQRT_2_OVER_PI * (x + GELU_CUBIC * x * x * x))),
        Activation::QuickGelu => x * sigmoid(1.702 * x),
        Activation::Silu => x * sigmoid(x),
        // What is no number stays so: a zero would hide it from everything behind.
        Activation::Relu => {
            if x <= 0.0 {
                0.0
            } else {
                x
            }
        }
        Activation::Tanh => tanh(x),
        Activation::Sigmoid => sigmoid(x),
    }
}

/// `f'(x)`.
#[inline(always)]
pub(crate) fn activate_derivative(activation: Activation, x: f32) -> f32 {
    match activation {
        Activation::GeluErf => 0.5 * (1.0 + erf(x * INV_SQRT_2)) + x * INV_SQRT_2_PI * exp(-0.5 * x * x),
        Activation::GeluTanh => {
            let t = tanh(SQRT_2_OVER_PI * (x + GELU_CUBIC * x * x * x));
            let inner = SQRT_2_OVER_PI * (1.0 + 3.0 * GELU_CUBIC * x * x);
            0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner
        }
        Activation::QuickGelu => {
            let s = sigmoid(1.702 * x);
            s + 1.702 * x * s * (1.0 - s)
        }
        Activation::Silu => {
            let s = sigmoid(x);
            s + x * s * (1.0 - s)
        }
        Activation::Relu => {
            if x <= 0.0 {
                0.0
            } else {
                1.0
            }
        }
        Activation::Tanh => {
            let t = tanh(x);
            1.0 - t * t
        }
        Activation::Sigmoid => {
            let s = sigmoid(x);
            s * (1.0 - s)
        }
    }
}

/// Runs `$body` with `$name` bound to a constant activation, so that the loop inside is compiled for each one.
macro_rules! with_activation {
    ($activation:expr, $name:ident => $body:expr) => {
        match $activation {
            Activation::GeluErf => {
                const $name: Activation = Activation::GeluErf;
                $body
            }
            Activation::GeluTanh => {
                const $name: Activation = Activation::GeluTanh;
                $body
            }
            Activation::QuickGelu => {
                const $name: Activation = Activation::QuickGelu;
                $body
            }
            Activation::Silu => {
                const $name: Activation = Activation::Silu;
                $body
            }
            Activation::Relu => {
                const $name: Activation = Activation::Relu;
                $body
            }
            Activation::Tanh => {
                const $name: Activation = Activation::Tanh;
                $body
            }
            Activation::Sigmoid => {
                const $name: Activation = Activation::Sigmoid;
                $body
            }
        }
    };
}
pub(crate) use with_activation;

#[cfg(test)]
mod tests {
    use super::*;

    fn sweep() -> impl Iterator<Item = f32> {
        (-4000..=4000).map(|i| i as f32 * 0.025).chain([1e-8, -1e-8, 1e-4, 0.0, 88.8, -88.0, 1e30, -1e30])
    }

    #[test]
    fn exp_is_within_two_ulp_of_f64() {
        for x in sweep().filter(|x| (-87.0..88.6).contains(x)) {
            let truth = f64::from(x).exp();
            let relative = ((f64::from(exp(x)) - truth) / truth).abs();
            assert!(relative < 2.5e-7, "exp({x}) is off by {relative:e}");
        }
        assert_eq!(exp(-1000.0), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(1000.0), f32::INFINITY);
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn the_exponential_of_what_is_not_positive_has_the_same_bits() {
        let every = (0x8000_0000u32..=0xff80_0000).step_by(997).map(f32::from_bits);
        for x in every.chain(sweep().filter(|&x| x <= 0.0)) {
            assert_eq!(exp_down(x).to_bits(), exp(x).to_bits(), "{x}");
        }
        assert!(exp_down(f32::NAN).is_nan());
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn the_fused_exponential_is_within_two_ulp_of_f64() {
        for x in sweep().filter(|x| (-87.0..88.0).contains(x)) {
            let truth = f64::from(x).exp();
            let relative = ((f64::from(fused_exp(x)) - truth) / truth).abs();
            assert!(relative < 2.5e-7, "exp({x}) is off by {relative:e}");
        }
        assert_eq!([-88.0, -1000.0, f32::NEG_INFINITY].map(fused_exp), [0.0; 3]);
        assert_eq!(fused_exp(0.0), 1.0);
        assert!(fused_exp(f32::NAN).is_nan());
    }

    #[test]
    fn tanh_and_erf_are_close_to_the_truth() {
        for x in sweep() {
            assert!((f64::from(tanh(x)) - f64::from(x).tanh()).abs() < 5e-7, "tanh({x})");
        }
        // Values of the error function from its tables.
        for (x, value) in
            [(0.0, 0.0), (0.5, 0.520_499_9), (1.0, 0.842_700_8), (2.0, 0.995_322_3), (-1.5, -0.966_105_1)]
        {
            assert!((erf(x) - value as f32).abs() < 3e-7, "erf({x}) = {}", erf(x));
        }
    }

    #[test]
    fn what_is_no_number_stays_so() {
        for activation in Activation::ALL {
            assert!(activate(activation, f32::NAN).is_nan(), "{activation:?}");
        }
    }

    #[test]
    fn derivatives_match_central_differences() {
        for activation in Activation::ALL {
            for i in -40..40 {
                let x = i as f32 * 0.2 + 0.05;
                let step = 1e-2;
                let slope = (activate(activation, x + step) - activate(activation, x - step)) / (2.0 * step);
                let derivative = activate_derivative(activation, x);
                assert!((slope - derivative).abs() < 2e-3, "{activation:?} at {x}: {slope} or {derivative}");
            }
        }
    }
}
