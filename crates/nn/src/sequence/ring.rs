//! Attention with this rank's queries while keys and values travel round the ranks.
//!
//! A block is what one rank holds of keys and values, both in one tensor `[2, batch, tokens, heads, dim]`. Each rank passes the
//! block in its hands on to the next rank while it attends over it, so after n-1 passes everybody has seen every block. What
//! a block gives is folded by its log-sum-exp. In backward blocks travel again, and behind each the gradient that the ranks
//! it has passed have found for it, in f32; the last of them sends it home.

use std::ops::Range;

use ferrospeed_collective::exchange::{self, Pending};
use ferrospeed_tensor::autograd::{needs_grad, no_grad, record};
use ferrospeed_tensor::ops::{self, AttentionOptions, AttentionPart, Stretch, WeightGrid};
use ferrospeed_tensor::{DType, Operand, Result, Tensor, TensorError};

use super::part::SequencePart;

/// Tags of what travels.
const BLOCK: u64 = 1;
const GRADIENT: u64 = 2;

pub(super) fn attention(
    part: &SequencePart,
    [q, k, v]: [&Tensor; 3],
    options: &AttentionOptions,
) -> Result<Tensor> {
    let ring = Ring { part: part.clone(), options: options.clone() };
    let operands = [q, k, v].map(Operand::from);
    let (query, own) = (q.detach(), no_grad(|| block_of(&k.detach(), &v.detach()))?);
    let parts = no_grad(|| ring.forward(&query, &own))?;
    let outs: Vec<Tensor> = parts.iter().map(|part| part.out.clone()).collect();
    let out = no_grad(|| ops::concat(&outs, 1))?;
    let [q, k, v] = &operands;
    if !needs_grad(&[q, k, v]) {
        return Ok(out);
    }
    Ok(record("ring_attention", &[q, k, v], out, move |dout| {
        let [dq, dk, dv] = no_grad(|| ring.backward(&query, &own, &parts, &dout))?;
        Ok(vec![Some(dq), Some(dk), Some(dv)])
    }))
}

/// Keys and values as one tensor.
fn block_of(k: &Tensor, v: &Tensor) -> Result<Tensor> {
    let sizes = [&[2], k.sizes()].concat();
    ops::reshape(&ops::concat(&[k.clone(), v.clone()], 0)?, &sizes[..])
}

/// Keys and values of a block.
fn halves(block: &Tensor) -> Result<[Tensor; 2]> {
    let (sizes, half) = (&block.sizes()[1..], block.numel() / 2);
    Ok([block.slice(0, sizes)?, block.slice(half, sizes)?])
}

/// The stretches of a rank's own tensor that hold those of the sequence.
fn within(ranges: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut start = 0;
    let place = |range: &Range<usize>| {
        start += range.len();
        start - range.len()..start
    };
    ranges.iter().map(place).collect()
}

/// A tensor on its way to the next rank, and one on its way from the one before.
struct Passing {
    sent: Pending,
    received: Pending,
    arriving: Tensor,
}

impl Passing {
    fn arrived(self) -> Result<Tensor> {
        self.sent.wait().map_err(TensorError::from)?;
        self.received.wait().map_err(TensorError::from)?;
        Ok(self.arriving)
    }
}

/// Queries and keys that meet: which stretch of each, and what is seen.
struct Meeting {
    query: usize,
    key: usize,
    options: AttentionOptions,
}

struct Ring {
    part: SequencePart,
    options: AttentionOptions,
}

impl Ring {
    /// Sends something of `owner`'s to the next rank and receives the same of the rank before `owner`.
    fn pass_on(&self, tensor: &Tensor, owner: usize, tag: u64) -> Result<Passing> {
        let group = self.part.group();
        let (me, ranks) = (group.rank(), group.size());
        let mut sizes = tensor.sizes().to_vec();
        sizes[2] = self.part.counts()[(owner + ranks - 1) % ranks];
        let arriving = Tensor::empty(&sizes, tensor.dtype(), tensor.device())?;
        let sent = exchange::send(group, tensor, (me + 1) % ranks, tag).map_err(TensorError::from)?;
        let received = exchange::receive(group, &arriving, (me + ranks - 1) % ranks, tag);
        Ok(Passing { sent, received: received.map_err(TensorError::from)?, arriving })
    }

