//! Attention that never holds the score matrix, and rotary embedding.
//!
//! Forward keeps a running maximum and sum per query row over blocks of keys; backward rebuilds each block of
//! probabilities from the saved log-sum-exp. (Dao, Fu, Ermon, Rudra, Ré: "FlashAttention", 2022.) One task is one
//! key/value head of one sequence, or of one document where several lie in a sequence, so gradients of shared heads add up
//! in a fixed order, and a document has the bits that it has alone.
//!
//! Legend: t queries, s keys, d channels; `score_ts` is a block of at most `BLOCK_T × BLOCK_S`.

use std::borrow::Cow;

use ferrospeed_tensor::backend::{Attention, AttentionSpec, HeadPlaces, Heads, HeadsOut};
use ferrospeed_tensor::dtype::Float;
use ferrospeed_tensor::loops::simd::{LANES, max, sum_by, vectorized};
use ferrospeed_tensor::loops::threads::Threads;
use ferrospeed_tensor::{DType, Out, Result, Tensor, TensorError};

use crate::attention_mask::{Mask, Part};
use crate::gemm::{Operand, small};
use crate::math::exp;
use crate::parallel::Shared;
use crate::{CpuBackend, float_kernel, layout, read, write};
#[cfg(target_arch = "x86_64")]
use crate::{amx, attention_amx};

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

