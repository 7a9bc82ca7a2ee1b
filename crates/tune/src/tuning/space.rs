//! The spaces of each ZeRO stage: what a configuration starts from, which keys are varied, all combinations.

use serde_json::{Map, Value, json};

/// What the ZeRO section of an experiment starts from.
pub fn template(stage: u8, hidden_size: Option<u64>) -> Map<String, Value> {
    let mut section = Map::from_iter([("stage".to_owned(), Value::from(stage))]);
    let mut add = |values: Value| {
        if let Value::Object(values) = values {
            section.extend(values);
        }
    };
    if stage >= 1 {
        add(json!({"reduce_bucket_size": 500_000_000, "allgather_bucket_size": 500_000_000}));
    }
    if stage >= 2 {
        add(json!({
            "allgather_partitions": true, "overlap_comm": false, "reduce_scatter": true,
            "contiguous_gradients": false,
        }));
    }
    if stage >= 3 {
        add(json!({
            "stage3_max_live_parameters": 1_000_000_000, "stage3_max_reuse_distance": 1_000_000_000,
            "stage3_prefetch_bucket_size": 500_000_000, "stage3_param_persistence_threshold": 1_000_000,
            "stage3_gather_16bit_weights_on_model_save": false, "sub_group_size": 1_000_000_000_000u64,
        }));
        if let Some(width) = hidden_size {
            let square = width.saturating_mul(width);
            add(json!({
                "reduce_bucket_size": square,
                "stage3_prefetch_bucket_size": (square as f64 * 0.9) as u64,
                "stage3_param_persistence_threshold": width.saturating_mul(10),
            }));
        }
    }
    section
}

/// The values that each key of a stage's section may take.
pub fn ranges(stage: u8) -> Map<String, Value> {
    let mut section = Map::from_iter([("stage".to_owned(), Value::from(stage))]);
    let mut add = |values: Value| {
        if let Value::Object(values) = values {
            section.extend(values);
        }
    };
    let sizes = json!([50_000_000, 500_000_000, 1_000_000_000]);
    if stage >= 1 {
        add(json!({"reduce_bucket_size": sizes, "allgather_bucket_size": sizes}));
    }
    if stage >= 2 {
        add(json!({
            "overlap_comm": [true, false], "reduce_scatter": [false, true],
            "contiguous_gradients": [false, true],
        }));
    }
    if stage >= 3 {
        add(json!({"allgather_partitions": [true, false]}));
    }
    section
}

/// More than this no search gets through; the rest is left out.
const MAX_COMBINATIONS: usize = 1 << 16;

/// Every choice of one value for each list, in the order of keys, the last key varying fastest. `optimizer` and sections whose lists
/// are values (`compression_training`, `sparse_attention`) are taken as they are.
/// Equal combinations are one.
pub fn combinations(space: &Value) -> Vec<Value> {
    let mut all = expand(space);
    let mut seen = std::collections::BTreeSet::new();
    all.retain(|config| seen.insert(config.to_string()));
    all
}

/// Whether lists under a key are values and no choices.
fn is_whole(key: &str) -> bool {
    ["optimizer", "compression_training", "sparse_attention"].contains(&key)
}

fn expand(space: &Value) -> Vec<Value> {
    match space {
        Value::Object(section) => {
            let mut all = vec![Map::new()];
            for (key, value) in section {
                let choices = if is_whole(key) { vec![value.clone()] } else { expand(value) };
                let with = |config: &Map<String, Value>, choice: &Value| {
                    let mut config = config.clone();
                    config.insert(key.clone(), choice.clone());
                    config
                };
                all = all
                    .iter()
                    .flat_map(|config| choices.iter().map(|choice| with(config, choice)))
                    .take(MAX_COMBINATIONS)
                    .collect();
            }
            all.into_iter().map(Value::Object).collect()
        }
        Value::Array(choices) => choices.clone(),
        other => vec![other.clone()],
    }
}

/// A configuration with the first value of each list.
pub fn first_values(space: &Value) -> Value {
    match space {
        Value::Object(section) => {
            let first = |(key, value): (&String, &Value)| {
                let value = if is_whole(key) { value.clone() } else { first_values(value) };
                (key.clone(), value)
            };
            Value::Object(section.iter().map(first).collect())
        }
        Value::Array(choices) => choices.first().cloned().unwrap_or(Value::Null),
        other => other.clone(),
    }
}

/// Writes the keys of `over` over those of `under`, section by section.
pub fn overlay(under: &mut Value, over: &Value) {
    match (under, over) {
        (Value::Object(under), Value::Object(over)) => {
            for (key, value) in over {
                overlay(under.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
        (under, over) => *under = over.clone(),
    }
}
