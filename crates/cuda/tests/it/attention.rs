//! Attention on the GPU against the CPU's, in every variant, with its gradients.
//!
//! Without a device each test says so and passes: there is nothing to compare.

use super::on_gpu::{Inputs, compare, compare_in, device, normal, run, tolerance};
use ferrospeed_tensor::ops::{self, AttentionOptions, PackedHeads};
use ferrospeed_tensor::{DType, Documents, Result, Tensor, autograd};

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

/// What neither cuDNN nor Hopper's kernel knows, in every mixture: dropout (also where rows of keys do not begin with a block of its
/// numbers), ALiBi, masks that hide whole rows, wide heads, lengths that end within a tile, other keys than queries.
#[test]
fn every_case_of_sixteen_bits() {
    let types = [DType::BF16, DType::F16];
    for [b, t, s, h, kv, d] in [
        [2, 130, 130, 4, 2, 64],
        [1, 200, 333, 4, 1, 128],
        [1, 100, 100, 2, 2, 256],
        [1, 257, 257, 2, 1, 192],
        [3, 64, 96, 2, 2, 80],
        [1, 16, 70, 2, 1, 24],
    ] {
        for (causal, window, dropout, has_slopes, is_masked) in [
            (true, None, 0.25, false, false),
            (false, None, 0.5, false, true),
            (true, Some(33), 0.0, true, false),
            (true, None, 0.1, true, true),
            (false, None, 0.0, false, false),
        ] {
            let what = format!(
                "{t} of {s}, heads of {d}, dropout {dropout}, slopes {has_slopes}, masked {is_masked}"
            );
            compare_in(&types, &what, &|i| {
                // Of the first sequence the first keys are hidden, so its first queries see nothing.
                let mask: Vec<u8> = (0..b * s).map(|at| u8::from(at > 9 && at % 7 != 3)).collect();
                let slopes: Vec<f32> = (0..h).map(|head| 0.5 / (head + 1) as f32).collect();
                let options = AttentionOptions {
                    causal,
                    window,
                    dropout,
                    key_mask: is_masked.then(|| i.constant(&mask, &[b, s])),
                    alibi_slopes: has_slopes.then(|| i.constant(&slopes, &[h])),
                    ..AttentionOptions::default()
                };
                let (q, k, v) = (i.input(&[b, t, h, d]), i.input(&[b, s, kv, d]), i.input(&[b, s, kv, d]));
                Ok(vec![ops::attention(&q, &k, &v, &options)?])
            });
        }
    }
}

/// Hopper's kernel for gradients in its corners: heads filled up to 64 and 128 channels, lengths that end within a block, heads
/// shared out among blocks or not, all keys seen, other keys than queries, operands inside a packed projection.
#[test]
fn gradients_of_sixteen_bits() {
    let types = [DType::BF16, DType::F16];
    for [b, t, s, h, kv, d] in [
        [1, 300, 300, 4, 1, 64],
        [2, 129, 129, 6, 3, 128],
        [1, 517, 517, 8, 2, 96],
        [1, 192, 192, 2, 1, 80],
        [2, 65, 65, 2, 1, 48],
        [1, 640, 640, 6, 1, 8],
    ] {
        for (causal, window) in [(true, None), (true, Some(70)), (false, None)] {
            let options = AttentionOptions { causal, window, ..AttentionOptions::default() };
            compare_in(&types, "gradients of attention", &|i| {
                let (q, k, v) = (i.input(&[b, t, h, d]), i.input(&[b, s, kv, d]), i.input(&[b, s, kv, d]));
                Ok(vec![ops::attention(&q, &k, &v, &options)?])
            });
        }
    }
    for (t, s) in [(70, 333), (333, 70), (1, 200), (200, 1)] {
        compare_in(&types, "gradients of attention to other keys", &|i| {
            let (q, k, v) = (i.input(&[2, t, 4, 64]), i.input(&[2, s, 2, 64]), i.input(&[2, s, 2, 64]));
            Ok(vec![ops::attention(&q, &k, &v, &AttentionOptions::default())?])
        });
    }
    for layout in [PackedHeads::Thirds, PackedHeads::PerHead] {
        let causal = AttentionOptions { causal: true, ..AttentionOptions::default() };
        // The second one is long enough for the kernel of ours.
        for (b, t) in [(2, 260), (1, 1060)] {
            compare_in(&types, "gradients of packed attention", &|i| {
                Ok(vec![ops::attention_packed(&i.input(&[b, t, 3 * 2 * 128]), 2, layout, &causal)?])
            });
        }
    }
}

