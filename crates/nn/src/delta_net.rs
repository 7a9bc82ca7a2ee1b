//! Gated DeltaNet: attention in linear time, whose memory of a text is one matrix for each head.
//!
//! `S ← α·S + k·(β·(v − α·Sᵀk))ᵀ`, `o = Sᵀq`: what a key recalls is replaced by its value, and all fades by `α`. Tokens are taken a
//! chunk at a time, within which the recurrence is solved as a system of triangular equations, so that a text is a few products for
//! each chunk. (Yang, Kautz, Hatamizadeh: "Gated delta networks", 2025, section 3.3; Yang, Wang, Zhang, Shen, Kim: "Parallelizing
//! linear transformers with the delta rule over sequence length", 2024, section 3.) Queries, keys and values pass a short
//! convolution first.
//!
//! Numbers are f32 from the convolution on. A padded token is zeros to it, as in the reference implementation.
//!
//! Legend: b sequences, t tokens, n chunks, c tokens of a chunk, h value heads, k and v channels of a key and of a value.

use std::collections::BTreeMap;

use ferrospeed_tensor::autograd;
use ferrospeed_tensor::ops::{self, WeightLayout};
use ferrospeed_tensor::{
    Activation, DType, Device, Initializer, Operand, PagedRows, PagedSequence, Param, Result, Tensor,
    TensorError,
};

use crate::attention::KeyValueCache;
use crate::init::Init;
use crate::linear::Linear;

/// Tokens that are solved for together.
const CHUNK: usize = 64;
/// Up to this size a triangular inverse is a product of powers, none of which grows much.
const SMALL: usize = 8;
/// Keeps the length of a vector of zeros from dividing.
const LENGTH_EPS: f32 = 1e-6;

/// The numbers of a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct DeltaNetConfig {
    /// Channels of the residual stream.
    pub width: usize,
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values, each with a memory of its own; so many follow each other that read one key head.
    pub value_heads: usize,
    /// Channels of a query and a key.
    pub key_dim: usize,
    /// Channels of a value.
    pub value_dim: usize,
    /// Tokens that the convolution sees.
    pub kernel: usize,
    /// How the layers of the input are cut.
    pub inputs: DeltaNetInputs,
    /// Added to mean squares.
    pub eps: f32,
    /// Standard deviation of new weights.
    pub std: f32,
}

/// How queries, keys, values and gates are made from the input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeltaNetInputs {
    /// Two layers, whose outputs lie key head by key head: `in_proj_qkvz`, `in_proj_ba` (Qwen3-Next).
    ByKeyHead,
    /// Four layers: `in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a` (Qwen3.5).
    Apart,
}

impl DeltaNetConfig {
    fn keys_width(&self) -> usize {
        self.key_heads * self.key_dim
    }

