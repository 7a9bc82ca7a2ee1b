//! The shape of any model that can be trained, for estimates: as its `config.json` is read by itself where the family is known there, and
//! else as the model is built, from whose parameters it is counted.

use ferrospeed_models::decoder::{Decoder, DecoderConfig, FeedForward, Residual};
use ferrospeed_models::{ModelConfig, WindowRule};
use ferrospeed_tune::estimate::ModelSize;
use ferrospeed_tune::model::{ModelError, Transformer, from_hugging_face};
use serde_json::Value;

/// Why a model has no shape.
#[derive(Debug, thiserror::Error)]
pub enum ShapeError {
    /// Its family is known to estimates, and a number of it makes no sense.
    #[error(transparent)]
    Numbers(ModelError),
    /// It is none that is trained here.
    #[error(transparent)]
    Model(ferrospeed_models::ModelError),
}

/// The shape of the model with this `config.json`.
pub fn shape_of(config: &Value) -> Result<Transformer, ShapeError> {
    let known = from_hugging_face(config);
    let decoder = match (ModelConfig::from_value(config, WindowRule::default()), known) {
        (Ok(ModelConfig::Decoder(decoder)), Ok(known)) => {
            let counted = counted(*decoder);
            // Layers that are not all alike are more than a formula knows.
            return Ok(if known.size.total_params == counted.size.total_params { known } else { counted });
        }
        (Ok(ModelConfig::Decoder(decoder)), Err(ModelError::UnknownFamily { .. })) => decoder,
        (Err(why), Err(ModelError::UnknownFamily { .. })) => return Err(ShapeError::Model(why)),
        (_, known) => return known.map_err(ShapeError::Numbers),
    };
    Ok(counted(*decoder))
}

fn counted(config: DecoderConfig) -> Transformer {
    let wide = |size: usize| size as u64;
    let model = Decoder::new(config);
    let config = model.config();
    let params = model.parameters().as_slice();
    let below = |place: &str, name: &str| name.strip_prefix(place).is_some_and(|rest| rest.starts_with('.'));
    let numel_of = |chosen: &dyn Fn(&str) -> bool| -> u64 {
        params.iter().filter(|param| chosen(param.name())).map(|param| wide(param.numel())).sum()
    };
    let in_blocks = numel_of(&|name| below(config.names.blocks, name));
    let of_experts = numel_of(&|name| name.contains(".experts."));
    let layers = wide(config.layers).max(1);
    let (gated, packed_gate, experts, chosen, intermediate) = match &config.feed_forward {
        FeedForward::Plain { .. } => (false, false, 0, 1, wide(config.inner_width)),
        FeedForward::Gated { .. } => (true, false, 0, 1, wide(config.inner_width)),
        FeedForward::GatedPacked { .. } => (true, true, 0, 1, wide(config.inner_width)),
        FeedForward::Mixture(mixture) => {
            let (chosen, shared) = (wide(mixture.chosen), wide(mixture.shared_width.unwrap_or(0)));
            // What every token passes is spread over its experts.
            let inner = wide(mixture.inner_width) + shared.div_ceil(chosen);
            (true, false, wide(mixture.experts), chosen, inner)
        }
    };
    Transformer {
        hidden: wide(config.width),
        layers,
        heads: wide(config.heads),
        kv_heads: wide(config.kv_heads),
        head_dim: wide(config.head_dim),
        intermediate,
        vocab: wide(config.vocab),
        max_positions: wide(config.max_tokens),
        gated,
        packed_gate,
        experts_per_token: chosen,
        experts,
        expert_params: of_experts.div_ceil(layers),
        params_elsewhere: 0,
        // Sums and their norms; a norm behind each half is two more.
        stream_copies: match config.residual {
            Residual::Parallel | Residual::ParallelOneNorm => 3,
            Residual::Sandwich => 6,
            Residual::PreNorm | Residual::PreNormResidual | Residual::PostNorm | Residual::BranchNorm => 4,
        },
        keeps_logits: config.head.bias,
        slices: 1,
        tied_head: config.tied,
        layer_params: in_blocks.div_ceil(layers),
        frozen_params: 0,
        adapter_params: 0,
        size: ModelSize {
            total_params: params.iter().map(|param| wide(param.numel())).sum(),
            largest_layer_params: params.iter().map(|param| wide(param.numel())).max().unwrap_or(0),
        },
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_family_that_estimates_do_not_know_is_counted_by_its_parameters() {
        let config = json!({
            "model_type": "gemma2", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 34, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        });
        let shape = shape_of(&config).unwrap();
        let layer = 24 * 8 * (2 * 4 + 2 * 2) + 3 * 24 * 34 + 4 * 24;
        assert_eq!((shape.layer_params, shape.size.total_params), (layer, 61 * 24 + 3 * layer + 24));
        assert!(shape.tied_head && shape.gated && shape.stream_copies == 6);
        let known = json!({ "model_type": "llama" });
        assert_eq!(shape_of(&known).unwrap(), from_hugging_face(&known).unwrap());
        // What is wrong with a model is told by who would build it: it knows all families.
        for (config, why) in [
            (json!({ "model_type": "rnn" }), "gemma2"),
            (json!({ "model_type": "gemma2", "attn_logit_softcapping": -1 }), "attn_logit_softcapping"),
        ] {
            let error = shape_of(&config).unwrap_err().to_string();
            assert!(error.contains(why) && !error.contains("Give the numbers"), "{error}");
        }
    }

    #[test]
    fn every_recorded_family_is_counted_by_its_parameters() {
        let folder = ferrospeed_testkit::golden::repository_root().join("crates/models/tests/families");
        let mut counted = 0;
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path().join("config.json");
            let config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
            let found = shape_of(&config).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            let model = ModelConfig::from_value(&config, WindowRule::default()).unwrap();
            assert_eq!(
                found.size.total_params,
                model.parameters().whole_numel() as u64,
                "{}",
                path.display()
            );
            assert!(found.layer_params > 0 && found.layer_params <= found.size.total_params);
            counted += 1;
        }
        assert!(counted >= 30, "{counted}");
    }
}
