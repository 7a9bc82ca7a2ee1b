//! `adapter_config.json`: from PEFT's words to ours, and back.

use std::collections::BTreeMap;
use std::path::Path;

use ferrospeed_nn::adapter::{Adapters, Scaling, Targets, TrainedBiases};
use serde_json::{Map, Value, json};

use crate::config::read_json;
use crate::error::{ModelError, Result};

/// What makes a directory one of an adapter.
pub const ADAPTER_CONFIG: &str = "adapter_config.json";

/// Fields that change nothing of what a trained adapter computes: where it comes from, how it began, how PEFT runs it.
const HARMLESS: [&str; 20] = [
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "loftq_config",
    "lora_ga_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
    "use_cache",
    "use_peft",
    "init_lora_weights",
    "ephemeral_gpu_offload",
];

/// Starts that leave the weights of the model as they were.
const STARTS: [&str; 4] = ["gaussian", "orthogonal", "eva", "true"];

/// What the configuration in a directory says, and the model that it names.
pub fn read(directory: &Path) -> Result<(Adapters, Option<String>)> {
    let path = directory.join(ADAPTER_CONFIG);
    let value = read_json(&path)?;
    let refuse = |(key, why): (&str, String)| ModelError::file(&path, format!("{key}: {why}"));
    let Value::Object(fields) = &value else { return Err(ModelError::file(&path, "is no object")) };
    let adapters = adapters_of(fields).map_err(refuse)?;
    if let Some(problem) = adapters.problems().into_iter().next() {
        return Err(refuse(problem));
    }
    let base = fields.get("base_model_name_or_path").and_then(Value::as_str).filter(|name| !name.is_empty());
    Ok((adapters, base.map(str::to_owned)))
}

type Misread<'a> = (&'a str, String);

fn adapters_of(fields: &Map<String, Value>) -> Result<Adapters, Misread<'_>> {
    match fields.get("peft_type").and_then(Value::as_str) {
        Some("LORA") => {}
        Some(other) => {
            return Err((
                "peft_type",
                format!("'{other}' is not computed here; LORA is (also rsLoRA and DoRA)"),
            ));
        }
        None => return Err(("peft_type", "is missing; LORA is the one that is known".to_owned())),
    }
    let mut read = Reader { fields, known: HARMLESS.to_vec() };
    let count = |value: &Value| usize::try_from(value.as_u64()?).ok();
    let defaults = Adapters::default();
    let adapters = Adapters {
        rank: read.or("r", defaults.rank, "a whole number", count)?,
        alpha: read.or("lora_alpha", defaults.alpha, "a number", Value::as_f64)?,
        scaling: match read.or("use_rslora", false, "true or false", Value::as_bool)? {
            true => Scaling::ByRootOfRank,
            false => Scaling::ByRank,
        },
        magnitudes: read.or("use_dora", false, "true or false", Value::as_bool)?,
        dropout: read.or("lora_dropout", 0.0, "a number", Value::as_f64)? as f32,
        targets: match read
            .or("target_modules", None, "a text or a list of texts", |value| targets(value).map(Some))?
        {
            Some(targets) => targets,
            None => return Err(("target_modules", "is missing: which layers are adapted?".to_owned())),
        },
        excluded: read.or("exclude_modules", Targets::nothing(), "a text or a list of texts", targets)?,
        saved_modules: read.or("modules_to_save", Vec::new(), "a list of texts", texts)?,
        rank_pattern: read.or("rank_pattern", BTreeMap::new(), "an object of whole numbers", |value| {
            by_name(value, count)
        })?,
        alpha_pattern: read.or("alpha_pattern", BTreeMap::new(), "an object of numbers", |value| {
            by_name(value, Value::as_f64)
        })?,
        biases: read.or("bias", TrainedBiases::None, "\"none\", \"all\" or \"lora_only\"", |value| {
            biases(value.as_str()?)
        })?,
    };
    if let Some(start) = fields.get("init_lora_weights").and_then(Value::as_str)
        && !STARTS.contains(&start)
    {
        let why = format!(
            "'{start}' begins by changing the model's own weights, which this directory does not hold; have PEFT convert it \
             (path_initial_model_for_weight_conversion) or merge it"
        );
        return Err(("init_lora_weights", why));
    }
    read.finish()?;
    Ok(adapters)
}

struct Reader<'a> {
    fields: &'a Map<String, Value>,
    known: Vec<&'static str>,
}

impl<'a> Reader<'a> {
    fn or<T>(
        &mut self,
        key: &'static str,
        default: T,
        wanted: &str,
        parse: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<T, Misread<'a>> {
        self.known.push(key);
        match self.fields.get(key) {
            None | Some(Value::Null) => Ok(default),
            Some(value) => parse(value).ok_or_else(|| (key, format!("{value} is not {wanted}"))),
        }
    }

