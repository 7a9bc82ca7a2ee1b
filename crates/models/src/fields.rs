//! Typed access to the object in a `config.json` that remembers what was asked for.
//!
//! A field that nobody asked for and that is not known to be harmless would change what the reference implementation
//! computes and leave what we compute as it is. So `Fields::finish` refuses it by name. Null counts as absent.

use std::cell::RefCell;
use std::collections::BTreeSet;

use ferrospeed_tensor::Activation;
use serde_json::{Map, Value};

use crate::error::{ModelError, Result};
use crate::limits::{MAX_LAYERS, MAX_SIZE, PER_LAYER_KEYS};

/// Fields of any family that change no number a model computes: where it came from, how a tokenizer numbers its special
/// tokens, defaults for generating text, what the reference implementation returns besides, how it runs.
pub(crate) const HARMLESS: &[&str] = &[
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_from_model_config",
    "_name_or_path",
    "_num_labels",
    "architectures",
    "attn_implementation",
    // Programs that are run only where somebody trusts them, and pipelines of such.
    "auto_map",
    "custom_pipelines",
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "chunk_size_feed_forward",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "eos_token_id",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "id2label",
    "is_decoder",
    "keys_to_ignore_at_inference",
    "label2id",
    "length_penalty",
    "max_length",
    "max_sequence_length",
    "min_length",
    "model_type",
    // What a trainer added to embeddings.
    "neftune_noise_alpha",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_past",
    "output_scores",
    "pad_token_id",
    "prefix",
    // How the weights were cut while they were trained: the products are the same.
    "pretraining_tp",
    "pretraining_pp",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
    "use_return_dict",
    "cls_token_id",
    "mask_token_id",
];

/// Typed access to a JSON object.
#[derive(Debug)]
pub struct Fields<'a> {
    /// Where the object stands, for messages: nothing, or its path with a dot behind.
    place: String,
    map: &'a Map<String, Value>,
    known: RefCell<BTreeSet<String>>,
}

impl<'a> Fields<'a> {
    pub(crate) fn new(value: &'a Value) -> Result<Self> {
        let map = value.as_object().ok_or_else(|| ModelError::config("(root)", "must be a JSON object"))?;
        Ok(Fields::at(String::new(), map))
    }

    fn at(place: String, map: &'a Map<String, Value>) -> Self {
        Fields { place, map, known: RefCell::default() }
    }

    /// Refuses whatever nobody asked for, all of it in one error.
    pub(crate) fn finish(&self) -> Result<()> {
        let known = self.known.borrow();
        let ignored = |key: &str| self.place.is_empty() && HARMLESS.contains(&key);
        let unknown: Vec<String> = self
            .map
            .iter()
            .filter(|(key, value)| !value.is_null() && !known.contains(*key) && !ignored(key))
            .map(|(key, value)| format!("{} = {}", self.name(key), shortened(value)))
            .collect();
        if unknown.is_empty() { Ok(()) } else { Err(ModelError::UnknownFields { fields: unknown }) }
    }

    /// Fields that this family's reference implementation does not read either, or that change no number.
    pub(crate) fn harmless(&self, keys: &[&str]) {
        self.known.borrow_mut().extend(keys.iter().map(|key| (*key).to_owned()));
    }

    /// A field of which one value is implemented; absent means that value.
    pub(crate) fn fixed(&self, key: &str, implemented: Value) -> Result<()> {
        let same = |found: &Value| match (found.as_f64(), implemented.as_f64()) {
            (Some(found), Some(implemented)) => found == implemented,
            _ => *found == implemented,
        };
        match self.get(key) {
            Some(found) if !same(found) => {
                Err(self.error(key, format!("{found} is not supported; only {implemented} is")))
            }
            _ => Ok(()),
        }
    }

    /// An error about a field.
    pub(crate) fn error(&self, key: &str, why: impl Into<String>) -> ModelError {
        ModelError::config(self.name(key), why)
    }

    fn name(&self, key: &str) -> String {
        format!("{}{key}", self.place)
    }

