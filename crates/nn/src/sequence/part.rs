//! Who holds which tokens of a sequence.

use std::ops::Range;
use std::sync::Arc;

use ferrospeed_comm::Group;
use ferrospeed_tensor::ops::{self, AttentionOptions, WeightGrid};
use ferrospeed_tensor::{Result, Tensor, TensorError, random};

use super::{ring, ulysses};

/// How attention gets at tokens that other ranks hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SequenceMethod {
    /// Around attention, ranks exchange parts of the sequence for parts of the heads: each attends over whole sequences with
    /// some of the heads. (Jacobs et al.: "DeepSpeed Ulysses", 2023.)
    #[default]
    Ulysses,
    /// Keys and values travel round the ranks while each attends with its own queries. (Liu, Zaharia, Abbeel: "Ring
    /// Attention with Blockwise Transformers for Near-Infinite Context", 2023.)
    Ring,
}

/// Ranks that share sequences.
#[derive(Debug, Clone)]
pub struct SequenceParallel {
    group: Group,
    method: SequenceMethod,
}

impl SequenceParallel {
    /// Over the ranks of a group, each of which gets the same samples.
    pub fn new(group: Group, method: SequenceMethod) -> SequenceParallel {
        SequenceParallel { group, method }
    }

    /// The ranks.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// How sequences of so many tokens are divided.
    pub fn divide(&self, tokens: usize) -> Result<SequencePart> {
        let parts = ranges(self.method, tokens, self.group.size());
        if parts.iter().flatten().any(Range::is_empty) {
            let pieces: usize = parts.iter().map(Vec::len).sum();
            let why = format!(
                "a sequence of {tokens} tokens cannot be cut into {pieces} pieces for {} ranks: take longer sequences, or \
                 fewer ranks for each",
                self.group.size()
            );
            return Err(TensorError::argument("sequence parallel", why));
        }
        Ok(SequencePart { parallel: self.clone(), tokens, parts: parts.into() })
    }
}

/// The tokens that each rank holds, as stretches of the sequence in order. Of a ring, rank r of n holds pieces r and 2n-1-r of
/// 2n: a token sees those before it alone, and so the early piece of each rank makes up for its late one.
fn ranges(method: SequenceMethod, tokens: usize, ranks: usize) -> Vec<Vec<Range<usize>>> {
    let piece = |index: usize, pieces: usize| tokens * index / pieces..tokens * (index + 1) / pieces;
    let of_rank = |rank: usize| match method {
        SequenceMethod::Ulysses => vec![piece(rank, ranks)],
        SequenceMethod::Ring => vec![piece(rank, 2 * ranks), piece(2 * ranks - 1 - rank, 2 * ranks)],
    };
    (0..ranks).map(of_rank).collect()
}

/// This rank's part of sequences of one length.
#[derive(Debug, Clone)]
pub struct SequencePart {
    parallel: SequenceParallel,
    tokens: usize,
    parts: Arc<[Vec<Range<usize>>]>,
}

impl SequencePart {
    /// The ranks that hold the other parts.
    pub fn group(&self) -> &Group {
        &self.parallel.group
    }

    /// How many tokens the whole sequence has.
    pub fn whole(&self) -> usize {
        self.tokens
    }

    /// The stretches of the sequence that this rank holds.
    pub fn own(&self) -> &[Range<usize>] {
        self.of(self.group().rank())
    }

    /// How many tokens this rank holds.
    pub fn count(&self) -> usize {
        self.own().iter().map(Range::len).sum()
    }

    /// The stretches that a rank of the group holds.
    pub(super) fn of(&self, rank: usize) -> &[Range<usize>] {
        &self.parts[rank]
    }

    /// How many tokens each rank holds.
    pub(super) fn counts(&self) -> Vec<usize> {
        self.parts.iter().map(|part| part.iter().map(Range::len).sum()).collect()
    }

    /// What this rank holds of a row with an entry for every token.
    pub fn take_row<T: Clone>(&self, row: &[T]) -> Result<Vec<T>> {
        self.check("row", row.len())?;
        Ok(self.own().iter().flat_map(|range| row[range.clone()].iter().cloned()).collect())
    }

