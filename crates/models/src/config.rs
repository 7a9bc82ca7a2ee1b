//! `config.json`: from a Hugging Face description to ours.

use std::path::{Path, PathBuf};

use ferrospeed_nn::Parameters;
use serde_json::Value;

use crate::adapter::ADAPTER_CONFIG;
use crate::bert::{Bert, BertConfig};
use crate::decoder::{Decoder, DecoderConfig};
use crate::error::{ModelError, Result};
use crate::families;
use crate::fields::Fields;
use crate::gguf;
use crate::json;

/// The model types that can be built, for messages.
pub const MODEL_TYPES: [&str; 49] = [
    "gpt2",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "smollm3",
    "olmo2",
    "mixtral",
    "qwen2_moe",
    "olmoe",
    "qwen3_moe",
    "bert",
    "opt",
    "gpt_neox",
    "bloom",
    "gemma",
    "gemma2",
    "gemma3_text",
    "granite",
    "olmo",
    "olmo3",
    "cohere",
    "cohere2",
    "glm",
    "glm4",
    "ernie4_5",
    "helium",
    "ministral",
    "ministral3",
    "stablelm",
    "starcoder2",
    "seed_oss",
    "exaone4",
    "internlm3",
    "cwm",
    "phi",
    "falcon",
    "mpt",
    "gpt_neo",
    "gptj",
    "gpt_bigcode",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
];

/// How many tokens a sliding window of `w` shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WindowRule {
    /// The last `w`, the token itself included: what the models' papers say and current releases do.
    #[default]
    LastTokens,
    /// `w + 1`: what transformers up to 4.40 computed.
    OneMore,
}

/// A model that can be built.
#[derive(Debug, Clone)]
pub enum ModelConfig {
    /// Any decoder.
    Decoder(Box<DecoderConfig>),
    /// BERT, with or without heads.
    Bert(BertConfig),
}

impl ModelConfig {
    /// Reads `config.json` of a model directory.
    pub fn from_directory(directory: &Path, window: WindowRule) -> Result<ModelConfig> {
        ModelConfig::from_value(&read_config(directory)?, window)
    }

    /// From the parsed content of a `config.json`.
    pub fn from_value(value: &Value, window: WindowRule) -> Result<ModelConfig> {
        let value = &families::with_usual_rotary(value);
        let fields = Fields::new(value)?;
        let model_type = fields.string("model_type", None)?;
        fields.fixed("is_encoder_decoder", false.into())?;
        fields.fixed("add_cross_attention", false.into())?;
        fields.fixed("pruned_heads", serde_json::json!({}))?;
        // What nanotron's converter writes.
        fields.fixed("is_llama_config", true.into())?;
        fields.fixed("rope_interleaved", false.into())?;
        if model_type == "bert" {
            let config = BertConfig::from_fields(&fields)?;
            fields.finish()?;
            return Ok(ModelConfig::Bert(config));
        }
        let Some(decoder) = families::decoder(&model_type, &fields, window)? else {
            return Err(ModelError::config("model_type", unknown(&model_type, &fields)));
        };
        fields.finish()?;
        decoder.validate()?;
        Ok(ModelConfig::Decoder(Box::new(decoder)))
    }

    /// The handles of the model's parameters, in order, without values.
    pub fn parameters(&self) -> Parameters {
        match self {
            ModelConfig::Decoder(config) => Decoder::new((**config).clone()).parameters().clone(),
            ModelConfig::Bert(config) => Bert::new(config.clone()).parameters().clone(),
        }
    }
}

/// Why a model type is refused.
fn unknown(model_type: &str, fields: &Fields<'_>) -> String {
    let tower = ["vision_config", "audio_config"].into_iter().find(|key| fields.has(key));
    let known = MODEL_TYPES.join(", ");
    let Some(tower) = tower else { return format!("'{model_type}' is not supported; one of {known} is") };
    let of_text = fields.get("text_config").and_then(|text| text["model_type"].as_str());
    let instead = match of_text.filter(|of_text| MODEL_TYPES.contains(of_text)) {
        Some(of_text) => format!(
            "; its text tower is a '{of_text}', which is: write that tower alone to a directory of its own, with text_config as its config.json"
        ),
        None => String::new(),
    };
    format!("'{model_type}' reads more than text ({tower}), which is not supported{instead}")
}

