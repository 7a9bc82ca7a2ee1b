//! Every op on the GPU against the same op on the CPU, over odd shapes and all float types, with its gradients.
//!
//! Without a device each test says so and passes: there is nothing to compare.

use ferrospeed_tensor::backend::{Clipping, Comparison, Update, UpdateOperands, sum_of_words};
use ferrospeed_tensor::beside::{Beside, Moment};
use ferrospeed_tensor::ops::{
    self, AttentionOptions, CrossEntropyOptions, GroupWeights, MlpWeights, PackedHeads, Routes, WeightLayout,
};
use ferrospeed_tensor::random::{self, RandomKey, RandomState};
use ferrospeed_tensor::store::{FromInitializers, PlainStore};
use ferrospeed_tensor::{
    Activation, Category, DType, Device, Documents, Initializer, Operand, Out, Param, Result, Tensor,
    TensorError, Window2d, autograd, cuda, rows_alone,
};

const TYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// The device, or `None` with a word about it.
fn device() -> Option<Device> {
    if cuda::device_count() == 0 {
        ferrospeed_testkit::skip::skip("no CUDA device");
        return None;
    }
    Some(Device::cuda(0).expect("a device is there"))
}

fn normal(shape: &[usize], stream: u32) -> Vec<f32> {
    let mut values = vec![0.0f32; shape.iter().product()];
    RandomKey::new(5, stream).fill_normal(0, &mut values);
    values
}

/// Inputs that remember their gradients.
struct Inputs<'a> {
    device: &'a Device,
    dtype: DType,
    tracked: Vec<Tensor>,
}

impl Inputs<'_> {
    fn input(&mut self, shape: &[usize]) -> Tensor {
        self.input_by(shape, |value| value)
    }

    fn input_by(&mut self, shape: &[usize], map: impl Fn(f32) -> f32) -> Tensor {
        let values: Vec<f32> = normal(shape, self.tracked.len() as u32 + 1).into_iter().map(map).collect();
        let tensor = Tensor::from_f32(&values, shape, self.dtype, self.device).unwrap().tracked();
        self.tracked.push(tensor.clone());
        tensor
    }

    fn constant<T: ferrospeed_tensor::dtype::Element>(&self, values: &[T], shape: &[usize]) -> Tensor {
        Tensor::from_slice(values, shape, self.device).unwrap()
    }
}

