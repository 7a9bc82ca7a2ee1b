//! The JSON schema of `ds_config.json`, written from the option table, for editors that complete and check.

use serde_json::{Map, Value, json};

use crate::defaults::default_of;
use crate::table::{Form, Key, Kind, ROOT, Range, Tag, Variant};

/// The schema (draft 2020-12).
pub fn render() -> Value {
    let mut schema = object(ROOT);
    schema.insert("$schema".into(), "https://json-schema.org/draft/2020-12/schema".into());
    schema.insert("title".into(), "ds_config.json".into());
    Value::Object(schema)
}

/// An object with these keys, and comments.
fn object(keys: &[Key]) -> Map<String, Value> {
    let mut properties = Map::new();
    for key in keys {
        for name in std::iter::once(&key.name).chain(key.aliases) {
            properties.insert((*name).to_owned(), property(key));
        }
    }
    let required: Vec<&str> = keys.iter().filter(|key| key.required).map(|key| key.name).collect();
    let mut schema = Map::new();
    schema.insert("type".into(), "object".into());
    schema.insert("properties".into(), Value::Object(properties));
    schema.insert("patternProperties".into(), json!({ "^_": {} }));
    schema.insert("additionalProperties".into(), false.into());
    if !required.is_empty() {
        schema.insert("required".into(), required.into());
    }
    let conditions: Vec<Value> = keys.iter().flat_map(conditions).collect();
    if !conditions.is_empty() {
        schema.insert("allOf".into(), conditions.into());
    }
    schema
}

/// "If `type` is Adam, then `params` has these keys", for each variant of a key that depends on its neighbour.
fn conditions(key: &Key) -> Vec<Value> {
    let Kind::Variants { tag: Tag::Beside(tag), variants } = key.kind else { return Vec::new() };
    let with_keys = variants.iter().filter_map(|variant| Some((variant.tag, variant.keys?)));
    with_keys
        .map(|(name, keys)| {
            json!({
                "if": { "properties": { tag: { "pattern": any_case_pattern(&[name]) } }, "required": [tag] },
                "then": { "properties": { key.name: { "anyOf": [object(keys), { "type": "null" }] } } },
            })
        })
        .collect()
}

fn property(key: &Key) -> Value {
    let mut schema = alternatives(&key.kind, key.takes_null());
    schema.insert("description".into(), key.doc.into());
    if key.deprecated.is_some() {
        schema.insert("deprecated".into(), true.into());
    } else if !key.required && key.default != "null" {
        schema.insert("default".into(), default_of(key));
    }
    Value::Object(schema)
}

/// The type itself, or else `"auto"` or null.
fn alternatives(kind: &Kind, null: bool) -> Map<String, Value> {
    let mut any = vec![value(kind)];
    let scalar =
        !matches!(kind, Kind::Section(..) | Kind::Variants { .. } | Kind::Named(_) | Kind::Json | Kind::Text);
    if scalar {
        any.push(json!({ "const": "auto" }));
    }
    if null {
        any.push(json!({ "type": "null" }));
    }
    match (any.len(), any.pop()) {
        (1, Some(Value::Object(only))) => only,
        (_, last) => {
            any.extend(last);
            Map::from_iter([("anyOf".to_owned(), Value::Array(any))])
        }
    }
}

fn value(kind: &Kind) -> Value {
    match kind {
        Kind::Bool => json!({ "type": "boolean" }),
        Kind::Int { min, max } => {
            let mut schema = Map::from_iter([("type".to_owned(), Value::from("integer"))]);
            if *min != i64::MIN {
                schema.insert("minimum".into(), (*min).into());
            }
            if *max != i64::MAX {
                schema.insert("maximum".into(), (*max).into());
            }
            Value::Object(schema)
        }
        Kind::Interval => json!({ "anyOf": [
            { "type": "integer", "minimum": 1 },
            { "type": "string", "pattern": any_case_pattern(&["inf", "Infinity"]) }
        ] }),
        Kind::IntChoice(choices) => json!({ "enum": choices }),
        Kind::Float(range) => float(range),
        Kind::Text => json!({ "type": "string" }),
        Kind::NonEmptyText => json!({ "type": "string", "minLength": 1 }),
        Kind::Choice { values, any_case: false } => json!({ "enum": values }),
        Kind::Choice { values, any_case: true } => {
            json!({ "type": "string", "pattern": any_case_pattern(values) })
        }
        Kind::DataType => json!({ "enum": [
            "fp32", "float32", "float", "torch.float32", "fp16", "float16", "half", "torch.float16", "bf16", "bfloat16", "torch.bfloat16"
        ] }),
        Kind::List { item, length } => {
            let mut schema = json!({ "type": "array", "items": value(item) });
            if let Some(length) = length {
                schema["minItems"] = (*length).into();
                schema["maxItems"] = (*length).into();
            }
            schema
        }
        Kind::Section(keys, Form::Plain | Form::Schema) => Value::Object(object(keys)),
        Kind::Variants { tag: Tag::Within(..), variants } => Value::Object(object(&union_of(variants))),
        // The neighbour that decides is out of sight here; the conditions beside it say the rest.
        Kind::Variants { tag: Tag::Beside(_), .. } => json!({ "type": "object" }),
        Kind::Named(kind) => json!({ "type": "object", "additionalProperties": value(kind) }),
        Kind::Json => json!({}),
        Kind::Either(kinds) => json!({ "anyOf": kinds.iter().map(value).collect::<Vec<_>>() }),
    }
}

/// The keys of all variants, each once.
fn union_of(variants: &[Variant]) -> Vec<Key> {
    let mut keys: Vec<Key> = Vec::new();
    for key in variants.iter().flat_map(|variant| variant.keys.unwrap_or_default()) {
        if keys.iter().all(|seen| seen.name != key.name) {
            keys.push(*key);
        }
    }
    keys
}

fn float(range: &Range) -> Value {
    let mut schema = Map::from_iter([("type".to_owned(), Value::from("number"))]);
    if range.min != f64::MIN {
        schema.insert(if range.above_min { "exclusiveMinimum" } else { "minimum" }.into(), range.min.into());
    }
    if range.max != f64::MAX {
        schema.insert(if range.below_max { "exclusiveMaximum" } else { "maximum" }.into(), range.max.into());
    }
    Value::Object(schema)
}

/// JSON schema knows no flag for "whatever the case", so each letter stands as a pair.
fn any_case_pattern(values: &[&str]) -> String {
    let spelled = values.iter().map(|value| {
        let letters = value.chars().map(|c| match c {
            c if c.is_ascii_alphabetic() => format!("[{}{}]", c.to_ascii_lowercase(), c.to_ascii_uppercase()),
            c => c.to_string(),
        });
        letters.collect::<String>()
    });
    format!("^({})$", spelled.collect::<Vec<_>>().join("|"))
}
