//! Multi-head attention: projections, rotary, masks, grouped heads, and a key/value cache for decoding.
//!
//! Scores that a device's kernels do not know, capped ones and those beside sinks, are composed of products ([`composed`]).

mod composed;
mod latent;

use std::collections::{BTreeMap, BTreeSet};

use ferrospeed_tensor::ops::{self, AttentionOptions, PackedHeads, WeightLayout};
use ferrospeed_tensor::{
    DType, Device, Documents, Operand, Pages, Param, Result, Tensor, TensorError, profile,
};

pub use latent::{LatentHeads, LatentProjections, LatentQuery};

use crate::Mode;
use crate::linear::Linear;
use crate::norm::{Norm, RmsNorm};
use crate::rotary::RotaryTable;
use crate::sequence::SequencePart;
use crate::sparse_attention::{LayerLayouts, SparseAttention};
use crate::tensor_parallel::enter;

/// The numbers of an attention layer.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionConfig {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Channels per head.
    pub head_dim: usize,
    /// Multiplies the scores.
    pub scale: f32,
    /// Whether a token sees only itself and those before it.
    pub causal: bool,
    /// How many last tokens are seen, itself included.
    pub window: Option<usize>,
    /// Dropout of attention weights while training.
    pub dropout: f32,
}

/// How queries, keys and values are made from the input.
#[derive(Debug, Clone)]
pub enum HeadProjections {
    /// One layer makes all three.
    Packed(Linear, PackedHeads),
    /// One layer makes the queries of all heads, then keys and values, of which there may be fewer.
    Grouped(Linear),
    /// One layer makes, for each key head, the queries that read it, its keys and its values.
    ByKeyHead(Linear),
    /// By way of latents.
    Latent(Box<LatentProjections>),
    /// One layer each.
    Separate {
        /// Queries.
        query: Linear,
        /// Keys.
        key: Linear,
        /// Values.
        value: Linear,
    },
}

/// What a forward pass knows of the tokens' places: shared by all layers.
#[derive(Debug, Clone, Default)]
pub struct Visibility {
    /// `[batch, keys]`, nonzero where a key is a real token.
    pub key_mask: Option<Tensor>,
    /// Rotary tables for the new tokens.
    pub rotary: Option<RotaryTable>,
    /// Those of layers that turn otherwise ([`Turning::Locally`]).
    pub local_rotary: Option<RotaryTable>,
    /// ALiBi slopes `[heads]`.
    pub alibi_slopes: Option<Tensor>,
    /// ALiBi key positions `[batch, keys]`.
    pub alibi_positions: Option<Tensor>,
    /// Where the one new token of every sequence stands in the cache, an `I64` in the device's memory: a pass that knows its
    /// place by this alone can be recorded once for all tokens. The caller counts the cached tokens then.
    pub place: Option<Tensor>,
    /// Whose tokens the rows of a pass `[1, rows]` over many sequences are; the caches are those of [`KeyValueCache::paged`].
    pub pages: Option<Pages>,
    /// Which part of its sequences a pass has, where other ranks have the others; masks and positions of keys are those of
    /// whole sequences then.
    pub sequence: Option<SequencePart>,
    /// Documents that share the sequences: tokens see those of their own alone. They are those of whole sequences.
    pub documents: Option<Documents>,
}

impl Visibility {
    /// Dropout of `x [batch, tokens, width]` when training: of parts of sequences, what whole ones would lose.
    pub fn dropout(&self, mode: Mode, x: &Tensor, p: f32) -> Result<Tensor> {
        match &self.sequence {
            Some(part) if mode == Mode::Train && p > 0.0 => part.dropout(x, p),
            _ => mode.dropout(x, p),
        }
    }
}

/// By which tables a layer turns its queries and keys, where a pass has such.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Turning {
    /// By those of the model.
    #[default]
    Usually,
    /// By those that some layers have for themselves, such as the ones that see a window.
    Locally,
    /// By none.
    Never,
}

/// What multiplies what the heads have mixed, before the output's layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OutputGate {
    /// Nothing.
    #[default]
    None,
    /// The sigmoid of as many channels as a query has, which the query's layer makes behind it, head by head. For separate
    /// projections.
    BesideQueries,
}

