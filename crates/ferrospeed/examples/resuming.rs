//! Resuming: a run that stops and goes on is the run that never stopped, to the bit; on another number of ranks and in another
//! stage it goes on as well; and its weights come out in f32.
//!
//! cargo run --example resuming -p ferrospeed --features examples

use std::path::Path;

use ferrospeed::checkpoint::get_fp32_state_dict_from_zero_checkpoint;
use ferrospeed::nn::Linear;
use ferrospeed::utils::safe_get_full_fp32_param;
use ferrospeed::{
    Engine, Failure, Format, LoadOptions, RepeatingLoader, SaveOptions, Setup, Tensor, World, initialize, ops,
};
use serde_json::json;

/// Eight samples a step, on any number of ranks.
fn engine(world: World, stage: u8) -> Result<(Engine, Linear), Failure> {
    let config = json!({
        "train_batch_size": 8,
        "optimizer": { "type": "AdamW", "params": { "lr": 0.05 } },
        "scheduler": { "type": "WarmupLR", "params": { "warmup_num_steps": 4 } },
        "zero_optimization": { "stage": stage },
    });
    let setup = Setup::from_config(&config.to_string(), world, ferrospeed::cpu::with_threads(1))?;
    Ok(initialize(&setup, |init| Linear::new(&init.at("layer"), 3, 2, true))?)
}

/// Trains until so many steps are done, where the data goes on where it was.
fn train(engine: &mut Engine, layer: &Linear, data_position: u64, until: u64) -> Result<Vec<f32>, Failure> {
    let device = engine.device().clone();
    let samples: Vec<[f32; 3]> = (0..40).map(|i| [1.0, i as f32 / 40.0, (i % 7) as f32 / 7.0]).collect();
    let mut loader = engine.data_loader(samples)?;
    loader.go_to(data_position);
    let mut batches = RepeatingLoader(loader);
    while engine.global_steps() < until {
        let rows = batches.next().ok_or("the loader is empty")?;
        let x = Tensor::from_slice(rows.as_flattened(), [rows.len(), 3], &device)?;
        let loss = engine.forward(|_| ops::mean(&ops::square(&layer.forward(&x)?)?))?;
        engine.backward(&loss)?;
        engine.step()?;
    }
    Ok(safe_get_full_fp32_param(engine, layer.weight())?)
}

fn on_one_rank(folder: &Path) -> Result<Vec<f32>, Failure> {
    let (mut whole, layer) = engine(World::solo(), 2)?;
    let expected = train(&mut whole, &layer, 0, 10)?;

    let (mut stopped, layer) = engine(World::solo(), 2)?;
    train(&mut stopped, &layer, 0, 6)?;
    let client_state = json!({ "epoch": 1 });
    stopped.save_checkpoint(folder, &SaveOptions { client_state, ..SaveOptions::default() })?;

    let (mut resumed, layer) = engine(World::solo(), 2)?;
    let loaded = resumed.load_checkpoint(folder, &LoadOptions::default())?;
    let found = train(&mut resumed, &layer, loaded.data_position, 10)?;
    if found != expected || loaded.client_state["epoch"] != 1 {
        return Err(format!("{found:?} is not {expected:?}").into());
    }
    // For those who go on with DeepSpeed: its files, with `zero_to_fp32.py` beside them.
    let theirs = folder.join("deepspeed");
    resumed.save_checkpoint(&theirs, &SaveOptions { format: Format::DeepSpeed, ..SaveOptions::default() })?;
    let weights = get_fp32_state_dict_from_zero_checkpoint(&theirs, None)?;
    let weight = weights.iter().find(|weight| weight.name == "layer.weight");
    if weight.is_none_or(|weight| weight.values != found) || !theirs.join("zero_to_fp32.py").exists() {
        return Err("the files in DeepSpeed's form should hold the same weights".into());
    }
    Ok(expected)
}

/// The same checkpoint on two ranks, in stage 3.
fn on_two_ranks(folder: &Path) -> Result<Vec<f32>, Failure> {
    let ranks = World::on_threads(2, |world| {
        let (mut resumed, layer) = engine(world, 3)?;
        let options = LoadOptions { tag: Some("global_step6"), ..LoadOptions::default() };
        let loaded = resumed.load_checkpoint(folder, &options)?;
        train(&mut resumed, &layer, loaded.data_position, 10)
    });
    let weights = ranks.into_iter().collect::<Result<Vec<_>, Failure>>()?;
    if weights[0] == weights[1] { Ok(weights[0].clone()) } else { Err("ranks should agree".into()) }
}

fn run(folder: &Path) -> Result<(), Failure> {
    let one = on_one_rank(folder)?;
    let two = on_two_ranks(folder)?;
    println!("{one:?} on one rank, {two:?} on two");
    // Sums in another order, so not the same bits.
    if one.iter().zip(&two).any(|(one, two)| (one - two).abs() > 1e-4) {
        return Err(format!("two ranks should come to the same: {one:?}, {two:?}").into());
    }
    Ok(())
}

fn main() -> Result<(), Failure> {
    let folder = std::env::temp_dir().join(format!("ferrospeed-resuming-{}", std::process::id()));
    let outcome = run(&folder);
    std::fs::remove_dir_all(&folder)?;
    outcome
}

#[test]
fn a_run_that_stops_goes_on() -> Result<(), Failure> {
    main()
}
