//! Attention over separate or packed heads, and rotary embedding.

use crate::autograd::{needs_grad, record};
pub use crate::backend::WeightGrid;
use crate::backend::{AttentionSpec, Device, Heads, HeadsOut};
use crate::block_layout::BlockLayout;
use crate::documents::Documents;
use crate::dtype::DType;
use crate::error::{Result, TensorError};
use crate::ops::{attention_documents, cast, exp, mul, neg, permute, reshape, sub, sum_dim};
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
    /// Tokens see those of their own document alone; the queries are the tokens of the keys then. ALiBi counts from where a
    /// document begins.
    pub documents: Option<Documents>,
    /// Tokens see those of the active blocks alone, and of these what causality, windows and masks leave; the queries are the
    /// tokens of the keys then.
    pub blocks: Option<BlockLayout>,
    /// `[batch, keys]` of f32, added to the scores after scaling; minus infinity hides a key. It gets no gradient.
    pub key_bias: Option<Tensor>,
    /// `[queries, keys]`, or `[heads, queries, keys]`, of f32, added to the scores after scaling. It gets no gradient.
    pub score_bias: Option<Tensor>,
    /// Scores are `cap·tanh(score/cap)` before anything is added to them. Not for devices whose
    /// [`shapes_scores`](crate::backend::Attention::shapes_scores) says no.
    pub score_cap: Option<f32>,
    /// `[heads]`: a score of nobody's beside those of the keys, which takes its share of the weights and gives nothing. For the
    /// same devices.
    pub sinks: Option<Operand>,
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

    pub(super) fn packed(layout: PackedHeads, part: usize, tokens: usize, heads: usize, dim: usize) -> Place {
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

    pub(super) fn of<'a>(&self, tensor: &'a Tensor) -> Heads<'a> {
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

/// The sinks in f32.
pub(super) fn sinks_of(options: &AttentionOptions) -> Result<Option<Tensor>> {
    let Some(sinks) = &options.sinks else { return Ok(None) };
    let value = sinks.read()?;
    let mut wide = Tensor::empty(*value.shape(), DType::F32, value.device())?;
    value.device().backend().cast(&value, wide.out()?)?;
    Ok(Some(wide))
}

impl Problem {
    /// `sinks` are those of [`sinks_of`].
    pub(super) fn spec<'a>(&'a self, sinks: Option<&'a Tensor>) -> AttentionSpec<'a> {
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
            documents: self.options.documents.as_ref(),
            blocks: self.options.blocks.as_ref(),
            key_bias: self.options.key_bias.as_ref(),
            score_bias: self.options.score_bias.as_ref(),
            score_cap: self.options.score_cap,
            sinks,
        }
    }

    /// Counts so many products of the size of the scores.
    pub(super) fn count(&self, products: usize) {
        if let Some(blocks) = &self.options.blocks {
            let pairs = blocks.pairs(self.heads, self.keys, self.options.causal);
            return profile::count_product(products * self.batch, pairs, 1, self.dim);
        }
        let Some(documents) = &self.options.documents else {
            return profile::count_product(
                products * self.batch * self.heads,
                self.queries,
                self.keys,
                self.dim,
            );
        };
        for document in (0..documents.rows()).flat_map(|row| documents.of_row(row)) {
            profile::count_product(products * self.heads, document.len(), document.len(), self.dim);
        }
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
        if let Some(sinks) = &self.options.sinks
            && sinks.shape().sizes() != [self.heads]
        {
            return fail(format!("sinks have shape {}, expected [{}]", sinks.shape(), self.heads));
        }
        let are_its_tokens =
            self.queries == self.keys && self.options.first_query.is_none_or(|first| first == 0);
        if let Some(blocks) = &self.options.blocks {
            if !are_its_tokens {
                return fail(format!(
                    "{} queries over {} keys: a layout of blocks is of queries that are the tokens of their keys",
                    self.queries, self.keys
                ));
            }
            blocks.expect("attention", self.heads, self.keys)?;
        }
        self.check_biases()?;
        let Some(documents) = &self.options.documents else { return Ok(()) };
        if self.options.blocks.is_some() || self.options.score_bias.is_some() {
            return fail("documents that share a sequence have no layout of blocks and no score_bias; leave out one of the two".to_owned());
        }
        if !are_its_tokens {
            return fail(format!(
                "{} queries over {} keys: documents are of queries that are the tokens of their keys",
                self.queries, self.keys
            ));
        }
        documents.expect("attention", self.batch, self.queries)
    }

    fn check_biases(&self) -> Result<()> {
        let of_keys = [self.batch, self.keys];
        let (of_all, of_each) = ([self.queries, self.keys], [self.heads, self.queries, self.keys]);
        let biases: [(&str, &Option<Tensor>, [&[usize]; 2]); 2] = [
            ("key_bias", &self.options.key_bias, [&of_keys, &of_keys]),
            ("score_bias", &self.options.score_bias, [&of_all, &of_each]),
        ];
        for (what, tensor, sizes) in biases {
            let Some(tensor) = tensor else { continue };
            if !sizes.contains(&tensor.sizes()) || tensor.dtype() != DType::F32 {
                let (shape, dtype) = (tensor.shape(), tensor.dtype());
                let what = format!("{what} is {dtype} of shape {shape}, expected f32 of {:?}", sizes[0]);
                return Err(TensorError::argument("attention", what));
            }
        }
        Ok(())
    }

    /// Refuses what the device does not know.
    fn check_device(&self, device: &Device) -> Result<()> {
        let AttentionOptions { blocks, key_bias, score_bias, score_cap, sinks, .. } = &self.options;
        if (score_cap.is_some() || sinks.is_some()) && !device.backend().shapes_scores() {
            let what = "capped scores and sinks are known to the CPU's kernels alone";
            return Err(TensorError::argument("attention", what));
        }
        let is_plain = blocks.is_none() && key_bias.is_none() && score_bias.is_none();
        if is_plain || device.backend().attends_over_blocks() {
            return Ok(());
        }
        let what = "layouts of blocks and biases of scores are known to the CPU alone; compute there, or attend without them";
        Err(TensorError::argument("attention", what))
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

/// What [`attention`] of these is.
pub(super) fn problem([q, k, v]: [&Tensor; 3], options: &AttentionOptions) -> Result<Problem> {
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
    Ok(problem)
}

/// Attention of `q [batch, queries, heads, dim]` over `k` and `v [batch, keys, kv_heads, dim]`; the result is q's shape.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, options: &AttentionOptions) -> Result<Tensor> {
    let problem = problem([q, k, v], options)?;
    if let Some(batches) = attention_documents::batches(&problem, q) {
        return attention_documents::together([q, k, v], &problem, batches);
    }
    let [q, k, v] = [q, k, v].map(Operand::from);
    let places = [&q, &k, &v].map(|operand| Place::whole(operand.shape()));
    let (out, lse) = run(&problem, &[&*q.read()?, &*k.read()?, &*v.read()?], &places, *q.shape())?;
    let mut operands = vec![&q, &k, &v];
    operands.extend(&options.sinks);
    if !needs_grad(&operands) {
        return Ok(out);
    }
    let saved = [q.saved(), k.saved(), v.saved()];
    let kept = out.detach();
    Ok(record("attention", &operands, out, move |dout| {
        let values = [saved[0].read()?, saved[1].read()?, saved[2].read()?];
        let inputs = [&*values[0], &*values[1], &*values[2]];
        let [dq, dk, dv] =
            [0, 1, 2].map(|i| Tensor::empty(*inputs[i].shape(), inputs[i].dtype(), inputs[i].device()));
        let (mut dq, mut dk, mut dv) = (dq?, dk?, dv?);
        let gradients = [places[0].out(dq.out()?), places[1].out(dk.out()?), places[2].out(dv.out()?)];
        run_backward(&problem, &inputs, &places, &kept, &lse, &dout, gradients)?;
        let mut gradients = vec![Some(dq), Some(dk), Some(dv)];
        if let Some(dsinks) = sink_gradient(&problem.options, &kept, &lse, &dout)? {
            gradients.push(Some(dsinks));
        }
        Ok(gradients)
    }))
}

