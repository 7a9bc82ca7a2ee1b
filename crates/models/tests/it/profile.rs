//! What the core counts while a model runs is what its sizes say, to the operation.

use ferrospeed_models::presets::{Preset, PresetSizes};
use ferrospeed_models::{Decoder, ModelConfig, Tokens, WindowRule};
use ferrospeed_nn::Mode;
use ferrospeed_tensor::profile::{self, Passes, Profile};
use ferrospeed_tensor::store::{FromInitializers, PlainStore};
use ferrospeed_tensor::{DType, Tensor, autograd};
use serde_json::{Value, json};

const BATCH: usize = 3;
const TOKENS: usize = 10;

struct Sizes {
    layers: usize,
    width: usize,
    kv_width: usize,
    inner: usize,
    vocabulary: usize,
}

fn decoder(config: &Value) -> Decoder {
    match ModelConfig::from_value(config, WindowRule::default()).unwrap() {
        ModelConfig::Decoder(config) => Decoder::new(*config),
        other => panic!("{other:?} is no decoder"),
    }
}

fn preset(preset: Preset) -> Value {
    let sizes = PresetSizes {
        layers: Some(2),
        width: Some(32),
        heads: Some(4),
        vocabulary: 50,
        sequence: 16,
        dropout: 0.0,
    };
    preset.config(&sizes)
}

fn gpt2() -> (Value, Sizes) {
    (preset(Preset::Gpt2), Sizes { layers: 2, width: 32, kv_width: 32, inner: 128, vocabulary: 50 })
}

fn llama() -> (Value, Sizes) {
    let mut config = preset(Preset::Llama);
    config["num_key_value_heads"] = json!(2);
    config["intermediate_size"] = json!(88);
    (config, Sizes { layers: 2, width: 32, kv_width: 16, inner: 88, vocabulary: 50 })
}

/// One forward of the loss, and backward where it is wanted.
fn profiled(model: &Decoder, backward: bool) -> Profile {
    let device = ferrospeed_cpu::with_threads(1);
    let params = model.parameters();
    let _store =
        PlainStore::attach(params.as_slice(), DType::F32, &device, &FromInitializers { seed: 1 }).unwrap();
    let ids: Vec<i64> = (0..(BATCH * TOKENS) as i64).map(|id| id % 50).collect();
    let ids = Tensor::from_slice(&ids, [BATCH, TOKENS], &device).unwrap();
    let run = || {
        let loss = model.loss(&Tokens::new(ids.clone()), &ids, Mode::Train).unwrap();
        if backward {
            autograd::backward(&loss).unwrap();
        }
    };
    if backward {
        profile::collect(&device, run).1
    } else {
        profile::collect(&device, || autograd::no_grad(run)).1
    }
}

/// Multiply-accumulates of one layer's attention products, and of all its weights.
fn layer_macs(sizes: &Sizes, feed_forward_matrices: usize) -> [u64; 2] {
    let rows = BATCH * TOKENS;
    let attention = 2 * BATCH * TOKENS * TOKENS * sizes.width;
    let weights = rows * (2 * sizes.width * sizes.width + 2 * sizes.width * sizes.kv_width)
        + rows * feed_forward_matrices * sizes.width * sizes.inner;
    [attention as u64, weights as u64]
}

fn head_macs(sizes: &Sizes) -> u64 {
    (BATCH * TOKENS * sizes.width * sizes.vocabulary) as u64
}

/// (macs, flops) of a forward pass.
fn analytic(sizes: &Sizes, feed_forward_matrices: usize, per_normed: usize) -> (u64, u64) {
    let rows = BATCH * TOKENS;
    let layer: u64 = layer_macs(sizes, feed_forward_matrices).iter().sum();
    let macs = sizes.layers as u64 * layer + head_macs(sizes);
    let norms = (2 * sizes.layers + 1) * per_normed * rows * sizes.width;
    let activations = sizes.layers * rows * sizes.inner;
    (macs, 2 * macs + (norms + activations) as u64)
}

