use std::collections::BTreeSet;

use ferrospeed_config::{PerGroup, Scheduler as Configured};
use ferrospeed_optim::schedule::{Scheduler, SchedulerState};
use ferrospeed_optim::{GroupOptions, OptimError, Optimizer};
use ferrospeed_testkit::golden::golden;
use serde_json::{Value, json};

use super::{flat, report, resolve};

/// Where we differ, by what a case does.
const WARMUP_STARTS_AT_ITS_START: &str = "warm-up schedules set the rate before the first step";
const RATES_FOLLOW_THE_COUNTER: &str = "rates follow the counter as soon as it is set or loaded";
const BETA2_STAYS: &str = "OneCycle leaves the second beta alone and starts at its largest momentum";
const COSINE_STAYS_DOWN: &str = "WarmupCosineLR stays at its end";
const UNKNOWN_WARMUP_REFUSED: &str = "an unknown warmup_type is refused when the file is read";

fn configured(kind: &str, params: &Value) -> Result<Configured, String> {
    resolve(json!({ "scheduler": { "type": kind, "params": params } }))
        .map_err(|error| error.to_string())
        .map(|config| config.scheduler.expect("a scheduler was given"))
}

fn optimizer(name: &str) -> Optimizer {
    let config = resolve(json!({ "optimizer": { "type": name } })).unwrap_or_else(|error| panic!("{error}"));
    Optimizer::from_config(&config.optimizer.expect("an optimizer was given")).expect("it runs").0
}

fn groups(rates: &[f64]) -> Vec<GroupOptions> {
    rates.iter().map(|&lr| GroupOptions { lr, weight_decay: 0.0, betas: [0.9, 0.999] }).collect()
}

fn close(what: &str, got: f64, want: f64) {
    assert!((got - want).abs() <= 1e-12 * want.abs() + 1e-300, "{what}: got {got:e}, expected {want:e}");
}

#[test]
fn golden_rates_after_every_step() {
    let mut met = BTreeSet::new();
    golden().each_case("schedulers/lr_sequences.json", 35, |case| {
        let kind = case["scheduler"].as_str().expect("a name");
        let what = format!("{kind} {}", case["params"]);
        let mut params = case["params"].clone();
        let configured = match (configured(kind, &params), params["warmup_type"].as_str()) {
            (Ok(configured), _) => configured,
            (Err(_), Some(unknown)) if !["log", "linear"].contains(&unknown) => {
                // DeepSpeed falls back to "log": once that is written down, the rates must be the same.
                met.insert(UNKNOWN_WARMUP_REFUSED);
                params["warmup_type"] = json!("log");
                self::configured(kind, &params).unwrap_or_else(|error| panic!("{what}: {error}"))
            }
            (Err(error), _) => panic!("{what}: {error}"),
        };
        let optimizer = optimizer(case["optimizer"].as_str().expect("a name"));
        let groups = groups(&flat(&case["optimizer_group_lrs"]));
        let mut scheduler = Scheduler::from_config(&configured, &optimizer, &groups)
            .unwrap_or_else(|error| panic!("{what}: {error}"));
        check_start(&what, case, &scheduler, &mut met);
        if let Some(loaded) = case["loaded_last_batch_iteration"].as_i64() {
            scheduler
                .load(SchedulerState { last_batch_iteration: loaded, plateau: None, own: None })
                .expect("a valid counter");
            assert_eq!(scheduler.options(), scheduler.options_at(loaded), "{what}");
            met.insert(RATES_FOLLOW_THE_COUNTER);
        }
        let steps = case["lr_after_step"].as_array().expect("a list");
        for (step, expected) in steps.iter().enumerate() {
            match case["step_args"][step].as_i64() {
                Some(argument) => scheduler.step_to(argument).expect("a valid counter"),
                None => scheduler.step(),
            }
            check_step(
                &format!("{what}, step {step}"),
                case,
                step,
                expected,
                &configured,
                &scheduler,
                &mut met,
            );
        }
        let state = serde_json::to_value(scheduler.state()).expect("a counter is JSON");
        assert_eq!(state, case["state_dict"], "{what}");
    });
    report("golden_rates_after_every_step", &met);
}

fn check_start(what: &str, case: &Value, scheduler: &Scheduler, met: &mut BTreeSet<&'static str>) {
    let options = scheduler.options();
    let kind = case["scheduler"].as_str().unwrap_or_default();
    let rates = flat(&case["lr_after_init"]);
    if scheduler.last_batch_iteration() >= 0 {
        met.insert(RATES_FOLLOW_THE_COUNTER);
        assert_eq!(options, scheduler.options_at(scheduler.last_batch_iteration()), "{what}");
    } else if kind.starts_with("Warmup") {
        met.insert(WARMUP_STARTS_AT_ITS_START);
        assert_eq!(options, scheduler.options_at(0), "{what}");
    } else {
        for (group, want) in options.iter().zip(rates) {
            close(what, group.lr, want);
        }
    }
}

