//! A small model with state on a disk, and what it trains to.

use std::path::Path;
use std::sync::Arc;

use ferrospeed_engine::{Engine, Options, Setup, StepReport, initialize_model};
use ferrospeed_nn::Parameters;
use ferrospeed_tensor::Tensor;
use ferrospeed_zero::access::Which;
use serde_json::{Value, json};

use crate::common::{Batch, Model, config, device, on_ranks};

pub(crate) fn configuration(precision: &str, micro_steps: usize, optimizer: &str) -> Value {
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
pub(crate) fn offloaded(mut config: Value, sections: &[&str], folder: &Path) -> Value {
    for section in sections {
        config["zero_optimization"][section] =
            json!({"device": "nvme", "nvme_path": folder, "buffer_count": 3});
    }
    if sections.contains(&"offload_param") {
        config["zero_optimization"]["offload_param"]["max_in_cpu"] = json!(0);
    }
    config
}

/// The same in memory. What a GPU updates is rounded as its kernels do it, so there the states are in the host's memory.
pub(crate) fn in_memory(mut config: Value) -> Value {
    if !device(1).backend().is_host() {
        config["zero_optimization"]["offload_optimizer"] = json!({"device": "cpu"});
        config["zero_optimization"]["offload_param"] = json!({"device": "cpu"});
    }
    config
}

pub(crate) fn start(world: ferrospeed_comm::World, value: &Value) -> (Engine, Model, Parameters) {
    let (model, parameters) =
        Model::build(&json!({"kind": "lm", "vocab": 29, "dm": 32, "nh": 2, "nl": 2, "tmax": 7}));
    let setup = Setup::new(config(value, world.size()), world, device(1));
    (initialize_model(&setup, &parameters, Options::default()).unwrap(), model, parameters)
}

pub(crate) fn steps(engine: &mut Engine, model: &Model, from: usize, to: usize) -> Vec<u64> {
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

pub(crate) fn state(engine: &Engine, parameters: &Parameters) -> Vec<u32> {
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

pub(crate) fn train(ranks: usize, value: Value) -> Vec<(Vec<u64>, Vec<u32>)> {
    let value = Arc::new(value);
    on_ranks(ranks, move |world| {
        let (mut engine, model, parameters) = start(world, &value);
        let seen = steps(&mut engine, &model, 0, 3);
        (seen, state(&engine, &parameters))
    })
}

/// What can be on a disk.
pub(crate) const COMBINATIONS: [&[&str]; 3] =
    [&["offload_optimizer"], &["offload_param"], &["offload_optimizer", "offload_param"]];
