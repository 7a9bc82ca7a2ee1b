//! Passes that somebody else computes are passes: the same bits as those of the engine's own.

use std::sync::Arc;

use super::common::{Batch, Model, engine, on_ranks};
use ferrospeed_engine::{BackwardOptions, Engine};
use ferrospeed_tensor::{Tensor, autograd};
use ferrospeed_zero::access::Which;
use serde_json::{Value, json};

/// One micro-batch as another framework computes it: its own forward, its own walk through its own graph.
fn outside(engine: &mut Engine, model: &Model, batch: &Batch) -> f32 {
    engine.begin_outside_forward().unwrap();
    let loss = model.loss(batch).unwrap();
    let backward = engine.begin_outside_backward(BackwardOptions::default()).unwrap();
    let seed = Tensor::full(*loss.shape(), backward.seed, loss.dtype(), loss.device()).unwrap();
    autograd::backward_with(&[(loss.clone(), seed)]).unwrap();
    let value = loss.item().unwrap();
    engine.end_outside_backward(backward, Some(value)).unwrap();
    value
}

fn train(is_outside: bool, config: Value) -> Vec<(Vec<u32>, Vec<u32>)> {
    let config = Arc::new(config);
    on_ranks(2, move |world| {
        let description = json!({"kind": "lm", "vocab": 13, "dm": 12, "nh": 3, "nl": 2, "tmax": 7});
        let (model, parameters) = Model::build(&description);
        let rank = world.rank();
        let mut engine = engine(world, &config, &parameters, None, None, 1);
        let mut losses = Vec::new();
        for micro in 0..6 {
            let ids: Vec<i64> =
                (0..14).map(|i| (i * 7 + micro * 3 + rank as i64 * 11 + i * i) % 13).collect();
            let batch = Batch::Tokens(Tensor::from_slice(&ids, [2, 7], engine.device()).unwrap());
            let loss = if is_outside {
                outside(&mut engine, &model, &batch)
            } else {
                let loss = engine.forward(|_| model.loss(&batch)).unwrap();
                engine.backward(&loss).unwrap();
                loss.item().unwrap()
            };
            losses.push(loss.to_bits());
            engine.step().unwrap();
        }
        let weights = parameters.as_slice().iter().map(|param| engine.store().full(param, Which::Weight));
        (losses, weights.flat_map(Result::unwrap).map(f32::to_bits).collect())
    })
}

#[test]
fn a_pass_that_is_computed_outside_has_the_bits_of_one_of_the_engine() {
    for stage in 0..4 {
        for precision in [json!({}), json!({"fp16": {"enabled": true, "initial_scale_power": 8}})] {
            let mut config = json!({
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 2,
                "gradient_clipping": 0.1,
                "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
            });
            config.as_object_mut().unwrap().extend(precision.as_object().unwrap().clone());
            let (own, others) = (train(false, config.clone()), train(true, config));
            assert_eq!(own, others, "stage {stage}, {precision}");
        }
    }
}

#[test]
fn below_stage_3_a_value_stays_where_it_is_and_a_step_changes_it_there() {
    for stage in 0..4 {
        let config = Arc::new(json!({
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
            "zero_optimization": {"stage": stage},
        }));
        on_ranks(1, move |world| {
            let description = json!({"kind": "lm", "vocab": 13, "dm": 12, "nh": 3, "nl": 2, "tmax": 7});
            let (model, parameters) = Model::build(&description);
            let mut engine = engine(world, &config, &parameters, None, None, 1);
            let param = &parameters.as_slice()[0];
            // SAFETY: nobody reads it while a step runs.
            let value = unsafe { engine.store().unguarded(param) }.unwrap();
            assert_eq!(value.is_none(), stage == 3);
            let Some(value) = value else { return };
            let before = value.to_vec_f32().unwrap();
            let batch = Batch::Tokens(Tensor::from_slice(&[1i64; 14], [2, 7], engine.device()).unwrap());
            outside(&mut engine, &model, &batch);
            engine.step().unwrap();
            engine.store().settle("step").unwrap();
            let after = value.to_vec_f32().unwrap();
            assert_ne!(after, before);
            assert_eq!(after, param.read().unwrap().to_vec_f32().unwrap());
        });
    }
}
