//! Names of experiments, as DeepSpeed's autotuner has them.

use serde_json::{Map, Value};

/// Tuned in every space.
const ALWAYS: [&str; 2] = ["train_micro_batch_size_per_gpu", "gradient_accumulation_steps"];
/// Numbers above this are written with an exponent.
const PLAIN_LIMIT: f64 = 9000.0;

/// `z2_rbs5.0e+08_tmbspg8_gas2`: the initials of each tuned key, and its value unless those are omitted.
pub fn canonical_name(config: &Value, tuning_keys: &[&str], prefix: &str, omit_values: bool) -> String {
    let mut parts = Vec::new();
    if let Some(config) = config.as_object() {
        collect(config, tuning_keys, omit_values, &mut parts);
    }
    let name = parts.join("_");
    format!("{prefix}{}", if name.is_empty() { "exp" } else { &name })
}

fn collect(config: &Map<String, Value>, tuning_keys: &[&str], omit_values: bool, parts: &mut Vec<String>) {
    for (key, value) in config {
        let shorthand = match key.as_str() {
            "arg_mappings" => continue,
            "offload_param" => Some("op"),
            "offload_optimizer" => Some("oo"),
            _ => None,
        };
        if let Some(shorthand) = shorthand {
            parts.push(shorthand.to_owned());
            match value {
                Value::Object(section) if !omit_values => {
                    parts.extend(section.iter().map(|(key, value)| initials(key) + &short(value)));
                }
                Value::Null if !omit_values => parts.push("None".to_owned()),
                _ => {}
            }
        } else if let Value::Object(section) = value {
            collect(section, tuning_keys, omit_values, parts);
        } else if tuning_keys.contains(&key.as_str()) || ALWAYS.contains(&key.as_str()) {
            let value = if omit_values { String::new() } else { short(value) };
            parts.push(initials(key) + &value);
        }
    }
}

fn initials(key: &str) -> String {
    key.split('_').filter_map(|word| word.chars().next()).collect()
}

fn short(value: &Value) -> String {
    match value {
        Value::Bool(value) => if *value { "T" } else { "F" }.to_owned(),
        Value::Number(number) => match number.as_f64() {
            Some(large) if large > PLAIN_LIMIT => one_digit_exponent(large),
            _ => number.to_string(),
        },
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// `5.0e+08`.
fn one_digit_exponent(value: f64) -> String {
    let text = format!("{value:.1e}");
    match text.split_once('e') {
        Some((digits, exponent)) => format!("{digits}e+{exponent:0>2}"),
        None => text,
    }
}
