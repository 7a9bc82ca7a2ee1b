//! What DeepSpeed's files hold beside tensors, as JSON: the configuration, the schedule, and which optimizer the states are of.
//!
//! A program may have handed DeepSpeed an optimizer and a schedule of torch's, as Hugging Face's Trainer does: then its
//! configuration names neither, and the files themselves say what they hold.

use std::collections::BTreeSet;

use serde_json::{Map, Value as Json, json};

use super::foreign::Tensor;
use crate::manifest::Kind;
use crate::pt::Value;

/// The configuration of a module file. What of it is no plain data is left out by its key.
pub(super) fn configuration(module: &Value) -> Json {
    let config = module.get("ds_config").and_then(|config| without_objects(config, "ds_config"));
    config.unwrap_or(Json::Null)
}

fn without_objects(value: &Value, at: &str) -> Option<Json> {
    let Some(pairs) = value.pairs() else {
        let plain = value.to_json();
        if plain.is_none() {
            tracing::warn!("'{at}' of the checkpoint is {} and is left out", value.kind());
        }
        return plain;
    };
    let named = pairs.iter().filter_map(|(key, value)| Some((key.to_json()?, value)));
    let named = named.filter_map(|(key, value)| {
        let key = key.as_str().map_or_else(|| key.to_string(), str::to_owned);
        let below = format!("{at}.{key}");
        Some((key, without_objects(value, &below)?))
    });
    Some(Json::Object(named.collect::<Map<String, Json>>()))
}

/// Where the schedule stands. DeepSpeed counts from -1 on, torch's schedules from 0.
pub(super) fn schedule(module: &Value) -> Option<Json> {
    let state = module.get("lr_scheduler")?;
    let of_torch = state.get("last_epoch").and_then(Value::as_f64);
    let is_plateau = state.get("num_bad_epochs").is_some();
    match (state.get("last_batch_iteration"), of_torch) {
        (None, Some(epoch)) if !is_plateau => Some(json!({ "last_batch_iteration": epoch as i64 - 1 })),
        _ => state.to_json().filter(Json::is_object),
    }
}

/// The engine's name of the optimizer that the states are of: as configured, or what states of these names are usually of.
pub(super) fn optimizer(configured: Option<String>, tensors: &[Tensor]) -> Option<String> {
    if configured.is_some() {
        return configured;
    }
    let states: BTreeSet<&str> = tensors
        .iter()
        .filter_map(|tensor| match &tensor.spec.kind {
            Kind::State(name) => Some(name.as_str()),
            _ => None,
        })
        .collect();
    let states: Vec<&str> = states.into_iter().collect();
    Some(match states[..] {
        [] => return None,
        ["exp_avg", "exp_avg_sq"] => "adam".to_owned(),
        ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"] => "amsgrad".to_owned(),
        ["exp_avg"] => "lion".to_owned(),
        ["momentum_buffer"] => "sgd".to_owned(),
        ["sum"] => "adagrad".to_owned(),
        // None of ours has it: who goes on is told what there is.
        _ => format!("an optimizer that is not named, with {}", states.join(", ")),
    })
}

/// The engine's name for a configured optimizer.
pub(super) fn optimizer_name(configured: &str) -> String {
    match configured.to_ascii_lowercase().as_str() {
        "adamw" | "adam" => "adam".to_owned(),
        other => other.to_owned(),
    }
}