    fn values_width(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Channels that pass the convolution.
    fn convolved(&self) -> usize {
        2 * self.keys_width() + self.values_width()
    }
}

#[derive(Debug, Clone)]
enum Inputs {
    ByKeyHead { qkvz: Linear, ba: Linear },
    Apart { qkv: Linear, z: Linear, b: Linear, a: Linear },
}

/// A layer of gated DeltaNet. Cloning copies handles.
#[derive(Debug, Clone)]
pub struct GatedDeltaNet {
    config: DeltaNetConfig,
    inputs: Inputs,
    /// `[channels, 1, kernel]`.
    convolution: Param,
    dt_bias: Param,
    a_log: Param,
    norm: Param,
    output: Linear,
}

/// What the input becomes before tokens meet.
struct Made {
    /// `[b, t, channels]` that pass the convolution.
    qkv: Tensor,
    /// `[b, t, h, v]`, the gate of the output.
    z: Tensor,
    /// `[b, t, h]` each.
    b: Tensor,
    a: Tensor,
}

impl GatedDeltaNet {
    /// Makes its parameters at `init`.
    pub fn new(init: &Init, config: DeltaNetConfig) -> GatedDeltaNet {
        let linear = |name: &str, inputs, outputs| {
            Linear::normal(&init.at(name), inputs, outputs, false, WeightLayout::OutIn, config.std)
        };
        let (width, keys, values) = (config.width, config.keys_width(), config.values_width());
        let heads = config.value_heads;
        let start = Initializer::Uniform { bound: 1.0 / (config.kernel.max(1) as f32).sqrt() };
        let dt_bias = init.param("dt_bias", [heads], Initializer::Constant(1.0));
        // The logarithm of what the reference implementation draws evenly from 0 to 16 is mostly near this.
        let a_log = init.param("A_log", [heads], Initializer::Normal { mean: 1.8, std: 0.7 });
        let convolution = init.at("conv1d").param("weight", [config.convolved(), 1, config.kernel], start);
        let make_inputs = || match config.inputs {
            DeltaNetInputs::ByKeyHead => Inputs::ByKeyHead {
                qkvz: linear("in_proj_qkvz", width, 2 * keys + 2 * values),
                ba: linear("in_proj_ba", width, 2 * heads),
            },
            DeltaNetInputs::Apart => Inputs::Apart {
                qkv: linear("in_proj_qkv", width, 2 * keys + values),
                z: linear("in_proj_z", width, values),
                b: linear("in_proj_b", width, heads),
                a: linear("in_proj_a", width, heads),
            },
        };
        let make_norm = || init.at("norm").param("weight", [config.value_dim], Initializer::Constant(1.0));
        // Parameters are listed in the order in which these are called.
        let (inputs, norm, output) = match config.inputs {
            DeltaNetInputs::ByKeyHead => {
                let inputs = make_inputs();
                let norm = make_norm();
                (inputs, norm, linear("out_proj", values, width))
            }
            DeltaNetInputs::Apart => {
                let norm = make_norm();
                let output = linear("out_proj", values, width);
                (make_inputs(), norm, output)
            }
        };
        GatedDeltaNet { config, inputs, convolution, dt_bias, a_log, norm, output }
    }

    /// An empty memory of `batch` texts.
    pub fn new_state(&self, batch: usize, dtype: DType, device: &Device) -> Result<KeyValueCache> {
        let [before, memory] = self.nothing(batch, dtype, device)?;
        Ok(KeyValueCache::of_memory(before, memory))
    }

    /// What it makes of `x [batch, tokens, width]`, and of the texts before it where there is a memory. Tokens whose `mask
    /// [batch, tokens]` is zero are nobody's.
    pub fn forward(
        &self,
        x: &Tensor,
        mask: Option<&Tensor>,
        state: Option<&mut KeyValueCache>,
    ) -> Result<Tensor> {
        let (batch, tokens) = (x.sizes()[0], x.sizes()[1]);
        let x = match mask {
            Some(mask) => {
                let kept = ops::narrow(&ops::cast(mask, x.dtype())?, 1, mask.sizes()[1] - tokens, tokens)?;
                ops::mul(x, &ops::reshape(&kept, [batch, tokens, 1])?)?
            }
            None => x.clone(),
        };
        let made = self.made(&x)?;
        let kept = match &state {
            Some(state) => state.memory().map(Tensor::clone),
            None => self.nothing(batch, x.dtype(), x.device())?,
        };
        let (out, [before, memory]) = self.recall(&made, kept)?;
        if let Some(state) = state {
            state.remember(before, memory, tokens);
        }
        self.finish(&out, &made.z, x.dtype())
    }