fn counted(passes: &Passes) -> [(u64, u64); 3] {
    [passes.forward, passes.backward, passes.recomputation].map(|work| (work.macs, work.flops))
}

#[test]
fn forward_of_gpt2_counts_to_the_operation() {
    let (config, sizes) = gpt2();
    let total = profiled(&decoder(&config), false).total();
    assert_eq!(counted(&total), [analytic(&sizes, 2, 5), (0, 0), (0, 0)]);
}

#[test]
fn forward_of_llama_counts_to_the_operation() {
    let (config, sizes) = llama();
    let total = profiled(&decoder(&config), false).total();
    assert_eq!(counted(&total), [analytic(&sizes, 3, 4), (0, 0), (0, 0)]);
}

#[test]
fn gradients_are_twice_the_forward_pass_and_attention_computes_its_scores_again() {
    for ((config, sizes), matrices, per_normed) in [(gpt2(), 2, 5), (llama(), 3, 4)] {
        let total = profiled(&decoder(&config), true).total();
        let (macs, flops) = analytic(&sizes, matrices, per_normed);
        assert_eq!(counted(&total)[..2], [(macs, flops), (2 * macs, 2 * flops)]);
        let scores = sizes.layers as u64 * layer_macs(&sizes, matrices)[0] / 2;
        assert_eq!(total.recomputation.macs, scores);
    }
}

#[test]
fn checkpointed_blocks_are_recomputed_and_nothing_else() {
    for ((config, sizes), matrices, per_normed) in [(gpt2(), 2, 5), (llama(), 3, 4)] {
        let mut model = decoder(&config);
        model.set_activation_checkpointing(true);
        let total = profiled(&model, true).total();
        let (macs, flops) = analytic(&sizes, matrices, per_normed);
        assert_eq!(counted(&total)[..2], [(macs, flops), (2 * macs, 2 * flops)]);
        let scores = sizes.layers as u64 * layer_macs(&sizes, matrices)[0] / 2;
        assert_eq!(total.recomputation.macs, macs - head_macs(&sizes) + scores);
    }
}

#[test]
fn work_is_that_of_the_module_that_did_it_in_all_passes() {
    let (config, sizes) = gpt2();
    let profile = profiled(&decoder(&config), true);
    let of = |path: &str| {
        let found = profile.modules().iter().find(|module| &*module.path == path);
        found.unwrap_or_else(|| panic!("{path} did nothing: {profile:?}"))
    };
    let rows = (BATCH * TOKENS) as u64;
    let (width, inner) = (sizes.width as u64, sizes.inner as u64);
    for block in ["transformer.h.0", "transformer.h.1"] {
        let attention = of(&format!("{block}.attn"));
        assert_eq!(attention.class, Some("MultiHeadAttention"));
        let products = layer_macs(&sizes, 2)[0];
        assert_eq!(
            counted(&attention.own).map(|(macs, _)| macs),
            [products, 2 * products, products / 2],
            "only the products between tokens are attention's own"
        );
        for (name, macs) in
            [("attn.c_attn", 3 * width * width), ("mlp.c_fc", width * inner), ("mlp.c_proj", inner * width)]
        {
            let layer = of(&format!("{block}.{name}"));
            assert_eq!(layer.class, Some("Linear"));
            assert_eq!(counted(&layer.own).map(|(macs, _)| macs), [rows * macs, 2 * rows * macs, 0]);
        }
    }
    // The head is tied to the embedding: its products are its own, the embedding only looks up.
    assert_eq!(of("lm_head").own.forward.macs, head_macs(&sizes));
    assert_eq!(of("lm_head").own.backward.macs, 2 * head_macs(&sizes));
    assert_eq!(counted(&of("transformer.wte").own), [(0, 0); 3]);
    assert_eq!(of("").class, Some("Decoder"));
}

#[test]
fn nothing_is_counted_outside_a_collection() {
    let (config, _) = gpt2();
    let model = decoder(&config);
    let device = ferrospeed_cpu::with_threads(1);
    profiled(&model, true);
    let ((), profile) = profile::collect(&device, || ());
    assert_eq!(counted(&profile.total()), [(0, 0); 3]);
}
