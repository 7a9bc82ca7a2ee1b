//! What a training engine says of itself when its configuration asks.

mod common;

use common::{config, device, on_ranks};
use ferrospeed_comm::World;
use ferrospeed_engine::{Engine, Options, Setup, initialize_model};
use ferrospeed_nn::{Init, Linear};
use ferrospeed_tensor::{DType, Tensor, ops};
use serde_json::{Value, json};

const ROWS: usize = 4;

fn configuration(more: Value) -> Value {
    let mut value = json!({
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    });
    value.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    value
}

fn start(world: World, value: &Value) -> ferrospeed_engine::Result<(Engine, Linear)> {
    let init = Init::root();
    let layer = Linear::new(&init.at("layer"), 16, 8, true);
    let setup = Setup::new(config(value, world.size()), world, device(1));
    Ok((initialize_model(&setup, &init.parameters(), Options::default())?, layer))
}

/// A whole step.
fn step(engine: &mut Engine, layer: &Linear) {
    let x = Tensor::full([ROWS, 16], 0.5, DType::F32, engine.device()).unwrap();
    for _ in 0..engine.gradient_accumulation_steps() {
        let loss = engine.forward(|_| ops::mean(&ops::square(&layer.forward(&x)?)?)).unwrap();
        engine.backward(&loss).unwrap();
        engine.step().unwrap();
    }
}

fn count_of(table: &str, operation: &str) -> u64 {
    let rows = table.lines().skip_while(|line| *line != operation).skip(1);
    let rows = rows.take_while(|line| line.starts_with(' '));
    rows.map(|row| row[40..60].trim().parse::<u64>().unwrap()).sum()
}

#[test]
fn communication_is_counted_and_summed_up_when_the_configuration_asks() {
    on_ranks(2, |world| {
        let value = configuration(json!({
            "zero_optimization": {"stage": 1}, "comms_logger": {"enabled": true},
        }));
        let (mut engine, layer) = start(world, &value).unwrap();
        step(&mut engine, &layer);
        let before = engine.communication_summary(false).unwrap();
        for _ in 0..3 {
            step(&mut engine, &layer);
        }
        let after = engine.communication_summary(true).unwrap();
        // Stage 1 gathers the new weights once a step.
        assert_eq!(count_of(&after, "all_gather") - count_of(&before, "all_gather"), 3, "{before}{after}");
        assert!(after.contains("Breakdown with straggler effect"), "{after}");
        assert!(!before.contains("straggler"), "{before}");
    });
}

#[test]
fn only_the_named_operations_are_counted_and_none_without_the_section() {
    on_ranks(2, |world| {
        let section = json!({"enabled": true, "prof_all": false, "prof_ops": ["all_gather_into_tensor"]});
        let value = configuration(json!({"zero_optimization": {"stage": 1}, "comms_logger": section}));
        let (mut engine, layer) = start(world, &value).unwrap();
        step(&mut engine, &layer);
        let table = engine.communication_summary(false).unwrap();
        assert!(count_of(&table, "all_gather") > 0 && count_of(&table, "all_reduce") == 0, "{table}");
    });
    on_ranks(1, |world| {
        let (mut engine, layer) = start(world, &configuration(json!({}))).unwrap();
        step(&mut engine, &layer);
        assert_eq!(engine.communication_summary(false).unwrap().lines().count(), 1);
    });
}

#[test]
fn an_operation_that_is_none_is_refused_with_those_there_are() {
    let section = json!({"enabled": true, "prof_all": false, "prof_ops": ["allreduce"]});
    let error = start(World::solo(), &configuration(json!({"comms_logger": section}))).err().unwrap();
    let text = error.to_string();
    assert!(text.contains("comms_logger.prof_ops") && text.contains("all_reduce"), "{text}");
}
