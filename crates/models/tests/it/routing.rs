//! Routing of mixtures can be seen from outside, and costs nothing unless somebody looks.

use ferrospeed_models::{Decoder, ModelConfig, Tokens, WindowRule};
use ferrospeed_nn::Mode;
use ferrospeed_tensor::store::{FromInitializers, PlainStore};
use ferrospeed_tensor::{DType, Tensor, autograd};
use serde_json::json;

fn model(model_type: &str) -> Decoder {
    let config = json!({
        "model_type": model_type, "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
    });
    match ModelConfig::from_value(&config, WindowRule::default()).unwrap() {
        ModelConfig::Decoder(config) => Decoder::new(*config),
        ModelConfig::Bert(_) => panic!("{model_type} is a decoder"),
    }
}

#[test]
fn every_mixture_tells_who_was_sent_where_in_the_last_forward() {
    let device = ferrospeed_cpu::with_threads(1);
    for (model_type, experts, chosen) in [("mixtral", 8, 2), ("qwen2_moe", 60, 4), ("llama", 0, 0)] {
        let model = model(model_type);
        assert!(model.routing().is_empty(), "{model_type}: nothing was routed yet");
        let params = model.parameters().clone();
        let _store =
            PlainStore::attach(params.as_slice(), DType::F32, &device, &FromInitializers { seed: 3 })
                .unwrap();
        let ids: Vec<i64> = (0..22).map(|i| i * 7 % 50).collect();
        let ids = Tensor::from_slice(&ids, [2, 11], &device).unwrap();
        let loss = model.loss(&Tokens::new(ids.clone()), &ids, Mode::Train).unwrap();
        autograd::backward(&loss).unwrap();
        let routing = model.routing();
        let blocks: Vec<usize> = routing.iter().map(|(block, _)| *block).collect();
        assert_eq!(blocks, if experts > 0 { vec![0, 1, 2] } else { vec![] }, "{model_type}");
        for (block, routing) in routing {
            let numbers = routing.statistics().unwrap();
            assert_eq!(numbers.tokens_per_expert.len(), experts, "{model_type}, block {block}");
            assert_eq!(
                numbers.tokens_per_expert.iter().sum::<u64>(),
                22 * chosen,
                "{model_type}, block {block}"
            );
            assert_eq!(numbers.dropped_share, 0.0);
            assert!(numbers.entropy > 0.0 && numbers.entropy <= (experts as f64).ln() + 1e-6, "{numbers:?}");
            assert!(numbers.imbalance >= 1.0, "{numbers:?}");
        }
    }
}
