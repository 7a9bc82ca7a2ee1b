//! Documents that share sequences: a model sees each as if it stood alone, in every family; and perceptrons in chunks.

use ferrospeed_models::decoder::{MlpChunks, Verdict};
use ferrospeed_models::{Decoder, ModelConfig, Tokens, WindowRule};
use ferrospeed_nn::Mode;
use ferrospeed_tensor::ops::CrossEntropyOptions;
use ferrospeed_tensor::store::{FromInitializers, PlainStore};
use ferrospeed_tensor::{Category, DType, Device, Tensor, autograd, random};
use serde_json::{Value, json};

/// Learned positions; rotary with grouped heads; a window; ALiBi; rotary of packed heads; learned positions with an offset; rotary of
/// packed grouped heads, and a packed gate.
fn families() -> Vec<Value> {
    let llama = json!({
        "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
    });
    let mut mistral = llama.clone();
    (mistral["model_type"], mistral["sliding_window"]) = ("mistral".into(), 5.into());
    let mut phi3 = llama.clone();
    phi3["model_type"] = "phi3".into();
    vec![
        json!({
            "model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
            "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
        }),
        llama,
        mistral,
        json!({
            "model_type": "bloom", "vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4,
            "hidden_dropout": 0.0, "attention_dropout": 0.0,
        }),
        json!({
            "model_type": "gpt_neox", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64, "rotary_pct": 0.5,
            "hidden_act": "gelu", "layer_norm_eps": 1e-5, "use_parallel_residual": true,
            "hidden_dropout": 0.0, "attention_dropout": 0.0,
        }),
        json!({
            "model_type": "opt", "vocab_size": 64, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "max_position_embeddings": 64, "word_embed_proj_dim": 32, "dropout": 0.0,
            "attention_dropout": 0.0, "activation_function": "relu", "do_layer_norm_before": true,
        }),
        phi3,
    ]
}

fn decoder(config: &Value) -> Decoder {
    match ModelConfig::from_value(config, WindowRule::default()).unwrap() {
        ModelConfig::Decoder(config) => Decoder::new(*config),
        ModelConfig::Bert(_) => panic!("a decoder"),
    }
}

const BORDERS: [&[usize]; 2] = [&[0, 1, 9, 20, 48], &[0, 30, 48]];
const TOKENS: usize = 48;

fn id(row: usize, token: usize) -> i64 {
    ((row * 31 + token * 7 + token * token) % 64) as i64
}

fn batch(device: &Device) -> Tokens {
    let ids: Vec<i64> = (0..2 * TOKENS).map(|at| id(at / TOKENS, at % TOKENS)).collect();
    let ids = Tensor::from_slice(&ids, [2, TOKENS], device).unwrap();
    Tokens { documents: Some(BORDERS.map(<[usize]>::to_vec).to_vec()), ..Tokens::new(ids) }
}

/// Each document as a batch of its own.
fn documents(device: &Device) -> Vec<Tokens> {
    let of_row = |(row, borders): (usize, &&'static [usize])| {
        let of_document = move |pair: &[usize]| {
            let ids: Vec<i64> = (pair[0]..pair[1]).map(|token| id(row, token)).collect();
            Tokens::new(Tensor::from_slice(&ids, [1, ids.len()], device).unwrap())
        };
        borders.windows(2).map(of_document).collect::<Vec<_>>()
    };
    BORDERS.iter().enumerate().flat_map(of_row).collect()
}

fn assert_near(what: &str, ours: &[f32], truth: &[f32], tolerance: f32) {
    assert_eq!(ours.len(), truth.len(), "{what}");
    // The gradients of some biases are zero but for rounding.
    let most = truth.iter().fold(1e-6f32, |most, value| most.max(value.abs()));
    for (index, (a, b)) in ours.iter().zip(truth).enumerate() {
        assert!((a - b).abs() <= tolerance * most, "{what}: element {index} is {a}, alone {b}");
    }
}

