//! A model in slices trains as it does whole.
//!
//! Ranks sum in another order than one rank does, so numbers are equal within f32's rounding: [`TOLERANCE`]. The first
//! weights are the same bits on every mesh, and clipping is active in every step.

mod checkpoints;
mod sequences;
mod ways;
mod wire;

use std::sync::Arc;

use super::common::{config, device, on_ranks};
use ferrospeed_comm::topology::{DATA, MODEL};
use ferrospeed_comm::{Group, Mesh, ProcessTopology, World};
use ferrospeed_engine::{Engine, Options, Setup, StepReport, initialize_model};
use ferrospeed_models::{Bert, Decoder, ModelConfig, Tokens, WindowRule};
use ferrospeed_nn::tensor_parallel::{Between, Slices};
use ferrospeed_nn::{Mode, Parameters};
use ferrospeed_tensor::{Tensor, ops};
use ferrospeed_zero::access::Which;
use serde_json::{Value, json};

/// Largest difference of losses, norms, gradients and weights, relative to the largest of the same tensor.
const TOLERANCE: f32 = 5e-5;

const STEPS: usize = 4;

/// Small models of all families; all of them can be cut for four ranks.
fn families() -> Vec<Value> {
    let sized = |model_type: &str, kv_heads: usize, more: Value| {
        let mut config = json!({
            "model_type": model_type, "vocab_size": 19, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": kv_heads,
            "max_position_embeddings": 8, "hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
        });
        for (key, value) in more.as_object().unwrap() {
            config[key] = value.clone();
        }
        config
    };
    let experts = |more: Value| {
        let mut numbers = json!({
            "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": true,
        });
        for (key, value) in more.as_object().unwrap() {
            numbers[key] = value.clone();
        }
        numbers
    };
    vec![
        json!({
            "model_type": "gpt2", "vocab_size": 19, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 8,
            "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.0,
        }),
        sized("llama", 2, json!({"attention_bias": true, "mlp_bias": true})),
        sized("mistral", 1, json!({"sliding_window": 3})),
        sized("qwen2", 4, json!({"tie_word_embeddings": true})),
        sized("qwen3", 2, json!({"head_dim": 6, "tie_word_embeddings": true})),
        sized("phi3", 4, json!({"num_attention_heads": 8})),
        sized("smollm3", 2, json!({"no_rope_layers": [1, 0]})),
        sized("olmo2", 2, json!({})),
        sized("mixtral", 2, json!({"num_local_experts": 3, "num_experts_per_tok": 2})),
        sized("qwen2_moe", 2, experts(json!({"shared_expert_intermediate_size": 20}))),
        sized("qwen3_moe", 2, experts(json!({"head_dim": 6}))),
        sized("olmoe", 2, json!({"num_experts": 3, "num_experts_per_tok": 2})),
        json!({
            "model_type": "opt", "vocab_size": 19, "hidden_size": 16, "word_embed_proj_dim": 12, "ffn_dim": 24,
            "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 8, "dropout": 0.0,
            "do_layer_norm_before": false,
        }),
        json!({
            "model_type": "gpt_neox", "vocab_size": 19, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 8, "rotary_pct": 0.5,
        }),
        json!({
            "model_type": "bert", "architectures": ["BertForPreTraining"], "vocab_size": 19, "hidden_size": 16,
            "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24, "max_position_embeddings": 8,
            "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.0,
        }),
        json!({"model_type": "bloom", "vocab_size": 19, "hidden_size": 16, "n_head": 4, "n_layer": 2, "seq_length": 8}),
        json!({
            "model_type": "gemma3_text", "vocab_size": 19, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 8,
            "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"], "attn_logit_softcapping": 2.0,
        }),
        sized(
            "granite",
            2,
            json!({"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}),
        ),
        json!({
            "model_type": "cohere", "vocab_size": 19, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8,
        }),
        json!({
            "model_type": "falcon", "vocab_size": 19, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 8,
            "num_kv_heads": 4, "new_decoder_architecture": true, "bias": true, "max_position_embeddings": 8,
            "ffn_hidden_size": 24,
        }),
        json!({
            "model_type": "mpt", "vocab_size": 19, "d_model": 16, "n_layers": 2, "n_heads": 4, "max_seq_len": 8,
            "attn_config": {"clip_qkv": 0.02},
        }),
        sized(
            "glm4_moe",
            2,
            json!({
                "n_routed_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 8,
                "use_qk_norm": true, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
            }),
        ),
    ]
}

enum Model {
    Decoder(Box<Decoder>),
    Bert(Box<Bert>),
}

impl Model {
    fn in_slices(value: &Value, group: &Group, between: Between) -> Model {
        match ModelConfig::from_value(value, WindowRule::default()).unwrap() {
            ModelConfig::Decoder(config) => {
                Model::Decoder(Box::new(Decoder::in_slices(*config, Slices::over(group, between)).unwrap()))
            }
            ModelConfig::Bert(config) => Model::Bert(Box::new(Bert::in_slices(config, group).unwrap())),
        }
    }

    fn parameters(&self) -> &Parameters {
        match self {
            Model::Decoder(decoder) => decoder.parameters(),
            Model::Bert(bert) => bert.parameters(),
        }
    }

    fn loss(&self, ids: &Tensor, mode: Mode) -> ferrospeed_models::Result<Tensor> {
        match self {
            Model::Decoder(decoder) => decoder.loss(&Tokens::new(ids.clone()), ids, mode),
            Model::Bert(bert) => {
                // As many tokens count in every sequence, and one label of two for each of them.
                let masked = |(place, &id): (usize, &i64)| if place % 8 < 3 { id } else { -100 };
                let all = ids.to_vec::<i64>()?;
                let labels: Vec<i64> = all.iter().enumerate().map(masked).collect();
                let labels = Tensor::from_slice(&labels, [all.len()], ids.device())?;
                let texts: Vec<i64> = all.chunks(8).map(|row| row[0] % 2).collect();
                let texts = Tensor::from_slice(&texts, [texts.len()], ids.device())?;
                let output = bert.forward(ids, None, None, mode, &mut |_, _| {})?;
                bert.loss(&output, Some(&labels), Some(&texts))
            }
        }
    }
}

fn configuration(stage: u8, data: usize) -> Value {
    json!({
        "train_batch_size": 4, "train_micro_batch_size_per_gpu": 4 / data, "gradient_clipping": 0.05,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": stage, "reduce_bucket_size": 300, "stage3_param_persistence_threshold": 20,
            "stage3_prefetch_bucket_size": 500,
        },
    })
}