/// Writes one head back. Heads are disjoint, so tasks may do so at once.
fn store_head<T: Float>(
    values: &[f32],
    target: Shared<T>,
    heads: &HeadPlaces,
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

/// Whether the tile registers take this one. A single query (decoding) is bound by memory and fills no tile.
#[cfg(target_arch = "x86_64")]
fn on_amx(spec: &AttentionSpec<'_>, q: &Heads<'_>) -> bool {
    let is_plain = spec.score_cap.is_none() && spec.sinks.is_none();
    q.tensor.dtype() == DType::BF16
        && is_plain
        && amx::available()
        && spec.queries >= 8
        && spec.keys > 0
        && spec.dim > 0
}

pub(crate) fn forward(
    threads: &Threads,
    spec: &AttentionSpec<'_>,
    inputs: [&Heads<'_>; 3],
    out: &HeadsOut<'_>,
    logsumexp: Out<'_>,
) -> Result<()> {
    let parts = Part::all(spec);
    float_kernel!("attention", inputs[0].tensor.dtype(), T => {
        let logsumexp = Shared::new(write::<f32>(logsumexp));
        threads.run(parts.len() * spec.kv_heads, |task| {
            let (part, kv_head) = (&parts[task / spec.kv_heads], task % spec.kv_heads);
            #[cfg(target_arch = "x86_64")]
            if on_amx(&part.spec, inputs[0]) {
                return attention_amx::forward(part, kv_head, inputs, out, logsumexp);
            }
            forward_heads::<T>(part, kv_head, inputs, out, logsumexp);
        });
    })
}

/// All query heads of one key head.
fn forward_heads<T: Float>(
    part: &Part<'_>,
    kv_head: usize,
    inputs: [&Heads<'_>; 3],
    out: &HeadsOut<'_>,
    logsumexp: Shared<f32>,
) {
    let (spec, batch) = (&part.spec, part.batch);
    let (queries, dim, group) = (spec.queries, spec.dim, spec.heads / spec.kv_heads);
    let [q, k, v] = inputs.map(|heads| part.of(heads));
    let (target, out) = (Shared::<T>::of(&out.out), part.places(out));
    let k_sd = load_head::<T>(&k, batch, kv_head, spec.keys, dim);
    let v_sd = load_head::<T>(&v, batch, kv_head, spec.keys, dim);
    let k_ds = Turned::new(&k_sd, dim, queries);
    let mut score_ts = vec![0.0f32; BLOCK_T * BLOCK_S];
    for head in kv_head * group..(kv_head + 1) * group {
        let q_td = load_head::<T>(&q, batch, head, queries, dim);
        let mut out_td = vec![0.0f32; queries * dim];
        // SAFETY: each (part, head) is written by one task.
        let lse_t = unsafe { logsumexp.range(part.rows(head)) };
        let mask = Mask::new(part, head);
        for t0 in (0..queries).step_by(BLOCK_T) {
            let t1 = (t0 + BLOCK_T).min(queries);
            let (block, lse_t) = (t0 * dim..t1 * dim, &mut lse_t[t0..t1]);
            let (q_td, out_td) = (&q_td[block.clone()], &mut out_td[block]);
            forward_block(&mask, q_td, &k_ds, &v_sd, t0, &mut score_ts, out_td, lse_t);
        }
        store_head::<T>(&out_td, target, &out, batch, head, dim);
    }
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
    // A sink is there before any key, and gives nothing.
    let (mut largest_t, mut total_t) = match mask.sink() {
        Some(sink) => ([sink; BLOCK_T], [1.0f32; BLOCK_T]),
        None => ([f32::NEG_INFINITY; BLOCK_T], [0.0f32; BLOCK_T]),
    };
    mask.for_key_blocks([t0, t0 + height], [1, BLOCK_S], |s0, width| {
        let keys = s0 * dim..(s0 + width) * dim;
        let block = &mut score_ts[..height * width];
        small(height, width, dim, &rows(q_td, dim), &k_ds.starting_at(s0), block, mask.spec.scale, false);
        vectorized!(|| {
            mask.cap(block);
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
    });
    vectorized!(|| {
        for t in 0..height {
            // Rows that see no key (padding) give zeros.
            let inverse = if total_t[t] > 0.0 { 1.0 / total_t[t] } else { 0.0 };
            out_td[t * dim..(t + 1) * dim].iter_mut().for_each(|out| *out *= inverse);
            lse_t[t] = largest_t[t] + total_t[t].ln();
        }
    });
}

impl Attention for CpuBackend {
    fn attends_over_blocks(&self) -> bool {
        true
    }

    fn shapes_scores(&self) -> bool {
        true
    }

    fn attention(
        &self,
        spec: &AttentionSpec<'_>,
        q: &Heads<'_>,
        k: &Heads<'_>,
        v: &Heads<'_>,
        out: HeadsOut<'_>,
        logsumexp: Out<'_>,
    ) -> Result<()> {
        forward(&self.threads, spec, [q, k, v], &out, logsumexp)
    }

    fn attention_backward(
        &self,
        spec: &AttentionSpec<'_>,
        q: &Heads<'_>,
        k: &Heads<'_>,
        v: &Heads<'_>,
        out: &Heads<'_>,
        logsumexp: &Tensor,
        dout: &Heads<'_>,
        gradients: [HeadsOut<'_>; 3],
    ) -> Result<()> {
        let threads = &self.threads;
        let inputs = [q, k, v, out, dout];
        let parts = Part::all(spec);
        float_kernel!("attention_backward", inputs[0].tensor.dtype(), T => {
            let lse = read::<f32>(logsumexp);
            threads.run(parts.len() * spec.kv_heads, |task| {
                let (part, kv_head) = (&parts[task / spec.kv_heads], task % spec.kv_heads);
                #[cfg(target_arch = "x86_64")]
                if on_amx(&part.spec, inputs[0]) {
                    return attention_amx::backward(part, kv_head, inputs, lse, &gradients);
                }
                backward_heads::<T>(part, kv_head, inputs, lse, &gradients);
            });
        })
    }

    /// One new token per sequence: appended to the caches at `place`, then an ordinary forward pass over what they hold.
    fn attention_step(
        &self,
        spec: &AttentionSpec<'_>,
        new: [&Heads<'_>; 3],
        caches: [HeadsOut<'_>; 2],
        place: &Tensor,
        out: HeadsOut<'_>,
    ) -> Result<()> {
        let [q, k, v] = new;
        let [mut keys, mut values] = caches;
        let place = read::<i64>(place)[0];
        let Some(past) = usize::try_from(place).ok().filter(|&past| past < spec.keys) else {
            let what = format!("token {place} does not fit a cache of {}", spec.keys);
            return Err(TensorError::argument("attention_step", what));
        };
        for (new, cache) in [(k, &mut keys), (v, &mut values)] {
            let places = cache.places;
            for sequence in 0..spec.batch {
                let source = new.offset + sequence * new.batch_stride;
                let target = places.offset + sequence * places.batch_stride + past * places.token_stride;
                let (from, to) = (new.head_stride, places.head_stride);
                let out = cache.out.again();
                layout::copy_blocks(new.tensor, source, from, out, target, to, spec.kv_heads, spec.dim);
            }
        }
        let device = q.tensor.device();
        let mut logsumexp = Tensor::empty([spec.batch, spec.heads, 1], DType::F32, device)?;
        let spec = AttentionSpec { keys: past + 1, ..*spec };
        let (keys, values) = (keys.into_heads(), values.into_heads());
        forward(&self.threads, &spec, [q, &keys, &values], &out, logsumexp.out()?)
    }

    fn rotary(
        &self,
        heads: HeadsOut<'_>,
        batch: usize,
        tokens: usize,
        head_count: usize,
        cos: &Tensor,
        sin: &Tensor,
        interleaved: bool,
        inverse: bool,
    ) -> Result<()> {
        let threads = &self.threads;
        let heads = &heads;
        let pairs = cos.shape().last();
        let (cos, sin) = (read::<f32>(cos), read::<f32>(sin));
        // One table for all sequences, or one per sequence.
        let per_sequence = cos.len() > tokens * pairs;
        let sign = if inverse { -1.0 } else { 1.0 };
        let (out, heads) = (&heads.out, heads.places);
        float_kernel!("rotary", out.dtype(), T => {
            let target = Shared::<T>::of(out);
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
}

/// The gradients of one key head and of all query heads that share it.
fn backward_heads<T: Float>(
    part: &Part<'_>,
    kv_head: usize,
    inputs: [&Heads<'_>; 5],
    lse: &[f32],
    gradients: &[HeadsOut<'_>; 3],
) {
    let (spec, batch) = (&part.spec, part.batch);
    let (queries, keys, dim, group) = (spec.queries, spec.keys, spec.dim, spec.heads / spec.kv_heads);
    let [q, k, v, out, dout] = inputs.map(|heads| part.of(heads));
    let [dq_target, dk_target, dv_target] =
        gradients.each_ref().map(|gradient| Shared::<T>::of(&gradient.out));
    let [dq, dk, dv] = gradients.each_ref().map(|gradient| part.places(gradient));
    let k_sd = load_head::<T>(&k, batch, kv_head, keys, dim);
    let v_sd = load_head::<T>(&v, batch, kv_head, keys, dim);
    let (mut dk_sd, mut dv_sd) = (vec![0.0f32; keys * dim], vec![0.0f32; keys * dim]);
    let (k_ds, v_ds) = (Turned::new(&k_sd, dim, queries), Turned::new(&v_sd, dim, queries));
    let mut scratch = BackwardScratch::default();
    for head in kv_head * group..(kv_head + 1) * group {
        let [q_td, out_td, dout_td] =
            [&q, &out, &dout].map(|heads| load_head::<T>(heads, batch, head, queries, dim));
        let mut dq_td = vec![0.0f32; queries * dim];
        let (mask, lse_t) = (Mask::new(part, head), &lse[part.rows(head)]);
        for t0 in (0..queries).step_by(BLOCK_T) {
            let t1 = (t0 + BLOCK_T).min(queries);
            let block = t0 * dim..t1 * dim;
            backward_block(
                &mask,
                &q_td[block.clone()],
                &k_sd,
                &k_ds,
                &v_ds,
                &out_td[block.clone()],
                &dout_td[block.clone()],
                &lse_t[t0..t1],
                t0,
                &mut scratch,
                &mut dq_td[block],
                &mut dk_sd,
                &mut dv_sd,
            );
        }
        store_head::<T>(&dq_td, dq_target, &dq, batch, head, dim);
    }
    store_head::<T>(&dk_sd, dk_target, &dk, batch, kv_head, dim);
    store_head::<T>(&dv_sd, dv_target, &dv, batch, kv_head, dim);
}

struct BackwardScratch {
    /// Probabilities, then the gradient of the scores.
    score_ts: Vec<f32>,
    /// Probabilities after dropout.
    dropped_ts: Vec<f32>,
    /// The gradient of the probabilities.
    dprob_ts: Vec<f32>,
    /// What a capped score gains of what goes in, where scores are capped.
    slope_ts: Vec<f32>,
}

impl Default for BackwardScratch {
    fn default() -> Self {
        let block = || vec![0.0; BLOCK_T * BLOCK_S];
        BackwardScratch { score_ts: block(), dropped_ts: block(), dprob_ts: block(), slope_ts: Vec::new() }
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
    let mut delta_t = [0.0f32; BLOCK_T];
    vectorized!(|| {
        for t in 0..height {
            let dout = &dout_td[t * dim..(t + 1) * dim];
            delta_t[t] = sum_by(&out_td[t * dim..(t + 1) * dim], |i, out| out * dout[i]);
        }
    });
    let has_dropout = mask.spec.dropout.is_some();
    mask.for_key_blocks([t0, t0 + height], [1, BLOCK_S], |s0, width| {
        let span = s0 * dim..(s0 + width) * dim;
        let prob = &mut scratch.score_ts[..height * width];
        let dprob = &mut scratch.dprob_ts[..height * width];
        small(height, width, dim, &rows(q_td, dim), &k_ds.starting_at(s0), prob, scale, false);
        small(height, width, dim, &rows(dout_td, dim), &v_ds.starting_at(s0), dprob, 1.0, false);
        mask.cap_with_slopes(prob, &mut scratch.slope_ts);
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
            prob.iter_mut().zip(&scratch.slope_ts).for_each(|(dscore, slope)| *dscore *= slope);
        });
        let dscore = &*prob;
        small(height, dim, width, &rows(dscore, width), &rows(&k_sd[span.clone()], dim), dq_td, scale, true);
        small(width, dim, height, &columns(dscore, width), &rows(q_td, dim), &mut dk_sd[span], scale, true);
    });
}