fn check_step(
    what: &str,
    case: &Value,
    step: usize,
    expected: &Value,
    configured: &Configured,
    scheduler: &Scheduler,
    met: &mut BTreeSet<&'static str>,
) {
    let options = scheduler.options();
    let past_cosine = match configured {
        Configured::WarmupCosineLr(params) => (scheduler.last_batch_iteration()
            >= params.total_num_steps as i64)
            .then_some(params.cos_min_ratio),
        _ => None,
    };
    let expected = flat(expected);
    assert_eq!(options.len(), expected.len(), "{what}");
    for (group, (options, want)) in options.iter().zip(expected).enumerate() {
        match past_cosine {
            Some(ratio) => {
                met.insert(COSINE_STAYS_DOWN);
                close(what, options.lr, ratio * flat(&case["optimizer_group_lrs"])[group]);
            }
            None => close(what, options.lr, want),
        }
        match case["beta1_after_step"].get(step) {
            Some(momentum) => {
                close(what, options.betas[0], flat(momentum)[0]);
                met.insert(BETA2_STAYS);
            }
            None => assert_eq!(options.betas[0], 0.9, "{what}"),
        }
        assert_eq!(options.betas[1], 0.999, "{what}");
    }
}

/// The rate that DeepSpeed's tuning takes for a configured schedule's own: the lowest of a range test, the highest of the others.
/// `None` where the rate is the optimizer's.
fn nominal_rate(configured: &Configured) -> Option<f64> {
    let first = |value: &PerGroup| match value {
        PerGroup::All(value) => Some(*value),
        PerGroup::Each(list) => list.first().copied(),
    };
    match configured {
        Configured::LrRangeTest(params) => first(&params.lr_range_test_min_lr),
        Configured::OneCycle(params) => Some(params.cycle_max_lr),
        Configured::WarmupLr(params) => first(params.warmup_max_lr.as_ref().expect("0.14.1 has a default")),
        Configured::WarmupDecayLr(params) => first(&params.warmup_max_lr),
        Configured::WarmupCosineLr(_) | Configured::Torch(_) | Configured::NotYet { .. } => None,
    }
}

#[test]
fn golden_rates_that_tuning_reads_from_a_configuration() {
    golden().each_case("schedulers/cli_args.json", 8, |case| {
        // The flags themselves are not ours: options are set with `--set scheduler.params.…`. What they produce is.
        let Some(config) = case["config"].as_object() else { return };
        let kind = config["type"].as_str().expect("a name");
        match configured(kind, &config["params"]) {
            Ok(configured) => {
                let want = case["lr_from_config"][0].as_f64();
                assert_eq!(nominal_rate(&configured), want, "{}", case["argv"]);
            }
            // DeepSpeed writes what its own schedules cannot use: -1 for "as the first", keys of another schedule.
            Err(error) => {
                let negative = config["params"]
                    .as_object()
                    .is_some_and(|params| params.values().any(|v| v.as_f64().is_some_and(|v| v < 0.0)));
                let lacks_total = kind == "WarmupDecayLR" || kind == "WarmupCosineLR";
                assert!(negative || lacks_total, "{}: {error}", case["argv"]);
            }
        }
    });
}

#[test]
fn golden_misuse_is_an_error_or_cannot_be_written() {
    let adam = optimizer("Adam");
    let two = groups(&[0.1, 0.1]);
    let lists = |kind: &str, params: Value| {
        let configured = configured(kind, &params).expect("lists are valid");
        Scheduler::from_config(&configured, &adam, &two).expect_err("three values for two groups")
    };
    golden().each_case("schedulers/errors.json", 8, |case| {
        match case["case"].as_str().unwrap_or_default() {
            "cosine total==warmup, step past warmup" => {
                // Not a division by zero: after the warm-up the schedule is at its end.
                let params = json!({ "total_num_steps": 10, "warmup_num_steps": 10, "cos_min_ratio": 0.25 });
                let configured = configured("WarmupCosineLR", &params).expect("valid");
                let scheduler = Scheduler::from_config(&configured, &adam, &two).expect("two groups");
                assert_eq!(scheduler.options_at(10)[0].lr, 0.25 * 0.1);
                assert!(scheduler.note().is_some_and(|note| note.contains("no step after the warm-up")));
            }
            "cosine unknown warmup_type" => {
                let params = json!({ "total_num_steps": 10, "warmup_type": "cubic" });
                assert!(configured("WarmupCosineLR", &params).is_err());
            }
            "warmup list length mismatch" => {
                let error = lists("WarmupLR", json!({ "warmup_min_lr": [0.0, 0.0, 0.0] }));
                assert_eq!(error, OptimError::GroupCount { key: "warmup_min_lr", given: 3, groups: 2 });
            }
            "range test list mismatch" => {
                let error = lists("LRRangeTest", json!({ "lr_range_test_min_lr": [0.1, 0.1, 0.1] }));
                assert_eq!(
                    error,
                    OptimError::GroupCount { key: "lr_range_test_min_lr", given: 3, groups: 2 }
                );
            }
            "get_last_lr before step" | "get_lr before step WarmupLR" | "value" => {
                // There are rates before the first step: those it will use.
                let configured = configured("WarmupLR", &json!({ "warmup_min_lr": 0.5 })).expect("valid");
                let scheduler = Scheduler::from_config(&configured, &adam, &two).expect("two groups");
                assert_eq!(scheduler.options().iter().map(|group| group.lr).collect::<Vec<_>>(), [0.5, 0.5]);
            }
            "non optimizer" => eprintln!("golden: 'non optimizer' cannot be written in Rust"),
            other => eprintln!("golden: schedulers/errors.json: '{other}' is not known here"),
        }
    });
}
