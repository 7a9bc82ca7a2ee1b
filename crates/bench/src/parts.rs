//! The parts of a training step, each run alone at the sizes of a model: what a step's time goes into.

use std::time::Duration;

use ferrospeed_models::DecoderConfig;
use ferrospeed_tensor::backend::{Gemm, Matrix};
use ferrospeed_tensor::ops::WeightLayout::{InOut, OutIn};
use ferrospeed_tensor::ops::{self, AttentionOptions, CrossEntropyOptions, PackedHeads};
use ferrospeed_tensor::{Activation, DType, Device, Operand, Result, Tensor};

use super::measure::{ids, random, there_and_back, time};

/// How long each part is repeated.
const BUDGET: Duration = Duration::from_millis(300);

/// The best rate of plain products of training sizes, operations per second.
pub(super) fn gemm_peak_flops_per_s(dtype: DType, device: &Device) -> Result<f64> {
    let mut best: f64 = 0.0;
    for [m, k, n] in [[1024, 768, 3072], [1024, 3072, 768], [2048, 2048, 2048]] {
        let (a, b) = (random(&[m, k], dtype, device)?, random(&[k, n], dtype, device)?);
        let mut c = Tensor::empty([m, n], dtype, device)?;
        let mut run = || {
            let (a, b) = (Matrix::whole(&a), Matrix::whole(&b));
            device.backend().gemm(Gemm::plain(m, n, k, a, b, c.out()?))
        };
        let (best_s, _) = time(&mut run, BUDGET)?;
        best = best.max(2.0 * (m * n * k) as f64 / best_s);
    }
    Ok(best)
}

/// Seconds per step of each part, forward and backward, of a GPT-2 on `batch` sequences of `tokens`.
pub(super) fn parts_of_a_step(
    config: &DecoderConfig,
    dtype: DType,
    device: &Device,
    [batch, tokens]: [usize; 2],
) -> Result<Vec<(String, f64)>> {
    let (rows, width, inner, layers) =
        (batch * tokens, config.width, config.inner_width, config.layers as f64);
    let input = |width: usize| random(&[rows, width], dtype, device);
    let weight = |shape: &[usize]| ops::affine(&random(shape, dtype, device)?, 0.02, 0.0);
    let optional = |x: &Tensor| Some(Operand::from(x));
    let seconds = |inputs: Vec<Tensor>, op: fn(&[Tensor]) -> Result<Tensor>| -> Result<f64> {
        Ok(time(&mut *there_and_back(inputs, op), BUDGET)?.0)
    };

    let linear: fn(&[Tensor]) -> Result<Tensor> =
        |x| ops::linear(&x[0], &x[1], Some(Operand::from(&x[2])), InOut);
    let qkv = seconds(vec![input(width)?, weight(&[width, 3 * width])?, weight(&[3 * width])?], linear)?;
    let output = seconds(vec![input(width)?, weight(&[width, width])?, weight(&[width])?], linear)?;
    let feed_forward = vec![
        input(width)?,
        weight(&[width, inner])?,
        weight(&[inner])?,
        weight(&[inner, width])?,
        weight(&[width])?,
    ];
    let feed_forward = seconds(feed_forward, |x| {
        let operand = |index: usize| Operand::from(&x[index]);
        ops::mlp(
            &x[0],
            (operand(1), Some(operand(2))),
            (operand(3), Some(operand(4))),
            InOut,
            Activation::GeluTanh,
        )
    })?;
    let packed = random(&[batch, tokens, 3 * width], dtype, device)?;
    let heads = config.heads;
    let mut attention = there_and_back(vec![packed], move |x| {
        let options = AttentionOptions { causal: true, ..Default::default() };
        ops::attention_packed(&x[0], heads, PackedHeads::Thirds, &options)
    });
    let attention = time(&mut *attention, BUDGET)?.0;
    let norm_inputs = vec![input(width)?, input(width)?, weight(&[width])?, weight(&[width])?];
    let mut norm = there_and_back(norm_inputs, move |x| {
        Ok(ops::add_layer_norm(&x[0], Some((&x[1]).into()), optional(&x[2]), optional(&x[3]), 1e-5)?.1)
    });
    let norm = time(&mut *norm, BUDGET)?.0;
    let head = vec![input(width)?, weight(&[config.vocab, width])?, ids(&[rows], config.vocab, device)?];
    let loss = seconds(head, |x| {
        ops::linear_cross_entropy(&x[0], &x[1], OutIn, &x[2], CrossEntropyOptions::default())
    })?;
    Ok(vec![
        ("feed-forward layers".into(), layers * feed_forward),
        ("projections of attention".into(), layers * (qkv + output)),
        ("attention".into(), layers * attention),
        ("norms".into(), (2.0 * layers + 1.0) * norm),
        ("head and loss".into(), loss),
    ])
}
