//! Every key that DeepSpeed 0.19.8 knows is known here: `scripts/peers/deepspeed_keys.py` wrote the list.

use ferrospeed_config::{Code, Config, Diagnostic, table};
use serde_json::{Map, Value, json};

fn fixture() -> Value {
    serde_json::from_str(include_str!("../deepspeed-keys.json")).expect("JSON")
}

/// A configuration that says nothing but this.
fn only(path: &str, value: &Value) -> Value {
    let inner = |value: Value, segment: &str| Value::Object(Map::from_iter([(segment.to_owned(), value)]));
    let mut whole = path.rsplit('.').fold(value.clone(), inner);
    if path != "train_batch_size" {
        whole["train_batch_size"] = 8.into();
    }
    whole
}

fn findings(config: &Value) -> Vec<Diagnostic> {
    Config::from_value("ds_config", config).expect("readable").report().all().to_vec()
}

fn is_about_the_value(finding: &Diagnostic) -> bool {
    use Code::{NotAChoice, OutOfRange, UnknownKey, WrongType};
    matches!(finding.code, UnknownKey | WrongType | NotAChoice | OutOfRange)
}

#[test]
fn every_key_of_deepspeed_is_known_and_takes_its_values() {
    let fixture = fixture();
    let keys = fixture["keys"].as_object().expect("keys");
    assert!(keys.len() > 200, "{} keys", keys.len());
    let mut wrong = Vec::new();
    for (path, value) in keys {
        wrong.extend(findings(&only(path, value)).into_iter().filter(is_about_the_value));
    }
    let wrong: Vec<String> = wrong.iter().map(ToString::to_string).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The option at a path, by any of its names.
fn find(path: &str) -> &'static table::Key {
    let mut keys = table::ROOT;
    let mut found = None;
    for segment in path.split('.') {
        let key = keys.iter().find(|key| key.name == segment || key.aliases.contains(&segment));
        let key = key.unwrap_or_else(|| panic!("{path}: there is no {segment}"));
        keys = key.children().map_or(&[], |(keys, _)| keys);
        found = Some(key);
    }
    found.expect("a path has a segment")
}

#[test]
fn a_key_that_does_not_act_says_so_by_name() {
    let fixture = fixture();
    for (path, value) in fixture["keys"].as_object().expect("keys") {
        let key = find(path);
        let default: Value = serde_json::from_str(key.default).expect("JSON");
        // What always happens is asked for, by the key or by its section.
        let asks = |status: table::Status, below: &Value| match status {
            table::Status::Always { value: asked, .. } => {
                serde_json::from_str::<Value>(asked).expect("JSON") == *below
            }
            _ => false,
        };
        let (above, name) = path.rsplit_once('.').unwrap_or(("", path));
        let of_section = json!({ name: value });
        let is_so = asks(key.status, value) || !above.is_empty() && asks(find(above).status, &of_section);
        let asks_for_nothing = *value == default || value.as_object().is_some_and(Map::is_empty);
        if key.status == table::Status::Implemented || is_so || asks_for_nothing || key.deprecated.is_some() {
            continue;
        }
        // A section says it once for all of its keys; one that is switched on by `enabled` only then.
        let mut config = only(path, value);
        let section = path.split('.').next().unwrap_or_default();
        if let Some(Value::Object(section)) = config.get_mut(section)
            && path != "zero_optimization.stage"
            && find(path.split('.').next().unwrap_or_default())
                .children()
                .is_some_and(|(keys, _)| keys.iter().any(|key| key.name == "enabled"))
        {
            section.insert("enabled".into(), true.into());
        }
        let said = findings(&config).iter().any(|finding| {
            matches!(finding.code, Code::NoEffect | Code::UnsupportedCombination)
                && (path.starts_with(&finding.path) || finding.path.starts_with(section))
        });
        assert!(said, "{path} = {value}: accepted in silence");
    }
}

#[test]
fn optimizers_and_schedules_of_deepspeed_are_known_by_name() {
    let fixture = fixture();
    for name in fixture["optimizers"].as_array().expect("names") {
        let config = json!({ "train_batch_size": 8, "optimizer": { "type": name } });
        assert!(!findings(&config).iter().any(is_about_the_value), "{name}");
    }
    for (name, params) in fixture["schedules"].as_object().expect("names") {
        for param in params.as_array().expect("parameters") {
            let mut params = Map::new();
            params.insert(param.as_str().expect("a name").to_owned(), Value::Null);
            let config = json!({ "train_batch_size": 8, "scheduler": { "type": name, "params": params } });
            let unknown = findings(&config).iter().any(|finding| finding.code == Code::UnknownKey);
            assert!(!unknown, "{name}: {param}");
        }
    }
}
