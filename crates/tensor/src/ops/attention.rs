//! Attention over separate or packed heads, rotary embedding, and decoding from a cache.

use crate::autograd::{needs_grad, record};
pub use crate::backend::WeightGrid;
use crate::backend::{AttentionSpec, Heads, HeadsOut};
use crate::dtype::DType;
use crate::error::{Result, TensorError};
use crate::out::Out;
use crate::param::Operand;
use crate::profile::{self, Pass};
use crate::random::RandomKey;
use crate::shape::Shape;
use crate::tensor::Tensor;

/// Who sees whom, and how strongly.
#[derive(Debug, Clone, Default)]
pub struct AttentionOptions {
    /// Multiplies the scores; `1/√dim` when absent.
    pub scale: Option<f32>,
    /// Where the first query stands among the keys; `None`: the queries are the last tokens of the keys.
    pub first_query: Option<isize>,
    /// Whether a query sees only keys up to its own position.
    pub causal: bool,
    /// A query at position `p` sees keys `> p - window`.
    pub window: Option<usize>,
    /// `[batch, keys]` of `U8` or `Bool`: nonzero where a key may be seen.
    pub key_mask: Option<Tensor>,
    /// `[heads]` of f32.
    pub alibi_slopes: Option<Tensor>,
    /// `[batch, keys]` of f32; `0..keys` when absent.
    pub alibi_positions: Option<Tensor>,
    /// Probability of dropping an attention weight.
    pub dropout: f32,
    /// The key of its random numbers; `None`: this thread's next.
    pub dropout_key: Option<RandomKey>,
    /// Where these weights are among those that are drawn for together; `None`: they are all of them.
    pub weights: Option<WeightGrid>,
}

/// Where queries, keys and values lie inside one packed projection `[batch, tokens, width]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PackedHeads {
    /// All queries, then all keys, then all values.
    Thirds,
    /// For each head its query, key and value.
    PerHead,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub(super) offset: usize,
    pub(super) token_stride: usize,
    pub(super) head_stride: usize,
    pub(super) tokens: usize,
}

impl Place {
    pub(super) fn whole(shape: &Shape) -> Place {
        let (tokens, heads, dim) = (shape[1], shape[2], shape[3]);
        Place { offset: 0, token_stride: heads * dim, head_stride: dim, tokens }
    }

    fn packed(layout: PackedHeads, part: usize, tokens: usize, heads: usize, dim: usize) -> Place {
        let token_stride = 3 * heads * dim;
        match layout {
            PackedHeads::Thirds => {
                Place { offset: part * heads * dim, token_stride, head_stride: dim, tokens }
            }
            PackedHeads::PerHead => Place { offset: part * dim, token_stride, head_stride: 3 * dim, tokens },
        }
    }

    pub(super) fn out<'a>(&self, out: Out<'a>) -> HeadsOut<'a> {
        HeadsOut::new(
            out,
            self.offset,
            [self.tokens * self.token_stride, self.token_stride, self.head_stride],
        )
    }

    fn of<'a>(&self, tensor: &'a Tensor) -> Heads<'a> {
        Heads {
            tensor,
            offset: self.offset,
            batch_stride: self.tokens * self.token_stride,
            token_stride: self.token_stride,
            head_stride: self.head_stride,
        }
    }
}

#[derive(Debug, Clone)]
pub(super) struct Problem {
    pub(super) batch: usize,
    pub(super) queries: usize,
    pub(super) keys: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) dim: usize,
    pub(super) options: AttentionOptions,
    pub(super) dropout: Option<(f32, RandomKey)>,
}