type Op<'a> = &'a dyn Fn(&mut Inputs<'_>) -> Result<Vec<Tensor>>;

/// Results and the gradients of all inputs, from one fixed gradient of the results.
fn run(op: Op<'_>, dtype: DType, device: &Device) -> Vec<Vec<f32>> {
    random::set_state(RandomState { seed: 3, step: 1, next_stream: 0 });
    let mut inputs = Inputs { device, dtype, tracked: Vec::new() };
    let outputs = op(&mut inputs).unwrap();
    let seeds: Vec<(Tensor, Tensor)> = outputs
        .iter()
        .filter(|output| output.requires_grad())
        .enumerate()
        .map(|(index, output)| {
            let values = normal(output.sizes(), 100 + index as u32);
            let seed = Tensor::from_f32(&values, *output.shape(), output.dtype(), device).unwrap();
            (output.clone(), seed)
        })
        .collect();
    if !seeds.is_empty() {
        autograd::backward_with(&seeds).unwrap();
    }
    let gradients = inputs.tracked.iter().filter_map(Tensor::grad);
    let floats = |tensor: Tensor| match tensor.dtype() {
        dtype if dtype.is_float() => tensor.to_vec_f32().unwrap(),
        DType::I64 => tensor.to_vec::<i64>().unwrap().into_iter().map(|value| value as f32).collect(),
        _ => tensor.to_vec::<u8>().unwrap().into_iter().map(f32::from).collect(),
    };
    outputs.iter().map(Tensor::detach).chain(gradients).map(floats).collect()
}

/// How far apart results may be, relative to the largest: a few roundings of the type.
fn tolerance(dtype: DType) -> f32 {
    match dtype {
        DType::F32 => 1e-5,
        DType::BF16 => 2e-2,
        _ => 3e-3,
    }
}

fn compare_in(types: &[DType], what: &str, op: Op<'_>) {
    let Some(gpu) = device() else { return };
    let cpu = Device::cpu();
    for &dtype in types {
        let (ours, truth) = (run(op, dtype, &gpu), run(op, dtype, &cpu));
        assert_eq!(ours.len(), truth.len(), "{what} {dtype}: number of results and gradients");
        for (index, (ours, truth)) in ours.iter().zip(&truth).enumerate() {
            assert_eq!(ours.len(), truth.len(), "{what} {dtype} result {index}");
            let scale = truth.iter().filter(|v| v.is_finite()).fold(0.1f32, |most, v| most.max(v.abs()));
            for (i, (a, b)) in ours.iter().zip(truth).enumerate() {
                let close = (a - b).abs() <= tolerance(dtype) * scale || a == b || (a.is_nan() && b.is_nan());
                assert!(
                    close,
                    "{what} {dtype}: result {index}, element {i} is {a} on the GPU and {b} on the CPU"
                );
            }
        }
        // The same bits again.
        assert!(bits(&ours) == bits(&run(op, dtype, &gpu)), "{what} {dtype}: a second run gave other bits");
    }
}

fn bits(results: &[Vec<f32>]) -> Vec<Vec<u32>> {
    results.iter().map(|values| values.iter().map(|value| value.to_bits()).collect()).collect()
}

fn compare(what: &str, op: Op<'_>) {
    compare_in(&TYPES, what, op);
}

#[test]
fn elementwise_functions_and_their_gradients() {
    for shape in [&[1][..], &[7, 13], &[3, 1000]] {
        for activation in Activation::ALL {
            compare("activate", &|i| Ok(vec![ops::activate(i.input(shape), activation)?]));
            compare("gated", &|i| Ok(vec![ops::gated(activation, i.input(shape), i.input(shape))?]));
        }
        let positive = |v: f32| v.abs() + 0.5;
        compare("exp", &|i| Ok(vec![ops::exp(i.input(shape))?]));
        compare("log", &|i| Ok(vec![ops::log(i.input_by(shape, positive))?]));
        compare("sqrt", &|i| Ok(vec![ops::sqrt(i.input_by(shape, positive))?]));
        compare("square", &|i| Ok(vec![ops::square(i.input(shape))?]));
        compare("abs", &|i| Ok(vec![ops::abs(i.input(shape))?]));
        compare("affine", &|i| Ok(vec![ops::affine(i.input(shape), 2.5, -1.0)?]));
        compare("power", &|i| Ok(vec![ops::power(i.input_by(shape, positive), 1.5)?]));
        compare("dropout", &|i| Ok(vec![ops::dropout(i.input(shape), 0.3)?]));
    }
}

#[test]
fn broadcasts_comparisons_and_selections() {
    for (left, right) in [
        (&[4, 5][..], &[4, 5][..]),
        (&[4, 5], &[5]),
        (&[3, 1, 7], &[2, 1]),
        (&[2, 3, 4, 5], &[3, 1, 5]),
        (&[1], &[6, 8]),
    ] {
        compare("add", &|i| Ok(vec![ops::add(i.input(left), i.input(right))?]));
        compare("sub", &|i| Ok(vec![ops::sub(i.input(left), i.input(right))?]));
        compare("mul", &|i| Ok(vec![ops::mul(i.input(left), i.input(right))?]));
        compare("div", &|i| Ok(vec![ops::div(i.input(left), i.input_by(right, |v| v.abs() + 0.5))?]));
        for comparison in [Comparison::Equal, Comparison::Less, Comparison::LessEqual] {
            compare("compare", &|i| Ok(vec![ops::compare(comparison, &i.input(left), &i.input(right))?]));
        }
    }
    // Gradients that sum few long rows.
    for width in [300_000, 270_001] {
        compare("add", &|i| Ok(vec![ops::add(i.input(&[3, width]), i.input(&[width]))?]));
    }
    compare("select", &|i| {
        let mask = i.constant(&[1u8, 0, 0, 1, 1], &[5]);
        Ok(vec![ops::select(&mask, i.input(&[4, 5]), i.input(&[4, 1]))?])
    });
}

#[test]
fn shapes_and_reductions() {
    compare("permute", &|i| Ok(vec![ops::permute(i.input(&[3, 4, 5, 6]), &[2, 0, 3, 1])?]));
    compare("narrow", &|i| Ok(vec![ops::narrow(i.input(&[3, 9, 5]), 1, 2, 4)?]));
    compare("narrow", &|i| Ok(vec![ops::narrow(i.input(&[6, 16]), 1, 8, 8)?]));
    compare("concat", &|i| Ok(vec![ops::concat(&[i.input(&[3, 2, 5]), i.input(&[3, 4, 5])], 1)?]));
    for shape in [&[5, 7][..], &[2, 300, 3], &[4, 3000], &[6, 1, 9]] {
        for dim in 0..shape.len() {
            compare("sum_dim", &|i| Ok(vec![ops::sum_dim(i.input(shape), dim)?]));
            compare("mean_dim", &|i| Ok(vec![ops::mean_dim(i.input(shape), dim)?]));
        }
        compare("sum", &|i| Ok(vec![ops::sum(i.input(shape))?]));
        compare("softmax", &|i| Ok(vec![ops::softmax(i.input(shape))?]));
        compare("log_softmax", &|i| Ok(vec![ops::log_softmax(i.input(shape))?]));
    }
    compare("cumsum", &|i| Ok(vec![ops::cumsum(i.input(&[3, 40]))?]));
    compare_in(&[DType::F32], "top_k", &|i| {
        let (values, indices) = ops::top_k(&i.input(&[5, 100]), 7)?;
        Ok(vec![values, indices])
    });
}

#[test]
fn casts_between_all_types() {
    let all = [DType::F32, DType::BF16, DType::F16, DType::I64, DType::I32, DType::U8, DType::Bool];
    for from in all {
        for to in all {
            compare_in(&[DType::F32], "cast", &|i| {
                let values: Vec<f32> = (0..41).map(|v| v as f32).collect();
                let there = ops::cast(i.constant(&values, &[41]), from)?;
                Ok(vec![ops::cast(&ops::cast(&there, to)?, DType::F32)?])
            });
        }
    }
}

#[test]
fn products_with_bias_and_activation() {
    for [m, n, k] in [
        [1, 1, 1],
        [1, 70, 33],
        [8, 64, 50],
        [33, 31, 65],
        [64, 512, 40],
        [70, 1032, 130],
        [256, 768, 768],
        [1, 64, 40],
        [3, 2304, 768],
        [4, 760, 3072],
    ] {
        for layout in [WeightLayout::OutIn, WeightLayout::InOut] {
            // Sums of unit size: far outside, an activation's slope magnifies every rounding.
            let unit = |v: f32| v / (k as f32).sqrt();
            let weight = if layout == WeightLayout::OutIn { [n, k] } else { [k, n] };
            compare("linear", &|i| {
                let (x, w, b) = (i.input(&[m, k]), i.input_by(&weight, unit), i.input(&[n]));
                Ok(vec![ops::linear(&x, &w, Some((&b).into()), layout)?])
            });
            for activation in [Activation::GeluTanh, Activation::Silu] {
                compare("linear_activation", &|i| {
                    let (x, w, b) = (i.input(&[m, k]), i.input_by(&weight, unit), i.input(&[n]));
                    Ok(vec![ops::linear_activation(&x, &w, Some((&b).into()), layout, Some(activation))?])
                });
            }
        }
    }
    compare("matmul", &|i| Ok(vec![ops::matmul(i.input(&[3, 2, 17, 9]), i.input(&[3, 2, 9, 21]))?]));
    for (activation, tokens, inner) in [
        (Activation::GeluTanh, 24, 64),
        (Activation::GeluErf, 5, 64),
        (Activation::GeluTanh, 700, 264),
        (Activation::Silu, 3, 1024),
        // Not whole packs; too wide to be kept after the activation.
        (Activation::GeluTanh, 9, 60),
        (Activation::GeluTanh, 150, 3080),
        (Activation::QuickGelu, 20, 3100),
    ] {
        compare("mlp", &|i| {
            let x = i.input(&[tokens, 16]);
            let unit = |v: f32| v / 4.0;
            let (up, up_bias) = (i.input_by(&[16, inner], unit), i.input(&[inner]));
            let (down, down_bias) = (i.input_by(&[inner, 16], unit), i.input(&[16]));
            let up = ((&up).into(), Some((&up_bias).into()));
            let down = ((&down).into(), Some((&down_bias).into()));
            Ok(vec![ops::mlp(&x, up, down, WeightLayout::InOut, activation)?])
        });
        compare("gated mlp", &|i| {
            let x = i.input(&[tokens, 16]);
            let mut weight = |shape: [usize; 2]| (Operand::from(&i.input_by(&shape, |v| v / 4.0)), None);
            let layers = [weight([inner, 16]), weight([inner, 16]), weight([16, inner])];
            Ok(vec![ops::gated_mlp(&x, layers, WeightLayout::OutIn, activation)?])
        });
    }
}

/// Experts of `[width, inner]` and back for tokens that choose `chosen` of them; id `groups` goes nowhere.
fn mixture(
    i: &mut Inputs<'_>,
    ids: &[i64],
    chosen: usize,
    groups: usize,
    sizes: [usize; 2],
) -> Result<Vec<Tensor>> {
    let (tokens, [width, inner]) = (ids.len() / chosen, sizes);
    let routes = Routes::new(&i.constant(ids, &[tokens, chosen]), groups)?;
    let rows = routes.spread(i.input(&[tokens, width]))?;
    let small = |value: f32| value / (width as f32).sqrt();
    let up: Vec<_> = (0..groups).map(|_| i.input_by(&[inner, width], small).into()).collect();
    let biases: Vec<_> = (0..groups).map(|_| i.input(&[inner]).into()).collect();
    let (up, biases) = (GroupWeights::Each(up), GroupWeights::Each(biases));
    let hidden = ops::grouped_linear(&rows, routes.counts(), &up, Some(&biases), WeightLayout::OutIn)?;
    let down = GroupWeights::Stacked(i.input_by(&[groups, inner, width], small).into());
    let rows = ops::grouped_linear(&hidden, routes.counts(), &down, None, WeightLayout::InOut)?;
    let gates: Vec<f32> = (0..ids.len()).map(|slot| 0.25 + (slot % 5) as f32 / 8.0).collect();
    let gates = i.constant(&gates, &[tokens, chosen]).tracked();
    i.tracked.push(gates.clone());
    Ok(vec![routes.counts().clone(), routes.order().clone(), routes.collect(&rows, &gates)?])
}

#[test]
fn rows_by_group_and_their_products() {
    // Odd sizes go through the plain kernels, multiples of eight through the tensor cores where the type allows.
    for (tokens, chosen, groups, sizes) in [
        (1, 1, 1, [8, 8]),
        (5, 2, 3, [7, 5]),
        (64, 2, 4, [64, 96]),
        (300, 2, 8, [136, 264]),
        (1000, 3, 7, [48, 40]),
        (700, 4, 130, [32, 16]),
        (2600, 1, 2, [72, 200]),
    ] {
        // Unevenly: the second group gets none, some slots go nowhere.
        let ids: Vec<i64> = (0..tokens * chosen)
            .map(|slot| match (slot * 7919 % 1009) % (groups + 1) {
                1 => 0,
                id => id as i64,
            })
            .collect();
        compare("rows by group", &|i| mixture(i, &ids, chosen, groups, sizes));
    }
    let nowhere = [2i64; 12];
    compare("rows that all go nowhere", &|i| mixture(i, &nowhere, 2, 2, [16, 16]));
    compare("no tokens", &|i| mixture(i, &[], 2, 2, [16, 16]));
}

#[test]
fn a_group_out_of_range_is_reported_by_the_next_copy() {
    let Some(gpu) = device() else { return };
    let ids = Tensor::from_slice(&[0i64, 4], [2, 1], &gpu).unwrap();
    let routes = Routes::new(&ids, 3).unwrap();
    let error = routes.counts().to_vec::<i64>().unwrap_err();
    assert!(matches!(error, TensorError::IndexOutOfRange { index: 4, limit: 4, .. }), "{error}");
}

#[test]
fn norms() {
    for (rows, width) in
        [(1, 8), (5, 33), (2500, 256), (70, 768), (301, 1024), (9, 2048), (3, 5000), (7, 8192), (4, 20_000)]
    {
        compare("layer_norm", &|i| {
            let (x, w, b) = (i.input(&[rows, width]), i.input(&[width]), i.input(&[width]));
            Ok(vec![ops::layer_norm(&x, Some((&w).into()), Some((&b).into()), 1e-5)?])
        });
        compare("rms_norm", &|i| {
            let (x, w) = (i.input(&[rows, width]), i.input(&[width]));
            Ok(vec![ops::rms_norm(&x, Some((&w).into()), 1e-6)?])
        });
        compare("add_layer_norm", &|i| {
            let (x, r, w, b) =
                (i.input(&[rows, width]), i.input(&[rows, width]), i.input(&[width]), i.input(&[width]));
            let (sum, y) =
                ops::add_layer_norm(&x, Some((&r).into()), Some((&w).into()), Some((&b).into()), 1e-5)?;
            Ok(vec![sum, y])
        });
    }
}

#[test]
fn attention_in_every_variant() {
    let plain = |causal| AttentionOptions { causal, ..AttentionOptions::default() };
    // (batch, queries, keys, heads, key heads, dim): the last four are shapes that cuDNN takes.
    for [b, t, s, h, kv, d] in [
        [1, 1, 1, 1, 1, 8],
        [2, 5, 9, 4, 2, 40],
        [1, 70, 70, 3, 3, 64],
        [1, 1, 300, 2, 1, 128],
        [2, 128, 128, 2, 2, 64],
        [1, 200, 200, 4, 2, 64],
        [1, 256, 256, 2, 2, 128],
        [2, 64, 192, 2, 1, 64],
    ] {
        for causal in [false, true] {
            compare("attention", &|i| {
                let (q, k, v) = (i.input(&[b, t, h, d]), i.input(&[b, s, kv, d]), i.input(&[b, s, kv, d]));
                Ok(vec![ops::attention(&q, &k, &v, &plain(causal))?])
            });
        }
    }
    for layout in [PackedHeads::Thirds, PackedHeads::PerHead] {
        for (tokens, dim) in [(10, 16), (128, 64)] {
            compare("attention_packed", &|i| {
                Ok(vec![ops::attention_packed(&i.input(&[2, tokens, 3 * 2 * dim]), 2, layout, &plain(true))?])
            });
        }
    }
    let masked = |i: &Inputs<'_>, dropout: f32| AttentionOptions {
        causal: true,
        window: Some(6),
        key_mask: Some(i.constant(&(0..2 * 11).map(|s| u8::from(s % 5 != 1)).collect::<Vec<_>>(), &[2, 11])),
        alibi_slopes: Some(i.constant(&[0.5f32, 0.25], &[2])),
        dropout,
        ..AttentionOptions::default()
    };
    for dropout in [0.0, 0.4] {
        compare("masked attention", &|i| {
            let (q, k, v) = (i.input(&[2, 11, 2, 24]), i.input(&[2, 11, 1, 24]), i.input(&[2, 11, 1, 24]));
            let options = masked(i, dropout);
            Ok(vec![ops::attention(&q, &k, &v, &options)?])
        });
    }
    for interleaved in [false, true] {
        compare("rotary", &|i| {
            let table = |i: &Inputs<'_>, stream| i.constant(&normal(&[1, 6, 8], stream), &[1, 6, 8]);
            Ok(vec![ops::rotary(i.input(&[2, 6, 3, 20]), &table(i, 50), &table(i, 51), interleaved)?])
        });
    }
}

