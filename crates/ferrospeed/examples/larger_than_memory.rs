//! ZeRO-3 of a model whose weights and optimizer states do not fit the memory they are given: they lie on a disk, and pass
//! through memory as they are needed.
//!
//! cargo run --example larger_than_memory -p ferrospeed --features examples

use std::path::Path;

use ferrospeed::nn::{Linear, Sequential};
use ferrospeed::tensor::Activation;
use ferrospeed::{DType, Failure, Setup, Tensor, World, initialize, ops};

const CONFIG: &str = r#"{
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": { "type": "AdamW", "params": { "lr": 0.001 } },
    "zero_optimization": {
        "stage": 3, "sub_group_size": 65536, "stage3_prefetch_bucket_size": 65536,
        "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 65536, "stage3_max_live_parameters": 200000,
        "offload_optimizer": { "device": "nvme", "nvme_path": "FOLDER", "buffer_count": 3 },
        "offload_param": { "device": "nvme", "nvme_path": "FOLDER", "buffer_count": 3, "max_in_cpu": 0 }
    },
    "activation_checkpointing": { "cpu_checkpointing": true }
}"#;
const WIDTH: usize = 256;
const LAYERS: usize = 24;
/// A weight, a gradient, a master and two moments of each parameter take so many bytes.
const STATE_BYTES: usize = LAYERS * (WIDTH * WIDTH + WIDTH) * 16;

fn run(world: World, folder: &Path) -> Result<(), Failure> {
    let config = CONFIG.replace("FOLDER", &folder.display().to_string());
    let setup = Setup::from_config(&config, world, ferrospeed::cpu::with_threads(1))?;
    let (mut engine, model) = initialize(&setup, |init| {
        (0..LAYERS).fold(Sequential::new(init), |layers, _| {
            layers.add(|init| Linear::new(init, WIDTH, WIDTH, true)).add(|_| Activation::Tanh)
        })
    })?;
    let x = Tensor::full([4, WIDTH], 0.5, DType::F32, engine.device())?;
    let mut losses = Vec::new();
    while engine.global_steps() < 4 {
        let loss = engine.forward(|mode| {
            let y = model.forward(&x, mode)?;
            ops::mean(&ops::square(&ops::affine(&y, 1.0, -0.25)?)?)
        })?;
        engine.backward(&loss)?;
        engine.step()?;
        losses.push(loss.item()?);
    }
    let held = engine.device().memory_usage().peak_total();
    println!(
        "{} KiB of states, at most {} KiB of memory: losses {losses:.4?}",
        STATE_BYTES >> 10,
        held >> 10
    );
    if held > STATE_BYTES / 2 || losses[3] >= losses[0] {
        return Err(format!("{held} bytes were held of {STATE_BYTES}, losses are {losses:?}").into());
    }
    Ok(())
}

fn main() -> Result<(), Failure> {
    let folder = std::env::temp_dir().join(format!("ferrospeed-larger-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let outcome = run(ferrospeed::init_distributed()?, &folder);
    std::fs::remove_dir_all(&folder)?;
    outcome
}

#[test]
fn a_model_trains_in_less_memory_than_its_states_take() -> Result<(), Failure> {
    main()
}
