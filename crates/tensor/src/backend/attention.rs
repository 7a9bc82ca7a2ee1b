//! Attention over a tensor's own keys, a cache's, and pages, and the positions of heads.

use crate::backend::Memory;
use crate::block_layout::BlockLayout;
use crate::documents::Documents;
use crate::dtype::DType;
use crate::error::{Result, TensorError};
use crate::out::Out;
use crate::pages::PagedSpec;
use crate::random::RandomKey;
use crate::tensor::Tensor;

/// A tensor of attention heads inside a larger one, e.g. the keys inside a packed qkv projection.
#[derive(Debug, Clone, Copy)]
pub struct Heads<'a> {
    /// Where the elements are.
    pub tensor: &'a Tensor,
    /// The first element of head 0, token 0, batch 0.
    pub offset: usize,
    /// Elements between sequences of the batch.
    pub batch_stride: usize,
    /// Elements between tokens.
    pub token_stride: usize,
    /// Elements between heads.
    pub head_stride: usize,
}

/// Where heads lie in a tensor.
#[derive(Debug, Clone, Copy)]
pub struct HeadPlaces {
    /// The first element of head 0, token 0, batch 0.
    pub offset: usize,
    /// Elements between sequences of the batch.
    pub batch_stride: usize,
    /// Elements between tokens.
    pub token_stride: usize,
    /// Elements between heads.
    pub head_stride: usize,
}

impl HeadPlaces {
    /// The same from a token on.
    pub fn starting_at(&self, first: usize) -> HeadPlaces {
        HeadPlaces { offset: self.offset + first * self.token_stride, ..*self }
    }
}

/// Attention heads that are written, inside a larger tensor.
#[derive(Debug)]
pub struct HeadsOut<'a> {
    /// The larger tensor.
    pub out: Out<'a>,
    /// Where they lie in it.
    pub places: HeadPlaces,
}

impl<'a> HeadsOut<'a> {
    /// From an element of an output on, with the elements between sequences, tokens and heads.
    pub fn new(out: Out<'a>, offset: usize, strides: [usize; 3]) -> HeadsOut<'a> {
        let [batch_stride, token_stride, head_stride] = strides;
        HeadsOut { out, places: HeadPlaces { offset, batch_stride, token_stride, head_stride } }
    }

    /// Gives the right to write up: what has been written may be read.
    pub fn into_heads(self) -> Heads<'a> {
        let HeadPlaces { offset, batch_stride, token_stride, head_stride } = self.places;
        Heads { tensor: self.out.into_tensor(), offset, batch_stride, token_stride, head_stride }
    }
}

impl<'a> Heads<'a> {
    /// The same from a token on.
    pub fn starting_at(&self, first: usize) -> Heads<'a> {
        Heads { offset: self.offset + first * self.token_stride, ..*self }
    }
}

/// One attention call. Shapes: q `[batch, queries, heads, dim]`, k and v `[batch, keys, kv_heads, dim]`.
#[derive(Debug, Clone, Copy)]
pub struct AttentionSpec<'a> {
    /// Sequences.
    pub batch: usize,
    /// Query tokens per sequence.
    pub queries: usize,
    /// Key tokens per sequence.
    pub keys: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Channels per head.
    pub dim: usize,
    /// Multiplies the scores.
    pub scale: f32,
    /// Where the first query stands among the keys; `None`: the queries are the last tokens of the keys.
    pub first_query: Option<isize>,
    /// Whether a query sees only keys up to its own position.
    pub causal: bool,
    /// With a window `w`, query at position `p` sees keys `> p - w`.
    pub window: Option<usize>,
    /// `[batch, keys]`, nonzero where a key may be seen.
    pub key_mask: Option<&'a Tensor>,
    /// ALiBi: `[heads]` slopes; `slope · key position` is added to the scores.
    pub alibi_slopes: Option<&'a Tensor>,
    /// `[batch, keys]` key positions for ALiBi, when they are not `0..keys`.
    pub alibi_positions: Option<&'a Tensor>,
    /// Probability of dropping an attention weight, with the key of its random numbers.
    pub dropout: Option<(f32, RandomKey)>,
    /// Where these weights are among those that were drawn for together; `None`: they are all of them.
    pub weights: Option<WeightGrid>,
    /// Who sees whom ends at the borders of these; queries are the tokens of their keys then.
    pub documents: Option<&'a Documents>,
    /// Which blocks of queries see which blocks of keys; queries are the tokens of their keys then.
    pub blocks: Option<&'a BlockLayout>,
    /// `[batch, keys]` of f32, added to the scores.
    pub key_bias: Option<&'a Tensor>,
    /// `[queries, keys]`, or `[heads, queries, keys]`, of f32, added to the scores.
    pub score_bias: Option<&'a Tensor>,
    /// Scores are `cap·tanh(score/cap)` before anything is added to them.
    pub score_cap: Option<f32>,
    /// `[heads]` of f32: a score of nobody's beside those of the keys, which takes its share of the weights and gives nothing. The
    /// log-sum-exp counts it.
    pub sinks: Option<&'a Tensor>,
}

