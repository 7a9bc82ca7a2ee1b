//! A decoder in numbers and names: all that differs between causal families.

use ferrospeed_nn::tensor_parallel::Between;
use ferrospeed_nn::{
    AttentionConfig, DeltaNetConfig, LatentHeads, NormConfig, OutputGate, QueryGrowth, Rotary, Turning,
};
use ferrospeed_tensor::ops::{PackedHeads, WeightLayout};
use ferrospeed_tensor::{Activation, DType};

use crate::error::{ModelError, Result};
use crate::families::mixture::{ExpertKind, MixtureConfig};
use crate::limits::{MAX_SIZE, Sizes};

/// Where tokens get their places from.
#[derive(Debug, Clone, PartialEq)]
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
    /// One tensor: queries of all heads, then keys and values of perhaps fewer.
    Grouped(&'static str),
    /// One tensor: for each key head the queries that read it, its keys and its values.
    ByKeyHead(&'static str),
    /// Latents, by the names that DeepSeek gave them.
    Latent(LatentRanks),
    /// Three tensors.
    Separate([&'static str; 3]),
    /// Three tensors, with RMS norms on queries and keys.
    Normed {
        /// Names of queries, keys and values.
        heads: [&'static str; 3],
        /// Names of the norms.
        norms: [&'static str; 2],
        /// Whether each head is normalised by itself.
        per_head: bool,
        /// What gates the output.
        gate: OutputGate,
    },
}

/// Layers of gated DeltaNet among those of attention.
#[derive(Debug, Clone, PartialEq)]
pub struct LinearLayers {
    /// Which layers they are.
    pub layers: Vec<bool>,
    /// Where each lies in its block.
    pub name: &'static str,
    /// Their numbers.
    pub config: DeltaNetConfig,
}

/// The widths of latents, and of the heads that are made of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentRanks {
    /// The latent of queries, where they have one.
    pub query: Option<usize>,
    /// The latent of keys and values.
    pub key_value: usize,
    /// Channels of a head.
    pub heads: LatentHeads,
    /// Whether the layers to the latents have biases.
    pub bias: bool,
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
    /// The same where one tensor has gate and up, in this order.
    GatedPacked {
        /// Names of gate and up, and of down.
        names: [&'static str; 2],
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
    /// Norm after attention and after feed-forward, before what they say joins the stream.
    BranchNorm,
    /// A norm before each half, and one behind it before what it says joins the stream.
    Sandwich,
    /// Attention and feed-forward side by side, each behind its own norm.
    Parallel,
    /// The same behind one norm.
    ParallelOneNorm,
}

/// By what a family multiplies its stream.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Factors {
    /// The embedding.
    pub embedding: EmbeddingFactor,
    /// What each half of a block says, before it joins the stream.
    pub branch: f32,
    /// The last hidden state, and so the logits.
    pub logits: f32,
}

/// By what embeddings are multiplied.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum EmbeddingFactor {
    /// This.
    Exact(f32),
    /// This as a number of the model's type.
    Rounded(f32),
}

impl EmbeddingFactor {
    /// The factor in a model of this type.
    pub fn of(self, dtype: DType) -> f32 {
        match (self, dtype) {
            (EmbeddingFactor::Rounded(factor), DType::BF16) => half::bf16::from_f32(factor).to_f32(),
            (EmbeddingFactor::Rounded(factor), DType::F16) => half::f16::from_f32(factor).to_f32(),
            (EmbeddingFactor::Exact(factor) | EmbeddingFactor::Rounded(factor), _) => factor,
        }
    }
}

impl Default for Factors {
    /// Nothing is multiplied.
    fn default() -> Factors {
        Factors { embedding: EmbeddingFactor::Exact(1.0), branch: 1.0, logits: 1.0 }
    }
}

/// What few families do to the scores of their attention; by default nothing.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ScoreRules {
    /// Scores are `cap·tanh(score/cap)`.
    pub cap: Option<f32>,
    /// Queries, keys and values stay within this and its negative.
    pub clip: Option<f32>,
    /// The name of the scores of nobody's, one for each head.
    pub sinks: Option<&'static str>,
    /// Queries grow with their place.
    pub growth: Option<QueryGrowth>,
}

/// What few families have of a head; by default a product and nothing else.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct HeadRules {
    /// Logits are `cap·tanh(logit/cap)`.
    pub cap: Option<f32>,
    /// Whether the head has a bias.
    pub bias: bool,
}

impl HeadRules {
    /// Whether logits are a product and nothing else.
    pub fn are_plain(&self) -> bool {
        self.cap.is_none() && !self.bias
    }
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
    /// The same with the attention output before queries, keys and values (Phi-3).
    OutputFirst,
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
    /// The norm of attention.
    pub norm1: &'static str,
    /// The norm of the feed-forward; nobody's in [`Residual::ParallelOneNorm`].
    pub norm2: &'static str,
    /// The norms behind attention and feed-forward, of [`Residual::Sandwich`].
    pub branch_norms: Option<[&'static str; 2]>,
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
    /// The token whose row of the embedding no lookup trains: padding, in families that have one.
    pub padding: Option<usize>,
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
    /// Layers in linear time, where some are.
    pub linear: Option<LinearLayers>,
    /// How queries and keys of each layer turn, where positions are rotary.
    pub turns: Vec<Turning>,
    /// How those turn that turn locally.
    pub local_rotary: Option<Rotary>,
    /// The window of each layer.
    pub windows: Vec<Option<usize>>,
    /// What is done to scores.
    pub scores: ScoreRules,
    /// By what the stream is multiplied.
    pub factors: Factors,
    /// Whether the head is the embedding.
    pub tied: bool,
    /// What the head does besides its product.
    pub head: HeadRules,
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
    /// How many tokens a text may have whose keys stay where they were computed.
    ///
    /// Frequencies that change with a text's length would turn the keys of one pass differently from those of the next:
    /// there the length that the model was trained on is the end.
    pub fn longest_paged(&self) -> usize {
        let steady = match &self.positions {
            Positions::Rotary(rotary) => rotary.steady_length(),
            _ => None,
        };
        steady.map_or(self.max_tokens, |steady| steady.min(self.max_tokens))
    }

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
        let (experts, inner_width) = match &self.feed_forward {
            FeedForward::Mixture(mixture) => (mixture.experts, mixture.inner_width),
            FeedForward::Plain { .. } | FeedForward::Gated { .. } | FeedForward::GatedPacked { .. } => {
                (1, self.inner_width)
            }
        };
        let of_heads = (self.heads + 2 * self.kv_heads).saturating_mul(self.head_dim);
        let latents = match &self.names.qkv {
            QkvNames::Latent(latent) => latent.key_value.saturating_add(latent.query.unwrap_or(0)),
            _ => 0,
        };
        let linear = self.linear.as_ref().map_or(0, |linear| {
            let DeltaNetConfig { key_heads, value_heads, key_dim, value_dim, kernel, .. } = linear.config;
            let channels =
                key_heads.saturating_mul(key_dim).saturating_add(value_heads.saturating_mul(value_dim));
            channels.saturating_mul(2).max(channels.saturating_mul(kernel) / self.width.max(1))
        });
        let qkv_width = of_heads.saturating_add(latents).max(linear);
        let inner_width = match &self.feed_forward {
            FeedForward::Mixture(mixture) => {
                inner_width.max(mixture.shared_width.unwrap_or(0) / experts.max(1))
            }
            _ => inner_width,
        };
        let rows = self.vocab + self.max_tokens;
        Sizes { layers: self.layers, experts, width: self.width, inner_width, qkv_width, rows }.check()?;
        if !self.heads.is_multiple_of(self.kv_heads) {
            let why = format!("{} heads cannot share {} key/value heads", self.heads, self.kv_heads);
            return Err(ModelError::config("num_key_value_heads", why));
        }
        Ok(())
    }

    /// Whether layers can be cut into slices for so many ranks: heads and channels must divide evenly, tokens need not.
    pub fn check_slices(&self, ranks: usize, between: Between) -> Result<()> {
        let refuse = |why: String| Err(ModelError::Division { why });
        if let Some(what) = self.undivided().filter(|_| ranks > 1) {
            return refuse(format!(
                "{} has {what}, which no slices are cut of yet; use ZeRO stages",
                self.model_type
            ));
        }
        if !self.heads.is_multiple_of(ranks) {
            let (heads, fit) = (self.heads, divisors(self.heads));
            let why = format!(
                "{heads} heads cannot be shared by {ranks} ranks alike; tensor parallelism over {fit} ranks fits"
            );
            return refuse(why);
        }
        if !self.kv_heads.is_multiple_of(ranks) && !ranks.is_multiple_of(self.kv_heads) {
            let why = format!(
                "{} key/value heads are neither a multiple nor a divisor of {ranks} ranks; use a tensor parallelism that is",
                self.kv_heads
            );
            return refuse(why);
        }
        let together = matches!(self.names.qkv, QkvNames::Grouped(_) | QkvNames::ByKeyHead(_));
        if together && !self.kv_heads.is_multiple_of(ranks) {
            let (heads, fit) = (self.kv_heads, divisors(self.kv_heads));
            let why = format!(
                "{heads} key/value heads, which lie in one tensor with the queries, cannot be shared by {ranks} ranks; {fit} ranks fit"
            );
            return refuse(why);
        }
        let inner = match &self.feed_forward {
            FeedForward::Mixture(mixture) => {
                // Where ranks have tokens of their own, experts stay whole; layers without a mixture are cut like any other.
                let experts = std::iter::once(mixture.inner_width).chain(mixture.shared_width);
                let experts = experts.filter(|_| between != Between::OwnTokens);
                let dense = mixture.dense.contains(&true).then_some(self.inner_width);
                experts.chain(dense).collect()
            }
            FeedForward::Plain { .. } | FeedForward::Gated { .. } | FeedForward::GatedPacked { .. } => {
                vec![self.inner_width]
            }
        };
        if let Some(inner) = inner.into_iter().find(|inner| !inner.is_multiple_of(ranks)) {
            let why = format!(
                "{inner} channels of a feed-forward layer cannot be shared by {ranks} ranks alike; use a tensor parallelism that divides them"
            );
            return refuse(why);
        }
        if self.vocab < ranks {
            return refuse(format!("a vocabulary of {} is too small for {ranks} ranks", self.vocab));
        }
        let balances =
            matches!(&self.feed_forward, FeedForward::Mixture(mixture) if mixture.balance_loss > 0.0);
        if ranks > 1 && between == Between::OwnTokens && balances {
            let why = "the loss that balances experts needs the routes of all tokens, and each rank has its own; set output_router_logits to false, or keep all tokens on every rank";
            return Err(ModelError::config("output_router_logits", why));
        }
        Ok(())
    }

    /// What of it cannot be cut into slices.
    fn undivided(&self) -> Option<&'static str> {
        match self {
            _ if self.head.bias => Some("a head with a bias"),
            _ if self.head.cap.is_some() => Some("capped logits"),
            _ if self.scores.sinks.is_some() => Some("attention sinks"),
            _ if matches!(self.names.qkv, QkvNames::Latent(_)) => Some("latent attention"),
            _ if self.linear.is_some() => Some("layers in linear time"),
            _ if matches!(self.names.qkv, QkvNames::Normed { gate: OutputGate::BesideQueries, .. }) => {
                Some("gated attention")
            }
            _ => None,
        }
    }

    /// Whether experts can be spread over so many ranks.
    pub fn check_experts(&self, ranks: usize) -> Result<()> {
        let why = match &self.feed_forward {
            _ if ranks == 1 => return Ok(()),
            FeedForward::Mixture(MixtureConfig { kind: ExpertKind::Clamped { .. }, .. }) => {
                "experts whose parameters lie stacked are not spread over ranks yet".to_owned()
            }
            FeedForward::Mixture(mixture) if mixture.experts.is_multiple_of(ranks) => return Ok(()),
            FeedForward::Mixture(mixture) => {
                let (experts, fit) = (mixture.experts, divisors(mixture.experts));
                format!("{experts} experts cannot be shared by {ranks} ranks alike; {fit} ranks fit")
            }
            FeedForward::Plain { .. } | FeedForward::Gated { .. } | FeedForward::GatedPacked { .. } => {
                format!("a {} has no experts to spread over {ranks} ranks", self.model_type)
            }
        };
        Err(ModelError::Division { why })
    }

    /// Whether a layer is one in linear time.
    pub fn is_linear(&self, layer: usize) -> bool {
        self.linear.as_ref().is_some_and(|linear| linear.layers.get(layer).copied().unwrap_or(false))
    }

    pub(crate) fn attention(&self, layer: usize) -> AttentionConfig {
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

/// The numbers up to 1024 that divide a size, for people.
fn divisors(size: usize) -> String {
    let found: Vec<String> =
        (1..=size.min(1024)).filter(|n| size.is_multiple_of(*n)).map(|n| n.to_string()).collect();
    found.join(", ")
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
