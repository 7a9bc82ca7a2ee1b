//! The recorded behaviour of DeepSpeed, and where we differ on purpose.

mod compression;
mod data_schedules;
mod eigenvalues;
mod loss_scale;
mod norms;
mod one_bit;
mod schedules;
mod trajectories;

use std::collections::BTreeSet;
use std::num::NonZeroU64;

use ferrospeed_config::{AutoValues, Config, ConfigError};
use serde_json::{Value, json};

/// Resolves a configuration with these sections.
fn resolve(sections: Value) -> Result<Config, ConfigError> {
    let mut whole = json!({ "train_batch_size": 1 });
    let object = whole.as_object_mut().expect("it is an object");
    object.extend(sections.as_object().cloned().unwrap_or_default());
    let one = NonZeroU64::MIN;
    Config::from_value("golden", &whole)?.resolve(one, &AutoValues::new()).map(|(config, _)| config)
}

/// A recorded number, where infinities and NaN are words.
fn number(value: &Value) -> f64 {
    match value.as_str() {
        Some("inf") => f64::INFINITY,
        Some("-inf") => f64::NEG_INFINITY,
        Some("nan") => f64::NAN,
        _ => value.as_f64().unwrap_or_else(|| panic!("{value} is no number")),
    }
}

/// All numbers of nested lists, in order.
fn flat(value: &Value) -> Vec<f64> {
    match value {
        Value::Array(items) => items.iter().flat_map(flat).collect(),
        other => vec![number(other)],
    }
}

/// Says which documented differences a test met.
fn report(test: &str, met: &BTreeSet<&'static str>) {
    met.iter().for_each(|row| eprintln!("{test}: differs on purpose: {row}"));
}
