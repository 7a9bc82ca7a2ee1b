//! Attention on the GPU against the CPU's, in every variant, with its gradients.
//!
//! Without a device each test says so and passes: there is nothing to compare.

mod on_gpu;

use ferrospeed_tensor::ops::{self, AttentionOptions, PackedHeads};
use ferrospeed_tensor::{DType, Documents, Result, Tensor};
use on_gpu::{Inputs, compare, device, normal, run, tolerance};

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
