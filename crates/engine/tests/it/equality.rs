//! The stages differ in where state lives, not in a single bit of what comes out.

use super::common;
use std::sync::Arc;

use super::common::{Batch, Model, engine, on_ranks};
use ferrospeed_engine::{BackwardOptions, StepReport};
use ferrospeed_tensor::{Device, Tensor, ops};
use ferrospeed_zero::access::Which;
use serde_json::{Value, json};

fn description() -> Value {
    json!({"kind": "lm", "vocab": 13, "dm": 12, "nh": 3, "nl": 2, "tmax": 7})
}

fn batch(step: usize, micro: usize, rank: usize, device: &Device) -> Batch {
    let ids: Vec<i64> =
        (0..14).map(|i| ((i * 7 + step * 5 + micro * 3 + rank * 11 + i * i) % 13) as i64).collect();
    Batch::Tokens(Tensor::from_slice(&ids, [2, 7], device).unwrap())
}

/// Losses, norms and master weights, as bits.
#[derive(Debug, PartialEq, Eq, Clone)]
struct Outcome {
    losses: Vec<u32>,
    norms: Vec<u64>,
    weights: Vec<u32>,
}

fn train(ranks: usize, micro_steps: usize, threads: usize, config: Value) -> Vec<Outcome> {
    let config = Arc::new(config);
    on_ranks(ranks, move |world| {
        let rank = world.rank();
        let (model, parameters) = Model::build(&description());
        let mut engine = engine(world, &config, &parameters, None, None, threads);
        let device = engine.device().clone();
        let mut outcome = Outcome { losses: Vec::new(), norms: Vec::new(), weights: Vec::new() };
        for step in 0..3 {
            for micro in 0..micro_steps {
                let batch = batch(step, micro, rank, &device);
                let loss = engine.forward(|_| model.loss(&batch)).unwrap();
                outcome.losses.push(loss.item().unwrap().to_bits());
                engine.backward(&loss).unwrap();
                if let StepReport::Applied { grad_norm } = engine.step().unwrap() {
                    outcome.norms.push(grad_norm.to_bits());
                }
            }
        }
        assert_eq!(outcome.norms.len(), 3, "every step was applied");
        for param in parameters.as_slice() {
            let weight = engine.store().full(param, Which::Weight).unwrap();
            outcome.weights.extend(weight.iter().map(|w| w.to_bits()));
        }
        outcome
    })
}

fn configuration(stage: u8, precision: &str, micro_steps: usize, clip: f64, optimizer: &str) -> Value {
    let mut config = json!({
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_steps,
        "gradient_clipping": clip,
        "optimizer": {"type": optimizer, "params": {"lr": 0.01, "weight_decay": 0.01}},
        "zero_allow_untested_optimizer": true,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 500, "stage3_param_persistence_threshold": 20},
    });
    if precision != "fp32" {
        // A fixed scale that does not overflow; what happens when it does is another test.
        let scale = if precision == "fp16" {
            json!({"enabled": true, "loss_scale": 128.0})
        } else {
            json!({"enabled": true})
        };
        config[precision] = scale;
    }
    config
}

/// With accumulation, where every micro-batch is averaged over ranks by itself in all stages.
fn each_micro_batch(mut config: Value) -> Value {
    config["zero_optimization"]["reduce_each_micro_batch"] = true.into();
    config
}

#[test]
fn stages_agree_over_precisions_accumulation_clipping_and_ranks() {
    for ranks in [1, 2, 3, 4] {
        for precision in ["fp32", "bf16", "fp16"] {
            for (micro_steps, clip) in [(1, 0.0), (3, 0.5)] {
                let run = |stage| {
                    let config = configuration(stage, precision, micro_steps, clip, "AdamW");
                    train(ranks, micro_steps, 1, each_micro_batch(config))
                };
                let reference = run(0);
                for stage in 1..=3 {
                    assert_eq!(
                        run(stage),
                        reference,
                        "stage {stage}, {ranks} ranks, {precision}, {micro_steps} micro-batches, clip {clip}"
                    );
                }
            }
        }
    }
}

#[test]
fn an_accumulation_is_reduced_once_in_stages_0_and_1_to_the_same_bits() {
    let first_norm = |outcome: &[Outcome]| f64::from_bits(outcome[0].norms[0]);
    for ranks in [1, 2, 3] {
        for precision in ["fp32", "bf16", "fp16"] {
            for clip in [0.0, 0.5] {
                let run = |stage| train(ranks, 3, 1, configuration(stage, precision, 3, clip, "AdamW"));
                let outcomes: Vec<Vec<Outcome>> = (0..=3).map(run).collect();
                let case = format!("{ranks} ranks, {precision}, clip {clip}");
                assert_eq!(outcomes[0], outcomes[1], "{case}");
                assert_eq!(outcomes[2], outcomes[3], "{case}");
                if ranks == 1 {
                    assert_eq!(outcomes[0], outcomes[2], "{case}");
                }
                // Between the pairs only sums are rounded in another order.
                let bound = if precision == "fp32" { 1e-5 } else { 2e-2 };
                let apart = (first_norm(&outcomes[0]) / first_norm(&outcomes[2]) - 1.0).abs();
                assert!(apart < bound, "{case}: norms are {apart} apart");
            }
        }
    }
}