    /// The same for the rows `x [1, rows, width]` of a pass over pages: each text goes on with what `texts` keeps of it. Texts of as
    /// many rows go together.
    pub fn forward_pages(&self, x: &Tensor, rows: &PagedRows, texts: &mut KeyValueCache) -> Result<Tensor> {
        let made = self.made(x)?;
        let mut by_count: BTreeMap<usize, Vec<(usize, &PagedSequence)>> = BTreeMap::new();
        let mut row = 0;
        for text in &rows.sequences {
            by_count.entry(text.count).or_default().push((row, text));
            row += text.count;
        }
        let heads = self.config.value_heads;
        let mut outs = BTreeMap::new();
        for (count, group) in by_count {
            let own = |x: &Tensor| -> Result<Tensor> {
                let each = group.iter().map(|(row, _)| ops::narrow(x, 1, *row, count));
                ops::concat(&each.collect::<Result<Vec<_>>>()?, 0)
            };
            let made = Made { qkv: own(&made.qkv)?, z: own(&made.z)?, b: own(&made.b)?, a: own(&made.a)? };
            let (mut befores, mut memories) = (Vec::new(), Vec::new());
            for (_, text) in &group {
                let kept =
                    text.blocks.first().and_then(|block| texts.text(*block)).filter(|_| text.first > 0);
                let [before, memory] = match kept {
                    Some(kept) => kept.clone(),
                    None if text.first == 0 => self.nothing(1, x.dtype(), x.device())?,
                    None => {
                        let what =
                            format!("nothing is kept of a text that goes on at its token {}", text.first);
                        return Err(TensorError::BadArgument { op: "gated delta rule", what });
                    }
                };
                befores.push(before);
                memories.push(memory);
            }
            let kept = [ops::concat(&befores, 0)?, ops::concat(&memories, 0)?];
            let (out, [before, memory]) = self.recall(&made, kept)?;
            for (index, (row, text)) in group.iter().enumerate() {
                outs.insert(*row, ops::narrow(&out, 0, index, 1)?);
                let kept =
                    [ops::narrow(&before, 0, index, 1)?, ops::narrow(&memory, 0, index * heads, heads)?];
                if let Some(&block) = text.blocks.first() {
                    texts.remember_text(block, kept);
                }
            }
        }
        let out = ops::concat(&outs.into_values().collect::<Vec<_>>(), 1)?;
        self.finish(&out, &made.z, x.dtype())
    }

    /// Bytes that are kept of a text.
    pub fn text_bytes(&self, dtype: DType) -> usize {
        let DeltaNetConfig { kernel, value_heads, key_dim, value_dim, .. } = self.config;
        (kernel - 1) * self.config.convolved() * dtype.size_bytes()
            + value_heads * key_dim * value_dim * DType::F32.size_bytes()
    }

    /// What is kept of `batch` texts before they begin.
    fn nothing(&self, batch: usize, dtype: DType, device: &Device) -> Result<[Tensor; 2]> {
        let DeltaNetConfig { kernel, value_heads, key_dim, value_dim, .. } = self.config;
        Ok([
            Tensor::zeros([batch, kernel - 1, self.config.convolved()], dtype, device)?,
            Tensor::zeros([batch * value_heads, key_dim, value_dim], DType::F32, device)?,
        ])
    }

    /// What tokens recall, `[b, t, h, v]`, and what is kept behind them.
    fn recall(&self, made: &Made, [before, memory]: [Tensor; 2]) -> Result<(Tensor, [Tensor; 2])> {
        let (batch, tokens) = (made.qkv.sizes()[0], made.qkv.sizes()[1]);
        let DeltaNetConfig { kernel, value_heads, value_dim, .. } = self.config;
        let all = ops::concat(&[before, made.qkv.clone()], 1)?;
        let mixed = self.convolve(&all, tokens)?;
        let [q, k, v] = self.heads(&mixed, batch, tokens)?;
        let g = self.log_decay(&made.a)?;
        let beta = ops::sigmoid(&ops::cast(&made.b, DType::F32)?)?;
        let (out, memory) = delta_rule([&q, &k, &v], &g, &beta, memory)?;
        let out = ops::permute(&ops::reshape(&out, [batch, value_heads, tokens, value_dim])?, &[0, 2, 1, 3])?;
        Ok((out, [ops::narrow(&all, 1, tokens, kernel - 1)?, memory]))
    }

