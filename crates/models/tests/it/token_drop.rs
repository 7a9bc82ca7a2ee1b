//! Random layer-token dropping in a decoder: what a layer drops passes it by, and what it keeps it sees at its place.

use ferrospeed_models::presets::{Preset, PresetSizes};
use ferrospeed_models::{Decoder, ModelConfig, Tokens, WindowRule};
use ferrospeed_nn::Mode;
use ferrospeed_nn::token_drop::{TokenDrop, with_token_drop};
use ferrospeed_tensor::store::{FromInitializers, PlainStore};
use ferrospeed_tensor::{DType, Device, Tensor, autograd};

const TOKENS: usize = 12;

fn decoder(preset: Preset, layers: u64) -> Decoder {
    let config = preset.config(&PresetSizes {
        layers: Some(layers),
        width: Some(32),
        heads: Some(2),
        vocabulary: 61,
        sequence: 16,
        dropout: 0.0,
    });
    match ModelConfig::from_value(&config, WindowRule::default()).unwrap() {
        ModelConfig::Decoder(config) => Decoder::new(*config),
        ModelConfig::Bert(_) => panic!("a preset is a decoder"),
    }
}

fn drop(layers: &[usize], kept: usize) -> TokenDrop {
    TokenDrop { layers: layers.into(), kept, seed: 3, pass: 1 }
}

fn ids() -> Vec<i64> {
    (0..2 * TOKENS).map(|i| (i * i * 7 % 61) as i64).collect()
}

/// The tokens that layer 0 sees of two sequences.
fn kept_places(drop: &TokenDrop, device: &Device) -> Vec<Vec<usize>> {
    let places: Vec<f32> = (0..2 * TOKENS).map(|at| (at % TOKENS) as f32).collect();
    let places = Tensor::from_slice(&places, [2, TOKENS, 1], device).unwrap();
    let chosen = drop.of_layer(0, [2, TOKENS], device).unwrap().unwrap().take(&places).unwrap();
    let flat: Vec<usize> = chosen.to_vec::<f32>().unwrap().into_iter().map(|place| place as usize).collect();
    flat.chunks(drop.kept).map(<[usize]>::to_vec).collect()
}

/// One layer on some tokens computes what a model of one layer computes of a text of these tokens at these positions.
#[test]
fn kept_tokens_are_seen_at_their_places_and_the_others_are_as_they_were() {
    let device = ferrospeed_cpu::with_threads(1);
    for preset in [Preset::Gpt2, Preset::Llama] {
        let model = decoder(preset, 1);
        let params = model.parameters().as_slice();
        let _store = PlainStore::attach(params, DType::F32, &device, &FromInitializers { seed: 1 }).unwrap();
        let ids = ids();
        let hidden = |ids: &[i64], positions: Option<Vec<Vec<usize>>>, drop: Option<TokenDrop>| {
            let length = ids.len() / 2;
            let ids = Tensor::from_slice(ids, [2, length], &device).unwrap();
            let tokens = Tokens { positions, ..Tokens::new(ids) };
            let hidden = with_token_drop(drop, || model.hidden(&tokens, None, Mode::Train)).unwrap();
            hidden.to_vec::<f32>().unwrap()
        };
        let whole = hidden(&ids, None, None);
        let dropped = hidden(&ids, None, Some(drop(&[0], 5)));
        assert_eq!(hidden(&ids, None, Some(drop(&[0], TOKENS))), whole, "all are kept");
        assert_eq!(hidden(&ids, None, Some(drop(&[3], 5))), whole, "another layer drops");
        let kept = kept_places(&drop(&[0], 5), &device);
        assert!(kept.iter().all(|places| places.len() == 5) && kept[0] != kept[1], "{kept:?}");
        let row = |hidden: &[f32], row: usize| hidden[row * 32..(row + 1) * 32].to_vec();
        // Who is dropped is as the embedding made it: the same whatever others are.
        let others: Vec<i64> = (0..2 * TOKENS)
            .map(|at| if kept[at / TOKENS].contains(&(at % TOKENS)) { 60 - ids[at] } else { ids[at] })
            .collect();
        let beside_others = hidden(&others, None, Some(drop(&[0], 5)));
        for at in (0..2 * TOKENS).filter(|at| !kept[at / TOKENS].contains(&(at % TOKENS))) {
            assert_eq!(row(&dropped, at), row(&beside_others, at), "{at}");
            assert_ne!(row(&dropped, at), row(&whole, at), "{at}");
        }
        let part: Vec<i64> = kept
            .iter()
            .enumerate()
            .flat_map(|(b, places)| places.iter().map(move |p| b * TOKENS + p))
            .map(|at| ids[at])
            .collect();
        let of_part = hidden(&part, Some(kept.clone()), None);
        for (sequence, places) in kept.iter().enumerate() {
            for (at, place) in places.iter().enumerate() {
                let (here, alone) =
                    (row(&dropped, sequence * TOKENS + place), row(&of_part, sequence * 5 + at));
                let same = here.iter().zip(&alone).all(|(a, b)| (a - b).abs() < 1e-5);
                assert!(same, "sequence {sequence}, token {place}: {here:?} and {alone:?}");
            }
        }
    }
}

