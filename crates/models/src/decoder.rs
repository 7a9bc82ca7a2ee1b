//! The decoder that all causal families are.
//!
//! Embedding, blocks of attention and feed-forward around a residual stream, a final norm, a head. What differs
//! between families is data: [`DecoderConfig`] and the tensor names in [`Names`].

use ferrospeed_nn::layer_drop::layer_drop;
use ferrospeed_nn::{
    AttentionConfig, AttentionState, Embedding, GatedMlp, HeadProjections, Init, KeyValueCache, Linear, Mlp,
    Mode, MultiHeadAttention, Norm, NormConfig, Parameters, Rotary, RotaryScaling, RotaryTable, Visibility,
};
use ferrospeed_tensor::ops::{self, CrossEntropyOptions, PackedHeads, WeightLayout};
use ferrospeed_tensor::{Activation, DType, Device, Param, Tensor, autograd, profile};

use crate::error::{ModelError, Result};
use crate::families::mixture::{Mixture, MixtureConfig};
use crate::limits::{MAX_SIZE, Sizes};

/// Where tokens get their places from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Positions {
    /// A learned table with `offset` unused rows in front; `from_mask` counts only unmasked tokens.
    Learned {
        /// Rows before position 0.
        offset: usize,
        /// Whether masked tokens do not count.
        from_mask: bool,
    },
    /// Rotary embedding of queries and keys.
    Rotary(Rotary),
    /// A bias on the scores that grows with distance; masked tokens do not count.
    Alibi,
}

