//! Attention of rows of many sequences over a cache in blocks; not recorded on the tape.
//!
//! A device without a kernel for it brings the blocks of one sequence after the other together and attends over those.

use crate::dtype::DType;
use crate::error::{Result, TensorError};
use crate::ops::attention::{AttentionOptions, sinks_of};
use crate::ops::attention_cached::attention_cached;
use crate::ops::{concat, index_select, reshape, rotary};
use crate::pages::{PagedSpec, Pages};
use crate::tensor::Tensor;

const OP: &str = "attention_paged";

/// Appends the keys and values of `rows` to caches `[blocks, block_tokens, kv_heads, dim]`, and attends: each row sees its
/// sequence up to itself. `q`, `k` and `v` are `[1, rows, …, dim]`, and so is the result.
///
/// Refuses masks and positions of keys: what is in a block is a token, and its place is known.
pub fn attention_paged(
    new: [&Tensor; 3],
    caches: [&mut Tensor; 2],
    pages: &Pages,
    options: &AttentionOptions,
) -> Result<Tensor> {
    attend(new, caches, pages, None, options)
}

/// Angles by which the queries and keys of rows are turned, as [`rotary`] does it.
#[derive(Debug, Clone, Copy)]
pub struct Turn<'a> {
    /// Cosines `[1, rows, pairs]`.
    pub cos: &'a Tensor,
    /// Sines.
    pub sin: &'a Tensor,
    /// Whether pairs are neighbours rather than halves.
    pub interleaved: bool,
}

/// [`attention_paged`] of queries and keys that are turned first, in the same pass where the device can.
pub fn attention_paged_turned(
    [q, k, v]: [Tensor; 3],
    caches: [&mut Tensor; 2],
    pages: &Pages,
    turn: &Turn<'_>,
    options: &AttentionOptions,
) -> Result<Tensor> {
    let backend = q.device().backend();
    let &[_, rows, _, dim] = q.sizes() else {
        return Err(TensorError::shape(OP, "the queries", *q.shape(), "[1, rows, heads, channels]"));
    };
    let fits = |table: &Tensor| table.dtype() == DType::F32 && table.sizes() == [1, rows, dim / 2];
    let is_whole = !turn.interleaved && fits(turn.cos) && fits(turn.sin);
    if !backend.turns_pages() || !backend.reads_pages(q.dtype(), dim) || !is_whole {
        let [q, k] = [q, k].map(|x| rotary(x, turn.cos, turn.sin, turn.interleaved));
        return attention_paged([&q?, &k?, &v], caches, pages, options);
    }
    attend([&q, &k, &v], caches, pages, Some([turn.cos, turn.sin]), options)
}

/// Both, with kernels of the device where it has them.
fn attend(
    [q, k, v]: [&Tensor; 3],
    [keys, values]: [&mut Tensor; 2],
    pages: &Pages,
    turn: Option<[&Tensor; 2]>,
    options: &AttentionOptions,
) -> Result<Tensor> {
    let sinks = sinks_of(options)?;
    let spec = PagedSpec { turn, sinks: sinks.as_ref(), ..check([q, k, v], [keys, values], pages, options)? };
    let backend = q.device().backend();
    let is_plain = options.score_cap.is_none() && sinks.is_none();
    if !backend.reads_pages(q.dtype(), spec.dim) || (!is_plain && !backend.shapes_scores()) {
        return attention_gathered([q, k, v], [keys, values], pages, options);
    }
    let mut out = Tensor::empty(*q.shape(), q.dtype(), q.device())?;
    backend.attention_paged(&spec, [q, k, v], [keys.out()?, values.out()?], out.out()?)?;
    Ok(out)
}

