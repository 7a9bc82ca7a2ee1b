//! Whether a run goes on as the model that it was. Heads, angles and norms leave no trace in the shapes of weights: another
//! model of the same shapes would take them and compute something else.

use std::collections::BTreeSet;
use std::path::Path;

use ferrospeed_checkpoint::manifest::MANIFEST_FILE;
use ferrospeed_checkpoint::{Manifest, resolve};
use ferrospeed_models::decoder::FeedForward;
use ferrospeed_models::{DecoderConfig, ModelConfig, WindowRule};
use serde_json::Value;

use crate::checkpoint::AdapterState;
use crate::error::{Result, TrainError};
use crate::resume::Starts;

impl Starts {
    /// Refuses a model, by its `config.json`, that is another than the first checkpoint's. What cannot be read is told when it
    /// is loaded.
    pub fn check_model(&self, model: &Value) -> Result<()> {
        let Some((dir, tag)) = self.candidates.first() else { return Ok(()) };
        let Ok(path) = resolve(dir, Some(tag)) else { return Ok(()) };
        match Manifest::read(&path.join(MANIFEST_FILE)) {
            Ok(manifest) => check_same(&path, &manifest.client_state["model_config"], model),
            Err(_) => Ok(()),
        }
    }
}

/// Refuses a model that would compute something else with the weights of a checkpoint.
pub(crate) fn check_same(checkpoint: &Path, before: &Value, now: &Value) -> Result<()> {
    let differences = differences(before, now, forget_training);
    match differences.is_empty() {
        true => Ok(()),
        false => Err(TrainError::AnotherModel { checkpoint: checkpoint.to_path_buf(), differences }),
    }
}

/// Refuses adapters that would compute something else with the parameters of a checkpoint, or on other weights.
pub(crate) fn check_adapter(
    checkpoint: &Path,
    before: Option<&AdapterState>,
    now: Option<&AdapterState>,
) -> Result<()> {
    let (Some(before), Some(now)) = (before, now) else { return Ok(()) };
    let mut differences = Vec::new();
    // What is dropped is of training, and where the model lies is its directory's business: its weights tell it.
    let is_told = |key: &&String| !["lora_dropout", "base_model_name_or_path"].contains(&key.as_str());
    let keys: BTreeSet<&String> = [&before.config, &now.config]
        .into_iter()
        .filter_map(Value::as_object)
        .flat_map(|fields| fields.keys())
        .collect();
    for key in keys.into_iter().filter(is_told) {
        let [then, here] = [&before.config[key], &now.config[key]];
        if then != here {
            differences.push(format!("adapter: {key}: {then} -> {here}"));
        }
    }
    if before.weights != now.weights {
        differences
            .push("model.path: its weights are not those that the adapters were trained on".to_owned());
    }
    match differences.is_empty() {
        true => Ok(()),
        false => Err(TrainError::AnotherModel { checkpoint: checkpoint.to_path_buf(), differences }),
    }
}

/// What has changed of how the same model is trained, dropout say.
pub(crate) fn changes(before: &Value, now: &Value) -> Vec<String> {
    differences(before, now, forget_start)
}

/// Leaves out what weights do not depend on any more.
fn forget_start(config: &mut DecoderConfig) {
    (config.init_std, config.output_init_std) = (0.0, 0.0);
}

/// Leaves out what is no part of what a model computes.
fn forget_training(config: &mut DecoderConfig) {
    forget_start(config);
    config.max_tokens = 0;
    (config.embedding_dropout, config.attention_dropout, config.residual_dropout) = (0.0, 0.0, 0.0);
    if let FeedForward::Mixture(mixture) = &mut config.feed_forward {
        mixture.balance_loss = 0.0;
    }
}

type Forget = fn(&mut DecoderConfig);

/// Every key that makes a difference, with both values. What is written in another way and means the same makes none.
fn differences(before: &Value, now: &Value, forget: Forget) -> Vec<String> {
    let (Some(saved), Some(own)) = (read(before, forget), read(now, forget)) else { return Vec::new() };
    if saved == own {
        return Vec::new();
    }
    let keys: BTreeSet<&String> =
        [before, now].into_iter().filter_map(Value::as_object).flat_map(|fields| fields.keys()).collect();
    let differing: Vec<&String> = keys.into_iter().filter(|key| before.get(key) != now.get(key)).collect();
    let matters = |key: &&String| {
        let mut swapped = now.clone();
        if let Some(fields) = swapped.as_object_mut() {
            fields.remove(*key);
            fields.extend(before.get(*key).map(|value| ((*key).clone(), value.clone())));
        }
        read(&swapped, forget).as_ref() != Some(&own)
    };
    let alone: Vec<&String> = differing.iter().copied().filter(matters).collect();
    // Two keys may say the same, and one of them makes no difference then.
    let named = if alone.is_empty() { differing } else { alone };
    let value = |of: &Value, key: &str| of.get(key).map_or("not given".to_owned(), Value::to_string);
    named.into_iter().map(|key| format!("{key}: {} -> {}", value(before, key), value(now, key))).collect()
}

fn read(config: &Value, forget: Forget) -> Option<DecoderConfig> {
    match ModelConfig::from_value(config, WindowRule::default()) {
        Ok(ModelConfig::Decoder(mut config)) => {
            forget(&mut config);
            Some(*config)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn keys_that_make_another_model_are_told_apart_from_those_that_do_not() {
        let before = json!({
            "model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "rms_norm_eps": 0.001,
            "max_position_embeddings": 64, "hidden_act": "silu",
        });
        let with = |changes: Value| {
            let mut config = before.clone();
            config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
            config
        };
        let refused = |changes: Value| differences(&before, &with(changes), forget_training);
        let other = refused(json!({"rope_theta": 5e5, "rms_norm_eps": 0.002, "torch_dtype": "float32"}));
        assert_eq!(other, ["rms_norm_eps: 0.001 -> 0.002", "rope_theta: not given -> 500000.0"]);
        let heads = refused(json!({"num_attention_heads": 4, "num_key_value_heads": 4}));
        assert_eq!(heads.len(), 2, "{heads:?}");
        let same = json!({
            "torch_dtype": "bfloat16", "use_cache": false, "transformers_version": "4.1", "bos_token_id": 3,
            "rope_theta": 1e4, "attention_dropout": 0.1, "initializer_range": 0.5, "max_position_embeddings": 128,
        });
        assert_eq!(refused(same.clone()), [""; 0]);
        let told = changes(&before, &with(same));
        assert_eq!(told, ["attention_dropout: not given -> 0.1", "max_position_embeddings: 64 -> 128"]);
    }
}