#[test]
fn one_reduction_serves_an_accumulation_in_stages_0_and_1() {
    let bytes = |stage, micro_steps: usize, each: bool| {
        let mut config = configuration(stage, "bf16", micro_steps, 0.0, "AdamW");
        config["zero_optimization"]["reduce_each_micro_batch"] = each.into();
        let config = Arc::new(config);
        on_ranks(2, move |world| {
            let (model, parameters) = Model::build(&description());
            let mut engine = engine(world, &config, &parameters, None, None, 1);
            let device = engine.device().clone();
            engine.world().log().start();
            for micro in 0..micro_steps {
                let batch = batch(0, micro, engine.world().rank(), &device);
                let loss = engine.forward(|_| model.loss(&batch)).unwrap();
                engine.backward(&loss).unwrap();
                engine.step().unwrap();
            }
            let log = engine.world().log().summary();
            log.iter()
                .filter(|row| row.operation.contains("reduce"))
                .map(|row| row.bytes as u64 * row.count)
                .sum::<u64>()
        })[0]
    };
    for stage in [0, 1] {
        let (one, four) = (bytes(stage, 1, false), bytes(stage, 4, false));
        assert!(four < one + one / 4, "stage {stage}: {four} bytes for four micro-batches, {one} for one");
        assert!(bytes(stage, 4, true) > 3 * one, "stage {stage}");
    }
    assert!(bytes(2, 4, false) > 3 * bytes(2, 1, false));
}

#[test]
fn stages_agree_for_every_optimizer() {
    for optimizer in ["Adam", "AdamW", "SGD", "Adagrad", "Lion", "Lamb", "Muon"] {
        let config = |stage| {
            let mut config = configuration(stage, "bf16", 1, 0.5, optimizer);
            if optimizer == "SGD" {
                config["optimizer"]["params"]["momentum"] = 0.9.into();
            }
            config
        };
        let reference = train(3, 1, 1, config(0));
        for stage in 1..=3 {
            assert_eq!(train(3, 1, 1, config(stage)), reference, "{optimizer}, stage {stage}");
        }
    }
}

#[test]
fn overlap_buckets_and_threads_change_no_bit() {
    for stage in 0..=3 {
        let reference = train(2, 2, 1, configuration(stage, "bf16", 2, 0.5, "AdamW"));
        for (overlap, bucket, threads) in [(true, 500, 1), (false, 1, 1), (true, 100_000, 2), (false, 77, 3)]
        {
            let mut config = configuration(stage, "bf16", 2, 0.5, "AdamW");
            config["zero_optimization"]["overlap_comm"] = overlap.into();
            config["zero_optimization"]["reduce_bucket_size"] = bucket.into();
            let outcome = train(2, 2, threads, config);
            assert_eq!(
                outcome, reference,
                "stage {stage}, overlap {overlap}, bucket {bucket}, {threads} threads"
            );
        }
    }
}

#[test]
fn the_limits_of_stage_3_change_no_bit() {
    let reference = train(2, 1, 1, configuration(0, "bf16", 1, 0.5, "AdamW"));
    for (prefetch, live, reuse, persist) in
        [(0, 0, 0, 0), (100, 400, 200, 0), (1_000_000, 1_000_000, 0, 100), (50, 1_000, 1_000_000, 0)]
    {
        let mut config = configuration(3, "bf16", 1, 0.5, "AdamW");
        let zero = &mut config["zero_optimization"];
        zero["stage3_prefetch_bucket_size"] = prefetch.into();
        zero["stage3_max_live_parameters"] = live.into();
        zero["stage3_max_reuse_distance"] = reuse.into();
        zero["stage3_param_persistence_threshold"] = persist.into();
        assert_eq!(
            train(2, 1, 1, config),
            reference,
            "prefetch {prefetch}, live {live}, reuse {reuse}, persist {persist}"
        );
    }
}

#[test]
fn an_overflow_is_skipped_by_all_ranks_in_all_stages_alike() {
    for ranks in [1, 2] {
        let outcomes: Vec<Vec<(u64, f64, Vec<u32>)>> = (0..=3)
            .map(|stage| {
                let mut config = configuration(stage, "fp16", 1, 0.5, "AdamW");
                // The first scale is far too large; it halves until gradients fit.
                config["fp16"] = json!({"enabled": true, "initial_scale_power": 30, "hysteresis": 1});
                let config = Arc::new(config);
                on_ranks(ranks, move |world| {
                    let rank = world.rank();
                    let (model, parameters) = Model::build(&description());
                    let mut engine = engine(world, &config, &parameters, None, None, 1);
                    let device = engine.device().clone();
                    for step in 0..24 {
                        let batch = batch(step, 0, rank, &device);
                        let loss = engine.forward(|_| model.loss(&batch)).unwrap();
                        engine.backward(&loss).unwrap();
                        engine.step().unwrap();
                    }
                    let weights = parameters.as_slice().iter().flat_map(|param| {
                        engine.store().full(param, Which::Weight).unwrap().into_iter().map(f32::to_bits)
                    });
                    (engine.skipped_steps(), engine.loss_scale(), weights.collect())
                })
            })
            .collect();
        let (skipped, scale, _) = &outcomes[0][0];
        assert!(*skipped > 3 && *skipped < 24, "{skipped} steps were skipped");
        assert_eq!(*scale, 2f64.powi(30 - *skipped as i32));
        for (stage, ranks) in outcomes.iter().enumerate() {
            assert_eq!(ranks, &outcomes[0], "stage {stage}");
        }
    }
}

