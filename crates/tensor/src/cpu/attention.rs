//! Attention that never holds the score matrix, and rotary embedding.
//!
//! Forward keeps a running maximum and sum per query row over blocks of keys; backward rebuilds each block of
//! probabilities from the saved log-sum-exp. (Dao, Fu, Ermon, Rudra, Ré: "FlashAttention", 2022.) One task is one
//! key/value head of one sequence, so gradients of shared heads add up in a fixed order.
//!
//! Legend: t queries, s keys, d channels; `score_ts` is a block of at most `BLOCK_T × BLOCK_S`.

use std::borrow::Cow;

use crate::backend::{AttentionSpec, Heads, HeadsOut, WeightGrid};
use crate::cpu::gemm::{Operand, small};
use crate::cpu::math::exp;
use crate::cpu::parallel::{Shared, Threads};
use crate::cpu::simd::{LANES, max, sum_by, vectorized};
use crate::cpu::{CpuBackend, float_kernel, layout, read, write};
#[cfg(target_arch = "x86_64")]
use crate::cpu::{amx, attention_amx};
use crate::dtype::{DType, Float};
use crate::error::{Result, TensorError};
use crate::out::Out;
use crate::random::drop_threshold;
use crate::tensor::Tensor;

const BLOCK_T: usize = 64;
const BLOCK_S: usize = 256;

/// One head of one sequence as f32 rows.
fn load_head<T: Float>(heads: &Heads<'_>, batch: usize, head: usize, tokens: usize, dim: usize) -> Vec<f32> {
    let elements = read::<T>(heads.tensor);
    let base = heads.offset + batch * heads.batch_stride + head * heads.head_stride;
    let mut out = vec![0.0f32; tokens * dim];
    vectorized!(|| {
        for (token, row) in out.chunks_mut(dim).enumerate() {
            let start = base + token * heads.token_stride;
            for (out, value) in row.iter_mut().zip(&elements[start..start + dim]) {
                *out = value.widen();
            }
        }
    });
    out
}

impl HeadsOut<'_> {
    /// All elements of the tensor that the heads are in; tasks write those of their heads.
    pub(crate) fn elements<T: Float>(&self) -> Shared<T> {
        Shared::of(&Out { tensor: self.heads().tensor })
    }
}

/// Writes one head back. Heads are disjoint, so tasks may do so at once.
fn store_head<T: Float>(
    values: &[f32],
    target: Shared<T>,
    heads: &Heads<'_>,
    batch: usize,
    head: usize,
    dim: usize,
) {
    let base = heads.offset + batch * heads.batch_stride + head * heads.head_stride;
    vectorized!(|| {
        for (token, row) in values.chunks(dim).enumerate() {
            let start = base + token * heads.token_stride;
            // SAFETY: each (batch, head, token) is written by one task.
            let out = unsafe { target.range(start..start + dim) };
            for (out, value) in out.iter_mut().zip(row) {
                *out = T::narrow(*value);
            }
        }
    });
}

fn rows(elements: &[f32], width: usize) -> Operand<'_, f32> {
    Operand { elements, row_stride: width, column_stride: 1 }
}

fn columns(elements: &[f32], width: usize) -> Operand<'_, f32> {
    Operand { elements, row_stride: 1, column_stride: width }
}

/// The rows of a head as the right operand of products over its channels, one column for each.
struct Turned<'a> {
    elements: Cow<'a, [f32]>,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Turned<'a> {
    /// Many queries share a copy in which channels are rows, which products read in place; few read the head as it is.
    fn new(rows_sd: &'a [f32], dim: usize, queries: usize) -> Turned<'a> {
        if queries < BLOCK_T || dim == 0 {
            return Turned { elements: Cow::Borrowed(rows_sd), row_stride: 1, column_stride: dim };
        }
        // Not a power of two, which would bring all channels of a key to the same place in a cache.
        let stride = (rows_sd.len() / dim).next_multiple_of(LANES) + LANES;
        let mut turned_ds = vec![0.0f32; dim * stride];
        vectorized!(|| {
            for (block, rows) in rows_sd.chunks(LANES * dim).enumerate() {
                for (d, line) in turned_ds.chunks_mut(stride).enumerate() {
                    let line = &mut line[block * LANES..(block + 1) * LANES];
                    for (value, row) in line.iter_mut().zip(rows.chunks(dim)) {
                        *value = row[d];
                    }
                }
            }
        });
        Turned { elements: Cow::Owned(turned_ds), row_stride: stride, column_stride: 1 }
    }

    /// The columns from `first` on.
    fn starting_at(&self, first: usize) -> Operand<'_, f32> {
        Operand {
            elements: &self.elements[first * self.column_stride..],
            row_stride: self.row_stride,
            column_stride: self.column_stride,
        }
    }
}

