//! The model that a recipe names.

use ferrospeed_models::weights::WeightFiles;
use ferrospeed_models::{Decoder, ModelConfig, ModelError, WindowRule};
use serde_json::{Value, json};

use crate::error::Result;
use crate::recipe::{ModelRecipe, Recipe};

/// A model and where its first weights come from.
pub(crate) struct BuiltModel {
    pub(crate) decoder: Decoder,
    /// Its Hugging Face `config.json`.
    pub(crate) config: Value,
    /// The weights to start from; `None` starts from the initialisers.
    pub(crate) weights: Option<WeightFiles>,
}

/// The Hugging Face configuration of a recipe's model.
fn hugging_face(recipe: &Recipe, vocabulary: u64) -> Result<Value> {
    let model = &recipe.model;
    if let Some(folder) = model.path.as_ref().or(model.config.as_ref()) {
        let file = if folder.is_dir() { folder.join("config.json") } else { folder.clone() };
        let text = std::fs::read_to_string(&file).map_err(crate::error::TrainError::io(&file))?;
        let parsed = serde_json::from_str(&text)
            .map_err(|error| ModelError::BadFile { path: file.clone(), why: error.to_string() })?;
        return Ok(parsed);
    }
    Ok(preset(model, recipe.data.sequence, vocabulary))
}

fn preset(model: &ModelRecipe, sequence: u64, data_vocabulary: u64) -> Value {
    let (layers, width) = (model.layers.unwrap_or(4), model.width.unwrap_or(256));
    let heads = model.heads.unwrap_or((width / 64).max(1));
    let vocabulary = model.vocabulary.unwrap_or(data_vocabulary);
    let dropout = model.dropout.unwrap_or(0.0);
    if model.preset.as_deref() == Some("llama") {
        // The usual width of a gated feed-forward: two thirds of four times, rounded up to 64.
        let inner = (8 * width / 3).next_multiple_of(64);
        return json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocabulary,
            "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": sequence,
            "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "attention_dropout": dropout,
            "tie_word_embeddings": true, "initializer_range": 0.02,
        });
    }
    json!({
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": vocabulary, "n_embd": width,
        "n_layer": layers, "n_head": heads, "n_positions": sequence, "activation_function": "gelu_new",
        "embd_pdrop": dropout, "attn_pdrop": dropout, "resid_pdrop": dropout, "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
    })
}

/// Builds the recipe's model and checks that it fits the data; every problem is a line.
pub(crate) fn build(recipe: &Recipe, vocabulary: u64) -> Result<BuiltModel, Vec<String>> {
    let config = hugging_face(recipe, vocabulary).map_err(|error| vec![format!("model: {error}")])?;
    let parsed = ModelConfig::from_value(&config, WindowRule::default())
        .map_err(|error| vec![format!("model: {error}")])?;
    let ModelConfig::Decoder(decoder) = parsed else {
        return Err(vec!["model: only causal language models are trained by recipes".into()]);
    };
    let mut problems = Vec::new();
    if (decoder.vocab as u64) < vocabulary {
        problems.push(format!(
            "model: a vocabulary of {} does not hold the data's {vocabulary} tokens",
            decoder.vocab
        ));
    }
    if recipe.data.sequence > decoder.max_tokens as u64 {
        problems.push(format!(
            "data.sequence: {} is longer than the model's {} positions",
            recipe.data.sequence, decoder.max_tokens
        ));
    }
    let mut decoder = Decoder::new(*decoder);
    decoder.set_activation_checkpointing(recipe.model.activation_checkpointing);
    // Ids of bytes would train a model of words on nonsense, without an error.
    if let Some(tokenizer) =
        recipe.model.path.as_ref().map(|folder| folder.join("tokenizer.json")).filter(|file| file.is_file())
    {
        let file = tokenizer.display();
        problems.push(format!(
            "model.path: {file} says that the model does not read bytes, and recipes read text as bytes only"
        ));
    }
    let weights = match &recipe.model.path {
        Some(folder) => match WeightFiles::open_directory(folder) {
            Ok(weights) => {
                if let Err(error) = weights.check(decoder.parameters().as_slice()) {
                    problems.push(format!("model.path: {error}"));
                }
                Some(weights)
            }
            Err(error) => {
                problems.push(format!("model.path: {error}"));
                None
            }
        },
        None => None,
    };
    if problems.is_empty() { Ok(BuiltModel { decoder, config, weights }) } else { Err(problems) }
}