    /// The keys that are not null.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.map.iter().filter(|(_, value)| !value.is_null()).map(|(key, _)| key.as_str())
    }

    pub(crate) fn has(&self, key: &str) -> bool {
        self.get(key).is_some()
    }

    /// Whether the key stands there, null or not.
    pub(crate) fn is_said(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        self.known.borrow_mut().insert(key.to_owned());
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn read<T>(
        &self,
        key: &str,
        kind: &str,
        default: Option<T>,
        f: impl Fn(&Value) -> Option<T>,
    ) -> Result<T> {
        match (self.get(key), default) {
            (Some(value), _) => f(value).ok_or_else(|| self.error(key, format!("{value} is not {kind}"))),
            (None, Some(default)) => Ok(default),
            (None, None) => Err(self.error(key, format!("is missing; it must be {kind}"))),
        }
    }

    /// A whole number.
    pub fn size(&self, key: &str, default: Option<usize>) -> Result<usize> {
        let most = if PER_LAYER_KEYS.contains(&key) { MAX_LAYERS } else { MAX_SIZE };
        // 1e18 is no whole number to a JSON reader, but too many to us.
        if let Some(size) = self.get(key).filter(|size| size.as_f64().is_some_and(|size| size > most as f64))
        {
            return Err(self.error(key, format!("{size} makes no model: at most {most} can be asked for")));
        }
        self.read(key, "a whole number", default, |value| {
            value.as_u64().and_then(|n| usize::try_from(n).ok())
        })
    }

    /// A whole number, if present.
    pub fn optional_size(&self, key: &str) -> Result<Option<usize>> {
        self.get(key).map(|_| self.size(key, None)).transpose()
    }

    /// A whole number or null, where an absent field means something else than null.
    pub fn size_or_null(&self, key: &str, absent: Option<usize>) -> Result<Option<usize>> {
        if self.map.contains_key(key) { self.optional_size(key) } else { Ok(absent) }
    }

    /// The row of a table of `entries` that stands for padding, `absent` where nothing is said. As in the reference
    /// implementation a number below zero counts from the end; of what lies outside there is no row.
    pub(crate) fn padding_row(&self, entries: usize, absent: Option<usize>) -> Result<Option<usize>> {
        let row = match self.get("pad_token_id") {
            Some(value) => {
                let id = value.as_i64();
                let id =
                    id.ok_or_else(|| self.error("pad_token_id", format!("{value} is not a token id")))?;
                if id < 0 { usize::try_from(entries as i64 + id).ok() } else { usize::try_from(id).ok() }
            }
            None if self.map.contains_key("pad_token_id") => None,
            None => absent,
        };
        Ok(row.filter(|&row| row < entries))
    }

    /// A number.
    pub fn number(&self, key: &str, default: Option<f64>) -> Result<f64> {
        self.read(key, "a number", default, Value::as_f64)
    }

    /// What a norm adds before it takes a root: from 0 to 1.
    pub fn epsilon(&self, key: &str, default: f64) -> Result<f32> {
        let within = |value: &Value| value.as_f64().filter(|epsilon| (0.0..=1.0).contains(epsilon));
        Ok(self.read(key, "a number from 0 to 1", Some(default), within)? as f32)
    }

    /// The share of values that dropout takes away: from 0, and below 1.
    pub fn dropout(&self, key: &str, default: f64) -> Result<f32> {
        let share = |value: &Value| value.as_f64().map(|share| share as f32);
        let within = |value: &Value| share(value).filter(|share| (0.0..1.0).contains(share));
        self.read(key, "a share of values to drop, from 0 and below 1", Some(default as f32), within)
    }

    /// A number, if present.
    pub fn optional_number(&self, key: &str) -> Result<Option<f64>> {
        self.get(key).map(|_| self.number(key, None)).transpose()
    }

    /// A truth value.
    pub fn flag(&self, key: &str, default: bool) -> Result<bool> {
        self.read(key, "true or false", Some(default), Value::as_bool)
    }

    /// A text.
    pub fn string(&self, key: &str, default: Option<&str>) -> Result<String> {
        self.read(key, "a text", default.map(str::to_owned), |value| value.as_str().map(str::to_owned))
    }

    /// A list of texts, if present.
    pub fn optional_strings(&self, key: &str) -> Result<Option<Vec<String>>> {
        let texts = |value: &Value| {
            let items = value.as_array()?.iter();
            items.map(|item| item.as_str().map(str::to_owned)).collect::<Option<Vec<_>>>()
        };
        self.get(key).map(|_| self.read(key, "a list of texts", None, texts)).transpose()
    }

    /// A list of numbers.
    pub fn numbers(&self, key: &str) -> Result<Vec<f64>> {
        let numbers = |value: &Value| value.as_array()?.iter().map(Value::as_f64).collect();
        self.read(key, "a list of numbers", None, numbers)
    }

    /// A nested object, if present. Whoever asks for it finishes it.
    pub fn object(&self, key: &str) -> Result<Option<Fields<'a>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let map = value.as_object().ok_or_else(|| self.error(key, format!("{value} is not an object")))?;
        Ok(Some(Fields::at(format!("{}.", self.name(key)), map)))
    }

    /// The first of two keys that is present: families rename things. Both may stand there if they agree.
    pub fn size_either(&self, key: &str, other: &str) -> Result<usize> {
        match (self.optional_size(key)?, self.optional_size(other)?) {
            (Some(one), Some(two)) if one != two => {
                Err(self.error(key, format!("{one} contradicts {other}: {two}, which means the same")))
            }
            (Some(size), _) | (None, Some(size)) => Ok(size),
            (None, None) => self.size(key, None),
        }
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
                let why = format!(
                    "'{name}' is not a known activation; use gelu, gelu_new, gelu_pytorch_tanh, gelu_fast, quick_gelu, \
                     silu, swish, relu or tanh"
                );
                return Err(self.error(key, why));
            }
        })
    }
}

/// A value in at most a line of a message.
fn shortened(value: &Value) -> String {
    const MAX_CHARS: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