/// Documents in rows: by kernels that look at borders, and in 16 bits, where little has to be filled up, as batches of whole
/// sequences.
#[test]
fn attention_within_documents() {
    for borders in
        [vec![vec![0, 3, 4, 140, 300], vec![0, 300]], vec![vec![0, 150, 222, 300], vec![0, 1, 2, 300]]]
    {
        for (causal, window) in [(true, None), (true, Some(40)), (false, None)] {
            let options = |i: &Inputs<'_>| AttentionOptions {
                causal,
                window,
                documents: Some(Documents::new(borders.clone(), i.device).unwrap()),
                ..AttentionOptions::default()
            };
            compare("attention within documents", &|i| {
                let (q, k, v) =
                    (i.input(&[2, 300, 4, 64]), i.input(&[2, 300, 2, 64]), i.input(&[2, 300, 2, 64]));
                Ok(vec![ops::attention(&q, &k, &v, &options(i))?])
            });
            compare("packed attention within documents", &|i| {
                let qkv = i.input(&[2, 300, 3 * 2 * 40]);
                Ok(vec![ops::attention_packed(&qkv, 2, PackedHeads::Thirds, &options(i))?])
            });
            compare("attention within documents with slopes", &|i| {
                let slopes = Some(i.constant(&[0.5f32, 0.25], &[2]));
                let options = AttentionOptions { alibi_slopes: slopes, dropout: 0.3, ..options(i) };
                let (q, k, v) =
                    (i.input(&[2, 300, 2, 24]), i.input(&[2, 300, 1, 24]), i.input(&[2, 300, 1, 24]));
                Ok(vec![ops::attention(&q, &k, &v, &options)?])
            });
        }
    }
}