    /// Refuses a field that is not known here and says something.
    fn finish(self) -> Result<(), Misread<'a>> {
        let says_nothing = |value: &Value| match value {
            Value::Null | Value::Bool(false) => true,
            Value::Array(list) => list.is_empty(),
            Value::Object(fields) => fields.is_empty(),
            _ => false,
        };
        let unknown = self
            .fields
            .iter()
            .find(|(key, value)| !self.known.contains(&key.as_str()) && !says_nothing(value));
        match unknown {
            None => Ok(()),
            Some((key, value)) => Err((
                key,
                format!(
                    "{value} is not known here, and the adapter may compute something else because of it; merge it with PEFT"
                ),
            )),
        }
    }
}

fn texts(value: &Value) -> Option<Vec<String>> {
    value.as_array()?.iter().map(|text| text.as_str().map(str::to_owned)).collect()
}

/// Layers by their names, or by what PEFT takes for them.
fn targets(value: &Value) -> Option<Targets> {
    match value.as_str() {
        Some(text) => Some(Targets::of_text(text)),
        None => texts(value).map(Targets::Names),
    }
}

fn by_name<T>(value: &Value, parse: impl Fn(&Value) -> Option<T>) -> Option<BTreeMap<String, T>> {
    value.as_object()?.iter().map(|(key, value)| Some((key.clone(), parse(value)?))).collect()
}

fn biases(word: &str) -> Option<TrainedBiases> {
    match word {
        "none" => Some(TrainedBiases::None),
        "all" => Some(TrainedBiases::All),
        "lora_only" => Some(TrainedBiases::OfAdapted),
        _ => None,
    }
}

/// What PEFT reads of adapters on the model `base`, whose layers `names` means.
pub fn to_value(adapters: &Adapters, names: Vec<String>, base: &str, inputs_first: bool) -> Value {
    // Whole numbers are written as such, as PEFT has them.
    let number = |value: f64| if value.fract() == 0.0 { json!(value as i64) } else { json!(value) };
    let alphas: Map<String, Value> =
        adapters.alpha_pattern.iter().map(|(key, value)| (key.clone(), number(*value))).collect();
    let bias = match adapters.biases {
        TrainedBiases::None => "none",
        TrainedBiases::All => "all",
        TrainedBiases::OfAdapted => "lora_only",
    };
    let saved = Some(&adapters.saved_modules).filter(|names| !names.is_empty());
    json!({
        "alpha_pattern": alphas,
        "auto_mapping": null,
        "base_model_name_or_path": base,
        "bias": bias,
        "fan_in_fan_out": inputs_first,
        "inference_mode": true,
        "init_lora_weights": true,
        "lora_alpha": number(adapters.alpha),
        "lora_dropout": adapters.dropout,
        "modules_to_save": saved,
        "peft_type": "LORA",
        "r": adapters.rank,
        "rank_pattern": adapters.rank_pattern,
        "revision": null,
        "target_modules": names,
        "task_type": "CAUSAL_LM",
        "use_dora": adapters.magnitudes,
        "use_rslora": adapters.scaling == Scaling::ByRootOfRank,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(value: Value) -> Result<Adapters, String> {
        let Value::Object(fields) = value else { panic!("no object") };
        adapters_of(&fields).map_err(|(key, why)| format!("{key}: {why}"))
    }

    #[test]
    fn what_is_written_is_read_again() {
        let adapters = Adapters {
            rank: 4,
            alpha: 12.5,
            scaling: Scaling::ByRootOfRank,
            magnitudes: true,
            dropout: 0.25,
            targets: Targets::Names(vec!["q_proj".into()]),
            saved_modules: vec!["norm".into()],
            rank_pattern: [("q_proj".to_owned(), 2)].into(),
            alpha_pattern: [("q_proj".to_owned(), 3.0)].into(),
            biases: TrainedBiases::OfAdapted,
            ..Adapters::default()
        };
        let value = to_value(&adapters, vec!["q_proj".into()], "base", false);
        assert_eq!(of(value), Ok(adapters));
    }

    #[test]
    fn what_is_not_computed_is_refused_with_its_field() {
        let with = |key: &str, value: Value| {
            let mut fields =
                json!({"peft_type": "LORA", "target_modules": ["x"], "layers_to_transform": null});
            fields[key] = value;
            of(fields).unwrap_err()
        };
        assert!(with("peft_type", json!("IA3")).contains("'IA3' is not computed here"));
        assert!(
            with("layers_to_transform", json!([1])).contains("layers_to_transform: [1] is not known here")
        );
        assert!(with("lora_bias", json!(true)).starts_with("lora_bias: true is not known"));
        assert!(with("init_lora_weights", json!("pissa")).contains("changing the model's own weights"));
        assert!(with("r", json!("eight")).contains("r: \"eight\" is not a whole number"));
        assert!(with("target_modules", json!(null)).starts_with("target_modules: is missing"));
        assert!(with("bias", json!("some")).contains("lora_only"));
    }
}