#[test]
fn a_document_is_computed_as_if_it_stood_alone() {
    let device = ferrospeed_cpu::with_threads(2);
    for config in families() {
        let what = config["model_type"].as_str().unwrap();
        let model = decoder(&config);
        let params = model.parameters().as_slice();
        let store = PlainStore::attach(params, DType::F32, &device, &FromInitializers { seed: 1 }).unwrap();
        let tokens = batch(&device);
        let hidden = model.hidden(&tokens, None, Mode::Train).unwrap().to_vec_f32().unwrap();
        let alone: Vec<f32> = documents(&device)
            .iter()
            .flat_map(|tokens| model.hidden(tokens, None, Mode::Train).unwrap().to_vec_f32().unwrap())
            .collect();
        assert_near(&format!("{what}: hidden states"), &hidden, &alone, 1e-5);
        // Only inside documents is anything predicted.
        let loss = model.loss(&tokens, &tokens.ids, Mode::Train).unwrap();
        autograd::backward(&loss).unwrap();
        let together = gradients(&store.take_gradients());
        let (mut sum, mut count) = (0.0, 0.0);
        let mut summed = vec![Vec::new(); together.len()];
        for tokens in documents(&device).iter().filter(|tokens| tokens.ids.numel() > 1) {
            let predicted = tokens.ids.numel() as f32 - 1.0;
            let loss = model.loss(tokens, &tokens.ids, Mode::Train).unwrap();
            (sum, count) = (sum + loss.item().unwrap() * predicted, count + predicted);
            autograd::backward(&loss).unwrap();
            for (sum, gradient) in summed.iter_mut().zip(gradients(&store.take_gradients())) {
                sum.resize(gradient.len(), 0.0);
                sum.iter_mut()
                    .zip(gradient)
                    .for_each(|(sum, value): (&mut f32, f32)| *sum += value * predicted);
            }
        }
        assert_near(&format!("{what}: loss"), &[loss.item().unwrap()], &[sum / count], 1e-5);
        for (index, (together, summed)) in together.iter().zip(&summed).enumerate() {
            let mean: Vec<f32> = summed.iter().map(|value| value / count).collect();
            assert_near(&format!("{what}: gradient {index}"), together, &mean, 2e-4);
        }
    }
}

fn gradients(all: &[Option<Tensor>]) -> Vec<Vec<f32>> {
    all.iter().map(|gradient| gradient.as_ref().map_or(Vec::new(), |g| g.to_vec_f32().unwrap())).collect()
}

#[test]
fn borders_do_not_show_where_there_are_none() {
    let device = ferrospeed_cpu::with_threads(2);
    for config in families() {
        let model = decoder(&config);
        let params = model.parameters().as_slice();
        let _store = PlainStore::attach(params, DType::BF16, &device, &FromInitializers { seed: 1 }).unwrap();
        let tokens = batch(&device);
        let whole = Tokens { documents: Some(vec![vec![0, TOKENS]; 2]), ..tokens.clone() };
        let loss = |tokens: &Tokens| model.loss(tokens, &tokens.ids, Mode::Train).unwrap().item().unwrap();
        assert_eq!(loss(&whole), loss(&Tokens::new(tokens.ids.clone())), "{}", config["model_type"]);
        assert_ne!(loss(&whole), loss(&tokens));
    }
}

#[test]
fn positions_end_with_documents_and_not_with_the_row() {
    let device = ferrospeed_cpu::device();
    let mut config = families().swap_remove(0);
    config["n_positions"] = 30.into();
    let model = decoder(&config);
    let params = model.parameters().as_slice();
    let _store = PlainStore::attach(params, DType::F32, &device, &FromInitializers { seed: 1 }).unwrap();
    let tokens = batch(&device);
    assert!(model.hidden(&tokens, None, Mode::Evaluate).is_ok());
    let error = model.hidden(&Tokens::new(tokens.ids.clone()), None, Mode::Evaluate).unwrap_err().to_string();
    assert!(error.contains("48 tokens is longer than the model's 30"), "{error}");
}

