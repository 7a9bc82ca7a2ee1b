//! Fine-tuning a model in a Hugging Face directory with a loop of one's own, and its weights in one file again.
//!
//! cargo run --example fine_tune -p ferrospeed --features examples -- MODEL_DIRECTORY

use std::path::{Path, PathBuf};

use ferrospeed::models::directory::{WriteOptions, create};
use ferrospeed::models::{Decoder, ModelConfig, ModelFiles, Tokens};
use ferrospeed::{Failure, Options, Setup, Tensor, World, init_distributed, initialize_model};
use serde_json::json;

const CONFIG: &str = r#"{
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": { "type": "AdamW", "params": { "lr": 0.01, "weight_decay": 0.01 } },
    "scheduler": { "type": "WarmupCosineLR", "params": { "warmup_num_steps": 2, "total_num_steps": 60 } },
    "gradient_clipping": 1.0,
    "zero_optimization": { "stage": 3 },
    "bf16": { "enabled": true }
}"#;
const TEXT: &str = "It was the best of times, it was the worst of times, it was the age of wisdom.";

fn run(world: World, directory: &Path) -> Result<(), Failure> {
    let files = ModelFiles::open(directory)?;
    let ModelConfig::Decoder(config) = files.model()? else { return Err("it is no decoder".into()) };
    let vocabulary = config.vocab;
    let mut model = Decoder::new(*config);
    // Blocks are computed again in backward; where their inputs wait, `activation_checkpointing` says.
    model.set_activation_checkpointing(true);
    let setup = Setup::from_config(CONFIG, world, ferrospeed::cpu::device())?;
    let options = Options { source: Some(files.source()), ..Options::default() };
    let mut engine = initialize_model(&setup, model.parameters(), options)?;

    // Bytes are tokens here; `ferrospeed::text` has tokenizers and chat templates (feature `data`).
    let ids: Vec<i64> = TEXT.bytes().map(|byte| i64::from(byte) % vocabulary as i64).collect();
    let row = &ids[..32];
    let ids = Tensor::from_slice(&[row, row].concat(), [2, 32], engine.device())?;
    let (tokens, mut losses) = (Tokens::new(ids.clone()), Vec::new());
    while engine.global_steps() < 60 {
        let loss = engine.forward(|mode| model.loss(&tokens, &ids, mode))?;
        engine.backward(&loss)?;
        engine.step()?;
        losses.push(loss.item()?);
    }
    let written = engine.save_16bit_model(&directory.join("tuned"), "pytorch_model.bin", false)?;
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    println!("loss {first:.3} -> {last:.3}, written to {}", written.display());
    if last > first / 2.0 || !written.exists() {
        return Err(format!("it should have learnt the text: {losses:?}").into());
    }
    Ok(())
}

/// A small model with weights at random, in the form that Hugging Face keeps.
fn small_model(folder: &Path) -> Result<PathBuf, Failure> {
    let directory = folder.join("small");
    let config = json!({
        "model_type": "llama", "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
        "max_position_embeddings": 128,
    });
    create(&directory, &config, 3, &WriteOptions::default())?;
    Ok(directory)
}

fn main() -> Result<(), Failure> {
    let world = init_distributed()?;
    match std::env::args_os().nth(1).filter(|path| Path::new(path).is_dir()) {
        Some(directory) => run(world, Path::new(&directory)),
        None => {
            let folder = std::env::temp_dir().join(format!("ferrospeed-fine-tune-{}", std::process::id()));
            let outcome = small_model(&folder).and_then(|directory| run(world, &directory));
            std::fs::remove_dir_all(&folder)?;
            outcome
        }
    }
}

#[test]
fn a_model_of_a_directory_learns_a_text() -> Result<(), Failure> {
    main()
}