#[test]
fn perceptrons_in_chunks() {
    for chunk in [1, 16, 40, 64] {
        for (gated, layout) in
            [(false, WeightLayout::InOut), (true, WeightLayout::OutIn), (true, WeightLayout::InOut)]
        {
            compare("mlp_in_chunks", &|i| {
                let x = i.input(&[2, 30, 24]);
                let mut layer = |inputs: usize, outputs: usize| {
                    let shape =
                        if layout == WeightLayout::OutIn { [outputs, inputs] } else { [inputs, outputs] };
                    let weight = Operand::from(&i.input_by(&shape, |value| 0.2 * value));
                    (weight, Some(Operand::from(&i.input(&[outputs]))))
                };
                let gate = gated.then(|| layer(24, 40));
                let weights = MlpWeights { gate, up: layer(24, 40), down: layer(40, 24) };
                Ok(vec![ops::mlp_in_chunks(&x, weights, layout, Activation::Silu, chunk)?])
            });
        }
    }
}

/// Gradients of long sequences are computed in parts (with a window, with lengths that do not divide). Plain kernels in f32
/// are the reference; the same bits come every time.
#[test]
fn long_attention_in_parts() {
    let Some(gpu) = device() else { return };
    // (batch, tokens, heads, key heads, dim, window)
    for (b, t, h, kv, d, window) in [
        (1, 17_000, 8, 1, 64, None),
        (1, 16_500, 4, 2, 128, None),
        (2, 9_000, 16, 1, 64, Some(2_500)),
        (1, 12_345, 16, 2, 64, Some(4_096)),
        (3, 4_096, 32, 4, 64, Some(1_000)),
        (9, 2_048, 32, 4, 64, None),
    ] {
        let options = AttentionOptions { causal: true, window, ..AttentionOptions::default() };
        let op = |i: &mut Inputs<'_>| {
            let (q, k, v) = (i.input(&[b, t, h, d]), i.input(&[b, t, kv, d]), i.input(&[b, t, kv, d]));
            let round = |x: &Tensor| ops::cast(&ops::cast(x, DType::BF16)?, i.dtype);
            Ok(vec![ops::attention(&round(&q)?, &round(&k)?, &round(&v)?, &options)?])
        };
        let ours = run(&op, DType::BF16, &gpu);
        assert_eq!(ours, run(&op, DType::BF16, &gpu), "the same bits, {t} tokens");
        for (index, (ours, truth)) in ours.iter().zip(run(&op, DType::F32, &gpu)).enumerate() {
            let scale = truth.iter().fold(0.1f32, |most, v| most.max(v.abs()));
            let far =
                ours.iter().zip(&truth).position(|(a, b)| (a - b).abs() > tolerance(DType::BF16) * scale);
            assert_eq!(far, None, "{t} tokens, window {window:?}: result {index}");
        }
    }
}

