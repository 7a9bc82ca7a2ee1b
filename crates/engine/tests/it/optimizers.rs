//! Optimizers of the framework and of a program's own, schedules of its own, and what may be changed while it trains.

use super::common;
use std::path::Path;
use std::sync::Arc;

use super::common::{Batch, Model, config, device, on_ranks};
use ferrospeed_comm::World;
use ferrospeed_engine::{
    BackwardOptions, Engine, EngineError, LoadOptions, Options, SaveOptions, Setup, StepReport,
    initialize_model, initialize_with,
};
use ferrospeed_nn::{Linear, Parameters};
use ferrospeed_optim::own::{OwnOptimizer, Slices};
use ferrospeed_optim::schedule::{Rates, Scheduler};
use ferrospeed_optim::{GroupOptions, Optimizer};
use ferrospeed_tensor::{DType, Device, Tensor, ops};
use ferrospeed_zero::access::Which;
use serde_json::{Value, json};

fn description() -> Value {
    json!({"kind": "lm", "vocab": 13, "dm": 12, "nh": 3, "nl": 2, "tmax": 7})
}

fn batch(step: usize, rank: usize, device: &Device) -> Batch {
    let ids: Vec<i64> = (0..14).map(|i| ((i * 7 + step * 5 + rank * 11 + i * i) % 13) as i64).collect();
    Batch::Tokens(Tensor::from_slice(&ids, [2, 7], device).unwrap())
}

fn ds_config(stage: u8, optimizer: Value) -> Value {
    json!({
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": optimizer,
        "bf16": {"enabled": true},
        "zero_allow_untested_optimizer": true,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 500, "stage3_param_persistence_threshold": 20},
    })
}

fn step(engine: &mut Engine, model: &Model, number: usize, rank: usize) -> StepReport {
    let batch = batch(number, rank, &engine.device().clone());
    let loss = engine.forward(|_| model.loss(&batch)).unwrap();
    engine.backward(&loss).unwrap();
    engine.step().unwrap()
}

fn weights(engine: &Engine, parameters: &Parameters, which: Which<'_>) -> Vec<u32> {
    let values = parameters.as_slice().iter().map(|param| engine.store().full(param, which).unwrap());
    values.flatten().map(f32::to_bits).collect()
}

/// The master weights after three steps on two ranks.
fn train(config_value: Value) -> Vec<Vec<u32>> {
    on_ranks(2, move |world| {
        let rank = world.rank();
        let (model, parameters) = Model::build(&description());
        let mut engine = common::engine(world, &config_value, &parameters, None, None, 1);
        let before = weights(&engine, &parameters, Which::Weight);
        (0..3).for_each(|number| drop(step(&mut engine, &model, number, rank)));
        let after = weights(&engine, &parameters, Which::Weight);
        assert_ne!(before, after, "{config_value}");
        after
    })
}

#[test]
fn optimizers_of_the_framework_give_the_same_bits_in_all_stages() {
    for (name, params) in [
        ("RMSprop", json!({"lr": 1e-3, "centered": true, "momentum": 0.9})),
        ("Adadelta", json!({})),
        ("Adamax", json!({"weight_decay": 0.1})),
        ("NAdam", json!({})),
        ("RAdam", json!({})),
        ("ASGD", json!({"t0": 1})),
        ("Rprop", json!({"lr": 1e-3})),
        ("Adam", json!({"amsgrad": true})),
        ("SGD", json!({"lr": 0.01, "maximize": true, "momentum": 0.9})),
        ("ScheduleFreeAdamW", json!({"lr": 0.01, "warmup_steps": 2, "weight_decay": 0.1})),
    ] {
        let of_stage = |stage| train(ds_config(stage, json!({"type": name, "params": params})));
        let whole = of_stage(0);
        for stage in 1..=3 {
            assert!(of_stage(stage) == whole, "{name} in stage {stage}");
        }
    }
}

