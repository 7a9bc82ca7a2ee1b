//! How gradients are gathered up: rows of tables, accumulation that begins later, micro-batches that wait, dropped ones.

use std::sync::Arc;

use super::common::{Batch, Model, engine, on_ranks};
use ferrospeed_engine::{Engine, StepReport};
use ferrospeed_nn::Parameters;
use ferrospeed_tensor::{Device, Tensor};
use ferrospeed_zero::access::Which;
use serde_json::{Value, json};

const VOCABULARY: usize = 211;

fn description() -> Value {
    json!({"kind": "lm", "vocab": VOCABULARY, "dm": 12, "nh": 3, "nl": 1, "tmax": 7})
}

fn batch(step: usize, rank: usize, device: &Device) -> Batch {
    let ids: Vec<i64> =
        (0..14).map(|i| ((i * 7 + step * 5 + rank * 11 + i * i) % VOCABULARY) as i64).collect();
    Batch::Tokens(Tensor::from_slice(&ids, [2, 7], device).unwrap())
}

fn configuration(stage: u8, micro_steps: usize) -> Value {
    json!({
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_steps,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 500, "stage3_param_persistence_threshold": 20},
    })
}

fn micro_step(engine: &mut Engine, model: &Model, number: usize) -> StepReport {
    let batch = batch(number, engine.world().rank(), &engine.device().clone());
    let loss = engine.forward(|_| model.loss(&batch)).unwrap();
    engine.backward(&loss).unwrap();
    engine.step().unwrap()
}

fn weights(engine: &Engine, parameters: &Parameters) -> Vec<u32> {
    let full = |param| engine.store().full(param, Which::Weight).unwrap();
    parameters.as_slice().iter().flat_map(|param| full(param).into_iter().map(f32::to_bits)).collect()
}

/// Trains on some ranks and returns each one's weights and the elements that its all-reduces moved.
fn train(ranks: usize, micro_steps: usize, config: Value) -> Vec<(Vec<u32>, usize)> {
    let config = Arc::new(config);
    on_ranks(ranks, move |world| {
        let (model, parameters) = Model::build(&description());
        let mut engine = engine(world, &config, &parameters, None, None, 1);
        for number in 0..3 * micro_steps {
            micro_step(&mut engine, &model, number);
        }
        let records = engine.world().recorder().records();
        let reduces = records.iter().filter(|record| record.description.starts_with("all_reduce"));
        let moved = reduces.map(|record| count_in(&record.description)).sum();
        (weights(&engine, &parameters), moved)
    })
}

/// The number of elements that a recorded operation names: `all_reduce(avg) f32 × 123 …`.
fn count_in(description: &str) -> usize {
    let numbers = description.split(|c: char| !c.is_ascii_digit()).filter_map(|text| text.parse().ok());
    numbers.filter(|count| *count != 32 && *count != 16).max().unwrap_or(0)
}

#[test]
fn rows_of_tables_move_less_and_change_no_bit() {
    for (ranks, precision, micro_steps) in [(2, "fp32", 1), (3, "bf16", 1), (2, "bf16", 2), (1, "fp32", 1)] {
        for (key, value) in [("gradient_clipping", 0.5), ("gradient_predivide_factor", 2.0)] {
            let config = |stage: u8, sparse: bool| {
                let mut config = configuration(stage, micro_steps);
                config["sparse_gradients"] = sparse.into();
                // Rows are reduced with every micro-batch.
                config["zero_optimization"]["reduce_each_micro_batch"] = true.into();
                config[precision] = json!({"enabled": true});
                if precision == "fp32" {
                    config.as_object_mut().unwrap().remove("fp32");
                }
                config[key] = value.into();
                config
            };
            let whole = train(ranks, micro_steps, config(0, false));
            let rows = train(ranks, micro_steps, config(0, true));
            for (whole, rows) in whole.iter().zip(&rows) {
                assert_eq!(whole.0, rows.0, "{ranks} ranks, {precision}, {micro_steps} micro-batches, {key}");
                assert!(ranks == 1 || rows.1 < whole.1, "{} elements by rows, {} whole", rows.1, whole.1);
            }
            // In other stages the key changes nothing. (Stage 2 has no predivision.)
            if key == "gradient_clipping" {
                assert_eq!(train(ranks, micro_steps, config(2, true))[0].0, whole[0].0);
            }
        }
    }
}

