//! Every op on the GPU against the same op on the CPU, over odd shapes and all float types, with its gradients.
//!
//! Without a device each test says so and passes: there is nothing to compare.

use super::on_gpu::{Inputs, TYPES, compare, compare_in, device, normal};
use ferrospeed_tensor::backend::Comparison;
use ferrospeed_tensor::ops::{
    self, CrossEntropyOptions, GroupWeights, Inwards, MlpWeights, Routes, WeightLayout,
};
use ferrospeed_tensor::store::{FromInitializers, PlainStore};
use ferrospeed_tensor::{
    Activation, DType, Initializer, Operand, Out, Param, Result, Tensor, TensorError, Window2d, autograd,
    rows_alone,
};

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
                let inwards = match gated {
                    true => Inwards::Gated { gate: layer(24, 40), up: layer(24, 40) },
                    false => Inwards::Up(layer(24, 40)),
                };
                let weights = MlpWeights { inwards, down: layer(40, 24) };
                Ok(vec![ops::mlp_in_chunks(&x, weights, layout, Activation::Silu, chunk)?])
            });
        }
    }
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
    for (rows, classes) in [(1, 2), (9, 33), (40, 1000), (301, 4104), (5, 50_304), (41, 50_257), (17, 4_099)]
    {
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