/// Scores that fall with the distance (ALiBi) fall with that in the whole text. A mask of ones brings positions with it.
#[test]
fn distances_are_those_of_the_whole_text() {
    let device = ferrospeed_cpu::with_threads(1);
    let config = serde_json::json!({
        "model_type": "bloom", "hidden_size": 32, "n_head": 2, "n_layer": 1, "vocab_size": 61,
        "initializer_range": 0.5
    });
    let ModelConfig::Decoder(config) = ModelConfig::from_value(&config, WindowRule::default()).unwrap()
    else {
        panic!("BLOOM is a decoder")
    };
    let model = Decoder::new(*config);
    let params = model.parameters().as_slice();
    let _store = PlainStore::attach(params, DType::F32, &device, &FromInitializers { seed: 1 }).unwrap();
    let hidden = |mask: Option<Vec<Vec<u8>>>| {
        let tokens =
            Tokens { mask, ..Tokens::new(Tensor::from_slice(&ids(), [2, TOKENS], &device).unwrap()) };
        let run = || model.hidden(&tokens, None, Mode::Train);
        with_token_drop(Some(drop(&[0], 5)), run).unwrap().to_vec::<f32>().unwrap()
    };
    assert_eq!(hidden(None), hidden(Some(vec![vec![1; TOKENS]; 2])));
}

#[test]
fn gradients_pass_the_layer_by_and_are_the_same_when_it_is_run_again() {
    let device = ferrospeed_cpu::with_threads(1);
    let gradients = |recomputes: bool, drop: Option<TokenDrop>| {
        let mut model = decoder(Preset::Llama, 3);
        model.set_activation_checkpointing(recomputes);
        let params = model.parameters().as_slice();
        let store = PlainStore::attach(params, DType::F32, &device, &FromInitializers { seed: 1 }).unwrap();
        let ids = Tensor::from_slice(&ids(), [2, TOKENS], &device).unwrap();
        let loss =
            with_token_drop(drop, || model.loss(&Tokens::new(ids.clone()), &ids, Mode::Train)).unwrap();
        autograd::backward(&loss).unwrap();
        let gradient = |index: usize| store.gradient(index).map(|grad| grad.to_vec::<f32>().unwrap());
        let all: Vec<Option<Vec<f32>>> = (0..params.len()).map(gradient).collect();
        (loss.item().unwrap(), all)
    };
    let kept = gradients(false, Some(drop(&[1], 5)));
    assert_eq!(gradients(true, Some(drop(&[1], 5))), kept, "recomputed");
    assert_ne!(gradients(false, None).0, kept.0);
    assert!(
        kept.1.iter().all(|grad| grad.as_ref().is_some_and(|grad| grad.iter().any(|value| *value != 0.0)))
    );
}