    /// The layer's result of what was recalled and its gate `z`.
    fn finish(&self, out: &Tensor, z: &Tensor, dtype: DType) -> Result<Tensor> {
        let [batch, tokens] = [out.sizes()[0], out.sizes()[1]];
        let normed = ops::cast(&ops::rms_norm(out, None, self.config.eps)?, dtype)?;
        let weighted = ops::cast(&ops::mul(&normed, &self.norm)?, DType::F32)?;
        let gated = ops::mul(&weighted, &ops::silu(&ops::cast(z, DType::F32)?)?)?;
        let width = self.config.values_width();
        self.output.forward(&ops::reshape(&ops::cast(&gated, dtype)?, [batch, tokens, width])?)
    }

    fn made(&self, x: &Tensor) -> Result<Made> {
        let (batch, tokens) = (x.sizes()[0], x.sizes()[1]);
        let DeltaNetConfig { key_heads, value_heads, key_dim, value_dim, .. } = self.config;
        let flat = |x: &Tensor| ops::reshape(x, [batch, tokens, x.numel() / (batch * tokens).max(1)]);
        let of_heads = |x: &Tensor| ops::reshape(x, [batch, tokens, value_heads, value_dim]);
        match &self.inputs {
            Inputs::Apart { qkv, z, b, a } => Ok(Made {
                qkv: qkv.forward(x)?,
                z: of_heads(&z.forward(x)?)?,
                b: b.forward(x)?,
                a: a.forward(x)?,
            }),
            Inputs::ByKeyHead { qkvz, ba } => {
                let each = value_heads / key_heads;
                let all = qkvz.forward(x)?;
                let all = ops::reshape(&all, [batch, tokens, key_heads, 2 * key_dim + 2 * each * value_dim])?;
                let widths = [key_dim, key_dim, each * value_dim, each * value_dim];
                let parts = ops::split(&all, 3, &widths)?;
                let qkv = ops::concat(&[flat(&parts[0])?, flat(&parts[1])?, flat(&parts[2])?], 2)?;
                let gates = ops::reshape(&ba.forward(x)?, [batch, tokens, key_heads, 2 * each])?;
                let gates = ops::split(&gates, 3, &[each, each])?;
                Ok(Made { qkv, z: of_heads(&parts[3])?, b: flat(&gates[0])?, a: flat(&gates[1])? })
            }
        }
    }

    /// The activated convolution of the last `tokens` of `x [b, before + t, channels]`: one product for each tap.
    fn convolve(&self, x: &Tensor, tokens: usize) -> Result<Tensor> {
        let (channels, kernel) = (self.config.convolved(), self.config.kernel);
        let taps = ops::reshape(&self.convolution, [channels, kernel])?;
        let taps = ops::permute(&taps, &[1, 0])?;
        let tap = |place: usize| -> Result<Tensor> {
            let weight = ops::reshape(&ops::narrow(&taps, 0, place, 1)?, [1, 1, channels])?;
            ops::mul(&ops::narrow(x, 1, place, tokens)?, &weight)
        };
        let sum = (1..kernel).try_fold(tap(0)?, |sum, place| ops::add(&sum, &tap(place)?))?;
        ops::activate(&sum, Activation::Silu)
    }

    /// Queries and keys of length one, queries divided by the root of their width, and values, in f32 `[b·h, t, channels]`.
    fn heads(&self, mixed: &Tensor, batch: usize, tokens: usize) -> Result<[Tensor; 3]> {
        let DeltaNetConfig { key_heads, value_heads, key_dim, value_dim, .. } = self.config;
        let (keys, values) = (self.config.keys_width(), self.config.values_width());
        let parts = ops::split(&ops::cast(mixed, DType::F32)?, 2, &[keys, keys, values])?;
        let by_head = |x: &Tensor, heads: usize, dim: usize| {
            ops::permute(&ops::reshape(x, [batch, tokens, heads, dim])?, &[0, 2, 1, 3])
        };
        let each = value_heads / key_heads;
        let unit = |x: &Tensor, factor: f32| -> Result<Tensor> {
            let heads = by_head(x, key_heads, key_dim)?;
            // By the mean of squares, where the length is by their sum.
            let dim = key_dim as f32;
            let unit = ops::rms_norm(&heads, None, LENGTH_EPS / dim)?;
            let unit = ops::affine(&unit, factor / dim.sqrt(), 0.0)?;
            // One key head serves several value heads that follow each other.
            let one = ops::reshape(&unit, [batch * key_heads, 1, tokens, key_dim])?;
            let none = Tensor::zeros([batch * key_heads, each, tokens, key_dim], DType::F32, x.device())?;
            ops::reshape(&ops::add(&none, &one)?, [batch * value_heads, tokens, key_dim])
        };
        let value = ops::reshape(
            &by_head(&parts[2], value_heads, value_dim)?,
            [batch * value_heads, tokens, value_dim],
        )?;
        Ok([unit(&parts[0], 1.0 / (key_dim as f32).sqrt())?, unit(&parts[1], 1.0)?, value])
    }

