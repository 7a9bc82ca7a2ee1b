//! State on a disk: the same bits as in memory, in every combination, through checkpoints, and with errors that name it.

mod common;

use std::path::Path;
use std::sync::Arc;

use common::{Batch, Model, config, device, on_ranks};
use ferrospeed_engine::{Engine, LoadOptions, Options, SaveOptions, Setup, StepReport, initialize_model};
use ferrospeed_nn::Parameters;
use ferrospeed_tensor::{Category, Tensor};
use ferrospeed_zero::access::Which;
use serde_json::{Value, json};

fn configuration(precision: &str, micro_steps: usize, optimizer: &str) -> Value {
    let mut config = json!({
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_steps,
        "gradient_clipping": 0.5,
        "optimizer": {"type": optimizer, "params": {"lr": 0.01, "weight_decay": 0.01}},
        "zero_allow_untested_optimizer": true,
        "zero_optimization": {
            "stage": 3, "stage3_param_persistence_threshold": 20, "stage3_prefetch_bucket_size": 20000,
            // Tiles are as small as they get, so that there are several.
            "sub_group_size": 1,
        },
    });
    if precision != "fp32" {
        config[precision] = json!({"enabled": true});
    }
    config
}

/// What is put on a disk in `folder`.
fn offloaded(mut config: Value, sections: &[&str], folder: &Path) -> Value {
    for section in sections {
        config["zero_optimization"][section] =
            json!({"device": "nvme", "nvme_path": folder, "buffer_count": 3});
    }
    config
}

/// The same in memory. What a GPU updates is rounded as its kernels do it, so there the states are in the host's memory.
fn in_memory(mut config: Value) -> Value {
    if !device(1).backend().is_host() {
        config["zero_optimization"]["offload_optimizer"] = json!({"device": "cpu"});
        config["zero_optimization"]["offload_param"] = json!({"device": "cpu"});
    }
    config
}

fn start(world: ferrospeed_comm::World, value: &Value) -> (Engine, Model, Parameters) {
    let (model, parameters) =
        Model::build(&json!({"kind": "lm", "vocab": 29, "dm": 32, "nh": 2, "nl": 2, "tmax": 7}));
    let setup = Setup::new(config(value, world.size()), world, device(1));
    (initialize_model(&setup, &parameters, Options::default()).unwrap(), model, parameters)
}

fn steps(engine: &mut Engine, model: &Model, from: usize, to: usize) -> Vec<u64> {
    let rank = engine.world().rank();
    let mut seen = Vec::new();
    for step in from..to {
        for micro in 0..engine.gradient_accumulation_steps() as usize {
            let ids = (0..14).map(|i| ((i * 7 + step * 5 + micro * 3 + rank * 11 + i * i) % 29) as i64);
            let ids = Tensor::from_slice(&ids.collect::<Vec<_>>(), [2, 7], engine.device()).unwrap();
            let loss = engine.forward(|_| model.loss(&Batch::Tokens(ids))).unwrap();
            seen.push(u64::from(loss.item().unwrap().to_bits()));
            engine.backward(&loss).unwrap();
            if let StepReport::Applied { grad_norm } = engine.step().unwrap() {
                seen.push(grad_norm.to_bits());
            }
        }
    }
    seen
}

fn state(engine: &Engine, parameters: &Parameters) -> Vec<u32> {
    let mut bits = Vec::new();
    for param in parameters.as_slice() {
        bits.extend(engine.store().full(param, Which::Weight).unwrap().iter().map(|value| value.to_bits()));
        if let Ok(moments) = engine.store().full(param, Which::State("exp_avg")) {
            bits.extend(moments.iter().map(|value| value.to_bits()));
        }
        bits.extend(engine.store().full_as_read(param).unwrap().iter().map(|value| value.to_bits()));
    }
    bits
}

fn train(ranks: usize, value: Value) -> Vec<(Vec<u64>, Vec<u32>)> {
    let value = Arc::new(value);
    on_ranks(ranks, move |world| {
        let (mut engine, model, parameters) = start(world, &value);
        let seen = steps(&mut engine, &model, 0, 3);
        (seen, state(&engine, &parameters))
    })
}

const COMBINATIONS: [&[&str]; 3] =
    [&["offload_optimizer"], &["offload_param"], &["offload_optimizer", "offload_param"]];

#[test]
fn state_on_a_disk_trains_to_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    for ranks in [1, 2, 3] {
        for precision in ["fp32", "bf16"] {
            for micro_steps in [1, 2] {
                let plain = configuration(precision, micro_steps, "AdamW");
                let reference = train(ranks, in_memory(plain.clone()));
                for sections in COMBINATIONS {
                    let found = train(ranks, offloaded(plain.clone(), sections, folder.path()));
                    assert_eq!(
                        found, reference,
                        "{ranks} ranks, {precision}, {micro_steps} micro-batches, {sections:?}"
                    );
                }
            }
        }
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "swap files stayed");
}

