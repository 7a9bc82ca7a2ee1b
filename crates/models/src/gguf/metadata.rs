//! Typed access to a file's metadata.

use std::collections::BTreeMap;
use std::path::Path;

use super::reader::Value;
use crate::error::{ModelError, Result};

/// The metadata of one file.
pub(super) struct Metadata<'a> {
    pub(super) path: &'a Path,
    pub(super) values: &'a BTreeMap<String, Value>,
}

impl<'a> Metadata<'a> {
    pub(super) fn error(&self, key: &str, why: impl std::fmt::Display) -> ModelError {
        ModelError::file(self.path, format!("'{key}' {why}"))
    }

    fn wrong(&self, key: &str, kind: &str) -> ModelError {
        self.error(key, format!("is not {kind}"))
    }

    pub(super) fn size(&self, key: &str) -> Result<Option<u64>> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Unsigned(value)) => Ok(Some(*value)),
            Some(Value::Signed(value)) if *value >= 0 => Ok(Some(*value as u64)),
            // One number for each layer; supported where they are one.
            Some(Value::Numbers(values)) => match values.first() {
                Some(first) if *first >= 0 && values.iter().all(|value| value == first) => {
                    Ok(Some(*first as u64))
                }
                _ => Err(self.error(key, "differs from layer to layer, which is not supported")),
            },
            Some(_) => Err(self.wrong(key, "a whole number")),
        }
    }

    pub(super) fn number(&self, key: &str) -> Result<Option<f64>> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Float(value)) if value.is_finite() => Ok(Some(*value)),
            Some(Value::Unsigned(value)) => Ok(Some(*value as f64)),
            Some(_) => Err(self.wrong(key, "a number")),
        }
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(*value)),
            Some(_) => Err(self.wrong(key, "true or false")),
        }
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Text(value)) => Ok(Some(value)),
            Some(_) => Err(self.wrong(key, "a text")),
        }
    }

    pub(super) fn texts(&self, key: &str) -> Result<Option<&'a [String]>> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Texts(values)) => Ok(Some(values)),
            Some(_) => Err(self.wrong(key, "a list of texts")),
        }
    }

    pub(super) fn floats(&self, key: &str) -> Result<Option<&'a [f32]>> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Floats(values)) => Ok(Some(values)),
            Some(_) => Err(self.wrong(key, "a list of numbers")),
        }
    }

    pub(super) fn numbers(&self, key: &str) -> Result<Option<&'a [i64]>> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Numbers(values)) => Ok(Some(values)),
            Some(_) => Err(self.wrong(key, "a list of whole numbers")),
        }
    }

    pub(super) fn needed<T>(&self, key: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| self.error(key, "is missing"))
    }
}
