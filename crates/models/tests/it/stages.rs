//! Every decoder in parts gives the loss that it gives as a whole.

use ferrospeed_models::{Decoder, ModelConfig, Tokens, WindowRule};
use ferrospeed_nn::{Carried, Mode, Stages};
use ferrospeed_tensor::random::{self, RandomState};
use ferrospeed_tensor::store::{FromInitializers, PlainStore};
use ferrospeed_tensor::{DType, Tensor};
use ferrospeed_testkit::cases::Cases;
use ferrospeed_testkit::golden::{golden, read_json};

/// How many decoders the repository's set holds.
const DECODERS: usize = 16;

/// Checks every recorded decoder, with dropout.
fn each_decoder(check: impl Fn(&str, &Decoder)) {
    let mut cases = Cases::of("models");
    for folder in golden().entries("models", "").into_iter().filter(|folder| folder.is_dir()) {
        let mut config = read_json(&folder.join("config.json"));
        for key in ["resid_pdrop", "attention_dropout", "hidden_dropout"] {
            if config.get(key).is_some() {
                config[key] = 0.25.into();
            }
        }
        if let Ok(ModelConfig::Decoder(config)) = ModelConfig::from_value(&config, WindowRule::default()) {
            let name = folder.display().to_string();
            cases.check(&name, || check(&name, &Decoder::new(*config)));
        }
    }
    cases.finish(&golden(), DECODERS);
}

#[test]
fn golden_decoders_in_parts_give_the_loss_of_the_whole() {
    for dtype in [DType::F32, DType::BF16] {
        each_decoder(|name, model| {
            let device = ferrospeed_cpu::device();
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
        });
    }
}

#[test]
fn golden_decoders_list_every_parameter_once_but_for_tied_ones() {
    each_decoder(|name, model| {
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
    });
}
