//! The shape of a transformer, and how many parameters that makes.
//!
//! Read from the `config.json` of a Hugging Face model. The counts are exact: a test compares them with the tensors of
//! real checkpoints. Families that are not known here are refused; for those, give the counts themselves.

use serde_json::Value;

use crate::estimate::ModelSize;
use crate::usual::usual;

/// What a plan needs to know about a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Model {
    /// A transformer whose shape is known, so that its activations can be counted.
    Transformer(Transformer),
    /// Only the number of parameters is known.
    Counts(ModelSize),
}

impl Transformer {
    /// The same of which so many parameters are not trained, and so many of adapters are.
    pub fn with_adapters(self, frozen_params: u64, adapter_params: u64) -> Transformer {
        Transformer { frozen_params: frozen_params.min(self.size.total_params), adapter_params, ..self }
    }
}

impl Model {
    /// Parameters that are not trained, and those of adapters.
    pub(crate) fn frozen_and_adapters(&self) -> (u64, u64) {
        match self {
            Model::Transformer(transformer) => (transformer.frozen_params, transformer.adapter_params),
            Model::Counts(_) => (0, 0),
        }
    }

    /// Its parameters.
    pub fn size(&self) -> ModelSize {
        match self {
            Model::Transformer(transformer) => transformer.size,
            Model::Counts(size) => *size,
        }
    }
}

/// The shape of a transformer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transformer {
    /// Width of the residual stream.
    pub hidden: u64,
    /// Layers.
    pub layers: u64,
    /// Attention heads.
    pub heads: u64,
    /// Key and value heads.
    pub kv_heads: u64,
    /// Width of one head.
    pub head_dim: u64,
    /// Width of the feed-forward layer.
    pub intermediate: u64,
    /// Vocabulary.
    pub vocab: u64,
    /// Longest sequence.
    pub max_positions: u64,
    /// Whether the feed-forward layer has a gate.
    pub gated: bool,
    /// Whether one tensor has gate and up: then their product is kept for backward, too.
    pub packed_gate: bool,
    /// Experts that see one token; 1 without experts.
    pub experts_per_token: u64,
    /// Experts of a layer; 0 without a mixture.
    pub experts: u64,
    /// Parameters of one layer's experts that this rank holds.
    pub expert_params: u64,
    /// Parameters of experts, of all layers, that other ranks hold ([`Transformer::with_experts_over`]).
    pub params_elsewhere: u64,
    /// Tensors as wide as the residual stream that a layer keeps for backward: sums, and their norms.
    pub stream_copies: u64,
    /// Whether all logits exist at once; a fused loss holds a chunk of them.
    pub keeps_logits: bool,
    /// Ranks that hold slices of each layer ([`Transformer::in_slices`]).
    pub slices: u64,
    /// Whether the head is the table of tokens.
    pub tied_head: bool,
    /// Parameters of one layer.
    pub layer_params: u64,
    /// Parameters that are not trained.
    pub frozen_params: u64,
    /// Parameters of adapters, which are trained and are in no other count.
    pub adapter_params: u64,
    /// All parameters, and those of the largest single module.
    pub size: ModelSize,
}

/// Why a `config.json` gives no shape.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    /// The family is not known here.
    #[error(
        "the model type {model_type:?} is not known; known are bert, bloom, gpt2, gpt_neox, llama, mistral, mixtral, olmo2, olmoe, opt, phi3, qwen2, qwen2_moe, qwen3, qwen3_moe and smollm3. Give the numbers of parameters instead"
    )]
    UnknownFamily {
        /// `model_type`.
        model_type: String,
    },
    /// A number is absent or no positive integer.
    #[error("config.json of a {model_type} model needs `{key}`, a positive integer")]
    Missing {
        /// `model_type`.
        model_type: String,
        /// The key.
        key: &'static str,
    },
    /// The numbers multiply to more than fits.
    #[error("the model is too large to count: its parameters do not fit 64 bits")]
    TooLarge,
}

/// Reads one `config.json`.
struct Reader<'a> {
    config: &'a Value,
    model_type: &'a str,
}

/// Larger numbers in a `config.json` are mistakes; below it no product of three overflows.
const LIMIT: u64 = 1 << 20;