    /// Shows every rank's block to `work`, this rank's first, while the next is on its way.
    fn round(&self, own: &Tensor, mut work: impl FnMut(usize, &Tensor) -> Result<()>) -> Result<()> {
        let (me, ranks) = (self.part.group().rank(), self.part.group().size());
        let mut block = own.clone();
        for hop in 0..ranks {
            let owner = (me + ranks - hop) % ranks;
            let last = hop + 1 == ranks;
            let next = if last { None } else { Some(self.pass_on(&block, owner, BLOCK)?) };
            work(owner, &block)?;
            if let Some(next) = next {
                block = next.arrived()?;
            }
        }
        Ok(())
    }

    fn forward(&self, q: &Tensor, own: &Tensor) -> Result<Vec<AttentionPart>> {
        let of_queries = within(self.part.own());
        let mut folded: Vec<Option<AttentionPart>> = vec![None; of_queries.len()];
        self.round(own, |owner, block| {
            let [k, v] = halves(block)?;
            let of_keys = within(self.part.of(owner));
            for meeting in self.meetings(owner, q)? {
                let queries = Stretch { tensor: q, tokens: of_queries[meeting.query].clone() };
                let [k, v] = [&k, &v].map(|tensor| Stretch { tensor, tokens: of_keys[meeting.key].clone() });
                let found = ops::attention_part(&queries, [&k, &v], &meeting.options)?;
                let before = folded[meeting.query].take();
                folded[meeting.query] = Some(match before {
                    Some(before) => before.fold(&found)?,
                    None => found,
                });
            }
            Ok(())
        })?;
        let finish = |folded: Option<AttentionPart>| {
            let nothing = || TensorError::argument("ring attention", "queries that see no key at all");
            let AttentionPart { out, lse } = folded.ok_or_else(nothing)?;
            Ok(AttentionPart { out: ops::cast(&out, q.dtype())?, lse })
        };
        folded.into_iter().map(finish).collect()
    }

    fn backward(
        &self,
        q: &Tensor,
        own: &Tensor,
        parts: &[AttentionPart],
        dout: &Tensor,
    ) -> Result<[Tensor; 3]> {
        let (me, of_queries) = (self.part.group().rank(), within(self.part.own()));
        let backend = q.device().backend();
        let zeros = |sizes: &[usize]| Tensor::zeros(sizes, DType::F32, q.device());
        let with_tokens = |sizes: &[usize], tokens: usize| [&sizes[..1], &[tokens], &sizes[2..]].concat();
        let of_stretch = |tokens: &Range<usize>| zeros(&with_tokens(q.sizes(), tokens.len()));
        let mut dqs = of_queries.iter().map(of_stretch).collect::<Result<Vec<Tensor>>>()?;
        let douts = of_queries.iter().map(|tokens| ops::narrow(dout, 1, tokens.start, tokens.len()));
        let douts = douts.collect::<Result<Vec<Tensor>>>()?;
        let (mut of_own, mut travelling): (Option<Tensor>, Option<Passing>) = (None, None);
        self.round(own, |owner, block| {
            let [k, v] = halves(block)?;
            let of_keys = within(self.part.of(owner));
            let of_stretch = |tokens: &Range<usize>| -> Result<[Tensor; 2]> {
                let sizes = with_tokens(k.sizes(), tokens.len());
                Ok([zeros(&sizes)?, zeros(&sizes)?])
            };
            let mut dkvs = of_keys.iter().map(of_stretch).collect::<Result<Vec<[Tensor; 2]>>>()?;
            for Meeting { query, key, options } in self.meetings(owner, q)? {
                let queries = Stretch { tensor: q, tokens: of_queries[query].clone() };
                let [k, v] = [&k, &v].map(|tensor| Stretch { tensor, tokens: of_keys[key].clone() });
                let (whole, dout) = (&parts[query], &douts[query]);
                let [dq, dk, dv] = ops::attention_part_backward(&queries, [&k, &v], &options, whole, dout)?;
                backend.add_assign(dqs[query].out()?, &dq)?;
                backend.add_assign(dkvs[key][0].out()?, &dk)?;
                backend.add_assign(dkvs[key][1].out()?, &dv)?;
            }
            let half = |half: usize| {
                let pieces: Vec<Tensor> = dkvs.iter().map(|dkv| dkv[half].clone()).collect();
                ops::concat(&pieces, 1)
            };
            let mut gradient = block_of(&half(0)?, &half(1)?)?;
            if owner == me {
                of_own = Some(gradient);
                return Ok(());
            }
            if let Some(before) = travelling.take() {
                backend.add_assign(gradient.out()?, &before.arrived()?)?;
            }
            travelling = Some(self.pass_on(&gradient, owner, GRADIENT)?);
            Ok(())
        })?;
        let mut gradient =
            of_own.ok_or_else(|| TensorError::argument("ring attention", "no block of its own"))?;
        if let Some(home) = travelling {
            backend.add_assign(gradient.out()?, &home.arrived()?)?;
        }
        let [dk, dv] = halves(&gradient)?;
        let [dk, dv] = [dk, dv].map(|gradient| ops::cast(&gradient, q.dtype()));
        Ok([ops::cast(&ops::concat(&dqs, 1)?, q.dtype())?, dk?, dv?])
    }