    /// How much of the memory fades at each token, as a logarithm: `−e^A·softplus(a + bias)`.
    fn log_decay(&self, a: &Tensor) -> Result<Tensor> {
        let wide = |param: &Param| ops::cast(param, DType::F32);
        let x = ops::add(&ops::cast(a, DType::F32)?, &wide(&self.dt_bias)?)?;
        // `softplus(x) = max(x, 0) + ln(1 + e^−|x|)`, which does not overflow.
        let tail = ops::log(&ops::affine(&ops::exp(&ops::neg(&ops::abs(&x)?)?)?, 1.0, 1.0)?)?;
        let softplus = ops::add(&ops::relu(&x)?, &tail)?;
        ops::neg(&ops::mul(&softplus, &ops::exp(&wide(&self.a_log)?)?)?)
    }
}

/// What queries recall while keys and values are learnt, and the memory afterwards: `q` and `k [b·h, t, k]`, `v [b·h, t, v]`,
/// `g` and `beta [b, t, h]`, `memory [b·h, k, v]`.
fn delta_rule(
    [q, k, v]: [&Tensor; 3],
    g: &Tensor,
    beta: &Tensor,
    memory: Tensor,
) -> Result<(Tensor, Tensor)> {
    let &[rows, tokens, key_dim] = q.sizes() else {
        return Err(TensorError::shape("delta_rule", "queries", *q.shape(), "[heads, tokens, channels]"));
    };
    let (value_dim, device) = (v.shape().last(), q.device());
    let chunk = CHUNK.min(tokens.max(1));
    let chunks = tokens.div_ceil(chunk);
    let missing = chunks * chunk - tokens;
    // Behind the end stand tokens that neither fade nor teach anything.
    let filled = |x: &Tensor, dim: usize| -> Result<Tensor> {
        let x = match missing {
            0 => x.clone(),
            _ => ops::concat(&[x.clone(), Tensor::zeros([rows, missing, dim], DType::F32, device)?], 1)?,
        };
        ops::reshape(&x, [rows * chunks, chunk, dim])
    };
    let per_token = |x: &Tensor| -> Result<Tensor> {
        filled(&ops::reshape(&ops::permute(x, &[0, 2, 1])?, [rows, tokens, 1])?, 1)
    };
    let (q, k, v) = (filled(q, key_dim)?, filled(k, key_dim)?, filled(v, value_dim)?);
    let (g, beta) = (per_token(g)?, per_token(beta)?);
    let n = rows * chunks;
    let since_start = ops::cumsum(&ops::reshape(&g, [n, chunk])?)?;
    let (of_row, of_column) =
        (ops::reshape(&since_start, [n, chunk, 1])?, ops::reshape(&since_start, [n, 1, chunk])?);
    // Between two tokens of a chunk; above the diagonal nothing, and no large exponent on the way.
    let [lower, strict] = [0, 1].map(|above| triangle(chunk, above, device));
    let (lower, strict) = (lower?, strict?);
    let between = ops::mul(&ops::sub(&of_row, &of_column)?, &lower)?;
    let decay = ops::mul(&ops::exp(&between)?, &lower)?;
    let k_beta = ops::mul(&k, &beta)?;
    let turned = ops::permute(&k, &[0, 2, 1])?;
    let met = ops::mul(&ops::mul(&ops::matmul(&k_beta, &turned)?, &decay)?, &strict)?;
    let solved = unit_lower_inverse(&met)?;
    let fade = ops::exp(&of_row)?;
    let learnt = ops::matmul(&solved, &ops::mul(&v, &beta)?)?;
    let recalled = ops::matmul(&solved, &ops::mul(&k_beta, &fade)?)?;
    let seen = ops::mul(&ops::matmul(&q, &turned)?, &decay)?;
    let q_faded = ops::mul(&q, &fade)?;
    let last = ops::narrow(&of_row, 1, chunk - 1, 1)?;
    let k_left = ops::permute(&ops::mul(&k, &ops::exp(&ops::sub(&last, &of_row)?)?)?, &[0, 2, 1])?;
    let left = ops::exp(&last)?;
    let of_chunk = |x: &Tensor, index: usize| -> Result<Tensor> {
        let [height, width] = [x.sizes()[1], x.sizes()[2]];
        let all = ops::reshape(x, [rows, chunks, height, width])?;
        ops::reshape(&ops::narrow(&all, 1, index, 1)?, [rows, height, width])
    };
    let (mut memory, mut outs) = (memory, Vec::with_capacity(chunks));
    for index in 0..chunks {
        let known = ops::matmul(&of_chunk(&recalled, index)?, &memory)?;
        let new = ops::sub(&of_chunk(&learnt, index)?, &known)?;
        let before = ops::matmul(&of_chunk(&q_faded, index)?, &memory)?;
        outs.push(ops::add(&before, &ops::matmul(&of_chunk(&seen, index)?, &new)?)?);
        let kept = ops::mul(&memory, &of_chunk(&left, index)?)?;
        memory = ops::add(&kept, &ops::matmul(&of_chunk(&k_left, index)?, &new)?)?;
    }
    Ok((ops::narrow(&ops::concat(&outs, 1)?, 1, 0, tokens)?, memory))
}

/// `[1, size, size]`: one where the column is not above the row less `above`, else zero.
fn triangle(size: usize, above: usize, device: &Device) -> Result<Tensor> {
    let one = |row: usize, column: usize| if column + above <= row { 1.0f32 } else { 0.0 };
    let values: Vec<f32> = (0..size).flat_map(|row| (0..size).map(move |column| one(row, column))).collect();
    Tensor::from_slice(&values, [1, size, size], device)
}

/// `(1 + L)⁻¹` of strictly lower triangles `L [n, c, c]`. With `y` the result, the gradient of `L` is `−yᵀ·dy·yᵀ` below the diagonal.
fn unit_lower_inverse(strict: &Tensor) -> Result<Tensor> {
    let inverse = autograd::no_grad(|| inverse_of(&strict.detach()))?;
    if !strict.requires_grad() {
        return Ok(inverse);
    }
    let (kept, operand) = (inverse.detach(), Operand::from(strict));
    Ok(autograd::record("unit_lower_inverse", &[&operand], inverse, move |dy| {
        let turned = ops::permute(&kept, &[0, 2, 1])?;
        let whole = ops::neg(&ops::matmul(&ops::matmul(&turned, &dy)?, &turned)?)?;
        let below = triangle(kept.shape().last(), 1, kept.device())?;
        Ok(vec![Some(ops::mul(&whole, &below)?)])
    }))
}

/// By halves: the inverse of `[[A, 0], [B, D]]` is `[[A⁻¹, 0], [−D⁻¹·B·A⁻¹, D⁻¹]]`.
fn inverse_of(strict: &Tensor) -> Result<Tensor> {
    let (n, size) = (strict.sizes()[0], strict.shape().last());
    if size <= SMALL {
        // `1 − L + L² − …`, of which all terms from the size on are zero.
        let one = ops::sub(&triangle(size, 0, strict.device())?, &triangle(size, 1, strict.device())?)?;
        let mut power = ops::neg(strict)?;
        let mut sum = ops::add(&power, &one)?;
        let mut terms = 2;
        while terms < size {
            power = ops::matmul(&power, &power)?;
            sum = ops::add(&sum, &ops::matmul(&sum, &power)?)?;
            terms *= 2;
        }
        return Ok(sum);
    }
    let half = size / 2;
    let block = |row: usize, height: usize, column: usize, width: usize| -> Result<Tensor> {
        ops::narrow(&ops::narrow(strict, 1, row, height)?, 2, column, width)
    };
    let upper = inverse_of(&block(0, half, 0, half)?)?;
    let lower = inverse_of(&block(half, size - half, half, size - half)?)?;
    let between = block(half, size - half, 0, half)?;
    let left = ops::neg(&ops::matmul(&lower, &ops::matmul(&between, &upper)?)?)?;
    let nothing = Tensor::zeros([n, half, size - half], DType::F32, strict.device())?;
    ops::concat(&[ops::concat(&[upper, nothing], 2)?, ops::concat(&[left, lower], 2)?], 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(count: usize, seed: f32) -> Vec<f32> {
        (0..count).map(|place| ((place as f32 * 12.9898 + seed) * 7.233).sin() * 0.8).collect()
    }

    /// The recurrence, token by token, in f64.
    fn plainly(
        q: &[f32],
        k: &[f32],
        v: &[f32],
        g: &[f32],
        beta: &[f32],
        [t, dk, dv]: [usize; 3],
    ) -> Vec<f64> {
        let mut memory = vec![0.0f64; dk * dv];
        let mut out = Vec::new();
        for token in 0..t {
            let (q, k) = (&q[token * dk..][..dk], &k[token * dk..][..dk]);
            memory.iter_mut().for_each(|value| *value *= f64::from(g[token]).exp());
            for column in 0..dv {
                let known: f64 = (0..dk).map(|row| memory[row * dv + column] * f64::from(k[row])).sum();
                let new = (f64::from(v[token * dv + column]) - known) * f64::from(beta[token]);
                (0..dk).for_each(|row| memory[row * dv + column] += f64::from(k[row]) * new);
            }
            out.extend(
                (0..dv).map(|column| {
                    (0..dk).map(|row| memory[row * dv + column] * f64::from(q[row])).sum::<f64>()
                }),
            );
        }
        out
    }

    #[test]
    fn chunks_give_what_the_recurrence_gives() {
        let device = ferrospeed_cpu::with_threads(1);
        for t in [1, 2, 63, 64, 65, 150] {
            let (dk, dv) = (5, 3);
            let keys: Vec<f32> = drawn(t * dk, 2.0)
                .chunks(dk)
                .flat_map(|key| {
                    let length = key.iter().map(|x| x * x).sum::<f32>().sqrt();
                    key.iter().map(move |x| x / length).collect::<Vec<_>>()
                })
                .collect();
            let (q, v) = (drawn(t * dk, 1.0), drawn(t * dv, 3.0));
            let g: Vec<f32> = drawn(t, 4.0).iter().map(|x| -x.abs()).collect();
            let beta: Vec<f32> = drawn(t, 5.0).iter().map(|x| x.abs()).collect();
            let tensor =
                |values: &[f32], dim: usize| Tensor::from_slice(values, [1, t, dim], &device).unwrap();
            let (q3, k3, v3) = (tensor(&q, dk), tensor(&keys, dk), tensor(&v, dv));
            let memory = Tensor::zeros([1, dk, dv], DType::F32, &device).unwrap();
            let (out, _) = delta_rule([&q3, &k3, &v3], &tensor(&g, 1), &tensor(&beta, 1), memory).unwrap();
            let expected = plainly(&q, &keys, &v, &g, &beta, [t, dk, dv]);
            for (found, expected) in out.to_vec::<f32>().unwrap().iter().zip(expected) {
                assert!(
                    (f64::from(*found) - expected).abs() < 1e-4,
                    "{t} tokens: {found}, plainly {expected}"
                );
            }
        }
    }
}