impl Reader<'_> {
    fn number(&self, key: &'static str) -> Result<u64, ModelError> {
        self.either(&[key])
    }

    /// The first of several spellings. Null is as good as not given: both mean the family's usual size.
    fn either(&self, keys: &[&'static str]) -> Result<u64, ModelError> {
        let missing = || ModelError::Missing { model_type: self.model_type.to_owned(), key: keys[0] };
        let found = keys.iter().find_map(|key| self.config.get(key).filter(|value| !value.is_null()));
        let number = match found {
            Some(value) => value.as_u64(),
            None => usual(self.model_type, keys[0]),
        };
        let number = number.filter(|&number| number > 0).ok_or_else(missing)?;
        if number > LIMIT { Err(ModelError::TooLarge) } else { Ok(number) }
    }

    fn or(&self, key: &'static str, default: u64) -> Result<u64, ModelError> {
        if self.config.get(key).is_none_or(Value::is_null) { Ok(default) } else { self.number(key) }
    }

    fn flag(&self, key: &str, default: bool) -> bool {
        self.config.get(key).and_then(Value::as_bool).unwrap_or(default)
    }
}

/// A matrix with or without bias.
fn linear(inputs: u64, outputs: u64, bias: bool) -> u64 {
    inputs * outputs + if bias { outputs } else { 0 }
}

/// Families that differ from LLaMA in what [`llama`] reads.
const LLAMA_KIN: [&str; 11] = [
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "olmoe",
    "qwen3",
    "qwen3_moe",
    "phi3",
    "smollm3",
    "olmo2",
];

/// Reads the shape from the `config.json` of a Hugging Face model.
pub fn from_hugging_face(config: &Value) -> Result<Transformer, ModelError> {
    let model_type = config.get("model_type").and_then(Value::as_str).unwrap_or_default();
    let read = Reader { config, model_type };
    match model_type {
        "gpt2" => gpt2(&read),
        _ if LLAMA_KIN.contains(&model_type) => llama(&read),
        "bert" => bert(&read),
        "opt" => opt(&read),
        "gpt_neox" => neox(&read),
        "bloom" => bloom(&read),
        _ => Err(ModelError::UnknownFamily { model_type: model_type.to_owned() }),
    }
}

/// The shape of a model whose heads all have keys and values of their own.
fn plain(
    hidden: u64,
    layers: u64,
    heads: u64,
    intermediate: u64,
    vocab: u64,
    max_positions: u64,
) -> Transformer {
    Transformer {
        hidden,
        layers,
        heads,
        kv_heads: heads,
        head_dim: hidden / heads.max(1),
        intermediate,
        vocab,
        max_positions,
        gated: false,
        packed_gate: false,
        experts_per_token: 1,
        experts: 0,
        expert_params: 0,
        params_elsewhere: 0,
        stream_copies: 4,
        keeps_logits: false,
        slices: 1,
        tied_head: false,
        layer_params: 0,
        frozen_params: 0,
        adapter_params: 0,
        size: ModelSize { total_params: 0, largest_layer_params: 0 },
    }
}

/// Adds the counts: the layers, and what stands outside them.
fn counted(
    mut shape: Transformer,
    layer_params: u64,
    outside: u64,
    largest: u64,
) -> Result<Transformer, ModelError> {
    let layers = layer_params.checked_mul(shape.layers).ok_or(ModelError::TooLarge)?;
    let total_params = layers.checked_add(outside).ok_or(ModelError::TooLarge)?;
    shape.tied_head = outside < 2 * shape.vocab * shape.hidden;
    shape.layer_params = layer_params;
    shape.size = ModelSize { total_params, largest_layer_params: largest };
    Ok(shape)
}

fn gpt2(read: &Reader<'_>) -> Result<Transformer, ModelError> {
    let hidden = read.number("n_embd")?;
    let inner = read.or("n_inner", 4 * hidden)?;
    let (vocab, positions) = (read.number("vocab_size")?, read.number("n_positions")?);
    let shape = plain(hidden, read.number("n_layer")?, read.number("n_head")?, inner, vocab, positions);
    let layer = 4 * hidden
        + linear(hidden, 3 * hidden, true)
        + linear(hidden, hidden, true)
        + linear(hidden, inner, true)
        + linear(inner, hidden, true);
    let head = if read.flag("tie_word_embeddings", true) { 0 } else { vocab * hidden };
    let largest = (vocab * hidden)
        .max(linear(hidden, inner, true))
        .max(linear(hidden, 3 * hidden, true))
        .max(positions * hidden);
    counted(shape, layer, (vocab + positions) * hidden + 2 * hidden + head, largest)
}