/// Decodes `steps` tokens from empty caches; the result of each.
fn decode(inputs: &mut Inputs<'_>, kv_heads: usize, options: &AttentionOptions) -> Result<Vec<Tensor>> {
    let (batch, heads, dim, capacity) = (2, 6, 40, 9);
    let cache = || Tensor::zeros([batch, capacity, kv_heads, dim], inputs.dtype, inputs.device);
    let (mut keys, mut values) = (cache()?, cache()?);
    (0..capacity)
        .map(|step| {
            let place = inputs.constant(&[step as i64], &[1]);
            if kv_heads == heads {
                let qkv = inputs.input(&[batch, 1, 3 * heads * dim]).detach();
                let layout = if step % 2 == 0 { PackedHeads::Thirds } else { PackedHeads::PerHead };
                return ops::attention_packed_step(
                    &qkv,
                    heads,
                    layout,
                    [&mut keys, &mut values],
                    &place,
                    options,
                );
            }
            let mut input = |heads| inputs.input(&[batch, 1, heads, dim]).detach();
            let (q, k, v) = (input(heads), input(kv_heads), input(kv_heads));
            ops::attention_step([&q, &k, &v], [&mut keys, &mut values], &place, options)
        })
        .collect()
}

#[test]
fn decoding_steps_append_to_the_cache() {
    let causal = AttentionOptions { causal: true, ..Default::default() };
    compare("attention_step", &|i| decode(i, 6, &causal));
    compare("attention_step", &|i| decode(i, 2, &AttentionOptions { window: Some(3), ..causal.clone() }));
    compare("attention_step", &|i| {
        let slopes = Some(i.constant(&[0.5f32, 0.25, 0.1, 0.05, 0.02, 0.01], &[6]));
        decode(i, 3, &AttentionOptions { alibi_slopes: slopes, ..causal.clone() })
    });
}

#[test]
fn recorded_work_is_replayed_with_new_inputs() {
    let Some(gpu) = device() else { return };
    let before = gpu.memory_usage().current_total();
    let x = Tensor::zeros([3, 5], DType::F32, &gpu).unwrap();
    let y = Tensor::zeros([3, 5], DType::F32, &gpu).unwrap();
    let mut work = || gpu.backend().copy(&ops::affine(&ops::square(&x)?, 2.0, 1.0)?, Out::of_device(&y)?);
    work().unwrap();
    let recording = gpu.record(&mut work).unwrap().expect("work that needs no host can be recorded");
    assert_eq!(y.to_vec::<f32>().unwrap(), [1.0; 15], "recording runs nothing");
    for value in [1.0f32, 2.0, 3.0] {
        gpu.backend().fill(Out::of_device(&x).unwrap(), value).unwrap();
        // Memory that the recorded work uses between its ops must not be given to others.
        let others = ops::affine(Tensor::full([3, 5], value, DType::F32, &gpu).unwrap(), 1.0, 0.0).unwrap();
        recording.replay().unwrap();
        assert_eq!(y.to_vec::<f32>().unwrap(), [2.0 * value * value + 1.0; 15]);
        assert_eq!(others.to_vec::<f32>().unwrap(), [value; 15]);
    }
    let copies = &mut || x.to_vec::<f32>().map(drop);
    assert!(gpu.record(copies).unwrap().is_none(), "a copy to the host cannot be recorded");
    assert_eq!(y.to_vec::<f32>().unwrap(), [19.0; 15], "the stream works on");
    let leaving = &mut || ops::square(&x).map(std::mem::forget);
    assert!(gpu.record(leaving).unwrap_err().to_string().contains("left tensors alive"));
    let failing = &mut || Err(TensorError::argument("this", "went wrong"));
    assert!(gpu.record(failing).unwrap_err().to_string().contains("went wrong"));
    drop((recording, x, y));
    // What was forgotten on purpose is still counted: one block.
    assert!(gpu.memory_usage().current_total() - before <= 256);
}

