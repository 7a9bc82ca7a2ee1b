//! Attention of new tokens over the keys and values of those before, which a cache holds: not recorded on the tape.

use crate::dtype::DType;
use crate::error::{Result, TensorError};
use crate::ops::attention::{AttentionOptions, PackedHeads, Place, Problem, expect_heads, run, sinks_of};
use crate::shape::Shape;
use crate::tensor::Tensor;

/// Attention of new tokens over the first `keys` tokens of caches `[batch, capacity, kv_heads, dim]`; not recorded.
pub fn attention_cached(
    q: &Tensor,
    k_cache: &Tensor,
    v_cache: &Tensor,
    keys: usize,
    options: &AttentionOptions,
) -> Result<Tensor> {
    expect_heads("q", q.shape())?;
    expect_heads("the cache", k_cache.shape())?;
    let cache = *k_cache.shape();
    if keys > cache[1] || cache != *v_cache.shape() || q.shape()[3] != cache[3] || q.shape()[0] != cache[0] {
        return Err(TensorError::ShapeMismatch { op: "attention_cached", left: *q.shape(), right: cache });
    }
    let problem = Problem {
        batch: cache[0],
        queries: q.shape()[1],
        keys,
        heads: q.shape()[2],
        kv_heads: cache[2],
        dim: cache[3],
        dropout: None,
        options: options.clone(),
    };
    problem.check()?;
    let places = [Place::whole(q.shape()), Place::whole(&cache), Place::whole(&cache)];
    Ok(run(&problem, &[q, k_cache, v_cache], &places, *q.shape())?.0)
}

/// The same with the new tokens' queries, keys and values in one packed projection: the keys and values are appended to
/// the caches behind their first `past` tokens.
pub fn attention_packed_cached(
    qkv: &Tensor,
    heads: usize,
    layout: PackedHeads,
    k_cache: &mut Tensor,
    v_cache: &mut Tensor,
    past: usize,
    options: &AttentionOptions,
) -> Result<Tensor> {
    const OP: &str = "attention_packed_cached";
    expect_heads("the cache", k_cache.shape())?;
    let (shape, cache) = (*qkv.shape(), *k_cache.shape());
    let (capacity, dim) = (cache[1], cache[3]);
    let fits = shape.dims() == 3
        && shape[0] == cache[0]
        && shape.last() == 3 * heads * dim
        && cache[2] == heads
        && cache == *v_cache.shape()
        && past + shape[1] <= capacity;
    if !fits {
        return Err(TensorError::ShapeMismatch { op: OP, left: shape, right: cache });
    }
    let (batch, tokens) = (shape[0], shape[1]);
    // A block is what lies together: a token's heads, or one head.
    let (width, blocks) = match layout {
        PackedHeads::Thirds => (heads * dim, tokens),
        PackedHeads::PerHead => (dim, tokens * heads),
    };
    let token = heads * dim;
    for (part, target) in [(1, &mut *k_cache), (2, &mut *v_cache)] {
        for sequence in 0..batch {
            qkv.device().backend().copy_blocks(
                qkv,
                sequence * tokens * 3 * token + part * width,
                3 * width,
                target.out()?,
                (sequence * capacity + past) * token,
                width,
                blocks,
                width,
            )?;
        }
    }
    let problem = Problem {
        batch,
        queries: tokens,
        keys: past + tokens,
        heads,
        kv_heads: heads,
        dim,
        dropout: None,
        options: options.clone(),
    };
    problem.check()?;
    let places = [Place::packed(layout, 0, tokens, heads, dim), Place::whole(&cache), Place::whole(&cache)];
    let out = run(&problem, &[qkv, k_cache, v_cache], &places, Shape::new(&[batch, tokens, heads, dim]))?.0;
    out.view([batch, tokens, token])
}