    /// What this rank holds of `x [sequences, tokens]`; carries no gradient.
    pub fn take(&self, x: &Tensor) -> Result<Tensor> {
        let &[sequences, tokens] = x.sizes() else {
            return Err(TensorError::shape("sequence part", "x", *x.shape(), "[sequences, tokens]"));
        };
        self.check("tensor", tokens)?;
        let count = self.count();
        let mut taken = Tensor::empty([sequences, count], x.dtype(), x.device())?;
        let mut start = 0;
        for range in self.own() {
            let backend = x.device().backend();
            backend.copy_blocks(
                x,
                range.start,
                tokens,
                taken.out()?,
                start,
                count,
                sequences,
                range.len(),
            )?;
            start += range.len();
        }
        Ok(taken)
    }

    fn check(&self, what: &str, tokens: usize) -> Result<()> {
        if tokens == self.tokens {
            return Ok(());
        }
        let why = format!("a {what} of {tokens} entries for sequences of {} tokens", self.tokens);
        Err(TensorError::argument("sequence part", why))
    }

    /// Attention of the parts of queries, keys and values `[batch, own tokens, heads, dim]`. Masks and positions of keys are
    /// those of whole sequences, slopes those of all heads.
    pub fn attention(&self, qkv: [&Tensor; 3], options: &AttentionOptions) -> Result<Tensor> {
        if let Some(odd) = qkv.iter().find(|x| x.shape().dims() != 4 || x.sizes()[1] != self.count()) {
            let expected = format!("[batch, {}, heads, dim]", self.count());
            return Err(TensorError::shape("sequence parallel", "q, k or v", *odd.shape(), expected));
        }
        let mut options = options.clone();
        if options.dropout > 0.0 {
            // Drawn on every rank, whatever it computes, so that all go on from the same key.
            options.dropout_key = Some(random::next_key());
            let whole = [qkv[0].sizes()[2], self.tokens, self.tokens];
            options.weights = Some(WeightGrid { whole, first: [0; 3] });
        }
        match self.parallel.method {
            SequenceMethod::Ulysses => ulysses::attention(self, qkv, &options),
            SequenceMethod::Ring if options.documents.is_some() => {
                let why = "documents apart need ranks that attend over whole sequences; share them by Ulysses, not as a ring";
                Err(TensorError::argument("sequence parallel", why))
            }
            SequenceMethod::Ring => ring::attention(self, qkv, &options),
        }
    }

    /// Dropout of `x [batch, own tokens, width]` that takes what dropout of whole sequences would.
    pub(crate) fn dropout(&self, x: &Tensor, p: f32) -> Result<Tensor> {
        let &[batch, tokens, width] = x.sizes() else {
            return Err(TensorError::shape("sequence part", "x", *x.shape(), "[batch, own tokens, width]"));
        };
        if tokens != self.count() {
            let expected = format!("[batch, {}, width]", self.count());
            return Err(TensorError::shape("sequence part", "x", *x.shape(), expected));
        }
        let of_sequence = |sequence: usize| {
            let places = self.own().iter().cloned().flatten();
            places.map(move |place| ((sequence * self.tokens + place) * width) as u64)
        };
        ops::dropout_rows(x, p, (0..batch).flat_map(of_sequence).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_is_held_once() {
        for method in [SequenceMethod::Ulysses, SequenceMethod::Ring] {
            for (tokens, ranks) in [(8, 1), (8, 2), (17, 4), (100, 3)] {
                let mut held: Vec<usize> =
                    ranges(method, tokens, ranks).into_iter().flatten().flatten().collect();
                held.sort_unstable();
                assert_eq!(
                    held,
                    (0..tokens).collect::<Vec<_>>(),
                    "{method:?}, {tokens} tokens, {ranks} ranks"
                );
            }
        }
    }

    #[test]
    fn causal_work_is_even_on_a_ring() {
        // Pairs of a query and a key that it sees.
        let work =
            |part: &Vec<Range<usize>>| part.iter().cloned().flatten().map(|token| token + 1).sum::<usize>();
        let works: Vec<usize> = ranges(SequenceMethod::Ring, 64, 4).iter().map(work).collect();
        assert!(works.iter().all(|&other| other == works[0]), "{works:?}");
        let works: Vec<usize> = ranges(SequenceMethod::Ulysses, 64, 4).iter().map(work).collect();
        assert!(works[3] > 6 * works[0], "parts in order are not: {works:?}");
    }
}
