//! The formulas against the allocator: what a training step and a generating model really hold at most.

use ferrospeed_config::{AutoValues, Config};
use ferrospeed_models::decoder::MlpChunks;
use ferrospeed_models::generate::{GenerateOptions, Sampling, generate};
use ferrospeed_models::presets::{Preset, PresetSizes};
use ferrospeed_models::{Decoder, ModelConfig, Tokens, WindowRule};
use ferrospeed_nn::Mode;
use ferrospeed_tensor::store::{FromInitializers, PlainStore};
use ferrospeed_tensor::{Category, DType, Device, Tensor, autograd};
use ferrospeed_tune::model::{Model, Transformer, from_hugging_face};
use ferrospeed_tune::plan::{Activations, Operands, Processor, Request, plan};
use ferrospeed_tune::serve::serving;
use serde_json::{Value, json};

/// A case: layers, width, vocabulary, batch, tokens per sequence. The last one's logits do not fit one chunk.
const SIZES: [[u64; 5]; 3] = [[2, 64, 512, 2, 64], [4, 192, 1024, 2, 96], [3, 64, 50_257, 2, 256]];

fn config_of(preset: Preset, [layers, width, vocabulary, _, sequence]: [u64; 5]) -> Value {
    let sizes = PresetSizes {
        layers: Some(layers),
        width: Some(width),
        heads: None,
        vocabulary,
        sequence,
        dropout: 0.1,
    };
    let mut config = preset.config(&sizes);
    if preset == Preset::Llama {
        // Grouped heads: fewer keys than queries.
        config["num_attention_heads"] = (width / 16).into();
        config["num_key_value_heads"] = (width / 32).into();
    }
    config
}

fn planned(
    config: &Value,
    dtype: DType,
    batch: u64,
    sequence_length: u64,
    mlp_chunk: Option<u64>,
) -> Activations {
    let mut run = json!({"train_micro_batch_size_per_gpu": batch});
    if dtype == DType::BF16 {
        run["bf16"] = json!({"enabled": true});
    }
    let (run, _) = Config::from_value("test", &run)
        .unwrap()
        .resolve(std::num::NonZeroU64::MIN, &AutoValues::new())
        .unwrap();
    let request = Request {
        model: &Model::Transformer(from_hugging_face(config).unwrap()),
        config: &run,
        data_parallel_size: 1,
        sequence_ranks: 1,
        sequence_length,
        checkpoint_activations: false,
        mlp_chunk,
        keeps_attention_matrix: false,
        processor: Processor::Cpu,
        operands: Operands::InPlace,
    };
    plan(&request).activations.unwrap()
}

fn decoder(config: &Value) -> Decoder {
    match ModelConfig::from_value(config, WindowRule::default()).unwrap() {
        ModelConfig::Decoder(config) => Decoder::new(*config),
        ModelConfig::Bert(_) => panic!("presets are decoders"),
    }
}

fn ids(batch: u64, tokens: u64, device: &Device) -> Tensor {
    let ids: Vec<i64> = (0..(batch * tokens) as i64).map(|i| i * 31 % 500).collect();
    Tensor::from_slice(&ids, [batch as usize, tokens as usize], device).unwrap()
}

/// The most activations that the second of two steps held.
fn measured(
    config: &Value,
    dtype: DType,
    batch: u64,
    tokens: u64,
    checkpointed: bool,
    chunks: MlpChunks,
) -> usize {
    let device = ferrospeed_cpu::with_threads(1);
    let mut model = decoder(config);
    model.set_activation_checkpointing(checkpointed);
    model.set_mlp_chunks(chunks);
    let params = model.parameters().as_slice();
    let store = PlainStore::attach(params, dtype, &device, &FromInitializers { seed: 1 }).unwrap();
    for _ in 0..2 {
        device.backend().reset_peak_memory();
        let ids = ids(batch, tokens, &device);
        let loss = model.loss(&Tokens::new(ids.clone()), &ids, Mode::Train).unwrap();
        autograd::backward(&loss).unwrap();
        store.take_gradients();
    }
    device.memory_usage().peak(Category::Activations)
}

