//! `bench gpu --attention`: attention alone, forward and with its backward.

use std::time::Instant;

use ferrospeed_tensor::ops::{self, AttentionOptions};
use ferrospeed_tensor::random::RandomKey;
use ferrospeed_tensor::{DType, Device, Result, Tensor, autograd};
use serde_json::{Value, json};

/// Heads, key heads and channels that are measured.
pub(super) const SHAPES: [[usize; 3]; 3] = [[32, 32, 64], [32, 8, 64], [32, 8, 128]];
const REPEATS: usize = 5;

fn normal(shape: [usize; 4], stream: u32, device: &Device) -> Result<Tensor> {
    let mut values = vec![0.0; shape.iter().product()];
    RandomKey::new(1, stream).fill_normal(0, &mut values);
    Tensor::from_f32(&values, shape, DType::BF16, device)
}

/// The median of a few runs after one to warm up.
fn seconds_of(device: &Device, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut seconds = Vec::new();
    for _ in 0..=REPEATS {
        let began = Instant::now();
        work()?;
        device.backend().synchronize()?;
        seconds.push(began.elapsed().as_secs_f64());
    }
    seconds.remove(0);
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[REPEATS / 2])
}

/// Causal attention over one sequence.
pub(super) fn measure(
    [heads, kv_heads, dim]: [usize; 3],
    tokens: usize,
    window: Option<usize>,
    device: &Device,
) -> Result<Value> {
    let tensor = |heads, stream| normal([1, tokens, heads, dim], stream, device);
    let (q, k, v) = (tensor(heads, 1)?, tensor(kv_heads, 2)?, tensor(kv_heads, 3)?);
    let gradient = normal([1, tokens, heads, dim], 4, device)?;
    let options = AttentionOptions { causal: true, window, ..AttentionOptions::default() };
    let forward_s =
        seconds_of(device, || autograd::no_grad(|| ops::attention(&q, &k, &v, &options).map(drop)))?;
    let both_s = seconds_of(device, || {
        // New leaves, so that gradients are written and not added to the last ones.
        let [q, k, v] = [&q, &k, &v].map(|leaf| leaf.detach().tracked());
        let out = ops::attention(&q, &k, &v, &options)?;
        autograd::backward_with(&[(out, gradient.clone())])
    })?;
    Ok(json!({
        "case": format!("attention {heads}/{kv_heads} x {dim}"),
        "tokens": tokens,
        "window": window,
        "forward_ms": forward_s * 1e3,
        "both_ms": both_s * 1e3,
    }))
}
