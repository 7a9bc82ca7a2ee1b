//! bf16 attention on AMX: the same walk over blocks as `attention`, with every product on the tile registers.
//!
//! Keys and values of a head are packed once and stay in the second-level cache. Scores, sums and gradients are
//! f32; the probabilities and the gradients of the scores are rounded to bf16 where they become a factor.
//!
//! Legend: t queries, s keys, d channels; every extent is padded to 32 with zeros. A `Right` is an operand packed for
//! the right side of a product.

use std::cell::RefCell;

use ferrospeed_tensor::backend::{HeadPlaces, Heads, HeadsOut};
use ferrospeed_tensor::dtype::Float;
use ferrospeed_tensor::loops::simd::{max, sum_by, vectorized};
use half::bf16;

use crate::aligned::Aligned;
use crate::amx::{BLOCK, DEPTH, Factor, Left, PAIR, Tiles};
use crate::attention_mask::{Mask, Part};
use crate::gemm::Operand;
use crate::math::fused_exp as exp;
use crate::parallel::Shared;
use crate::read;

/// A function compiled once for each level of instructions, for bodies so large that a closure's inlining cannot be relied on.
macro_rules! multiversion {
    ($(#[$meta:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block) => {
        $(#[$meta])*
        fn $name($($argument: $type),*) {
            #[inline(always)]
            fn plain($($argument: $type),*) $body
            #[cfg_attr(
                target_arch = "x86_64",
                target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2")
            )]
            unsafe fn wide($($argument: $type),*) { plain($($argument),*) }
            #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2"))]
            unsafe fn middle($($argument: $type),*) { plain($($argument),*) }
            match ferrospeed_tensor::loops::simd::level() {
                // SAFETY: `level` never names more than the machine was found to have.
                ferrospeed_tensor::loops::simd::Level::Avx512 => unsafe { wide($($argument),*) },
                // SAFETY: as above.
                ferrospeed_tensor::loops::simd::Level::Avx2 => unsafe { middle($($argument),*) },
                ferrospeed_tensor::loops::simd::Level::Portable => plain($($argument),*),
            }
        }
    };
}

const BLOCK_T: usize = 64;
const BLOCK_S: usize = 256;

fn padded(length: usize) -> usize {
    length.next_multiple_of(BLOCK)
}

/// Rows of one head where they lie: tokens × dim.
fn head<'a>(heads: &Heads<'a>, batch: usize, head: usize) -> Operand<'a, bf16> {
    let start = heads.offset + batch * heads.batch_stride + head * heads.head_stride;
    Operand {
        elements: &read::<bf16>(heads.tensor)[start..],
        row_stride: heads.token_stride,
        column_stride: 1,
    }
}

/// The rows from `row` on.
fn from_row<'a>(operand: &Operand<'a, bf16>, row: usize) -> Operand<'a, bf16> {
    Operand { elements: &operand.elements[row * operand.row_stride..], ..*operand }
}

/// The transpose, without moving anything.
fn turned<'a>(operand: &Operand<'a, bf16>) -> Operand<'a, bf16> {
    Operand { row_stride: operand.column_stride, column_stride: operand.row_stride, ..*operand }
}

/// An operand packed for the right side: `k × columns`.
#[derive(Default)]
struct Right {
    tiles: Aligned<bf16>,
    steps: usize,
    columns: usize,
}

impl Right {
    fn pack(&mut self, operand: &Operand<'_, bf16>, k: usize, columns: usize) {
        (self.steps, self.columns) = (k.div_ceil(DEPTH), columns.div_ceil(BLOCK));
        self.tiles.resize(self.steps * self.columns * PAIR);
        for (block, tiles) in self.tiles.chunks_mut((self.steps * PAIR).max(1)).enumerate() {
            bf16::pack_right(operand, [0, k], block * BLOCK, columns, tiles);
        }
    }
}

/// A left operand packed by blocks of 32 rows.
#[derive(Default)]
struct PackedLeft {
    tiles: Aligned<bf16>,
    steps: usize,
}

impl PackedLeft {
    fn pack(&mut self, operand: &Operand<'_, bf16>, rows: usize, k: usize) {
        self.steps = k.div_ceil(DEPTH);
        self.tiles.resize(self.steps * rows.div_ceil(BLOCK) * PAIR);
        for (block, tiles) in self.tiles.chunks_mut((self.steps * PAIR).max(1)).enumerate() {
            bf16::pack_left(operand, [0, k], block * BLOCK, rows, tiles);
        }
    }
}