fn check<'a>(
    [q, k, v]: [&Tensor; 3],
    [keys, values]: [&Tensor; 2],
    pages: &'a Pages,
    options: &'a AttentionOptions,
) -> Result<PagedSpec<'a>> {
    let rows = &*pages.rows;
    let fail = |what: String| Err(TensorError::argument(OP, what));
    let (&[one, count, heads, dim], &[_, tokens, kv_heads, _]) = (q.sizes(), keys.sizes()) else {
        return Err(TensorError::ShapeMismatch { op: OP, left: *q.shape(), right: *keys.shape() });
    };
    let blocks = keys.sizes()[0];
    let fits = one == 1
        && k.sizes() == [1, count, kv_heads, dim]
        && v.shape() == k.shape()
        && keys.shape() == values.shape()
        && keys.shape()[3] == dim
        && kv_heads > 0
        && tokens > 0
        && heads.is_multiple_of(kv_heads)
        && [k, v, keys, values].iter().all(|tensor| tensor.dtype() == q.dtype());
    if !fits {
        return Err(TensorError::ShapeMismatch { op: OP, left: *q.shape(), right: *keys.shape() });
    }
    let is_masked = options.key_mask.is_some()
        || options.documents.is_some()
        || options.blocks.is_some()
        || options.key_bias.is_some()
        || options.score_bias.is_some();
    if is_masked || options.alibi_positions.is_some() || !options.causal {
        return fail("every row sees its sequence up to itself; there is no mask beside that".into());
    }
    if let Some(slopes) = &options.alibi_slopes
        && slopes.sizes() != [heads]
    {
        return fail(format!("alibi_slopes has shape {}, expected [{heads}]", slopes.shape()));
    }
    let known =
        pages.map.as_ref().map_or_else(|| rows.sequences.iter().map(|one| one.count).sum(), |map| map.rows());
    if known != count {
        return fail(format!("{count} rows are not those of the sequences"));
    }
    for one in &rows.sequences {
        if one.blocks.len() * tokens < one.first + one.count {
            return fail(format!("{} blocks do not hold {} tokens", one.blocks.len(), one.first + one.count));
        }
        if let Some(block) = one.blocks.iter().find(|&&block| block as usize >= blocks) {
            return fail(format!("block {block} is none of the cache's {blocks}"));
        }
    }
    Ok(PagedSpec {
        heads,
        kv_heads,
        dim,
        block_tokens: tokens,
        scale: options.scale.unwrap_or_else(|| 1.0 / (dim as f32).sqrt()),
        window: options.window,
        alibi_slopes: options.alibi_slopes.as_ref(),
        score_cap: options.score_cap,
        sinks: None,
        turn: None,
        rows,
        map: pages.map.as_deref(),
    })
}

/// [`attention_paged`] over a copy of each sequence's blocks, on any device.
pub fn attention_gathered(
    [q, k, v]: [&Tensor; 3],
    [keys, values]: [&mut Tensor; 2],
    pages: &Pages,
    options: &AttentionOptions,
) -> Result<Tensor> {
    let PagedSpec { heads, kv_heads, dim, block_tokens: tokens, .. } =
        check([q, k, v], [keys, values], pages, options)?;
    pages.rows.append([k, v], [keys.out()?, values.out()?])?;
    let (caches, count) = ([&*keys, &*values], q.sizes()[1]);
    let mut row = 0;
    let mut parts = Vec::with_capacity(pages.rows.sequences.len());
    for one in &pages.rows.sequences {
        let used = (one.first + one.count).div_ceil(tokens);
        let blocks: Vec<i64> = one.blocks[..used].iter().map(|&block| i64::from(block)).collect();
        let blocks = Tensor::from_slice(&blocks, [used], q.device())?;
        let together = |cache: &Tensor| -> Result<Tensor> {
            reshape(&index_select(cache, 0, &blocks)?, [1, used * tokens, kv_heads, dim])
        };
        let queries = q.slice(row * heads * dim, [1, one.count, heads, dim])?;
        let (keys, values) = (together(caches[0])?, together(caches[1])?);
        parts.push(attention_cached(&queries, &keys, &values, one.first + one.count, options)?);
        row += one.count;
    }
    reshape(&concat(&parts, 1)?, [1, count, heads, dim])
}
