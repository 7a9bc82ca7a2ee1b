//! Model state takes the bytes that the ZeRO paper says: 2 for a 16-bit weight, 2 for its gradient, 12 for the f32
//! weight and Adam's two moments, each divided by the ranks from the stage on that splits it.

use super::common::{Batch, Model, engine, on_ranks};
use ferrospeed_tensor::{Category, DType, Tensor};
use serde_json::{Value, json};

fn configuration(stage: u8) -> Value {
    json!({
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
        "bf16": {"enabled": true},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 40_000,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 80_000,
            "stage3_prefetch_bucket_size": 40_000,
            "stage3_max_reuse_distance": 0,
        },
    })
}

/// Bytes held after a step, by category, and the most elements that stage 3 held whole.
fn measure(ranks: usize, stage: u8) -> (usize, Vec<usize>, u64) {
    let results = on_ranks(ranks, move |world| {
        let (model, parameters) = Model::build(&json!({"kind": "mlp", "d": [128, 256, 256, 64]}));
        let mut engine = engine(world, &configuration(stage), &parameters, None, None, 1);
        let device = engine.device().clone();
        for _ in 0..3 {
            let x = Tensor::full([2, 128], 0.5, DType::F32, &device).unwrap();
            let y = Tensor::full([2, 64], 0.25, DType::F32, &device).unwrap();
            let loss = engine.forward(|_| model.loss(&Batch::Regression { x, y })).unwrap();
            engine.backward(&loss).unwrap();
            engine.step().unwrap();
        }
        let usage = device.memory_usage();
        let held = [Category::Parameters, Category::Gradients, Category::Optimizer].map(|c| usage.current(c));
        (parameters.numel(), held.to_vec(), engine.store().peak_live_numel())
    });
    results.into_iter().max_by_key(|(_, held, _)| held.iter().sum::<usize>()).unwrap()
}

#[test]
fn model_state_takes_the_bytes_of_the_formula_in_every_stage() {
    for ranks in [2, 4] {
        for stage in 0..=3 {
            let (numel, held, _) = measure(ranks, stage);
            let share = |from: u8, bytes: usize| numel * bytes / if stage >= from { ranks } else { 1 };
            let expected = [share(3, 2), share(2, 2), share(1, 12)];
            for (name, (held, expected)) in
                ["parameters", "gradients", "optimizer"].iter().zip(held.iter().zip(expected))
            {
                let excess = *held as f64 / expected as f64 - 1.0;
                assert!(
                    excess.abs() < 0.05,
                    "stage {stage}, {ranks} ranks: {name} hold {held} bytes, the formula says {expected}"
                );
            }
        }
    }
}

#[test]
fn stage_3_holds_no_more_whole_than_its_limit_and_one_parameter() {
    let (_, _, peak) = measure(2, 3);
    let largest = 256 * 256;
    assert!(peak > 0 && peak <= 80_000 + largest, "{peak} elements were whole at once");
}