/// Attention of one new token per sequence over all that the caches `[batch, capacity, kv_heads, dim]` hold, itself
/// included: `q`, `k` and `v [batch, 1, …, dim]` join the caches at `place`, an `I64` in the device's memory. Not recorded
/// on the tape. No number that the host knows decides what happens here, so a [`crate::Recording`] can hold it.
pub fn attention_step(
    [q, k, v]: [&Tensor; 3],
    caches: [&mut Tensor; 2],
    place: &Tensor,
    options: &AttentionOptions,
) -> Result<Tensor> {
    for (what, tensor) in [("q", q), ("k", k), ("v", v)] {
        expect_heads(what, tensor.shape())?;
    }
    let places = [q, k, v].map(|tensor| Place::whole(tensor.shape()));
    let fits =
        k.shape() == v.shape() && q.shape()[1] == 1 && k.shape()[1] == 1 && q.shape()[3] == k.shape()[3];
    if !fits {
        return Err(TensorError::ShapeMismatch { op: STEP, left: *q.shape(), right: *k.shape() });
    }
    step(q.shape()[2], k.shape()[2], [q, k, v], places, caches, place, options)
}

/// The same with query, key and value in one packed projection `[batch, 1, 3·heads·dim]`; the result is `[batch, 1, heads·dim]`.
pub fn attention_packed_step(
    qkv: &Tensor,
    heads: usize,
    layout: PackedHeads,
    caches: [&mut Tensor; 2],
    place: &Tensor,
    options: &AttentionOptions,
) -> Result<Tensor> {
    let shape = *qkv.shape();
    if shape.dims() != 3 || shape[1] != 1 || heads == 0 || !shape.last().is_multiple_of(3 * heads) {
        return Err(TensorError::shape(STEP, "qkv", shape, format!("[batch, 1, 3·{heads}·dim]")));
    }
    let dim = shape.last() / (3 * heads);
    let places = [0, 1, 2].map(|part| Place::packed(layout, part, 1, heads, dim));
    step(heads, heads, [qkv; 3], places, caches, place, options)?.view([shape[0], 1, heads * dim])
}

const STEP: &str = "attention_step";

fn step(
    heads: usize,
    kv_heads: usize,
    new: [&Tensor; 3],
    places: [Place; 3],
    [keys, values]: [&mut Tensor; 2],
    place: &Tensor,
    options: &AttentionOptions,
) -> Result<Tensor> {
    expect_heads("the cache", keys.shape())?;
    let (batch, dim) = (new[0].shape()[0], keys.shape()[3]);
    let width = new[0].numel() / batch.max(1);
    let fits = keys.shape() == values.shape()
        && keys.shape()[0] == batch
        && keys.shape()[2] == kv_heads
        && (width == heads * dim || width == 3 * heads * dim)
        && keys.dtype() == new[0].dtype();
    if !fits {
        return Err(TensorError::ShapeMismatch { op: STEP, left: *new[0].shape(), right: *keys.shape() });
    }
    if place.dtype() != DType::I64 || place.numel() != 1 {
        let what = format!("the place is {} {}, expected one i64", place.dtype(), place.shape());
        return Err(TensorError::argument(STEP, what));
    }
    let options = AttentionOptions { dropout: 0.0, ..options.clone() };
    if options.key_mask.is_some() || options.alibi_positions.is_some() {
        return Err(TensorError::argument(STEP, "a mask or positions of keys cannot grow with the cache"));
    }
    let capacity = keys.shape()[1];
    let problem = Problem { batch, queries: 1, keys: capacity, heads, kv_heads, dim, dropout: None, options };
    problem.check()?;
    // How many of the places are filled the device alone knows: all of them count.
    problem.count(2);
    let mut out = Tensor::empty([batch, 1, heads, dim], keys.dtype(), keys.device())?;
    let [q, k, v] = [0, 1, 2].map(|i| places[i].of(new[i]));
    let cache = Place::whole(keys.shape());
    let target = Place::whole(&Shape::new(&[batch, 1, heads, dim])).out(out.out()?);
    let caches = [cache.out(keys.out()?), cache.out(values.out()?)];
    let sinks = sinks_of(&problem.options)?;
    place.device().backend().attention_step(
        &problem.spec(sinks.as_ref()),
        [&q, &k, &v],
        caches,
        place,
        target,
    )?;
    Ok(out)
}
