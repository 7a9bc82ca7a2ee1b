//! Products with weights of 8 and 4 bits, and the store that holds them.

use ferrospeed_tensor::ops::{self, WeightLayout};
use ferrospeed_tensor::random::RandomKey;
use ferrospeed_tensor::store::{FromInitializers, PackedStore};
use ferrospeed_tensor::{
    Activation, DType, Device, Initializer, Operand, PackedBits, Packing, Param, Tensor, autograd,
};
use ferrospeed_testkit::close::assert_close;

const STD: Initializer = Initializer::Normal { mean: 0.0, std: 0.2 };

fn random(shape: &[usize], dtype: DType, device: &Device) -> Tensor {
    let mut values = vec![0.0f32; shape.iter().product()];
    RandomKey::new(2, 9).fill_normal(0, &mut values);
    Tensor::from_f32(&values, shape, dtype, device).unwrap()
}

/// Rows as products with packed weights take them: blocks of 32 in 254 steps.
fn rounded(x: &Tensor) -> Tensor {
    let mut values = x.to_vec_f32().unwrap();
    for block in values.chunks_mut(32) {
        let largest = block.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
        block
            .iter_mut()
            .for_each(|value| *value = (*value * (127.0 / largest)).round_ties_even() * (largest / 127.0));
    }
    Tensor::from_f32(&values, x.sizes(), DType::F32, x.device()).unwrap()
}

/// A weight and a bias, the weight packed.
fn layer(outputs: usize, inputs: usize, bits: PackedBits, dtype: DType, device: &Device) -> [Param; 2] {
    let params = [Param::new("w", [outputs, inputs], STD), Param::new("b", [outputs], STD)];
    let of = |param: &Param| (param.name() == "w").then_some(Packing { bits, layout: WeightLayout::OutIn });
    PackedStore::attach(&params, dtype, device, &FromInitializers { seed: 1 }, of).unwrap();
    params
}

fn product(x: &Tensor, [weight, bias]: &[Param; 2]) -> Vec<f32> {
    let bias = Some(Operand::from(bias));
    let y = autograd::no_grad(|| {
        ops::linear_activation(x, weight, bias, WeightLayout::OutIn, Some(Activation::GeluTanh))
    });
    y.unwrap().to_vec_f32().unwrap()
}

#[test]
fn a_product_with_packed_weights_is_the_one_with_what_they_stand_for() {
    for (bits, dtype) in [PackedBits::Eight, PackedBits::Four]
        .into_iter()
        .flat_map(|bits| [DType::F32, DType::BF16, DType::F16].map(|dtype| (bits, dtype)))
    {
        for [m, n, k] in [[1, 70, 96], [5, 33, 64], [40, 1, 32], [3, 200, 320], [49, 33, 128]] {
            let device = ferrospeed_cpu::with_threads(2);
            let params = layer(n, k, bits, dtype, &device);
            let x = random(&[m, k], dtype, &device);
            // A tensor is no packed weight: this is the ordinary product.
            let whole = params[0].read().unwrap().to_vec_f32().unwrap();
            let whole = Tensor::from_f32(&whole, [n, k], DType::F32, &device).unwrap();
            let bias = params[1].read().unwrap().to_vec_f32().unwrap();
            let bias = Tensor::from_f32(&bias, [n], DType::F32, &device).unwrap();
            let wide = rounded(&ops::cast(&x, DType::F32).unwrap());
            let expected = ops::linear_activation(
                &wide,
                &whole,
                Some((&bias).into()),
                WeightLayout::OutIn,
                Some(Activation::GeluTanh),
            );
            let tolerance = if dtype == DType::F32 { 1e-4 } else { 3e-2 };
            let what = format!("{bits:?} {dtype} {m}x{n}x{k}");
            assert_close(
                &what,
                &product(&x, &params),
                &expected.unwrap().to_vec_f32().unwrap(),
                tolerance,
                tolerance,
            );
        }
    }
}

#[test]
fn a_gpu_multiplies_packed_weights_as_the_processor_does_and_few_rows_alike_in_any_company() {
    if ferrospeed_cuda::device_count() == 0 {
        return ferrospeed_testkit::skip::skip("no CUDA device");
    }
    let (host, gpu) =
        (ferrospeed_cpu::device(), ferrospeed_cuda::device(0, &ferrospeed_cpu::device()).unwrap());
    for (bits, dtype) in [PackedBits::Eight, PackedBits::Four, PackedBits::Float8]
        .into_iter()
        .flat_map(|bits| [DType::F32, DType::BF16, DType::F16].map(|dtype| (bits, dtype)))
    {
        for [m, n, k] in [[1, 70, 96], [5, 33, 64], [9, 1, 32], [40, 200, 320], [130, 48, 1504]] {
            let params = layer(n, k, bits, dtype, &gpu);
            let x = random(&[m, k], dtype, &gpu);
            let found = product(&x, &params);
            let what = format!("{bits:?} {dtype} {m}x{n}x{k}");
            let expected = if bits == PackedBits::Float8 {
                // The processor multiplies by what the weights stand for, and rows have three bits of fraction less.
                let whole = params[0].read().unwrap();
                let bias = params[1].read().unwrap();
                let y = ops::linear_activation(
                    &x,
                    &*whole,
                    Some((&*bias).into()),
                    WeightLayout::OutIn,
                    Some(Activation::GeluTanh),
                );
                y.unwrap().to_vec_f32().unwrap()
            } else {
                let x = Tensor::from_f32(&x.to_vec_f32().unwrap(), [m, k], dtype, &host).unwrap();
                product(&x, &layer(n, k, bits, dtype, &host))
            };
            let size = (k as f32).sqrt() * 0.2;
            let band = match (bits, dtype) {
                (PackedBits::Float8, _) => 0.2 * size,
                // Many rows are not rounded.
                _ if m > 16 => 4e-2 * size,
                (_, DType::F32) => 1e-5 * size,
                _ => 1e-2 * size,
            };
            assert_close(&what, &found, &expected, band, if dtype == DType::F32 { 1e-5 } else { 1e-2 });
            // Up to sixteen rows know nothing of each other.
            let few = product(&ops::narrow(&x, 0, 0, m.min(16)).unwrap(), &params);
            for rows in [1, m.min(16) / 2] {
                let some = product(&ops::narrow(&x, 0, 0, rows).unwrap(), &params);
                assert!(some == few[..rows * n], "{what}: {rows} rows");
            }
        }
    }
}

