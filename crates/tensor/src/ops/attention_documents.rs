//! Attention within documents by kernels that know whole sequences alone: documents are brought together as batches of
//! sequences, attended over, and taken back.

use std::sync::Arc;

use crate::autograd::{needs_grad, record};
use crate::documents::Batches;
use crate::dtype::DType;
use crate::error::{Result, TensorError};
use crate::ops::attention::{self, AttentionOptions, Place, Problem};
use crate::param::Operand;
use crate::profile::{self, Pass};
use crate::tensor::Tensor;

/// How documents are brought together, where that is the faster way.
pub(super) fn batches(problem: &Problem, x: &Tensor) -> Option<Arc<Batches>> {
    let is_faster = knows(problem) && x.device().backend().prefers_whole_sequences(x.dtype(), problem.dim);
    problem.options.documents.as_ref()?.batches().filter(|_| is_faster).cloned()
}

/// What stands behind a document is hidden by causality alone.
fn knows(problem: &Problem) -> bool {
    let options = &problem.options;
    options.causal
        && options.key_mask.is_none()
        && options.alibi_slopes.is_none()
        && options.key_bias.is_none()
        && options.score_cap.is_none()
        && options.sinks.is_none()
        && problem.dropout.is_none()
}

/// Causal [`attention`](crate::ops::attention) within documents that are brought together, on any device.
pub fn attention_by_sequences(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    options: &AttentionOptions,
) -> Result<Tensor> {
    let problem = attention::problem([q, k, v], options)?;
    let fail = |why| Err(TensorError::argument("attention_by_sequences", why));
    let Some(documents) = options.documents.as_ref().filter(|_| knows(&problem)) else {
        return fail("it is for causal attention within documents, without masks, biases and dropout");
    };
    match Batches::of(documents, q.device())? {
        Some(batches) => together([q, k, v], &problem, Arc::new(batches)),
        None => fail("documents are so short that most places would be filled up"),
    }
}

/// [`attention`](crate::ops::attention) of one problem whose documents are brought together.
pub(super) fn together([q, k, v]: [&Tensor; 3], problem: &Problem, batches: Arc<Batches>) -> Result<Tensor> {
    problem.count(2);
    let [q, k, v] = [q, k, v].map(Operand::from);
    let together = Together { problem: problem.clone(), batches };
    let inputs = [together.take(&*q.read()?)?, together.take(&*k.read()?)?, together.take(&*v.read()?)?];
    let (mixed, lse) = together.forward(&inputs)?;
    let out = together.back(&mixed)?;
    if !needs_grad(&[&q, &k, &v]) {
        return Ok(out);
    }
    Ok(record("attention", &[&q, &k, &v], out, move |dout| {
        let gradients = together.backward(&inputs, &mixed, &lse, &dout)?;
        gradients.iter().map(|gradient| together.back(gradient).map(Some)).collect()
    }))
}

struct Together {
    problem: Problem,
    batches: Arc<Batches>,
}

impl Together {
    /// Rows `indices` of `x`, which has `size` rows of so many elements.
    fn select(x: &Tensor, size: usize, shape: [usize; 3], indices: &Tensor) -> Result<Tensor> {
        let mut y = Tensor::empty(shape, x.dtype(), x.device())?;
        profile::count_bytes(y.size_bytes());
        x.device().backend().index_select(x, indices, 1, size, shape[1] * shape[2], y.out()?)?;
        Ok(y)
    }

    /// `[batch, tokens, heads, dim]` as `[places, heads, dim]`.
    fn take(&self, x: &Tensor) -> Result<Tensor> {
        let [heads, dim] = [x.shape()[2], x.shape()[3]];
        let tokens = self.problem.batch * self.problem.queries;
        Together::select(x, tokens, [self.batches.tokens.numel(), heads, dim], &self.batches.tokens)
    }