/// What few models do to the scores of their attention; by default nothing.
#[derive(Debug, Clone, Default)]
pub struct Scores {
    /// Scores are `cap·tanh(score/cap)`, so none is larger.
    pub cap: Option<f32>,
    /// `[heads]`: a score of nobody's, which takes its share of the weights and gives nothing.
    pub sinks: Option<Param>,
}

impl Scores {
    /// Whether a device's kernels know them.
    fn are_plain(&self) -> bool {
        self.cap.is_none() && self.sinks.is_none()
    }
}

/// Multi-head attention with an output projection.
#[derive(Debug, Clone)]
pub struct MultiHeadAttention {
    projections: HeadProjections,
    output: Linear,
    config: AttentionConfig,
    head_norms: Option<[RmsNorm; 2]>,
    turning: Turning,
    scores: Scores,
    /// Queries, keys and values stay within this and its negative.
    clip: Option<f32>,
    output_gate: OutputGate,
    /// Which blocks of whole sequences see each other, where not all do.
    layouts: Option<LayerLayouts>,
}

/// Keys and values of the tokens so far, for one layer.
#[derive(Debug, Clone)]
pub struct KeyValueCache {
    keys: Tensor,
    values: Tensor,
    filled: usize,
    /// What a layer in linear time keeps of each text of a pass over pages, by the text's first block.
    texts: BTreeMap<u32, [Tensor; 2]>,
}

impl KeyValueCache {
    /// Room for `capacity` tokens of `batch` sequences.
    pub fn new(
        batch: usize,
        capacity: usize,
        config: &AttentionConfig,
        dtype: DType,
        device: &Device,
    ) -> Result<KeyValueCache> {
        let shape = [batch, capacity, config.kv_heads, config.head_dim];
        let [keys, values] = [Tensor::zeros(shape, dtype, device)?, Tensor::zeros(shape, dtype, device)?];
        Ok(KeyValueCache { keys, values, filled: 0, texts: BTreeMap::new() })
    }

    /// `blocks` blocks of `block_tokens` tokens, of any sequences.
    pub fn paged(
        blocks: usize,
        block_tokens: usize,
        config: &AttentionConfig,
        dtype: DType,
        device: &Device,
    ) -> Result<KeyValueCache> {
        KeyValueCache::new(blocks, block_tokens, config, dtype, device)
    }

    /// What a layer in linear time keeps of its texts: the inputs of the last few tokens, and a memory.
    pub(crate) fn of_memory(before: Tensor, memory: Tensor) -> KeyValueCache {
        KeyValueCache { keys: before, values: memory, filled: 0, texts: BTreeMap::new() }
    }

    /// Of a layer in linear time for passes over pages: nothing of any text yet.
    pub fn of_texts(device: &Device) -> Result<KeyValueCache> {
        let nothing = Tensor::zeros([1, 1], DType::F32, device)?;
        Ok(KeyValueCache::of_memory(nothing.clone(), nothing))
    }

    /// What is kept of the text with this first block.
    pub(crate) fn text(&self, first_block: u32) -> Option<&[Tensor; 2]> {
        self.texts.get(&first_block)
    }

    /// Keeps that from now on.
    pub(crate) fn remember_text(&mut self, first_block: u32, kept: [Tensor; 2]) {
        self.texts.insert(first_block, kept);
    }

    /// Both.
    pub(crate) fn memory(&self) -> [&Tensor; 2] {
        [&self.keys, &self.values]
    }

    /// What is kept after `tokens` more.
    pub(crate) fn remember(&mut self, before: Tensor, memory: Tensor, tokens: usize) {
        (self.keys, self.values) = (before, memory);
        self.filled += tokens;
    }

    /// Where it lies.
    pub fn device(&self) -> &Device {
        self.keys.device()
    }

    fn expect_room(&self, tokens: usize) -> Result<()> {
        let capacity = self.keys.sizes()[1];
        if self.filled + tokens <= capacity {
            return Ok(());
        }
        let what = format!("{} tokens do not fit a cache of {capacity}", self.filled + tokens);
        Err(TensorError::BadArgument { op: "key/value cache", what })
    }

