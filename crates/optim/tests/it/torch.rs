//! Optimizers and schedules of the framework against recordings of it: `scripts/peers/torch_optimizers.py` made them.

use std::num::NonZeroU64;

use ferrospeed_config::{AutoValues, Config};
use ferrospeed_optim::own::{OwnOptimizer, Slices};
use ferrospeed_optim::schedule::Scheduler;
use ferrospeed_optim::{Copy16, Gradient, GroupOptions, Optimizer, Stretch};
use half::bf16;
use serde_json::{Value, json};

fn resolve(sections: Value) -> Config {
    let mut whole = json!({ "train_batch_size": 1 });
    whole.as_object_mut().unwrap().extend(sections.as_object().unwrap().clone());
    let read = Config::from_value("golden", &whole).unwrap();
    read.resolve(NonZeroU64::MIN, &AutoValues::new()).unwrap_or_else(|error| panic!("{whole}: {error}")).0
}

fn optimizer(kind: &Value, params: &Value) -> (Optimizer, GroupOptions) {
    let config = resolve(json!({ "optimizer": { "type": kind, "params": params } }));
    Optimizer::from_config(&config.optimizer.unwrap()).unwrap()
}

fn floats(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|value| value.as_f64().unwrap() as f32).collect()
}

fn close(what: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (index, (&got, &want)) in got.iter().zip(want).enumerate() {
        assert!((got - want).abs() <= 3e-6 * want.abs().max(1.0), "{what}[{index}]: {got}, not {want}");
    }
}

/// One step over weights that are cut at `cut`.
fn step(
    optimizer: &Optimizer,
    options: &GroupOptions,
    number: u64,
    weights: &mut [f32],
    gradient: &[f32],
    states: &mut [Vec<f32>],
    cut: usize,
) {
    let device = ferrospeed_cpu::device();
    for range in [0..cut, cut..weights.len()] {
        let mut stretch = Stretch {
            weights: &mut weights[range.clone()],
            gradient: Gradient::F32(&gradient[range.clone()]),
            gradient_factor: 1.0,
            states: states.iter_mut().map(|state| &mut state[range.clone()]).collect(),
            copy: Copy16::None,
            device: &device,
        };
        stretch.pass(&optimizer.pass(options, number));
    }
}

#[test]
fn optimizers_of_the_framework_follow_their_recordings() {
    let recorded: Value = serde_json::from_str(include_str!("../golden-torch/optimizers.json")).unwrap();
    let cases = recorded["cases"].as_array().unwrap();
    assert!(!cases.is_empty());
    for case in cases {
        let what = format!("{} {}", case["type"], case["params"]);
        let (optimizer, options) = optimizer(&case["type"], &case["params"]);
        let names = optimizer.state_names(&options);
        let mut weights = floats(&recorded["initial"]);
        let mut states = vec![vec![0.0; weights.len()]; names.len()];
        for (number, want) in case["steps"].as_array().unwrap().iter().enumerate() {
            let gradient = floats(&recorded["gradients"][number]);
            step(&optimizer, &options, number as u64 + 1, &mut weights, &gradient, &mut states, number % 6);
            close(&format!("{what}, step {number}"), &weights, &floats(want));
        }
        for (name, state) in names.iter().zip(&states) {
            close(&format!("{what}, {name}"), state, &floats(&case["state"][*name]));
        }
    }
}

#[test]
fn options_of_the_frameworks_implementation_change_nothing() {
    let plain = optimizer(&json!("RMSprop"), &json!({}));
    let with = json!({ "foreach": true, "capturable": true, "differentiable": true });
    assert_eq!(plain, optimizer(&json!("RMSprop"), &with));
    let plain = optimizer(&json!("AdamW"), &json!({}));
    assert_eq!(plain, optimizer(&json!("AdamW"), &json!({ "fused": true, "foreach": false })));
}