impl Problem {
    fn spec(&self) -> AttentionSpec<'_> {
        AttentionSpec {
            batch: self.batch,
            queries: self.queries,
            keys: self.keys,
            heads: self.heads,
            kv_heads: self.kv_heads,
            dim: self.dim,
            scale: self.options.scale.unwrap_or_else(|| 1.0 / (self.dim as f32).sqrt()),
            first_query: self.options.first_query,
            causal: self.options.causal,
            window: self.options.window,
            key_mask: self.options.key_mask.as_ref(),
            alibi_slopes: self.options.alibi_slopes.as_ref(),
            alibi_positions: self.options.alibi_positions.as_ref(),
            dropout: self.dropout,
            weights: self.options.weights,
        }
    }

    /// Counts so many products of the size of the scores.
    fn count(&self, products: usize) {
        profile::count_product(products * self.batch * self.heads, self.queries, self.keys, self.dim);
    }

    pub(super) fn check(&self) -> Result<()> {
        let fail = |what: String| Err(TensorError::argument("attention", what));
        if self.kv_heads == 0 || !self.heads.is_multiple_of(self.kv_heads) {
            return fail(format!("{} query heads cannot share {} key heads", self.heads, self.kv_heads));
        }
        let per_key = [self.batch, self.keys];
        let wanted: [(&str, &Option<Tensor>, &[usize]); 3] = [
            ("key_mask", &self.options.key_mask, &per_key),
            ("alibi_positions", &self.options.alibi_positions, &per_key),
            ("alibi_slopes", &self.options.alibi_slopes, std::slice::from_ref(&self.heads)),
        ];
        for (what, tensor, sizes) in wanted {
            if let Some(tensor) = tensor
                && tensor.sizes() != sizes
            {
                return fail(format!("{what} has shape {}, expected {sizes:?}", tensor.shape()));
            }
        }
        if let Some(mask) = &self.options.key_mask
            && !matches!(mask.dtype(), DType::U8 | DType::Bool)
        {
            return fail(format!("key_mask is {}, expected bool or u8", mask.dtype()));
        }
        Ok(())
    }
}

pub(super) fn dropout_key(options: &AttentionOptions) -> Option<(f32, RandomKey)> {
    let key = || options.dropout_key.unwrap_or_else(crate::random::next_key);
    (options.dropout > 0.0).then(|| (options.dropout, key()))
}

pub(super) fn expect_heads(what: &'static str, shape: &Shape) -> Result<()> {
    if shape.dims() == 4 {
        return Ok(());
    }
    Err(TensorError::shape("attention", what, *shape, "[batch, tokens, heads, dim]"))
}

/// Attention of `q [batch, queries, heads, dim]` over `k` and `v [batch, keys, kv_heads, dim]`; the result is q's shape.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, options: &AttentionOptions) -> Result<Tensor> {
    expect_heads("q", q.shape())?;
    expect_heads("k", k.shape())?;
    if k.shape() != v.shape() || q.shape()[0] != k.shape()[0] || q.shape()[3] != k.shape()[3] {
        return Err(TensorError::ShapeMismatch { op: "attention", left: *q.shape(), right: *k.shape() });
    }
    let problem = Problem {
        batch: q.shape()[0],
        queries: q.shape()[1],
        keys: k.shape()[1],
        heads: q.shape()[2],
        kv_heads: k.shape()[2],
        dim: q.shape()[3],
        dropout: dropout_key(options),
        options: options.clone(),
    };
    problem.check()?;
    let [q, k, v] = [q, k, v].map(Operand::from);
    let places = [&q, &k, &v].map(|operand| Place::whole(operand.shape()));
    let (out, lse) = run(&problem, &[&*q.read()?, &*k.read()?, &*v.read()?], &places, *q.shape())?;
    if !needs_grad(&[&q, &k, &v]) {
        return Ok(out);
    }
    let saved = [q.saved(), k.saved(), v.saved()];
    let kept = out.detach();
    Ok(record("attention", &[&q, &k, &v], out, move |dout| {
        let values = [saved[0].read()?, saved[1].read()?, saved[2].read()?];
        let inputs = [&*values[0], &*values[1], &*values[2]];
        let [dq, dk, dv] =
            [0, 1, 2].map(|i| Tensor::empty(*inputs[i].shape(), inputs[i].dtype(), inputs[i].device()));
        let (mut dq, mut dk, mut dv) = (dq?, dk?, dv?);
        let gradients = [places[0].out(dq.out()?), places[1].out(dk.out()?), places[2].out(dv.out()?)];
        run_backward(&problem, &inputs, &places, &kept, &lse, &dout, gradients)?;
        Ok(vec![Some(dq), Some(dk), Some(dv)])
    }))
}