#[test]
fn products_with_weights_that_lie_side_by_side_are_those_with_each() {
    let Some(device) = device() else { return };
    let sizes: [(&str, usize, usize); 6] =
        [("q", 96, 64), ("k", 32, 64), ("v", 32, 64), ("gate", 136, 64), ("up", 136, 64), ("down", 64, 136)];
    for dtype in TYPES {
        let params: Vec<Param> = sizes
            .iter()
            .map(|(name, outputs, inputs)| {
                Param::new(*name, [*outputs, *inputs], Initializer::Normal { mean: 0.0, std: 0.2 })
            })
            .collect();
        let _store = PlainStore::attach(&params, dtype, &device, &FromInitializers { seed: 3 }).unwrap();
        let weights = |index: usize| (Operand::from(&params[index]), None);
        for rows in [1, 3, 4, 5, 40, 256, 257] {
            let x = Tensor::from_f32(&normal(&[rows, 64], 1), [rows, 64], dtype, &device).unwrap();
            let work = || {
                let layers = [weights(0), weights(1), weights(2)];
                let mut all: Vec<Tensor> = ops::linears(&x, layers, WeightLayout::OutIn).unwrap().into();
                let layers = [weights(3), weights(4), weights(5)];
                all.push(ops::gated_mlp(&x, layers, WeightLayout::OutIn, Activation::Silu).unwrap());
                all.iter().map(|one| one.to_vec_f32().unwrap()).collect::<Vec<_>>()
            };
            let (apart, together) = autograd::no_grad(|| (work(), rows_alone(work)));
            for (part, (apart, together)) in apart.iter().zip(&together).enumerate() {
                let near = apart.iter().zip(together).all(|(a, b)| (a - b).abs() <= 0.02 + 0.02 * a.abs());
                assert!(
                    near && apart.iter().any(|value| *value != 0.0),
                    "{dtype}, {rows} rows, result {part}"
                );
            }
        }
    }
}

#[test]
fn losses_and_lookups() {
    for (rows, classes) in [(1, 2), (9, 33), (40, 1000), (301, 4104), (5, 50_304)] {
        let targets: Vec<i64> =
            (0..rows as i64).map(|r| if r % 4 == 3 { -100 } else { r * 7 % classes as i64 }).collect();
        for options in [
            CrossEntropyOptions::default(),
            CrossEntropyOptions { label_smoothing: 0.1, z_loss: 1e-3, ..CrossEntropyOptions::default() },
        ] {
            compare("cross_entropy", &|i| {
                Ok(vec![ops::cross_entropy(
                    i.input(&[rows, classes]),
                    &i.constant(&targets, &[rows]),
                    options,
                )?])
            });
            compare("linear_cross_entropy", &|i| {
                let (x, w) = (i.input(&[rows, 24]), i.input_by(&[classes, 24], |v| v * 0.2));
                let targets = i.constant(&targets, &[rows]);
                Ok(vec![ops::linear_cross_entropy(&x, &w, WeightLayout::OutIn, &targets, options)?])
            });
        }
    }
    for (rows, width, count) in [(10, 24, 100), (300, 7, 5), (50, 768, 1000), (5000, 16, 3000)] {
        let ids: Vec<i64> = (0..count as i64).map(|i| i * i * 31 % rows as i64).collect();
        compare("embedding", &|i| {
            Ok(vec![ops::embedding(i.input(&[rows, width]), &i.constant(&ids, &[count]))?])
        });
    }
    compare("index_select", &|i| {
        let indices = i.constant(&[2i64, 0, 2, 4], &[4]);
        Ok(vec![ops::index_select(i.input(&[3, 5, 6]), 1, &indices)?])
    });
    compare("gather", &|i| {
        let indices = i.constant(&[2i64, 0, 2, 4, 1, 1], &[3, 2]);
        Ok(vec![ops::gather(i.input(&[3, 5]), &indices)?])
    });
}

#[test]
fn images() {
    let window = Window2d { kernel: [3, 2], stride: [2, 1], padding: [1, 0] };
    compare("conv2d", &|i| {
        let (x, w, b) = (i.input(&[2, 3, 9, 8]), i.input(&[4, 3, 3, 2]), i.input(&[4]));
        Ok(vec![ops::conv2d(&x, &w, Some((&b).into()), window.stride, window.padding)?])
    });
    compare("max_pool2d", &|i| Ok(vec![ops::max_pool2d(&i.input(&[2, 3, 9, 8]), window)?]));
}

#[test]
fn an_index_out_of_range_is_reported_by_the_next_copy() {
    let Some(gpu) = device() else { return };
    let table = Tensor::zeros([10, 4], DType::F32, &gpu).unwrap();
    let ids = Tensor::from_slice(&[1i64, 12, 3], [3], &gpu).unwrap();
    let rows = ops::embedding(&table, &ids).unwrap();
    match rows.to_vec::<f32>() {
        Err(TensorError::IndexOutOfRange { op: "embedding", index: 12, position: 1, limit: 10 }) => {}
        other => panic!("{other:?}"),
    }
    assert_eq!(table.to_vec::<f32>().unwrap(), [0.0; 40], "the device goes on");
}