#[test]
fn schedules_of_the_framework_follow_their_recordings() {
    let recorded: Value = serde_json::from_str(include_str!("../golden-torch/schedules.json")).unwrap();
    let cases = recorded["cases"].as_array().unwrap();
    assert!(!cases.is_empty());
    for case in cases {
        let what = format!("{} {} {}", case["type"], case["params"], case["optimizer"]);
        let params = match case["optimizer"].as_str() {
            Some("SGD") => json!({ "lr": 0.1, "momentum": 0.9 }),
            _ => json!({ "lr": 0.1 }),
        };
        let (optimizer, options) = optimizer(&case["optimizer"], &params);
        let config = resolve(json!({ "scheduler": { "type": case["type"], "params": case["params"] } }));
        let configured = config.scheduler.unwrap();
        let made = || Scheduler::from_config(&configured, &optimizer, &[options]).unwrap();
        let mut scheduler = made();
        for (number, want) in case["rates"].as_array().unwrap().iter().enumerate() {
            let got = scheduler.options()[0];
            for (got, want) in [(got.lr, &want[0]), (got.betas[0], &want[1])] {
                let want = want.as_f64().unwrap();
                assert!((got - want).abs() <= 1e-9, "{what}, step {number}: {got}, not {want}");
            }
            scheduler.observe(recorded["metrics"][number].as_f64().unwrap());
            scheduler.step();
            // What is saved, as text, is all that is needed to go on.
            let saved = serde_json::to_string(&scheduler.state()).unwrap();
            scheduler = made();
            scheduler.load(serde_json::from_str(&saved).unwrap()).unwrap();
        }
    }
}

#[test]
fn a_schedule_made_from_functions_is_refused_with_the_reason() {
    for name in ["LambdaLR", "MultiplicativeLR"] {
        let config = json!({ "train_batch_size": 1, "scheduler": { "type": name, "params": {} } });
        let read = Config::from_value("test", &config).unwrap();
        let error = read.resolve(NonZeroU64::MIN, &AutoValues::new()).unwrap_err().to_string();
        assert!(error.contains("needs a function, which a file cannot hold"), "{error}");
    }
}

#[derive(Debug)]
struct Halving;

impl OwnOptimizer for Halving {
    fn name(&self) -> &'static str {
        "halving"
    }

    fn state_names(&self) -> &'static [&'static str] {
        &["seen"]
    }

    fn update(&self, slices: Slices<'_, '_>, options: &GroupOptions, step: u64) {
        let [seen] = slices.states else { panic!("one state") };
        for ((weight, gradient), seen) in slices.weights.iter_mut().zip(slices.gradient).zip(seen.iter_mut())
        {
            *seen += gradient;
            *weight = *weight / 2.0 - options.lr as f32 * *seen * step as f32;
        }
    }
}

#[test]
fn an_optimizer_of_ones_own_updates_weights_states_and_the_copy() {
    let (device, numel) = (ferrospeed_cpu::device(), 100_000);
    let optimizer = Optimizer::own(Halving);
    let options = GroupOptions { lr: 0.5, weight_decay: 0.0, betas: [0.0; 2] };
    let mut weights: Vec<f32> = (0..numel).map(|index| index as f32).collect();
    let (mut seen, mut copy) = (vec![1.0; numel], vec![bf16::ZERO; numel]);
    let gradient = vec![bf16::from_f32(3.0); numel];
    let mut stretch = Stretch {
        weights: &mut weights,
        gradient: Gradient::Bf16(&gradient),
        gradient_factor: 2.0,
        states: vec![&mut seen],
        copy: Copy16::Bf16(&mut copy),
        device: &device,
    };
    stretch.pass(&optimizer.pass(&options, 2));
    assert!(seen.iter().all(|&seen| seen == 7.0));
    assert!(weights.iter().enumerate().all(|(index, &weight)| weight == index as f32 / 2.0 - 7.0));
    assert!(weights.iter().zip(&copy).all(|(&weight, &copy)| copy == bf16::from_f32(weight)));
}
