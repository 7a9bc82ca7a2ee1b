//! Block-sparse attention in models: who sees whom, and that recomputing, slices of heads and other lengths change nothing.

use ferrospeed_models::bert::{BertConfig, BertTop};
use ferrospeed_models::presets::{Preset, PresetSizes};
use ferrospeed_models::{Bert, Decoder, ModelConfig, Tokens, WindowRule};
use ferrospeed_nn::Mode;
use ferrospeed_nn::sparse_attention::{
    BigBird, Direction, Fixed, LocalSlidingWindow, SparseAttention, Sparsity,
};
use ferrospeed_nn::token_drop::{TokenDrop, with_token_drop};
use ferrospeed_tensor::store::{FromInitializers, PlainStore};
use ferrospeed_tensor::{DType, Tensor, autograd};
use serde_json::json;

const TOKENS: usize = 23;
const WIDTH: usize = 32;

fn decoder(preset: Preset) -> Decoder {
    let config = preset.config(&PresetSizes {
        layers: Some(1),
        width: Some(WIDTH as u64),
        heads: Some(2),
        vocabulary: 61,
        sequence: 32,
        dropout: 0.0,
    });
    match ModelConfig::from_value(&config, WindowRule::default()).unwrap() {
        ModelConfig::Decoder(config) => Decoder::new(*config),
        ModelConfig::Bert(_) => panic!("a preset is a decoder"),
    }
}

fn kind(said: &Sparsity) -> SparseAttention {
    SparseAttention::new(said).unwrap().with_seed(5)
}

fn window(attention: Direction) -> SparseAttention {
    let block = 4.try_into().unwrap();
    kind(&Sparsity::LocalSlidingWindow(LocalSlidingWindow { block, attention, ..Default::default() }))
}

fn ids(changed: Option<usize>) -> Vec<i64> {
    (0..TOKENS).map(|i| (i * i * 7 % 60) as i64 + i64::from(changed == Some(i))).collect()
}

/// For each token that changes, which tokens' hidden states change with it.
fn influence(hidden: impl Fn(&[i64]) -> Vec<f32>) -> Vec<Vec<bool>> {
    let before = hidden(&ids(None));
    let changed = |token: usize| {
        let after = hidden(&ids(Some(token)));
        before.chunks(WIDTH).zip(after.chunks(WIDTH)).map(|(before, after)| before != after).collect()
    };
    (0..TOKENS).map(changed).collect()
}

#[test]
fn a_layer_of_a_decoder_sees_active_blocks_up_to_itself() {
    let device = ferrospeed_cpu::with_threads(1);
    let block = 4.try_into().unwrap();
    let fixed = Fixed { block, num_local_blocks: 2, ..Default::default() };
    for (preset, kind) in [
        (Preset::Gpt2, window(Direction::Unidirectional)),
        (Preset::Llama, window(Direction::Bidirectional)),
        (Preset::Gpt2, kind(&Sparsity::Fixed(fixed))),
        (
            Preset::Llama,
            kind(&Sparsity::BigBird(BigBird { block, num_random_blocks: 1, ..Default::default() })),
        ),
    ] {
        let mut model = decoder(preset);
        let params = model.parameters().as_slice();
        let _store = PlainStore::attach(params, DType::F32, &device, &FromInitializers { seed: 1 }).unwrap();
        let layout = kind.layout_of_any(0..2, TOKENS);
        model.set_sparse_attention(Some(&kind));
        let hidden = |ids: &[i64]| {
            let ids = Tensor::from_slice(ids, [1, TOKENS], &device).unwrap();
            model.hidden(&Tokens::new(ids), None, Mode::Evaluate).unwrap().to_vec::<f32>().unwrap()
        };
        for (key, queries) in influence(hidden).iter().enumerate() {
            for (query, changes) in queries.iter().enumerate() {
                let sees = key <= query && layout.is_active(0, query / 4, key / 4);
                assert_eq!(*changes, sees, "query {query}, key {key} of {kind:?}");
            }
        }
        assert!((model.attended_share(TOKENS) - layout.share(TOKENS)).abs() < 1e-12);
    }
}