#[test]
fn memory_is_counted_and_running_out_is_an_error() {
    let Some(gpu) = device() else { return };
    let before = gpu.memory_usage().current(Category::Gradients);
    let tensor = Tensor::zeros_in([1000], DType::F32, &gpu, Category::Gradients).unwrap();
    assert_eq!(gpu.memory_usage().current(Category::Gradients) - before, 4096);
    drop(tensor);
    assert_eq!(gpu.memory_usage().current(Category::Gradients), before);
    let error = Tensor::empty([1usize << 50], DType::F32, &gpu).unwrap_err().to_string();
    assert!(error.contains("cannot allocate") && error.contains("bytes free"), "{error}");
    assert!(Tensor::zeros([10], DType::F32, &gpu).is_ok(), "the device goes on");
}

#[test]
fn optimizer_steps_and_exact_norms() {
    let Some(gpu) = device() else { return };
    let adam = Update::Adam {
        decoupled: true,
        betas: [0.9, 0.99],
        rest: [0.1, 0.01],
        eps: 1e-8,
        decay: 0.01,
        step_size: 0.1,
        inverse_root_correction: 1.2,
    };
    // Pieces of one step: whole chunks, less than one, and some that start where no pack does.
    let counts = [1, 77, 4096, 0, 100_003, 32_768];
    let total: usize = counts.iter().sum();
    let (w, g) = (normal(&[total], 1), normal(&[total], 2));
    let weights = Tensor::from_slice(&w, [total], &gpu).unwrap();
    let gradient = Tensor::from_f32(&g, [total], DType::BF16, &gpu).unwrap();
    let rounded = gradient.to_vec_f32().unwrap();
    let states = [0, 1].map(|_| Tensor::zeros([total], DType::F32, &gpu).unwrap());
    let copy = Tensor::zeros([total], DType::BF16, &gpu).unwrap();
    let mut start = 0;
    let pieces = counts.map(|count| {
        let cut = |flat: &Tensor| flat.slice(start, [count]).unwrap();
        let piece = UpdateOperands {
            weights: cut(&weights),
            gradient: cut(&gradient),
            states: states.iter().map(cut).collect(),
            copy: Some(cut(&copy)),
        };
        start += count;
        piece
    });
    gpu.backend().update(&adam, 0.5, &pieces).unwrap();
    let new = weights.to_vec::<f32>().unwrap();
    for i in 0..total {
        let g = f64::from(rounded[i]) * 0.5;
        let (m, v) = (0.1 * g, 0.01 * g * g);
        let truth = f64::from(w[i]) * 0.99 - 0.1 * m / (v.sqrt() * 1.2 + 1e-8);
        assert!((f64::from(new[i]) - truth).abs() < 1e-5, "element {i}: {} against {truth}", new[i]);
    }
    let expected: Vec<f32> = new.iter().map(|&v| half::bf16::from_f32(v).to_f32()).collect();
    assert_eq!(copy.to_vec_f32().unwrap(), expected);

    let gradients: Vec<&Tensor> = pieces.iter().map(|piece| &piece.gradient).collect();
    let largest = rounded.iter().fold(0.0f32, |most, v| most.max(v.abs()));
    assert_eq!(gpu.backend().largest_magnitude(&gradients).unwrap(), largest);
    let grid = 2f64.powi(40);
    let square = |&v: &f32| (f64::from(v) * f64::from(v) * grid).round_ties_even() as i64;
    let sum: i128 = rounded.iter().map(|v| i128::from(square(v))).sum();
    assert_eq!(gpu.backend().sum_of_squares(&gradients, grid).unwrap(), sum);
    // Piece by piece, on two grids at once.
    let mut measures = Tensor::zeros([5], DType::I64, &gpu).unwrap();
    for piece in &gradients {
        gpu.backend().measure_more(&[piece], &[grid, grid / 16.0], measures.out().unwrap()).unwrap();
    }
    let words: Vec<u64> = measures.to_vec::<i64>().unwrap().into_iter().map(i64::cast_unsigned).collect();
    assert_eq!(f32::from_bits(words[0] as u32), largest);
    assert_eq!(sum_of_words([words[1], words[2]]), sum);
    let coarse = gpu.backend().sum_of_squares(&gradients, grid / 16.0).unwrap();
    assert_eq!(sum_of_words([words[3], words[4]]), coarse);
    let bad = Tensor::from_slice(&[1.0f32, f32::NAN, 2.0], [3], &gpu).unwrap();
    assert!(!gpu.backend().largest_magnitude(&[&bad]).unwrap().is_finite());
}

