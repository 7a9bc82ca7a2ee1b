//! Every decoder in parts gives the loss that it gives as a whole.

use ferrospeed_models::{Decoder, ModelConfig, Tokens, WindowRule};
use ferrospeed_nn::{Carried, Mode, Stages};
use ferrospeed_tensor::random::{self, RandomState};
use ferrospeed_tensor::store::{FromInitializers, PlainStore};
use ferrospeed_tensor::{DType, Device, Tensor};
use ferrospeed_testkit::golden::golden;
use serde_json::Value;

fn decoders() -> Vec<(String, Decoder)> {
    let mut found = Vec::new();
    for folder in golden().entries("models", "") {
        let Ok(text) = std::fs::read_to_string(folder.join("config.json")) else { continue };
        let mut config: Value = serde_json::from_str(&text).expect("JSON");
        for key in ["resid_pdrop", "attention_dropout", "hidden_dropout"] {
            if config.get(key).is_some() {
                config[key] = 0.25.into();
            }
        }
        if let Ok(ModelConfig::Decoder(config)) = ModelConfig::from_value(&config, WindowRule::default()) {
            found.push((folder.display().to_string(), Decoder::new(*config)));
        }
    }
    assert!(found.len() >= 10, "only {} decoders", found.len());
    found
}

#[test]
fn golden_decoders_in_parts_give_the_loss_of_the_whole() {
    for dtype in [DType::F32, DType::BF16] {
        for (name, model) in decoders() {
            let device = Device::cpu();
            let params = model.parameters().as_slice();
            let _store =
                PlainStore::attach(params, dtype, &device, &FromInitializers { seed: 3 }).expect("a store");
            let ids: Vec<i64> = (0..14).map(|i| (i * 7 + i * i) % 13).collect();
            let ids = Tensor::from_slice(&ids, [2, 7], &device).unwrap();
            let batch = (Tokens::new(ids.clone()), ids);
            let layers = model.layers().len();
            let run = |cuts: &[usize]| {
                random::set_state(RandomState { seed: 5, step: 1, next_stream: 0 });
                let carried = cuts.windows(2).try_fold(Carried::new(), |carried, cut| {
                    model.forward_range(cut[0]..cut[1], &batch, carried, Mode::Train)
                });
                let [loss] = &carried.unwrap()[..] else { panic!("the last part gives the loss alone") };
                loss.item().unwrap().to_bits()
            };
            random::set_state(RandomState { seed: 5, step: 1, next_stream: 0 });
            let whole = model.loss(&batch.0, &batch.1, Mode::Train).unwrap().item().unwrap().to_bits();
            let single: Vec<usize> = (0..=layers).collect();
            assert_eq!(run(&single), whole, "{name} {dtype}: layer by layer");
            for cut in 1..layers {
                assert_eq!(run(&[0, cut, layers]), whole, "{name} {dtype}: cut before layer {cut}");
            }
        }
    }
}

#[test]
fn golden_decoders_list_every_parameter_once_but_for_tied_ones() {
    for (name, model) in decoders() {
        let listed: Vec<String> = model
            .layers()
            .iter()
            .flat_map(|layer| layer.parameters.iter().map(|param| param.name().to_owned()))
            .collect();
        for param in model.parameters().as_slice() {
            let uses = listed.iter().filter(|listed| *listed == param.name()).count();
            let tied = model.config().tied && param.name() == listed[0];
            assert_eq!(uses, if tied { 2 } else { 1 }, "{name}: {}", param.name());
        }
        assert!(listed.len() >= model.parameters().as_slice().len(), "{name}");
    }
}