/// What changes scores besides the product: masks, windows and ALiBi, for one sequence and head.
pub(crate) struct Mask<'a> {
    spec: &'a AttentionSpec<'a>,
    key_allowed: Option<&'a [u8]>,
    /// `slope · position` per key.
    alibi_s: Option<Vec<f32>>,
    head: usize,
    batch: usize,
}

impl<'a> Mask<'a> {
    pub(crate) fn new(spec: &'a AttentionSpec<'a>, batch: usize, head: usize) -> Mask<'a> {
        let keys = spec.keys;
        let key_allowed = spec.key_mask.map(|mask| &read::<u8>(mask)[batch * keys..(batch + 1) * keys]);
        let alibi_s = spec.alibi_slopes.map(|slopes| {
            let slope = read::<f32>(slopes)[head];
            match spec.alibi_positions {
                Some(positions) => read::<f32>(positions)[batch * keys..(batch + 1) * keys]
                    .iter()
                    .map(|p| slope * p)
                    .collect(),
                None => (0..keys).map(|key| slope * key as f32).collect(),
            }
        });
        Mask { spec, key_allowed, alibi_s, head, batch }
    }

    /// What multiplies the products.
    pub(crate) fn scale(&self) -> f32 {
        self.spec.scale
    }

    pub(crate) fn has_dropout(&self) -> bool {
        self.spec.dropout.is_some()
    }

    /// The keys that any query of `t0..t1` may see.
    pub(crate) fn visible(&self, t0: usize, t1: usize) -> std::ops::Range<usize> {
        let spec = self.spec;
        let shift = spec.shift();
        let end =
            if spec.causal { (t1 as isize + shift).clamp(0, spec.keys as isize) as usize } else { spec.keys };
        let start = match spec.window {
            Some(window) => (t0 as isize + shift + 1 - window as isize).clamp(0, end as isize) as usize,
            None => 0,
        };
        start..end
    }

    /// Turns raw products into scores; hidden keys become minus infinity.
    #[inline(always)]
    pub(crate) fn apply(&self, score_ts: &mut [f32], t0: usize, s0: usize, width: usize) {
        let spec = self.spec;
        let shift = spec.shift();
        for (t, row) in score_ts.chunks_mut(width).enumerate() {
            if let Some(alibi_s) = &self.alibi_s {
                row.iter_mut().zip(&alibi_s[s0..]).for_each(|(score, bias)| *score += bias);
            }
            if let Some(allowed) = self.key_allowed {
                row.iter_mut().zip(&allowed[s0..]).for_each(|(score, &allowed)| {
                    *score = if allowed != 0 { *score } else { f32::NEG_INFINITY }
                });
            }
            let position = (t0 + t) as isize + shift;
            if spec.causal && (s0 + width) as isize > position + 1 {
                let visible = (position + 1 - s0 as isize).clamp(0, width as isize) as usize;
                row[visible..].fill(f32::NEG_INFINITY);
            }
            if let Some(window) = spec.window {
                let hidden = (position + 1 - window as isize - s0 as isize).clamp(0, width as isize) as usize;
                row[..hidden].fill(f32::NEG_INFINITY);
            }
        }
    }

    /// Multiplies a block by its dropout mask.
    #[inline(always)]
    pub(crate) fn dropout(&self, block_ts: &mut [f32], t0: usize, s0: usize, width: usize) {
        let Some((p, key)) = self.spec.dropout else { return };
        let (threshold, scale) = (drop_threshold(p), 1.0 / (1.0 - p));
        let WeightGrid { whole: [heads, queries, keys], first: [head0, query0, key0] } =
            self.spec.weight_grid();
        let head_row = (self.batch * heads + head0 + self.head) * queries + query0;
        for (t, row) in block_ts.chunks_mut(width).enumerate() {
            let first = ((head_row + t0 + t) * keys + key0 + s0) as u64;
            for (s, value) in row.iter_mut().enumerate() {
                *value = if key.word(first + s as u64) >= threshold { *value * scale } else { 0.0 };
            }
        }
    }
}

/// Whether the tile registers take this one. A single query (decoding) is bound by memory and fills no tile.
#[cfg(target_arch = "x86_64")]
fn on_amx(spec: &AttentionSpec<'_>, q: &Heads<'_>) -> bool {
    q.tensor.dtype() == DType::BF16 && amx::available() && spec.queries >= 8 && spec.keys > 0 && spec.dim > 0
}