#[test]
fn a_step_left_to_the_device_is_the_one_with_the_host_in_between() {
    let Some(gpu) = device() else { return };
    let backend = gpu.backend();
    let sgd = Update::Sgd { lr: 0.1, decay: 0.01, momentum: 0.0, entering: 1.0, nesterov: false };
    let count = 70_001;
    let weights = || Tensor::from_f32(&normal(&[count], 1), [count], DType::F32, &gpu).unwrap();
    for (scale, limit) in [(1.0, Some(1.0)), (1.0, None), (1024.0, Some(1e9)), (3.0e-30, Some(0.5))] {
        let values: Vec<f32> = normal(&[count], 2).into_iter().map(|v| v * scale as f32).collect();
        let gradient = Tensor::from_f32(&values, [count], DType::BF16, &gpu).unwrap();
        let operands = |weights: &Tensor| UpdateOperands {
            weights: weights.clone(),
            gradient: gradient.clone(),
            states: Vec::new(),
            copy: None,
        };
        let clipping = Clipping { loss_scale: scale, limit };
        let (left, apart) = (weights(), weights());
        let updates = [(sgd, vec![operands(&left)])];
        let measured = backend.clipped_updates(clipping, &[&gradient], &updates).unwrap().unwrap();
        assert_eq!(measured.largest, backend.largest_magnitude(&[&gradient]).unwrap());
        let grid = 2f64.powi(50 - 2 * f64::from(measured.largest).log2().floor() as i32);
        assert_eq!(measured.squares, backend.sum_of_squares(&[&gradient], grid).unwrap());
        let factor = clipping.factor((measured.squares as f64 / grid).sqrt());
        backend.update(&sgd, factor, &[operands(&apart)]).unwrap();
        assert_eq!(left.to_vec::<f32>().unwrap(), apart.to_vec::<f32>().unwrap(), "{clipping:?}");
    }
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut values = vec![1.0f32; count];
        values[count - 7] = bad;
        let gradient = Tensor::from_slice(&values, [count], &gpu).unwrap();
        let left = weights();
        let operands = UpdateOperands {
            weights: left.clone(),
            gradient: gradient.clone(),
            states: Vec::new(),
            copy: None,
        };
        let clipping = Clipping { loss_scale: 1.0, limit: None };
        let measured =
            backend.clipped_updates(clipping, &[&gradient], &[(sgd, vec![operands])]).unwrap().unwrap();
        assert!(!measured.largest.is_finite());
        assert_eq!(left.to_vec::<f32>().unwrap(), weights().to_vec::<f32>().unwrap(), "nothing was updated");
    }
}

#[test]
fn copies_of_every_size_arrive_whole_beside_other_work() {
    let Some(gpu) = device() else { return };
    let piece = 8 << 20;
    let sizes = [0, 1, 4096, (64 << 10) + 1, piece - 1, piece, piece + 1, 3 * piece + 5, 40_000_003];
    let busy = Tensor::full([2048, 2048], 0.01, DType::F32, &gpu).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..3u64 {
            let (gpu, busy) = (&gpu, &busy);
            scope.spawn(move || {
                for size in sizes {
                    let values: Vec<u8> = (0..size as u64)
                        .map(|i| (i.wrapping_mul(2_654_435_761 + thread) >> 13) as u8)
                        .collect();
                    let tensor = Tensor::from_slice(&values, [size], gpu).unwrap();
                    drop(ops::matmul(busy, busy).unwrap());
                    // A read that was begun sees what was there, whatever comes after it.
                    let one = Tensor::full([1], size as f32, DType::F32, gpu).unwrap();
                    let begun = one.item_later().unwrap();
                    gpu.backend().fill(Out::of_device(&one).unwrap(), -1.0).unwrap();
                    assert!(tensor.to_vec::<u8>().unwrap() == values, "{size} bytes");
                    assert_eq!(begun().unwrap(), size as f32);
                }
            });
        }
    });
    assert!(
        Device::cpu().memory_usage().current(Category::Buffers) >= 2 * piece,
        "buffers are counted on the host"
    );
}

#[test]
fn copies_beside_other_work_wait_for_their_moment_and_for_nothing_later() {
    let Some(gpu) = device() else { return };
    let numel = 3_000_001;
    let tensor = Tensor::full([numel], 0.0, DType::F32, &gpu).unwrap();
    let busy = Tensor::full([4096, 4096], 0.01, DType::F32, &gpu).unwrap();
    let room = gpu.backend().locked(numel, DType::F32, Category::Buffers).unwrap();
    // SAFETY: no copy is under way when the host fills the room, and nobody looks at it before a copy has ended.
    let fill = |room: &Tensor, value| Device::cpu().backend().fill(unsafe { Out::vouched(room) }, value);
    // SAFETY: as above.
    let begin = |from: &Tensor, to: &Tensor, now: &Moment| unsafe { Beside::begin(from, to, now) };
    for round in 1..4 {
        // What is written behind a heap of work is what the copy finds.
        (0..8).for_each(|_| drop(ops::matmul(&busy, &busy).unwrap()));
        gpu.backend().fill(Out::of_device(&tensor).unwrap(), round as f32).unwrap();
        let now = Moment::now(&gpu).unwrap().unwrap();
        let out = begin(&tensor, &room, &now).unwrap();
        (0..8).for_each(|_| drop(ops::matmul(&busy, &busy).unwrap()));
        out.wait().unwrap();
        assert!(room.to_vec::<f32>().unwrap().iter().all(|&value| value == round as f32));
        // And back.
        fill(&room, -(round as f32)).unwrap();
        begin(&room, &tensor, &now).unwrap().wait().unwrap();
        assert!(tensor.to_vec::<f32>().unwrap().iter().all(|&value| value == -(round as f32)));
        // The device waits where the host does not.
        fill(&room, 0.5).unwrap();
        let now = Moment::now(&gpu).unwrap().unwrap();
        begin(&room, &tensor, &now).unwrap().follow().unwrap();
        assert!(tensor.to_vec::<f32>().unwrap().iter().all(|&value| value == 0.5));
    }
    let short = gpu.backend().locked(numel - 1, DType::F32, Category::Buffers).unwrap();
    let now = Moment::now(&gpu).unwrap().unwrap();
    let refused = begin(&tensor, &short, &now).err().unwrap().to_string();
    assert!(refused.contains("differ in size"), "{refused}");
    let refused = begin(&tensor, &tensor, &now).err().unwrap().to_string();
    assert!(refused.contains("one must be the host's"), "{refused}");
}
