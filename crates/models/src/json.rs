//! JSON in which a key that stands twice in an object is an error: whoever wrote it meant one of the two values, and nobody knows
//! which.

use std::fmt;

use serde::Deserializer;
use serde::de::{DeserializeSeed, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

/// The value of a whole text.
pub fn parse(text: &[u8]) -> serde_json::Result<Value> {
    let mut reader = serde_json::Deserializer::from_slice(text);
    let value = Unrepeated.deserialize(&mut reader)?;
    reader.end()?;
    Ok(value)
}

struct Unrepeated;

impl<'de> DeserializeSeed<'de> for Unrepeated {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<Value, D::Error> {
        reader.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Unrepeated {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(Unrepeated)? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            if map.contains_key(&key) {
                let shown: String = key.chars().take(100).collect();
                return Err(A::Error::custom(format!("the key {shown:?} stands twice in one object")));
            }
            map.insert(key, entries.next_value_seed(Unrepeated)?);
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_once_is_read_as_by_others() {
        let text = r#" {"a": [null, true, -3, 18446744073709551615, 1e300, "é\n"], "b": {"a": {}, "": []}, "c": 0.1} "#;
        assert_eq!(parse(text.as_bytes()).unwrap(), serde_json::from_str::<Value>(text).unwrap());
        for broken in ["", "{", "[1,]", "{} x", "nul", "\"\u{1}\"", "1e999"] {
            let usual = serde_json::from_str::<Value>(broken).unwrap_err().to_string();
            assert_eq!(parse(broken.as_bytes()).unwrap_err().to_string(), usual, "{broken}");
        }
        let deep = "[".repeat(100_000);
        assert!(parse(deep.as_bytes()).unwrap_err().to_string().contains("recursion"));
    }

    #[test]
    fn a_key_that_stands_twice_is_named_at_any_depth() {
        for text in [r#"{"n": 1, "n": 1}"#, r#"[{"a": {"x": 0, "n": 2, "\u006e": 3}}]"#] {
            let said = parse(text.as_bytes()).unwrap_err().to_string();
            assert!(said.starts_with("the key \"n\" stands twice in one object at line 1"), "{said}");
        }
    }
}