pub(crate) fn forward(
    threads: &Threads,
    spec: &AttentionSpec<'_>,
    q: &Heads<'_>,
    k: &Heads<'_>,
    v: &Heads<'_>,
    out: &HeadsOut<'_>,
    logsumexp: Out<'_>,
) -> Result<()> {
    let (queries, dim) = (spec.queries, spec.dim);
    let group = spec.heads / spec.kv_heads;
    #[cfg(target_arch = "x86_64")]
    if on_amx(spec, q) {
        attention_amx::forward(threads, spec, [q, k, v], out, logsumexp);
        return Ok(());
    }
    float_kernel!("attention", q.tensor.dtype(), T => {
        let target = out.elements::<T>();
        let logsumexp = Shared::new(write::<f32>(logsumexp));
        threads.run(spec.batch * spec.kv_heads, |task| {
            let (batch, kv_head) = (task / spec.kv_heads, task % spec.kv_heads);
            let k_sd = load_head::<T>(k, batch, kv_head, spec.keys, dim);
            let v_sd = load_head::<T>(v, batch, kv_head, spec.keys, dim);
            let k_ds = Turned::new(&k_sd, dim, queries);
            let mut score_ts = vec![0.0f32; BLOCK_T * BLOCK_S];
            for head in kv_head * group..(kv_head + 1) * group {
                let q_td = load_head::<T>(q, batch, head, queries, dim);
                let mut out_td = vec![0.0f32; queries * dim];
                let row0 = (batch * spec.heads + head) * queries;
                // SAFETY: each (batch, head) is written by one task.
                let lse_t = unsafe { logsumexp.range(row0..row0 + queries) };
                let mask = Mask::new(spec, batch, head);
                for t0 in (0..queries).step_by(BLOCK_T) {
                    let t1 = (t0 + BLOCK_T).min(queries);
                    let block = t0 * dim..t1 * dim;
                    forward_block(&mask, &q_td[block.clone()], &k_ds, &v_sd, t0, &mut score_ts, &mut out_td[block], &mut lse_t[t0..t1]);
                }
                store_head::<T>(&out_td, target, out.heads(), batch, head, dim);
            }
        });
    })
}

/// All keys for one block of queries.
fn forward_block(
    mask: &Mask<'_>,
    q_td: &[f32],
    k_ds: &Turned<'_>,
    v_sd: &[f32],
    t0: usize,
    score_ts: &mut [f32],
    out_td: &mut [f32],
    lse_t: &mut [f32],
) {
    let dim = mask.spec.dim;
    let height = lse_t.len();
    let visible = mask.visible(t0, t0 + height);
    let (mut largest_t, mut total_t) = ([f32::NEG_INFINITY; BLOCK_T], [0.0f32; BLOCK_T]);
    for s0 in visible.clone().step_by(BLOCK_S) {
        let width = BLOCK_S.min(visible.end - s0);
        let keys = s0 * dim..(s0 + width) * dim;
        let block = &mut score_ts[..height * width];
        small(height, width, dim, &rows(q_td, dim), &k_ds.starting_at(s0), block, mask.spec.scale, false);
        vectorized!(|| {
            mask.apply(block, t0, s0, width);
            for (t, row) in block.chunks_mut(width).enumerate() {
                let new = max(row).max(largest_t[t]);
                // A row that sees nothing so far has nothing to rescale.
                let shift = if new == f32::NEG_INFINITY { 0.0 } else { new };
                let shrink = exp(largest_t[t] - shift);
                row.iter_mut().for_each(|score| *score = exp(*score - shift));
                total_t[t] = total_t[t] * shrink + sum_by(row, |_, p| p);
                largest_t[t] = new;
                if shrink != 1.0 {
                    out_td[t * dim..(t + 1) * dim].iter_mut().for_each(|out| *out *= shrink);
                }
            }
            mask.dropout(block, t0, s0, width);
        });
        small(height, dim, width, &rows(block, width), &rows(&v_sd[keys], dim), out_td, 1.0, true);
    }
    vectorized!(|| {
        for t in 0..height {
            // Rows that see no key (padding) give zeros.
            let inverse = if total_t[t] > 0.0 { 1.0 / total_t[t] } else { 0.0 };
            out_td[t * dim..(t + 1) * dim].iter_mut().for_each(|out| *out *= inverse);
            lse_t[t] = largest_t[t] + total_t[t].ln();
        }
    });
}