#[test]
fn gathered_parameters_are_whole_and_take_what_the_modifier_makes_of_them() {
    for stage in [0, 2, 3] {
        let seen = common::on_ranks(3, move |world| {
            let rank = world.rank();
            let description = serde_json::json!({"kind": "mlp", "d": [5, 4, 3, 2]});
            let config = serde_json::json!({
                "train_micro_batch_size_per_gpu": 1,
                "bf16": {"enabled": true},
                "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            });
            let (_, parameters) = common::Model::build(&description);
            let engine = common::engine(world, &config, &parameters, None, None, 1);
            let (store, params) = (engine.store(), &parameters.as_slice()[..2]);
            let before = store.gathered(params, None, |values| {
                let copy = values.to_vec();
                values.iter_mut().for_each(|value| value.fill(99.0));
                copy
            });
            let before = before.unwrap();
            assert_eq!(before.iter().map(Vec::len).collect::<Vec<_>>(), [20, 4]);
            // Everyone writes; the modifier's counts.
            store
                .gathered(params, Some(1), |values| {
                    assert_eq!(values, &before[..], "what nobody modifies stays");
                    values.iter_mut().for_each(|value| value.fill(rank as f32 + 0.5));
                })
                .unwrap();
            let error = store.gathered(params, Some(3), |_| ()).unwrap_err().to_string();
            assert!(error.contains("rank 3"), "{error}");
            let error =
                store.gathered(params, Some(0), |values| values[0].truncate(1)).unwrap_err().to_string();
            assert!(error.contains("has 20 elements, the new value 1"), "{error}");
            params.iter().map(|param| store.full_as_read(param).unwrap()).collect::<Vec<_>>()
        });
        for values in seen {
            assert!(values.iter().flatten().all(|value| *value == 1.5), "stage {stage}: {values:?}");
        }
    }
}

/// Norms of two steps whose losses go backward twice over one graph, or once with twice the weight.
fn norms_of_doubled_losses(
    ranks: usize,
    micro_steps: usize,
    config: Value,
    retain_graph: bool,
) -> Vec<Vec<u64>> {
    on_ranks(ranks, move |world| {
        let rank = world.rank();
        let (model, parameters) = Model::build(&description());
        let mut engine = engine(world, &config, &parameters, None, None, 1);
        let device = engine.device().clone();
        let mut norms = Vec::new();
        for (step, micro) in (0..2).flat_map(|step| (0..micro_steps).map(move |micro| (step, micro))) {
            let batch = batch(step, micro, rank, &device);
            let loss = engine.forward(|_| model.loss(&batch)).unwrap();
            if retain_graph {
                let options = BackwardOptions { retain_graph, ..BackwardOptions::default() };
                engine.backward_with(&loss, options).unwrap();
                engine.backward(&loss).unwrap();
            } else {
                engine.backward(&ops::affine(&loss, 2.0, 0.0).unwrap()).unwrap();
            }
            if let StepReport::Applied { grad_norm } = engine.step().unwrap() {
                norms.push(grad_norm.to_bits());
            }
        }
        norms
    })
}

#[test]
fn a_retained_graph_goes_backward_again_and_adds_to_the_same_micro_batch() {
    // Twice a gradient is exact, so the sum of two passes has the bits of one with twice the loss; with another micro-batch
    // behind it, that one's two gradients are added one after the other.
    for (ranks, micro_steps) in [(1, 1), (2, 1), (2, 2)] {
        for stage in 0..4 {
            let config = configuration(stage, "fp32", micro_steps, 0.5, "AdamW");
            let case = format!("stage {stage}, {ranks} ranks, {micro_steps} micro-batches");
            let retained = norms_of_doubled_losses(ranks, micro_steps, config.clone(), true);
            let doubled = norms_of_doubled_losses(ranks, micro_steps, config, false);
            if micro_steps == 1 {
                assert_eq!(retained, doubled, "{case}");
            }
            for (a, b) in retained.iter().flatten().zip(doubled.iter().flatten()) {
                let (a, b) = (f64::from_bits(*a), f64::from_bits(*b));
                assert!((a - b).abs() <= 1e-6 * b, "{case}: {a} and {b}");
            }
        }
    }
}
