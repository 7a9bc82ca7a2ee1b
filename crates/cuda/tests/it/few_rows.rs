//! Products of few rows with what stands before and behind them, on the GPU, against the same layers one by one on the processor.
//!
//! Without a device each test says so and passes: there is nothing to compare.

use ferrospeed_tensor::ops::{self, WeightLayout};
use ferrospeed_tensor::random::RandomKey;
use ferrospeed_tensor::store::{FromInitializers, PackedStore};
use ferrospeed_tensor::{
    Activation, DType, Device, Initializer, Operand, PackedBits, Packing, Param, Tensor, autograd,
};

const EPS: f32 = 1e-5;

fn device() -> Option<Device> {
    if ferrospeed_cuda::device_count() == 0 {
        ferrospeed_testkit::skip::skip("no CUDA device");
        return None;
    }
    Some(ferrospeed_cuda::device(0, &ferrospeed_cpu::device()).expect("a device is there"))
}

/// Values that a type of 16 bits has, on a device in that type and on the host in f32.
fn both(shape: &[usize], scale: f32, stream: u32, dtype: DType, device: &Device) -> [Tensor; 2] {
    let mut values = vec![0.0f32; shape.iter().product()];
    RandomKey::new(11, stream).fill_normal(0, &mut values);
    values.iter_mut().for_each(|value| *value *= scale);
    let there = Tensor::from_f32(&values, shape, dtype, device).unwrap();
    let here = Tensor::from_slice(&there.to_vec_f32().unwrap(), shape, &ferrospeed_cpu::device()).unwrap();
    [there, here]
}

fn operand(tensor: &Tensor) -> Operand {
    Operand::from(tensor)
}

fn expect_near(what: &str, got: &Tensor, want: &Tensor, dtype: DType) {
    expect_within(what, got, want, if dtype == DType::BF16 { 0.02 } else { 0.004 });
}

fn expect_within(what: &str, got: &Tensor, want: &Tensor, near: f32) {
    let (got, want) = (got.to_vec_f32().unwrap(), want.to_vec_f32().unwrap());
    assert_eq!(got.len(), want.len());
    for (at, (got, want)) in got.iter().zip(&want).enumerate() {
        assert!((got - want).abs() <= near + near * want.abs(), "{what} at {at}: {got} for {want}");
    }
}

#[test]
fn few_rows_are_what_the_layers_give_one_by_one() {
    let Some(device) = device() else { return };
    autograd::no_grad(|| {
        for (inputs, outputs) in [(64, 16), (2048, 520), (72, 40), (5632, 256), (1000, 24)] {
            for rows in [1, 2, 7, 8, 9, 16, 17, 25, 32] {
                for dtype in [DType::BF16, DType::F16] {
                    // From 17 on by a kernel that Hopper alone has.
                    if rows <= device.backend().most_few_rows(dtype, false, None) {
                        compare(inputs, outputs, rows, dtype, &device);
                    }
                }
            }
        }
    });
}

