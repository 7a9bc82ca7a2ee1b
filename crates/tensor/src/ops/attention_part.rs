//! Attention over some of the keys, in a form that can be folded with what others give: not recorded on the tape.
//!
//! A result is worth as much as the keys it has seen, which its log-sum-exp says: two results over different keys fold into
//! that over both by the shares of their exponentials. Backward needs no folding: with the log-sum-exp over all keys, each
//! part's weights come out as they are in the whole. (Liu, Zaharia, Abbeel: "Ring Attention with Blockwise Transformers for
//! Near-Infinite Context", 2023.)

use std::ops::Range;

use crate::autograd::no_grad;
use crate::dtype::DType;
use crate::error::{Result, TensorError};
use crate::ops::attention::{AttentionOptions, Place, Problem, dropout_key, expect_heads, run, run_backward};
use crate::ops::{add, cast, div, exp, log, maximum, mul, permute, reshape, sub};
use crate::shape::Shape;
use crate::tensor::Tensor;

const OP: &str = "attention_part";
/// Below every sum of scores, and far enough from the end of f32 to be subtracted.
const NOTHING_SEEN: f32 = -1e30;

/// Some tokens of a tensor `[batch, tokens, heads, dim]`.
#[derive(Debug, Clone)]
pub struct Stretch<'a> {
    /// The tensor.
    pub tensor: &'a Tensor,
    /// Which of its tokens.
    pub tokens: Range<usize>,
}

impl Stretch<'_> {
    fn place(&self) -> Place {
        let whole = Place::whole(self.tensor.shape());
        Place { offset: self.tokens.start * whole.token_stride, ..whole }
    }

    fn shape(&self) -> Shape {
        let shape = self.tensor.shape();
        Shape::new(&[shape[0], self.tokens.len(), shape[2], shape[3]])
    }

    fn check(&self, what: &'static str) -> Result<()> {
        expect_heads(what, self.tensor.shape())?;
        if self.tokens.start <= self.tokens.end && self.tokens.end <= self.tensor.shape()[1] {
            return Ok(());
        }
        let why = format!("tokens {:?} of {what} {}", self.tokens, self.tensor.shape());
        Err(TensorError::argument(OP, why))
    }
}

/// What attention over some keys gave.
#[derive(Debug, Clone)]
pub struct AttentionPart {
    /// `[batch, queries, heads, dim]`.
    pub out: Tensor,
    /// `[batch, heads, queries]`: the logarithm of the sum of the exponentials of all scores; minus infinity where no key
    /// was seen.
    pub lse: Tensor,
}

impl AttentionPart {
    /// Attention over the keys of both; its `out` is f32.
    pub fn fold(&self, other: &AttentionPart) -> Result<AttentionPart> {
        no_grad(|| {
            let floor = Tensor::full([], NOTHING_SEEN, DType::F32, self.lse.device())?;
            let largest = maximum(&maximum(&self.lse, &other.lse)?, &floor)?;
            let [own, others] = [&self.lse, &other.lse].map(|lse| exp(&sub(lse, &largest)?));
            let (own, others) = (own?, others?);
            let total = add(&own, &others)?;
            // One where nothing was seen, and then the share is nothing.
            let divisor = maximum(&total, &Tensor::full([], f32::MIN_POSITIVE, DType::F32, total.device())?)?;
            let share = permute(&div(&others, &divisor)?, &[0, 2, 1])?;
            let &[batch, queries, heads] = share.sizes() else {
                return Err(TensorError::shape(OP, "lse", *self.lse.shape(), "[batch, heads, queries]"));
            };
            let share = reshape(&share, [batch, queries, heads, 1])?;
            let (out, added) = (cast(&self.out, DType::F32)?, cast(&other.out, DType::F32)?);
            let out = add(&out, &mul(&sub(&added, &out)?, &share)?)?;
            Ok(AttentionPart { out, lse: add(&largest, &log(&total)?)? })
        })
    }
}

fn problem(
    q: &Stretch<'_>,
    [k, v]: [&Stretch<'_>; 2],
    options: &AttentionOptions,
) -> Result<(Problem, [Place; 3])> {
    q.check("q")?;
    k.check("k")?;
    v.check("v")?;
    let (of_q, of_k) = (q.shape(), k.shape());
    if of_k != v.shape() || of_q[0] != of_k[0] || of_q[3] != of_k[3] {
        return Err(TensorError::ShapeMismatch { op: OP, left: of_q, right: of_k });
    }
    if options.dropout > 0.0 && (options.dropout_key.is_none() || options.weights.is_none()) {
        let why = "backward and other parts must drop the same weights: give dropout_key and weights";
        return Err(TensorError::argument(OP, why));
    }
    if options.documents.is_some() {
        return Err(TensorError::argument(OP, "documents are known of whole sequences, not of parts"));
    }
    if options.sinks.is_some() {
        return Err(TensorError::argument(OP, "sinks are beside all keys, not beside parts of them"));
    }
    let problem = Problem {
        batch: of_q[0],
        queries: of_q[1],
        keys: of_k[1],
        heads: of_q[2],
        kv_heads: of_k[2],
        dim: of_q[3],
        dropout: dropout_key(options),
        options: options.clone(),
    };
    problem.check()?;
    Ok((problem, [q.place(), k.place(), v.place()]))
}

/// Attention of some queries over some keys. [`AttentionOptions::first_query`] says where the first of these queries stands
/// among these keys; masks and positions are those of these keys.
pub fn attention_part(
    q: &Stretch<'_>,
    [k, v]: [&Stretch<'_>; 2],
    options: &AttentionOptions,
) -> Result<AttentionPart> {
    let (problem, places) = problem(q, [k, v], options)?;
    let (out, lse) = run(&problem, &[q.tensor, k.tensor, v.tensor], &places, q.shape())?;
    Ok(AttentionPart { out, lse })
}

/// What some queries and some keys give to their gradients: those of queries, keys and values. `whole` is the queries' result
/// over all keys, in their type, and `dout` its gradient.
pub fn attention_part_backward(
    q: &Stretch<'_>,
    [k, v]: [&Stretch<'_>; 2],
    options: &AttentionOptions,
    whole: &AttentionPart,
    dout: &Tensor,
) -> Result<[Tensor; 3]> {
    let (problem, places) = problem(q, [k, v], options)?;
    if *whole.out.shape() != q.shape() || *dout.shape() != q.shape() {
        return Err(TensorError::ShapeMismatch { op: OP, left: *whole.out.shape(), right: q.shape() });
    }
    let gradient = |of: &Stretch<'_>| Tensor::empty(of.shape(), of.tensor.dtype(), of.tensor.device());
    let [mut dq, mut dk, mut dv] = [gradient(q)?, gradient(k)?, gradient(v)?];
    let inputs = [q.tensor, k.tensor, v.tensor];
    let [q_place, k_place, v_place] = [q, k, v].map(|of| Place::whole(&of.shape()));
    let targets = [q_place.out(dq.out()?), k_place.out(dk.out()?), v_place.out(dv.out()?)];
    run_backward(&problem, &inputs, &places, &whole.out, &whole.lse, dout, targets)?;
    Ok([dq, dk, dv])
}