#[test]
fn a_larger_batch_can_be_set_when_nothing_was_accumulated_before() {
    for stage in 0..=3 {
        for precision in ["bf16", "fp16"] {
            let config = move |micro_steps| {
                let mut config = configuration(stage, micro_steps);
                config[precision] = json!({"enabled": true});
                if precision == "fp16" {
                    config["fp16"]["loss_scale"] = 128.0.into();
                }
                config
            };
            let expected = train(2, 3, config(3));
            let outcomes = on_ranks(2, move |world| {
                let (model, parameters) = Model::build(&description());
                let mut engine = engine(world, &config(1), &parameters, None, None, 1);
                let error = engine.set_train_batch_size(7).unwrap_err().to_string();
                assert!(error.contains("7 is not a multiple of micro-batch × ranks = 4"), "{error}");
                engine.set_train_batch_size(12).unwrap();
                assert_eq!((engine.gradient_accumulation_steps(), engine.train_batch_size()), (3, 12));
                for number in 0..9 {
                    let report = micro_step(&mut engine, &model, number);
                    assert_eq!(report == StepReport::Accumulating, number % 3 != 2);
                }
                engine.set_train_batch_size(4).unwrap();
                assert!(engine.is_gradient_accumulation_boundary());
                weights(&engine, &parameters)
            });
            for (outcome, expected) in outcomes.iter().zip(&expected) {
                assert_eq!(outcome, &expected.0, "stage {stage}, {precision}");
            }
        }
    }
}

#[test]
fn a_batch_size_does_not_change_under_waiting_gradients() {
    let error = on_ranks(1, |world| {
        let (model, parameters) = Model::build(&description());
        let mut engine = engine(world, &configuration(1, 1), &parameters, None, None, 1);
        let batch = batch(0, 0, &engine.device().clone());
        let loss = engine.forward(|_| model.loss(&batch)).unwrap();
        engine.backward(&loss).unwrap();
        engine.set_train_batch_size(6).unwrap_err().to_string()
    });
    assert!(error[0].contains("accumulation can only begin between steps"), "{error:?}");
}

#[test]
fn micro_batches_that_wait_join_the_next_one() {
    for stage in 0..=3 {
        let applied = on_ranks(2, move |world| {
            let (model, parameters) = Model::build(&description());
            let mut engine = engine(world, &configuration(stage, 2), &parameters, None, None, 1);
            let before = weights(&engine, &parameters);
            let first = engine.no_sync(|engine| micro_step(engine, &model, 0));
            assert_eq!(first, StepReport::Accumulating);
            let second = micro_step(&mut engine, &model, 1);
            let StepReport::Applied { grad_norm } = second else { panic!("{second:?}") };
            assert_ne!(weights(&engine, &parameters), before);
            grad_norm
        });
        // Averaged once instead of twice: the same up to rounding.
        let both = train_norm(stage);
        assert!((applied[0] - both).abs() < 1e-4 * both, "stage {stage}: {} and {both}", applied[0]);
    }
}

fn train_norm(stage: u8) -> f64 {
    on_ranks(2, move |world| {
        let (model, parameters) = Model::build(&description());
        let mut engine = engine(world, &configuration(stage, 2), &parameters, None, None, 1);
        micro_step(&mut engine, &model, 0);
        micro_step(&mut engine, &model, 1);
        engine.global_grad_norm().unwrap()
    })[0]
}

#[test]
fn dropped_gradients_leave_no_trace_and_a_boundary_can_be_set_by_hand() {
    for stage in 0..=3 {
        let outcomes = on_ranks(2, move |world| {
            let (model, parameters) = Model::build(&description());
            let mut engine = engine(world, &configuration(stage, 1), &parameters, None, None, 1);
            let spoilt = batch(9, engine.world().rank(), &engine.device().clone());
            let loss = engine.forward(|_| model.loss(&spoilt)).unwrap();
            engine.backward(&loss).unwrap();
            engine.zero_grad();
            engine.set_gradient_accumulation_boundary(Some(true));
            for number in 0..3 {
                assert!(matches!(micro_step(&mut engine, &model, number), StepReport::Applied { .. }));
            }
            engine.set_gradient_accumulation_boundary(Some(false));
            assert!(!engine.is_gradient_accumulation_boundary());
            (weights(&engine, &parameters), engine.global_steps(), engine.was_step_applied())
        });
        let expected = train(2, 1, configuration(stage, 1));
        assert_eq!(outcomes[0].0, expected[0].0, "stage {stage}");
        assert_eq!((outcomes[0].1, outcomes[0].2), (3, true));
    }
}
