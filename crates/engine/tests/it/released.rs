//! Memory comes back: with the engine what only training needs, with the last handle of the model the rest.

use std::time::{Duration, Instant};

use super::common::{Batch, Model, config, device, on_ranks};
use ferrospeed_comm::World;
use ferrospeed_engine::{Engine, Options, Setup, initialize_model};
use ferrospeed_nn::Parameters;
use ferrospeed_tensor::{Category, DType, Device, Tensor, TensorError};
use serde_json::{Value, json};

fn configuration(stage: u8, precision: &str) -> Value {
    let mut value = json!({
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": true,
            "reduce_bucket_size": 3000,
            "stage3_param_persistence_threshold": 100,
            "stage3_prefetch_bucket_size": 20_000,
        },
    });
    if precision != "fp32" {
        value[precision] = json!({"enabled": true});
    }
    value
}

fn start(world: World, value: &Value, device: &Device) -> (Engine, Model, Parameters) {
    let (model, parameters) = Model::build(&json!({"kind": "mlp", "d": [64, 96, 96, 32]}));
    let setup = Setup::new(config(value, world.size()), world, device.clone());
    let engine = initialize_model(&setup, &parameters, Options::default());
    (engine.unwrap_or_else(|error| panic!("{error}")), model, parameters)
}

fn batch(device: &Device) -> Batch {
    let x = Tensor::full([2, 64], 0.5, DType::F32, device).unwrap();
    let y = Tensor::full([2, 32], 0.25, DType::F32, device).unwrap();
    Batch::Regression { x, y }
}

fn micro_step(engine: &mut Engine, model: &Model) {
    let batch = batch(engine.device());
    let loss = engine.forward(|_| model.loss(&batch)).unwrap();
    engine.backward(&loss).unwrap();
    engine.step().unwrap();
}

/// Bytes held by category.
fn held(device: &Device) -> Vec<(&'static str, usize)> {
    let usage = device.memory_usage();
    Category::ALL.iter().map(|&category| (category.name(), usage.current(category))).collect()
}

/// Waits until nothing is held. A collective that was under way lets go of its memory a moment after it is done.
fn assert_nothing_is_held(device: &Device, when: &str) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while held(device).iter().any(|&(_, bytes)| bytes > 0) {
        assert!(Instant::now() < deadline, "{when}: {:?}", held(device));
        std::thread::yield_now();
    }
}

/// What can be going on when an engine is dropped.
const MOMENTS: [&str; 5] =
    ["before a step", "after two steps", "between micro-batches", "in a failed forward", "before backward"];

#[test]
fn an_engine_and_its_model_give_everything_back_whenever_they_go() {
    for (stage, precision, ranks) in
        [(0, "bf16", 2), (1, "bf16", 2), (2, "bf16", 3), (3, "bf16", 2), (3, "fp32", 1), (1, "fp32", 2)]
    {
        for moment in MOMENTS {
            on_ranks(ranks, move |world| {
                let device = device(1);
                let (mut engine, model, parameters) =
                    start(world.clone(), &configuration(stage, precision), &device);
                // Steps that are whole come first, so that stage 3 knows the order of reads and reads ahead.
                let whole = if moment == "before a step" { 0 } else { 4 };
                (0..whole).for_each(|_| micro_step(&mut engine, &model));
                let mut pending = None;
                match moment {
                    "between micro-batches" => micro_step(&mut engine, &model),
                    "before backward" => {
                        let batch = batch(&device);
                        pending = Some(engine.forward(|_| model.loss(&batch)).unwrap());
                    }
                    "in a failed forward" => {
                        let first = &parameters.as_slice()[0];
                        let failed = engine.forward(|_| {
                            let value = first.read()?;
                            Err::<Tensor, _>(TensorError::argument(
                                "forward",
                                format!("gives up at {}", value.shape()),
                            ))
                        });
                        assert!(failed.is_err());
                    }
                    _ => {}
                }
                drop(engine);
                drop((pending, model, parameters));
                assert_nothing_is_held(
                    &device,
                    &format!("stage {stage}, {precision}, {ranks} ranks, {moment}"),
                );
            });
        }
    }
}

#[test]
fn a_model_outlives_its_engine_without_what_only_training_needs() {
    for stage in 0..=3 {
        on_ranks(2, move |world| {
            let device = device(1);
            let (mut engine, model, parameters) =
                start(world.clone(), &configuration(stage, "bf16"), &device);
            (0..4).for_each(|_| micro_step(&mut engine, &model));
            let params = parameters.as_slice();
            let values = || -> Vec<f32> {
                params.iter().flat_map(|param| param.read().unwrap().to_vec_f32().unwrap()).collect()
            };
            let before = values();
            drop(engine);
            assert_eq!(values(), before, "stage {stage}");
            let usage = device.memory_usage();
            for category in [Category::Gradients, Category::Optimizer, Category::Buffers] {
                assert_eq!(usage.current(category), 0, "stage {stage}: {}", category.name());
            }
            assert!(usage.current(Category::Parameters) > 0);
            let loss = model.loss(&batch(&device)).unwrap();
            let refused = ferrospeed_tensor::autograd::backward(&loss).unwrap_err();
            let refused = format!("{refused:?}");
            assert!(refused.contains("the engine that trained it is gone"), "stage {stage}: {refused}");
            drop((loss, model));
            // One handle is enough to keep the weights, and the last one lets them go.
            let last = params[0].clone();
            drop(parameters);
            assert!(device.memory_usage().current(Category::Parameters) > 0);
            drop(last);
            assert_nothing_is_held(&device, &format!("stage {stage}"));
        });
    }
}

#[test]
fn a_model_that_could_not_be_attached_gives_everything_back() {
    let device = device(1);
    let (engine, _, parameters) = start(World::solo(), &configuration(2, "bf16"), &device);
    drop(engine);
    let setup = Setup::new(config(&configuration(2, "bf16"), 1), World::solo(), device.clone());
    let error =
        initialize_model(&setup, &parameters, Options::default()).err().expect("it is attached already");
    assert!(error.to_string().contains("already"), "{error}");
    drop(parameters);
    assert_nothing_is_held(&device, "after a second attachment was refused");
}
