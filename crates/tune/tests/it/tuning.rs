//! Searches, over experiments that are simulated: DeepSpeed's recorded ones, and our own.

use std::convert::Infallible;

use ferrospeed_testkit::cases::Cases;
use ferrospeed_testkit::golden::golden;
use ferrospeed_tune::tuning::deepspeed::{Options, search};
use ferrospeed_tune::tuning::naming::canonical_name;
use ferrospeed_tune::tuning::space::{combinations, first_values, ranges};
use ferrospeed_tune::tuning::tuner::{Order, TunerOptions, tune};
use ferrospeed_tune::tuning::{
    Experiment, Laboratory, Metric, ModelInfo, Precision, Records, instantiation_bytes,
};
use serde_json::{Value, json};

/// Runs experiments by a formula, and remembers their order.
struct Simulated<F> {
    formula: F,
    ran: Vec<(Experiment, Option<f64>)>,
}

impl<F: Fn(&Value) -> Option<f64>> Simulated<F> {
    fn new(formula: F) -> Simulated<F> {
        Simulated { formula, ran: Vec::new() }
    }
}

impl<F: Fn(&Value) -> Option<f64>> Laboratory for Simulated<F> {
    type Error = Infallible;

    fn run(&mut self, experiments: &[Experiment]) -> Result<Vec<Option<f64>>, Infallible> {
        let values: Vec<_> =
            experiments.iter().map(|experiment| (self.formula)(&experiment.ds_config)).collect();
        self.ran.extend(experiments.iter().cloned().zip(values.iter().copied()));
        Ok(values)
    }
}

fn options_of(case: &Value) -> Options {
    let section = &case["user_config"]["autotuning"];
    let number = |key: &str, default: u64| section[key].as_u64().unwrap_or(default);
    Options {
        metric: Metric::Throughput,
        fast: section["fast"] != false,
        max_train_batch_size: section["max_train_batch_size"].as_u64(),
        max_micro_batch: number("max_train_micro_batch_size_per_gpu", 1024),
        min_micro_batch: number("min_train_micro_batch_size_per_gpu", 1),
        num_micro_batches: number("num_tuning_micro_batch_sizes", 3),
        model_parallel: number("mp_size", 1),
        tuner: TunerOptions::default(),
        ranks: case["num_gpus"].as_u64().unwrap(),
        device_bytes: case["gpu_mem"].as_u64().unwrap(),
        model: ModelInfo {
            parameters: case["num_params"].as_u64().unwrap(),
            activation_bytes: case["activation_mem_per_gpu"].as_u64().unwrap(),
            hidden_size: None,
        },
    }
}

fn precision_of(case: &Value) -> Precision {
    if case["user_config"]["fp16"]["enabled"] == true { Precision::Half } else { Precision::Full }
}

/// The recordings' model of a machine.
fn throughput(case: &Value, config: &Value) -> Option<f64> {
    let stage = config["zero_optimization"]["stage"].as_u64().unwrap();
    let number = |value: &Value| value.as_f64().unwrap();
    let room = number(&case["gpu_mem"]) - number(&case["instantiation_mem"][stage.to_string()]);
    let limit = (room / number(&case["activation_mem_per_gpu"])).floor();
    let size = number(&config["train_micro_batch_size_per_gpu"]);
    let zero = &config["zero_optimization"];
    let overlap = if zero["overlap_comm"] == true { 1.03 } else { 1.0 };
    let bucket = if zero["reduce_bucket_size"] == 50_000_000 { 1.01 } else { 1.0 };
    let value =
        1000.0 * size / (size + number(&case["peak"])) * (1.0 - 0.02 * stage as f64) * overlap * bucket;
    (size <= 0.97 * limit).then(|| (value * 1e4).round_ties_even() / 1e4)
}

fn best(records: &Records, space: &str) -> Value {
    let best = if space == "global" { records.best() } else { records.best_of(space) };
    best.map_or(Value::Null, |best| {
        json!({"name": best.experiment.name, "metric": best.value, "num_experiments": best.experiments})
    })
}

