//! What is wrong on one rank ends on every rank, with words: bad numbers, bad tokens, bad rates, ranks that differ.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::common::{Batch, Model, config, device, on_ranks, on_worlds};
use ferrospeed_comm::{Limits, World};
use ferrospeed_engine::{
    Engine, EngineError, LoadOptions, Options, SaveOptions, Setup, StepReport, initialize_model,
};
use ferrospeed_nn::Parameters;
use ferrospeed_tensor::{DType, Tensor};
use ferrospeed_testkit::child;
use serde_json::{Value, json};

/// Longer than any of these takes, shorter than anyone would call hanging.
const AT_MOST: Duration = Duration::from_secs(60);

fn configuration(stage: u8) -> Value {
    json!({
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    })
}

fn start(
    world: World,
    value: &Value,
    parameters: &Parameters,
    max_skipped: u64,
) -> Result<Engine, EngineError> {
    let config = config(value, world.size());
    let setup = Setup { max_skipped_in_a_row: max_skipped, ..Setup::new(config, world, device(1)) };
    initialize_model(&setup, parameters, Options::default())
}

/// A step of the perceptron whose target on rank 1 is `bad`.
fn step(engine: &mut Engine, model: &Model, bad: f32) -> Result<StepReport, EngineError> {
    let value = if engine.world().rank() == 1 { bad } else { 0.5 };
    let x = Tensor::full([2, 5], 0.5, DType::F32, engine.device())?;
    let y = Tensor::full([2, 2], value, DType::F32, engine.device())?;
    let loss = engine.forward(|_| model.loss(&Batch::Regression { x, y }))?;
    engine.backward(&loss)?;
    engine.step()
}

#[test]
fn a_gradient_that_is_no_number_is_skipped_by_all_named_and_in_the_end_fatal() {
    for (stage, precision) in [(0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "bf16")] {
        for bad in [f32::NAN, f32::INFINITY] {
            let seen = on_ranks(2, move |world| {
                let (model, parameters) = Model::build(&json!({"kind": "mlp", "d": [5, 4, 3, 2]}));
                let mut value = configuration(stage);
                if precision == "bf16" {
                    value["bf16"] = json!({"enabled": true});
                }
                let mut engine = start(world, &value, &parameters, 3).unwrap();
                let mut reports = vec![step(&mut engine, &model, bad).unwrap()];
                assert!(matches!(step(&mut engine, &model, 0.5).unwrap(), StepReport::Applied { .. }));
                reports.push(step(&mut engine, &model, bad).unwrap());
                reports.push(step(&mut engine, &model, bad).unwrap());
                let error = step(&mut engine, &model, bad).unwrap_err().to_string();
                assert_eq!((engine.skipped_steps(), engine.global_steps()), (4, 5));
                assert!(!engine.was_step_applied());
                (reports, error)
            });
            assert_eq!(seen[0], seen[1], "stage {stage}, {precision}: both ranks saw the same");
            let (reports, error) = &seen[0];
            for report in reports {
                let StepReport::Skipped { param, rank } = report else { panic!("{report:?}") };
                assert_eq!(param, "fc1.weight", "the first of the model, stage {stage}");
                assert_eq!(*rank, 1, "stage {stage}: where it came from");
            }
            assert!(error.contains("3 steps in a row") && error.contains("'fc1.weight'"), "{error}");
        }
    }
}

#[test]
fn who_goes_on_from_a_checkpoint_has_as_many_tries_as_at_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().to_path_buf();
    on_ranks(2, move |world| {
        let (model, parameters) = Model::build(&json!({"kind": "mlp", "d": [5, 4, 3, 2]}));
        let mut engine = start(world, &configuration(0), &parameters, 3).unwrap();
        for _ in 0..2 {
            step(&mut engine, &model, f32::NAN).unwrap();
        }
        engine.save_checkpoint(&dir, &SaveOptions::default()).unwrap();
        engine.load_checkpoint(&dir, &LoadOptions::default()).unwrap();
        for _ in 0..2 {
            step(&mut engine, &model, f32::NAN).unwrap();
        }
        let error = step(&mut engine, &model, f32::NAN).unwrap_err().to_string();
        assert!(error.contains("3 steps in a row"), "{error}");
    });
}