/// What sinks would have gained by a larger share: they give nothing, so it is what all keys together lose.
fn sink_gradient(
    options: &AttentionOptions,
    out: &Tensor,
    lse: &Tensor,
    dout: &Tensor,
) -> Result<Option<Tensor>> {
    let Some(sinks) = sinks_of(options)? else { return Ok(None) };
    let (out, dout) = (cast(out, DType::F32)?, cast(dout, DType::F32)?);
    let lost_bht = permute(sum_dim(mul(&out, &dout)?, 3)?, &[0, 2, 1])?;
    let share_bht = exp(sub(reshape(&sinks, [1, sinks.numel(), 1])?, lse)?)?;
    let lost_bh = sum_dim(mul(&share_bht, &lost_bht)?, 2)?;
    let dsinks = neg(sum_dim(&lost_bh, 0)?)?;
    let dtype = options.sinks.as_ref().map_or(DType::F32, Operand::dtype);
    Ok(Some(cast(&dsinks, dtype)?))
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
    if options.sinks.is_some() {
        let what = "sinks get their gradient where queries, keys and values lie apart";
        return Err(TensorError::argument("attention_packed", what));
    }
    if let Some(batches) = attention_documents::batches(&problem, qkv) {
        let [q, k, v] = split_heads(qkv, heads, layout)?;
        let out = attention_documents::together([&q, &k, &v], &problem, batches)?;
        return crate::ops::reshape(&out, [batch, tokens, heads * dim]);
    }
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
    let device = inputs[0].device();
    problem.check_device(device)?;
    // The scores, and what they weigh.
    problem.count(2);
    let mut out = Tensor::empty(out_shape, inputs[0].dtype(), device)?;
    let mut lse = Tensor::empty([problem.batch, problem.heads, problem.queries], DType::F32, device)?;
    let [q, k, v] = [0, 1, 2].map(|i| places[i].of(inputs[i]));
    let target = Place::whole(&out_shape).out(out.out()?);
    let sinks = sinks_of(&problem.options)?;
    device.backend().attention(&problem.spec(sinks.as_ref()), &q, &k, &v, target, lse.out()?)?;
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
    let sinks = sinks_of(&problem.options)?;
    out.device().backend().attention_backward(
        &problem.spec(sinks.as_ref()),
        &q,
        &k,
        &v,
        &whole.of(out),
        lse,
        &whole.of(dout),
        gradients,
    )
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