/// Some of the weights `[batch, heads, queries, keys]` of an attention of which other ranks compute the rest: whether one is
/// dropped depends on where it is in the whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightGrid {
    /// Heads, queries and keys of the whole.
    pub whole: [usize; 3],
    /// The first head, query and key that is computed.
    pub first: [usize; 3],
}

impl AttentionSpec<'_> {
    /// The position of the first query among the keys.
    pub fn shift(&self) -> isize {
        self.first_query.unwrap_or(self.keys as isize - self.queries as isize)
    }

    /// Where these weights are among those that were drawn for together.
    pub fn weight_grid(&self) -> WeightGrid {
        let whole = [self.heads, self.queries, self.keys];
        self.weights.unwrap_or(WeightGrid { whole, first: [0; 3] })
    }
}

/// Attention of a device.
pub trait Attention: Memory {
    /// Attention without the score matrix; `logsumexp` is `[batch, heads, queries]` in f32.
    fn attention(
        &self,
        spec: &AttentionSpec<'_>,
        q: &Heads<'_>,
        k: &Heads<'_>,
        v: &Heads<'_>,
        out: HeadsOut<'_>,
        logsumexp: Out<'_>,
    ) -> Result<()>;
    /// Gradients of [`Attention::attention`]: of queries, keys and values.
    fn attention_backward(
        &self,
        spec: &AttentionSpec<'_>,
        q: &Heads<'_>,
        k: &Heads<'_>,
        v: &Heads<'_>,
        out: &Heads<'_>,
        logsumexp: &Tensor,
        dout: &Heads<'_>,
        gradients: [HeadsOut<'_>; 3],
    ) -> Result<()>;
    /// Whether it knows [`AttentionSpec::blocks`], `key_bias` and `score_bias`.
    fn attends_over_blocks(&self) -> bool {
        false
    }
    /// Whether it knows [`AttentionSpec::score_cap`] and `sinks`, of sequences and of pages.
    fn shapes_scores(&self) -> bool {
        false
    }
    /// Whether causal attention over whole sequences is so much faster than within documents that these are worth copying.
    fn prefers_whole_sequences(&self, _dtype: DType, _dim: usize) -> bool {
        false
    }
    /// Attention of one new token per sequence (`queries` is 1) over all that the caches hold, itself included.
    ///
    /// `new` are its query, key and value; the latter two are appended to `caches` behind the first `place` tokens, an
    /// `I64` in the device's memory. The spec's `keys` is the capacity of the caches; it has no mask.
    fn attention_step(
        &self,
        spec: &AttentionSpec<'_>,
        new: [&Heads<'_>; 3],
        caches: [HeadsOut<'_>; 2],
        place: &Tensor,
        out: HeadsOut<'_>,
    ) -> Result<()>;
    /// Rotates the first `2·cos.last()` channels of each head in place, by tables `[batch or 1, tokens, pairs]` in f32.
    /// `inverse` rotates back, which is the gradient.
    fn rotary(
        &self,
        heads: HeadsOut<'_>,
        batch: usize,
        tokens: usize,
        head_count: usize,
        cos: &Tensor,
        sin: &Tensor,
        interleaved: bool,
        inverse: bool,
    ) -> Result<()>;
}

/// Attention over a cache in blocks.
pub trait PagedAttention: Memory {
    /// Whether [`PagedAttention::attention_paged`] knows heads of this type and width.
    fn reads_pages(&self, _dtype: DType, _dim: usize) -> bool {
        false
    }
    /// Whether [`PagedAttention::attention_paged`] turns queries and keys on its way.
    fn turns_pages(&self) -> bool {
        false
    }
    /// Appends keys and values of the rows to a cache in blocks, and attends over it. `new` are queries, keys and values.
    fn attention_paged(
        &self,
        _spec: &PagedSpec<'_>,
        _new: [&Tensor; 3],
        _caches: [Out<'_>; 2],
        _out: Out<'_>,
    ) -> Result<()> {
        Err(TensorError::argument("attention_paged", "this device has no kernel for it"))
    }
}
