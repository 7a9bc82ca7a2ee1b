use std::collections::BTreeSet;

use ferrospeed_optim::{Copy16, Gradient, GroupOptions, Optimizer, Stretch};
use ferrospeed_testkit::golden::golden;
use serde_json::{Map, Value, json};

use super::{flat, report, resolve};

/// Where we differ, by what a case does.
const LION_STANDS_STILL_AT_ZERO: &str = "Lion's update is zero where its direction is zero";
const ADAGRAD_USES_THE_DECAYED_GRADIENT: &str = "Adagrad's numerator is the gradient with its weight decay";

/// The configuration that gives the recorded optimizer.
fn configure(name: &str, hyper: &Map<String, Value>) -> Result<(Optimizer, GroupOptions), String> {
    let mut params = hyper.clone();
    params.remove("_scale");
    if let Some(mode) = params.remove("adamw_mode") {
        params.insert("adam_w_mode".into(), mode);
    }
    let kind = match name {
        "DeepSpeedCPUAdam" | "FusedAdam" => "Adam",
        "DeepSpeedCPULion" | "FusedLion" => "Lion",
        "DeepSpeedCPUAdagrad" => "Adagrad",
        "FusedLamb" => "Lamb",
        "torch.Adam" => {
            params.insert("adam_w_mode".into(), json!(false));
            "Adam"
        }
        "torch.AdamW" => {
            // The framework's own default.
            params.entry("weight_decay").or_insert(json!(0.01));
            "AdamW"
        }
        other => other.strip_prefix("torch.").unwrap_or(other),
    };
    let mut sections = json!({ "optimizer": { "type": kind, "params": params } });
    if kind == "Lamb" {
        sections["fp16"] = json!({ "enabled": true });
    }
    let config = resolve(sections).map_err(|error| error.to_string())?;
    let configured = config.optimizer.expect("an optimizer was given");
    Optimizer::from_config(&configured).ok_or_else(|| format!("{configured:?} does not run yet"))
}

/// One parameter with its states.
struct Parameter {
    weights: Vec<f32>,
    states: Vec<Vec<f32>>,
    steps: u64,
    lamb_coefficient: f64,
}

fn norm(values: &[f32]) -> f64 {
    values.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>().sqrt()
}

impl Parameter {
    fn step(&mut self, optimizer: &Optimizer, options: &GroupOptions, gradient: &[f32], factor: f32) {
        let device = ferrospeed_cpu::device();
        self.steps += 1;
        let mut directions = vec![0.0; self.weights.len()];
        let mut stretch = Stretch {
            weights: &mut self.weights,
            gradient: Gradient::F32(gradient),
            gradient_factor: factor,
            states: self.states.iter_mut().map(Vec::as_mut_slice).collect(),
            copy: Copy16::None,
            device: &device,
        };
        let Optimizer::Lamb(lamb) = optimizer else {
            return stretch.pass(&optimizer.pass(options, self.steps));
        };
        stretch.states.push(&mut directions);
        stretch.apply(&lamb.direction(options));
        self.lamb_coefficient = lamb.coefficient(norm(&self.weights), norm(&directions));
        let mut stretch = Stretch {
            weights: &mut self.weights,
            gradient: Gradient::F32(&directions),
            gradient_factor: 1.0,
            states: Vec::new(),
            copy: Copy16::None,
            device: &device,
        };
        stretch.apply(&lamb.apply(options, self.steps, self.lamb_coefficient));
    }
}

fn close(what: &str, got: &[f32], want: &[f64]) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (index, (&got, &want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(got) - want).abs();
        assert!(error <= 2e-6 * want.abs().max(1.0), "{what}[{index}]: got {got}, expected {want}");
    }
}

/// A recorded rule that we deliberately do not follow in this step: its row, and the elements it is about.
fn recorded_defect(
    name: &str,
    options: &GroupOptions,
    parameter: &Parameter,
    gradient: &[f32],
) -> Option<(&'static str, Vec<bool>)> {
    match name {
        "DeepSpeedCPULion" | "FusedLion" => {
            let beta = options.betas[0];
            let still = |(&m, &g): (&f32, &f32)| beta * f64::from(m) + (1.0 - beta) * f64::from(g) == 0.0;
            let about: Vec<bool> = parameter.states[0].iter().zip(gradient).map(still).collect();
            about.contains(&true).then_some((LION_STANDS_STILL_AT_ZERO, about))
        }
        "DeepSpeedCPUAdagrad" if options.weight_decay > 0.0 => {
            Some((ADAGRAD_USES_THE_DECAYED_GRADIENT, vec![true; gradient.len()]))
        }
        _ => None,
    }
}

