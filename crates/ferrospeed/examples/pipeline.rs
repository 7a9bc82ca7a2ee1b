//! A model of one's own layers in stages: training, evaluation with and without losses, and going on from a checkpoint.
//!
//! cargo build --example pipeline -p ferrospeed --features examples
//! ferrospeed launch -n 2 -- target/debug/examples/pipeline

use std::path::PathBuf;

use ferrospeed::nn::{Init, Linear, Mode};
use ferrospeed::pipeline::{EvalOptions, Reduce, Sequential, Trained, initialize_stages};
use ferrospeed::tensor::{Activation, Result as TensorResult, ops::CrossEntropyOptions};
use ferrospeed::{
    Device, Engine, EngineError, Failure, LoadOptions, Options, RepeatingLoader, SaveOptions, Setup, Tensor,
    World, init_distributed, ops,
};

const CONFIG: &str = r#"{
    "train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 4,
    "optimizer": { "type": "AdamW", "params": { "lr": 0.02 } },
    "pipeline": { "stages": STAGES, "partition": "uniform" }
}"#;
const CLASSES: usize = 3;

type Loss = fn(&Tensor, &Tensor) -> TensorResult<Tensor>;

fn cross_entropy(logits: &Tensor, classes: &Tensor) -> TensorResult<Tensor> {
    ops::cross_entropy(logits, classes, CrossEntropyOptions::default())
}

/// A layer of a program's own: anything that makes one tensor of another.
struct Residual(Linear);

impl ferrospeed::nn::Module for Residual {
    fn forward(&self, x: &Tensor, _: Mode) -> TensorResult<Tensor> {
        ops::add(x, &ops::tanh(&self.0.forward(x)?)?)
    }
}

fn model(init: &Init) -> Trained<Loss> {
    let layers = Sequential::new(init)
        .add(|init| Linear::new(init, 2, 32, true))
        .add(|init| Residual(Linear::new(init, 32, 32, true)))
        .add(|_| Activation::Relu)
        .add(|init| Linear::new(init, 32, CLASSES, true));
    Trained { layers, loss: cross_entropy as Loss }
}

/// Points of a plane, and in which of three rings they lie.
fn batch(number: usize, device: &Device) -> TensorResult<(Tensor, Tensor)> {
    let key = ferrospeed::tensor::random::RandomKey::new(number as u64, 0);
    let x: Vec<f32> = (0..32).map(|i| 2.0 * key.uniform(i) - 1.0).collect();
    let ring = |point: &[f32]| ((point[0].hypot(point[1]) * 3.0) as i64).min(CLASSES as i64 - 1);
    let classes: Vec<i64> = x.chunks(2).map(ring).collect();
    Ok((Tensor::from_slice(&x, [16, 2], device)?, Tensor::from_slice(&classes, [16], device)?))
}

fn engine(world: World) -> Result<(Engine, Trained<Loss>), Failure> {
    let config = CONFIG.replace("STAGES", &world.size().to_string());
    let setup = Setup::from_config(&config, world, ferrospeed::cpu::device())?;
    Ok(initialize_stages(&setup, Options::default(), model)?)
}

fn train(engine: &mut Engine, model: &Trained<Loss>, steps: u64) -> Result<f32, Failure> {
    let device = engine.device().clone();
    // DeepSpeed's `set_dataiterator`: the same samples on every stage.
    let mut numbers = RepeatingLoader(engine.data_loader((0..64).collect::<Vec<usize>>())?);
    let (until, mut last) = (engine.global_steps() + steps, f32::NAN);
    while engine.global_steps() < until {
        let make = |samples: Vec<usize>| Ok::<_, EngineError>(batch(samples[0], &device)?);
        last = engine.train_batch_from(model, &mut numbers, make)?.0;
    }
    Ok(last)
}

fn run(world: World, folder: PathBuf) -> Result<(), Failure> {
    let (mut first, trained) = engine(world.clone())?;
    let (stage, stages) = first.stage();
    let device = first.device().clone();
    train(&mut first, &trained, 60)?;
    let unseen = |micro: usize| Ok::<_, EngineError>(batch(1000 + micro, &device)?);

    let mean = first.eval_batch_with(&trained, EvalOptions::of(4), unseen)?.losses[0];
    let each = EvalOptions { reduce_output: Reduce::Nothing, ..EvalOptions::of(4) };
    let each = first.eval_batch_with(&trained, each, unseen)?.losses;
    let said = EvalOptions { compute_loss: false, return_logits: true, ..EvalOptions::of(4) };
    let said = first.eval_batch_with(&trained, said, unseen)?;
    println!("stage {stage}: loss {mean:.3} over {each:.3?}");
    let adds_up = (each.iter().sum::<f32>() / 4.0 - mean).abs() < 1e-5;
    let is_last = stage + 1 == stages;
    if mean > 0.6 || !adds_up || !said.losses.is_empty() || (said.logits.len() == 4) != is_last {
        return Err(format!("stage {stage}: {mean} of {each:?}, {} outputs", said.logits.len()).into());
    }

    first.save_checkpoint(&folder, &SaveOptions::default())?;
    let (mut second, again) = engine(world)?;
    second.load_checkpoint(&folder, &LoadOptions::default())?;
    let losses = [train(&mut first, &trained, 3)?, train(&mut second, &again, 3)?];
    if losses[0].to_bits() != losses[1].to_bits() {
        return Err(format!("a resumed pipeline should go on alike: {losses:?}").into());
    }
    Ok(())
}

/// The same folder on all ranks.
fn folder() -> PathBuf {
    let job = std::env::var("MASTER_PORT").unwrap_or_else(|_| std::process::id().to_string());
    std::env::temp_dir().join(format!("ferrospeed-pipeline-{job}"))
}

fn main() -> Result<(), Failure> {
    let world = init_distributed()?;
    let group = world.group();
    let outcome = run(world, folder());
    group.barrier()?;
    if group.rank() == 0 {
        std::fs::remove_dir_all(folder())?;
    }
    outcome
}

#[test]
fn stages_train_evaluate_and_go_on() -> Result<(), Failure> {
    main()?;
    let folder = tempfile::tempdir()?;
    let on = |world: World| run(world, folder.path().to_owned());
    World::on_threads(2, on).into_iter().collect()
}
