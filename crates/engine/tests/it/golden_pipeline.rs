//! Trajectories of DeepSpeed's PipelineEngine.
//!
//! The tied layer's bias is a parameter of the first use alone here: DeepSpeed's other copy of it is never used, and so
//! never changes.

use std::sync::Arc;

use super::common::{config, device, on_ranks};
use ferrospeed_engine::{EngineError, Options, Setup, initialize_pipeline};
use ferrospeed_nn::{Init, Linear, Mode, Sequential, Trained};
use ferrospeed_tensor::ops::{self, WeightLayout};
use ferrospeed_tensor::store::ParamSource;
use ferrospeed_tensor::{Activation, Device, Param, Result, Tensor};
use ferrospeed_testkit::golden::golden;
use serde_json::{Value, json};

/// As the recording's README says.
const RELATIVE: f32 = 1e-5;
const ABSOLUTE: f32 = 1e-6;

struct Recorded(Value);

impl ParamSource for Recorded {
    fn load(&self, param: &Param, range: std::ops::Range<usize>, out: &mut [f32]) -> Result<()> {
        out.copy_from_slice(&numbers(&self.0[recorded_name(&self.0, param.name())])[range]);
        Ok(())
    }
}

/// Where a parameter of ours is among recorded ones: `0.weight` may be a tied one on the first stage.
fn recorded_name(params: &Value, name: &str) -> String {
    if params.get(name).is_some() {
        return name.to_owned();
    }
    let (_, kind) = name.split_once('.').expect("a layer's parameter");
    let tied = params.as_object().expect("parameters").keys();
    let tied =
        tied.clone().find(|key| key.contains("tied_modules") && key.contains(&format!(".{kind}@stage0")));
    tied.unwrap_or_else(|| panic!("{name} was not recorded")).clone()
}

fn numbers(value: &Value) -> Vec<f32> {
    match value {
        Value::Array(all) => all.iter().flat_map(numbers).collect(),
        number => vec![number.as_f64().unwrap_or_else(|| panic!("{number} is not a number")) as f32],
    }
}

fn tensor(value: &Value, device: &Device) -> Tensor {
    let rows = value.as_array().expect("rows").len();
    let numbers = numbers(value);
    let columns = numbers.len() / rows;
    Tensor::from_slice(&numbers, [rows, columns], device).unwrap()
}

fn close(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        let allowed = ABSOLUTE + RELATIVE * expected.abs();
        assert!((found - expected).abs() <= allowed, "{what}: {found} and not {expected}");
    }
}

/// A layer is a linear map and tanh together, as it was recorded.
fn tanh_layer(init: &Init, hidden: usize) -> impl Fn(&Tensor, Mode) -> Result<Tensor> + Send + Sync + use<> {
    let linear = Linear::new(init, hidden, hidden, true);
    move |x: &Tensor, _| ops::activate(&linear.forward(x)?, Activation::Tanh)
}

#[test]
fn golden_train_e2e() {
    golden().each_case("pipeline/train_e2e.json", 4, |case| {
        let case = Arc::new(case.clone());
        let size = |key: &str| case[key].as_u64().expect("a count") as usize;
        on_ranks(size("world_size"), {
            let case = case.clone();
            move |world| run(world, &case)
        });
    });
}

fn run(world: ferrospeed_comm::World, case: &Value) {
    let size = |key: &str| case[key].as_u64().expect("a count") as usize;
    let (hidden, stages, data) = (size("hidden"), size("num_stages"), size("data_parallel"));
    let device = device(1);
    let init = Init::root();
    let mut layers = Sequential::new(&init);
    // A tied layer stands before the others, and its weight behind them.
    let tied = case["tied"] == true;
    for _ in 0..size("num_plain_layers") + usize::from(tied) {
        layers = layers.add(|init| tanh_layer(init, hidden));
    }
    if tied {
        let weight = init.parameters().get("0.weight").expect("a tied weight").clone();
        let shared = weight.clone();
        layers = layers.add_with(&[weight], |_| {
            move |x: &Tensor, _: Mode| ops::linear(x, &shared, None, WeightLayout::InOut)
        });
    }
    let loss = |y: &Tensor, target: &Tensor| ops::mean(&ops::square(&ops::sub(y, target)?)?);
    let model = Trained { layers, loss };
    // DeepSpeed makes torch's AdamW of `torch_adam`, which decays by 0.01 where nothing is said; ours decays where told.
    let mut optimizer = case["optimizer"].clone();
    if optimizer["params"]["torch_adam"] == true && optimizer["params"].get("weight_decay").is_none() {
        optimizer["params"]["weight_decay"] = json!(0.01);
    }
    let value = json!({
        "train_micro_batch_size_per_gpu": size("micro_batch"),
        "gradient_accumulation_steps": size("gradient_accumulation_steps"),
        "optimizer": optimizer,
        "pipeline": {"partition": case["partition_method"]},
    });
    let setup = Setup::new(config(&value, data), world, device.clone());
    let source = Recorded(case["initial_params"].clone());
    let options = Options { source: Some(&source), ..Default::default() };
    let stages = stages.try_into().unwrap();
    let mut engine = initialize_pipeline(&setup, stages, &model, &init.parameters(), options).unwrap();
    let own = engine.data_rank();
    let pair = |pair: &Value| Ok::<_, EngineError>((tensor(&pair[0], &device), tensor(&pair[1], &device)));

    let eval = &case["eval_data_per_dp_rank"][own];
    let count = eval.as_array().expect("micro-batches").len();
    let before = engine.eval_batch(&model, count, |micro| pair(&eval[micro])).unwrap();
    close("evaluation before", &[before], &numbers(&case["eval_loss_before"]));
    let steps = case["data_per_dp_rank"][own].as_array().expect("steps");
    for (step, batches) in steps.iter().enumerate() {
        let (loss, _) = engine.train_batch(&model, |micro| pair(&batches[micro])).unwrap();
        close(&format!("loss of step {step}"), &[loss], &numbers(&case["train_losses"][step]));
        let recorded = &case["params_after_step"][step];
        for param in init.parameters().as_slice() {
            let expected = numbers(&recorded[recorded_name(recorded, param.name())]);
            let found = engine.weight_as_read(param).unwrap();
            close(&format!("{} after step {step}", param.name()), &found, &expected);
        }
    }
    let after = engine.eval_batch(&model, count, |micro| pair(&eval[micro])).unwrap();
    close("evaluation after", &[after], &numbers(&case["eval_loss_after"]));
    assert_eq!(engine.global_steps(), case["global_steps"].as_u64().expect("steps"));
}