/// One new token per sequence: appended to the caches at `place`, then an ordinary forward pass over what they hold.
pub(super) fn step(
    backend: &CpuBackend,
    spec: &AttentionSpec<'_>,
    [q, k, v]: [&Heads<'_>; 3],
    [keys, values]: [HeadsOut<'_>; 2],
    place: &Tensor,
    out: HeadsOut<'_>,
) -> Result<()> {
    let place = read::<i64>(place)[0];
    let Some(past) = usize::try_from(place).ok().filter(|&past| past < spec.keys) else {
        let what = format!("token {place} does not fit a cache of {}", spec.keys);
        return Err(TensorError::argument("attention_step", what));
    };
    for (new, cache) in [(k, keys.heads()), (v, values.heads())] {
        for sequence in 0..spec.batch {
            let source = new.offset + sequence * new.batch_stride;
            let target = cache.offset + sequence * cache.batch_stride + past * cache.token_stride;
            let (from, to) = (new.head_stride, cache.head_stride);
            let out = Out { tensor: cache.tensor };
            layout::copy_blocks(new.tensor, source, from, out, target, to, spec.kv_heads, spec.dim);
        }
    }
    let device = q.tensor.device();
    let mut logsumexp = Tensor::empty([spec.batch, spec.heads, 1], DType::F32, device)?;
    let spec = AttentionSpec { keys: past + 1, ..*spec };
    forward(&backend.threads, &spec, q, keys.heads(), values.heads(), &out, logsumexp.out()?)
}

pub(crate) fn backward(
    threads: &Threads,
    spec: &AttentionSpec<'_>,
    [q, k, v, out, dout]: [&Heads<'_>; 5],
    logsumexp: &Tensor,
    gradients: [HeadsOut<'_>; 3],
) -> Result<()> {
    let (queries, keys, dim) = (spec.queries, spec.keys, spec.dim);
    let group = spec.heads / spec.kv_heads;
    #[cfg(target_arch = "x86_64")]
    if on_amx(spec, q) {
        attention_amx::backward(threads, spec, [q, k, v, out, dout], logsumexp, gradients);
        return Ok(());
    }
    float_kernel!("attention_backward", q.tensor.dtype(), T => {
        let [dq_target, dk_target, dv_target] = gradients.each_ref().map(HeadsOut::elements::<T>);
        let [dq, dk, dv] = gradients.each_ref().map(HeadsOut::heads);
        let lse = read::<f32>(logsumexp);
        threads.run(spec.batch * spec.kv_heads, |task| {
            let (batch, kv_head) = (task / spec.kv_heads, task % spec.kv_heads);
            let k_sd = load_head::<T>(k, batch, kv_head, keys, dim);
            let v_sd = load_head::<T>(v, batch, kv_head, keys, dim);
            let (mut dk_sd, mut dv_sd) = (vec![0.0f32; keys * dim], vec![0.0f32; keys * dim]);
            let (k_ds, v_ds) = (Turned::new(&k_sd, dim, queries), Turned::new(&v_sd, dim, queries));
            let mut scratch = BackwardScratch::default();
            for head in kv_head * group..(kv_head + 1) * group {
                let q_td = load_head::<T>(q, batch, head, queries, dim);
                let out_td = load_head::<T>(out, batch, head, queries, dim);
                let dout_td = load_head::<T>(dout, batch, head, queries, dim);
                let mut dq_td = vec![0.0f32; queries * dim];
                let row0 = (batch * spec.heads + head) * queries;
                let mask = Mask::new(spec, batch, head);
                for t0 in (0..queries).step_by(BLOCK_T) {
                    let t1 = (t0 + BLOCK_T).min(queries);
                    let block = t0 * dim..t1 * dim;
                    backward_block(
                        &mask, &q_td[block.clone()], &k_sd, &k_ds, &v_ds, &out_td[block.clone()], &dout_td[block.clone()],
                        &lse[row0 + t0..row0 + t1], t0, &mut scratch, &mut dq_td[block], &mut dk_sd, &mut dv_sd,
                    );
                }
                store_head::<T>(&dq_td, dq_target, dq, batch, head, dim);
            }
            store_head::<T>(&dk_sd, dk_target, dk, batch, kv_head, dim);
            store_head::<T>(&dv_sd, dv_target, dv, batch, kv_head, dim);
        });
    })
}

struct BackwardScratch {
    /// Probabilities, then the gradient of the scores.
    score_ts: Vec<f32>,
    /// Probabilities after dropout.
    dropped_ts: Vec<f32>,
    /// The gradient of the probabilities.
    dprob_ts: Vec<f32>,
}

impl Default for BackwardScratch {
    fn default() -> Self {
        let block = || vec![0.0; BLOCK_T * BLOCK_S];
        BackwardScratch { score_ts: block(), dropped_ts: block(), dprob_ts: block() }
    }
}

/// One block of queries against all its keys.
fn backward_block(
    mask: &Mask<'_>,
    q_td: &[f32],
    k_sd: &[f32],
    k_ds: &Turned<'_>,
    v_ds: &Turned<'_>,
    out_td: &[f32],
    dout_td: &[f32],
    lse_t: &[f32],
    t0: usize,
    scratch: &mut BackwardScratch,
    dq_td: &mut [f32],
    dk_sd: &mut [f32],
    dv_sd: &mut [f32],
) {
    let (dim, scale) = (mask.spec.dim, mask.spec.scale);
    let height = lse_t.len();
    let visible = mask.visible(t0, t0 + height);
    let mut delta_t = [0.0f32; BLOCK_T];
    vectorized!(|| {
        for t in 0..height {
            let dout = &dout_td[t * dim..(t + 1) * dim];
            delta_t[t] = sum_by(&out_td[t * dim..(t + 1) * dim], |i, out| out * dout[i]);
        }
    });
    let has_dropout = mask.spec.dropout.is_some();
    for s0 in visible.clone().step_by(BLOCK_S) {
        let width = BLOCK_S.min(visible.end - s0);
        let span = s0 * dim..(s0 + width) * dim;
        let prob = &mut scratch.score_ts[..height * width];
        let dprob = &mut scratch.dprob_ts[..height * width];
        small(height, width, dim, &rows(q_td, dim), &k_ds.starting_at(s0), prob, scale, false);
        small(height, width, dim, &rows(dout_td, dim), &v_ds.starting_at(s0), dprob, 1.0, false);
        vectorized!(|| {
            mask.apply(prob, t0, s0, width);
            for (t, row) in prob.chunks_mut(width).enumerate() {
                let shift = if lse_t[t] == f32::NEG_INFINITY { 0.0 } else { lse_t[t] };
                row.iter_mut().for_each(|score| *score = exp(*score - shift));
            }
        });
        let dropped = if has_dropout {
            let dropped = &mut scratch.dropped_ts[..height * width];
            dropped.copy_from_slice(prob);
            mask.dropout(dropped, t0, s0, width);
            mask.dropout(dprob, t0, s0, width);
            &*dropped
        } else {
            &*prob
        };
        small(
            width,
            dim,
            height,
            &columns(dropped, width),
            &rows(dout_td, dim),
            &mut dv_sd[span.clone()],
            1.0,
            true,
        );
        vectorized!(|| {
            for t in 0..height {
                let dprob = &dprob[t * width..(t + 1) * width];
                for (prob, dprob) in prob[t * width..(t + 1) * width].iter_mut().zip(dprob) {
                    *prob *= dprob - delta_t[t];
                }
            }
        });
        let dscore = &*prob;
        small(height, dim, width, &rows(dscore, width), &rows(&k_sd[span.clone()], dim), dq_td, scale, true);
        small(width, dim, height, &columns(dscore, width), &rows(q_td, dim), &mut dk_sd[span], scale, true);
    }
}

pub(crate) fn rotary(
    threads: &Threads,
    heads: &HeadsOut<'_>,
    batch: usize,
    tokens: usize,
    head_count: usize,
    cos: &Tensor,
    sin: &Tensor,
    interleaved: bool,
    inverse: bool,
) -> Result<()> {
    let pairs = cos.shape().last();
    let (cos, sin) = (read::<f32>(cos), read::<f32>(sin));
    // One table for all sequences, or one per sequence.
    let per_sequence = cos.len() > tokens * pairs;
    let sign = if inverse { -1.0 } else { 1.0 };
    let (out, heads) = (heads, heads.heads());
    float_kernel!("rotary", heads.tensor.dtype(), T => {
        let target = out.elements::<T>();
        threads.run(batch * tokens, |index| vectorized!(|| {
            let (b, token) = (index / tokens, index % tokens);
            let row = if per_sequence { index } else { token };
            let (cos, sin) = (&cos[row * pairs..(row + 1) * pairs], &sin[row * pairs..(row + 1) * pairs]);
            for head in 0..head_count {
                let start = heads.offset + b * heads.batch_stride + token * heads.token_stride + head * heads.head_stride;
                // SAFETY: each (batch, token, head) is visited once.
                let x = unsafe { target.range(start..start + 2 * pairs) };
                for i in 0..pairs {
                    let (first, second) = if interleaved { (2 * i, 2 * i + 1) } else { (i, i + pairs) };
                    let (a, b) = (x[first].widen(), x[second].widen());
                    let (c, s) = (cos[i], sign * sin[i]);
                    x[first] = T::narrow(a * c - b * s);
                    x[second] = T::narrow(b * c + a * s);
                }
            }
        }));
    })
}