#[test]
fn a_loss_scale_at_its_floor_explains_itself_on_every_rank() {
    let errors = on_ranks(2, |world| {
        let (model, parameters) = Model::build(&json!({"kind": "mlp", "d": [5, 4, 3, 2]}));
        let mut value = configuration(1);
        value["fp16"] = json!({"enabled": true, "initial_scale_power": 1, "hysteresis": 1});
        let mut engine = start(world, &value, &parameters, 50).unwrap();
        let error = (0..4).find_map(|_| step(&mut engine, &model, f32::NAN).err());
        error.expect("the scale cannot fall for ever").to_string()
    });
    assert_eq!(errors[0], errors[1]);
    assert!(errors[0].contains("scale"), "{}", errors[0]);
}

#[test]
fn a_token_that_the_model_does_not_know_ends_the_step_on_every_rank() {
    for stage in 0..=3 {
        let began = Instant::now();
        // A rank that is a thread outlives its failure; a process would be missed within seconds, whatever the deadline.
        let limits = Limits { deadline: Duration::from_secs(5), ..Limits::default() };
        let worlds = World::threads_within(2, &limits).unwrap();
        let errors = on_worlds(worlds, move |world| {
            let (model, parameters) =
                Model::build(&json!({"kind": "lm", "vocab": 13, "dm": 12, "nh": 3, "nl": 1, "tmax": 7}));
            let mut engine = start(world, &configuration(stage), &parameters, 3).unwrap();
            let token = if engine.world().rank() == 1 { 13 } else { 3 };
            let ids = Tensor::from_slice(&[token; 14], [2, 7], engine.device()).unwrap();
            let outcome = (|| -> Result<(), EngineError> {
                let loss = engine.forward(|_| model.loss(&Batch::Tokens(ids)))?;
                engine.backward(&loss)?;
                engine.step()?;
                Ok(())
            })();
            outcome.unwrap_err().to_string()
        });
        assert!(errors[1].contains("13"), "stage {stage}: {}", errors[1]);
        assert!(!errors[0].is_empty(), "stage {stage}");
        assert!(began.elapsed() < AT_MOST, "stage {stage} took {:?}", began.elapsed());
    }
}

#[test]
fn a_learning_rate_that_is_none_is_refused() {
    let (_, parameters) = Model::build(&json!({"kind": "mlp", "d": [5, 4, 3, 2]}));
    for (rate, says) in [(f64::NAN, "NaN"), (-0.1, "-0.1"), (f64::INFINITY, "inf")] {
        let config = config(&configuration(0), 1);
        let (optimizer, options) =
            ferrospeed_optim::Optimizer::from_config(config.optimizer.as_ref().unwrap()).unwrap();
        let options = ferrospeed_optim::GroupOptions { lr: rate, ..options };
        let options = Options { optimizer: Some((optimizer, options)), ..Default::default() };
        let error = initialize_model(&Setup::solo(config, ferrospeed_cpu::device()), &parameters, options)
            .err()
            .unwrap()
            .to_string();
        assert_eq!(error, format!("optimizer.params.lr: {says} is not a learning rate"));
    }
}