#[test]
fn dense_blocks_are_ordinary_attention_and_a_cache_is_seen_whole() {
    let device = ferrospeed_cpu::with_threads(1);
    let mut model = decoder(Preset::Llama);
    let params = model.parameters().as_slice().to_vec();
    let _store = PlainStore::attach(&params, DType::F32, &device, &FromInitializers { seed: 1 }).unwrap();
    let tokens = Tokens::new(Tensor::from_slice(&ids(None), [1, TOKENS], &device).unwrap());
    let hidden = |model: &Decoder, cached: bool| {
        let mut state = cached.then(|| model.new_state(1, TOKENS, &device).unwrap());
        model.hidden(&tokens, state.as_mut(), Mode::Evaluate).unwrap().to_vec::<f32>().unwrap()
    };
    let plain = hidden(&model, false);
    model.set_sparse_attention(Some(&SparseAttention::from_section(&json!({ "mode": "dense" })).unwrap()));
    assert_eq!(hidden(&model, false), plain);
    model.set_sparse_attention(Some(&window(Direction::Unidirectional)));
    assert_ne!(hidden(&model, false), plain);
    assert_eq!(hidden(&model, true), plain, "with a cache");
    model.set_sparse_attention(None);
    assert_eq!(hidden(&model, false), plain);
}

#[test]
fn recomputed_blocks_have_the_same_layouts_and_tokens_are_not_dropped_beside() {
    let device = ferrospeed_cpu::with_threads(1);
    let gradients = |recomputes: bool, seed: u64| {
        let mut model = decoder(Preset::Llama);
        let block = 4.try_into().unwrap();
        let random = BigBird { block, num_random_blocks: 2, ..Default::default() };
        model.set_sparse_attention(Some(&kind(&Sparsity::BigBird(random))));
        model.seed_sparse_attention(seed);
        model.set_activation_checkpointing(recomputes);
        let params = model.parameters().as_slice();
        let store = PlainStore::attach(params, DType::F32, &device, &FromInitializers { seed: 1 }).unwrap();
        let ids = Tensor::from_slice(&ids(None), [1, TOKENS], &device).unwrap();
        let loss = model.loss(&Tokens::new(ids.clone()), &ids, Mode::Train).unwrap();
        autograd::backward(&loss).unwrap();
        let of = |index: usize| store.gradient(index).map(|gradient| gradient.to_vec::<f32>().unwrap());
        let all: Vec<Option<Vec<f32>>> = (0..params.len()).map(of).collect();
        let drop = TokenDrop { layers: [0].into(), kept: 5, seed: 1, pass: 0 };
        let dropped =
            with_token_drop(Some(drop), || model.loss(&Tokens::new(ids.clone()), &ids, Mode::Train));
        assert!(dropped.unwrap_err().to_string().contains("leave out sparse_attention"));
        (loss.item().unwrap(), all)
    };
    assert_eq!(gradients(true, 5), gradients(false, 5));
    assert_ne!(gradients(false, 6).0, gradients(false, 5).0, "another seed");
}

#[test]
fn an_encoder_sees_active_blocks_on_both_sides_and_refuses_to_see_one() {
    let device = ferrospeed_cpu::with_threads(1);
    let json = json!({
        "model_type": "bert", "vocab_size": 61, "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 64, "max_position_embeddings": 32, "type_vocab_size": 2, "hidden_act": "gelu",
        "layer_norm_eps": 1e-12, "initializer_range": 0.02, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0, "architectures": ["BertModel"],
    });
    let mut model = match ModelConfig::from_value(&json, WindowRule::default()).unwrap() {
        ModelConfig::Bert(config) => Bert::new(BertConfig { top: BertTop::Nothing, ..config }),
        ModelConfig::Decoder(_) => panic!("BERT is no decoder"),
    };
    let params = model.parameters().as_slice().to_vec();
    let _store = PlainStore::attach(&params, DType::F32, &device, &FromInitializers { seed: 1 }).unwrap();
    let refused = model.set_sparse_attention(Some(&window(Direction::Unidirectional)));
    assert!(refused.unwrap_err().to_string().contains("which an encoder sees; take bidirectional"));
    let kind = window(Direction::Bidirectional);
    model.set_sparse_attention(Some(&kind)).unwrap();
    let layout = kind.layout_of_any(0..2, TOKENS);
    let hidden = |ids: &[i64]| {
        let ids = Tensor::from_slice(ids, [1, TOKENS], &device).unwrap();
        let output = model.forward(&ids, None, None, Mode::Evaluate, &mut |_, _| ()).unwrap();
        output.hidden.to_vec::<f32>().unwrap()
    };
    for (key, queries) in influence(hidden).iter().enumerate() {
        for (query, changes) in queries.iter().enumerate() {
            assert_eq!(*changes, layout.is_active(0, query / 4, key / 4), "query {query}, key {key}");
        }
    }
}
