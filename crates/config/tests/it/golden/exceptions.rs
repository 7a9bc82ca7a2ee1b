//! THE table of deliberate differences from DeepSpeed 0.14.1. Each row is explained in `docs/differences.md` under the
//! same name. Rows look at inputs and behaviour, never at the names of cases, so another recorded set is judged alike.

use ferrospeed_config::{Code, Config};
use serde_json::Value;

use super::Outcome;

/// One of our errors: its path and kind.
type Finding = (String, Code);

/// A kind of error with which we refuse what DeepSpeed accepts.
pub(crate) struct Refusal {
    /// Its heading in `docs/differences.md`.
    pub(crate) name: &'static str,
    covers: fn(&Value, &Finding) -> bool,
}

/// Whether a row is about a recorded case.
pub(crate) type AppliesTo = fn(&Value) -> bool;

/// What we refuse and DeepSpeed accepts. Every error of ours must be covered by a row.
pub(crate) const REFUSALS: &[Refusal] = &[
    Refusal { name: "Unknown keys are errors", covers: |_, (_, code)| *code == Code::UnknownKey },
    Refusal {
        name: "Duplicate keys are refused in every form",
        covers: |case, (_, code)| *code == Code::DuplicateKey && case["input_kind"] == "string",
    },
    Refusal {
        name: "Types and ranges are checked in every section",
        covers: |case, (path, code)| {
            let checked_by_deepspeed =
                path.starts_with("zero_optimization.") && !is_null_in_zero_section(case, path);
            [Code::WrongType, Code::NotAChoice, Code::OutOfRange].contains(code) && !checked_by_deepspeed
        },
    },
    Refusal {
        name: "Required parameters are asked for when the file is read",
        covers: |_, (_, code)| *code == Code::Missing,
    },
    Refusal {
        name: "Combinations that cannot run are refused when the file is read",
        covers: |_, (_, code)| *code == Code::UnsupportedCombination,
    },
    Refusal {
        name: "An `auto` that nothing fills in is an error",
        covers: |_, (_, code)| *code == Code::UnresolvedAuto,
    },
    Refusal {
        name: "Elasticity counts model replicas under model parallelism",
        covers: |case, (_, code)| *code == Code::Elasticity && has_model_parallelism(case),
    },
];

/// What we accept and DeepSpeed refuses.
pub(crate) const ACCEPTANCES: &[(&str, AppliesTo)] = &[
    ("`enabled` may be left out", |case| case["error"]["type"] == "KeyError"),
    ("Elasticity counts model replicas under model parallelism", has_model_parallelism),
];

/// Whether `null` was given for an option of the ZeRO section, by its own name or its alias.
fn is_null_in_zero_section(case: &Value, path: &str) -> bool {
    let whole = given(case);
    let section = if case["config"].is_object() { &case["config"] } else { &whole["zero_optimization"] };
    let option = path.trim_start_matches("zero_optimization.");
    [option.to_owned(), format!("stage3_{option}")]
        .iter()
        .any(|name| section.pointer(&format!("/{}", name.replace('.', "/"))).is_some_and(Value::is_null))
}

/// What a case was given, whether as a dictionary, a file or an argument.
fn given(case: &Value) -> Value {
    let Some(text) = case["input"].as_str() else { return case["input"].clone() };
    let read = Config::from_str("case", text).or_else(|_| Config::from_argument(text));
    read.map_or(Value::Null, |unresolved| unresolved.source().clone())
}

fn has_model_parallelism(case: &Value) -> bool {
    given(case)["elasticity"]["model_parallel_size"].as_u64().unwrap_or(1) > 1
}

/// Attributes whose value differs although both accept: the row's name, and the attribute.
pub(crate) const DIFFERENT_VALUES: &[(&str, &str, AppliesTo)] = &[
    ("`comms_logger.enabled` is obeyed", "comms_config", |case| {
        given(case)["comms_logger"].is_object() && given(case)["comms_logger"]["enabled"] != true
    }),
    ("The top-level `eigenvalue` section is read", "eigenvalue_", |case| {
        given(case)["eigenvalue"].is_object()
    }),
    ("`seq_parallel_communication_data_type` is accepted", "seq_parallel_communication_data_type", |case| {
        !given(case)["seq_parallel_communication_data_type"].is_null()
    }),
];

/// Whether a disagreement about acceptance is deliberate.
pub(crate) fn excuse(case: &Value, ours: &Outcome) -> bool {
    let recorded_accepts = case.get("error").is_none();
    match ours {
        Outcome::Accepted(_) => !recorded_accepts && ACCEPTANCES.iter().any(|(_, applies)| applies(case)),
        Outcome::Refused(_) => {
            let findings = ours.error_paths();
            let covered = |finding| REFUSALS.iter().any(|row| (row.covers)(case, finding));
            recorded_accepts && !findings.is_empty() && findings.iter().all(covered)
        }
    }
}

#[test]
fn every_exception_is_explained_in_the_manual() {
    let path = ferrospeed_testkit::golden::repository_root().join("docs/differences.md");
    let manual = std::fs::read_to_string(&path).expect("docs/differences.md");
    let names = REFUSALS.iter().map(|row| row.name).chain(ACCEPTANCES.iter().map(|row| row.0));
    let names = names.chain(DIFFERENT_VALUES.iter().map(|row| row.0));
    for name in names.chain(super::elasticity::DIFFERENCES.iter().map(|row| row.0)) {
        assert!(manual.contains(&format!("### {name}\n")), "docs/differences.md has no heading `{name}`");
    }
}
