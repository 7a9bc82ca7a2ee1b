//! The keys of a recipe and their types: everything that is misspelt, missing or of another type, found in one go.
//!
//! serde stops at the first mistake. Here all of them are collected, and what is wrong is taken out or replaced by
//! something harmless, so that the rest of the recipe can be looked at too.

use ferrospeed_config::whole;
use serde_json::{Map, Value, json};

use super::elsewhere;

/// What a key holds.
enum Kind {
    Text,
    /// A whole number, not negative.
    Count,
    Number,
    Bool,
    Texts,
    /// One text, or several.
    TextOrTexts,
    /// Whole numbers by names that nobody knows beforehand.
    Counts,
    /// Numbers, likewise.
    Numbers,
    /// A share, or files.
    NumberOrTexts,
    Table(&'static [Key]),
    /// A DeepSpeed configuration, which has a table of its own, or the path of one.
    DsConfig,
}

struct Key {
    name: &'static str,
    kind: Kind,
    /// What stands in for a key that must be there and is not.
    required: Option<fn() -> Value>,
}

const fn key(name: &'static str, kind: Kind) -> Key {
    Key { name, kind, required: None }
}

const fn required(name: &'static str, kind: Kind, stand_in: fn() -> Value) -> Key {
    Key { name, kind, required: Some(stand_in) }
}

const RECIPE: &[Key] = &[
    required("name", Kind::Text, || json!("run")),
    key("steps", Kind::Count),
    key("epochs", Kind::Number),
    key("ranks", Kind::Count),
    key("seed", Kind::Count),
    key("max_bad_steps", Kind::Count),
    key("trace", Kind::Text),
    key("gradient_norms_every", Kind::Count),
    key("objective", Kind::Table(OBJECTIVE)),
    required("model", Kind::Table(MODEL), || json!({ "preset": "gpt2" })),
    key("adapter", Kind::Table(ADAPTER)),
    required("data", Kind::Table(DATA), || json!({ "synthetic": 2, "sequence": 2 })),
    key("training", Kind::Table(TRAINING)),
    key(
        "pipeline",
        Kind::Table(&[
            key("stages", Kind::Count),
            key("partition", Kind::Text),
            key("schedule", Kind::Text),
            key("activation_checkpoint_interval", Kind::Count),
        ]),
    ),
    key(
        "tensor_parallel",
        Kind::Table(&[key("autotp_size", Kind::Count), key("sequence_parallel", Kind::Bool)]),
    ),
    key("expert_parallel", Kind::Table(&[key("autoep_size", Kind::Count)])),
    key("eval", Kind::Table(EVAL)),
    key("save", Kind::Table(SAVE)),
    key("sample", Kind::Table(SAMPLE)),
    required("ds_config", Kind::DsConfig, stand_in_ds_config),
];

const OBJECTIVE: &[Key] = &[
    required("kind", Kind::Text, || json!("next_token")),
    key("beta", Kind::Number),
    key("loss", Kind::Text),
    key("label_smoothing", Kind::Number),
    key("reference_free", Kind::Bool),
    key("desirable_weight", Kind::Number),
    key("undesirable_weight", Kind::Number),
];

const MODEL: &[Key] = &[
    key("preset", Kind::Text),
    key("path", Kind::Text),
    key("config", Kind::Text),
    key("layers", Kind::Count),
    key("width", Kind::Count),
    key("heads", Kind::Count),
    key("vocabulary", Kind::Count),
    key("dropout", Kind::Number),
    key("activation_checkpointing", Kind::Bool),
    key("mlp_chunk", Kind::Count),
    key("frozen", Kind::Texts),
];

const ADAPTER: &[Key] = &[
    key("kind", Kind::Text),
    key("path", Kind::Text),
    key("rank", Kind::Count),
    key("alpha", Kind::Number),
    key("dropout", Kind::Number),
    key("target_modules", Kind::TextOrTexts),
    key("modules_to_save", Kind::Texts),
    key("rank_pattern", Kind::Counts),
    key("alpha_pattern", Kind::Numbers),
    key("use_rslora", Kind::Bool),
    key("use_dora", Kind::Bool),
    key("bias", Kind::Text),
];

const DATA: &[Key] = &[
    key("text", Kind::Texts),
    key("extensions", Kind::Texts),
    key("jsonl", Kind::Texts),
    key("field", Kind::Text),
    key("parquet", Kind::Texts),
    key("column", Kind::Text),
    key("samples", Kind::Texts),
    key("hub", Kind::Text),
    key("kind", Kind::Text),
    key("chat_template", Kind::Text),
    key("train_on", Kind::Text),
    key("too_long", Kind::Text),
    key("tokens", Kind::Texts),
    key("token_type", Kind::Text),
    key("megatron", Kind::Texts),
    key("synthetic", Kind::Count),
    key("tokenizer", Kind::Text),
    key("cache", Kind::Text),
    required("sequence", Kind::Count, || json!(2)),
    key("documents", Kind::Text),
    key("end_token", Kind::Count),
    key("validation", Kind::NumberOrTexts),
];

const TRAINING: &[Key] = &[
    key("per_device_train_batch_size", Kind::Count),
    key("gradient_accumulation_steps", Kind::Count),
    key("learning_rate", Kind::Number),
    key("adam_beta1", Kind::Number),
    key("adam_beta2", Kind::Number),
    key("adam_epsilon", Kind::Number),
    key("weight_decay", Kind::Number),
    key("max_grad_norm", Kind::Number),
    key("warmup_steps", Kind::Number),
    key("warmup_ratio", Kind::Number),
    key("bf16", Kind::Bool),
    key("fp16", Kind::Bool),
    key("label_smoothing_factor", Kind::Number),
    key("z_loss", Kind::Number),
    key("neftune_noise_alpha", Kind::Number),
];

const SAVE: &[Key] = &[
    key("every", Kind::Count),
    key("keep_last", Kind::Count),
    key("keep_every", Kind::Count),
    key("background", Kind::Bool),
];

const EVAL: &[Key] = &[
    key("every", Kind::Count),
    key("sequences", Kind::Count),
    key("at_start", Kind::Bool),
    key("keep_best", Kind::Bool),
    key("patience", Kind::Count),
    key("min_gain", Kind::Number),
    key("measure", Kind::Text),
];

const SAMPLE: &[Key] = &[
    required("prompt", Kind::Text, || json!("x")),
    key("prompts", Kind::Texts),
    key("every", Kind::Count),
    required("tokens", Kind::Count, || json!(1)),
    key("temperature", Kind::Number),
];

/// What stands in for a ds_config that cannot be read: there is nothing wrong with it.
pub(super) fn stand_in_ds_config() -> Value {
    json!({ "train_micro_batch_size_per_gpu": 1, "optimizer": { "type": "Adam" } })
}

/// A kind of objective alone is a table with nothing else in it.
pub(super) fn spell_out(recipe: &mut Value) {
    if let Some(objective) = recipe.get_mut("objective").filter(|objective| objective.is_string()) {
        *objective = json!({ "kind": objective.take() });
    }
}

/// Whether a key belongs to the recipe itself; all others that `--set` names belong to the ds_config.
pub(super) fn is_recipe_key(name: &str) -> bool {
    name != "ds_config" && RECIPE.iter().any(|key| key.name == name)
}

/// The key of recipes that a name given to `--set` was meant to be, where neither recipes nor ds_config know it.
pub(super) fn misspelt_recipe_key(name: &str) -> Option<&'static str> {
    let distance = |known: &str| strsim::damerau_levenshtein(name, known);
    let config = ferrospeed_config::table::ROOT.iter();
    let nearest_in_config =
        config.flat_map(|key| std::iter::once(key.name).chain(key.aliases.iter().copied()));
    let nearest_in_config = nearest_in_config.map(distance).min().unwrap_or(usize::MAX);
    let near = nearest(name, RECIPE.iter().map(|key| key.name))?;
    // A key of ds_config, or one that is nearer to such a key, is left to its own checks.
    (distance(near) < nearest_in_config).then_some(near)
}