#[test]
fn ranks_that_were_told_different_things_all_say_what_differs() {
    let cases: [(&str, fn(usize, &mut Value, &mut Value)); 3] = [
        ("optimizer.params.lr is 0.02 there and 0.01 on rank 0", |rank, config, _| {
            if rank == 2 {
                config["optimizer"]["params"]["lr"] = 0.02.into();
            }
        }),
        ("zero_optimization.stage is 3 there and 2 on rank 0", |rank, config, _| {
            config["zero_optimization"]["stage"] = if rank == 2 { 3.into() } else { 2.into() };
        }),
        ("names, shapes", |rank, _, model| {
            if rank == 2 {
                model["d"][1] = 6.into();
            }
        }),
    ];
    for (part, change) in cases {
        let part: Arc<str> = part.into();
        on_ranks(3, move |world| {
            let (mut value, mut model) = (configuration(1), json!({"kind": "mlp", "d": [5, 4, 3, 2]}));
            change(world.rank(), &mut value, &mut model);
            let (_, parameters) = Model::build(&model);
            let error = start(world, &value, &parameters, 3).err().expect("ranks differ").to_string();
            assert!(error.contains("rank 2") && error.contains(&*part), "{error}");
        });
    }
}

#[test]
fn ranks_that_read_different_files_all_say_which() {
    let read =
        |rank: usize| json!({"model.config": {"rope_theta": 1e4 + rank as f64}, "data": {"tokens": 7}});
    let errors = on_ranks(2, move |world| {
        let (_, parameters) = Model::build(&json!({"kind": "mlp", "d": [5, 4, 3, 2]}));
        let config = config(&configuration(3), world.size());
        let mut setup = Setup::new(config, world.clone(), device(1));
        setup.read = read(world.rank());
        initialize_model(&setup, &parameters, Options::default()).err().expect("they differ").to_string()
    });
    for error in errors {
        assert!(
            error.contains(
                "rank 1 was told something else than rank 0: model.config.rope_theta is 10001.0 there"
            ),
            "{error}"
        );
    }
}

#[test]
fn calls_in_the_wrong_order_are_told() {
    on_ranks(1, |world| {
        let (model, parameters) = Model::build(&json!({"kind": "mlp", "d": [5, 4, 3, 2]}));
        let mut engine = start(world, &configuration(1), &parameters, 3).unwrap();
        let error = engine.step().unwrap_err().to_string();
        assert!(error.contains("step needs a backward"), "{error}");
        engine.eval();
        let x = Tensor::full([2, 5], 0.5, DType::F32, engine.device()).unwrap();
        let y = Tensor::full([2, 2], 0.5, DType::F32, engine.device()).unwrap();
        let loss = engine.forward(|_| model.loss(&Batch::Regression { x, y })).unwrap();
        let error = engine.backward(&loss).unwrap_err().to_string();
        assert!(error.contains("call train() first"), "{error}");
    });
}

/// A variable of the process, so the test has one of its own.
#[test]
fn a_scheduler_that_planned_with_another_elasticity_section_is_told() {
    const HANDED_ON: &str = "DEEPSPEED_ELASTICITY_CONFIG";
    let value = json!({
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "elasticity": {
            "enabled": true, "max_train_batch_size": 4, "micro_batch_sizes": [2], "version": 0.2,
            "min_gpus": 1, "max_gpus": 4,
        },
    });
    let Ok(handed_on) = std::env::var(HANDED_ON) else {
        for batch in [4, 8] {
            let section = json!({"max_train_batch_size": batch, "micro_batch_sizes": [2], "version": 0.2});
            let output = child::alone(
                module_path!(),
                "a_scheduler_that_planned_with_another_elasticity_section_is_told",
            )
            .env(HANDED_ON, section.to_string())
            .output()
            .unwrap();
            child::assert_passed(&output);
        }
        return;
    };
    let (_model, parameters) = Model::build(&json!({"kind": "mlp", "d": [5, 4, 3, 2]}));
    let started = start(World::solo(), &value, &parameters, 3).map(drop).map_err(|error| error.to_string());
    if handed_on.contains(":4") {
        assert_eq!(started, Ok(()));
    } else {
        let error = started.unwrap_err();
        assert!(
            error.contains("planned with another elasticity section: `max_train_batch_size` was 8 there"),
            "{error}"
        );
    }
}