/// The index of a model of a million tensors has a tenth of it.
const MAX_JSON_BYTES: u64 = 1 << 30;
const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// How families call the shares that they drop while they train.
const DROPOUT_KEYS: [&str; 6] =
    ["embd_pdrop", "attn_pdrop", "resid_pdrop", "attention_dropout", "hidden_dropout", "dropout"];

/// A configuration that drops this share wherever its family drops anything. What its family does not know stays away.
pub fn with_dropout(config: Value, share: f64) -> Value {
    DROPOUT_KEYS.iter().fold(config, |config, key| {
        let mut changed = config.clone();
        if let Some(fields) = changed.as_object_mut() {
            fields.insert((*key).to_owned(), share.into());
        }
        if ModelConfig::from_value(&changed, WindowRule::default()).is_ok() { changed } else { config }
    })
}

/// The configuration of a model: the `config.json` of its directory, such a file itself, or what a GGUF file tells of it. Where
/// it is none of them, says what it may be instead.
pub fn read_config(path: &Path) -> Result<Value> {
    if gguf::is_gguf(path) {
        return Ok(gguf::open(path)?.config);
    }
    let file = config_file(path);
    if path.is_dir() && !file.exists() && !file.is_symlink() {
        return Err(ModelError::file(path, format!("is no model: it has no config.json{}", instead(path))));
    }
    let text = ferrospeed_files::read(&file, MAX_CONFIG_BYTES).map_err(ModelError::io(&file))?;
    json::parse(&text).map_err(|error| {
        let wanted = "a model is a Hugging Face directory with a config.json, or a GGUF file";
        ModelError::file(&file, format!("is no config.json ({error}); {wanted}"))
    })
}

/// The file that [`read_config`] reads.
pub fn config_file(path: &Path) -> PathBuf {
    if path.is_dir() { path.join("config.json") } else { path.to_path_buf() }
}

fn instead(directory: &Path) -> String {
    let (of_run, has) = (directory.join("model"), |name: &str| directory.join(name).exists());
    if of_run.join("config.json").is_file() || of_run.join(ADAPTER_CONFIG).is_file() {
        return format!("; it is the folder of a run, whose model is {}", of_run.display());
    }
    if has(ADAPTER_CONFIG) {
        return "; it holds an adapter of another model: `generate`, `chat` and `serve` take it as it is, `ferrospeed model merge` \
                makes a model of both, and a recipe trains it further as adapter.path, with the model as model.path"
            .to_owned();
    }
    match has("manifest.json") || has("latest") || has("checkpoints") {
        true => "; it holds checkpoints, of which `ferrospeed checkpoint export-hf` makes a model".to_owned(),
        false => String::new(),
    }
}

pub(crate) fn read_json(path: &Path) -> Result<Value> {
    let text = ferrospeed_files::read(path, MAX_JSON_BYTES).map_err(ModelError::io(path))?;
    json::parse(&text).map_err(|error| ModelError::file(path, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_family_drops_by_its_own_keys() {
        let sizes = serde_json::json!({
            "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 50,
        });
        let of = |model_type: &str| {
            let mut config = sizes.clone();
            config["model_type"] = model_type.into();
            let changed = with_dropout(config.clone(), 0.25);
            assert!(ModelConfig::from_value(&changed, WindowRule::default()).is_ok(), "{model_type}");
            let keys = changed.as_object().into_iter().flatten().map(|(key, _)| key.clone());
            keys.filter(|key| config.get(key).is_none()).collect::<Vec<_>>()
        };
        assert_eq!(of("llama"), ["attention_dropout"]);
        assert_eq!(of("gpt_neox"), ["attention_dropout", "hidden_dropout"]);
        // What cannot be read is left as it is, for who reads it to tell.
        let unknown = serde_json::json!({ "model_type": "unheard of" });
        assert_eq!(with_dropout(unknown.clone(), 0.25), unknown);
        assert_eq!(with_dropout(serde_json::json!(3), 0.25), 3);
    }
}
