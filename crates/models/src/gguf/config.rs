//! From a GGUF file's metadata to the `config.json` that Hugging Face would have.
//!
//! A key of the architecture that nobody here asks for may change what the model computes: it is refused by name.

use serde_json::{Map, Value as Json, json};

use super::header::Header;
use super::metadata::Metadata;
use crate::error::{ModelError, Result};

/// An architecture that is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Architecture {
    /// Also Mistral and the like: they differ in nothing that the file says.
    Llama,
    /// LLaMA's with experts: the same name in files.
    Mixtral,
    Qwen2,
    Qwen3,
    Qwen2Moe,
    Olmoe,
    Qwen3Moe,
}

impl Architecture {
    fn of(metadata: &Metadata<'_>) -> Result<(Architecture, String)> {
        let key = "general.architecture";
        let name = metadata.needed(key, metadata.text(key)?)?;
        let experts = metadata.size(&format!("{name}.expert_count"))?.unwrap_or(0);
        let architecture = match (name, experts) {
            ("llama", 0) => Architecture::Llama,
            ("llama", _) => Architecture::Mixtral,
            ("qwen2", _) => Architecture::Qwen2,
            ("qwen3", _) => Architecture::Qwen3,
            ("qwen2moe", _) => Architecture::Qwen2Moe,
            ("olmoe", _) => Architecture::Olmoe,
            ("qwen3moe", _) => Architecture::Qwen3Moe,
            (other, _) => {
                let why = format!("is '{other}'; llama, qwen2, qwen3, qwen2moe, olmoe and qwen3moe are read");
                return Err(metadata.error(key, why));
            }
        };
        Ok((architecture, name.to_owned()))
    }

    fn model_type(self) -> &'static str {
        match self {
            Architecture::Llama => "llama",
            Architecture::Mixtral => "mixtral",
            Architecture::Qwen2 => "qwen2",
            Architecture::Qwen3 => "qwen3",
            Architecture::Qwen2Moe => "qwen2_moe",
            Architecture::Olmoe => "olmoe",
            Architecture::Qwen3Moe => "qwen3_moe",
        }
    }

    fn class(self) -> &'static str {
        match self {
            Architecture::Llama => "LlamaForCausalLM",
            Architecture::Mixtral => "MixtralForCausalLM",
            Architecture::Qwen2 => "Qwen2ForCausalLM",
            Architecture::Qwen3 => "Qwen3ForCausalLM",
            Architecture::Qwen2Moe => "Qwen2MoeForCausalLM",
            Architecture::Olmoe => "OlmoeForCausalLM",
            Architecture::Qwen3Moe => "Qwen3MoeForCausalLM",
        }
    }

    /// Whether files hold queries and keys with the channels of a rotation side by side.
    pub(super) fn pairs_together(self) -> bool {
        matches!(self, Architecture::Llama | Architecture::Mixtral)
    }
}

/// What the tensors must know besides.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) architecture: Architecture,
    pub(super) head_dim: usize,
    pub(super) experts: usize,
}

/// Keys of an architecture that change nothing that is computed here.
const HARMLESS: [&str; 3] = ["vocab_size", "tensor_data_layout", "rope.scaling.finetuned"];