    /// The same of a gradient, which is nothing at places behind documents.
    fn take_gradient(&self, dout: &Tensor) -> Result<Tensor> {
        let (heads, dim) = (self.problem.heads, self.problem.dim);
        let tokens = self.problem.batch * self.problem.queries;
        let backend = dout.device().backend();
        let mut longer = Tensor::empty([tokens + 1, heads, dim], dout.dtype(), dout.device())?;
        backend.copy(dout, longer.out()?.part(0, *dout.shape())?.out())?;
        backend.fill(longer.out()?.part(dout.numel(), [heads * dim])?.out(), 0.0)?;
        Together::select(
            &longer,
            tokens + 1,
            [self.batches.or_none.numel(), heads, dim],
            &self.batches.or_none,
        )
    }

    /// `[places, heads, dim]` as `[batch, tokens, heads, dim]`.
    fn back(&self, x: &Tensor) -> Result<Tensor> {
        let [places, heads, dim] = [x.shape()[0], x.shape()[1], x.shape()[2]];
        let (batch, tokens) = (self.problem.batch, self.problem.queries);
        Together::select(x, places, [batch * tokens, heads, dim], &self.batches.places)?
            .view([batch, tokens, heads, dim])
    }

    /// Each batch as a problem: its number of sequences and tokens, and the place of its first token.
    fn problems(&self) -> impl Iterator<Item = (Problem, usize)> {
        self.batches.all.iter().map(|batch| {
            let mut problem = self.problem.clone();
            (problem.batch, problem.queries, problem.keys) = (batch.sequences, batch.tokens, batch.tokens);
            problem.options.documents = None;
            (problem, batch.first)
        })
    }

    /// The mix of values at all places, and the rows' log-sum-exp, `[heads, tokens]` of each sequence.
    fn forward(&self, [q, k, v]: &[Tensor; 3]) -> Result<(Tensor, Tensor)> {
        let mut mixed = Tensor::empty(*q.shape(), q.dtype(), q.device())?;
        let mut lse = Tensor::empty([q.shape()[0] * self.problem.heads], DType::F32, q.device())?;
        for (problem, first) in self.problems() {
            let of = |x: &Tensor| place(x, first, problem.queries);
            let rows = problem.batch * problem.heads * problem.queries;
            q.device().backend().attention(
                &problem.spec(None),
                &of(q).of(q),
                &of(k).of(k),
                &of(v).of(v),
                place(q, first, problem.queries).out(mixed.out()?),
                lse.out()?.part(first * problem.heads, [rows])?.out(),
            )?;
        }
        Ok((mixed, lse))
    }

    /// The gradients of queries, keys and values at all places.
    fn backward(
        &self,
        [q, k, v]: &[Tensor; 3],
        mixed: &Tensor,
        lse: &Tensor,
        dout: &Tensor,
    ) -> Result<[Tensor; 3]> {
        profile::during(Pass::Recomputation, || self.problem.count(1));
        self.problem.count(4);
        let dout = self.take_gradient(dout)?;
        let like = |x: &Tensor| Tensor::empty(*x.shape(), x.dtype(), x.device());
        let [mut dq, mut dk, mut dv] = [like(q)?, like(k)?, like(v)?];
        for (problem, first) in self.problems() {
            let of = |x: &Tensor| place(x, first, problem.queries);
            let rows = problem.batch * problem.heads * problem.queries;
            let gradients = [of(q).out(dq.out()?), of(k).out(dk.out()?), of(v).out(dv.out()?)];
            q.device().backend().attention_backward(
                &problem.spec(None),
                &of(q).of(q),
                &of(k).of(k),
                &of(v).of(v),
                &of(mixed).of(mixed),
                &lse.slice(first * problem.heads, [rows])?,
                &of(&dout).of(&dout),
                gradients,
            )?;
        }
        Ok([dq, dk, dv])
    }
}

/// Where sequences of so many tokens lie in `x [places, heads, dim]`, from a place on.
fn place(x: &Tensor, first: usize, tokens: usize) -> Place {
    let [heads, dim] = [x.shape()[1], x.shape()[2]];
    Place { offset: first * heads * dim, token_stride: heads * dim, head_stride: dim, tokens }
}