    /// Which of this rank's stretches see which of `owner`'s, and how.
    fn meetings(&self, owner: usize, q: &Tensor) -> Result<Vec<Meeting>> {
        let mut meetings = Vec::new();
        for (query, queries) in self.part.own().iter().enumerate() {
            for (key, keys) in self.part.of(owner).iter().enumerate() {
                if let Some(options) = self.seen(queries, keys, q)? {
                    meetings.push(Meeting { query, key, options });
                }
            }
        }
        Ok(meetings)
    }

    /// What queries of one stretch of the sequence see of another; `None`: nothing.
    fn seen(
        &self,
        queries: &Range<usize>,
        keys: &Range<usize>,
        q: &Tensor,
    ) -> Result<Option<AttentionOptions>> {
        let options = &self.options;
        if options.causal && keys.start >= queries.end {
            return Ok(None);
        }
        // The first key that the first and the last query see.
        let window = options.window.map(|window| {
            [queries.start, queries.end - 1].map(|position| (position + 1).saturating_sub(window))
        });
        if window.is_some_and(|[first, _]| keys.end <= first) {
            return Ok(None);
        }
        let causal = options.causal && keys.end > queries.start + 1;
        let window = options.window.filter(|_| window.is_some_and(|[_, last]| last > keys.start));
        let of_keys = |tensor: &Tensor| ops::narrow(tensor, 1, keys.start, keys.len());
        let positions = match (&options.alibi_slopes, &options.alibi_positions) {
            (_, Some(positions)) => Some(of_keys(positions)?),
            (Some(_), None) => {
                let row = keys.clone().map(|key| key as f32);
                let rows: Vec<f32> = (0..q.sizes()[0]).flat_map(|_| row.clone()).collect();
                Some(Tensor::from_slice(&rows, [q.sizes()[0], keys.len()], q.device())?)
            }
            (None, None) => None,
        };
        Ok(Some(AttentionOptions {
            first_query: (causal || window.is_some()).then_some(queries.start as isize - keys.start as isize),
            causal,
            window,
            key_mask: options.key_mask.as_ref().map(of_keys).transpose()?,
            alibi_positions: positions,
            weights: options.weights.map(|grid| WeightGrid { first: [0, queries.start, keys.start], ..grid }),
            ..options.clone()
        }))
    }
}