#[test]
fn borders_that_are_none_are_refused() {
    let device = ferrospeed_cpu::device();
    let model = decoder(&families()[1]);
    let params = model.parameters().as_slice();
    let _store = PlainStore::attach(params, DType::F32, &device, &FromInitializers { seed: 1 }).unwrap();
    let tokens = batch(&device);
    let refused = |tokens: Tokens| model.loss(&tokens, &tokens.ids, Mode::Train).unwrap_err().to_string();
    let with = |documents: Vec<Vec<usize>>| Tokens { documents: Some(documents), ..tokens.clone() };
    for (tokens, expected) in [
        (with(vec![vec![0, 48]]), "1 sequences of 48 tokens; the ids are [2, 48]"),
        (with(vec![vec![0, 50]; 2]), "2 sequences of 50 tokens"),
        (with(vec![vec![0, 20, 10, 48], vec![0, 48]]), "row 0: 10 is not above 20"),
        (with(vec![vec![0, 48], vec![3, 48]]), "row 1: [3, 48] do not begin with 0"),
        (Tokens { mask: Some(vec![vec![1; 48]; 2]), ..tokens.clone() }, "leave out the mask"),
    ] {
        let error = refused(tokens);
        assert!(error.contains(expected), "{error}");
    }
    let mut state = model.new_state(2, 64, &device).unwrap();
    let error = model.hidden(&tokens, Some(&mut state), Mode::Evaluate).unwrap_err().to_string();
    assert!(error.contains("a cache holds one text"), "{error}");
}

#[test]
fn perceptrons_in_chunks_change_memory_and_no_result() {
    for config in [0, 1, 6].map(|index| families().swap_remove(index)) {
        let device = ferrospeed_cpu::with_threads(1);
        let ids: Vec<i64> = (0..64 * 60).map(|at| at % 61).collect();
        let ids = Tensor::from_slice(&ids, [64, 60], &device).unwrap();
        let run = |chunks: MlpChunks, checkpointed: bool| {
            let mut model = decoder(&config);
            model.set_activation_checkpointing(checkpointed);
            model.set_mlp_chunks(chunks);
            let params = model.parameters().as_slice();
            let store =
                PlainStore::attach(params, DType::F32, &device, &FromInitializers { seed: 1 }).unwrap();
            device.backend().reset_peak_memory();
            let loss = model.loss(&Tokens::new(ids.clone()), &ids, Mode::Train).unwrap();
            autograd::backward(&loss).unwrap();
            let peak = device.memory_usage().peak(Category::Activations);
            (loss.item().unwrap(), gradients(&store.take_gradients()), peak)
        };
        for checkpointed in [false, true] {
            let (loss, gradients, peak) = run(MlpChunks::Automatic, checkpointed);
            let (chunked, near, less) = run(MlpChunks::Tokens(500), checkpointed);
            assert_eq!(loss, chunked);
            for (index, (ours, truth)) in near.iter().zip(&gradients).enumerate() {
                assert_near(&format!("gradient {index}"), ours, truth, 1e-5);
            }
            assert!(less < peak, "{less} and {peak}");
        }
    }
}

