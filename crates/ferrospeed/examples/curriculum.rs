//! A curriculum: sequences that grow, of a model and a loop of one's own.
//!
//! cargo run --example curriculum -p ferrospeed --features examples

use ferrospeed::nn::{Embedding, Init, Linear};
use ferrospeed::tensor::ops::CrossEntropyOptions;
use ferrospeed::{
    DataLoader, Failure, LoaderOptions, RepeatingLoader, Setup, Tensor, World, init_distributed, initialize,
    ops,
};

const CONFIG: &str = r#"{
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": { "type": "AdamW", "params": { "lr": 0.02 } },
    "curriculum_learning": {
        "enabled": true, "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 32,
        "schedule_type": "fixed_linear", "schedule_config": { "total_curriculum_step": 30, "difficulty_step": 8 }
    }
}"#;
const WHOLE: usize = 32;
const VOCABULARY: usize = 16;

/// Each token is followed by the next but two.
struct Follows {
    table: Embedding,
    head: Linear,
}

impl Follows {
    fn new(init: &Init) -> Follows {
        Follows {
            table: Embedding::new(&init.at("table"), VOCABULARY, 24, 0.1),
            head: Linear::new(&init.at("head"), 24, VOCABULARY, false),
        }
    }
}

fn run(world: World) -> Result<(), Failure> {
    let setup = Setup::from_config(CONFIG, world, ferrospeed::cpu::device())?;
    let (mut engine, model) = initialize(&setup, Follows::new)?;
    let sample = |start: i64| -> Vec<i64> {
        (0..=WHOLE as i64).map(|at| (start + 3 * at) % VOCABULARY as i64).collect()
    };
    let options = LoaderOptions {
        batch: 4,
        rank: engine.data_rank(),
        ranks: engine.data_ranks(),
        shuffle: Some(engine.seed()),
        drop_last: true,
    };
    let samples: Vec<Vec<i64>> = (0..VOCABULARY as i64).map(sample).collect();
    let mut loader = RepeatingLoader(DataLoader::new(samples, options)?);
    let (mut lengths, mut losses) = (Vec::new(), Vec::new());
    while engine.global_steps() < 40 {
        // The engine says how long sequences are in the next step; whoever makes batches cuts them.
        let length = engine.curriculum_length(WHOLE as u64) as usize;
        let rows = loader.next().ok_or("the loader is empty")?;
        let inputs: Vec<i64> = rows.iter().flat_map(|row| row[..length].to_vec()).collect();
        let targets: Vec<i64> = rows.iter().flat_map(|row| row[1..=length].to_vec()).collect();
        let inputs = Tensor::from_slice(&inputs, [rows.len(), length], engine.device())?;
        let targets = Tensor::from_slice(&targets, [rows.len() * length], engine.device())?;
        let loss = engine.forward(|_| {
            let logits = model.head.forward(&model.table.forward(&inputs)?)?;
            ops::cross_entropy(&logits, &targets, CrossEntropyOptions::default())
        })?;
        engine.backward(&loss)?;
        engine.step()?;
        lengths.push(length);
        losses.push(loss.item()?);
    }
    println!("lengths {lengths:?}, loss {:.3} -> {:.3}", losses[0], losses[39]);
    let grows = lengths.is_sorted() && lengths[0] == 8 && lengths[39] == WHOLE;
    if !grows || losses[39] > 0.1 {
        return Err(format!("lengths {lengths:?}, losses {losses:?}").into());
    }
    Ok(())
}

fn main() -> Result<(), Failure> {
    run(init_distributed()?)
}

#[test]
fn sequences_grow_and_the_model_learns() -> Result<(), Failure> {
    main()
}