/// DeepSpeed tries micro-batches that are larger than the largest batch with no accumulation at all, a batch of nothing. Here
/// every step has one micro-batch.
fn ours_takes_a_step(case: &Value, recorded: &Value) -> Value {
    let mut ours = recorded.clone();
    if recorded["gas"] == 0 {
        let name = recorded["name"].as_str().unwrap().replace("_gas0_", "_gas1_");
        let model_parallel = case["user_config"]["autotuning"]["mp_size"].as_u64().unwrap_or(1);
        let ranks = case["num_gpus"].as_u64().unwrap() / model_parallel;
        (ours["name"], ours["gas"]) = (name.into(), 1.into());
        ours["train_batch_size"] = (recorded["mbs"].as_u64().unwrap() * ranks).into();
    }
    ours
}

#[test]
fn experiments_of_no_accumulation_are_compared_as_those_of_one() {
    let case = json!({ "num_gpus": 4, "user_config": { "autotuning": { "mp_size": 2 } } });
    let none =
        json!({ "name": "z1_gas0_tmbspg8", "gas": 0, "mbs": 8, "train_batch_size": 0, "throughput": 2.5 });
    let one =
        json!({ "name": "z1_gas1_tmbspg8", "gas": 1, "mbs": 8, "train_batch_size": 16, "throughput": 2.5 });
    assert_eq!(ours_takes_a_step(&case, &none), one);
    assert_eq!(ours_takes_a_step(&case, &one), one);
    // And that is what a search does whose largest batch is smaller than a micro-batch on every rank.
    let (mut case, mut options) = full_case("gridsearch");
    case["user_config"]["train_micro_batch_size_per_gpu"] = json!([8]);
    options.max_train_batch_size = Some(4);
    let mut laboratory = Simulated::new(|_: &Value| Some(1.0));
    let Ok(_) = search(&case["user_config"], &options, &mut laboratory);
    assert!(!laboratory.ran.is_empty());
    for (experiment, _) in &laboratory.ran {
        assert_ne!(experiment.ds_config["gradient_accumulation_steps"], 0, "{experiment:?}");
        assert_ne!(experiment.ds_config["train_batch_size"], 0, "{experiment:?}");
    }
}

#[test]
fn golden_simulated_tunings_run_the_same_experiments_in_the_same_order() {
    golden().each_case("autotuning/simulated_tuning.json", 6, |case| {
        let title = case["title"].as_str().unwrap();
        let mut laboratory = Simulated::new(|config: &Value| throughput(case, config));
        let Ok(records) = search(&case["user_config"], &options_of(case), &mut laboratory);
        let ran: Vec<Value> = laboratory
            .ran
            .iter()
            .map(|(experiment, value)| {
                let config = &experiment.ds_config;
                json!({
                    "name": experiment.name,
                    "stage": config["zero_optimization"]["stage"],
                    "mbs": config["train_micro_batch_size_per_gpu"],
                    "gas": config["gradient_accumulation_steps"],
                    "train_batch_size": config["train_batch_size"],
                    "throughput": value,
                })
            })
            .collect();
        let recorded: Vec<Value> = case["experiments_in_order"]
            .as_array()
            .unwrap()
            .iter()
            .map(|one| ours_takes_a_step(case, one))
            .collect();
        for (index, (ours, theirs)) in ran.iter().zip(&recorded).enumerate() {
            assert_eq!(ours, theirs, "{title}: experiment {index}");
        }
        assert_eq!(ran.len(), recorded.len(), "{title}");
        for (space, recorded) in case["best_space_records"].as_object().unwrap() {
            let ours = best(&records, space);
            let theirs = recorded["name"].as_str().map(|name| name.replace("_gas0_", "_gas1_"));
            assert_eq!(ours["name"].as_str(), theirs.as_deref(), "{title}: {space}");
            assert_eq!(ours["metric"].as_f64(), recorded["metric"].as_f64(), "{title}: {space}");
            assert_eq!(ours["num_experiments"], recorded["num_experiments"], "{title}: {space}");
        }
        let precision = precision_of(case);
        for (stage, recorded) in case["instantiation_mem"].as_object().unwrap() {
            let options = options_of(case);
            let ours = instantiation_bytes(
                options.model.parameters,
                precision,
                stage.parse().unwrap(),
                options.ranks,
                options.model_parallel,
            );
            assert_eq!(Some(ours), recorded.as_f64(), "{title}: stage {stage}");
        }
    });
}

