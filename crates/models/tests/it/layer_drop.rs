//! Progressive layer dropping in a decoder: the blocks that a pass leaves out compute nothing and get no gradient.

use ferrospeed_models::presets::{Preset, PresetSizes};
use ferrospeed_models::{Decoder, ModelConfig, Tokens, WindowRule};
use ferrospeed_nn::Mode;
use ferrospeed_nn::layer_drop::{LayerDrop, with_layer_drop};
use ferrospeed_tensor::store::{FromInitializers, PlainStore};
use ferrospeed_tensor::{DType, Tensor, autograd};

const LAYERS: usize = 4;

fn decoder() -> Decoder {
    let config = Preset::Gpt2.config(&PresetSizes {
        layers: Some(LAYERS as u64),
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

#[test]
fn what_is_left_out_has_no_gradient_and_an_evaluation_leaves_out_nothing() {
    let device = ferrospeed_cpu::with_threads(1);
    let model = decoder();
    let params = model.parameters().as_slice();
    let store = PlainStore::attach(params, DType::F32, &device, &FromInitializers { seed: 1 }).unwrap();
    let ids: Vec<i64> = (0..32).map(|i| (i * 7 % 61) as i64).collect();
    let ids = Tensor::from_slice(&ids, [2, 16], &device).unwrap();
    let loss = |drop: Option<LayerDrop>, mode: Mode| {
        with_layer_drop(drop, || model.loss(&Tokens::new(ids.clone()), &ids, mode)).unwrap()
    };
    let whole = loss(None, Mode::Train).item().unwrap();
    let everything = LayerDrop { theta: 1.0, seed: 5, pass: 0 };
    assert_eq!(loss(Some(everything), Mode::Train).item().unwrap(), whole, "theta 1 keeps everything");

    let mut left_out = 0;
    for pass in 0..6 {
        let drop = LayerDrop { theta: 0.0, seed: 5, pass };
        assert_eq!(autograd::no_grad(|| loss(Some(drop), Mode::Evaluate)).item().unwrap(), whole);
        store.take_gradients();
        let loss = loss(Some(drop), Mode::Train);
        assert!(loss.item().unwrap().is_finite());
        autograd::backward(&loss).unwrap();
        for layer in 0..LAYERS {
            let name = format!("h.{layer}.");
            for (index, param) in params.iter().enumerate().filter(|(_, param)| param.name().contains(&name))
            {
                let has_gradient = store.gradient(index).is_some();
                assert_eq!(has_gradient, drop.keeps(layer, LAYERS), "{} in pass {pass}", param.name());
            }
            left_out += usize::from(!drop.keeps(layer, LAYERS));
        }
    }
    assert!(left_out > 0, "something was left out");
}