#[test]
fn states_in_host_memory_are_updated_as_on_the_device() {
    let plain = configuration("bf16", 1, "AdamW");
    let floats = |outcome: &[(Vec<u64>, Vec<u32>)]| -> Vec<f32> {
        outcome[0].1.iter().map(|bits| f32::from_bits(*bits)).collect()
    };
    let (here, there) = (floats(&train(2, plain.clone())), floats(&train(2, in_memory(plain))));
    let apart = here.iter().zip(&there).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    // Three steps of Adam at a rate of 0.01; on a host, where both are one memory, there is no difference at all.
    let bound = if device(1).backend().is_host() { 0.0 } else { 1e-2 };
    assert!(apart <= bound, "{apart} apart");
}

#[test]
fn every_elementwise_optimizer_works_on_a_disk_and_lamb_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    for optimizer in ["Adam", "SGD", "Adagrad", "Lion"] {
        let plain = configuration("bf16", 1, optimizer);
        let away = offloaded(plain.clone(), COMBINATIONS[2], folder.path());
        assert_eq!(train(2, away), train(2, in_memory(plain)), "{optimizer}");
    }
    let lamb = offloaded(configuration("bf16", 1, "Lamb"), COMBINATIONS[0], folder.path());
    on_ranks(1, move |world| {
        let (_, parameters) =
            Model::build(&json!({"kind": "lm", "vocab": 29, "dm": 32, "nh": 2, "nl": 2, "tmax": 7}));
        let setup = Setup::new(config(&lamb, 1), world, device(1));
        let refused = initialize_model(&setup, &parameters, Options::default()).err().unwrap().to_string();
        assert!(refused.contains("Lamb") && refused.contains("offload"), "{refused}");
    });
}

#[test]
fn state_on_a_disk_goes_through_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let (swap, saved) = (folder.path().join("swap"), folder.path().join("saved"));
    let plain = in_memory(configuration("bf16", 1, "AdamW"));
    let away = offloaded(plain.clone(), COMBINATIONS[2], &swap);
    let straight = train(2, plain.clone());
    // Saved from a disk, loaded into memory, and the other way round.
    for (first, second) in
        [(away.clone(), plain.clone()), (plain.clone(), away.clone()), (away.clone(), away.clone())]
    {
        let (first, second, saved) = (Arc::new(first), Arc::new(second), saved.clone());
        let _ = std::fs::remove_dir_all(&saved);
        let found = on_ranks(2, move |world| {
            let (mut engine, model, _) = start(world.clone(), &first);
            let mut seen = steps(&mut engine, &model, 0, 2);
            engine.save_checkpoint(&saved, &SaveOptions::default()).unwrap();
            drop((engine, model));
            let (mut engine, model, parameters) = start(world, &second);
            engine.load_checkpoint(&saved, &LoadOptions::default()).unwrap();
            seen.extend(steps(&mut engine, &model, 2, 3));
            (seen, state(&engine, &parameters))
        });
        assert_eq!(found, straight);
    }
}

#[test]
fn memory_holds_a_few_tiles_instead_of_the_states() {
    let folder = tempfile::tempdir().unwrap();
    let measured = |value: Value| {
        let value = Arc::new(value);
        on_ranks(1, move |world| {
            let (mut engine, model, _) = start(world, &value);
            steps(&mut engine, &model, 0, 2);
            engine.store().empty_partition_cache().unwrap();
            let usage = engine.device().memory_usage();
            let bytes = [Category::Parameters, Category::Optimizer].map(|category| usage.current(category));
            (bytes, engine.store().disk_traffic())
        })
        .remove(0)
    };
    let plain = configuration("bf16", 1, "AdamW");
    let (_, nothing) = measured(plain.clone());
    assert_eq!((nothing.read, nothing.written), (0, 0));
    let (bytes, traffic) = measured(offloaded(plain, COMBINATIONS[2], folder.path()));
    assert_eq!(bytes, [0, 0]);
    assert!(traffic.read > 0 && traffic.written > 0);
}

#[test]
fn a_disk_without_room_is_named_before_training() {
    let value = offloaded(configuration("bf16", 1, "AdamW"), COMBINATIONS[0], Path::new("/proc/nowhere"));
    on_ranks(1, move |world| {
        let (_, parameters) =
            Model::build(&json!({"kind": "lm", "vocab": 29, "dm": 32, "nh": 2, "nl": 2, "tmax": 7}));
        let setup = Setup::new(config(&value, 1), world, device(1));
        let refused = initialize_model(&setup, &parameters, Options::default()).err().unwrap().to_string();
        assert!(refused.contains("/proc/nowhere") && refused.contains("offloaded"), "{refused}");
    });
}