    /// Appends the keys and values of rows whose blocks lie here, and attends over those.
    fn attend_paged(
        &mut self,
        [q, k, v]: [Tensor; 3],
        pages: &Pages,
        rotary: Option<&RotaryTable>,
        options: &AttentionOptions,
    ) -> Result<Tensor> {
        let caches = [&mut self.keys, &mut self.values];
        match rotary.map(|table| (table, table.turn())) {
            Some((_, Some(turn))) => ops::attention_paged_turned([q, k, v], caches, pages, &turn, options),
            Some((table, None)) => {
                let (q, k) = (table.rotate_queries(q)?, table.rotate(k)?);
                ops::attention_paged([&q, &k, &v], caches, pages, options)
            }
            None => ops::attention_paged([&q, &k, &v], caches, pages, options),
        }
    }

    fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<()> {
        let (batch, capacity) = (self.keys.sizes()[0], self.keys.sizes()[1]);
        let tokens = k.sizes()[1];
        self.expect_room(tokens)?;
        let token = k.sizes()[2] * k.sizes()[3];
        for (new, cache) in [(k, &mut self.keys), (v, &mut self.values)] {
            new.device().backend().copy_blocks(
                new,
                0,
                tokens * token,
                cache.out()?,
                self.filled * token,
                capacity * token,
                batch,
                tokens * token,
            )?;
        }
        self.filled += tokens;
        Ok(())
    }
}

/// The caches of all layers of a decoding model.
#[derive(Debug, Clone, Default)]
pub struct AttentionState {
    /// One per layer.
    pub layers: Vec<KeyValueCache>,
}

impl AttentionState {
    /// How many tokens are cached.
    pub fn len(&self) -> usize {
        self.layers.first().map_or(0, |layer| layer.filled)
    }

    /// Forgets what layers in linear time keep of texts with other first blocks than these.
    pub fn keep_texts(&mut self, first_blocks: &BTreeSet<u32>) {
        for layer in &mut self.layers {
            layer.texts.retain(|block, _| first_blocks.contains(block));
        }
    }

    /// Counts tokens that passes with a [`Visibility::place`] have cached.
    pub fn advance(&mut self, tokens: usize) -> Result<()> {
        for layer in &mut self.layers {
            layer.expect_room(tokens)?;
            layer.filled += tokens;
        }
        Ok(())
    }

    /// Whether nothing is cached yet.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl MultiHeadAttention {
    /// From its layers. `config` has all heads; where the layers are cut over ranks, this one has its share of them.
    pub fn new(projections: HeadProjections, output: Linear, config: AttentionConfig) -> MultiHeadAttention {
        let ranks = output.summed_over().map_or(1, |slices| slices.group().size());
        let config = AttentionConfig {
            heads: config.heads / ranks,
            kv_heads: (config.kv_heads / ranks).max(1),
            ..config
        };
        MultiHeadAttention {
            projections,
            output,
            config,
            head_norms: None,
            turning: Turning::Usually,
            scores: Scores::default(),
            clip: None,
            output_gate: OutputGate::None,
            layouts: None,
        }
    }

    /// Normalises queries and keys before they are rotated: each head by itself where the norms have its width, all heads
    /// together where they have theirs. For separate projections.
    pub fn with_head_norms(mut self, query: RmsNorm, key: RmsNorm) -> MultiHeadAttention {
        self.head_norms = Some([query, key]);
        self
    }

    /// Turns queries and keys otherwise than most layers do.
    pub fn with_turning(self, turning: Turning) -> MultiHeadAttention {
        MultiHeadAttention { turning, ..self }
    }

    /// With scores that are more than products.
    pub fn with_scores(self, scores: Scores) -> MultiHeadAttention {
        MultiHeadAttention { scores, ..self }
    }

    /// With a gate before the output's layer.
    pub fn with_output_gate(self, output_gate: OutputGate) -> MultiHeadAttention {
        MultiHeadAttention { output_gate, ..self }
    }