fn assert_within(what: &str, planned: u64, measured: usize, tolerance: f64) {
    let ratio = planned as f64 / measured as f64;
    println!("{what}: planned {planned}, measured {measured}, ratio {ratio:.3}");
    assert!(
        (ratio - 1.0).abs() < tolerance,
        "{what}: planned {planned}, measured {measured}: ratio {ratio:.3}"
    );
}

#[test]
fn activations_match_the_allocator_within_ten_percent() {
    for preset in Preset::ALL {
        for size in SIZES {
            for dtype in [DType::F32, DType::BF16] {
                let config = config_of(preset, size);
                let [_, _, _, batch, tokens] = size;
                let Activations { kept_bytes, checkpointed_bytes } =
                    planned(&config, dtype, batch, tokens, None);
                let what = format!("{} {size:?} {dtype}", preset.name());
                let measured = |again| measured(&config, dtype, batch, tokens, again, MlpChunks::Automatic);
                assert_within(&what, kept_bytes, measured(false), 0.1);
                let what = format!("{what} checkpointed");
                assert_within(&what, checkpointed_bytes, measured(true), 0.1);
            }
        }
    }
}

#[test]
fn feed_forward_layers_in_chunks_hold_what_is_planned() {
    for preset in Preset::ALL {
        // Few logits, so that the peak is inside a layer.
        for size in [[4, 192, 512, 2, 256], [2, 256, 512, 1, 1024]] {
            for dtype in [DType::F32, DType::BF16] {
                let config = config_of(preset, size);
                let [_, _, _, batch, tokens] = size;
                let chunk = 50;
                let whole = planned(&config, dtype, batch, tokens, Some(0));
                let planned = planned(&config, dtype, batch, tokens, Some(chunk));
                assert!(
                    planned.checkpointed_bytes < whole.checkpointed_bytes * 9 / 10,
                    "{planned:?}, {whole:?}"
                );
                let chunks = MlpChunks::Tokens(chunk as usize);
                let measured = |again| measured(&config, dtype, batch, tokens, again, chunks);
                let what = format!("{} {size:?} {dtype} in chunks of {chunk}", preset.name());
                assert_within(&what, planned.kept_bytes, measured(false), 0.1);
                let what = format!("{what} checkpointed");
                assert_within(&what, planned.checkpointed_bytes, measured(true), 0.1);
            }
        }
    }
}

/// Plans generation, generates, and compares with the allocator's peak.
fn assert_serving(preset: Preset, size: [u64; 5], new_tokens: u64) {
    let config = config_of(preset, size);
    let [_, _, _, batch, tokens] = size;
    let device = ferrospeed_cpu::with_threads(1);
    let model = decoder(&config);
    let params = model.parameters().as_slice();
    let _store = PlainStore::attach(params, DType::BF16, &device, &FromInitializers { seed: 1 }).unwrap();
    device.backend().reset_peak_memory();
    let prompt: Vec<Vec<i64>> = vec![(0..(tokens - new_tokens) as i64).collect(); batch as usize];
    let options = GenerateOptions {
        max_new_tokens: new_tokens as usize,
        sampling: Sampling::Greedy,
        end_tokens: Vec::new(),
        pad_token: 0,
    };
    generate(&model, &prompt, None, &options, &device, &mut |_, _| {}).unwrap();
    let operands =
        Operands::of_host(ferrospeed_cpu::multiplies_in_tiles(), ferrospeed_cpu::widens_operands());
    let shape: Transformer = from_hugging_face(&config).unwrap();
    let planned = serving(&shape, 2, batch, tokens, operands).total_bytes();
    let what = format!("serving {} {size:?}", preset.name());
    assert_within(&what, planned, device.memory_usage().peak_total(), 0.1);
}

#[test]
fn serving_matches_the_allocator_within_ten_percent() {
    for preset in Preset::ALL {
        for size in SIZES {
            assert_serving(preset, size, 1);
        }
        // One long text, and a head so large that it has a copy.
        assert_serving(preset, [3, 64, 50_257, 1, 160], 150);
    }
}
