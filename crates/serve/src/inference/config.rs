//! An inference configuration, checked: every field of DeepSpeed's, with its aliases and deprecated names.
//!
//! Stricter than DeepSpeed where its leniency is a trap: lengths are positive and in order, `moe: true` means what it says.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::checkpoint::WRITTEN;
use super::fields::{FIELDS, read};
use super::{InferenceError, Result};

/// The type that weights are held and multiplied in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InferenceDtype {
    /// 16 bits, 5 of them exponent.
    Fp16,
    /// 32 bits.
    Fp32,
    /// 16 bits, 8 of them exponent.
    Bf16,
    /// Weights of 8 bits.
    Int8,
}

/// A configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct InferenceConfig {
    values: Map<String, Value>,
    given: Vec<&'static str>,
    warnings: Vec<String>,
}

impl InferenceConfig {
    /// Checks settings.
    pub fn new(given: &Map<String, Value>) -> Result<InferenceConfig> {
        let (mut values, named) = read(FIELDS, given, &[])?;
        let mut warnings = Vec::new();
        for field in FIELDS.iter().filter(|field| named.contains(&field.name)) {
            if field.name == "replace_method" {
                warnings.push(
                    "Config parameter replace_method is deprecated. This parameter is no longer needed, please remove \
                     from your call to DeepSpeed-inference"
                        .to_owned(),
                );
            }
            let Some([section, leaf]) = field.replaced_by else { continue };
            let new = format!("{section}.{leaf}");
            warnings.push(format!("Config parameter {} is deprecated use {new} instead", field.name));
            if says(given, section, leaf) {
                return Err(InferenceError::Replaced { old: field.name.to_owned(), new });
            }
            if let Some(value) = values.shift_remove(field.name) {
                values[section][leaf] = value;
            }
        }
        let config = InferenceConfig { values, given: named, warnings };
        config.check_lengths()?;
        config.check_files()?;
        Ok(config)
    }

    fn check_lengths(&self) -> Result<()> {
        let wrong = |key: &str, why: String| Err(InferenceError::Setting { path: vec![key.to_owned()], why });
        let [least, most] =
            ["min_out_tokens", "max_out_tokens"].map(|key| self.values[key].as_i64().unwrap_or(0));
        for (key, value) in [("min_out_tokens", least), ("max_out_tokens", most)] {
            if value < 1 {
                return wrong(key, format!("{value} is no number of tokens; give 1 or more"));
            }
        }
        // A default is no wish.
        if least > most && self.given.contains(&"min_out_tokens") {
            return wrong("min_out_tokens", format!("{least} is more than max_out_tokens, {most}"));
        }
        Ok(())
    }

    /// `checkpoint_config` says in one section what three settings say; one of the two is enough.
    fn check_files(&self) -> Result<()> {
        for [key, twin] in [
            ["checkpoint_dir", "checkpoint"],
            ["save_mp_checkpoint_path", "save_mp_checkpoint_path"],
            ["base_dir", "base_dir"],
        ] {
            if self.text_of_files(key).is_some() && self.given.contains(&twin) {
                let path = vec!["checkpoint_config".to_owned(), key.to_owned()];
                let why = format!("{twin} says the same and is given too; write one of them");
                return Err(InferenceError::Setting { path, why });
            }
        }
        Ok(())
    }

    fn text_of_files(&self, key: &str) -> Option<&str> {
        self.values["checkpoint_config"][key].as_str()
    }

    /// The description of weights that lie elsewhere: an object, or the path of a file.
    pub(super) fn checkpoint(&self) -> Value {
        match self.text_of_files("checkpoint_dir") {
            Some(folder) => json!(Path::new(folder).join(WRITTEN)),
            None => self.values["checkpoint"].clone(),
        }
    }

    /// Below which folder its files lie.
    pub(super) fn base_dir(&self) -> &str {
        let own = self.text_of_files("base_dir");
        own.or(self.values["base_dir"].as_str()).unwrap_or_default()
    }

    /// Where the weights are written to.
    pub(super) fn save_path(&self) -> Option<&str> {
        self.text_of_files("save_mp_checkpoint_path").or(self.values["save_mp_checkpoint_path"].as_str())
    }

    /// All settings, defaults included, as DeepSpeed calls them; deprecated ones that were replaced are gone.
    pub fn values(&self) -> &Map<String, Value> {
        &self.values
    }

    /// Which settings were given.
    pub fn given(&self) -> &[&'static str] {
        &self.given
    }

    /// What a user should know: deprecated names.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The type of weights.
    pub fn dtype(&self) -> InferenceDtype {
        match self.values["dtype"].as_str() {
            Some("torch.float32") => InferenceDtype::Fp32,
            Some("torch.bfloat16") => InferenceDtype::Bf16,
            Some("torch.int8") => InferenceDtype::Int8,
            _ => InferenceDtype::Fp16,
        }
    }

    /// Tokens of prompt and answer together.
    pub fn max_out_tokens(&self) -> usize {
        self.values["max_out_tokens"].as_u64().unwrap_or(1) as usize
    }

    /// Tokens of prompt and answer together that there must be room for.
    pub fn min_out_tokens(&self) -> usize {
        self.values["min_out_tokens"].as_u64().unwrap_or(1) as usize
    }

    /// Ranks that share each layer.
    pub fn tensor_parallel_size(&self) -> Result<usize> {
        let is_off = self.values["tensor_parallel"]["enabled"] == false;
        if is_off { Ok(1) } else { self.ranks("tensor_parallel", "tp_size") }
    }

    /// Ranks over which experts are spread.
    pub fn expert_parallel_size(&self) -> Result<usize> {
        if self.values["moe"]["enabled"] == false { Ok(1) } else { self.ranks("moe", "ep_size") }
    }

    fn ranks(&self, section: &str, key: &str) -> Result<usize> {
        let given = self.values[section][key].as_i64().unwrap_or(1);
        let ranks = usize::try_from(given).ok().filter(|&ranks| ranks >= 1);
        ranks.ok_or_else(|| InferenceError::Setting {
            path: vec![section.to_owned(), key.to_owned()],
            why: format!("{given} is no number of ranks; give 1 or more"),
        })
    }

    /// Which settings of mixtures change nothing: what a model has, its own files say.
    pub(super) fn mixture_warnings(&self) -> Vec<String> {
        let moe = &self.values["moe"];
        let given =
            [("moe.moe_experts", moe["moe_experts"] != json!([1])), ("moe.type", moe["type"] != "standard")];
        let told =
            |(key, _)| format!("{key} has no effect: the model's own config.json says what mixtures it has");
        given.into_iter().filter(|(_, given)| *given).map(told).collect()
    }
}

/// Whether a leaf of a section was given, under any of its names.
fn says(given: &Map<String, Value>, section: &str, leaf: &str) -> bool {
    let section = FIELDS.iter().find(|field| field.name == section);
    let Some(section) = section else { return false };
    let object = given.get(section.name).or_else(|| section.alias.and_then(|alias| given.get(alias)));
    let names = match leaf {
        "moe_experts" => vec![leaf, "num_experts"],
        "ep_group" => vec![leaf, "expert_group"],
        _ => vec![leaf],
    };
    object
        .and_then(Value::as_object)
        .is_some_and(|object| names.iter().any(|name| object.contains_key(*name)))
}
