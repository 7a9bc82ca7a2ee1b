//! Values as training for few bits sees them.

use ferrospeed_tensor::fake_quantize::{FakeQuantizer, Levels};
use ferrospeed_tensor::random::RandomKey;
use ferrospeed_tensor::{DType, Tensor};

fn applied(quantizer: FakeQuantizer, values: &[f32], threads: usize) -> Vec<f32> {
    let device = ferrospeed_cpu::with_threads(threads);
    let x = Tensor::from_slice(values, [values.len()], &device).unwrap();
    quantizer.apply(&x).unwrap().to_vec::<f32>().unwrap()
}

fn some(count: usize) -> Vec<f32> {
    let mut values = vec![0.0; count];
    RandomKey::new(3, 1).fill_normal(0, &mut values);
    values
}

#[test]
fn a_group_without_a_spread_stays_as_it_is() {
    for (bits, symmetric) in [(8, true), (8, false), (2, true), (1, true)] {
        let quantizer = FakeQuantizer::new(Levels::of(bits, symmetric).unwrap(), 2);
        let found = applied(quantizer, &[0.0, 0.0, 0.0, 1.0, -1.0, 0.5], 1);
        assert_eq!(found[..3], [0.0; 3], "{bits} bits");
        assert!(found[3..].iter().all(|value| value.is_finite()), "{bits} bits: {found:?}");
    }
    assert_eq!(applied(FakeQuantizer::new(Levels::Asymmetric { bits: 4 }, 1), &[2.5; 4], 1), [2.5; 4]);
}

#[test]
fn no_group_has_more_levels_than_its_bits_say_however_it_is_cut() {
    for (count, groups) in [(70_000, 1), (70_000, 2), (4096, 64), (90, 9)] {
        let values = some(count);
        for bits in [1, 2, 3, 4] {
            let quantizer = FakeQuantizer::new(Levels::of(bits, true).unwrap(), groups);
            let found = applied(quantizer, &values, 2);
            assert_eq!(found, applied(quantizer, &values, 1), "threads change nothing");
            for group in found.chunks(count / groups) {
                let mut levels: Vec<u32> = group.iter().map(|value| value.to_bits()).collect();
                levels.sort_unstable();
                levels.dedup();
                assert!(levels.len() <= 1 << bits, "{bits} bits: {} levels", levels.len());
            }
            // A group depends on its own values alone.
            let own = applied(FakeQuantizer { groups: 1, ..quantizer }, &values[..count / groups], 1);
            assert_eq!(own, found[..count / groups]);
        }
    }
}

#[test]
fn stochastic_rounding_goes_either_way_as_often_as_it_should() {
    let mut values = vec![0.3; 10_000];
    values[0] = -8.0;
    let quantizer = FakeQuantizer::new(Levels::Symmetric { bits: 4 }, 1);
    let nearest = applied(quantizer, &values, 1);
    assert!(nearest[1..].iter().all(|value| *value == 0.0));
    let noisy = FakeQuantizer { noise: Some(RandomKey::new(5, 2)), ..quantizer };
    let found = applied(noisy, &values, 2);
    let up = found[1..].iter().filter(|value| **value == 1.0).count();
    assert!((2_800..3_200).contains(&up), "{up}");
    assert_eq!(found, applied(noisy, &values, 1), "the same numbers give the same rounding");
}

#[test]
fn exact_values_are_mixed_in_and_16_bit_types_keep_their_type() {
    let quantizer = FakeQuantizer::new(Levels::Symmetric { bits: 3 }, 1);
    let mixed = applied(FakeQuantizer { exact_share: 0.25, ..quantizer }, &[-4.0, 0.75, 1.0, 3.0], 1);
    assert_eq!(mixed, [-4.0, 0.9375, 1.0, 3.0]);
    let x = Tensor::from_f32(&[-4.0, 0.6], [2], DType::BF16, &ferrospeed_cpu::with_threads(1)).unwrap();
    let found = quantizer.apply(&x).unwrap();
    assert_eq!((found.dtype(), found.to_vec_f32().unwrap()), (DType::BF16, vec![-4.0, 1.0]));
}

#[test]
fn what_cannot_be_is_refused() {
    for (bits, symmetric, expected) in
        [(0, true, "at least 1"), (2, false, "symmetric only"), (17, true, "at most 16")]
    {
        assert!(Levels::of(bits, symmetric).unwrap_err().contains(expected));
    }
    let x = Tensor::from_slice(&[1.0f32; 6], [6], &ferrospeed_cpu::with_threads(1)).unwrap();
    let quantizer = FakeQuantizer::new(Levels::Ternary, 4);
    assert!(quantizer.apply(&x).unwrap_err().to_string().contains("cannot be cut into 4 groups"));
}