/// Some documents are to become likelier, others less likely; those that count for nothing have no label.
#[test]
fn a_judged_loss_has_the_gradient_of_what_was_said_of_each_label() {
    let device = ferrospeed_cpu::with_threads(2);
    for config in families() {
        let what = &config["model_type"];
        let model = decoder(&config);
        let params = model.parameters().as_slice();
        let store = PlainStore::attach(params, DType::F32, &device, &FromInitializers { seed: 1 }).unwrap();
        let weight = |document: usize| [0.0, 0.7, -1.3, 0.25, 2.0, -0.5][document];
        // Of each token, the document that it predicts a token of.
        let mut of = vec![None; 2 * TOKENS];
        let spans = BORDERS.iter().enumerate();
        let spans = spans.flat_map(|(row, borders)| {
            borders.windows(2).map(move |pair| (row * TOKENS + pair[0])..(row * TOKENS + pair[1]))
        });
        for (document, span) in spans.enumerate() {
            (span.start..span.end - 1).for_each(|at| of[at] = Some(document));
        }
        let tokens = batch(&device);
        let labels: Vec<i64> = (0..2 * TOKENS)
            .map(|at| match at.checked_sub(1).and_then(|before| of[before]) {
                Some(document) if weight(document) != 0.0 => id(at / TOKENS, at % TOKENS),
                _ => -100,
            })
            .collect();
        let labels = Tensor::from_slice(&labels, [2, TOKENS], &device).unwrap();
        let judge = |logprobs: &[f32]| {
            let slopes: Vec<f32> = of.iter().map(|document| document.map_or(0.0, |d| -weight(d))).collect();
            let loss = logprobs.iter().zip(&slopes).map(|(logprob, slope)| logprob * slope).sum();
            for (at, logprob) in logprobs.iter().enumerate() {
                assert_eq!(*logprob != 0.0, of[at].is_some_and(|d| weight(d) != 0.0), "{what}: label {at}");
            }
            Verdict { loss, slopes }
        };
        let loss = model.judged_loss(&tokens, &labels, Mode::Train, judge).unwrap();
        autograd::backward(&loss).unwrap();
        let judged = gradients(&store.take_gradients());
        let (mut value, mut summed) = (0.0, vec![Vec::new(); judged.len()]);
        for (document, tokens) in documents(&device).iter().enumerate().filter(|(_, t)| t.ids.numel() > 1) {
            let share = weight(document) * (tokens.ids.numel() as f32 - 1.0);
            let loss = model.loss(tokens, &tokens.ids, Mode::Train).unwrap();
            value += loss.item().unwrap() * share;
            autograd::backward(&loss).unwrap();
            for (sum, gradient) in summed.iter_mut().zip(gradients(&store.take_gradients())) {
                sum.resize(gradient.len(), 0.0);
                sum.iter_mut().zip(gradient).for_each(|(sum, value): (&mut f32, f32)| *sum += value * share);
            }
        }
        assert_near(&format!("{what}: loss"), &[loss.item().unwrap()], &[value], 1e-4);
        // Of a label: what is zero but for rounding is as small as in a mean.
        let count = of.iter().flatten().count() as f32;
        let of_label = |sums: &[f32]| -> Vec<f32> { sums.iter().map(|sum| sum / count).collect() };
        for (index, (judged, summed)) in judged.iter().zip(&summed).enumerate() {
            assert_near(&format!("{what}: gradient {index}"), &of_label(judged), &of_label(summed), 5e-4);
        }
        let quiet = autograd::no_grad(|| model.judged_loss(&tokens, &labels, Mode::Evaluate, judge)).unwrap();
        assert_near(&format!("{what}: unrecorded"), &[quiet.item().unwrap()], &[value], 1e-4);
    }
}

#[test]
fn what_training_adds_to_a_loss_is_not_there_in_evaluation() {
    let device = ferrospeed_cpu::with_threads(2);
    let mut model = decoder(&families()[1]);
    let params = model.parameters().as_slice().to_vec();
    let _store = PlainStore::attach(&params, DType::F32, &device, &FromInitializers { seed: 1 }).unwrap();
    let tokens = batch(&device);
    let loss = |model: &Decoder, mode| model.loss(&tokens, &tokens.ids, mode).unwrap().item().unwrap();
    let plain = loss(&model, Mode::Train);
    for (smoothing, z_loss) in [(0.1, 0.0), (0.0, 0.5)] {
        let options = CrossEntropyOptions { label_smoothing: smoothing, z_loss, ..Default::default() };
        model.set_training_loss(options);
        assert!((loss(&model, Mode::Train) - plain).abs() > 1e-4, "{smoothing} {z_loss}");
        assert_eq!(loss(&model, Mode::Evaluate), plain);
    }
    model.set_training_loss(CrossEntropyOptions::default());
    model.set_embedding_noise(Some(5.0));
    let state = random::state();
    let noisy = loss(&model, Mode::Train);
    assert!((noisy - plain).abs() > 1e-5, "{noisy}");
    random::set_state(state);
    assert_eq!(loss(&model, Mode::Train), noisy, "it is a function of the key");
    assert_eq!(loss(&model, Mode::Evaluate), plain);
}
