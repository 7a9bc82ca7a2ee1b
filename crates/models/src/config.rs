//! `config.json`: from a Hugging Face description to ours.

use std::path::Path;

use ferrospeed_nn::{Parameters, Rotary, RotaryScaling};
use ferrospeed_tensor::Activation;
use serde_json::Value;

use crate::bert::{Bert, BertConfig};
use crate::decoder::{Decoder, DecoderConfig};
use crate::error::{ModelError, Result};
use crate::families;

/// The model types that can be built, for messages.
pub const MODEL_TYPES: [&str; 9] =
    ["gpt2", "llama", "mistral", "qwen2", "mixtral", "bert", "opt", "gpt_neox", "bloom"];

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
    /// BERT with its two pre-training heads.
    Bert(BertConfig),
}

impl ModelConfig {
    /// Reads `config.json` of a model directory.
    pub fn from_directory(directory: &Path, window: WindowRule) -> Result<ModelConfig> {
        ModelConfig::from_value(&read_json(&directory.join("config.json"))?, window)
    }

    /// From the parsed content of a `config.json`.
    pub fn from_value(value: &Value, window: WindowRule) -> Result<ModelConfig> {
        let fields = Fields::new(value)?;
        let model_type = fields.string("model_type", None)?;
        let decoder = match model_type.as_str() {
            "gpt2" => families::gpt2::config(&fields)?,
            "llama" => families::llama::llama(&fields)?,
            "mistral" => families::llama::mistral(&fields, window)?,
            "qwen2" => families::llama::qwen2(&fields, window)?,
            "mixtral" => families::llama::mixtral(&fields, window)?,
            "opt" => families::opt::config(&fields)?,
            "gpt_neox" => families::gpt_neox::config(&fields)?,
            "bloom" => families::bloom::config(&fields)?,
            "bert" => return Ok(ModelConfig::Bert(BertConfig::from_fields(&fields)?)),
            other => {
                let known = MODEL_TYPES.join(", ");
                return Err(ModelError::config(
                    "model_type",
                    format!("'{other}' is not supported; one of {known} is"),
                ));
            }
        };
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

pub(crate) fn read_json(path: &Path) -> Result<Value> {
    let text = std::fs::read_to_string(path).map_err(ModelError::io(path))?;
    serde_json::from_str(&text).map_err(|error| ModelError::file(path, error))
}

/// Typed access to a JSON object; null counts as absent.
pub struct Fields<'a>(&'a serde_json::Map<String, Value>);

impl<'a> Fields<'a> {
    pub(crate) fn new(value: &'a Value) -> Result<Self> {
        value.as_object().map(Fields).ok_or_else(|| ModelError::config("(root)", "must be a JSON object"))
    }

    fn get(&self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    fn read<T>(
        &self,
        key: &str,
        kind: &str,
        default: Option<T>,
        f: impl Fn(&Value) -> Option<T>,
    ) -> Result<T> {
        match (self.get(key), default) {
            (Some(value), _) => {
                f(value).ok_or_else(|| ModelError::config(key, format!("{value} is not {kind}")))
            }
            (None, Some(default)) => Ok(default),
            (None, None) => Err(ModelError::config(key, format!("is missing; it must be {kind}"))),
        }
    }

    /// A whole number.
    pub fn size(&self, key: &str, default: Option<usize>) -> Result<usize> {
        self.read(key, "a whole number", default, |value| {
            value.as_u64().and_then(|n| usize::try_from(n).ok())
        })
    }

    /// A whole number, if present.
    pub fn optional_size(&self, key: &str) -> Result<Option<usize>> {
        self.get(key).map(|_| self.size(key, None)).transpose()
    }

    /// A number.
    pub fn number(&self, key: &str, default: Option<f64>) -> Result<f64> {
        self.read(key, "a number", default, Value::as_f64)
    }

    /// A truth value.
    pub fn flag(&self, key: &str, default: bool) -> Result<bool> {
        self.read(key, "true or false", Some(default), Value::as_bool)
    }

    /// A text.
    pub fn string(&self, key: &str, default: Option<&str>) -> Result<String> {
        self.read(key, "a text", default.map(str::to_owned), |value| value.as_str().map(str::to_owned))
    }

    /// A nested object, if present.
    pub fn object(&self, key: &str) -> Result<Option<Fields<'a>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let map =
            value.as_object().ok_or_else(|| ModelError::config(key, format!("{value} is not an object")))?;
        Ok(Some(Fields(map)))
    }

    /// The first of two keys that is present: families rename things.
    pub fn size_either(&self, key: &str, other: &str) -> Result<usize> {
        if self.get(key).is_some() { self.size(key, None) } else { self.size(other, None) }
    }

    /// An activation by its Hugging Face name.
    pub fn activation(&self, key: &str, default: &str) -> Result<Activation> {
        let name = self.string(key, Some(default))?;
        Ok(match name.as_str() {
            "gelu" => Activation::GeluErf,
            "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => Activation::GeluTanh,
            "quick_gelu" => Activation::QuickGelu,
            "silu" | "swish" => Activation::Silu,
            "relu" => Activation::Relu,
            "tanh" => Activation::Tanh,
            _ => {
                return Err(ModelError::config(
                    key,
                    format!(
                        "'{name}' is not a known activation; use gelu, gelu_new, gelu_pytorch_tanh, gelu_fast, quick_gelu, silu, swish, relu or tanh"
                    ),
                ));
            }
        })
    }

    /// Rotary embedding over `dims` channels.
    pub fn rotary(&self, dims: usize, theta_key: &str, theta: f64) -> Result<Rotary> {
        let scaling = match self.object("rope_scaling")? {
            None => RotaryScaling::None,
            Some(scaling) => self.rotary_scaling(&scaling)?,
        };
        if dims == 0 || !dims.is_multiple_of(2) {
            return Err(ModelError::config("rope", format!("{dims} rotary channels cannot be paired")));
        }
        Ok(Rotary { dims, theta: self.number(theta_key, Some(theta))?, scaling, interleaved: false })
    }

    fn rotary_scaling(&self, scaling: &Fields<'_>) -> Result<RotaryScaling> {
        let kind = if scaling.get("rope_type").is_some() { "rope_type" } else { "type" };
        let name = scaling.string(kind, None)?;
        let factor = || scaling.number("factor", None);
        Ok(match name.as_str() {
            "default" => RotaryScaling::None,
            "linear" => RotaryScaling::Linear { factor: factor()? },
            "dynamic" => RotaryScaling::Dynamic {
                factor: factor()?,
                trained: self.size("max_position_embeddings", None)?,
            },
            "llama3" => RotaryScaling::Llama3 {
                factor: factor()?,
                low: scaling.number("low_freq_factor", None)?,
                high: scaling.number("high_freq_factor", None)?,
                trained: scaling.size("original_max_position_embeddings", None)?,
            },
            other => {
                let why = format!("'{other}' is not supported; use default, linear, dynamic or llama3");
                return Err(ModelError::config(format!("rope_scaling.{kind}"), why));
            }
        })
    }
}
