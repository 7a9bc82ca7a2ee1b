//! Floats of eight bits: a sign, four bits of exponent, three of fraction; no infinity, and one NaN of each sign.

use half::f16;

use super::{BLOCK, inverse};

/// The largest magnitude.
const LARGEST: f32 = 448.0;
/// The step between the smallest magnitudes, those without a leading one.
const SMALLEST_STEP: f32 = 1.0 / 512.0;
/// The smallest magnitude with a leading one.
const SMALLEST_NORMAL: f32 = 1.0 / 64.0;

/// Rounds a block such that its largest magnitude becomes the largest there is; gives the scale.
pub(super) fn pack(block: &[f32; BLOCK], values: &mut [u8]) -> f16 {
    let largest = block.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
    let scale = f16::from_f32(largest / LARGEST);
    let inverse = inverse(scale);
    for (value, weight) in values.iter_mut().zip(block) {
        *value = narrow(weight * inverse);
    }
    scale
}

/// The nearest, ties to even; what is larger than all becomes the largest.
fn narrow(value: f32) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    let magnitude = value.abs().min(LARGEST);
    if magnitude < SMALLEST_NORMAL {
        return sign | (magnitude / SMALLEST_STEP).round_ties_even() as u8;
    }
    // Twenty bits of fraction go, and the exponent counts from 7 instead of 127.
    let bits = magnitude.to_bits();
    let rounded = (bits + 0x7_ffff + (bits >> 20 & 1)) >> 20;
    sign | (rounded - (120 << 3)) as u8
}

/// What it stands for.
pub(super) fn widen(value: u8) -> f32 {
    let (exponent, fraction) = (u32::from(value >> 3 & 15), u32::from(value & 7));
    let magnitude = match exponent {
        0 => fraction as f32 * SMALLEST_STEP,
        15 if fraction == 7 => f32::NAN,
        _ => f32::from_bits((exponent + 120) << 23 | fraction << 20),
    };
    if value & 0x80 == 0 { magnitude } else { -magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_its_own_nearest_and_what_lies_between_goes_to_the_nearer() {
        let all: Vec<(u8, f32)> = (0..127).map(|value| (value, widen(value))).collect();
        assert_eq!((all[0].1, all[8].1, all[126].1), (0.0, SMALLEST_NORMAL, LARGEST));
        for pair in all.windows(2) {
            let [(low, small), (high, large)] = [pair[0], pair[1]];
            assert!(small < large);
            assert_eq!((narrow(small), narrow(-large)), (low, high | 0x80));
            let middle = (small + large) / 2.0;
            assert_eq!(narrow(middle), if low % 2 == 0 { low } else { high }, "ties to even: {middle}");
            assert_eq!((narrow(middle.next_down()), narrow(middle.next_up())), (low, high));
        }
        assert_eq!((narrow(1e9), widen(0x7f).is_nan()), (126, true));
    }
}