    /// Keeps what projections make of the input within `limit` and its negative.
    pub fn with_clip(self, limit: Option<f32>) -> MultiHeadAttention {
        MultiHeadAttention { clip: limit, ..self }
    }

    /// Attends over the blocks of a layout alone, or over all again; passes with a cache see all that is cached.
    pub fn set_sparse_attention(&mut self, kind: Option<SparseAttention>) {
        let heads = self.config.heads;
        let first = self.output.summed_over().map_or(0, |slices| slices.group().rank() * heads);
        self.layouts = kind.map(|kind| LayerLayouts::new(kind, first..first + heads));
    }

    /// The layouts that it attends over, where it does not attend over all.
    pub fn layouts(&self) -> Option<&LayerLayouts> {
        self.layouts.as_ref()
    }

    /// The tables by which this layer turns.
    fn rotary<'a>(&self, visibility: &'a Visibility) -> Option<&'a RotaryTable> {
        match self.turning {
            Turning::Usually => visibility.rotary.as_ref(),
            Turning::Locally => visibility.local_rotary.as_ref(),
            Turning::Never => None,
        }
    }

    /// Whether its scores are composed of products, as no kernel of the device knows them. A pass knows its place on the host then.
    pub fn is_composed(&self, device: &Device) -> bool {
        !self.scores.are_plain() && !device.backend().shapes_scores()
    }

    /// Its numbers; of the heads, those that this rank has.
    pub fn config(&self) -> &AttentionConfig {
        &self.config
    }

    /// Attends over `x [batch, tokens, width]`, and over the cache before it when there is one.
    pub fn forward(
        &self,
        x: &Tensor,
        visibility: &Visibility,
        cache: Option<&mut KeyValueCache>,
        mode: Mode,
    ) -> Result<Tensor> {
        let first = match &self.projections {
            HeadProjections::Packed(qkv, _)
            | HeadProjections::Grouped(qkv)
            | HeadProjections::ByKeyHead(qkv) => qkv.weight(),
            HeadProjections::Latent(latent) => latent.inwards.weight(),
            HeadProjections::Separate { query, .. } => query.weight(),
        };
        let slices = self.output.summed_over();
        let attend = || {
            let x = enter(x, slices)?;
            let attend = || self.attend(&x, visibility, cache, mode);
            match slices {
                Some(slices) => slices.within_cuts(attend),
                None => attend(),
            }
        };
        profile::scope("MultiHeadAttention", [first, self.output.weight()], attend)
    }

    fn attend(
        &self,
        x: &Tensor,
        visibility: &Visibility,
        mut cache: Option<&mut KeyValueCache>,
        mode: Mode,
    ) -> Result<Tensor> {
        let layouts = self.layouts.as_ref().filter(|_| cache.is_none());
        if layouts.is_some() && (visibility.sequence.is_some() || visibility.documents.is_some()) {
            let what = "a layout of blocks is of whole sequences of one text; leave out documents that are apart and ranks that share sequences".to_owned();
            return Err(TensorError::BadArgument { op: "sparse_attention", what });
        }
        let options = AttentionOptions {
            scale: Some(self.config.scale),
            causal: self.config.causal,
            window: self.config.window,
            blocks: layouts.map(|layouts| layouts.of(x.sizes()[1])),
            key_mask: visibility.key_mask.clone(),
            alibi_slopes: self.own_slopes(visibility.alibi_slopes.as_ref())?,
            alibi_positions: visibility.alibi_positions.clone(),
            dropout: if mode == Mode::Train { self.config.dropout } else { 0.0 },
            documents: visibility.documents.clone(),
            score_cap: self.scores.cap,
            sinks: self.scores.sinks.as_ref().map(Operand::from),
            ..Default::default()
        };
        let (batch, tokens) = (x.sizes()[0], x.sizes()[1]);
        let rotary = self.rotary(visibility);
        if let (Some(_), Some(_)) = (&visibility.sequence, &cache) {
            let what = "a cache holds whole sequences, and this pass has a part of each".to_owned();
            return Err(TensorError::BadArgument { op: "key/value cache", what });
        }
        if let (Some(_), Some(_)) = (&visibility.documents, &cache) {
            let what =
                "a cache holds one text for each sequence, and this pass has several documents".to_owned();
            return Err(TensorError::BadArgument { op: "key/value cache", what });
        }
        if self.is_composed(x.device()) {
            return self.attend_composed(x, visibility, cache, &options);
        }
        // What is between the projection and the scores needs them apart.
        let together = (rotary.is_none() && self.clip.is_none()).then_some(&self.projections);
        if let (Some(HeadProjections::Packed(qkv, layout)), None, None) =
            (together, &cache, &visibility.sequence)
        {
            let mixed = ops::attention_packed(&qkv.forward(x)?, self.config.heads, *layout, &options)?;
            return self.output.forward(&mixed);
        }
        if let (Some(HeadProjections::Packed(qkv, layout)), Some(cache), None) =
            (together, &mut cache, &visibility.pages)
        {
            if let Some(place) = &visibility.place {
                let (qkv, caches) = (qkv.forward(x)?, [&mut cache.keys, &mut cache.values]);
                let mixed =
                    ops::attention_packed_step(&qkv, self.config.heads, *layout, caches, place, &options)?;
                return self.output.forward(&mixed);
            }
            cache.expect_room(tokens)?;
            let (heads, past) = (self.config.heads, cache.filled);
            let qkv = qkv.forward(x)?;
            let mixed = ops::attention_packed_cached(
                &qkv,
                heads,
                *layout,
                &mut cache.keys,
                &mut cache.values,
                past,
                &options,
            )?;
            cache.filled += tokens;
            return self.output.forward(&mixed);
        }
        let ([q, k, v], gate) = self.project(x, batch, tokens)?;
        if let (Some(cache), Some(pages)) = (&mut cache, &visibility.pages) {
            let mixed = cache.attend_paged([q, k, v], pages, rotary, &options)?;
            return self.joined(&mixed, gate.as_ref());
        }
        let (q, k) = match rotary {
            Some(table) => (table.rotate_queries(q)?, table.rotate(k)?),
            None => (q, k),
        };
        let mixed = match (cache, &visibility.place) {
            (Some(cache), Some(place)) => {
                ops::attention_step([&q, &k, &v], [&mut cache.keys, &mut cache.values], place, &options)?
            }
            (Some(cache), None) => {
                cache.append(&k, &v)?;
                ops::attention_cached(&q, &cache.keys, &cache.values, cache.filled, &options)?
            }
            (None, _) => match &visibility.sequence {
                Some(part) => part.attention([&q, &k, &v], &options)?,
                None => ops::attention(&q, &k, &v, &options)?,
            },
        };
        self.joined(&mixed, gate.as_ref())
    }

    /// Where no kernel knows its scores. It refuses what those who do not have kernels for it would have to be told.
    fn attend_composed(
        &self,
        x: &Tensor,
        visibility: &Visibility,
        cache: Option<&mut KeyValueCache>,
        options: &AttentionOptions,
    ) -> Result<Tensor> {
        if visibility.sequence.is_some() || options.blocks.is_some() || visibility.place.is_some() {
            let what = "scores with a cap or sinks are composed of products on this device, which know neither ranks that share \
                        sequences, nor layouts of blocks, nor recorded steps";
            return Err(TensorError::argument("attention", what));
        }
        let (batch, tokens) = (x.sizes()[0], x.sizes()[1]);
        let ([q, k, v], gate) = self.project(x, batch, tokens)?;
        let (q, k) = match self.rotary(visibility) {
            Some(table) => (table.rotate_queries(q)?, table.rotate(k)?),
            None => (q, k),
        };
        let mixed = match (cache, &visibility.pages) {
            (Some(cache), Some(pages)) => {
                composed::paged([&q, &k, &v], [&mut cache.keys, &mut cache.values], pages, options)?
            }
            (Some(cache), None) => {
                cache.append(&k, &v)?;
                let known = |tensor: &Tensor| ops::narrow(tensor, 1, 0, cache.filled);
                composed::attention([&q, &known(&cache.keys)?, &known(&cache.values)?], options)?
            }
            (None, _) => composed::attention([&q, &k, &v], options)?,
        };
        self.joined(&mixed, gate.as_ref())
    }

    /// Channels of all heads.
    fn width(&self) -> usize {
        self.config.heads * self.config.head_dim
    }

    /// What heads `[batch, tokens, heads, channels]` have mixed, side by side, through the output's layer.
    fn joined(&self, mixed: &Tensor, gate: Option<&Tensor>) -> Result<Tensor> {
        let (batch, tokens) = (mixed.sizes()[0], mixed.sizes()[1]);
        let gated = gate.map(|gate| ops::mul(mixed, &ops::sigmoid(gate)?)).transpose()?;
        let mixed = gated.as_ref().unwrap_or(mixed);
        if let HeadProjections::Latent(latent) = &self.projections
            && latent.heads.value < self.config.head_dim
        {
            let value = latent.heads.value;
            let own = ops::narrow(mixed, 3, 0, value)?;
            return self.output.forward(&ops::reshape(&own, [batch, tokens, self.config.heads * value])?);
        }
        self.output.forward(&ops::reshape(mixed, [batch, tokens, self.width()])?)
    }

    /// `x + forward(norm(x))` for few rows `[1, rows, width]` over pages, where the device has kernels for that and nothing is
    /// recorded; `None` where not.
    pub fn forward_onto(
        &self,
        x: &Tensor,
        norm: &Norm,
        visibility: &Visibility,
        cache: &mut KeyValueCache,
    ) -> Result<Option<Tensor>> {
        let HeadProjections::Separate { query, key, value } = &self.projections else { return Ok(None) };
        let Some(pages) = &visibility.pages else { return Ok(None) };
        let plain = query.layout() == WeightLayout::OutIn
            && self.output.summed_over().is_none()
            && self.head_norms.is_none()
            && self.clip.is_none()
            && self.output_gate == OutputGate::None
            && self.scores.are_plain()
            && ![query, key, value, &self.output].iter().any(|layer| layer.stands_alone());
        let Some(norm) = norm.of_few_rows().filter(|_| plain) else { return Ok(None) };
        let layers = [query, key, value].map(Linear::operands);
        let Some(projected) = ops::normed_linears(x, norm, layers)? else { return Ok(None) };
        let [q, k, v] = self.heads(projected)?;
        let options = AttentionOptions {
            scale: Some(self.config.scale),
            causal: self.config.causal,
            window: self.config.window,
            alibi_slopes: visibility.alibi_slopes.clone(),
            ..Default::default()
        };
        let mixed = cache.attend_paged([q, k, v], pages, self.rotary(visibility), &options)?;
        let mixed = ops::reshape(&mixed, x.shape().with_last(self.width()))?;
        match ops::linear_onto(&mixed, self.output.operands(), x)? {
            Some(y) => Ok(Some(y)),
            None => Ok(Some(ops::add(&self.output.forward(&mixed)?, x)?)),
        }
    }

    /// Queries, keys and values `[batch, tokens, …]` as heads.
    fn heads(&self, [query, key, value]: [Tensor; 3]) -> Result<[Tensor; 3]> {
        let AttentionConfig { heads, kv_heads, head_dim, .. } = self.config;
        let split = |x: &Tensor, count: usize| {
            let (batch, tokens) = (x.sizes()[0], x.sizes()[1]);
            ops::reshape(x, [batch, tokens, count, head_dim])
        };
        Ok([split(&query, heads)?, split(&key, kv_heads)?, split(&value, kv_heads)?])
    }

    /// The ALiBi slopes of this rank's heads.
    fn own_slopes(&self, all: Option<&Tensor>) -> Result<Option<Tensor>> {
        match (all, self.output.summed_over()) {
            (Some(all), Some(slices)) => {
                let heads = self.config.heads;
                Ok(Some(ops::narrow(all, 0, slices.group().rank() * heads, heads)?))
            }
            (all, _) => Ok(all.cloned()),
        }
    }

    /// Queries, keys and values of `x` as heads, not yet turned, and what gates the output.
    fn project(&self, x: &Tensor, batch: usize, tokens: usize) -> Result<([Tensor; 3], Option<Tensor>)> {
        let ([q, k, v], gate) = self.projected(x, batch, tokens)?;
        let Some(limit) = self.clip else { return Ok(([q, k, v], gate)) };
        let bound = |limit: f32| Tensor::full([], limit, x.dtype(), x.device());
        let (low, high) = (bound(-limit)?, bound(limit)?);
        let clipped = |x: &Tensor| ops::minimum(&ops::maximum(x, &low)?, &high);
        Ok(([clipped(&q)?, clipped(&k)?, clipped(&v)?], gate))
    }

    fn projected(&self, x: &Tensor, batch: usize, tokens: usize) -> Result<([Tensor; 3], Option<Tensor>)> {
        let HeadProjections::Separate { query, key, value } = &self.projections else {
            return Ok((self.projected_together(x, batch, tokens)?, None));
        };
        let [query, key, value] = match [query, key, value] {
            layers if layers.iter().any(|layer| layer.stands_alone()) => {
                [query.forward(x)?, key.forward(x)?, value.forward(x)?]
            }
            layers => ops::linears(x, layers.map(Linear::operands), query.layout())?,
        };
        let AttentionConfig { heads, head_dim, .. } = self.config;
        let (query, gate) = match self.output_gate {
            OutputGate::None => (query, None),
            OutputGate::BesideQueries => {
                let both = ops::reshape(&query, [batch, tokens, heads, 2 * head_dim])?;
                let parts = ops::split(&both, 3, &[head_dim, head_dim])?;
                (ops::reshape(&parts[0], [batch, tokens, heads * head_dim])?, Some(parts[1].clone()))
            }
        };
        Ok((self.normed_heads([query, key, value], batch, tokens)?, gate))
    }

    /// Queries, keys and values of layers of their own as heads, normalised where they are.
    fn normed_heads(
        &self,
        [query, key, value]: [Tensor; 3],
        batch: usize,
        tokens: usize,
    ) -> Result<[Tensor; 3]> {
        let Some([of_query, of_key]) = &self.head_norms else { return self.heads([query, key, value]) };
        let dim = self.config.head_dim;
        let heads = |mut flat: Tensor, count: usize, norm: Option<&RmsNorm>| {
            let per_head = norm.filter(|norm| norm.width() == dim);
            if let (Some(norm), None) = (norm, per_head) {
                flat = norm.forward(&flat)?;
            }
            let split = ops::reshape(&flat, [batch, tokens, count, dim])?;
            per_head.map_or(Ok(split.clone()), |norm| norm.forward(&split))
        };
        Ok([
            heads(query, self.config.heads, Some(of_query))?,
            heads(key, self.config.kv_heads, Some(of_key))?,
            heads(value, self.config.kv_heads, None)?,
        ])
    }

    fn projected_together(&self, x: &Tensor, batch: usize, tokens: usize) -> Result<[Tensor; 3]> {
        match &self.projections {
            HeadProjections::Packed(qkv, layout) => {
                ops::split_heads(&qkv.forward(x)?, self.config.heads, *layout)
            }
            HeadProjections::Grouped(qkv) => {
                let AttentionConfig { heads, kv_heads, head_dim, .. } = self.config;
                let widths = [heads, kv_heads, kv_heads].map(|count| count * head_dim);
                self.heads(ops::split(&qkv.forward(x)?, 2, &widths)?.try_into().map_err(|_| {
                    TensorError::argument("attention", "three parts are queries, keys and values")
                })?)
            }
            HeadProjections::Latent(latent) => latent.project(x, self.config.heads),
            HeadProjections::ByKeyHead(qkv) => {
                let AttentionConfig { heads, kv_heads, head_dim, .. } = self.config;
                let of_key = heads / kv_heads;
                let apart = ops::reshape(&qkv.forward(x)?, [batch, tokens, kv_heads, of_key + 2, head_dim])?;
                let parts = ops::split(&apart, 3, &[of_key, 1, 1])?;
                self.heads(parts.try_into().map_err(|_| {
                    TensorError::argument("attention", "three parts are queries, keys and values")
                })?)
            }
            HeadProjections::Separate { .. } => {
                Err(TensorError::argument("attention", "layers of their own make nothing together"))
            }
        }
    }
}