/// Bytes in words. Thresholds are powers of ten and units powers of two, but for the K of 1014: DeepSpeed's.
fn memory_to_string(bytes: u64, postfix: &str) -> String {
    let kib = 1024f64;
    let units =
        [(1e12, kib.powi(4), "T"), (1e9, kib.powi(3), "G"), (1e6, kib.powi(2), "M"), (1e3, 1014.0, "K")];
    in_units(bytes as f64, &units, postfix)
}

/// A count in words.
fn number_to_string(count: f64) -> String {
    in_units(count, &[(1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e3, 1e3, "K")], "")
}

fn in_units(value: f64, units: &[(f64, f64, &str)], postfix: &str) -> String {
    match units.iter().find(|(from, _, _)| value >= *from) {
        Some((_, unit, name)) => {
            format!("{:?} {name}{postfix}", (value / unit * 100.0).round_ties_even() / 100.0)
        }
        None => format!("{value} "),
    }
}

#[test]
fn golden_names_and_numbers_are_deepspeeds() {
    const FILE: &str = "autotuning/functions.json";
    let set = golden();
    let Some(recorded) = set.json(FILE) else { return };
    let mut cases = Cases::of(FILE);
    for case in set.rows(FILE, &recorded, "canonical_name") {
        cases.check(case, || {
            let keys: Vec<&str> =
                case["tuning_keys"].as_array().unwrap().iter().map(|key| key.as_str().unwrap()).collect();
            let prefix = case["prefix"].as_str().unwrap();
            let name = canonical_name(&case["config"], &keys, prefix, case["omit_val"] == true);
            assert_eq!(name, case["name"].as_str().unwrap());
        });
    }
    for row in set.rows(FILE, &recorded, "memory_to_string") {
        cases.check(row, || {
            assert_eq!(memory_to_string(row[0].as_u64().unwrap(), row[1].as_str().unwrap()), row[2]);
        });
    }
    for row in set.rows(FILE, &recorded, "number_to_string") {
        cases.check(row, || assert_eq!(number_to_string(row[0].as_f64().unwrap()), row[1]));
    }
    for (name, count) in set.named_rows(FILE, &recorded, "get_all_configs_count") {
        cases.check(&name, || {
            let stage = name.rsplit('_').next().unwrap().parse().unwrap();
            assert_eq!(Value::from(combinations(&Value::Object(ranges(stage))).len()), count);
        });
    }
    cases.finish(&golden(), 43);
}

/// A case of the recordings with other keys tuned too.
fn full_case(order: &str) -> (Value, Options) {
    let case = json!({
        "user_config": {
            "zero_optimization": {"stage": [2], "overlap_comm": true},
            "fp16": {"enabled": true},
            "autotuning": {"enabled": true, "fast": false},
        },
        "num_params": 350_000_000, "activation_mem_per_gpu": 536_870_912u64, "gpu_mem": 17_179_869_184u64,
        "num_gpus": 4, "peak": 8, "instantiation_mem": {"2": 2_275_000_000.0},
    });
    let mut options = options_of(&case);
    options.tuner = TunerOptions { order: Order::named(order).unwrap(), ..TunerOptions::default() };
    (case, options)
}

#[test]
fn a_search_that_is_not_fast_tries_the_other_keys_and_keeps_what_the_user_fixed() {
    for order in ["gridsearch", "random", "model_based"] {
        let (case, options) = full_case(order);
        let mut laboratory = Simulated::new(|config: &Value| throughput(&case, config));
        let Ok(records) = search(&case["user_config"], &options, &mut laboratory);
        let space = "z2_rbs_abs_rs_cg_tmbspg";
        assert!(records.spaces().any(|name| name == space), "{:?}", records.spaces().collect::<Vec<_>>());
        let tried: Vec<_> =
            records.experiments().filter(|(experiment, _)| experiment.name.contains("rbs")).collect();
        assert!((5..=50).contains(&tried.len()), "{order}: {}", tried.len());
        assert!(tried.iter().all(|(experiment, _)| {
            let zero = &experiment.ds_config["zero_optimization"];
            zero["overlap_comm"] == true && zero["reduce_scatter"].is_boolean()
        }));
        // The fast part had no overlap, so any of these is better.
        assert!(records.best().unwrap().experiment.name.contains("rbs"), "{order}");
        assert!(records.table().contains("| global"), "{}", records.table());
    }
}

