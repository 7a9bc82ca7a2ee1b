//! A model of one's own layers, trained on two ranks in two ways: its state divided by ZeRO-3, and its layers by a pipeline.
//!
//! cargo build --example two_ways -p ferrospeed --features examples
//! ferrospeed launch -n 2 -- target/debug/examples/two_ways

use ferrospeed::checkpointing::Recomputed;
use ferrospeed::nn::{Init, Linear, Sequential, Trained};
use ferrospeed::tensor::{Activation, Result};
use ferrospeed::{Device, Failure, Options, Setup, Tensor, World};
use ferrospeed::{init_distributed, initialize, initialize_stages, ops};

const BOTH: &str = r#""train_micro_batch_size_per_gpu": 32, "gradient_accumulation_steps": 2,
    "optimizer": { "type": "AdamW", "params": { "lr": 0.01 } }, "gradient_clipping": 1.0"#;
const ZERO_3: &str = r#""zero_optimization": {
        "stage": 3, "offload_optimizer": { "device": "cpu" }, "offload_param": { "device": "cpu" }
    }, "activation_checkpointing": { "cpu_checkpointing": true }"#;
const PIPELINE: &str = r#""pipeline": { "stages": 2, "activation_checkpoint_interval": 1 }"#;

fn mean_square(guess: &Tensor, target: &Tensor) -> Result<Tensor> {
    ops::mean(&ops::square(&ops::sub(guess, target)?)?)
}

fn model(init: &Init) -> Trained<fn(&Tensor, &Tensor) -> Result<Tensor>> {
    let layers = Sequential::new(init)
        .add(|init| Recomputed::of(Linear::new(init, 4, 64, true)))
        .add(|_| Activation::Tanh)
        .add(|init| Recomputed::of(Linear::new(init, 64, 64, true)))
        .add(|_| Activation::Tanh)
        .add(|init| Linear::new(init, 64, 1, true));
    Trained { layers, loss: mean_square }
}

/// Four numbers and the largest of them, 32 times.
fn batch(number: u64, device: &Device) -> Result<(Tensor, Tensor)> {
    let x: Vec<f32> = (0..128).map(|i| ((i * 37 + number * 101 + i * i) % 64) as f32 / 64.0).collect();
    let y: Vec<f32> = x.chunks(4).map(|row| row.iter().copied().fold(0.0, f32::max)).collect();
    Ok((Tensor::from_slice(&x, [32, 4], device)?, Tensor::from_slice(&y, [32, 1], device)?))
}

fn run(world: World) -> std::result::Result<(), Failure> {
    let (rank, device) = (world.rank() as u64, ferrospeed::cpu::device());
    let zero_3 = Setup::from_config(&format!("{{ {BOTH}, {ZERO_3} }}"), world.clone(), device.clone())?;
    let (mut engine, trained) = initialize(&zero_3, model)?;
    let mut divided = f32::NAN;
    while engine.global_steps() < 400 {
        let (x, y) = batch(2 * engine.micro_steps() + rank, &device)?;
        let loss = engine.forward(|mode| mean_square(&trained.layers.forward(&x, mode)?, &y))?;
        engine.backward(&loss)?;
        engine.step()?;
        divided = loss.item()?;
    }
    let in_stages = Setup::from_config(&format!("{{ {BOTH}, {PIPELINE} }}"), world, device.clone())?;
    let (mut engine, trained) = initialize_stages(&in_stages, Options::default(), model)?;
    let mut staged = f32::NAN;
    while engine.global_steps() < 400 {
        let first = engine.micro_steps();
        let next = |micro: usize| Ok::<_, Failure>(batch(first + micro as u64, &device)?);
        staged = engine.train_batch(&trained, next)?.0;
    }
    println!("rank {rank}: loss {divided:.4} with ZeRO-3, {staged:.4} in stages");
    if divided < 0.01 && staged < 0.01 { Ok(()) } else { Err("both should have learnt it".into()) }
}

fn main() -> std::result::Result<(), Failure> {
    run(init_distributed()?)
}

#[test]
fn it_learns_in_both_ways_on_two_ranks() {
    let _ = main as fn() -> std::result::Result<(), Failure>;
    for ended in World::on_threads(2, run) {
        ended.unwrap();
    }
}
