//! Adapters of layers in slices: on two ranks what one computes.

use std::sync::Arc;

use ferrospeed_comm::topology::{DATA, MODEL};
use ferrospeed_comm::{Mesh, ProcessTopology};
use ferrospeed_engine::{Options, Setup, StepReport, initialize_model};
use ferrospeed_models::decoder::Spread;
use ferrospeed_models::{Decoder, Tokens};
use ferrospeed_nn::adapter::{Adapters, Start, TrainedBiases};
use ferrospeed_nn::tensor_parallel::{Between, Slices};
use ferrospeed_tensor::Tensor;
use ferrospeed_tensor::store::FromInitializers;
use ferrospeed_zero::access::Which;
use serde_json::{Value, json};

use super::super::common::{config, device, on_ranks};
use super::{decoder_config, dora, llama, lora};

/// Losses, and every weight by name.
type Outcome = (Vec<f32>, Vec<(String, Vec<f32>)>);

fn train(slices: usize, between: Between, stage: u8, model: &Value, adapters: &Adapters) -> Vec<Outcome> {
    let (model, adapters) = (Arc::new(model.clone()), Arc::new(adapters.clone()));
    on_ranks(slices, move |world| {
        let topology = ProcessTopology::new([(DATA, 1), (MODEL, world.size())]).unwrap();
        let mesh = Mesh::new(world.clone(), topology).unwrap();
        let slices = Slices::over(&mesh.tensor().unwrap(), between);
        let spread = Spread { slices: Some(slices), experts: None };
        let decoder = Decoder::adapted(decoder_config(&model), &spread, &adapters).unwrap();
        let value = json!({
            "train_batch_size": 2, "gradient_clipping": 0.1, "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-4}},
        });
        let setup = Setup::new(config(&value, 1), world, device(1));
        let base = FromInitializers { seed: 5 };
        let source = Start::new(&base, None, 9, decoder.parameters().as_slice());
        let mut options = Options { source: Some(&source), ..Default::default() };
        options.spread_over(&mesh).unwrap();
        let mut engine = initialize_model(&setup, decoder.parameters(), options).unwrap();
        let mut losses = Vec::new();
        for step in 0..4 {
            let ids: Vec<i64> = (0..16).map(|i| ((i * 7 + step * 5 + i * i) % 19) as i64).collect();
            let ids = Tensor::from_slice(&ids, [2, 8], engine.device()).unwrap();
            let loss = engine.forward(|mode| decoder.loss(&Tokens::new(ids.clone()), &ids, mode)).unwrap();
            losses.push(loss.item().unwrap());
            engine.backward(&loss).unwrap();
            assert!(matches!(engine.step().unwrap(), StepReport::Applied { .. }));
        }
        let params = decoder.parameters().as_slice().iter();
        let whole = |param: &ferrospeed_tensor::Param| {
            (param.name().to_owned(), engine.whole(param, Which::Weight).unwrap())
        };
        (losses, params.map(whole).collect())
    })
}

fn assert_near(found: &[f32], wanted: &[f32], what: &str) {
    let size = wanted.iter().fold(1e-3f32, |size, value| size.max(value.abs()));
    for (index, (a, b)) in found.iter().zip(wanted).enumerate() {
        assert!((a - b).abs() <= 1e-4 * size, "{what}, element {index}: {a}, not {b}");
    }
}

#[test]
fn adapters_of_slices_learn_what_whole_ones_do() {
    let models = [
        llama(16),
        json!({
            "model_type": "gpt2", "vocab_size": 19, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 8,
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        }),
        json!({
            "model_type": "phi3", "vocab_size": 19, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8, "tie_word_embeddings": false,
        }),
    ];
    for model in &models {
        for adapters in [Adapters { biases: TrainedBiases::OfAdapted, ..lora(0.0) }, dora(0.0)] {
            let whole = train(1, Between::AllTokens, 0, model, &adapters).remove(0);
            assert!(whole.0[3] != whole.0[0]);
            for (between, stage) in
                [(Between::AllTokens, 0), (Between::AllTokens, 3), (Between::OwnTokens, 1)]
            {
                for (rank, found) in train(2, between, stage, model, &adapters).into_iter().enumerate() {
                    let kind = &model["model_type"];
                    let what = format!(
                        "{kind}, {between:?}, stage {stage}, rank {rank}, dora {}",
                        adapters.magnitudes
                    );
                    assert_near(&found.0, &whole.0, &format!("{what}: losses"));
                    for ((name, values), (_, wanted)) in found.1.iter().zip(&whole.1) {
                        assert_eq!(values.len(), wanted.len(), "{what}: {name}");
                        assert_near(values, wanted, &format!("{what}: {name}"));
                    }
                }
            }
        }
    }
}