/// `out[rows, columns] = [out +] left · right`, over blocks: `columns` are column blocks of `right`, `steps` its depths.
/// Rows of `out` are `stride` apart and padded.
fn multiply(
    tiles: &Tiles,
    left: &PackedLeft,
    right: &Right,
    columns: std::ops::Range<usize>,
    steps: std::ops::Range<usize>,
    out: &mut [f32],
    stride: usize,
    accumulate: bool,
) {
    let depth = steps.len();
    let rows = if left.steps == 0 { 0 } else { left.tiles.len() / (left.steps * PAIR) };
    assert!(depth == left.steps && steps.end <= right.steps && columns.end <= right.columns);
    assert!(right.tiles.len() >= right.columns * right.steps * PAIR);
    assert!(out.len() >= rows * BLOCK * stride && columns.len() * BLOCK <= stride);
    for column in columns.clone() {
        for row in 0..rows {
            let a = Left::packed::<bf16>(&left.tiles[row * depth * PAIR..(row + 1) * depth * PAIR]);
            let b = &right.tiles[(column * right.steps + steps.start) * PAIR..];
            let target = row * BLOCK * stride + (column - columns.start) * BLOCK;
            // SAFETY: both operands reach `depth` steps and the target block lies in `out`: asserted above.
            unsafe { tiles.multiply(a, b.as_ptr(), depth, out.as_mut_ptr().add(target), stride, accumulate) };
        }
    }
}

/// Rounds `height` rows of `width` values to bf16 rows of the same stride.
#[inline(always)]
fn round_rows(from: &[f32], to: &mut [bf16], stride: usize, height: usize, width: usize) {
    for (from, to) in from.chunks(stride).zip(to.chunks_mut(stride)).take(height) {
        for (to, from) in to[..width].iter_mut().zip(&from[..width]) {
            *to = bf16::narrow(*from);
        }
    }
}

/// Writes rows of f32 back as a head.
fn store_head(
    values: &[f32],
    stride: usize,
    target: Shared<bf16>,
    heads: &HeadPlaces,
    [batch, head]: [usize; 2],
    first: usize,
    rows: usize,
    dim: usize,
    factor: impl Fn(usize) -> f32,
) {
    let base = heads.offset + batch * heads.batch_stride + head * heads.head_stride;
    vectorized!(|| {
        for (row, values) in values.chunks(stride).take(rows).enumerate() {
            let start = base + (first + row) * heads.token_stride;
            // SAFETY: each (batch, head, token) is written by one task.
            let out = unsafe { target.range(start..start + dim) };
            let factor = factor(row);
            for (out, value) in out.iter_mut().zip(values) {
                *out = bf16::narrow(*value * factor);
            }
        }
    });
}

/// What a task computes in, besides what it packs of its heads; kept by its thread. Nothing in it is read before it is
/// written.
#[derive(Default)]
struct Workspace {
    k_ds: Right,
    v_sd: Right,
    v_ds: Right,
    k_sd: Right,
    q_td: Right,
    dout_td: Right,
    q_left: PackedLeft,
    dout_left: PackedLeft,
    /// Of the matrix that was made last: probabilities or gradients of scores.
    left: PackedLeft,
    /// Scores, then probabilities, then the gradients of the scores.
    prob_ts: Aligned<f32>,
    dprob_ts: Aligned<f32>,
    dropped_ts: Aligned<f32>,
    rounded_ts: Aligned<bf16>,
    /// The output, or the gradient of the queries.
    sum_td: Aligned<f32>,
    dk_sd: Aligned<f32>,
    dv_sd: Aligned<f32>,
}

thread_local! {
    static WORKSPACE: RefCell<Workspace> = RefCell::default();
}

/// `buffer` with `length` zeros in it.
fn cleared(buffer: &mut Aligned<f32>, length: usize) -> &mut [f32] {
    let zeros = buffer.at_least(length);
    zeros.fill(0.0);
    zeros
}

/// A block of scores: its first query and key, and how many of each.
#[derive(Clone, Copy)]
struct Place {
    t0: usize,
    s0: usize,
    height: usize,
    width: usize,
}