/// What a run came to, on one rank.
#[derive(Clone, Default)]
struct Outcome {
    first_weights: Vec<(String, Vec<f32>)>,
    gradients: Vec<(String, Vec<f32>)>,
    losses: Vec<f32>,
    norms: Vec<f32>,
    weights: Vec<(String, Vec<f32>)>,
    held: usize,
}

fn start(world: World, model: &Value, value: &Value, tensor: usize) -> (Engine, Model) {
    let data = world.size() / tensor;
    let topology = ProcessTopology::new([(DATA, data), (MODEL, tensor)]).unwrap();
    let mesh = Mesh::new(world.clone(), topology).unwrap();
    let between = match value["tensor_parallel"]["sequence_parallel"].as_bool() {
        Some(true) => Between::OwnTokens,
        _ => Between::AllTokens,
    };
    let decoder = Model::in_slices(model, &mesh.tensor().unwrap(), between);
    let setup = Setup::new(config(value, data), world, device(1));
    let mut options = Options::default();
    options.spread_over(&mesh).unwrap();
    let engine = initialize_model(&setup, decoder.parameters(), options).unwrap();
    (engine, decoder)
}

fn wholes(engine: &Engine, model: &Model, which: Which<'_>) -> Vec<(String, Vec<f32>)> {
    let whole =
        |param: &ferrospeed_tensor::Param| (param.name().to_owned(), engine.whole(param, which).unwrap());
    // What a family's files freeze has no gradient.
    let has = |param: &&ferrospeed_tensor::Param| which == Which::Weight || param.is_trainable();
    model.parameters().as_slice().iter().filter(has).map(whole).collect()
}

/// Four sequences per step, shared out over data ranks.
fn batch(engine: &Engine, step: usize) -> Tensor {
    let ids: Vec<i64> = (0..32).map(|i| ((i * 7 + step * 5 + i * i) % 19) as i64).collect();
    let own = 32 / engine.data_ranks();
    let first = engine.data_rank() * own;
    Tensor::from_slice(&ids[first..first + own], [own / 8, 8], engine.device()).unwrap()
}