/// Gradients of queries are summed as integers, whose size follows from the largest values and keys: a few that are far larger
/// than the rest, as models have them, must leave the others' gradients as they are.
#[test]
fn gradients_of_queries_beside_outliers() {
    let Some(gpu) = device() else { return };
    let options = AttentionOptions { causal: true, ..AttentionOptions::default() };
    for d in [64, 128] {
        let large = |at: usize, every: usize, factor: f32| {
            move |i: usize, value: f32| if i % every == at { factor * value } else { value }
        };
        let op = |i: &mut Inputs<'_>| {
            let scaled = |i: &mut Inputs<'_>, stream, map: &dyn Fn(usize, f32) -> f32| {
                let values = normal(&[1, 4096, 2, d], stream);
                let values: Vec<f32> = values.into_iter().enumerate().map(|(at, v)| map(at, v)).collect();
                let tensor = Tensor::from_f32(&values, [1, 4096, 2, d], DType::BF16, i.device).unwrap();
                let tensor = ops::cast(&tensor, i.dtype).unwrap().detach().tracked();
                i.tracked.push(tensor.clone());
                tensor
            };
            let q = scaled(i, 1, &large(0, 1, 0.1));
            // One channel of all keys, and one value in 4,096.
            let k = scaled(i, 2, &large(3, d, 50.0));
            let v = scaled(i, 3, &|at, value| if at / d == 77 { 30.0 * value } else { value });
            Ok(vec![ops::attention(&q, &k, &v, &options)?])
        };
        let (ours, truth) = (run(&op, DType::BF16, &gpu), run(&op, DType::F32, &gpu));
        // Of the queries, channel by channel: each has a scale of its own.
        for channel in 0..d {
            let of = |results: &[Vec<f32>]| -> Vec<f32> {
                results[1].iter().skip(channel).step_by(d).copied().collect()
            };
            let norm = |values: &[f32]| values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
            let (ours, truth) = (of(&ours), of(&truth));
            let apart: Vec<f32> = ours.iter().zip(&truth).map(|(a, b)| a - b).collect();
            let error = norm(&apart) / norm(&truth);
            assert!(error < 2e-2, "{d} channels, channel {channel}: {error}");
        }
    }
}

/// What is no number anywhere must reach the gradients, however they are summed.
#[test]
fn gradients_keep_what_is_no_number() {
    let Some(gpu) = device() else { return };
    let causal = AttentionOptions { causal: true, ..AttentionOptions::default() };
    for bad in [f32::NAN, f32::INFINITY] {
        for which in 0..4 {
            let tensor = |index: usize, heads: usize| {
                let mut values = normal(&[1, 256, heads, 64], index as u32 + 1);
                if index == which {
                    values[100 * heads * 64 + 5] = bad;
                }
                Tensor::from_f32(&values, [1, 256, heads, 64], DType::BF16, &gpu).unwrap()
            };
            let inputs = [tensor(0, 4).tracked(), tensor(1, 2).tracked(), tensor(2, 2).tracked()];
            let out = ops::attention(&inputs[0], &inputs[1], &inputs[2], &causal).unwrap();
            autograd::backward_with(&[(out, tensor(3, 4))]).unwrap();
            let dq = inputs[0].grad().unwrap().to_vec_f32().unwrap();
            assert!(dq.iter().any(|value| !value.is_finite()), "{bad} in operand {which}");
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
