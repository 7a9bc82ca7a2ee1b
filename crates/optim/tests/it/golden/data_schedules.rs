use std::collections::BTreeSet;

use ferrospeed_optim::curriculum::{Curriculum, CurriculumScheduler};
use ferrospeed_optim::progressive_layer_drop::ProgressiveLayerDrop;
use ferrospeed_optim::random_ltd::TokenSchedule;
use ferrospeed_testkit::golden::golden;

use super::{flat, report};

/// Where we differ, by what a case does.
const NEVER_BELOW_THE_MINIMUM: &str = "difficulties never fall below their configured minimum";

#[test]
fn golden_curriculum_difficulties() {
    let mut met = BTreeSet::new();
    golden().each_case("engine/curriculum.json", 23, |case| {
        let what = format!("{}: {}", case["id"], case["config"]);
        let curriculum = Curriculum::from_section(&case["config"], None);
        if !case["error"].is_null() {
            let message = curriculum.expect_err(&what).to_string();
            assert!(message.starts_with("curriculum_learning: "), "{what}: {message}");
            return;
        }
        let curriculum = curriculum.unwrap_or_else(|error| panic!("{what}: {error}"));
        let mut scheduler = CurriculumScheduler::new(curriculum.clone());
        let min = case["config"]["min_difficulty"].as_u64().expect("a minimum");
        let grows = matches!(curriculum, Curriculum::Growing(_));
        for (step, want) in flat(&case["steps"]).into_iter().zip(flat(&case["expect"])) {
            let step = step as u64;
            let got =
                if case["mode"] == "get" { curriculum.difficulty(step) } else { scheduler.update(step) };
            let want = if grows && want < min as f64 {
                met.insert(NEVER_BELOW_THE_MINIMUM);
                min
            } else {
                want as u64
            };
            assert_eq!(got, want, "{what}, step {step}");
        }
    });
    report("golden_curriculum_difficulties", &met);
}

#[test]
fn golden_tokens_of_layers() {
    let mut met = BTreeSet::new();
    golden().each_case("engine/random_ltd.json", 4, |case| {
        let what = format!("{}: {}", case["id"], case["config"]);
        let mut section = case["config"].clone();
        let layers = section["random_ltd_layer_num"].as_u64().expect("a number of layers");
        section["random_ltd_layer_id"] = (0..layers).collect();
        let schedule = TokenSchedule::from_section(&section);
        if !case["error"].is_null() {
            let message = schedule.expect_err(&what).to_string();
            assert!(message.contains("only fixed_linear is known"), "{what}: {message}");
            return;
        }
        let schedule = schedule.unwrap_or_else(|error| panic!("{what}: {error}"));
        let min = section["random_ltd_schedule"]["min_value"].as_u64().expect("a minimum");
        let mut latest = 0;
        for (step, want) in flat(&case["steps"]).into_iter().zip(case["expect"].as_array().expect("lengths"))
        {
            if (step as u64) < latest {
                met.insert("a length follows from its step, also of one that comes before");
                continue;
            }
            latest = step as u64;
            let want = want[0].as_u64().expect("a length");
            if want < min {
                met.insert(NEVER_BELOW_THE_MINIMUM);
            }
            assert_eq!(schedule.tokens(latest), want.max(min), "{what}, step {step}");
        }
    });
    report("golden_tokens_of_layers", &met);
}

#[test]
fn golden_layer_keep_probabilities() {
    golden().each_case("engine/pld.json", 4, |case| {
        let (theta, gamma) = (flat(&case["theta"])[0], flat(&case["gamma"])[0]);
        let drop = ProgressiveLayerDrop::new(theta, gamma).expect("recorded values are valid");
        assert_eq!(Some(drop.keep_probability(0)), case["initial"].as_f64());
        for (step, want) in flat(&case["steps"]).into_iter().zip(flat(&case["expect"])) {
            let got = drop.keep_probability(step as u64);
            assert!((got - want).abs() <= 1e-15, "{}: step {step}: {got} for {want}", case["id"]);
        }
    });
    assert!(ProgressiveLayerDrop::new(1.5, 0.1).is_err());
    assert!(ProgressiveLayerDrop::new(0.5, f64::NAN).is_err());
}