/// What to write for a key of other programs that was given to `--set`, where neither recipes nor ds_config have one of that name.
pub(super) fn of_other_programs(assignment: &str) -> Option<&'static str> {
    let path = assignment.split('=').next().unwrap_or_default();
    let first = path.split('.').next().unwrap_or_default();
    let is_of_config =
        ferrospeed_config::table::ROOT.iter().any(|key| key.name == first || key.aliases.contains(&first));
    if is_of_config { None } else { elsewhere::ours(path) }
}

/// Everything that does not fit the table; afterwards `recipe` does.
pub(super) fn check(recipe: &mut Map<String, Value>) -> Vec<String> {
    let mut problems = Vec::new();
    check_table(recipe, RECIPE, "", &mut problems);
    problems.extend(check_length(recipe));
    problems
}

/// What stands in for the steps of a run that is told by its epochs.
const STEPS_OF_EPOCHS: u64 = 1_000_000;

/// A run is so many steps long, or so many passes over its data.
fn check_length(recipe: &mut Map<String, Value>) -> Option<String> {
    match (recipe.contains_key("steps"), recipe.contains_key("epochs")) {
        (true, true) => Some("epochs: there are steps too; take one of the two away".into()),
        (true, false) => None,
        (false, is_told) => {
            // How many it will be is known when the data is: until then, so many that no schedule is too long for them.
            recipe.insert("steps".into(), STEPS_OF_EPOCHS.into());
            (!is_told).then(|| "steps: is missing; give it, or epochs".into())
        }
    }
}

