//! Whole configurations: dictionaries, texts and arguments.

use ferrospeed_config::{Config, ConfigError, Unresolved};
use ferrospeed_testkit::golden::golden;
use serde_json::Value;

use super::{Outcome, attributes, exceptions, same};

#[test]
fn golden_parsed_configurations() {
    let cases = golden().cases("config/parse.json");
    let Some(defaults) =
        cases.iter().find(|case| case.get("note").is_some()).map(|case| case["expect"].clone())
    else {
        assert!(cases.is_empty(), "no case lists the defaults");
        return;
    };
    golden().each_case("config/parse.json", 100, |case| {
        let ours = Outcome::of(read(case), &case["world_size"]);
        match (&ours, case.get("expect")) {
            (Outcome::Accepted(config), Some(expect)) => compare(case, config, &defaults, expect),
            (Outcome::Refused(_), None) => {}
            _ => assert!(exceptions::excuse(case, &ours), "{case}: {}", ours.describe()),
        }
    });
}

fn read(case: &Value) -> Result<Unresolved, ConfigError> {
    let text = || case["input"].as_str().expect("text");
    match case["input_kind"].as_str() {
        Some("dict") => Config::from_value("case", &case["input"]),
        Some("file_text") => Config::from_str("case", text()),
        Some("string") => Config::from_argument(text()),
        kind => panic!("unknown input kind {kind:?}"),
    }
}

fn compare(case: &Value, config: &Config, defaults: &Value, expect: &Value) {
    let found = attributes::all(config, &case["input"], case["world_size"].as_u64().unwrap_or(1));
    let found = attributes::without_newer(&found);
    let names =
        defaults.as_object().expect("defaults").keys().chain(expect.as_object().expect("expect").keys());
    for name in names {
        let wanted = expect.get(name).unwrap_or(&defaults[name]);
        if same(&found[name], wanted) {
            continue;
        }
        let excused = exceptions::DIFFERENT_VALUES
            .iter()
            .any(|(_, prefix, applies)| name.starts_with(prefix) && applies(case));
        assert!(excused, "{}: {name} is {} instead of {wanted}", case["id"], found[name]);
    }
}