fn llama(read: &Reader<'_>) -> Result<Transformer, ModelError> {
    let hidden = read.number("hidden_size")?;
    let heads = read.number("num_attention_heads")?;
    // Null says that there are as many as heads.
    let kv_heads = match read.config.get("num_key_value_heads") {
        None => usual(read.model_type, "num_key_value_heads").unwrap_or(heads),
        Some(_) => read.or("num_key_value_heads", heads)?,
    };
    let usual_dim = if read.model_type == "qwen3" { 128 } else { hidden / heads };
    let head_dim = read.or("head_dim", usual_dim)?;
    let (intermediate, vocab) = (read.number("intermediate_size")?, read.number("vocab_size")?);
    let qwen = ["qwen2", "qwen2_moe"].contains(&read.model_type);
    let qkv_bias = match read.model_type {
        "qwen2" => true,
        "qwen2_moe" => read.flag("qkv_bias", true),
        _ => read.flag("attention_bias", false),
    };
    let mixture = mixture(read, intermediate)?;
    let experts = mixture.as_ref().map_or(1, |mixture| mixture.experts);
    let inner = mixture.as_ref().map_or(intermediate, |mixture| mixture.inner);
    let shared = mixture.as_ref().map_or(0, |mixture| mixture.shared);
    let mlp_bias = read.flag("mlp_bias", false);
    let expert = 2 * linear(hidden, inner, mlp_bias) + linear(inner, hidden, mlp_bias);
    let gate = if mixture.is_some() { hidden * experts } else { 0 };
    let shared_expert = if shared > 0 { 3 * hidden * shared + hidden } else { 0 };
    let head_norms = match read.model_type {
        "olmoe" | "olmo2" => (heads + kv_heads) * head_dim,
        "qwen3" | "qwen3_moe" => 2 * head_dim,
        _ => 0,
    };
    let layer = 2 * hidden
        + head_norms
        + shared_expert
        + linear(hidden, heads * head_dim, qkv_bias)
        + 2 * linear(hidden, kv_heads * head_dim, qkv_bias)
        + linear(heads * head_dim, hidden, qkv_bias && !qwen)
        + experts * expert
        + gate;
    let tied = read.flag("tie_word_embeddings", read.model_type == "smollm3");
    let head = if tied { 0 } else { vocab * hidden };
    let shape = Transformer {
        kv_heads,
        head_dim,
        gated: true,
        packed_gate: read.model_type == "phi3",
        experts_per_token: mixture.as_ref().map_or(1, |mixture| mixture.chosen),
        experts: mixture.as_ref().map_or(0, |mixture| mixture.experts),
        expert_params: if mixture.is_some() { experts * expert } else { 0 },
        ..plain(
            hidden,
            read.number("num_hidden_layers")?,
            heads,
            // What every token passes is spread over its experts.
            inner + mixture.as_ref().map_or(0, |mixture| shared.div_ceil(mixture.chosen)),
            vocab,
            read.number("max_position_embeddings")?,
        )
    };
    // One tensor may have gate and up, and one queries, keys and values.
    let (gates, heads_of_one) = match read.model_type {
        "phi3" => (2, heads + 2 * kv_heads),
        _ => (1, heads),
    };
    let largest =
        (vocab * hidden).max(gates * hidden * inner.max(shared)).max(hidden * heads_of_one * head_dim);
    counted(shape, layer, vocab * hidden + hidden + head, largest)
}

/// A mixture of experts in every layer.
struct Mixture {
    experts: u64,
    chosen: u64,
    /// Width inside an expert.
    inner: u64,
    /// Width inside the expert that every token passes; 0 without one.
    shared: u64,
}

fn mixture(read: &Reader<'_>, intermediate: u64) -> Result<Option<Mixture>, ModelError> {
    let (usual, usual_chosen) = match read.model_type {
        "mixtral" => (8, 2),
        "qwen2_moe" => (60, 4),
        "olmoe" => (64, 8),
        "qwen3_moe" => (128, 8),
        _ => return Ok(None),
    };
    // Releases name it differently.
    let experts = read.or("num_experts", read.or("num_local_experts", usual)?)?;
    let inner = match read.model_type {
        "qwen2_moe" => read.or("moe_intermediate_size", 1408)?,
        "qwen3_moe" => read.or("moe_intermediate_size", 768)?,
        _ => intermediate,
    };
    let is_shared = read.model_type == "qwen2_moe";
    let shared = if is_shared { read.or("shared_expert_intermediate_size", 5632)? } else { 0 };
    Ok(Some(Mixture { experts, chosen: read.or("num_experts_per_tok", usual_chosen)?, inner, shared }))
}

