//! What an engine changes as training goes on: blocks that are left out, sequences that grow.

use super::common::{config, device, on_ranks};
use ferrospeed_comm::World;
use ferrospeed_engine::{Engine, Options, Setup, initialize_model};
use ferrospeed_nn::layer_drop::layer_drop;
use ferrospeed_nn::{Init, Linear, Mode};
use ferrospeed_tensor::{DType, Tensor, ops};
use ferrospeed_zero::access::Which;
use serde_json::{Value, json};

const LAYERS: usize = 5;

fn configuration(stage: u8) -> Value {
    json!({
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    })
}

fn start(world: World, value: &Value) -> (Engine, Vec<Linear>, Init) {
    let init = Init::root();
    let blocks = (0..LAYERS).map(|layer| Linear::new(&init.at(format!("h.{layer}")), 6, 6, true)).collect();
    let setup = Setup::new(config(value, world.size()), world, device(1));
    (initialize_model(&setup, &init.parameters(), Options::default()).unwrap(), blocks, init)
}

/// A step; returns which blocks ran.
fn step(engine: &mut Engine, blocks: &[Linear]) -> Vec<usize> {
    let mut ran = Vec::new();
    let mut x =
        Tensor::full([2, 6], 0.3 + engine.world().rank() as f32, DType::F32, engine.device()).unwrap();
    let loss = engine
        .forward(|mode| {
            for (layer, block) in blocks.iter().enumerate() {
                if layer_drop().is_some_and(|drop| mode == Mode::Train && !drop.keeps(layer, LAYERS)) {
                    continue;
                }
                ran.push(layer);
                x = ops::add(&x, &ops::tanh(&block.forward(&x)?)?)?;
            }
            ops::mean(&ops::square(&x)?)
        })
        .unwrap();
    engine.backward(&loss).unwrap();
    engine.step().unwrap();
    ran
}

#[test]
fn layers_are_dropped_alike_on_all_ranks_and_in_all_stages_more_and_more() {
    let run = |stage: u8| {
        on_ranks(2, move |world| {
            let mut value = configuration(stage);
            value["progressive_layer_drop"] = json!({"enabled": true, "theta": 0.2, "gamma": 0.5});
            let (mut engine, blocks, init) = start(world, &value);
            let (mut thetas, mut ran) = (Vec::new(), Vec::new());
            for _ in 0..10 {
                thetas.push(engine.pld_theta().unwrap());
                ran.push(step(&mut engine, &blocks));
            }
            assert!(layer_drop().is_none(), "it holds for a forward pass alone");
            let parameters = init.parameters();
            let full = |param| engine.store().full(param, Which::Weight).unwrap();
            let weights: Vec<u32> = parameters.as_slice().iter().flat_map(full).map(f32::to_bits).collect();
            (thetas, ran, weights)
        })
    };
    let expected = run(0);
    assert_eq!(expected[0], expected[1], "ranks");
    let (thetas, ran, _) = &expected[0];
    assert_eq!(thetas[..2], [1.0, 1.0]);
    assert!(thetas[2..].windows(2).all(|pair| pair[1] < pair[0]), "{thetas:?}");
    assert_eq!((ran[0].len(), ran[1].len()), (LAYERS, LAYERS));
    assert!(ran.iter().map(Vec::len).sum::<usize>() < 10 * LAYERS, "{ran:?}");
    for stage in 1..=3 {
        assert_eq!(run(stage), expected, "stage {stage}");
    }
}

#[test]
fn sequences_grow_with_the_steps_that_are_done() {
    let mut value = configuration(0);
    value["curriculum_learning"] = json!({
        "enabled": true, "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 32,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 8},
    });
    on_ranks(1, move |world| {
        let (mut engine, blocks, _) = start(world, &value);
        let mut lengths = Vec::new();
        for _ in 0..5 {
            lengths.push(engine.curriculum_length(24));
            step(&mut engine, &blocks);
        }
        assert_eq!(lengths, [8, 16, 24, 24, 24], "never more than there is");
    });
    on_ranks(1, |world| {
        let (mut engine, _, _) = start(world, &configuration(0));
        assert_eq!(engine.curriculum_length(24), 24, "no curriculum");
    });
}