/// What forward carries from one block of keys to the next.
struct Running<'a> {
    out_td: &'a mut [f32],
    width_d: usize,
    largest_t: &'a mut [f32; BLOCK_T],
    total_t: &'a mut [f32; BLOCK_T],
}

/// Turns a row of products into scores; what lies beyond the last key becomes minus infinity.
#[inline(always)]
fn scores(mask: &Mask<'_>, row: &mut [f32], t: usize, place: Place) {
    let scale = mask.scale();
    row[..place.width].iter_mut().for_each(|score| *score *= scale);
    row[place.width..].fill(f32::NEG_INFINITY);
    mask.apply(&mut row[..place.width], place.t0 + t, place.s0, place.width);
}

multiversion! {
    /// Products become probabilities relative to the running maximum; the output so far is rescaled to it.
    fn probabilities(
        mask: &Mask<'_>,
        place: Place,
        score_ts: &mut [f32],
        prob_ts: &mut [bf16],
        running: Running<'_>,
    ) {
        let Running { out_td, width_d, largest_t, total_t } = running;
        let span = padded(place.width);
        for t in 0..place.height {
            let row = &mut score_ts[t * BLOCK_S..t * BLOCK_S + span];
            scores(mask, row, t, place);
            let new = max(row).max(largest_t[t]);
            // A row that sees nothing so far has nothing to rescale.
            let shift = if new == f32::NEG_INFINITY { 0.0 } else { new };
            let shrink = exp(largest_t[t] - shift);
            row.iter_mut().for_each(|score| *score = exp(*score - shift));
            total_t[t] = total_t[t] * shrink + sum_by(row, |_, p| p);
            largest_t[t] = new;
            if shrink != 1.0 {
                out_td[t * width_d..(t + 1) * width_d].iter_mut().for_each(|out| *out *= shrink);
            }
            mask.dropout(&mut row[..place.width], place.t0 + t, place.s0, place.width);
        }
        round_rows(score_ts, prob_ts, BLOCK_S, place.height, span);
    }
}

multiversion! {
    /// Rebuilds the probabilities from the saved log-sum-exp; `rounded_ts` gets them after dropout.
    fn weights_again(
        mask: &Mask<'_>,
        place: Place,
        lse_t: &[f32],
        prob_ts: &mut [f32],
        dprob_ts: &mut [f32],
        dropped_ts: &mut [f32],
        rounded_ts: &mut [bf16],
    ) {
        let span = padded(place.width);
        for t in 0..place.height {
            let (start, end) = (t * BLOCK_S, t * BLOCK_S + span);
            let row = &mut prob_ts[start..end];
            scores(mask, row, t, place);
            let shift = if lse_t[t] == f32::NEG_INFINITY { 0.0 } else { lse_t[t] };
            row.iter_mut().for_each(|score| *score = exp(*score - shift));
            dprob_ts[start + place.width..end].fill(0.0);
            if mask.has_dropout() {
                dropped_ts[start..end].copy_from_slice(row);
                let (t, inside) = (place.t0 + t, start..start + place.width);
                mask.dropout(&mut dropped_ts[inside.clone()], t, place.s0, place.width);
                mask.dropout(&mut dprob_ts[inside], t, place.s0, place.width);
            }
        }
        let weights = if mask.has_dropout() { dropped_ts } else { prob_ts };
        round_rows(weights, rounded_ts, BLOCK_S, place.height, span);
    }
}

multiversion! {
    /// Probabilities become gradients of the scores, in f32 and rounded.
    fn score_gradients(
        place: Place,
        delta_t: &[f32; BLOCK_T],
        prob_ts: &mut [f32],
        dprob_ts: &[f32],
        rounded_ts: &mut [bf16],
    ) {
        let span = padded(place.width);
        for t in 0..place.height {
            let (start, end) = (t * BLOCK_S, t * BLOCK_S + span);
            for (prob, dprob) in prob_ts[start..end].iter_mut().zip(&dprob_ts[start..end]) {
                *prob *= dprob - delta_t[t];
            }
        }
        round_rows(prob_ts, rounded_ts, BLOCK_S, place.height, span);
    }
}