fn compare(inputs: usize, outputs: usize, rows: usize, dtype: DType, device: &Device) {
    let what = format!("{rows} rows, {inputs} to {outputs}, {dtype:?}");
    let both = |shape: &[usize], scale, stream| both(shape, scale, stream, dtype, device);
    let scale = 1.0 / (inputs as f32).sqrt();
    let [x, host_x] = both(&[1, rows, inputs], 1.0, 1);
    let [residual, host_residual] = both(&[1, rows, outputs], 1.0, 2);
    let [gain, host_gain] = both(&[inputs], 1.0, 3);
    let layers: Vec<[[Tensor; 2]; 2]> = (0..3)
        .map(|side| [both(&[outputs, inputs], scale, 10 + side), both(&[outputs], 0.5, 20 + side)])
        .collect();
    let there = |side: usize| (operand(&layers[side][0][0]), Some(operand(&layers[side][1][0])));
    let here = |x: &Tensor, side: usize| {
        let bias = Some(operand(&layers[side][1][1]));
        ops::linear(x, operand(&layers[side][0][1]), bias, WeightLayout::OutIn).unwrap()
    };
    let onto = ops::linear_onto(&x, there(0), &residual).unwrap().expect("a kernel for it");
    expect_near(&what, &onto, &ops::add(here(&host_x, 0), &host_residual).unwrap(), dtype);
    // The same weight through the plain product.
    let plain = ops::linear(&x, there(0).0, there(0).1, WeightLayout::OutIn).unwrap();
    expect_near(&what, &plain, &here(&host_x, 0), dtype);
    let norm = || (operand(&gain), EPS);
    let normed = ops::normed_linears(&x, norm(), [there(0), there(1), there(2)]).unwrap();
    if dtype == DType::F16 && rows <= 16 {
        assert!(normed.is_none(), "{what}: a row times its gain can leave f16");
        return;
    }
    let host_normed = ops::rms_norm(&host_x, Some(operand(&host_gain)), EPS).unwrap();
    for (side, got) in normed.expect("a kernel for it").iter().enumerate() {
        expect_near(&format!("{what}, side {side}"), got, &here(&host_normed, side), dtype);
    }
    let gated = ops::normed_gate(&x, norm(), [there(0), there(1)], Activation::Silu).unwrap();
    let gate = ops::activate(here(&host_normed, 0), Activation::Silu).unwrap();
    let want = ops::mul(&gate, here(&host_normed, 1)).unwrap();
    expect_near(&format!("{what}, gated"), &gated.expect("a kernel for it"), &want, dtype);
}

#[test]
fn a_row_has_the_same_bits_in_company() {
    let Some(device) = device() else { return };
    autograd::no_grad(|| {
        let most = device.backend().most_few_rows(DType::BF16, true, None);
        let [x, _] = both(&[1, most, 2048], 1.0, 1, DType::BF16, &device);
        let [weight, _] = both(&[512, 2048], 0.02, 2, DType::BF16, &device);
        let [gain, _] = both(&[2048], 1.0, 3, DType::BF16, &device);
        let of = |x: &Tensor| {
            let [y] =
                ops::normed_linears(x, (operand(&gain), EPS), [(operand(&weight), None)]).unwrap().unwrap();
            y.to_vec_f32().unwrap()
        };
        // Each of the two kernels: up to 16 rows, and more.
        for (whole, parts) in [(16, [1, 3, 8, 11]), (most, [17, 20, 31, 32])] {
            let all = of(&x.slice(0, [1, whole, 2048]).unwrap());
            for rows in parts.into_iter().filter(|rows| *rows <= whole) {
                assert_eq!(of(&x.slice(0, [1, rows, 2048]).unwrap()), all[..rows * 512], "{rows} rows");
            }
        }
    });
}

#[test]
fn a_row_by_weights_of_few_bits_has_the_same_bits_in_company() {
    let Some(device) = device() else { return };
    autograd::no_grad(|| {
        for bits in [PackedBits::Eight, PackedBits::Four, PackedBits::Float8] {
            let spread = Initializer::Normal { mean: 0.0, std: 0.02 };
            let params = [Param::new("w", [512, 2048], spread)];
            let packing = Packing { bits, layout: WeightLayout::OutIn };
            let source = FromInitializers { seed: 4 };
            let _store =
                PackedStore::attach(&params, DType::BF16, &device, &source, |_| Some(packing)).unwrap();
            let [x, _] = both(&[1, 16, 2048], 1.0, 1, DType::BF16, &device);
            let [gain, _] = both(&[2048], 1.0, 3, DType::BF16, &device);
            let of = |x: &Tensor| {
                let layer = (Operand::from(&params[0]), None);
                let [y] = ops::normed_linears(x, (operand(&gain), EPS), [layer]).unwrap().unwrap();
                y.to_vec_f32().unwrap()
            };
            let all = of(&x);
            for rows in [1, 3, 8, 11] {
                let some = of(&x.slice(0, [1, rows, 2048]).unwrap());
                assert_eq!(some, all[..rows * 512], "{bits:?}, {rows} rows");
            }
        }
    });
}

