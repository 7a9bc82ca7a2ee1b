//! Passes over many sequences give each the bits that it has alone, and the tokens that `generate` writes.

use std::sync::Arc;

use ferrospeed_models::generate::{GenerateOptions, Sampling, generate};
use ferrospeed_models::{Decoder, ModelConfig, PageSteps, WindowRule};
use ferrospeed_tensor::store::{FromInitializers, PlainStore};
use ferrospeed_tensor::{DType, Device, PagedRows, PagedSequence, Tensor};
use ferrospeed_testkit::property::Random;
use serde_json::{Value, json};

const BLOCK: usize = 16;

fn families() -> Vec<Value> {
    let shared = |more: Value| {
        let mut config = json!({
            "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 48, "max_position_embeddings": 64, "initializer_range": 0.3,
        });
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config
    };
    vec![
        json!({"model_type": "gpt2", "vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4,
               "n_positions": 64, "initializer_range": 0.3}),
        shared(json!({"model_type": "llama", "num_key_value_heads": 2})),
        shared(json!({"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 7})),
        shared(
            json!({"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16, "use_sliding_window": true,
                      "sliding_window": 7, "max_window_layers": 1}),
        ),
        shared(
            json!({"model_type": "phi3", "num_key_value_heads": 2, "sliding_window": 9, "partial_rotary_factor": 0.5}),
        ),
        shared(json!({"model_type": "smollm3", "num_key_value_heads": 2, "no_rope_layers": [0, 1],
                      "use_sliding_window": true, "sliding_window": 7})),
        shared(json!({"model_type": "olmo2", "num_key_value_heads": 2})),
        shared(json!({"model_type": "gpt_neox"})),
        json!({"model_type": "opt", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 48,
               "num_attention_heads": 4, "max_position_embeddings": 64, "word_embed_proj_dim": 32, "init_std": 0.3}),
        shared(json!({"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4,
                      "num_experts_per_tok": 2, "sliding_window": null})),
        json!({"model_type": "bloom", "vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4,
               "initializer_range": 0.3}),
        shared(json!({"model_type": "gemma2", "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 7,
                      "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0})),
        shared(json!({"model_type": "gpt_oss", "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 7,
                      "num_local_experts": 4, "num_experts_per_tok": 2})),
        shared(
            json!({"model_type": "deepseek_v3", "kv_lora_rank": 9, "q_lora_rank": 11, "qk_nope_head_dim": 6,
                      "qk_rope_head_dim": 4, "v_head_dim": 7, "n_routed_experts": 6, "num_experts_per_tok": 2,
                      "moe_intermediate_size": 14, "first_k_dense_replace": 1, "n_group": 3, "topk_group": 2}),
        ),
    ]
}

fn model(config: &Value, dtype: DType, device: &Device) -> (Decoder, Arc<PlainStore>) {
    let ModelConfig::Decoder(config) = ModelConfig::from_value(config, WindowRule::default()).unwrap() else {
        unreachable!("it is a decoder")
    };
    let model = Decoder::new(*config);
    let source = FromInitializers { seed: 4 };
    let store = PlainStore::attach(model.parameters().as_slice(), dtype, device, &source).unwrap();
    (model, store)
}

/// Continues every prompt greedily by `new` tokens, the passes cut by `random`; gives texts and the logits of every choice.
fn serve(
    model: &Decoder,
    device: &Device,
    prompts: &[Vec<i64>],
    new: usize,
    cut: &mut Random,
) -> Vec<(Vec<i64>, Vec<f32>)> {
    let blocks_each = 4;
    let mut state = model.new_pages(prompts.len() * blocks_each, BLOCK, device).unwrap();
    let mut texts: Vec<(Vec<i64>, Vec<f32>)> =
        prompts.iter().map(|prompt| (prompt.clone(), Vec::new())).collect();
    let mut done = vec![0; prompts.len()];
    while texts.iter().zip(prompts).any(|(text, prompt)| text.0.len() < prompt.len() + new) {
        let (mut rows, mut ids, mut last) = (PagedRows::default(), Vec::new(), Vec::new());
        for (index, (text, _)) in texts.iter().enumerate() {
            let left = text.len() - done[index];
            let count = cut.below(12).min(left);
            if count == 0 || text.len() == prompts[index].len() + new {
                continue;
            }
            let blocks = (0..blocks_each).map(|block| (block * prompts.len() + index) as u32).collect();
            rows.sequences.push(PagedSequence { first: done[index], count, blocks });
            ids.extend_from_slice(&text[done[index]..done[index] + count]);
            done[index] += count;
            if count == left {
                last.push((index, ids.len() as i64 - 1));
            }
        }
        if ids.is_empty() {
            continue;
        }
        let hidden = model.run_pages(&ids, &Arc::new(rows), &mut state).unwrap();
        if last.is_empty() {
            continue;
        }
        let places: Vec<i64> = last.iter().map(|(_, row)| *row).collect();
        let places = Tensor::from_slice(&places, [places.len()], device).unwrap();
        let chosen = ferrospeed_tensor::ops::index_select(&hidden, 0, &places).unwrap();
        let logits = model.page_logits(&chosen).unwrap().to_vec_f32().unwrap();
        for ((index, _), logits) in last.iter().zip(logits.chunks(model.config().vocab)) {
            let best =
                (0..logits.len()).fold(0, |best, at| if logits[at] > logits[best] { at } else { best });
            texts[*index].0.push(best as i64);
            texts[*index].1.extend_from_slice(logits);
        }
    }
    texts
}

#[test]
fn a_text_does_not_depend_on_its_neighbours_nor_on_how_its_prompt_was_cut() {
    let device = ferrospeed_cpu::with_threads(2);
    let prompts: Vec<Vec<i64>> = [3, 17, 1, 30, 16]
        .iter()
        .enumerate()
        .map(|(i, &n)| (0..n).map(|t| (t * 7 + 13 * i as i64) % 96).collect())
        .collect();
    for config in families() {
        for dtype in [DType::F32, DType::BF16] {
            let name = format!("{} {dtype}", config["model_type"]);
            let (model, _store) = model(&config, dtype, &device);
            let together = serve(&model, &device, &prompts, 8, &mut Random(1));
            for (prompt, expected) in prompts.iter().zip(&together) {
                let alone = serve(&model, &device, std::slice::from_ref(prompt), 8, &mut Random(9));
                assert_eq!(&alone[0], expected, "{name}: alone, to the last bit of every logit");
            }
            if dtype == DType::F32 {
                for (prompt, (text, _)) in prompts.iter().zip(&together) {
                    let options = GenerateOptions {
                        max_new_tokens: 8,
                        sampling: Sampling::Greedy,
                        end_tokens: Vec::new(),
                        pad_token: 0,
                    };
                    let prompts = std::slice::from_ref(prompt);
                    let written = generate(&model, prompts, None, &options, &device, &mut |_, _| {}).unwrap();
                    assert_eq!(&written[0], text, "{name}: what generate writes");
                }
            }
        }
    }
}

#[test]
fn tokens_and_places_that_are_not_the_models_are_refused() {
    let device = ferrospeed_cpu::device();
    let (model, _store) = model(&families()[1], DType::F32, &device);
    let mut state = model.new_pages(5, BLOCK, &device).unwrap();
    let mut run = |ids: &[i64], first: usize| {
        let sequence = PagedSequence { first, count: ids.len(), blocks: vec![0, 1, 2, 3, 4] };
        let rows = Arc::new(PagedRows { sequences: vec![sequence] });
        model.run_pages(ids, &rows, &mut state).map(|_| ()).map_err(|error| error.to_string())
    };
    assert_eq!(run(&[1, 2], 0), Ok(()));
    assert!(run(&[1, 96], 0).unwrap_err().contains("token 96 is none"));
    assert!(run(&[-1], 0).unwrap_err().contains("token -1"));
    assert!(run(&[1, 2], 63).unwrap_err().contains("longer than 64"));
    assert!(run(&[], 0).is_err());
}

/// Models whose heads GPUs have kernels for.
fn wide_families() -> Vec<Value> {
    let shared = |more: Value| {
        let mut config = json!({
            "vocab_size": 96, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 128, "max_position_embeddings": 1024, "initializer_range": 0.3,
        });
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config
    };
    vec![
        shared(json!({"model_type": "llama", "num_key_value_heads": 1})),
        shared(json!({"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 40})),
        json!({"model_type": "gpt2", "vocab_size": 96, "n_embd": 128, "n_layer": 2, "n_head": 2,
               "n_positions": 1024, "initializer_range": 0.3}),
        shared(json!({"model_type": "mixtral", "num_key_value_heads": 1, "num_local_experts": 4,
                      "num_experts_per_tok": 2, "sliding_window": null})),
        json!({"model_type": "bloom", "vocab_size": 96, "hidden_size": 128, "n_layer": 2, "n_head": 2,
               "initializer_range": 0.3}),
    ]
}

#[test]
fn recorded_steps_say_what_plain_passes_say() {
    if ferrospeed_cuda::device_count() == 0 {
        ferrospeed_testkit::skip::skip("no CUDA device");
        return;
    }
    let device = ferrospeed_cuda::device(0, &ferrospeed_cpu::device()).unwrap();
    for config in wide_families() {
        let name = &config["model_type"];
        let (model, _store) = model(&config, DType::BF16, &device);
        let mut states = [(); 2].map(|()| model.new_pages(3 * 40, BLOCK, &device).unwrap());
        let mut steps = PageSteps::new(&model, BLOCK, &states[0]).unwrap().expect("a GPU gains by it");
        let blocks = |index: usize| (0..40).map(|block| (block * 3 + index) as u32).collect::<Vec<_>>();
        // Texts of which one, two or three go on, over the border at which keys are spread.
        let mut texts = [vec![5i64; 250], vec![7; 3], vec![11; 500]];
        for (index, text) in texts.iter().enumerate() {
            let sequence = PagedSequence { first: 0, count: text.len(), blocks: blocks(index) };
            let rows = Arc::new(PagedRows { sequences: vec![sequence] });
            for state in &mut states {
                model.run_pages(text, &rows, state).unwrap();
            }
        }
        for step in 0..30 {
            let who: Vec<usize> = (0..3).filter(|index| step % 4 == 3 || *index <= step % 4).collect();
            let (mut rows, mut ids) = (PagedRows::default(), Vec::new());
            for &index in &who {
                let first = texts[index].len();
                rows.sequences.push(PagedSequence { first, count: 1, blocks: blocks(index) });
                ids.push((step as i64 * 13 + index as i64) % 96);
            }
            let rows = Arc::new(rows);
            let hidden = model.run_pages(&ids, &rows, &mut states[0]).unwrap();
            let plain = model.page_logits(&hidden).unwrap().to_vec_f32().unwrap();
            let next = steps.run(&model, &ids, &rows, &mut states[1], || ()).unwrap().expect("single rows");
            let all: Vec<i64> = (0..who.len() as i64).collect();
            let logits = next.logits(&all).unwrap().to_vec_f32().unwrap();
            for (row, (logits, plain)) in logits.chunks(96).zip(plain.chunks(96)).enumerate() {
                let size = plain.iter().fold(1.0f32, |size, value| size.max(value.abs()));
                for (one, other) in logits.iter().zip(plain) {
                    assert!((one - other).abs() <= 0.03 * size, "{name} step {step}: {one} for {other}");
                }
                let (token, largest) = next.likeliest[row];
                assert_eq!(largest, logits.iter().copied().fold(f32::MIN, f32::max), "{name} step {step}");
                assert_eq!(logits[token as usize], largest, "{name} step {step}");
            }
            for (&index, &id) in who.iter().zip(&ids) {
                texts[index].push(id);
            }
        }
        let two = PagedSequence { first: 0, count: 2, blocks: blocks(0) };
        let rows = Arc::new(PagedRows { sequences: vec![two] });
        assert!(
            steps.run(&model, &[1, 2], &rows, &mut states[1], || ()).unwrap().is_none(),
            "a piece of a prompt"
        );
    }
}

/// What was cached while a text was short was turned by other frequencies than those of a long one.
#[test]
fn a_text_that_outgrows_what_its_model_was_trained_for_is_read_anew() {
    let config = json!({
        "model_type": "phi3", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64, "initializer_range": 0.3,
        "original_max_position_embeddings": 9, "sliding_window": null, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 0,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1, 1.25, 1.5], "long_factor": [1.0, 2.0, 4.5, 9.0]},
    });
    let device = ferrospeed_cpu::with_threads(1);
    let (model, _store) = model(&config, DType::F32, &device);
    let continued = |text: &[i64], max_new_tokens: usize| {
        let options = GenerateOptions {
            max_new_tokens,
            sampling: Sampling::Greedy,
            end_tokens: Vec::new(),
            pad_token: 0,
        };
        generate(&model, &[text.to_vec()], None, &options, &device, &mut |_, _| {}).unwrap().remove(0)
    };
    for start in 0..8 {
        let prompt: Vec<i64> = (0..6).map(|token| (start * 11 + token * 7) % 96).collect();
        let whole = continued(&prompt, 10);
        let mut by_one = prompt;
        while by_one.len() < whole.len() {
            by_one = continued(&by_one, 1);
        }
        assert_eq!(whole, by_one, "{start}");
    }
}