#[test]
fn floats_of_eight_bits_are_refused_where_nothing_multiplies_them() {
    let params = [Param::new("w", [4, 32], STD)];
    let packing = Packing { bits: PackedBits::Float8, layout: WeightLayout::OutIn };
    let store = PackedStore::attach(
        &params,
        DType::F32,
        &ferrospeed_cpu::device(),
        &FromInitializers { seed: 1 },
        |_| Some(packing),
    );
    let error = store.err().expect("the processor has no such products").to_string();
    assert!(error.contains("fp8") && error.contains("take int8"), "{error}");
}

#[test]
fn a_row_has_the_same_bits_in_any_company_and_on_any_number_of_threads() {
    // Of odd numbers of blocks, and of even ones, of which tiles multiply many rows.
    for (bits, inputs) in [PackedBits::Eight, PackedBits::Four]
        .into_iter()
        .flat_map(|bits| [160, 192].map(|inputs| (bits, inputs)))
    {
        let result = |rows: usize, threads: usize| {
            let device = ferrospeed_cpu::with_threads(threads);
            let params = layer(100, inputs, bits, DType::BF16, &device);
            let x = random(&[50, inputs], DType::BF16, &device);
            product(&ops::narrow(&x, 0, 0, rows).unwrap(), &params)
        };
        let all = result(50, 1);
        for (rows, threads) in [(1, 1), (2, 2), (7, 1), (12, 1), (16, 2), (24, 1), (26, 2), (33, 2), (50, 3)]
        {
            let what = format!("{bits:?} by {inputs}: {rows} rows, {threads} threads");
            assert_eq!(result(rows, threads), all[..rows * 100], "{what}");
        }
    }
}

#[test]
fn a_weight_that_lies_the_other_way_round_gives_the_same_product() {
    let device = ferrospeed_cpu::with_threads(2);
    let straight = Param::new("w", [48, 64], STD);
    let turned = Param::new("t", [64, 48], STD);
    let source = FromInitializers { seed: 1 };
    let packing = |layout| Packing { bits: PackedBits::Eight, layout };
    let [straight, turned] =
        [(straight, WeightLayout::OutIn), (turned, WeightLayout::InOut)].map(|(param, layout)| {
            PackedStore::attach(std::slice::from_ref(&param), DType::F32, &device, &source, |_| {
                Some(packing(layout))
            })
            .unwrap();
            (param, layout)
        });
    // Every reader gets the parameter in its own shape; a product with it is that with the packed bytes, up to rows' rounding.
    for (param, layout) in [straight, turned] {
        let x = random(&[3, 64], DType::F32, &device);
        let whole = param.read().unwrap().to_vec_f32().unwrap();
        let whole = Tensor::from_f32(&whole, param.shape().sizes(), DType::F32, &device).unwrap();
        let product = |x: &Tensor, weight: Operand| {
            autograd::no_grad(|| ops::linear(x, weight, None, layout)).unwrap().to_vec_f32().unwrap()
        };
        let expected = product(&rounded(&x), (&whole).into());
        assert_close("layout", &product(&x, (&param).into()), &expected, 1e-4, 1e-4);
    }
}

#[test]
fn packed_weights_take_little_memory_and_no_gradients() {
    let device = ferrospeed_cpu::with_threads(1);
    let params = [Param::new("w", [64, 96], STD), Param::new("b", [64], STD)];
    let packing = |bits| Packing { bits, layout: WeightLayout::OutIn };
    let of = |param: &Param| (param.name() == "w").then(|| packing(PackedBits::Four));
    let store =
        PackedStore::attach(&params, DType::BF16, &device, &FromInitializers { seed: 1 }, of).unwrap();
    assert_eq!(store.size_bytes(), 64 * 96 / 32 * 18 + 2 * 64);
    let x = random(&[3, 96], DType::BF16, &device);
    let y = ops::linear(&x, &params[0], None, WeightLayout::OutIn).unwrap();
    let loss = ops::sum(ops::cast(&y, DType::F32).unwrap()).unwrap();
    let error = autograd::backward(&loss).unwrap_err().to_string();
    assert!(error.contains("for reading"), "{error}");
    let odd = [Param::new("w", [64, 40], STD)];
    let refused = PackedStore::attach(&odd, DType::F32, &device, &FromInitializers { seed: 1 }, |_| {
        Some(packing(PackedBits::Eight))
    });
    assert!(refused.err().unwrap().to_string().contains("40 inputs"));
}
