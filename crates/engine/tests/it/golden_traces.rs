//! Recorded runs of the whole engine, micro-batch by micro-batch: losses, flags, counters, rates, weights, gradients.

use std::sync::Arc;

use super::common::on_ranks;
use ferrospeed_comm::World;
use ferrospeed_config::{AutoValues, Config};
use ferrospeed_engine::{Engine, EngineError, Options, Setup, StepReport, initialize_model};
use ferrospeed_nn::{Init, Linear};
use ferrospeed_tensor::ops;
use ferrospeed_tensor::store::ParamSource;
use ferrospeed_tensor::{DType, Param, Tensor};
use ferrospeed_testkit::close::assert_close;
use ferrospeed_testkit::golden::golden;
use ferrospeed_zero::access::Which;
use serde_json::Value;

/// Where we differ from what was recorded, by what the configuration asks for. `docs/differences.md` says why.
const EXCEPTIONS: [(&str, fn(&Value) -> bool, Ours); 4] = [
    (
        "fp16 trains on the CPU, which DeepSpeed refuses there",
        |case| case["config"]["fp16"]["enabled"] == true && case["error"]["type"] == "ValueError",
        Ours::Trains,
    ),
    (
        "immediate_grad_update trains; DeepSpeed's wrapper fails on an attribute it never set",
        |case| case["config"]["bf16"]["immediate_grad_update"] == true && case["error"].is_object(),
        Ours::Trains,
    ),
    (
        "torch's schedules run in every stage; torch refuses DeepSpeed's wrappers as optimizers",
        |case| {
            let name = case["config"]["scheduler"]["type"].as_str();
            name.is_some_and(|name| !OWN_SCHEDULES.contains(&name)) && case["error"]["type"] == "TypeError"
        },
        Ours::Trains,
    ),
    (
        "a norm is reported in every stage and precision, unscaled",
        |case| case["trace"].is_array(),
        Ours::ReportsMore,
    ),
];

const OWN_SCHEDULES: [&str; 5] = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"];

#[derive(Clone, Copy, PartialEq)]
enum Ours {
    Trains,
    ReportsMore,
}

fn differs(case: &Value, how: Ours) -> bool {
    EXCEPTIONS.iter().any(|(_, applies, ours)| *ours == how && applies(case))
}

fn floats(value: &Value) -> Vec<f32> {
    match value {
        Value::Array(items) => items.iter().flat_map(floats).collect(),
        Value::String(text) if text == "inf" => vec![f32::INFINITY],
        other => vec![other.as_f64().unwrap_or_else(|| panic!("{other} is no number")) as f32],
    }
}

