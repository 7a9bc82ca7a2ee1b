//! A model of one's own with a loop of one's own: two layers that learn to multiply two numbers.
//!
//! Alone:           cargo run --example custom_model -p ferrospeed --features examples
//! On four ranks:   ferrospeed launch -n 4 -- target/debug/examples/custom_model

use ferrospeed::nn::{Init, Linear};
use ferrospeed::tensor::random::RandomKey;
use ferrospeed::{Device, Failure, Setup, Tensor, World, init_distributed, initialize, ops};

const CONFIG: &str = r#"{
    "train_micro_batch_size_per_gpu": 64,
    "optimizer": { "type": "AdamW", "params": { "lr": 0.01 } },
    "gradient_clipping": 1.0,
    "zero_optimization": { "stage": 3 } // where state lives; the model does not know
}"#;

struct Product {
    hidden: Linear,
    out: Linear,
}

impl Product {
    fn new(init: &Init) -> Product {
        Product {
            hidden: Linear::new(&init.at("hidden"), 2, 64, true),
            out: Linear::new(&init.at("out"), 64, 1, true),
        }
    }

    fn loss(&self, x: &Tensor, y: &Tensor) -> ferrospeed::tensor::Result<Tensor> {
        let guess = self.out.forward(&ops::tanh(&self.hidden.forward(x)?)?)?;
        ops::mean(&ops::square(&ops::sub(&guess, y)?)?)
    }
}

/// 64 pairs of numbers and their products, different on every rank and step.
fn batch(rank: usize, step: u64, device: &Device) -> ferrospeed::tensor::Result<(Tensor, Tensor)> {
    let key = RandomKey::new(step, rank as u32);
    let x: Vec<f32> = (0..128).map(|i| 2.0 * key.uniform(i) - 1.0).collect();
    let y: Vec<f32> = x.chunks(2).map(|pair| pair[0] * pair[1]).collect();
    Ok((Tensor::from_slice(&x, [64, 2], device)?, Tensor::from_slice(&y, [64, 1], device)?))
}

fn run(world: World) -> Result<(), Failure> {
    let rank = world.rank();
    let setup = Setup::from_config(CONFIG, world, ferrospeed::cpu::device())?;
    let (mut engine, model) = initialize(&setup, Product::new)?;
    let mut last = f32::INFINITY;
    for step in 0..400 {
        let (x, y) = batch(rank, step, engine.device())?;
        let loss = engine.forward(|_| model.loss(&x, &y))?;
        engine.backward(&loss)?;
        engine.step()?;
        last = loss.item()?;
        if rank == 0 && step % 100 == 0 {
            println!("step {step:>3}  loss {last:.5}");
        }
    }
    if rank == 0 {
        println!("step 400  loss {last:.5}");
    }
    if last < 0.02 {
        Ok(())
    } else {
        Err(format!("the loss should have fallen below 0.02, it is {last}").into())
    }
}

fn main() -> Result<(), Failure> {
    run(init_distributed()?)
}

#[test]
fn it_learns() -> Result<(), Failure> {
    main()
}