/// Attention over one packed projection `[batch, tokens, 3·heads·dim]`; the result is `[batch, tokens, heads·dim]`.
pub fn attention_packed(
    qkv: &Tensor,
    heads: usize,
    layout: PackedHeads,
    options: &AttentionOptions,
) -> Result<Tensor> {
    let shape = *qkv.shape();
    if shape.dims() != 3 || heads == 0 || !shape.last().is_multiple_of(3 * heads) {
        return Err(TensorError::shape(
            "attention_packed",
            "qkv",
            shape,
            format!("[batch, tokens, 3·{heads}·dim]"),
        ));
    }
    let (batch, tokens, dim) = (shape[0], shape[1], shape.last() / (3 * heads));
    let problem = Problem {
        batch,
        queries: tokens,
        keys: tokens,
        heads,
        kv_heads: heads,
        dim,
        dropout: dropout_key(options),
        options: options.clone(),
    };
    problem.check()?;
    let places = [0, 1, 2].map(|part| Place::packed(layout, part, tokens, heads, dim));
    let qkv = Operand::from(qkv);
    let (out, lse) = {
        let value = qkv.read()?;
        run(&problem, &[&*value, &*value, &*value], &places, Shape::new(&[batch, tokens, heads, dim]))?
    };
    let out = out.view([batch, tokens, heads * dim])?;
    if !needs_grad(&[&qkv]) {
        return Ok(out);
    }
    let (saved, kept) = (qkv.saved(), out.detach());
    Ok(record("attention_packed", &[&qkv], out, move |dout| {
        let value = saved.read()?;
        let mut dqkv = Tensor::empty(*value.shape(), value.dtype(), value.device())?;
        let heads_shape = [batch, tokens, heads, dim];
        let (kept, dout) = (kept.view(heads_shape)?, dout.view(heads_shape)?);
        let whole = dqkv.out()?;
        // SAFETY: nobody else sees the tensor, and queries, keys and values have no element in common.
        let gradients = places.map(|place| place.out(unsafe { whole.shared() }));
        run_backward(&problem, &[&*value, &*value, &*value], &places, &kept, &lse, &dout, gradients)?;
        Ok(vec![Some(dqkv)])
    }))
}

pub(super) fn run(
    problem: &Problem,
    inputs: &[&Tensor; 3],
    places: &[Place; 3],
    out_shape: Shape,
) -> Result<(Tensor, Tensor)> {
    // The scores, and what they weigh.
    problem.count(2);
    let device = inputs[0].device();
    let mut out = Tensor::empty(out_shape, inputs[0].dtype(), device)?;
    let mut lse = Tensor::empty([problem.batch, problem.heads, problem.queries], DType::F32, device)?;
    let [q, k, v] = [0, 1, 2].map(|i| places[i].of(inputs[i]));
    let target = Place::whole(&out_shape).out(out.out()?);
    device.backend().attention(&problem.spec(), &q, &k, &v, target, lse.out()?)?;
    Ok((out, lse))
}

