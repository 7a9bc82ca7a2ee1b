//! THE table of deliberate differences from DeepSpeed 0.14.1. Each row is explained in `docs/differences.md` under the
//! same name. Rows look at inputs and behaviour, never at the names of cases, so another recorded set is judged alike.

use ferrospeed_config::Code;
use serde_json::Value;

use super::Outcome;

/// One deliberate difference.
pub(crate) struct Exception {
    /// Its heading in `docs/differences.md`.
    pub(crate) name: &'static str,
    applies: fn(&Value, &Outcome) -> bool,
}

/// Whether a row is about a recorded case.
pub(crate) type AppliesTo = fn(&Value) -> bool;

/// Differences in what is accepted.
pub(crate) const EXCEPTIONS: &[Exception] = &[
    Exception {
        name: "Unknown keys are errors",
        applies: |case, ours| recorded_accepts(case) && all_codes(ours, &[Code::UnknownKey]),
    },
    Exception {
        name: "Duplicate keys are refused in every form",
        applies: |case, ours| {
            recorded_accepts(case) && case["input_kind"] == "string" && all_codes(ours, &[Code::DuplicateKey])
        },
    },
    Exception {
        name: "Types are checked in every section",
        applies: |case, ours| {
            let plain = |path: &String| !path.starts_with("zero_optimization.");
            recorded_accepts(case)
                && all_codes(ours, &[Code::WrongType, Code::NotAChoice])
                && ours.error_paths().iter().all(|(path, _)| plain(path))
        },
    },
    Exception {
        name: "Combinations that cannot run are refused when the file is read",
        applies: |case, ours| recorded_accepts(case) && all_codes(ours, &[Code::UnsupportedCombination]),
    },
    Exception {
        name: "An `auto` that nothing fills in is an error",
        applies: |case, ours| recorded_accepts(case) && all_codes(ours, &[Code::UnresolvedAuto]),
    },
    Exception {
        name: "`enabled` may be left out",
        applies: |case, ours| case["error"]["type"] == "KeyError" && matches!(ours, Outcome::Accepted(_)),
    },
];

/// Attributes whose value differs although both accept: the row's name, and the attribute.
pub(crate) const DIFFERENT_VALUES: &[(&str, &str, AppliesTo)] = &[
    ("`comms_logger.enabled` is obeyed", "comms_config", |case| {
        case["input"]["comms_logger"]["enabled"] == false
    }),
    ("The top-level `eigenvalue` section is read", "eigenvalue_", |case| {
        case["input"]["eigenvalue"].is_object()
    }),
    ("`seq_parallel_communication_data_type` is accepted", "seq_parallel_communication_data_type", |case| {
        !case["input"]["seq_parallel_communication_data_type"].is_null()
    }),
];

/// The exception that covers a disagreement about acceptance, if one does.
pub(crate) fn find(case: &Value, ours: &Outcome) -> Option<&'static Exception> {
    EXCEPTIONS.iter().find(|exception| (exception.applies)(case, ours))
}

fn recorded_accepts(case: &Value) -> bool {
    case.get("error").is_none()
}

fn all_codes(ours: &Outcome, allowed: &[Code]) -> bool {
    let codes = ours.codes();
    !codes.is_empty() && codes.iter().all(|code| allowed.contains(code))
}

#[test]
fn every_exception_is_explained_in_the_manual() {
    let path = ferrospeed_testkit::golden::repository_root().join("docs/differences.md");
    let manual = std::fs::read_to_string(&path).expect("docs/differences.md");
    let names = EXCEPTIONS.iter().map(|exception| exception.name);
    for name in names
        .chain(DIFFERENT_VALUES.iter().map(|row| row.0))
        .chain(super::elasticity::DIFFERENCES.iter().map(|row| row.0))
    {
        assert!(manual.contains(&format!("### {name}\n")), "docs/differences.md has no heading `{name}`");
    }
}
