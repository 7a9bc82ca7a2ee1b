//! State in shards with replicas: every stage gives the same bits on one mesh, and nearly the same numbers on all.

use std::sync::Arc;

use super::common::{Batch, Model, config, device, on_ranks};
use ferrospeed_engine::{Engine, LoadOptions, Options, SaveOptions, Setup, StepReport, initialize_model};
use ferrospeed_nn::Parameters;
use ferrospeed_tensor::{Category, Tensor};
use ferrospeed_zero::access::Which;
use ferrospeed_zero::{Elsewhere, Sharding};
use serde_json::{Value, json};

fn description() -> Value {
    json!({"kind": "lm", "vocab": 13, "dm": 12, "nh": 3, "nl": 2, "tmax": 7})
}

fn configuration(stage: u8, precision: &str, micro_steps: usize, overlap: bool) -> Value {
    let mut config = json!({
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_steps,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": stage, "overlap_comm": overlap, "reduce_bucket_size": 500,
            "stage3_param_persistence_threshold": 20, "stage3_prefetch_bucket_size": 2000,
            "reduce_each_micro_batch": true,
        },
    });
    if precision != "fp32" {
        config[precision] = json!({"enabled": true});
    }
    config
}

/// An engine whose state lies in shards of this many ranks, whatever the stage.
fn start(world: ferrospeed_comm::World, value: &Value, shard: usize) -> (Engine, Model, Parameters) {
    let (model, parameters) = Model::build(&description());
    let sharding = Sharding::in_shards_of(&world, shard).unwrap();
    let setup = Setup::new(config(value, world.size()), world, device(1));
    let options = Options { sharding: Some(sharding), ..Default::default() };
    (initialize_model(&setup, &parameters, options).unwrap(), model, parameters)
}

fn steps(engine: &mut Engine, model: &Model, from: usize, to: usize) -> Vec<u32> {
    let rank = engine.world().rank();
    let mut seen = Vec::new();
    for step in from..to {
        for micro in 0..engine.gradient_accumulation_steps() as usize {
            let ids = (0..14).map(|i| ((i * 7 + step * 5 + micro * 3 + rank * 11 + i * i) % 13) as i64);
            let ids = Tensor::from_slice(&ids.collect::<Vec<_>>(), [2, 7], engine.device()).unwrap();
            let loss = engine.forward(|_| model.loss(&Batch::Tokens(ids))).unwrap();
            seen.push(loss.item().unwrap().to_bits());
            engine.backward(&loss).unwrap();
            if let StepReport::Applied { grad_norm } = engine.step().unwrap() {
                seen.push((grad_norm as f32).to_bits());
            }
        }
    }
    seen
}

fn weights(engine: &Engine, parameters: &Parameters) -> Vec<u32> {
    let full = |param| engine.store().full(param, Which::Weight).unwrap();
    parameters.as_slice().iter().flat_map(full).map(f32::to_bits).collect()
}

fn train(ranks: usize, shard: usize, value: Value) -> Vec<(Vec<u32>, Vec<u32>)> {
    let value = Arc::new(value);
    on_ranks(ranks, move |world| {
        let (mut engine, model, parameters) = start(world, &value, shard);
        let seen = steps(&mut engine, &model, 0, 3);
        (seen, weights(&engine, &parameters))
    })
}

#[test]
fn every_stage_gives_the_same_bits_on_a_mesh_of_shards_and_replicas() {
    for (ranks, shard) in [(2, 1), (4, 2), (4, 1), (6, 3)] {
        for precision in ["fp32", "bf16"] {
            for (micro_steps, overlap) in [(1, false), (2, true)] {
                let reference = train(ranks, shard, configuration(0, precision, micro_steps, overlap));
                let first = &reference[0].1;
                assert!(reference.iter().all(|rank| rank.1 == *first), "replicas drift apart");
                for stage in 1..=3 {
                    let outcome = train(ranks, shard, configuration(stage, precision, micro_steps, overlap));
                    assert_eq!(
                        outcome, reference,
                        "stage {stage}, {ranks} ranks in shards of {shard}, {precision}, {micro_steps} micro-batches"
                    );
                }
            }
        }
    }
}

/// Trains with the feed-forward parameters spread over pairs of ranks, the rest over all.
fn train_in_two_ways(value: Value) -> Vec<(Vec<u32>, Vec<u32>)> {
    let value = Arc::new(value);
    on_ranks(4, move |world| {
        let (model, parameters) = Model::build(&description());
        let (some, _) = parameters.partition(|param| param.shape().numel() > 100);
        assert!(some.as_slice().len() > 1 && some.as_slice().len() < parameters.as_slice().len());
        let elsewhere = Elsewhere {
            params: some.as_slice().to_vec(),
            sharding: Sharding::in_shards_of(&world, 2).unwrap(),
        };
        let setup = Setup::new(config(&value, world.size()), world.clone(), device(1));
        let options =
            Options { elsewhere: vec![elsewhere], agreement: Some(world.group()), ..Default::default() };
        let mut engine = initialize_model(&setup, &parameters, options).unwrap();
        let seen = steps(&mut engine, &model, 0, 3);
        (seen, weights(&engine, &parameters))
    })
}