fn check_table(table: &mut Map<String, Value>, keys: &[Key], prefix: &str, problems: &mut Vec<String>) {
    let unknown: Vec<String> =
        table.keys().filter(|name| !keys.iter().any(|key| key.name == name.as_str())).cloned().collect();
    for name in unknown {
        table.remove(&name);
        let names = keys.iter().map(|key| key.name);
        let path = format!("{prefix}{name}");
        let advice = match nearest(&name, names.clone()) {
            _ if let Some(own) = elsewhere::ours(&path) => format!("here it is {own}"),
            Some(near) => format!("did you mean '{prefix}{near}'?"),
            None => format!("known are {}", names.collect::<Vec<_>>().join(", ")),
        };
        problems.push(format!("{prefix}{name}: is not a key of recipes; {advice}"));
    }
    for key in keys {
        let path = format!("{prefix}{}", key.name);
        match table.get_mut(key.name) {
            None => {
                let Some(stand_in) = key.required else { continue };
                problems.push(format!("{path}: is missing"));
                table.insert(key.name.into(), stand_in());
            }
            Some(value) => {
                if let (Kind::Count, Some(count)) = (&key.kind, whole(value)) {
                    *value = count.into();
                }
                if let (Kind::Table(keys), Value::Object(inner)) = (&key.kind, &mut *value) {
                    check_table(inner, keys, &format!("{path}."), problems);
                } else if let Some(wanted) = misfit(&key.kind, value) {
                    problems.push(format!("{path}: must be {wanted}; {value} is {}", name_of(value)));
                    match key.required {
                        Some(stand_in) => *value = stand_in(),
                        None => drop(table.remove(key.name)),
                    }
                }
            }
        }
    }
}

/// What a value should have been, if it is not.
fn misfit(kind: &Kind, value: &Value) -> Option<&'static str> {
    let texts = |value: &Value| value.as_array().is_some_and(|list| list.iter().all(Value::is_string));
    let all = |value: &Value, is: fn(&Value) -> bool| {
        value.as_object().is_some_and(|fields| fields.values().all(is))
    };
    let (fits, wanted) = match kind {
        Kind::Text => (value.is_string(), "a text"),
        Kind::Count => (value.is_u64(), "a whole number, 0 or more"),
        Kind::Number => (value.is_number(), "a number"),
        Kind::Bool => (value.is_boolean(), "true or false"),
        Kind::Texts => (texts(value), "a list of texts"),
        Kind::TextOrTexts => (value.is_string() || texts(value), "a text or a list of texts"),
        Kind::Counts => (all(value, Value::is_u64), "a table of whole numbers"),
        Kind::Numbers => (all(value, Value::is_number), "a table of numbers"),
        Kind::NumberOrTexts => (value.is_number() || texts(value), "a share in 0..1 or a list of files"),
        Kind::Table(_) => (value.is_object(), "a table of keys"),
        Kind::DsConfig => (value.is_object() || value.is_string(), "a table or the path of a ds_config.json"),
    };
    (!fits).then_some(wanted)
}

fn name_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "nothing",
        Value::Bool(_) => "true or false",
        Value::Number(number) if number.as_f64().is_some_and(|size| size.abs() >= u64::MAX as f64) => {
            "more than can be counted"
        }
        Value::Number(number) if number.is_f64() => "a number with a fraction",
        Value::Number(number) if number.is_i64() && !number.is_u64() => "negative",
        Value::Number(_) => "a whole number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "a table",
    }
}

/// A known name that is only a slip away.
fn nearest(name: &str, known: impl Iterator<Item = &'static str>) -> Option<&'static str> {
    let near = known.map(|known| (strsim::damerau_levenshtein(name, known), known)).min()?;
    (near.0 <= 1 + name.len() / 4).then_some(near.1)
}