/// All query heads of one key head.
pub(crate) fn forward(
    part: &Part<'_>,
    kv_head: usize,
    inputs: [&Heads<'_>; 3],
    out: &HeadsOut<'_>,
    logsumexp: Shared<f32>,
) {
    let (spec, batch) = (&part.spec, part.batch);
    let (queries, keys, dim) = (spec.queries, spec.keys, spec.dim);
    let group = spec.heads / spec.kv_heads;
    let [q, k, v] = &inputs.map(|heads| part.of(heads));
    let (target, out) = (Shared::<bf16>::of(&out.out), &part.places(out));
    WORKSPACE.with_borrow_mut(|workspace| {
        let Workspace { k_ds, v_sd, q_left, left, prob_ts, rounded_ts, sum_td, .. } = workspace;
        k_ds.pack(&turned(&head(k, batch, kv_head)), dim, keys);
        v_sd.pack(&head(v, batch, kv_head), keys, dim);
        let width_d = padded(dim);
        let score_ts = prob_ts.at_least(BLOCK_T * BLOCK_S);
        let rounded_ts = rounded_ts.at_least(BLOCK_T * BLOCK_S);
        let tiles = Tiles::configure();
        for head_index in kv_head * group..(kv_head + 1) * group {
            let mask = Mask::new(part, head_index);
            let q_td = head(q, batch, head_index);
            for t0 in (0..queries).step_by(BLOCK_T) {
                let height = BLOCK_T.min(queries - t0);
                q_left.pack(&from_row(&q_td, t0), height, dim);
                let out_td = cleared(sum_td, BLOCK_T * width_d);
                let (mut largest_t, mut total_t) = ([f32::NEG_INFINITY; BLOCK_T], [0.0f32; BLOCK_T]);
                mask.for_key_blocks([t0, t0 + height], [BLOCK, BLOCK_S], |s0, width| {
                    let columns = s0 / BLOCK..(s0 + width).div_ceil(BLOCK);
                    multiply(&tiles, q_left, k_ds, columns.clone(), 0..k_ds.steps, score_ts, BLOCK_S, false);
                    let span = padded(width);
                    let place = Place { t0, s0, height, width };
                    let running =
                        Running { out_td, width_d, largest_t: &mut largest_t, total_t: &mut total_t };
                    probabilities(&mask, place, score_ts, rounded_ts, running);
                    left.pack(
                        &Operand { elements: rounded_ts, row_stride: BLOCK_S, column_stride: 1 },
                        height,
                        span,
                    );
                    multiply(&tiles, left, v_sd, 0..v_sd.columns, columns, out_td, width_d, true);
                });
                let row0 = part.rows(head_index).start + t0;
                // SAFETY: each (part, head) is written by one task.
                let lse_t = unsafe { logsumexp.range(row0..row0 + height) };
                for t in 0..height {
                    lse_t[t] = largest_t[t] + total_t[t].ln();
                }
                // Rows that see no key (padding) give zeros.
                let inverse = |t: usize| if total_t[t] > 0.0 { 1.0 / total_t[t] } else { 0.0 };
                store_head(out_td, width_d, target, out, [batch, head_index], t0, height, dim, inverse);
            }
        }
    });
}

/// The gradients of one key head and of all query heads that share it.
pub(crate) fn backward(
    part: &Part<'_>,
    kv_head: usize,
    inputs: [&Heads<'_>; 5],
    lse: &[f32],
    gradients: &[HeadsOut<'_>; 3],
) {
    let (spec, batch) = (&part.spec, part.batch);
    let (queries, keys, dim) = (spec.queries, spec.keys, spec.dim);
    let group = spec.heads / spec.kv_heads;
    let width_d = padded(dim);
    let [dq_target, dk_target, dv_target] =
        gradients.each_ref().map(|gradient| Shared::<bf16>::of(&gradient.out));
    let [dq, dk, dv] = &gradients.each_ref().map(|gradient| part.places(gradient));
    let [q, k, v, out, dout] = &inputs.map(|heads| part.of(heads));
    WORKSPACE.with_borrow_mut(|workspace| {
        let Workspace {
            k_ds, v_ds, k_sd, q_td: q_right, dout_td: dout_right, q_left, dout_left, left, ..
        } = workspace;
        let (k_rows, v_rows) = (head(k, batch, kv_head), head(v, batch, kv_head));
        k_ds.pack(&turned(&k_rows), dim, keys);
        v_ds.pack(&turned(&v_rows), dim, keys);
        k_sd.pack(&k_rows, keys, dim);
        let [dk_sd, dv_sd] =
            [&mut workspace.dk_sd, &mut workspace.dv_sd].map(|sums| cleared(sums, padded(keys) * width_d));
        let [prob_ts, dprob_ts, dropped_ts] =
            [&mut workspace.prob_ts, &mut workspace.dprob_ts, &mut workspace.dropped_ts]
                .map(|block| block.at_least(BLOCK_T * BLOCK_S));
        let rounded_ts = workspace.rounded_ts.at_least(BLOCK_T * BLOCK_S);
        let tiles = Tiles::configure();
        for head_index in kv_head * group..(kv_head + 1) * group {
            let mask = Mask::new(part, head_index);
            let [q_td, out_td, dout_td] = [q, out, dout].map(|heads| head(heads, batch, head_index));
            for t0 in (0..queries).step_by(BLOCK_T) {
                let height = BLOCK_T.min(queries - t0);
                let row0 = part.rows(head_index).start + t0;
                let (q_rows, dout_rows) = (from_row(&q_td, t0), from_row(&dout_td, t0));
                q_left.pack(&q_rows, height, dim);
                dout_left.pack(&dout_rows, height, dim);
                q_right.pack(&q_rows, height, dim);
                dout_right.pack(&dout_rows, height, dim);
                let dq_td = cleared(&mut workspace.sum_td, BLOCK_T * width_d);
                let mut delta_t = [0.0f32; BLOCK_T];
                vectorized!(|| {
                    let mut wide = vec![0.0f32; dim];
                    for t in 0..height {
                        let out_row = &out_td.elements[out_td.index(t0 + t, 0)..][..dim];
                        let dout_row = &dout_rows.elements[t * dout_rows.row_stride..][..dim];
                        wide.iter_mut().zip(out_row).for_each(|(wide, out)| *wide = out.widen());
                        delta_t[t] = sum_by(&wide, |i, out| out * dout_row[i].widen());
                    }
                });
                mask.for_key_blocks([t0, t0 + height], [BLOCK, BLOCK_S], |s0, width| {
                    let columns = s0 / BLOCK..(s0 + width).div_ceil(BLOCK);
                    let span = padded(width);
                    let steps = 0..k_ds.steps;
                    multiply(&tiles, q_left, k_ds, columns.clone(), steps.clone(), prob_ts, BLOCK_S, false);
                    multiply(&tiles, dout_left, v_ds, columns.clone(), steps, dprob_ts, BLOCK_S, false);
                    let place = Place { t0, s0, height, width };
                    let lse_t = &lse[row0..row0 + height];
                    weights_again(&mask, place, lse_t, prob_ts, dprob_ts, dropped_ts, rounded_ts);
                    let keys_range = s0 * width_d..(s0 + span) * width_d;
                    left.pack(
                        &Operand { elements: rounded_ts, row_stride: 1, column_stride: BLOCK_S },
                        span,
                        height,
                    );
                    let all = 0..dout_right.columns;
                    let steps = 0..dout_right.steps;
                    multiply(
                        &tiles,
                        left,
                        dout_right,
                        all.clone(),
                        steps.clone(),
                        &mut dv_sd[keys_range.clone()],
                        width_d,
                        true,
                    );
                    score_gradients(place, &delta_t, prob_ts, dprob_ts, rounded_ts);
                    left.pack(
                        &Operand { elements: rounded_ts, row_stride: 1, column_stride: BLOCK_S },
                        span,
                        height,
                    );
                    multiply(
                        &tiles,
                        left,
                        q_right,
                        all.clone(),
                        steps,
                        &mut dk_sd[keys_range],
                        width_d,
                        true,
                    );
                    left.pack(
                        &Operand { elements: rounded_ts, row_stride: BLOCK_S, column_stride: 1 },
                        height,
                        span,
                    );
                    multiply(&tiles, left, k_sd, all, columns, dq_td, width_d, true);
                });
                let scale = |_| spec.scale;
                store_head(dq_td, width_d, dq_target, dq, [batch, head_index], t0, height, dim, scale);
            }
        }
        store_head(dk_sd, width_d, dk_target, dk, [batch, kv_head], 0, keys, dim, |_| spec.scale);
        store_head(dv_sd, width_d, dv_target, dv, [batch, kv_head], 0, keys, dim, |_| 1.0);
    });
}