fn listed(values: &[Option<f64>]) -> Vec<Experiment> {
    let experiment = |index: usize| Experiment {
        name: format!("e{index}"),
        ds_config: json!({"train_micro_batch_size_per_gpu": index, "b": index % 3}),
    };
    (0..values.len()).map(experiment).collect()
}

fn by_index(values: &[Option<f64>]) -> impl Fn(&Value) -> Option<f64> + '_ {
    |config| values[config["train_micro_batch_size_per_gpu"].as_u64().unwrap() as usize]
}

#[test]
fn a_tuner_stops_when_nothing_better_comes_or_its_trials_are_used_up() {
    let values: Vec<_> = [1.0, 3.0, 2.0, 1.0, 0.5, 0.2, 0.1, 9.0].map(Some).to_vec();
    let mut laboratory = Simulated::new(by_index(&values));
    let options = TunerOptions { early_stopping: 3, ..TunerOptions::default() };
    let Ok(tried) = tune(&options, Metric::Throughput, &listed(&values), &mut laboratory);
    // The best was the second, and three more count from it.
    assert_eq!(tried.len(), 4);
    let options = TunerOptions { num_trials: 2, ..TunerOptions::default() };
    let Ok(tried) =
        tune(&options, Metric::Throughput, &listed(&values), &mut Simulated::new(by_index(&values)));
    assert_eq!(tried.len(), 2);
    // Times are better small.
    let options = TunerOptions { early_stopping: 8, ..TunerOptions::default() };
    let Ok(tried) = tune(&options, Metric::Latency, &listed(&values), &mut Simulated::new(by_index(&values)));
    assert_eq!(tried.len(), 8);
}

#[test]
fn a_model_finds_the_best_sooner_than_the_list_and_survives_a_space_that_fails() {
    let values: Vec<Option<f64>> = (0..60).map(|index| Some(f64::from(index))).collect();
    let options = TunerOptions { order: Order::ModelBased, early_stopping: 60, num_trials: 20, seed: 3 };
    let Ok(tried) =
        tune(&options, Metric::Throughput, &listed(&values), &mut Simulated::new(by_index(&values)));
    let best = tried.iter().filter_map(|(_, value)| *value).fold(0.0, f64::max);
    assert!(best >= 57.0, "{best}");
    assert_eq!(tried[0].0.name, "e0", "the first of the list is measured");
    let mut names: Vec<_> = tried.iter().map(|(experiment, _)| experiment.name.clone()).collect();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), 20, "each once");
    let failing = vec![None; 10];
    for order in [Order::Grid, Order::Random, Order::ModelBased] {
        let options = TunerOptions { order, ..TunerOptions::default() };
        let Ok(tried) =
            tune(&options, Metric::Throughput, &listed(&failing), &mut Simulated::new(by_index(&failing)));
        assert_eq!(tried.len(), 5, "{order:?}");
    }
}

#[test]
fn lists_that_are_values_of_their_sections_are_no_choices() {
    let config = json!({
        "train_micro_batch_size_per_gpu": [1, 2],
        "compression_training": {"layer_reduction": {"teacher_layer": [1, 3]}},
        "sparse_attention": {"local_window_blocks": [1, 2], "global_block_indices": []},
    });
    let whole = |config: &Value| {
        assert_eq!(config["compression_training"]["layer_reduction"]["teacher_layer"], json!([1, 3]));
        assert_eq!(config["sparse_attention"]["local_window_blocks"], json!([1, 2]));
        assert_eq!(config["sparse_attention"]["global_block_indices"], json!([]));
    };
    let all = combinations(&config);
    assert_eq!(all.len(), 2);
    all.iter().for_each(whole);
    whole(&first_values(&config));
}