/// The file's `config.json`, and what its tensors must know. `rope_factors` is the tensor of that name.
pub(super) fn config(
    metadata: &Metadata<'_>,
    header: &Header,
    rope_factors: Option<&[f32]>,
) -> Result<(Json, Shape)> {
    let (architecture, prefix) = Architecture::of(metadata)?;
    let mut keys = Keys { metadata, prefix, asked: Vec::new() };
    let (width, heads) = (keys.needed_size("embedding_length")?, keys.needed_size("attention.head_count")?);
    let head_dim = match keys.size("attention.key_length")? {
        Some(head_dim) => head_dim,
        None if heads > 0 && width % heads == 0 => width / heads,
        None => return Err(keys.error("attention.head_count", format!("is {heads}, of {width} channels"))),
    };
    for key in ["attention.value_length", "rope.dimension_count"] {
        if let Some(found) = keys.size(key)?.filter(|found| *found != head_dim) {
            return Err(keys.error(key, format!("is {found}; only the {head_dim} of a head are supported")));
        }
    }
    let has = |name: &str| header.tensors.contains_key(name);
    let vocabulary = header.tensors.get("token_embd.weight").and_then(|entry| entry.shape.first());
    let vocabulary =
        vocabulary.ok_or_else(|| ModelError::file(metadata.path, "has no tensor 'token_embd.weight'"))?;
    let mut config = Map::new();
    let mut set = |key: &str, value: Json| config.insert(key.to_owned(), value);
    set("architectures", json!([architecture.class()]));
    set("model_type", architecture.model_type().into());
    set("vocab_size", (*vocabulary).into());
    set("hidden_size", width.into());
    set("num_attention_heads", heads.into());
    set("num_key_value_heads", keys.size("attention.head_count_kv")?.unwrap_or(heads).into());
    set("num_hidden_layers", keys.needed_size("block_count")?.into());
    set("rms_norm_eps", rounded(keys.needed_number("attention.layer_norm_rms_epsilon")?));
    let context = keys.needed_size("context_length")?;
    set("max_position_embeddings", context.into());
    set("rope_theta", rounded(keys.number("rope.freq_base")?.unwrap_or(10_000.0)));
    set("hidden_act", "silu".into());
    set("tie_word_embeddings", (!has("output.weight")).into());
    let says_head_dim = [Architecture::Qwen3, Architecture::Qwen3Moe].contains(&architecture);
    if head_dim.checked_mul(heads) != Some(width) || says_head_dim {
        set("head_dim", head_dim.into());
    }
    if architecture == Architecture::Llama {
        set("attention_bias", has("blk.0.attn_q.bias").into());
        set("mlp_bias", has("blk.0.ffn_down.bias").into());
    }
    let inner = keys.size("feed_forward_length")?;
    let experts = feed_forward(architecture, &mut keys, inner, &mut set)?;
    if let Some(scaling) = rope_scaling(&mut keys, head_dim, rope_factors)? {
        set("rope_scaling", scaling);
    }
    for (key, name) in [("bos_token_id", "bos"), ("pad_token_id", "padding")] {
        if let Some(id) = metadata.size(&format!("tokenizer.ggml.{name}_token_id"))? {
            set(key, id.into());
        }
    }
    set("eos_token_id", json!(end_tokens(metadata)?));
    keys.finish()?;
    let size = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
    Ok((Json::Object(config), Shape { architecture, head_dim: size(head_dim), experts: size(experts) }))
}

/// The tokens that end a text: that of the model, and that of a turn in a talk.
fn end_tokens(metadata: &Metadata<'_>) -> Result<Vec<u64>> {
    let mut ends = Vec::new();
    for name in ["eos", "eot"] {
        let id = metadata.size(&format!("tokenizer.ggml.{name}_token_id"))?;
        ends.extend(id.filter(|id| !ends.contains(id)));
    }
    Ok(ends)
}

/// How many experts there are.
fn feed_forward(
    architecture: Architecture,
    keys: &mut Keys<'_>,
    inner: Option<u64>,
    set: &mut impl FnMut(&str, Json) -> Option<Json>,
) -> Result<u64> {
    if let Some(inner) = inner {
        set("intermediate_size", inner.into());
    }
    if matches!(architecture, Architecture::Llama | Architecture::Qwen2 | Architecture::Qwen3) {
        // Files of LLaMA say that it has none.
        keys.size("expert_count")?;
        keys.size("expert_used_count")?;
        return Ok(0);
    }
    let (experts, chosen) = (keys.needed_size("expert_count")?, keys.needed_size("expert_used_count")?);
    let count = if architecture == Architecture::Mixtral { "num_local_experts" } else { "num_experts" };
    set(count, experts.into());
    set("num_experts_per_tok", chosen.into());
    let own = keys.size("expert_feed_forward_length")?;
    match architecture {
        Architecture::Qwen2Moe => {
            set("moe_intermediate_size", own.into());
            set("shared_expert_intermediate_size", keys.size("expert_shared_feed_forward_length")?.into());
        }
        Architecture::Qwen3Moe => {
            set("moe_intermediate_size", own.into());
            set("norm_topk_prob", true.into());
        }
        _ => {}
    }
    Ok(experts)
}

