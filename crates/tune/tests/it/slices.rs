//! The plan of a model in slices against the model itself: parameters that a rank holds, and bytes that it keeps.

use ferrospeed_comm::World;
use ferrospeed_config::{AutoValues, Config};
use ferrospeed_models::{Decoder, DecoderConfig, ModelConfig, Tokens, WindowRule};
use ferrospeed_nn::Mode;
use ferrospeed_tensor::store::{FromInitializers, PlainStore};
use ferrospeed_tensor::{Category, DType, Tensor, autograd};
use ferrospeed_tune::model::{Model, from_hugging_face};
use ferrospeed_tune::plan::{Operands, Processor, Request, plan};
use serde_json::{Value, json};

/// The most that a plan may be off.
const TOLERANCE: f64 = 0.05;

fn decoder_config(value: &Value) -> DecoderConfig {
    match ModelConfig::from_value(value, WindowRule::default()).unwrap() {
        ModelConfig::Decoder(config) => *config,
        ModelConfig::Bert(_) => panic!("these are decoders"),
    }
}

fn llama(width: u64, heads: [u64; 2], inner: u64, vocab: u64, layers: u64) -> Value {
    json!({
        "model_type": "llama", "vocab_size": vocab, "hidden_size": width, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads[0], "num_key_value_heads": heads[1],
        "max_position_embeddings": 2048, "hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
    })
}

#[test]
fn ranks_hold_as_many_parameters_as_planned() {
    let gpt2 = json!({"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024});
    let bloom = json!({"model_type": "bloom", "vocab_size": 250880, "hidden_size": 1024, "n_head": 16, "n_layer": 24});
    let mut mixtral = llama(1024, [16, 8], 3584, 32_000, 4);
    mixtral["model_type"] = "mixtral".into();
    for value in [
        gpt2,
        bloom,
        llama(4096, [32, 32], 11_008, 32_000, 32),
        llama(4096, [32, 2], 14_336, 128_256, 4),
        mixtral,
    ] {
        for slices in [2, 4] {
            let group = World::threads(slices).remove(0).group();
            let held =
                Decoder::in_slices(decoder_config(&value), &group).unwrap().parameters().numel() as f64;
            let planned =
                from_hugging_face(&value).unwrap().in_slices(slices as u64).size.total_params as f64;
            let ratio = planned / held;
            assert!((ratio - 1.0).abs() < 0.01, "{value}, {slices} slices: {planned} planned, {held} held");
        }
    }
}

/// The most bytes of activations that a rank held in a step, gradients left out.
fn measured(value: &Value, slices: usize, batch: usize, tokens: usize) -> usize {
    let (config, ids) = (decoder_config(value), vec![1i64; batch * tokens]);
    let ranks: Vec<_> = World::threads(slices)
        .into_iter()
        .map(|world| {
            let (config, ids) = (config.clone(), ids.clone());
            std::thread::spawn(move || {
                let device = ferrospeed_cpu::with_threads(1);
                let model = Decoder::in_slices(config, &world.group()).unwrap();
                let source = FromInitializers { seed: 1 };
                let _store =
                    PlainStore::attach(model.parameters().as_slice(), DType::F32, &device, &source).unwrap();
                let ids = Tensor::from_slice(&ids, [batch, tokens], &device).unwrap();
                device.backend().reset_peak_memory();
                let loss = model.loss(&Tokens::new(ids.clone()), &ids, Mode::Train).unwrap();
                autograd::backward(&loss).unwrap();
                device.memory_usage().peak(Category::Activations)
            })
        })
        .collect();
    ranks.into_iter().map(|rank| rank.join().unwrap()).max().unwrap()
}

#[test]
fn ranks_keep_as_many_bytes_of_activations_as_planned() {
    let (batch, tokens) = (2, 64);
    let run = json!({"train_micro_batch_size_per_gpu": batch});
    let unresolved = Config::from_value("test", &run).unwrap();
    let (run, _) = unresolved.resolve(std::num::NonZeroU64::MIN, &AutoValues::new()).unwrap();
    for slices in [2u64, 4] {
        // The loss holds three more tensors as wide as the stream than that of a whole model, which few layers would show.
        let value = llama(192, [8, 4], 512, 512, 16);
        let planned = plan(&Request {
            model: &Model::Transformer(from_hugging_face(&value).unwrap().in_slices(slices)),
            config: &run,
            data_parallel_size: 1,
            sequence_ranks: 1,
            sequence_length: tokens as u64,
            checkpoint_activations: false,
            mlp_chunk: None,
            keeps_attention_matrix: false,
            processor: Processor::Cpu,
            operands: Operands::InPlace,
        });
        let planned = planned.activations.unwrap().kept_bytes as f64;
        let held = measured(&value, slices as usize, batch, tokens) as f64;
        assert!((planned / held - 1.0).abs() < TOLERANCE, "{slices} slices: {planned} planned, {held} held");
    }
}