#[test]
fn what_no_kernel_takes_is_left_to_the_layers() {
    let Some(device) = device() else { return };
    let [x, _] = both(&[1, 33, 64], 1.0, 1, DType::BF16, &device);
    let [weight, _] = both(&[16, 64], 1.0, 2, DType::BF16, &device);
    let [residual, _] = both(&[1, 33, 16], 1.0, 2, DType::BF16, &device);
    assert!(ops::linear_onto(&x, (operand(&weight), None), &residual).unwrap().is_none(), "33 rows");
    let few = x.slice(0, [1, 2, 64]).unwrap();
    assert!(ops::linear_onto(&few, (operand(&weight), None), &residual).is_err(), "33 rows onto 2");
    let host = Tensor::zeros([1, 2, 64], DType::F32, &ferrospeed_cpu::device()).unwrap();
    let weight = Tensor::zeros([16, 64], DType::F32, &ferrospeed_cpu::device()).unwrap();
    let onto = Tensor::zeros([1, 2, 16], DType::F32, &ferrospeed_cpu::device()).unwrap();
    assert!(ops::linear_onto(&host, (operand(&weight), None), &onto).unwrap().is_none(), "the host");
}

#[test]
fn few_rows_by_weights_of_few_bits_are_what_the_layers_give_one_by_one() {
    let Some(device) = device() else { return };
    autograd::no_grad(|| {
        for bits in [PackedBits::Eight, PackedBits::Four, PackedBits::Float8] {
            for (inputs, outputs) in [(64, 16), (2048, 520), (5632, 250)] {
                for rows in [1, 2, 3, 8, 9, 16] {
                    for dtype in [DType::BF16, DType::F16] {
                        compare_packed(bits, inputs, outputs, rows, dtype, &device);
                    }
                }
            }
        }
    });
}

/// What sums of rows in steps of eight bits may differ by: those of floats are wider near the largest.
fn step_of(bits: PackedBits) -> f32 {
    if bits == PackedBits::Float8 { 0.25 } else { 0.05 }
}

/// The layers one by one round rows that were rounded to the type already, so that a step of eight bits may lie between.
fn compare_packed(
    bits: PackedBits,
    inputs: usize,
    outputs: usize,
    rows: usize,
    dtype: DType,
    device: &Device,
) {
    let what = format!("{bits:?}, {rows} rows, {inputs} to {outputs}, {dtype:?}");
    let spread = Initializer::Normal { mean: 0.0, std: 1.0 / (inputs as f32).sqrt() };
    let params: Vec<Param> =
        (0..3).map(|side| Param::new(format!("w{side}"), [outputs, inputs], spread)).collect();
    let packing = Packing { bits, layout: WeightLayout::OutIn };
    let _store =
        PackedStore::attach(&params, dtype, device, &FromInitializers { seed: 4 }, |_| Some(packing))
            .unwrap();
    let [x, _] = both(&[1, rows, inputs], 1.0, 1, dtype, device);
    let [residual, _] = both(&[1, rows, outputs], 1.0, 2, dtype, device);
    let [gain, _] = both(&[inputs], 1.0, 3, dtype, device);
    let [bias, _] = both(&[outputs], 0.5, 4, dtype, device);
    let of = |side: usize| (Operand::from(&params[side]), (side != 1).then(|| operand(&bias)));
    let alone =
        |x: &Tensor, side: usize| ops::linear(x, of(side).0, of(side).1, WeightLayout::OutIn).unwrap();
    let onto = ops::linear_onto(&x, of(0), &residual).unwrap().expect("a kernel for it");
    expect_within(&what, &onto, &ops::add(alone(&x, 0), &residual).unwrap(), step_of(bits));
    let normed = ops::rms_norm(&x, Some(operand(&gain)), EPS).unwrap();
    let results = ops::normed_linears(&x, (operand(&gain), EPS), [of(0), of(1), of(2)]).unwrap();
    for (side, got) in results.expect("a kernel for it").iter().enumerate() {
        expect_within(&format!("{what}, side {side}"), got, &alone(&normed, side), step_of(bits));
    }
    let gated = ops::normed_gate(&x, (operand(&gain), EPS), [of(0), of(1)], Activation::Silu).unwrap();
    let want = ops::gated(Activation::Silu, alone(&normed, 0), alone(&normed, 1)).unwrap();
    expect_within(&format!("{what}, gated"), &gated.expect("a kernel for it"), &want, step_of(bits));
}