fn rope_scaling(keys: &mut Keys<'_>, head_dim: u64, factors: Option<&[f32]>) -> Result<Option<Json>> {
    let kind = keys.text("rope.scaling.type")?.unwrap_or("none");
    let factor = keys.number("rope.scaling.factor")?;
    let trained = keys.size("rope.scaling.original_context_length")?;
    let theta = keys.number("rope.freq_base")?.unwrap_or(10_000.0);
    match (kind, factors) {
        ("none", None) => Ok(None),
        ("none", Some(factors)) => match llama3(factors, head_dim, theta) {
            Some(scaling) => Ok(Some(scaling)),
            None => Err(ModelError::file(
                keys.metadata.path,
                "'rope_freqs.weight' holds other factors than LLaMA 3's, which are not supported",
            )),
        },
        ("linear", None) => {
            let factor = keys.metadata.needed("rope.scaling.factor", factor)?;
            Ok(Some(json!({"rope_type": "linear", "factor": rounded(factor)})))
        }
        ("yarn", None) => {
            let factor = keys.metadata.needed("rope.scaling.factor", factor)?;
            Ok(Some(json!({
                "rope_type": "yarn", "factor": rounded(factor), "original_max_position_embeddings": trained,
            })))
        }
        (other, _) => {
            Err(keys.error("rope.scaling.type", format!("is '{other}'; none, linear and yarn are read")))
        }
    }
}

/// LLaMA 3's scaling, where these are its factors: files hold what each frequency is divided by, and not what it followed from.
fn llama3(factors: &[f32], head_dim: u64, theta: f64) -> Option<Json> {
    const LOW: f64 = 1.0;
    const HIGH: f64 = 4.0;
    const TRAINED: f64 = 8192.0;
    let factor = factors.iter().copied().fold(1.0f32, f32::max);
    let expected = |place: usize| {
        let wave = 2.0 * std::f64::consts::PI * theta.powf(2.0 * place as f64 / head_dim as f64);
        let smooth = ((TRAINED / wave - LOW) / (HIGH - LOW)).clamp(0.0, 1.0);
        1.0 / ((1.0 - smooth) / f64::from(factor) + smooth)
    };
    let close = |place: usize, found: f32| (f64::from(found) / expected(place) - 1.0).abs() < 1e-3;
    let all = factors.len() as u64 == head_dim / 2
        && factors.iter().enumerate().all(|(place, &found)| close(place, found));
    all.then(|| {
        json!({
            "rope_type": "llama3", "factor": factor, "low_freq_factor": LOW, "high_freq_factor": HIGH,
            "original_max_position_embeddings": TRAINED as u64,
        })
    })
}

/// An f32 as it was written down: 1e-5 and not 9.999999747378752e-6.
fn rounded(value: f64) -> Json {
    let narrow = value as f32;
    match f64::from(narrow) == value {
        true => narrow.to_string().parse::<f64>().map_or(Json::Null, Json::from),
        false => value.into(),
    }
}

/// The architecture's keys, and which of them somebody asked for.
struct Keys<'a> {
    metadata: &'a Metadata<'a>,
    prefix: String,
    asked: Vec<String>,
}

impl<'a> Keys<'a> {
    fn key(&mut self, key: &str) -> String {
        let key = format!("{}.{key}", self.prefix);
        self.asked.push(key.clone());
        key
    }

    fn error(&self, key: &str, why: impl std::fmt::Display) -> ModelError {
        self.metadata.error(&format!("{}.{key}", self.prefix), why)
    }

    fn size(&mut self, key: &str) -> Result<Option<u64>> {
        let key = self.key(key);
        self.metadata.size(&key)
    }

    fn needed_size(&mut self, key: &str) -> Result<u64> {
        let key = self.key(key);
        self.metadata.needed(&key, self.metadata.size(&key)?)
    }

    fn number(&mut self, key: &str) -> Result<Option<f64>> {
        let key = self.key(key);
        self.metadata.number(&key)
    }

    fn needed_number(&mut self, key: &str) -> Result<f64> {
        let key = self.key(key);
        self.metadata.needed(&key, self.metadata.number(&key)?)
    }

    fn text(&mut self, key: &str) -> Result<Option<&'a str>> {
        let key = self.key(key);
        self.metadata.text(&key)
    }

    fn finish(&self) -> Result<()> {
        let unknown = |key: &&String| {
            let own = key.strip_prefix(&self.prefix).and_then(|rest| rest.strip_prefix('.'));
            own.is_some_and(|own| !HARMLESS.contains(&own) && !self.asked.contains(key))
        };
        let unknown: Vec<&str> = self.metadata.values.keys().filter(unknown).map(String::as_str).collect();
        if unknown.is_empty() {
            return Ok(());
        }
        let why = format!(
            "says what is not known of its architecture: {}. The model may compute something else because of it",
            unknown.join(", ")
        );
        Err(ModelError::file(self.metadata.path, why))
    }
}
