//! ZeRO++: weights that travel as int8.

mod common;

use common::{Batch, Model, engine, on_ranks};
use ferrospeed_tensor::{DType, Device, Tensor, ops};
use ferrospeed_zero::access::Which;
use serde_json::{Value, json};

const STEPS: usize = 12;

fn description() -> Value {
    json!({"kind": "lm", "vocab": 13, "dm": 24, "nh": 3, "nl": 2, "tmax": 7})
}

fn batch(step: usize, rank: usize, device: &Device) -> Batch {
    let which = (step + rank) % 4;
    let ids: Vec<i64> = (0..14).map(|i| ((i * 7 + which * 5 + i * i) % 13) as i64).collect();
    Batch::Tokens(Tensor::from_slice(&ids, [2, 7], device).unwrap())
}

fn ds_config(quantized: bool) -> Value {
    json!({
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.003}},
        "bf16": {"enabled": true},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 100,
            "zero_quantized_weights": quantized,
        },
    })
}

struct Outcome {
    losses: Vec<f32>,
    masters: Vec<Vec<f32>>,
    exported: Vec<Vec<f32>>,
    gathered_bytes: u64,
}

fn train(ranks: usize, quantized: bool) -> Vec<Outcome> {
    on_ranks(ranks, move |world| {
        let (model, parameters) = Model::build(&description());
        let mut engine = engine(world, &ds_config(quantized), &parameters, None, None, 1);
        let (device, rank) = (engine.device().clone(), engine.world().rank());
        engine.world().log().start();
        let mut losses = Vec::new();
        for number in 0..STEPS {
            let batch = batch(number, rank, &device);
            let loss = engine.forward(|_| model.loss(&batch)).unwrap();
            losses.push(loss.item().unwrap());
            engine.backward(&loss).unwrap();
            engine.step().unwrap();
        }
        let rows = engine.world().log().summary();
        let gathers = rows.iter().filter(|row| row.operation.contains("gather"));
        let gathered_bytes = gathers.map(|row| row.bytes as u64 * row.count).sum();
        let (store, params) = (engine.store(), parameters.as_slice());
        let masters = params.iter().map(|param| store.full(param, Which::Weight).unwrap()).collect();
        let exported = params.iter().map(|param| store.full_as_read(param).unwrap()).collect();
        Outcome { losses, masters, exported, gathered_bytes }
    })
}

#[test]
fn quantised_gathers_cost_about_half_and_hardly_change_the_losses() {
    for ranks in [2, 3] {
        let (plain, quantized) = (train(ranks, false), train(ranks, true));
        for (rank, (plain, own)) in plain.iter().zip(&quantized).enumerate() {
            assert_ne!(plain.losses, own.losses, "{ranks} ranks: nothing was quantised");
            for (step, (plain, own)) in plain.losses.iter().zip(&own.losses).enumerate() {
                assert!((plain - own).abs() < 0.02 * plain, "{ranks} ranks, step {step}: {plain} {own}");
            }
            assert!(own.masters == quantized[0].masters, "{ranks} ranks: rank {rank} differs");
            let share = own.gathered_bytes as f64 / plain.gathered_bytes as f64;
            assert!((0.4..0.65).contains(&share), "{ranks} ranks: {share} of the bytes");
        }
    }
}

#[test]
fn a_rank_without_peers_quantises_nothing() {
    let (plain, quantized) = (train(1, false), train(1, true));
    assert!(plain[0].losses == quantized[0].losses && plain[0].masters == quantized[0].masters);
}

#[test]
fn an_exported_model_holds_weights_that_were_never_quantised() {
    for outcome in train(2, true) {
        for (master, exported) in outcome.masters.iter().zip(&outcome.exported) {
            let exact = Tensor::from_slice(master, [master.len()], &Device::cpu()).unwrap();
            let rounded = ops::cast(&exact, DType::BF16).unwrap().to_vec_f32().unwrap();
            assert!(&rounded == exported);
        }
    }
}