fn bert(read: &Reader<'_>) -> Result<Transformer, ModelError> {
    let hidden = read.number("hidden_size")?;
    let inner = read.number("intermediate_size")?;
    let (vocab, positions) = (read.number("vocab_size")?, read.number("max_position_embeddings")?);
    let shape = Transformer {
        keeps_logits: true,
        ..plain(
            hidden,
            read.number("num_hidden_layers")?,
            read.number("num_attention_heads")?,
            inner,
            vocab,
            positions,
        )
    };
    let layer = 4 * linear(hidden, hidden, true)
        + 4 * hidden
        + linear(hidden, inner, true)
        + linear(inner, hidden, true);
    let embeddings = (vocab + positions + read.or("type_vocab_size", 2)?) * hidden + 2 * hidden;
    let pooler = linear(hidden, hidden, true);
    let prediction = linear(hidden, hidden, true) + 2 * hidden + vocab;
    let next_sentence = linear(hidden, 2, true);
    let head = match read.config["architectures"][0].as_str() {
        Some("BertForPreTraining") => pooler + prediction + next_sentence,
        Some("BertForMaskedLM") => prediction,
        Some("BertForSequenceClassification") => {
            let named = read.config["id2label"].as_object().map(|labels| labels.len() as u64);
            pooler + linear(hidden, named.map_or_else(|| read.or("num_labels", 2), Ok)?, true)
        }
        _ => pooler,
    };
    counted(shape, layer, embeddings + head, (vocab * hidden).max(linear(hidden, inner, true)))
}

fn opt(read: &Reader<'_>) -> Result<Transformer, ModelError> {
    let hidden = read.number("hidden_size")?;
    let inner = read.number("ffn_dim")?;
    let (vocab, positions) = (read.number("vocab_size")?, read.number("max_position_embeddings")?);
    let embedded = read.or("word_embed_proj_dim", hidden)?;
    let bias = read.flag("enable_bias", true);
    let norm = if read.flag("layer_norm_elementwise_affine", true) { 2 * hidden } else { 0 };
    let shape = plain(
        hidden,
        read.number("num_hidden_layers")?,
        read.number("num_attention_heads")?,
        inner,
        vocab,
        positions,
    );
    let layer = 4 * linear(hidden, hidden, bias)
        + 2 * norm
        + linear(hidden, inner, bias)
        + linear(inner, hidden, bias);
    let final_norm = read.flag("do_layer_norm_before", true) && !read.flag("_remove_final_layer_norm", false);
    let projections = if embedded == hidden { 0 } else { 2 * embedded * hidden };
    let head = if read.flag("tie_word_embeddings", true) { 0 } else { vocab * embedded };
    let outside =
        vocab * embedded + (positions + 2) * hidden + projections + if final_norm { norm } else { 0 } + head;
    counted(
        shape,
        layer,
        outside,
        (vocab * embedded).max(linear(hidden, inner, bias)).max((positions + 2) * hidden),
    )
}

fn neox(read: &Reader<'_>) -> Result<Transformer, ModelError> {
    let hidden = read.number("hidden_size")?;
    let inner = read.number("intermediate_size")?;
    let (vocab, positions) = (read.number("vocab_size")?, read.number("max_position_embeddings")?);
    // Side by side, attention and feed-forward norm one and the same sum.
    let stream_copies = if read.flag("use_parallel_residual", true) { 3 } else { 4 };
    let shape = Transformer {
        stream_copies,
        ..plain(
            hidden,
            read.number("num_hidden_layers")?,
            read.number("num_attention_heads")?,
            inner,
            vocab,
            positions,
        )
    };
    let bias = read.flag("attention_bias", true);
    let layer = 4 * hidden
        + linear(hidden, 3 * hidden, bias)
        + linear(hidden, hidden, bias)
        + linear(hidden, inner, true)
        + linear(inner, hidden, true);
    let head = if read.flag("tie_word_embeddings", false) { 0 } else { vocab * hidden };
    let largest = (vocab * hidden).max(linear(hidden, inner, true)).max(linear(hidden, 3 * hidden, bias));
    counted(shape, layer, vocab * hidden + 2 * hidden + head, largest)
}

fn bloom(read: &Reader<'_>) -> Result<Transformer, ModelError> {
    let hidden = read.either(&["hidden_size", "n_embed"])?;
    let inner = 4 * hidden;
    let vocab = read.number("vocab_size")?;
    let layers = read.either(&["n_layer", "num_hidden_layers"])?;
    let heads = read.either(&["n_head", "num_attention_heads"])?;
    let shape = plain(hidden, layers, heads, inner, vocab, read.or("seq_length", 2048)?);
    let layer = 4 * hidden
        + linear(hidden, 3 * hidden, true)
        + linear(hidden, hidden, true)
        + linear(hidden, inner, true)
        + linear(inner, hidden, true);
    let head = if read.flag("tie_word_embeddings", true) { 0 } else { vocab * hidden };
    counted(
        shape,
        layer,
        vocab * hidden + 4 * hidden + head,
        (vocab * hidden).max(linear(hidden, inner, true)),
    )
}
