//! Attention over a cache in blocks, for rows of many sequences.
//!
//! A task is one key/value head of a few rows of one sequence. The keys go by in spans that begin at fixed places, with a
//! running maximum and sum per row, as in `attention.rs`. What a row's result is made of, and in which order, its own place
//! alone decides: not the rows beside it, nor how a prompt was cut into passes.

use ferrospeed_tensor::backend::PagedAttention;
use ferrospeed_tensor::dtype::Float;
use ferrospeed_tensor::loops::simd::{dot, map_and_sum, max, vectorized};
use ferrospeed_tensor::loops::threads::Threads;
use ferrospeed_tensor::pages::PagedSpec;
use ferrospeed_tensor::{DType, Out, PagedSequence, Result, Tensor};

use crate::math::{exp, tanh};
use crate::parallel::Shared;
use crate::{CpuBackend, float_kernel, read, write};

/// Rows of a task, at most.
const ROWS: usize = 16;
/// Keys that are weighed at once.
const SPAN: usize = 256;

/// Some rows of one sequence.
struct Task<'a> {
    sequence: &'a PagedSequence,
    /// The first row among all of the pass.
    row: usize,
    /// Its place in the sequence.
    place: usize,
    count: usize,
}

pub(super) fn forward(
    threads: &Threads,
    spec: &PagedSpec<'_>,
    q: &Tensor,
    [keys, values]: [&Tensor; 2],
    out: Out<'_>,
) -> Result<()> {
    let mut tasks = Vec::new();
    let mut row = 0;
    for sequence in &spec.rows.sequences {
        for start in (0..sequence.count).step_by(ROWS) {
            let count = ROWS.min(sequence.count - start);
            tasks.push(Task { sequence, row: row + start, place: sequence.first + start, count });
        }
        row += sequence.count;
    }
    let slopes = spec.alibi_slopes.map(read::<f32>);
    float_kernel!("attention_paged", q.dtype(), T => {
        let (q, keys, values) = (read::<T>(q), read::<T>(keys), read::<T>(values));
        let target = Shared::new(write::<T>(out));
        threads.run(tasks.len() * spec.kv_heads, |index| {
            attend(spec, &tasks[index / spec.kv_heads], index % spec.kv_heads, slopes, q, [keys, values], target);
        });
    })
}

/// Keys or values of one head at some places of a sequence, as f32 rows.
fn gather<T: Float>(
    spec: &PagedSpec<'_>,
    sequence: &PagedSequence,
    cache: &[T],
    kv_head: usize,
    places: std::ops::Range<usize>,
    rows_sd: &mut [f32],
) {
    let (dim, tokens) = (spec.dim, spec.block_tokens);
    vectorized!(|| {
        for (place, row) in places.zip(rows_sd.chunks_mut(dim)) {
            let slot = sequence.blocks[place / tokens] as usize * tokens + place % tokens;
            let start = (slot * spec.kv_heads + kv_head) * dim;
            row.iter_mut().zip(&cache[start..start + dim]).for_each(|(to, from)| *to = from.widen());
        }
    });
}

fn attend<T: Float>(
    spec: &PagedSpec<'_>,
    task: &Task<'_>,
    kv_head: usize,
    slopes: Option<&[f32]>,
    q: &[T],
    [keys, values]: [&[T]; 2],
    target: Shared<T>,
) {
    let (dim, group) = (spec.dim, spec.heads / spec.kv_heads);
    let lines = task.count * group;
    let start_of =
        |line: usize| ((task.row + line / group) * spec.heads + kv_head * group + line % group) * dim;
    let mut q_ld = vec![0.0f32; lines * dim];
    for (line, row) in q_ld.chunks_mut(dim).enumerate() {
        row.iter_mut().zip(&q[start_of(line)..][..dim]).for_each(|(to, from)| *to = from.widen());
    }
    let mut out_ld = vec![0.0f32; lines * dim];
    let mut largest: Vec<f32> = match spec.sinks.map(read::<f32>) {
        // A sink is there before any key, and gives nothing.
        Some(sinks) => (0..lines).map(|line| sinks[kv_head * group + line % group]).collect(),
        None => vec![f32::NEG_INFINITY; lines],
    };
    let mut total = vec![if spec.sinks.is_some() { 1.0f32 } else { 0.0 }; lines];
    let end = task.place + task.count;
    let seen_from = |place: usize| spec.window.map_or(0, |window| (place + 1).saturating_sub(window));
    let (mut k_sd, mut v_sd) = (vec![0.0f32; SPAN.min(end) * dim], vec![0.0f32; SPAN.min(end) * dim]);
    let mut scores = [0.0f32; SPAN];
    for span in (seen_from(task.place) / SPAN * SPAN..end).step_by(SPAN) {
        let width = SPAN.min(end - span);
        gather(spec, task.sequence, keys, kv_head, span..span + width, &mut k_sd);
        gather(spec, task.sequence, values, kv_head, span..span + width, &mut v_sd);
        for line in 0..lines {
            let place = task.place + line / group;
            let (from, to) = (seen_from(place).max(span), (place + 1).min(span + width));
            if from >= to {
                continue;
            }
            let slope = slopes.map(|slopes| slopes[kv_head * group + line % group]);
            let scores = &mut scores[..to - from];
            let q_d = &q_ld[line * dim..(line + 1) * dim];
            let out_d = &mut out_ld[line * dim..(line + 1) * dim];
            let (k_sd, v_sd) = (&k_sd[(from - span) * dim..], &v_sd[(from - span) * dim..]);
            vectorized!(|| {
                for (s, (score, k_d)) in scores.iter_mut().zip(k_sd.chunks(dim)).enumerate() {
                    *score = dot(q_d, k_d) * spec.scale;
                    if let Some(cap) = spec.score_cap {
                        *score = cap * tanh(*score / cap);
                    }
                    if let Some(slope) = slope {
                        *score += slope * (from + s) as f32;
                    }
                }
                let new = max(scores).max(largest[line]);
                // What is minus infinity everywhere has nothing to rescale.
                let shift = if new == f32::NEG_INFINITY { 0.0 } else { new };
                let shrink = exp(largest[line] - shift);
                total[line] = total[line] * shrink + map_and_sum(scores, |score| exp(score - shift));
                largest[line] = new;
                out_d.iter_mut().for_each(|out| *out *= shrink);
                for (weight, v_d) in scores.iter().zip(v_sd.chunks(dim)) {
                    out_d.iter_mut().zip(v_d).for_each(|(out, v)| *out += weight * v);
                }
            });
        }
    }
    for (line, row) in out_ld.chunks(dim).enumerate() {
        let inverse = if total[line] > 0.0 { 1.0 / total[line] } else { 0.0 };
        // SAFETY: each head of each row is written by one task.
        let out = unsafe { target.range(start_of(line)..start_of(line) + dim) };
        out.iter_mut().zip(row).for_each(|(out, value)| *out = T::narrow(value * inverse));
    }
}

impl PagedAttention for CpuBackend {
    fn reads_pages(&self, _dtype: DType, _dim: usize) -> bool {
        true
    }

    fn attention_paged(
        &self,
        spec: &PagedSpec<'_>,
        [q, k, v]: [&Tensor; 3],
        mut caches: [Out<'_>; 2],
        out: Out<'_>,
    ) -> Result<()> {
        spec.rows.append([k, v], caches.each_mut().map(Out::again))?;
        forward(&self.threads, spec, q, caches.map(Out::into_tensor), out)
    }
}
