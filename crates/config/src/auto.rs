//! `"auto"`: values that the recipe or the model fills in.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::check::Checked;
use crate::diagnostic::{Code, Report};
use crate::table::Form;

/// Values for options that the file leaves to `"auto"`, by canonical path.
///
/// ```
/// use ferrospeed_config::AutoValues;
/// let auto = AutoValues::new().with("optimizer.params.lr", 3e-4).with_hidden_size(768);
/// # let _ = auto;
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AutoValues {
    by_path: BTreeMap<String, Value>,
}

impl AutoValues {
    /// Nothing is known.
    pub fn new() -> Self {
        AutoValues::default()
    }

    /// Adds the value for one path.
    pub fn with(mut self, path: &str, value: impl Into<Value>) -> Self {
        self.by_path.insert(path.to_owned(), value.into());
        self
    }

    /// Adds the ZeRO sizes that suit a model of this width, as the Hugging Face trainer chooses them.
    pub fn with_hidden_size(self, hidden_size: u64) -> Self {
        let square = hidden_size.saturating_mul(hidden_size).min(i64::MAX as u64);
        self.with("zero_optimization.reduce_bucket_size", square)
            .with("zero_optimization.prefetch_bucket_size", (square as f64 * 0.9) as u64)
            .with(
                "zero_optimization.param_persistence_threshold",
                hidden_size.saturating_mul(10).min(i64::MAX as u64),
            )
    }

    /// The value for a path.
    pub fn get(&self, path: &str) -> Option<&Value> {
        self.by_path.get(path)
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
                    "write the value, or remove the key to take the default",
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