/// A running mean of gradients, followed by their sign.
#[derive(Debug)]
struct SignOfMean(&'static str);

impl OwnOptimizer for SignOfMean {
    fn name(&self) -> &'static str {
        self.0
    }

    fn state_names(&self) -> &'static [&'static str] {
        &["mean"]
    }

    fn update(&self, slices: Slices<'_, '_>, options: &GroupOptions, step: u64) {
        let [mean] = slices.states else { panic!("one state") };
        for ((weight, gradient), mean) in slices.weights.iter_mut().zip(slices.gradient).zip(mean.iter_mut())
        {
            *mean = 0.5 * *mean + 0.5 * gradient;
            *weight -= options.lr as f32 / step as f32 * mean.signum();
        }
    }
}

fn own_engine(world: World, stage: u8, name: &'static str, parameters: &Parameters) -> Engine {
    try_own_engine(world, stage, name, parameters, true).unwrap()
}

fn try_own_engine(
    world: World,
    stage: u8,
    name: &'static str,
    parameters: &Parameters,
    is_allowed: bool,
) -> ferrospeed_engine::Result<Engine> {
    let mut value = ds_config(stage, Value::Null);
    value.as_object_mut().unwrap().remove("optimizer");
    value["zero_allow_untested_optimizer"] = is_allowed.into();
    let setup = Setup::new(config(&value, world.size()), world, device(1));
    let group = GroupOptions { lr: 0.01, weight_decay: 0.0, betas: [0.0; 2] };
    let halves = |iteration: i64, _: usize, base: &GroupOptions| {
        Rates::lr(base.lr * 0.5f64.powi(1 + iteration as i32))
    };
    let options = Options {
        optimizer: Some((Optimizer::own(SignOfMean(name)), group)),
        scheduler: Some(Scheduler::custom(halves, &[group])),
        ..Default::default()
    };
    initialize_model(&setup, parameters, options)
}

#[test]
fn an_optimizer_and_a_schedule_of_ones_own_train_in_all_stages_and_go_on_from_a_checkpoint() {
    let place = Arc::new(tempfile::tempdir().unwrap());
    let run = |stage: u8, folder: Option<&'static str>| {
        let place = place.clone();
        on_ranks(2, move |world| {
            let rank = world.rank();
            let (model, parameters) = Model::build(&description());
            let mut engine = own_engine(world.clone(), stage, "sign-of-mean", &parameters);
            (0..2).for_each(|number| drop(step(&mut engine, &model, number, rank)));
            assert_eq!(engine.get_lr(), [0.0025]);
            let Some(folder) = folder.map(|folder| place.path().join(folder)) else {
                step(&mut engine, &model, 2, rank);
                return (
                    weights(&engine, &parameters, Which::Weight),
                    weights(&engine, &parameters, Which::State("mean")),
                );
            };
            engine.save_checkpoint(&folder, &SaveOptions::default()).unwrap();
            drop(engine);
            let (model, parameters) = Model::build(&description());
            let mut engine = own_engine(world, (stage + 1) % 4, "sign-of-mean", &parameters);
            engine.load_checkpoint(&folder, &LoadOptions::default()).unwrap();
            step(&mut engine, &model, 2, rank);
            (
                weights(&engine, &parameters, Which::Weight),
                weights(&engine, &parameters, Which::State("mean")),
            )
        })
    };
    let whole = run(0, None);
    for (stage, folder) in [(1, "one"), (2, "two"), (3, "three")] {
        assert!(run(stage, None) == whole, "stage {stage}");
        assert!(run(stage, Some(folder)) == whole, "stage {stage}, continued in another");
    }
    let (_, parameters) = Model::build(&description());
    let mut other = own_engine(World::solo(), 0, "another", &parameters);
    let error = other.load_checkpoint(place.path().join("one"), &LoadOptions::default()).unwrap_err();
    assert!(error.to_string().contains("it holds states of sign-of-mean, this run uses another"), "{error}");
    // As one that is configured by its name.
    let (_, parameters) = Model::build(&description());
    let error = try_own_engine(World::solo(), 1, "another", &parameters, false).err().unwrap().to_string();
    assert!(
        error.contains("ZeRO is not tested with another; add \"zero_allow_untested_optimizer\""),
        "{error}"
    );
}