#[test]
fn parameters_of_one_store_are_spread_in_several_ways() {
    for precision in ["fp32", "bf16"] {
        for (micro_steps, overlap) in [(1, false), (2, true)] {
            let reference = train_in_two_ways(configuration(0, precision, micro_steps, overlap));
            assert!(reference.iter().all(|rank| rank.1 == reference[0].1), "ranks drift apart");
            for stage in 1..=3 {
                let outcome = train_in_two_ways(configuration(stage, precision, micro_steps, overlap));
                assert_eq!(outcome, reference, "stage {stage}, {precision}, {micro_steps} micro-batches");
            }
            // The norms, which count every element once, are those of the plain run but for the order of sums.
            let plain = train(4, 4, configuration(0, precision, micro_steps, overlap));
            let per_step = micro_steps + 1;
            let norm = |seen: &[u32]| f32::from_bits(seen[per_step - 1]);
            let (found, wanted) = (norm(&reference[0].0), norm(&plain[0].0));
            assert!((found / wanted - 1.0).abs() < 1e-2, "{precision}: a norm of {found}, not {wanted}");
        }
    }
}

#[test]
fn meshes_agree_within_the_rounding_of_sums() {
    let floats = |outcome: &[(Vec<u32>, Vec<u32>)]| -> Vec<f32> {
        outcome[0].1.iter().map(|bits| f32::from_bits(*bits)).collect()
    };
    let whole = floats(&train(4, 4, configuration(3, "fp32", 2, false)));
    for shard in [1, 2] {
        let other = floats(&train(4, shard, configuration(3, "fp32", 2, false)));
        let apart = whole.iter().zip(&other).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        // Three steps of Adam at a rate of 0.01: what rounding can turn is far below one of them.
        assert!(apart < 1e-3, "shards of {shard}: {apart} apart");
    }
}

#[test]
fn mics_shard_size_makes_the_shards_and_keeps_a_whole_copy_in_each() {
    let run = |mics: Option<u64>| {
        on_ranks(4, move |world| {
            let mut value = configuration(3, "bf16", 1, true);
            if let Some(size) = mics {
                value["zero_optimization"]["mics_shard_size"] = size.into();
            }
            let (model, parameters) = Model::build(&description());
            let setup = Setup::new(config(&value, world.size()), world, device(1));
            let mut engine = initialize_model(&setup, &parameters, Options::default()).unwrap();
            let seen = steps(&mut engine, &model, 0, 3);
            engine.store().empty_partition_cache().unwrap();
            let usage = engine.device().memory_usage();
            let bytes = [Category::Parameters, Category::Optimizer].map(|category| usage.current(category));
            (seen, weights(&engine, &parameters), bytes)
        })
    };
    let (plain, shards) = (run(None), run(Some(2)));
    for (rank, (plain, shards)) in plain.iter().zip(&shards).enumerate() {
        for (plain, shards) in plain.2.iter().zip(&shards.2) {
            let ratio = *shards as f64 / *plain as f64;
            assert!((1.8..2.2).contains(&ratio), "rank {rank} holds {ratio} times as much as without");
        }
    }
    let by_hand = train(4, 2, configuration(3, "bf16", 1, true));
    let by_key: Vec<_> = shards.into_iter().map(|(seen, weights, _)| (seen, weights)).collect();
    assert_eq!(by_key, by_hand);
}

#[test]
fn a_shard_size_that_does_not_divide_the_ranks_is_refused() {
    on_ranks(3, |world| {
        let mut value = configuration(3, "fp32", 1, false);
        value["zero_optimization"]["mics_shard_size"] = 2.into();
        let (_, parameters) = Model::build(&description());
        let setup = Setup::new(config(&value, 3), world, device(1));
        let error = initialize_model(&setup, &parameters, Options::default()).err().unwrap().to_string();
        assert!(error.contains("3 ranks cannot be cut into shards of 2"), "{error}");
    });
}

#[test]
fn a_checkpoint_goes_from_any_mesh_to_any_other() {
    let folder = tempfile::tempdir().unwrap();
    for (stage, shard) in [(3, 2), (1, 2), (2, 1)] {
        let dir = folder.path().join(format!("{stage}-{shard}"));
        let saved = {
            let dir = dir.clone();
            on_ranks(4, move |world| {
                let (mut engine, model, parameters) =
                    start(world, &configuration(stage, "bf16", 1, false), shard);
                steps(&mut engine, &model, 0, 2);
                engine.save_checkpoint(&dir, &SaveOptions::default()).unwrap();
                weights(&engine, &parameters)
            })
        };
        for (ranks, other_stage, other_shard) in [(4, 3, 4), (2, 3, 1), (4, stage, shard)] {
            let dir = dir.clone();
            let loaded = on_ranks(ranks, move |world| {
                let (mut engine, model, parameters) =
                    start(world, &configuration(other_stage, "bf16", 1, false), other_shard);
                engine.load_checkpoint(&dir, &LoadOptions::default()).unwrap();
                let loaded = weights(&engine, &parameters);
                let goes_on = steps(&mut engine, &model, 2, 3);
                assert!(goes_on.iter().all(|bits| f32::from_bits(*bits).is_finite()));
                loaded
            });
            assert!(
                loaded.iter().all(|rank| *rank == saved[0]),
                "{stage}/{shard} -> {other_stage}/{other_shard}"
            );
        }
    }
}
