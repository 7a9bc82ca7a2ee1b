//! The ZeRO section.

use ferrospeed_config::{Code, Config};
use ferrospeed_testkit::golden::golden;
use serde_json::{Value, json};

use super::{Outcome, attributes, exceptions, same};

#[test]
fn golden_zero_sections() {
    let Some(document) = golden().json("config/zero.json") else { return };
    let defaults = Value::Object(golden().named_rows("config/zero.json", &document, "defaults"));
    golden().each_case("config/zero.json", 66, |case| {
        let input = json!({ "train_batch_size": 8, "zero_optimization": case["config"] });
        let ours = Outcome::of(Config::from_value("case", &input), &json!(1));
        match (&ours, case.get("expect")) {
            (Outcome::Accepted(config), Some(expect)) => compare(case, config, &defaults, expect),
            (Outcome::Refused(_), None) => compare_errors(case, &ours),
            _ => assert!(exceptions::excuse(case, &ours), "{case}: {}", ours.describe()),
        }
    });
}

fn compare(case: &Value, config: &Config, defaults: &Value, expect: &Value) {
    let found = attributes::zero(&config.to_json()["zero_optimization"], &case["config"]);
    for (name, default) in defaults.as_object().expect("defaults") {
        if expect["__removed__"].as_array().is_some_and(|removed| removed.contains(&json!(name))) {
            assert!(found.get(name).is_none(), "{}: `{name}` is still there", case["id"]);
            continue;
        }
        let wanted = expect.get(name).unwrap_or(default);
        assert!(same(&found[name], wanted), "{}: {name} is {} instead of {wanted}", case["id"], found[name]);
    }
}

/// Every recorded field error is among ours, with the same category.
fn compare_errors(case: &Value, ours: &Outcome) {
    let found = ours.error_paths();
    for error in case["error"]["errors"].as_array().unwrap_or(&Vec::new()) {
        // DeepSpeed reports a second error on `overlap_comm` whenever `stage` is wrong: an artefact of its validator.
        if error["kind"] == "assertion_error" && error["loc"] == json!(["overlap_comm"]) {
            continue;
        }
        let segments: Vec<&str> =
            error["loc"].as_array().expect("loc").iter().filter_map(Value::as_str).collect();
        let path = format!("zero_optimization.{}", segments.join("."));
        let codes: &[Code] = match error["kind"].as_str().expect("kind") {
            "value_error.extra" => &[Code::UnknownKey, Code::BothSpellings],
            "type_error.enum" => &[Code::NotAChoice, Code::WrongType],
            kind if kind.starts_with("value_error.number") => &[Code::OutOfRange],
            // `null` is no choice either.
            "type_error.none.not_allowed" => &[Code::WrongType, Code::NotAChoice],
            kind if kind.starts_with("type_error") => &[Code::WrongType],
            kind => panic!("{}: unknown kind {kind}", case["id"]),
        };
        // We name an option by its own name, DeepSpeed by the alias that was written.
        let own = path.replace("zero_optimization.stage3_", "zero_optimization.");
        let matched =
            found.iter().any(|(found, code)| (*found == path || *found == own) && codes.contains(code));
        assert!(matched, "{}: no {codes:?} at {path} in {}", case["id"], ours.describe());
    }
}