#[test]
fn a_schedule_free_model_is_its_mean_in_the_end_and_goes_on_in_another_stage() {
    let place = Arc::new(tempfile::tempdir().unwrap());
    let free = json!({"type": "ScheduleFreeAdamW", "params": {"lr": 0.02, "betas": [0.8, 0.99]}});
    let run = |stage: u8, other: Option<u8>| {
        let (place, free) = (place.clone(), free.clone());
        on_ranks(2, move |world| {
            let rank = world.rank();
            let (mut model, mut parameters) = Model::build(&description());
            let mut engine =
                common::engine(world.clone(), &ds_config(stage, free.clone()), &parameters, None, None, 1);
            (0..2).for_each(|number| drop(step(&mut engine, &model, number, rank)));
            if let Some(other) = other {
                let folder = place.path().join(format!("{stage}"));
                engine.save_checkpoint(&folder, &SaveOptions::default()).unwrap();
                (model, parameters) = Model::build(&description());
                engine = common::engine(world, &ds_config(other, free.clone()), &parameters, None, None, 1);
                engine.load_checkpoint(&folder, &LoadOptions::default()).unwrap();
            }
            step(&mut engine, &model, 2, rank);
            let mut bits = Vec::new();
            for param in parameters.as_slice() {
                let written = engine.weight_as_read(param).unwrap();
                let trained = engine.store().full(param, Which::Weight).unwrap();
                let ahead = engine.store().full(param, Which::State("z_ahead")).unwrap();
                for ((written, trained), ahead) in written.iter().zip(trained).zip(ahead) {
                    // What lies between y and x: a quarter of what z is ahead, where the first beta is 0.8.
                    assert!((written - (trained - 0.25 * ahead)).abs() <= 1e-6 * trained.abs().max(1.0));
                    bits.extend([written.to_bits(), trained.to_bits()]);
                }
            }
            assert!(bits.chunks(2).any(|pair| pair[0] != pair[1]), "the mean is another model");
            bits
        })
    };
    let whole = run(0, None);
    for stage in 0..=3 {
        assert!(run(stage, Some((stage + 1) % 4)) == whole, "stage {stage}, continued in another");
    }
}