/// How attention makes its heads.
#[derive(Debug, Clone, PartialEq)]
pub enum QkvNames {
    /// One tensor.
    Packed(&'static str, PackedHeads),
    /// Three tensors.
    Separate([&'static str; 3]),
}

/// The feed-forward half.
#[derive(Debug, Clone, PartialEq)]
pub enum FeedForward {
    /// `down(f(up(x)))`, by tensor names.
    Plain {
        /// Names of up and down.
        names: [&'static str; 2],
    },
    /// `down(f(gate(x))·up(x))`, by tensor names.
    Gated {
        /// Names of gate, up and down.
        names: [&'static str; 3],
    },
    /// A mixture of gated experts.
    Mixture(MixtureConfig),
}

/// Where the norms stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Residual {
    /// Norm first, then attention, then feed-forward.
    PreNorm,
    /// The same, but the residual is the normed value (a BLOOM option).
    PreNormResidual,
    /// Norm after each sum.
    PostNorm,
    /// Attention and feed-forward side by side, each behind its own norm.
    Parallel,
}

/// The order in which a family's reference implementation declares its parameters. It decides nothing here; DeepSpeed's flat
/// partitions know parameters by their place in it alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Declared {
    /// Each norm before its half of the block (GPT-2, BLOOM).
    AsComputed,
    /// Both norms before both halves (GPT-NeoX).
    NormsFirst,
    /// Both norms behind both halves (LLaMA and its relatives).
    NormsLast,
    /// Each norm behind its half, queries behind keys and values, the final norm before the blocks (OPT).
    NormsBehind,
}

/// How a family names its tensors.
#[derive(Debug, Clone, PartialEq)]
pub struct Names {
    /// In which order they stand.
    pub declared: Declared,
    /// What base-model checkpoints leave out, e.g. `transformer.`.
    pub prefix: &'static str,
    /// The embedding.
    pub embedding: &'static str,
    /// A norm after the embedding.
    pub embedding_norm: Option<&'static str>,
    /// Learned positions.
    pub positions: Option<&'static str>,
    /// Projections around the blocks, when the embedding is narrower.
    pub projections: Option<[&'static str; 2]>,
    /// The blocks; each is this with its number.
    pub blocks: &'static str,
    /// The norm before attention.
    pub norm1: &'static str,
    /// The norm before the feed-forward.
    pub norm2: &'static str,
    /// Queries, keys, values.
    pub qkv: QkvNames,
    /// The attention output.
    pub output: &'static str,
    /// The final norm.
    pub final_norm: Option<&'static str>,
    /// The head, when it is not tied.
    pub head: &'static str,
}

/// A decoder in numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderConfig {
    /// The Hugging Face model type.
    pub model_type: &'static str,
    /// Tokens.
    pub vocab: usize,
    /// Channels of the residual stream.
    pub width: usize,
    /// Channels of the embedding; `width` unless projected.
    pub embedding_width: usize,
    /// Channels inside the feed-forward.
    pub inner_width: usize,
    /// Blocks.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Channels per head.
    pub head_dim: usize,
    /// The longest sequence.
    pub max_tokens: usize,
    /// Where tokens get their places from.
    pub positions: Positions,
    /// Which norm.
    pub norm: NormConfig,
    /// Where the norms stand.
    pub residual: Residual,
    /// The feed-forward half.
    pub feed_forward: FeedForward,
    /// Its activation.
    pub activation: Activation,
    /// How weights are stored.
    pub layout: WeightLayout,
    /// Whether queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the attention output has a bias.
    pub output_bias: bool,
    /// Whether the feed-forward has biases.
    pub mlp_bias: bool,
    /// Multiplies the scores of each layer.
    pub scales: Vec<f32>,
    /// The window of each layer.
    pub windows: Vec<Option<usize>>,
    /// Whether the head is the embedding.
    pub tied: bool,
    /// Standard deviation of new weights.
    pub init_std: f32,
    /// Standard deviation of new output projections.
    pub output_init_std: f32,
    /// Dropout after the embedding.
    pub embedding_dropout: f32,
    /// Dropout of attention weights.
    pub attention_dropout: f32,
    /// Dropout on each branch before it joins the residual stream.
    pub residual_dropout: f32,
    /// How tensors are named.
    pub names: Names,
}

impl DecoderConfig {
    pub(crate) fn validate(&self) -> Result<()> {
        let sizes = [
            ("vocab_size", self.vocab),
            ("hidden size", self.width),
            ("layers", self.layers),
            ("attention heads", self.heads),
            ("key/value heads", self.kv_heads),
            ("head size", self.head_dim),
            ("intermediate size", self.inner_width),
            ("max positions", self.max_tokens),
        ];
        for (key, size) in sizes {
            // Whoever read the number has bounded it from above; what was computed from two of them is bounded here.
            if size == 0 || size > MAX_SIZE {
                return Err(ModelError::config(
                    key,
                    format!("{size} makes no model: 1 to {MAX_SIZE} can be asked for"),
                ));
            }
        }
        let experts = match &self.feed_forward {
            FeedForward::Mixture(mixture) => mixture.experts,
            FeedForward::Plain { .. } | FeedForward::Gated { .. } => 1,
        };
        let qkv_width = (self.heads + 2 * self.kv_heads).saturating_mul(self.head_dim);
        let rows = self.vocab + self.max_tokens;
        Sizes {
            layers: self.layers,
            experts,
            width: self.width,
            inner_width: self.inner_width,
            qkv_width,
            rows,
        }
        .check()?;
        if !self.heads.is_multiple_of(self.kv_heads) {
            let why = format!("{} heads cannot share {} key/value heads", self.heads, self.kv_heads);
            return Err(ModelError::config("num_key_value_heads", why));
        }
        Ok(())
    }

    fn attention(&self, layer: usize) -> AttentionConfig {
        AttentionConfig {
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            scale: self.scales[layer],
            causal: true,
            window: self.windows[layer],
            dropout: self.attention_dropout,
        }
    }
}

#[derive(Debug, Clone)]
enum FeedForwardLayer {
    Plain(Mlp),
    Gated(GatedMlp),
    Mixture(Mixture),
}

/// One block. Cloning copies handles.
#[derive(Debug, Clone)]
struct Block {
    path: String,
    norm1: Norm,
    attention: MultiHeadAttention,
    norm2: Norm,
    feed_forward: FeedForwardLayer,
    residual: Residual,
    residual_dropout: f32,
}

/// The residual stream between blocks: its value is `stream + pending`, summed by whoever needs it next, so that
/// the sum and the following norm are one pass.
#[derive(Debug, Clone)]
struct Stream {
    stream: Tensor,
    pending: Option<Tensor>,
}

impl Stream {
    fn value(&self) -> Result<Tensor> {
        match &self.pending {
            Some(pending) => Ok(ops::add(pending, &self.stream)?),
            None => Ok(self.stream.clone()),
        }
    }

    /// (value, norm of the value)
    fn normed(self, norm: &Norm) -> Result<(Tensor, Tensor)> {
        Ok(match &self.pending {
            Some(pending) => norm.forward_add(pending, Some(&self.stream))?,
            None => norm.forward_add(&self.stream, None)?,
        })
    }
}

/// What routers of mixture layers said, for the balancing loss.
pub type RouterLogits = Vec<Tensor>;

impl Block {
    fn new(init: &Init, config: &DecoderConfig, layer: usize) -> Block {
        let names = &config.names;
        let linear = |name: &str, inputs, outputs, bias, std| {
            Linear::normal(&init.at(name), inputs, outputs, bias, config.layout, std)
        };
        let (query_width, kv_width) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        let std = config.init_std;
        let (width, inner) = (config.width, config.inner_width);
        let norm1 = || Norm::new(&init.at(names.norm1), width, config.norm);
        let norm2 = || Norm::new(&init.at(names.norm2), width, config.norm);
        let attention = || {
            let projections = match &names.qkv {
                QkvNames::Packed(name, layout) => HeadProjections::Packed(
                    linear(name, width, 3 * query_width, config.qkv_bias, std),
                    *layout,
                ),
                QkvNames::Separate([query, key, value]) => {
                    let of_queries = || linear(query, width, query_width, config.qkv_bias, std);
                    let of_keys = |name| linear(name, width, kv_width, config.qkv_bias, std);
                    match names.declared {
                        Declared::NormsBehind => {
                            let (key, value) = (of_keys(key), of_keys(value));
                            HeadProjections::Separate { query: of_queries(), key, value }
                        }
                        _ => HeadProjections::Separate {
                            query: of_queries(),
                            key: of_keys(key),
                            value: of_keys(value),
                        },
                    }
                }
            };
            let output = linear(names.output, query_width, width, config.output_bias, config.output_init_std);
            MultiHeadAttention::new(projections, output, config.attention(layer))
        };
        let feed_forward = || match &config.feed_forward {
            FeedForward::Plain { names: [up, down] } => FeedForwardLayer::Plain(Mlp::new(
                linear(up, width, inner, config.mlp_bias, std),
                linear(down, inner, width, config.mlp_bias, config.output_init_std),
                config.activation,
            )),
            FeedForward::Gated { names: [gate, up, down] } => FeedForwardLayer::Gated(GatedMlp::new(
                linear(gate, width, inner, config.mlp_bias, std),
                linear(up, width, inner, config.mlp_bias, std),
                linear(down, inner, width, config.mlp_bias, config.output_init_std),
                config.activation,
            )),
            FeedForward::Mixture(mixture) => {
                FeedForwardLayer::Mixture(Mixture::new(init, mixture, width, inner, config.activation, std))
            }
        };
        // Parameters are listed in the order in which these are called.
        let (norm1, attention, norm2, feed_forward) = match names.declared {
            Declared::AsComputed => (norm1(), attention(), norm2(), feed_forward()),
            Declared::NormsFirst => {
                let (norm1, norm2) = (norm1(), norm2());
                (norm1, attention(), norm2, feed_forward())
            }
            Declared::NormsLast => {
                let (attention, feed_forward) = (attention(), feed_forward());
                (norm1(), attention, norm2(), feed_forward)
            }
            Declared::NormsBehind => {
                let (attention, norm1, feed_forward) = (attention(), norm1(), feed_forward());
                (norm1, attention, norm2(), feed_forward)
            }
        };
        Block {
            path: init.path().to_owned(),
            norm1,
            attention,
            norm2,
            feed_forward,
            residual: config.residual,
            residual_dropout: config.residual_dropout,
        }
    }

    fn forward(
        &self,
        x: Stream,
        visibility: &Visibility,
        cache: Option<&mut KeyValueCache>,
        mode: Mode,
        routers: &mut RouterLogits,
    ) -> Result<Stream> {
        profile::scope_at(&self.path, "Block", || self.compute(x, visibility, cache, mode, routers))
    }

    fn compute(
        &self,
        x: Stream,
        visibility: &Visibility,
        cache: Option<&mut KeyValueCache>,
        mode: Mode,
        routers: &mut RouterLogits,
    ) -> Result<Stream> {
        let attend = |x: &Tensor| -> Result<Tensor> {
            Ok(mode.dropout(&self.attention.forward(x, visibility, cache, mode)?, self.residual_dropout)?)
        };
        let mut feed = |x: &Tensor| -> Result<Tensor> {
            let y = match &self.feed_forward {
                FeedForwardLayer::Plain(mlp) => mlp.forward(x)?,
                FeedForwardLayer::Gated(mlp) => mlp.forward(x)?,
                FeedForwardLayer::Mixture(mixture) => {
                    let (y, logits) = mixture.forward(x)?;
                    routers.push(logits);
                    y
                }
            };
            Ok(mode.dropout(&y, self.residual_dropout)?)
        };
        match self.residual {
            Residual::PreNorm => {
                let (stream, normed) = x.normed(&self.norm1)?;
                let attended = attend(&normed)?;
                let (stream, normed) = self.norm2.forward_add(&attended, Some(&stream))?;
                Ok(Stream { stream, pending: Some(feed(&normed)?) })
            }
            Residual::PreNormResidual => {
                let (_, normed) = x.normed(&self.norm1)?;
                let stream = ops::add(&attend(&normed)?, &normed)?;
                let normed = self.norm2.forward(&stream)?;
                let fed = feed(&normed)?;
                Ok(Stream { stream: normed, pending: Some(fed) })
            }
            Residual::PostNorm => {
                let value = x.value()?;
                let (_, normed) = self.norm1.forward_add(&attend(&value)?, Some(&value))?;
                let (_, stream) = self.norm2.forward_add(&feed(&normed)?, Some(&normed))?;
                Ok(Stream { stream, pending: None })
            }
            Residual::Parallel => {
                let (stream, normed) = x.normed(&self.norm1)?;
                let attended = attend(&normed)?;
                let fed = feed(&self.norm2.forward(&stream)?)?;
                Ok(Stream { stream, pending: Some(ops::add(&fed, &attended)?) })
            }
        }
    }
}

/// Tokens to run a decoder on.
#[derive(Debug, Clone)]
pub struct Tokens {
    /// `[batch, tokens]` of `I64`.
    pub ids: Tensor,
    /// Per sequence, 1 where a token is real; covers cached tokens too. `None`: all are real.
    pub mask: Option<Vec<Vec<u8>>>,
    /// Per sequence, the positions; `None`: as the family counts them.
    pub positions: Option<Vec<Vec<usize>>>,
}

impl Tokens {
    /// Tokens that are all real.
    pub fn new(ids: Tensor) -> Tokens {
        Tokens { ids, mask: None, positions: None }
    }
}

/// A causal language model.
#[derive(Debug)]
pub struct Decoder {
    config: DecoderConfig,
    parameters: Parameters,
    embedding: Embedding,
    embedding_norm: Option<Norm>,
    learned_positions: Option<Embedding>,
    projections: Option<[Linear; 2]>,
    blocks: Vec<Block>,
    final_norm: Option<Norm>,
    head: Param,
    /// Whether blocks are recomputed in backward instead of kept.
    checkpoint_blocks: bool,
}

impl Decoder {
    /// Builds the model's handles. Attach `parameters()` to a store before running it.
    pub fn new(config: DecoderConfig) -> Decoder {
        let init = Init::root();
        let names = &config.names;
        let embedding =
            Embedding::new(&init.at(names.embedding), config.vocab, config.embedding_width, config.init_std);
        let embedding_norm =
            names.embedding_norm.map(|name| Norm::new(&init.at(name), config.width, config.norm));
        let learned_positions = match (config.positions, names.positions) {
            (Positions::Learned { offset, .. }, Some(name)) => Some(Embedding::new(
                &init.at(name),
                config.max_tokens + offset,
                config.width,
                config.init_std,
            )),
            _ => None,
        };
        let projections = names.projections.map(|[inwards, outwards]| {
            let plain = |name, inputs, outputs| {
                Linear::normal(&init.at(name), inputs, outputs, false, WeightLayout::OutIn, config.init_std)
            };
            let outwards = plain(outwards, config.width, config.embedding_width);
            [plain(inwards, config.embedding_width, config.width), outwards]
        });
        let blocks = || {
            let block = |layer| Block::new(&init.at(format!("{}.{layer}", names.blocks)), &config, layer);
            (0..config.layers).map(block).collect()
        };
        let final_norm = || names.final_norm.map(|name| Norm::new(&init.at(name), config.width, config.norm));
        let (blocks, final_norm) = match names.declared {
            Declared::NormsBehind => {
                let final_norm = final_norm();
                (blocks(), final_norm)
            }
            _ => (blocks(), final_norm()),
        };
        let head = if config.tied {
            init.at(names.head).tie("weight", embedding.table());
            embedding.table().clone()
        } else {
            Linear::normal(
                &init.at(names.head),
                config.embedding_width,
                config.vocab,
                false,
                WeightLayout::OutIn,
                config.init_std,
            )
            .weight()
            .clone()
        };
        Decoder {
            parameters: init.parameters(),
            config,
            embedding,
            embedding_norm,
            learned_positions,
            projections,
            blocks,
            final_norm,
            head,
            checkpoint_blocks: false,
        }
    }

    /// Its numbers.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// Its parameters.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// `[vocab, width]`: makes logits of hidden states.
    pub(crate) fn head(&self) -> &Param {
        &self.head
    }

    /// The type of its activations.
    pub(crate) fn dtype(&self) -> DType {
        self.head.dtype()
    }

    /// Recompute blocks in backward: less memory, a third more arithmetic, the same bits.
    pub fn set_activation_checkpointing(&mut self, on: bool) {
        self.checkpoint_blocks = on;
    }

    /// Empty caches for decoding up to `capacity` tokens.
    pub fn new_state(&self, batch: usize, capacity: usize, device: &Device) -> Result<AttentionState> {
        let dtype = self.dtype();
        let layer = |layer| KeyValueCache::new(batch, capacity, &self.config.attention(layer), dtype, device);
        Ok(AttentionState { layers: (0..self.config.layers).map(layer).collect::<Result<_, _>>()? })
    }

    /// The last hidden state `[batch, tokens, width]`, ready for the head.
    pub fn hidden(&self, tokens: &Tokens, state: Option<&mut AttentionState>, mode: Mode) -> Result<Tensor> {
        Ok(self.run(tokens, state, mode, None)?.0)
    }

    /// The same; also tells an observer of the embedding (0) and of the result of each block (from 1), and returns router logits.
    pub fn run(
        &self,
        tokens: &Tokens,
        state: Option<&mut AttentionState>,
        mode: Mode,
        observe: Option<&mut dyn FnMut(usize, &Tensor)>,
    ) -> Result<(Tensor, RouterLogits)> {
        let &[batch, count] = tokens.ids.sizes() else {
            return Err(ModelError::config(
                "input",
                format!("ids of shape {} are not [batch, tokens]", tokens.ids.shape()),
            ));
        };
        let past = state.as_ref().map_or(0, |state| state.len());
        self.check_length(past + count)?;
        let device = tokens.ids.device();
        let positions = self.positions(tokens, batch, count, past)?;
        let visibility = self.visibility(tokens, &positions, batch, past + count, device)?;
        let rows = match &self.learned_positions {
            Some(_) => {
                let rows: Vec<i64> = positions.iter().flatten().map(|&row| row as i64).collect();
                Some(Tensor::from_slice(&rows, [positions.len(), count], device)?)
            }
            None => None,
        };
        let places = Places { rows, visibility };
        profile::scope_at("", "Decoder", || self.run_at(&tokens.ids, &places, state, mode, observe))
    }

    /// The same where all that it needs to know of places is on the device already.
    pub(crate) fn run_at(
        &self,
        ids: &Tensor,
        places: &Places,
        state: Option<&mut AttentionState>,
        mode: Mode,
        mut observe: Option<&mut dyn FnMut(usize, &Tensor)>,
    ) -> Result<(Tensor, RouterLogits)> {
        let visibility = &places.visibility;
        let mut embedded = self.embedding.forward(ids)?;
        if let Some([inwards, _]) = &self.projections {
            embedded = inwards.forward(&embedded)?;
        }
        if let (Some(table), Some(rows)) = (&self.learned_positions, &places.rows) {
            embedded = ops::add(&embedded, &table.forward(rows)?)?;
        }
        if let Some(norm) = &self.embedding_norm {
            embedded = norm.forward(&embedded)?;
        }
        let embedded = mode.dropout(&embedded, self.config.embedding_dropout)?;
        if let Some(observe) = &mut observe {
            observe(0, &embedded);
        }

        let mut routers = RouterLogits::new();
        let mut stream = Stream { stream: embedded, pending: None };
        let mut caches = state.map(|state| state.layers.iter_mut());
        let dropping = layer_drop().filter(|_| mode == Mode::Train);
        for (index, block) in self.blocks.iter().enumerate() {
            let cache = caches.as_mut().and_then(Iterator::next);
            if dropping.is_some_and(|drop| !drop.keeps(index, self.blocks.len())) {
                continue;
            }
            // Only where a block adds to the stream is there a part of its own to rescale.
            let rescaling = dropping.filter(|drop| {
                block.residual == Residual::PreNorm && drop.keep_probability(index, self.blocks.len()) < 1.0
            });
            let before = rescaling.map(|_| stream.value()).transpose()?;
            if let Some(before) = &before {
                stream = Stream { stream: before.clone(), pending: None };
            }
            stream = if self.checkpoint_blocks && cache.is_none() && autograd::is_recording() {
                checkpointed(block, stream, visibility, mode, &mut routers)?
            } else {
                block.forward(stream, visibility, cache, mode, &mut routers)?
            };
            if let (Some(drop), Some(before)) = (rescaling, &before) {
                let value = drop.rescaled(before, &stream.value()?, index, self.blocks.len())?;
                stream = Stream { stream: value, pending: None };
            }
            // The sum is made for the observer alone: the next block fuses it with its norm.
            if let Some(observe) = &mut observe {
                observe(index + 1, &autograd::no_grad(|| stream.value())?);
            }
        }
        let mut hidden = match &self.final_norm {
            Some(norm) => stream.normed(norm)?.1,
            None => stream.value()?,
        };
        if let Some([_, outwards]) = &self.projections {
            hidden = outwards.forward(&hidden)?;
        }
        Ok((hidden, routers))
    }

    /// Logits `[batch, tokens, vocab]` from a hidden state.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        self.as_head(|| Ok(ops::linear(hidden, &self.head, None, WeightLayout::OutIn)?))
    }

    /// The mean loss of predicting each next label; labels of -100 do not count.
    pub fn loss(&self, tokens: &Tokens, labels: &Tensor, mode: Mode) -> Result<Tensor> {
        let (hidden, routers) = self.run(tokens, None, mode, None)?;
        let loss = self.next_token_loss(&hidden, labels)?;
        match &self.config.feed_forward {
            FeedForward::Mixture(mixture) if mixture.balance_loss > 0.0 => {
                let balance = mixture.balance(&routers, tokens.mask.as_deref())?;
                Ok(ops::add(&loss, &ops::affine(&balance, mixture.balance_loss, 0.0)?)?)
            }
            _ => Ok(loss),
        }
    }

    /// The loss from a hidden state. The last token predicts nothing, so its row does not count.
    pub fn next_token_loss(&self, hidden: &Tensor, labels: &Tensor) -> Result<Tensor> {
        let options = CrossEntropyOptions::default();
        let (rows, width) = (hidden.shape().rows(), hidden.shape().last());
        let tokens = labels.shape().last();
        let targets = Tensor::full([rows], options.ignore_index as f32, DType::I64, hidden.device())?;
        if tokens > 1 {
            let sequences = rows / tokens;
            let backend = hidden.device().backend();
            backend.copy_blocks(labels, 1, tokens, &targets, 0, tokens, sequences, tokens - 1)?;
        }
        let flat = ops::reshape(hidden, [rows, width])?;
        self.as_head(|| {
            Ok(ops::linear_cross_entropy(&flat, &self.head, WeightLayout::OutIn, &targets, options)?)
        })
    }

    /// Runs `work` as the head's own, whose weight may be that of the embedding.
    fn as_head<R>(&self, work: impl FnOnce() -> R) -> R {
        let (inputs, outputs) = (self.config.embedding_width, self.config.vocab);
        let sizes = || format!("in_features={inputs}, out_features={outputs}, bias=False");
        profile::scope_of_tied(self.config.names.head, "Linear", sizes, work)
    }

    /// What a decoding step has to be told of its place: tables over all places, to look up on the device. `None` where a
    /// step depends on more than its place.
    pub(crate) fn step_tables(&self, capacity: usize, device: &Device) -> Result<Option<StepTables>> {
        let mut tables = StepTables { row_offset: 0, rotary: None, alibi_slopes: None };
        match self.config.positions {
            Positions::Learned { offset, .. } => tables.row_offset = offset,
            // The frequencies change with the length.
            Positions::Rotary(Rotary { scaling: RotaryScaling::Dynamic { .. }, .. }) => return Ok(None),
            Positions::Rotary(rotary) => {
                tables.rotary = Some(rotary.table(&[(0..capacity).collect()], capacity, device)?);
            }
            Positions::Alibi => tables.alibi_slopes = Some(self.slopes(device)?),
        }
        Ok(Some(tables))
    }

    fn slopes(&self, device: &Device) -> Result<Tensor> {
        Ok(Tensor::from_slice(&alibi_slopes(self.config.heads), [self.config.heads], device)?)
    }

    pub(crate) fn check_length(&self, length: usize) -> Result<()> {
        // Only a learned table ends; rotary and ALiBi go on.
        if self.learned_positions.is_some() && length > self.config.max_tokens {
            let why = format!(
                "a sequence of {length} tokens is longer than the model's {}",
                self.config.max_tokens
            );
            return Err(ModelError::config("max positions", why));
        }
        Ok(())
    }

    /// One row of positions per sequence, or one for all; rows of the table where positions are learned.
    fn positions(&self, tokens: &Tokens, batch: usize, count: usize, past: usize) -> Result<Vec<Vec<usize>>> {
        let fits = |rows: &[Vec<u8>]| rows.len() == batch && rows.iter().all(|row| row.len() == past + count);
        if let Some(mask) = &tokens.mask
            && !fits(mask)
        {
            let why = format!("does not cover {batch} sequences of {} tokens", past + count);
            return Err(ModelError::config("attention mask", why));
        }
        let (offset, from_mask) = match self.config.positions {
            Positions::Learned { offset, from_mask } => (offset, from_mask),
            Positions::Rotary(_) | Positions::Alibi => (0, false),
        };
        if let (true, Some(mask)) = (from_mask, &tokens.mask) {
            // A masked token takes the row before the first.
            let place = |row: &Vec<u8>| {
                let mut seen = 0;
                let places = row.iter().map(|&real| {
                    seen += usize::from(real != 0);
                    if real != 0 { offset + seen - 1 } else { offset.saturating_sub(1) }
                });
                places.collect::<Vec<_>>().split_off(past)
            };
            return Ok(mask.iter().map(place).collect());
        }
        let positions = tokens.positions.clone().unwrap_or_else(|| vec![(past..past + count).collect()]);
        Ok(positions
            .into_iter()
            .map(|row| row.into_iter().map(|position| position + offset).collect())
            .collect())
    }

    fn visibility(
        &self,
        tokens: &Tokens,
        positions: &[Vec<usize>],
        batch: usize,
        keys: usize,
        device: &Device,
    ) -> Result<Visibility> {
        let key_mask = match &tokens.mask {
            Some(mask) => Some(Tensor::from_slice(&mask.concat(), [batch, keys], device)?),
            None => None,
        };
        let mut visibility = Visibility { key_mask, ..Default::default() };
        match self.config.positions {
            Positions::Learned { .. } => {}
            Positions::Rotary(rotary) => visibility.rotary = Some(rotary.table(positions, keys, device)?),
            Positions::Alibi => {
                visibility.alibi_slopes = Some(self.slopes(device)?);
                if let Some(mask) = &tokens.mask {
                    let places: Vec<f32> = mask
                        .iter()
                        .flat_map(|row| {
                            row.iter().scan(0.0, |seen, &real| {
                                *seen += f32::from(u8::from(real != 0));
                                Some(if real != 0 { *seen - 1.0 } else { 0.0 })
                            })
                        })
                        .collect();
                    visibility.alibi_positions = Some(Tensor::from_slice(&places, [batch, keys], device)?);
                }
            }
        }
        Ok(visibility)
    }
}

/// What a pass knows of where its tokens stand.
#[derive(Debug)]
pub(crate) struct Places {
    /// Rows of the table of learned positions.
    pub(crate) rows: Option<Tensor>,
    pub(crate) visibility: Visibility,
}

/// What decoding steps look up by their place.
#[derive(Debug)]
pub(crate) struct StepTables {
    /// Rows before position 0 in the table of learned positions.
    pub(crate) row_offset: usize,
    rotary: Option<RotaryTable>,
    alibi_slopes: Option<Tensor>,
}

impl StepTables {
    /// The places of one token per sequence, all at `place`; `row` is [`StepTables::row_offset`] further.
    pub(crate) fn at(&self, place: &Tensor, row: &Tensor) -> Result<Places> {
        let rotary = self.rotary.as_ref().map(|table| table.at(place)).transpose()?;
        let visibility = Visibility {
            rotary,
            alibi_slopes: self.alibi_slopes.clone(),
            place: Some(place.clone()),
            ..Default::default()
        };
        Ok(Places { rows: Some(row.clone()), visibility })
    }
}

/// A block that is run again in backward. Its input and output are one tensor each.
fn checkpointed(
    block: &Block,
    stream: Stream,
    visibility: &Visibility,
    mode: Mode,
    routers: &mut RouterLogits,
) -> Result<Stream> {
    let (block, visibility) = (block.clone(), visibility.clone());
    let has_router = matches!(block.feed_forward, FeedForwardLayer::Mixture(_));
    let mut outputs = autograd::checkpoint(&[stream.value()?], move |inputs| {
        let mut routers = RouterLogits::new();
        let stream = Stream { stream: inputs[0].clone(), pending: None };
        let stream =
            block.forward(stream, &visibility, None, mode, &mut routers).map_err(into_tensor_error)?;
        let mut outputs = vec![stream.value().map_err(into_tensor_error)?];
        outputs.extend(routers);
        Ok(outputs)
    })?;
    if has_router {
        routers.extend(outputs.pop());
    }
    Ok(Stream { stream: outputs.swap_remove(0), pending: None })
}

fn into_tensor_error(error: ModelError) -> ferrospeed_tensor::TensorError {
    match error {
        ModelError::Tensor(error) => error,
        other => ferrospeed_tensor::TensorError::BadArgument { op: "block", what: other.to_string() },
    }
}

/// One slope per head: powers of `2^(-8/n)`; heads beyond a power of two take odd powers of the next.
/// (Press, Smith, Lewis: "Train short, test long", 2022.)
pub fn alibi_slopes(heads: usize) -> Vec<f32> {
    let whole = 1usize << heads.ilog2();
    let base = |n: usize| 2f64.powf(-(2f64.powf(-((n as f64).log2() - 3.0))));
    let first = (1..=whole).map(|power| base(whole).powi(power as i32));
    let extra = (0..heads - whole).map(|index| base(2 * whole).powi(2 * index as i32 + 1));
    first.chain(extra).map(|slope| slope as f32).collect()
}

/// The type a model's tensors have in memory, by its Hugging Face name.
pub fn dtype_of_name(name: &str) -> Option<DType> {
    match name {
        "float32" => Some(DType::F32),
        "bfloat16" => Some(DType::BF16),
        "float16" => Some(DType::F16),
        _ => None,
    }
}

/// The Hugging Face name of a type.
pub fn name_of_dtype(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float32",
        DType::BF16 => "bfloat16",
        DType::F16 => "float16",
        other => other.name(),
    }
}
