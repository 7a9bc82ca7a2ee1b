//! Fills in every default, so that the rest of the program never asks "and if it is absent?".

use serde_json::{Map, Value};

use crate::compat::Compat;
use crate::table::{Drift, Key, Kind, ROOT, Tag, find_variant};

/// The given options with every default beside them: those of the version that the configuration asks for.
pub(crate) fn fill_root(given: &Map<String, Value>) -> Map<String, Value> {
    fill(given, ROOT, Compat::of(given))
}

/// Old spellings are gone by now, so they are not filled in.
fn fill(given: &Map<String, Value>, keys: &'static [Key], compat: Compat) -> Map<String, Value> {
    let mut full = Map::new();
    for key in keys.iter().filter(|key| key.deprecated.is_none()) {
        let value = match given.get(key.name) {
            Some(value) => fill_as(value, &key.kind, given, compat),
            None => fill_as(&default_in(key, compat), &key.kind, given, compat),
        };
        full.insert(key.name.to_owned(), value);
    }
    full
}

/// A value with the oldest defaults of everything below it; `siblings` are the options beside it.
pub(crate) fn fill_value(value: &Value, kind: &Kind, siblings: &Map<String, Value>) -> Value {
    fill_as(value, kind, siblings, Compat::default())
}

fn fill_as(value: &Value, kind: &Kind, siblings: &Map<String, Value>, compat: Compat) -> Value {
    match (kind, value) {
        (Kind::Section(keys, _), Value::Object(given)) => Value::Object(fill(given, keys, compat)),
        (Kind::Named(kind), Value::Object(given)) => {
            let filled = |value| fill_as(value, kind, given, compat);
            let entries = given.iter().map(|(name, value)| (name.clone(), filled(value)));
            Value::Object(entries.collect())
        }
        (Kind::Variants { tag, variants }, Value::Object(given)) => {
            let name = match tag {
                Tag::Beside(tag) => siblings.get(*tag).and_then(Value::as_str),
                Tag::Within(tag, default) => Some(given.get(*tag).and_then(Value::as_str).unwrap_or(default)),
            };
            match name.and_then(|name| find_variant(variants, name)).and_then(|variant| variant.keys) {
                Some(keys) => Value::Object(fill(given, keys, compat)),
                None => value.clone(),
            }
        }
        (Kind::Either(kinds), Value::Object(_)) => {
            match kinds.iter().find(|kind| matches!(kind, Kind::Section(..))) {
                Some(kind) => fill_as(value, kind, siblings, compat),
                None => value.clone(),
            }
        }
        _ => value.clone(),
    }
}

/// The default of an option in a version.
fn default_in(key: &Key, compat: Compat) -> Value {
    match (key.drift, compat) {
        (Some(Drift::Default { default, .. }), Compat::V0_19_8) => {
            serde_json::from_str(default).unwrap_or(Value::Null)
        }
        _ => default_of(key),
    }
}

/// The default of an option, as a value.
///
/// A default that is no JSON would be a mistake in the table; a test parses them all.
pub(crate) fn default_of(key: &Key) -> Value {
    serde_json::from_str(key.default).unwrap_or(Value::Null)
}