#[test]
fn muon_goes_on_in_another_stage_where_it_was_saved() {
    let place = Arc::new(tempfile::tempdir().unwrap());
    let muon = json!({"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 1e-3, "weight_decay": 0.1}});
    let run = |stage: u8, other: Option<u8>| {
        let (place, muon) = (place.clone(), muon.clone());
        on_ranks(2, move |world| {
            let rank = world.rank();
            let (model, parameters) = Model::build(&description());
            let mut engine =
                common::engine(world.clone(), &ds_config(stage, muon.clone()), &parameters, None, None, 1);
            (0..2).for_each(|number| drop(step(&mut engine, &model, number, rank)));
            let (model, parameters) = match other {
                None => (model, parameters),
                Some(other) => {
                    let folder = place.path().join(format!("{stage}"));
                    engine.save_checkpoint(&folder, &SaveOptions::default()).unwrap();
                    let (model, parameters) = Model::build(&description());
                    engine =
                        common::engine(world, &ds_config(other, muon.clone()), &parameters, None, None, 1);
                    engine.load_checkpoint(&folder, &LoadOptions::default()).unwrap();
                    (model, parameters)
                }
            };
            step(&mut engine, &model, 2, rank);
            assert_eq!(engine.get_lr(), [0.02, 1e-3], "hidden matrices, and all else");
            let matrix =
                parameters.as_slice().iter().find(|param| param.name().contains("qkv.weight")).unwrap();
            let momentum = engine.store().full(matrix, Which::State("momentum_buffer")).unwrap();
            assert!(momentum.iter().any(|value| *value != 0.0));
            weights(&engine, &parameters, Which::Weight)
        })
    };
    let whole = run(0, None);
    for stage in 0..=3 {
        assert!(run(stage, Some((stage + 1) % 4)) == whole, "stage {stage}, continued in another");
    }
}

#[test]
fn a_model_that_is_no_list_of_layers_is_not_trained_in_place_of_a_pipeline() {
    let mut value = ds_config(0, json!({"type": "Adam", "params": {}}));
    value["pipeline"] = json!({"stages": 2});
    let setup = Setup::new(config(&value, 1), World::solo(), device(1));
    let started = initialize_with(&setup, Options::default(), |init| Linear::new(init, 1, 1, false));
    let error = started.err().unwrap().to_string();
    assert!(
        error.contains("pipeline.stages: 2 stages are asked for") && error.contains("initialize_pipeline"),
        "{error}"
    );
}

/// A model whose loss is its one weight times a number.
fn one_weight(config_value: Value, options: Options<'_>) -> (Engine, Linear) {
    let setup = Setup::new(config(&config_value, 1), World::solo(), device(1));
    initialize_with(&setup, options, |init| Linear::new(init, 1, 1, false)).unwrap()
}

fn backward(engine: &mut Engine, layer: &Linear, times: f32, options: BackwardOptions) -> f32 {
    let x = Tensor::full([1, 1], times, DType::F32, engine.device()).unwrap();
    let loss = engine.forward(|_| ops::mean(&layer.forward(&x)?)).unwrap();
    engine.backward_with(&loss, options).unwrap()
}

#[test]
fn a_loss_is_divided_by_the_micro_batches_of_a_step_unless_told_otherwise() {
    let value = json!({
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    });
    let norm = |scale_wrt_gas: bool| {
        let (mut engine, layer) = one_weight(value.clone(), Options::default());
        for _ in 0..4 {
            backward(
                &mut engine,
                &layer,
                3.0,
                BackwardOptions { scale_wrt_gas, ..BackwardOptions::default() },
            );
            engine.step().unwrap();
        }
        engine.global_grad_norm().unwrap()
    };
    assert_eq!(norm(true), 3.0);
    assert_eq!(norm(false), 12.0);
}

#[test]
fn batch_sizes_and_the_loss_scale_can_be_changed_between_steps() {
    let value = json!({
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
    });
    let (mut engine, layer) = one_weight(value, Options::default());
    engine.set_train_micro_batch_size(5).unwrap();
    assert_eq!((engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()), (5, 3));
    assert_eq!(engine.train_batch_size(), 15);
    assert!(matches!(engine.set_train_micro_batch_size(0), Err(EngineError::Argument { .. })));
    engine.set_train_batch_size(5).unwrap();
    assert_eq!(engine.gradient_accumulation_steps(), 1);

    engine.override_loss_scale(Some(1024.0)).unwrap();
    assert_eq!(engine.loss_scale(), 1024.0);
    backward(&mut engine, &layer, 3.0, BackwardOptions::default());
    assert!(matches!(engine.override_loss_scale(None), Err(EngineError::Order { .. })));
    engine.step().unwrap();
    assert_eq!(engine.global_grad_norm(), Some(3.0), "the gradient is divided by the scale it was made with");
    assert!(matches!(engine.override_loss_scale(Some(f64::NAN)), Err(EngineError::Argument { .. })));
    engine.override_loss_scale(None).unwrap();
    assert_eq!(engine.loss_scale(), 1.0);
}

#[test]
fn a_plateau_follows_the_training_loss_or_what_it_is_told() {
    let value = json!({
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-6}},
        "scheduler": {"type": "ReduceLROnPlateau", "params": {"patience": 1, "factor": 0.5, "eps": 0.0, "threshold_mode": "abs"}},
    });
    let (mut engine, layer) = one_weight(value, Options::default());
    let one = |engine: &mut Engine| {
        backward(engine, &layer, 1.0, BackwardOptions::default());
        engine.step().unwrap();
        engine.get_lr()[0]
    };
    // The loss does not move by a rate this small: one best step, one that is suffered, then it falls.
    assert_eq!([one(&mut engine), one(&mut engine), one(&mut engine)], [1e-6, 1e-6, 5e-7]);
    engine.follow_training_loss(false);
    assert_eq!([one(&mut engine), one(&mut engine), one(&mut engine)], [5e-7; 3]);
    for _ in 0..2 {
        engine.observe_metric(f64::INFINITY);
    }
    assert_eq!(engine.get_lr(), [2.5e-7]);
    let folder = tempfile::tempdir().unwrap();
    save_and_load(&mut engine, folder.path());
}

fn save_and_load(engine: &mut Engine, folder: &Path) {
    engine.save_checkpoint(folder, &SaveOptions::default()).unwrap();
    engine.observe_metric(f64::INFINITY);
    engine.observe_metric(f64::INFINITY);
    assert_eq!(engine.get_lr(), [1.25e-7]);
    engine.load_checkpoint(folder, &LoadOptions::default()).unwrap();
    assert_eq!(engine.get_lr(), [2.5e-7]);
}