pub(super) fn run_backward(
    problem: &Problem,
    inputs: &[&Tensor; 3],
    places: &[Place; 3],
    out: &Tensor,
    lse: &Tensor,
    dout: &Tensor,
    gradients: [HeadsOut<'_>; 3],
) -> Result<()> {
    // The scores are computed again; then the gradients of weights, values, queries and keys.
    profile::during(Pass::Recomputation, || problem.count(1));
    problem.count(4);
    let whole = Place::whole(out.shape());
    let [q, k, v] = [0, 1, 2].map(|i| places[i].of(inputs[i]));
    out.device().backend().attention_backward(
        &problem.spec(),
        &q,
        &k,
        &v,
        &whole.of(out),
        lse,
        &whole.of(dout),
        gradients,
    )
}

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
    place.device().backend().attention_step(&problem.spec(), [&q, &k, &v], caches, place, target)?;
    Ok(out)
}

/// Rotates the first channels of each head of `x [batch, tokens, heads, dim]` by tables `[batch or 1, tokens, pairs]`.
pub fn rotary(x: Tensor, cos: &Tensor, sin: &Tensor, interleaved: bool) -> Result<Tensor> {
    expect_heads("x", x.shape())?;
    let (batch, tokens, dim) = (x.shape()[0], x.shape()[1], x.shape()[3]);
    let table = cos.shape();
    let fits = table.dims() == 3
        && (table[0] == batch || table[0] == 1)
        && table[1] == tokens
        && 2 * table[2] <= dim
        && table == sin.shape();
    if !fits {
        return Err(TensorError::ShapeMismatch { op: "rotary", left: *x.shape(), right: *table });
    }
    let y = rotated(&x, cos, sin, interleaved, false)?;
    let x = Operand::from(&x);
    if !needs_grad(&[&x]) {
        return Ok(y);
    }
    let (cos, sin) = (cos.detach(), sin.detach());
    Ok(record("rotary", &[&x], y, move |dy| Ok(vec![Some(rotated(&dy, &cos, &sin, interleaved, true)?)])))
}

/// Turns a tensor where it lies if nobody else sees it, a copy otherwise.
fn rotated(x: &Tensor, cos: &Tensor, sin: &Tensor, interleaved: bool, inverse: bool) -> Result<Tensor> {
    let backend = x.device().backend();
    let y = if x.is_unshared() {
        x.detach()
    } else {
        let mut copy = Tensor::empty(*x.shape(), x.dtype(), x.device())?;
        backend.copy(x, copy.out()?)?;
        copy
    };
    let [batch, tokens, heads] = [x.shape()[0], x.shape()[1], x.shape()[2]];
    // SAFETY: it is a fresh copy, or seen by the two handles of this function and its caller, who looks at it no more.
    let target = Place::whole(x.shape()).out(unsafe { Out::vouched(&y) });
    backend.rotary(target, batch, tokens, heads, cos, sin, interleaved, inverse)?;
    Ok(y)
}

/// Takes queries, keys and values out of a packed projection `[batch, tokens, 3·heads·dim]`, each `[batch, tokens, heads, dim]`.
pub fn split_heads(qkv: &Tensor, heads: usize, layout: PackedHeads) -> Result<[Tensor; 3]> {
    let shape = *qkv.shape();
    if shape.dims() != 3 || heads == 0 || !shape.last().is_multiple_of(3 * heads) {
        return Err(TensorError::shape(
            "split_heads",
            "qkv",
            shape,
            format!("[batch, tokens, 3·{heads}·dim]"),
        ));
    }
    let (batch, tokens, dim) = (shape[0], shape[1], shape.last() / (3 * heads));
    let order = match layout {
        PackedHeads::Thirds => [batch, tokens, 3, heads, dim],
        PackedHeads::PerHead => [batch, tokens, heads, 3, dim],
    };
    let packed = crate::ops::reshape(qkv, order)?;
    let part_dim = if layout == PackedHeads::Thirds { 2 } else { 3 };
    let part = |index: usize| -> Result<Tensor> {
        let taken = crate::ops::narrow(&packed, part_dim, index, 1)?;
        crate::ops::reshape(&taken, [batch, tokens, heads, dim])
    };
    Ok([part(0)?, part(1)?, part(2)?])
}