fn step(engine: &mut Engine, model: &Model, number: usize, outcome: &mut Outcome) {
    let micro_batches = engine.gradient_accumulation_steps() as usize;
    let whole = batch(engine, number);
    let rows = whole.sizes()[0] / micro_batches;
    for micro in 0..micro_batches {
        let ids = ops::narrow(&whole, 0, micro * rows, rows).unwrap();
        let loss = engine.forward(|mode| model.loss(&ids, mode)).unwrap();
        outcome.losses.push(loss.item().unwrap());
        engine.backward(&loss).unwrap();
        if number == 0 && micro + 1 == micro_batches {
            outcome.gradients = wholes(engine, model, Which::Gradient);
        }
        match engine.step().unwrap() {
            StepReport::Applied { grad_norm } => outcome.norms.push(grad_norm as f32),
            StepReport::Accumulating => {}
            skipped => panic!("{skipped:?}"),
        }
    }
}

fn train(ranks: usize, tensor: usize, model: &Value, stage: u8) -> Vec<Outcome> {
    train_by(ranks, tensor, model, configuration(stage, ranks / tensor))
}

fn train_by(ranks: usize, tensor: usize, model: &Value, value: Value) -> Vec<Outcome> {
    let model = Arc::new(model.clone());
    on_ranks(ranks, move |world| {
        let (mut engine, decoder) = start(world, &model, &value, tensor);
        let mut outcome = Outcome {
            first_weights: wholes(&engine, &decoder, Which::Weight),
            held: decoder.parameters().numel(),
            ..Outcome::default()
        };
        for number in 0..STEPS {
            step(&mut engine, &decoder, number, &mut outcome);
        }
        outcome.weights = wholes(&engine, &decoder, Which::Weight);
        outcome
    })
}

fn assert_near(found: &[f32], wanted: &[f32], what: &str) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    // What is zero but for rounding, as the gradient of a key's bias, has no size of its own.
    let size = wanted.iter().fold(1e-4f32, |size, value| size.max(value.abs()));
    for (index, (a, b)) in found.iter().zip(wanted).enumerate() {
        assert!((a - b).abs() <= TOLERANCE * size, "{what}, element {index}: {a}, not {b}");
    }
}

/// Compares ranks in slices with as many data ranks that hold everything.
fn compare(found: &[Outcome], whole: &[Outcome], what: &str) {
    let tensor = found.len() / whole.len();
    for (rank, outcome) in found.iter().enumerate() {
        let wanted = &whole[rank / tensor];
        assert_eq!(outcome.first_weights, wanted.first_weights, "{what}: first weights of rank {rank}");
        assert_near(&outcome.losses, &wanted.losses, &format!("{what}: losses of rank {rank}"));
        assert_near(&outcome.norms, &wanted.norms, &format!("{what}: norms of rank {rank}"));
        for (list, reference, of) in [
            (&outcome.gradients, &wanted.gradients, "gradient"),
            (&outcome.weights, &wanted.weights, "weights"),
        ] {
            for ((name, values), (_, reference)) in list.iter().zip(reference) {
                assert_near(values, reference, &format!("{what}: {of} of {name} on rank {rank}"));
            }
        }
        let bits = |values: &[f32]| -> Vec<u32> { values.iter().map(|value| value.to_bits()).collect() };
        let first = &found[rank / tensor * tensor];
        assert_eq!(bits(&outcome.losses), bits(&first.losses), "{what}: ranks of one group differ");
        // Clipping was active, and weights moved.
        assert!(wanted.norms.iter().all(|norm| *norm > 0.05));
        assert_ne!(wanted.first_weights, wanted.weights);
    }
}

#[test]
fn every_family_trains_in_slices_as_it_does_whole() {
    for model in families() {
        let kind = model["model_type"].as_str().unwrap();
        let whole = [1, 2].map(|ranks| train(ranks, 1, &model, 0));
        for (ranks, tensor) in [(2, 2), (4, 4), (4, 2)] {
            let (found, whole) = (train(ranks, tensor, &model, 0), &whole[ranks / tensor - 1]);
            compare(&found, whole, &format!("{kind}, {ranks} ranks, {tensor} slices"));
            let (held, all) = (found[0].held, whole[0].held);
            assert!(held < all * 3 / 4, "{kind}: {held} of {all}");
        }
    }
}

#[test]
fn every_stage_of_zero_trains_slices() {
    let models = families();
    for model in [&models[0], &models[1]] {
        let kind = model["model_type"].as_str().unwrap();
        let whole = [1, 2].map(|ranks| train(ranks, 1, model, 0));
        for stage in 1..=3 {
            for (ranks, tensor) in [(2, 2), (4, 4), (4, 2)] {
                let (found, whole) = (train(ranks, tensor, model, stage), &whole[ranks / tensor - 1]);
                compare(&found, whole, &format!("{kind}, stage {stage}, {ranks} ranks, {tensor} slices"));
            }
        }
    }
}
