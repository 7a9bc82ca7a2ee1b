//! One text for one configuration, and its hash.

use serde_json::{Map, Value};

/// FNV-1a over the canonical text: ranks compare it to notice that they were given different configurations.
/// It guards against mistakes, not against an adversary.
pub(crate) fn hash(value: &Value) -> u64 {
    canonical(value)
        .to_string()
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// Keys sorted, and whole numbers written as integers.
fn canonical(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            let mut entries: Vec<_> = map.iter().collect();
            entries.sort_by_key(|(key, _)| key.as_str());
            Value::Object(Map::from_iter(
                entries.into_iter().map(|(key, value)| (key.clone(), canonical(value))),
            ))
        }
        Value::Array(items) => Value::Array(items.iter().map(canonical).collect()),
        Value::Number(number) => match number.as_f64() {
            Some(float) if number.is_f64() && float.fract() == 0.0 && float.abs() < 9e15 => {
                Value::from(float as i64)
            }
            _ => value.clone(),
        },
        _ => value.clone(),
    }
}
