//! Inference: a model of one's own whose weights ranks share, and a Hugging Face directory that writes text.
//!
//! cargo run --example inference -p ferrospeed --features examples

use std::path::Path;

use ferrospeed::models::directory::{WriteOptions, create};
use ferrospeed::nn::{Linear, Sequential};
use ferrospeed::serve::inference::engine::GenerateCall;
use ferrospeed::tensor::{Activation, DType};
use ferrospeed::zero::FromInitializers;
use ferrospeed::{Failure, Setup, Tensor, World, init_distributed, init_inference};
use serde_json::{Map, json};

/// Weights are divided over the ranks, and wait in the host's memory until a layer needs them.
const OF_ONES_OWN: &str = r#"{
    "train_batch_size": RANKS,
    "zero_optimization": { "stage": 3, "offload_param": { "device": "cpu" } }
}"#;

/// What a model of one's own says of one input.
fn own_model(world: World) -> Result<Vec<f32>, Failure> {
    let config = OF_ONES_OWN.replace("RANKS", &world.size().to_string());
    let setup = Setup::from_config(&config, world, ferrospeed::cpu::device())?;
    let weights = FromInitializers { seed: 7 };
    let (mut engine, model) = init_inference(&setup, Some(&weights), |init| {
        Sequential::new(init)
            .add(|init| Linear::new(init, 8, 64, true))
            .add(|_| Activation::Relu)
            .add(|init| Linear::new(init, 64, 3, true))
    })?;
    let x = Tensor::full([1, 8], 0.25, DType::F32, engine.device())?;
    let said = engine.forward(|mode| model.forward(&x, mode))?;
    Ok(said.to_vec::<f32>()?)
}

/// The manual's `init_inference` of a Hugging Face model: configuration, `generate`, `forward`, times of passes.
fn hugging_face(directory: &Path) -> Result<(), Failure> {
    let config = json!({ "dtype": "fp32", "max_out_tokens": 64, "min_out_tokens": 16 });
    let device = ferrospeed::cpu::device();
    let engine = ferrospeed::serve::inference::init_inference(directory, &config, &Map::new(), &device)?;
    engine.profile_model_time();
    let prompts = [vec![1, 2, 3], vec![9, 8]];
    let call = GenerateCall { max_new_tokens: 12, ..GenerateCall::default() };
    let texts = engine.generate(&prompts, &call)?;
    println!("{texts:?} in passes of {:.2?} ms", engine.model_times()?);
    let goes_on = texts
        .iter()
        .zip(&prompts)
        .all(|(text, prompt)| text.starts_with(prompt) && text.len() == prompt.len() + 12);
    if goes_on { Ok(()) } else { Err("each text should go on with its prompt".into()) }
}

fn run(world: World) -> Result<(), Failure> {
    let alone = own_model(World::solo())?;
    let shared = own_model(world)?;
    println!("{shared:?}");
    if alone != shared {
        return Err(format!("ranks together should say what one says: {shared:?}, {alone:?}").into());
    }
    Ok(())
}

fn main() -> Result<(), Failure> {
    run(init_distributed()?)?;
    let folder = std::env::temp_dir().join(format!("ferrospeed-inference-{}", std::process::id()));
    let model = json!({
        "model_type": "llama", "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
        "max_position_embeddings": 128,
    });
    create(&folder.join("small"), &model, 3, &WriteOptions::default())?;
    let outcome = hugging_face(&folder.join("small"));
    std::fs::remove_dir_all(&folder)?;
    outcome
}

#[test]
fn a_model_of_ones_own_and_one_of_a_directory_answer() -> Result<(), Failure> {
    main()?;
    World::on_threads(2, run).into_iter().collect()
}