/// First values by the last part of a parameter's name.
struct Given(Vec<(&'static str, Vec<f32>)>);

impl ParamSource for Given {
    fn load(
        &self,
        param: &Param,
        range: std::ops::Range<usize>,
        out: &mut [f32],
    ) -> ferrospeed_tensor::Result<()> {
        let (_, values) = self.0.iter().find(|(name, _)| param.name().ends_with(name)).unwrap();
        out.copy_from_slice(&values[range]);
        Ok(())
    }
}

fn start(
    case: &Value,
    world: World,
    init: &Init,
    source: &Given,
) -> Result<Engine, Box<dyn std::error::Error>> {
    let ranks = std::num::NonZeroU64::new(world.size() as u64).unwrap();
    let mut config = case["config"].clone();
    // torch's AdamW, which `torch_adam` chooses, decays by 0.01 where nothing is said; here nothing said is no decay.
    let params = &mut config["optimizer"]["params"];
    if params["torch_adam"] == true && params["weight_decay"].is_null() {
        params["weight_decay"] = 0.01.into();
    }
    if config["optimizer"]["type"].is_null() {
        config.as_object_mut().unwrap().remove("optimizer");
    }
    let (config, _) = Config::from_value("case", &config)?.resolve(ranks, &AutoValues::new())?;
    let setup = Setup::new(config, world, ferrospeed_cpu::with_threads(1));
    Ok(initialize_model(&setup, &init.parameters(), Options { source: Some(source), ..Default::default() })?)
}

/// With a warm-up DeepSpeed takes its first step at the optimizer's own rate: the steps of a recording are compared at
/// the rates they were taken with.
struct Rates {
    recorded: Vec<Vec<f64>>,
    scheduled: bool,
}

impl Rates {
    fn of(case: &Value) -> Rates {
        let rates =
            |step: &Value| step["lr"].as_array().unwrap().iter().map(|lr| lr.as_f64().unwrap()).collect();
        Rates {
            recorded: case["trace"].as_array().unwrap().iter().map(rates).collect(),
            scheduled: case["config"]["scheduler"].is_object(),
        }
    }

    /// Sets the rate that recorded step `index` was taken with.
    fn before(&self, engine: &mut Engine, case: &Value, index: usize) {
        if self.scheduled {
            let first = vec![case["config"]["optimizer"]["params"]["lr"].as_f64().unwrap()];
            engine.set_lr(if index == 0 { &first } else { &self.recorded[index - 1] });
        }
    }

    /// Compares the rates after recorded step `index`.
    fn after(&self, engine: &Engine, index: usize, what: &str) {
        let (found, recorded) = (engine.get_lr(), &self.recorded[index]);
        assert_eq!(found.len(), recorded.len(), "{what}");
        let close = found.iter().zip(recorded).all(|(found, recorded)| (found - recorded).abs() < 1e-12);
        assert!(close, "{what}: {found:?}, expected {recorded:?}");
    }
}

/// What is refused, wherever: by the configuration, by `initialize`, or by the first backward.
fn refusal(case: &Value, model: &Value) -> Option<String> {
    let (init, source) = (Init::root(), weights(model));
    let layer = Linear::new(&init, 3, 2, true);
    let mut engine = match start(case, World::solo(), &init, &source) {
        Ok(engine) => engine,
        Err(error) => return Some(error.to_string()),
    };
    let loss = engine.forward(|_| loss(&layer, &case["batches"][0], 1.0)).unwrap();
    let outcome = engine.backward(&loss).and_then(|_| engine.step());
    outcome.err().map(|error: EngineError| error.to_string())
}

fn weights(model: &Value) -> Given {
    Given(vec![("weight", floats(&model["weight"])), ("bias", floats(&model["bias"]))])
}

fn loss(layer: &Linear, batch: &Value, scale: f32) -> ferrospeed_tensor::Result<Tensor> {
    let device = ferrospeed_cpu::device();
    let x: Vec<f32> = floats(&batch[0]).into_iter().map(|value| value * scale).collect();
    let (x, y) = (Tensor::from_slice(&x, [x.len() / 3, 3], &device)?, floats(&batch[1]));
    let y = Tensor::from_slice(&y, [y.len() / 2, 2], &device)?;
    let out = layer.forward(&ops::cast(&x, layer.weight().dtype())?)?;
    ops::mean(&ops::square(&ops::sub(&ops::cast(&out, DType::F32)?, &y)?)?)
}

/// The CSV files that the engine writes, beside those of a recording.
struct Curves {
    folder: tempfile::TempDir,
}

impl Curves {
    /// Somewhere for the files of a case that has some; the case then names it.
    fn of(case: &Value) -> (Value, Option<Curves>) {
        let mut case = case.clone();
        if case["csv_files"].as_object().is_none_or(|files| files.is_empty()) {
            return (case, None);
        }
        let folder = tempfile::tempdir().unwrap();
        case["config"]["csv_monitor"]["output_path"] = folder.path().to_str().unwrap().into();
        (case, Some(Curves { folder }))
    }

    fn compare(&self, case: &Value, tolerance: f32) {
        for (name, recorded) in case["csv_files"].as_object().unwrap() {
            let written = std::fs::read_to_string(self.folder.path().join(name))
                .unwrap_or_else(|error| panic!("{}: {name}: {error}", case["id"]));
            let rows = |text: &str| -> Vec<(String, String)> {
                let lines = text.strip_suffix("\r\n").expect("lines end as DeepSpeed's do").split("\r\n");
                lines
                    .map(|line| line.split_once(',').expect("two columns"))
                    .map(|(x, y)| (x.into(), y.into()))
                    .collect()
            };
            let (written, recorded) = (rows(&written), rows(recorded.as_str().unwrap()));
            assert_eq!(written[0], recorded[0], "{}: {name}: the header", case["id"]);
            assert_eq!(written.len(), recorded.len(), "{}: {name}", case["id"]);
            for ((x, y), (their_x, their_y)) in written.iter().zip(&recorded).skip(1) {
                assert_eq!(x, their_x, "{}: {name}", case["id"]);
                let (y, their_y): (f32, f32) = (y.parse().unwrap(), their_y.parse().unwrap());
                assert!(
                    (y - their_y).abs() <= tolerance * their_y.abs().max(1.0),
                    "{}: {name}: {y}, {their_y}",
                    case["id"]
                );
            }
        }
    }
}

fn check_trace(case: &Value, model: &Value) {
    let (case, curves) = Curves::of(case);
    let (case, curves, model) = (Arc::new(case), Arc::new(curves), Arc::new(model.clone()));
    let ranks = case["world_size"].as_u64().unwrap() as usize;
    on_ranks(ranks, move |world| {
        let (rank, id) = (world.rank(), case["id"].as_str().unwrap());
        let (init, source) = (Init::root(), weights(&model));
        let layer = Linear::new(&init, 3, 2, true);
        let mut engine =
            start(&case, world, &init, &source).unwrap_or_else(|error| panic!("{id} is refused: {error}"));
        let tolerance = if case["config"]["bf16"]["enabled"] == true
            || case["communication_data_type"] != case["data_types"][0]
        {
            1e-2
        } else {
            1e-5
        };
        let near = |what: &str, found: &[f32], recorded: &Value| {
            assert_close(&format!("{id}: {what}"), found, &floats(recorded), tolerance, tolerance);
        };
        let rates = Rates::of(&case);
        for (index, step) in case["trace"].as_array().unwrap().iter().enumerate() {
            let what = |what: &str| format!("micro-batch {index}: {what}");
            assert_eq!(
                Value::from(engine.is_gradient_accumulation_boundary()),
                step["boundary"],
                "{id} {index}"
            );
            rates.before(&mut engine, &case, index);
            let arguments = &step["forward_kwargs"];
            if arguments["pld_theta"].is_number() {
                let theta = engine.pld_theta().unwrap();
                assert!(
                    (theta - arguments["pld_theta"].as_f64().unwrap()).abs() < 1e-12,
                    "{id}: {index}: {theta}"
                );
            }
            if arguments["curriculum_seqlen"].is_number() {
                assert_eq!(
                    engine.curriculum_difficulty(),
                    arguments["curriculum_seqlen"].as_u64(),
                    "{id}: {index}"
                );
            }
            let scale = if rank == 1 && case["options"]["scale_batch"] == true { 2.0 } else { 1.0 };
            let batch = &case["batches"][index * ranks + rank];
            let computed = engine.forward(|_| loss(&layer, batch, scale)).unwrap();
            let returned = engine.backward(&computed).unwrap();
            if rank == 0 {
                near(&what("loss"), &[computed.item().unwrap()], &step["loss"]);
                near(&what("what backward returns"), &[returned], &step["backward_return"]);
            }
            for (name, param) in [("grad_w", layer.weight()), ("grad_b", layer.bias().unwrap())] {
                if step[name].is_array() {
                    near(&what(name), &engine.store().full(param, Which::Gradient).unwrap(), &step[name]);
                }
            }
            engine.step().unwrap();
            assert_eq!(Value::from(engine.was_step_applied()), step["step_applied"], "{id} {index}");
            for (key, found) in [
                ("global_steps", engine.global_steps()),
                ("global_samples", engine.global_samples()),
                ("micro_steps", engine.micro_steps()),
                ("skipped_steps", engine.skipped_steps()),
            ] {
                assert_eq!(Value::from(found), step[key], "{id}: micro-batch {index}: {key}");
            }
            rates.after(&engine, index, &format!("{id}: micro-batch {index}: rates"));
            if let Some(betas) = step["mom"][0].as_array() {
                assert_eq!(
                    serde_json::json!(engine.get_mom()[0]),
                    Value::from(betas.clone()),
                    "{id} {index}"
                );
            }
            if step["pld_theta"].is_number() {
                // Recorded after the step: what the next forward pass is given.
                let theta = engine.pld_theta().unwrap();
                assert!(
                    (theta - step["pld_theta"].as_f64().unwrap()).abs() < 1e-12,
                    "{id}: {index}: {theta}"
                );
            }
            near(&what("weight"), &engine.store().full_as_read(layer.weight()).unwrap(), &step["weight"]);
            near(&what("bias"), &engine.store().full_as_read(layer.bias().unwrap()).unwrap(), &step["bias"]);
            match (step["global_grad_norm"].as_f64(), engine.global_grad_norm()) {
                (Some(recorded), Some(norm)) => near(&what("norm"), &[norm as f32], &recorded.into()),
                (Some(recorded), None) => panic!("{id}: micro-batch {index}: no norm, expected {recorded}"),
                (None, found) => {
                    assert!(found.is_none() || differs(&case, Ours::ReportsMore), "{id} {index}")
                }
            }
        }
        if let (Some(curves), 0) = (&*curves, rank) {
            curves.compare(&case, tolerance);
        }
    });
}

#[test]
fn golden_train_traces_match_their_recordings() {
    let file = "engine/train_traces.json";
    let Some(recorded) = golden().json(file) else { return };
    golden().each_case(file, 26, |case| {
        let id = case["id"].as_str().unwrap();
        let refused = case["error"].is_object();
        if refused && !differs(case, Ours::Trains) {
            assert!(refusal(case, &recorded["model"]).is_some(), "{id} trains: {}", case["config"]);
        } else if refused {
            let why = refusal(case, &recorded["model"]);
            assert!(why.is_none(), "{id} is refused: {why:?}");
        } else {
            check_trace(case, &recorded["model"]);
        }
    });
}

/// How many times longer our step is than DeepSpeed's on a step on which the loss scale grows by `grown`. It divides by
/// the scale that it has just raised: a gradient that is not clipped comes out `grown` times too short, and one is clipped
/// only if it is still too long then. Otherwise the scale cancels out.
fn longer_than_recorded(norm: f64, limit: Option<f64>, grown: f64) -> f64 {
    let limit = limit.filter(|limit| *limit > 0.0).unwrap_or(f64::INFINITY);
    if norm == 0.0 { grown } else { norm.min(limit) / (norm / grown).min(limit) }
}

/// The vector of the fp16 recordings, and its product with an input.
fn check_fp16(case: &Value) {
    let (id, init) = (case["id"].as_str().unwrap(), Init::root());
    let source = Given(vec![("weight", vec![0.5, -1.0, 2.0, 0.25])]);
    let layer = Linear::new(&init, 4, 1, false);
    let mut config = case.clone();
    // The recordings ran on one rank whatever batch they name.
    config["config"]["gradient_accumulation_steps"] = 1.into();
    let mut engine = start(&config, World::solo(), &init, &source)
        .unwrap_or_else(|error| panic!("{id} is refused: {error}"));
    assert_eq!(Some(engine.loss_scale()), case["initial_scale"].as_f64(), "{id}: the first scale");
    let wrapper = case["optimizer_class"].as_str().unwrap().starts_with("FP16_");
    let (rates, weight) = (Rates::of(case), layer.weight());
    let mut before = engine.store().full(weight, Which::Weight).unwrap();
    let mut recorded_before = before.clone();
    let mut same_scale = true;
    for (index, step) in case["trace"].as_array().unwrap().iter().enumerate() {
        let number = |key: &str| step[key].as_f64().unwrap();
        rates.before(&mut engine, case, index);
        // The fp16 wrappers grow and shrink by machines of their own; here one machine serves all stages. What they
        // have in common is compared: the scale until it first moves, and everything that does not depend on it.
        same_scale &= !wrapper || engine.loss_scale() == number("scale_used");
        if same_scale {
            assert_eq!(engine.loss_scale(), number("scale_used"), "{id}: step {index}: scale");
        }
        let input =
            Tensor::from_slice(&floats(&case["inputs"][index]), [1, 4], &ferrospeed_cpu::device()).unwrap();
        let loss = engine
            .forward(|_| ops::sum(&layer.forward(&ops::cast(&input, weight.dtype())?)?))
            .unwrap_or_else(|error| panic!("{id}: {error}"));
        engine.backward(&loss).unwrap();
        let report = engine.step().unwrap();
        let applied = matches!(report, StepReport::Applied { .. });
        assert_eq!(Value::from(applied), step["step_applied"], "{id}: step {index}");
        assert_eq!(Value::from(!applied), step["overflow"], "{id}: step {index}");
        for (key, found) in [
            ("global_steps", engine.global_steps()),
            ("global_samples", engine.global_samples()),
            ("micro_steps", engine.micro_steps()),
            ("skipped_steps", engine.skipped_steps()),
        ] {
            assert_eq!(Value::from(found), step[key], "{id}: step {index}: {key}");
        }
        rates.after(&engine, index, &format!("{id}: step {index}: rates"));
        let after = engine.store().full(weight, Which::Weight).unwrap();
        let recorded = floats(&step["weight"]);
        if !recorded.is_empty() {
            let grown = (number("scale_after") / number("scale_used")).max(1.0) as f32;
            let norm = engine.global_grad_norm().filter(|_| applied).unwrap_or_default();
            let longer =
                longer_than_recorded(norm, case["config"]["gradient_clipping"].as_f64(), f64::from(grown))
                    as f32;
            for at in 0..4 {
                let (own, theirs) = (after[at] - before[at], (recorded[at] - recorded_before[at]) * longer);
                assert!((own - theirs).abs() < 2e-3, "{id}: step {index}: moved {own}, expected {theirs}");
            }
            (before, recorded_before) = (after, recorded);
            if let (Some(norm), true) = (engine.global_grad_norm(), applied) {
                // The wrappers report it scaled, stage 3 by the doubled scale.
                let scale = if wrapper { number("scale_used") } else { 1.0 };
                let stage3 =
                    if case["config"]["zero_optimization"]["stage"] == 3 { f64::from(grown) } else { 1.0 };
                let expected = step["global_grad_norm"].as_f64().unwrap() / scale * stage3;
                assert!(
                    (norm - expected).abs() < 1e-3 * expected,
                    "{id}: step {index}: {norm}, expected {expected}"
                );
            }
        }
    }
}

#[test]
fn golden_fp16_traces_match_their_recordings() {
    golden().each_case("engine/fp16_traces.json", 8, |case| {
        let id = case["id"].as_str().unwrap();
        if case["error"].is_object() {
            let init = Init::root();
            let _layer = Linear::new(&init, 4, 1, false);
            let source = Given(vec![("weight", vec![0.0; 4])]);
            let started = start(case, World::solo(), &init, &source);
            assert_eq!(started.is_ok(), differs(case, Ours::Trains), "{id}: {}", case["config"]);
        } else {
            check_fp16(case);
        }
    });
}
