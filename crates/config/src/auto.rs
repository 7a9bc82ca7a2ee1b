//! `"auto"`: values that the recipe or the model fills in.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::check::Checked;
use crate::diagnostic::{Code, Report};
use crate::table::Form;

/// Values for options that the file leaves to `"auto"`, by canonical path, each with where it comes from.
///
/// ```
/// use ferrospeed_config::AutoValues;
/// let auto = AutoValues::new().with("optimizer.params.lr", 3e-4).with_hidden_size(768);
/// # let _ = auto;
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AutoValues {
    by_path: BTreeMap<String, (Value, String)>,
}

/// What took the place of one `"auto"`.
#[derive(Debug, Clone, PartialEq)]
pub struct Filled {
    /// The option.
    pub path: String,
    /// Its value.
    pub value: Value,
    /// Where that comes from.
    pub from: String,
}

impl AutoValues {
    /// Nothing is known.
    pub fn new() -> Self {
        AutoValues::default()
    }

    /// Adds the value for one path.
    pub fn with(self, path: &str, value: impl Into<Value>) -> Self {
        self.with_source(path, value, "the caller")
    }

    /// Adds the value for one path, and where it comes from.
    pub fn with_source(mut self, path: &str, value: impl Into<Value>, from: impl Into<String>) -> Self {
        self.by_path.insert(path.to_owned(), (value.into(), from.into()));
        self
    }

    /// Adds the ZeRO sizes that suit a model of this width, as the Hugging Face trainer chooses them.
    pub fn with_hidden_size(self, hidden_size: u64) -> Self {
        let square = hidden_size.saturating_mul(hidden_size).min(i64::MAX as u64);
        let width = hidden_size as f64;
        let from = |formula: &str| format!("the model's hidden size {hidden_size}: {formula}");
        self.with_source("zero_optimization.reduce_bucket_size", square, from("its square"))
            .with_source(
                "zero_optimization.prefetch_bucket_size",
                // In the trainer's order of factors, for the same last digit.
                ((0.9 * width * width) as u64).min(i64::MAX as u64),
                from("0.9 of its square"),
            )
            .with_source(
                "zero_optimization.param_persistence_threshold",
                hidden_size.saturating_mul(10).min(i64::MAX as u64),
                from("10 times"),
            )
    }

    /// The value for a path.
    pub fn get(&self, path: &str) -> Option<&Value> {
        self.by_path.get(path).map(|(value, _)| value)
    }

    /// What stands for each of these `"auto"`s; where there is no value the default does, which `full` holds.
    pub(crate) fn fill<'a>(
        &self,
        autos: impl Iterator<Item = &'a str>,
        full: &Map<String, Value>,
    ) -> Vec<Filled> {
        let filled = |path: &str| match self.by_path.get(path) {
            Some((value, from)) => Filled { path: path.to_owned(), value: value.clone(), from: from.clone() },
            None => Filled {
                path: path.to_owned(),
                value: lookup(full, path).cloned().unwrap_or(Value::Null),
                from: "the default".to_owned(),
            },
        };
        autos.map(filled).collect()
    }
}

/// Puts values in the place of every `"auto"`. Where there is none, a section that reads leniently falls back to
/// the default, as DeepSpeed does; anywhere else it is an error that names the option.
pub(crate) fn substitute(checked: &Checked, auto: &AutoValues, report: &mut Report) -> Map<String, Value> {
    let mut given = checked.given.clone();
    for (path, form) in &checked.autos {
        match (auto.get(path), form) {
            (Some(value), _) => {
                if let Some(place) = lookup_mut(&mut given, path) {
                    *place = value.clone();
                }
            }
            (None, Form::Schema) => remove(&mut given, path),
            (None, Form::Plain) => {
                report.push(checked.places.error(
                    Code::UnresolvedAuto,
                    path,
                    "is \"auto\", and neither the recipe nor the model gives a value for it",
                    "write the value, remove the key to take the default, or use a recipe that names this file, which fills it in",
                ));
                remove(&mut given, path);
            }
        }
    }
    given
}

/// The value at a dotted path.
pub(crate) fn lookup<'a>(map: &'a Map<String, Value>, path: &str) -> Option<&'a Value> {
    let mut segments = path.split('.');
    let mut value = map.get(segments.next()?)?;
    for segment in segments {
        value = value.get(segment)?;
    }
    Some(value)
}

fn lookup_mut<'a>(map: &'a mut Map<String, Value>, path: &str) -> Option<&'a mut Value> {
    let mut segments = path.split('.');
    let mut value = map.get_mut(segments.next()?)?;
    for segment in segments {
        value = value.get_mut(segment)?;
    }
    Some(value)
}

fn remove(map: &mut Map<String, Value>, path: &str) {
    match path.rsplit_once('.') {
        None => {
            map.remove(path);
        }
        Some((parent, key)) => {
            if let Some(Value::Object(parent)) = lookup_mut(map, parent) {
                parent.remove(key);
            }
        }
    }
}