fn follow(file: &str, known: usize, met: &mut BTreeSet<&'static str>) {
    golden().each_case(file, known, |case| {
        let name = case["optimizer"].as_str().expect("a name");
        let hyper = case["hyper"].as_object().expect("options");
        let what = format!("{name} {}", case["hyper"]);
        let (optimizer, mut options) =
            configure(name, hyper).unwrap_or_else(|error| panic!("{what}: {error}"));
        let factor = hyper.get("_scale").map_or(1.0, |scale| 1.0 / flat(scale)[0]) as f32;
        let states = optimizer.state_names(&options).len();
        let mut parameters: Vec<Parameter> = case["initial_params"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|values| {
                let weights: Vec<f32> = flat(values).into_iter().map(|value| value as f32).collect();
                let states = vec![vec![0.0; weights.len()]; states];
                Parameter { weights, states, steps: 0, lamb_coefficient: 0.0 }
            })
            .collect();
        for (step, recorded) in case["steps"].as_array().expect("a list").iter().enumerate() {
            if let Some(lr) = case["lr_per_step"].get(step) {
                options.lr = flat(lr)[0];
            }
            for (p, parameter) in parameters.iter_mut().enumerate() {
                let what = format!("{what}, step {step}, parameter {p}");
                let want = flat(&recorded["params"][p]);
                if !recorded["grads"][p].is_null() {
                    let gradient: Vec<f32> =
                        flat(&recorded["grads"][p]).into_iter().map(|value| value as f32).collect();
                    let defect = recorded_defect(name, &options, parameter, &gradient);
                    let before = parameter.weights.clone();
                    parameter.step(&optimizer, &options, &gradient, factor);
                    if let Some((row, about)) = defect {
                        met.insert(row);
                        check_defect(&what, row, &about, &options, &before, &gradient, parameter, &want);
                        // From here on the recording is about other weights: go on from those.
                        parameter.weights = want.iter().map(|&value| value as f32).collect();
                    }
                }
                close(&what, &parameter.weights, &want);
                if let Some(k) = recorded["lamb_coeffs"].get(p) {
                    close(&format!("{what} coefficient"), &[parameter.lamb_coefficient as f32], &flat(k));
                }
            }
        }
        for (p, (parameter, recorded)) in
            parameters.iter().zip(case["final_state"].as_array().expect("a list")).enumerate()
        {
            for (state, values) in optimizer.state_names(&options).iter().zip(&parameter.states) {
                // DeepSpeed's Adagrad calls its sum by Adam's name.
                let recorded = recorded.get(*state).unwrap_or(&recorded["exp_avg_sq"]);
                close(&format!("{what}, parameter {p}, {state}"), values, &flat(recorded));
            }
        }
    });
}

/// Ours where the recording shows a defect: the element in question follows the paper, all others the recording.
fn check_defect(
    what: &str,
    row: &'static str,
    about: &[bool],
    options: &GroupOptions,
    before: &[f32],
    gradient: &[f32],
    after: &Parameter,
    want: &[f64],
) {
    for index in 0..before.len() {
        let (old, new) = (f64::from(before[index]), f64::from(after.weights[index]));
        let expected = if !about[index] {
            want[index]
        } else if row == LION_STANDS_STILL_AT_ZERO {
            old * (1.0 - options.lr * options.weight_decay)
        } else {
            // The recorded update has the raw gradient above the same root.
            let decayed = f64::from(gradient[index]) + options.weight_decay * old;
            old - (old - want[index]) * decayed / f64::from(gradient[index])
        };
        assert!(
            (new - expected).abs() <= 1e-5 * expected.abs().max(1.0),
            "{what}[{index}]: {new}, not {expected}"
        );
    }
}

#[test]
fn golden_trajectories_of_cpu_kernels_and_the_framework() {
    let mut met = BTreeSet::new();
    follow("optimizers/trajectories.json", 25, &mut met);
    report("golden_trajectories_of_cpu_kernels_and_the_framework", &met);
}

#[test]
fn golden_trajectories_of_the_device_formulas() {
    let mut met = BTreeSet::new();
    follow("optimizers/gpu_reference.json", 9, &mut met);
    report("golden_trajectories_of_the_device_formulas", &met);
}
