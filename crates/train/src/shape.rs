//! What a plan must know of a model: read from the handles that the model is made of, so that every family that trains can be
//! planned.

use std::collections::BTreeMap;

use ferrospeed_models::decoder::{DecoderConfig, FeedForward, Residual};
use ferrospeed_models::roles::Role;
use ferrospeed_models::{ModelConfig, WindowRule};
use ferrospeed_tune::estimate::ModelSize;
use ferrospeed_tune::model::{ModelError, Transformer, from_hugging_face};
use serde_json::Value;

/// The shape of a model by its `config.json`, or why it has none that is known.
pub fn shape(config: &Value) -> Result<Transformer, String> {
    let unknown = match from_hugging_face(config) {
        Err(error @ ModelError::UnknownFamily { .. }) => error,
        known => return known.map_err(|error| error.to_string()),
    };
    match ModelConfig::from_value(config, WindowRule::default()) {
        Ok(ModelConfig::Decoder(decoder)) => Ok(shape_of(&decoder)),
        Ok(ModelConfig::Bert(_)) => Err(unknown.to_string()),
        Err(error) => Err(error.to_string()),
    }
}

/// The shape of a decoder.
pub(crate) fn shape_of(config: &DecoderConfig) -> Transformer {
    let model = ModelConfig::Decoder(Box::new(config.clone()));
    let parameters = model.parameters();
    // By block, those of experts beside all.
    let mut blocks: BTreeMap<usize, [u64; 2]> = BTreeMap::new();
    let mut largest = 0;
    for param in parameters.as_slice() {
        let numel = param.whole_shape().numel() as u64;
        largest = largest.max(numel);
        let Some(block) = block_of(param.name()) else { continue };
        let [all, experts] = blocks.entry(block).or_default();
        *all += numel;
        *experts += if model.role_of(param.name()) == Role::Experts { numel } else { 0 };
    }
    // Blocks differ in some families: the largest stands for all.
    let [layer_params, expert_params] = blocks.values().copied().max().unwrap_or_default();
    let (experts, chosen, inner) = match &config.feed_forward {
        FeedForward::Mixture(mixture) => {
            let (chosen, shared) = (mixture.chosen.max(1), mixture.shared_width.unwrap_or(0));
            // What every token passes is spread over its experts.
            (mixture.experts, chosen, mixture.inner_width + shared.div_ceil(chosen))
        }
        FeedForward::Plain { .. } | FeedForward::Gated { .. } | FeedForward::GatedPacked { .. } => {
            (0, 1, config.inner_width)
        }
    };
    Transformer {
        hidden: config.width as u64,
        layers: config.layers as u64,
        heads: config.heads as u64,
        kv_heads: config.kv_heads as u64,
        head_dim: config.head_dim as u64,
        intermediate: inner as u64,
        vocab: config.vocab as u64,
        max_positions: config.max_tokens as u64,
        gated: !matches!(config.feed_forward, FeedForward::Plain { .. }),
        packed_gate: matches!(config.feed_forward, FeedForward::GatedPacked { .. }),
        experts_per_token: chosen as u64,
        experts: experts as u64,
        expert_params,
        params_elsewhere: 0,
        // Side by side, attention and feed-forward norm one and the same sum.
        stream_copies: match config.residual {
            Residual::Parallel | Residual::ParallelOneNorm => 3,
            Residual::Sandwich => 6,
            Residual::PreNorm | Residual::PreNormResidual | Residual::PostNorm | Residual::BranchNorm => 4,
        },
        keeps_logits: !config.head.are_plain(),
        slices: 1,
        tied_head: config.tied,
        layer_params,
        frozen_params: 0,
        adapter_params: 0,
        size: ModelSize { total_params: parameters.whole_numel() as u64, largest_layer_params: largest },
    }
}

/// The block that a parameter is of: the first number in its name.
fn block_of(name: &str) -> Option<usize> {
    name.split('.').find_map(|word| word.parse().ok())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Small models of families that both sides know.
    fn known() -> Vec<Value> {
        let gpt2 = json!({"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 32});
        let llama = |model_type: &str| {
            json!({
                "model_type": model_type, "vocab_size": 96, "hidden_size": 64, "intermediate_size": 80,
                "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
                "max_position_embeddings": 64, "hidden_act": "silu", "rms_norm_eps": 1e-5, "num_experts": 4,
                "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                "shared_expert_intermediate_size": 40, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1,
            })
        };
        let mut all = vec![gpt2];
        for (model_type, foreign) in [
            ("llama", true),
            ("mistral", true),
            ("qwen2", true),
            ("qwen3", true),
            ("olmo2", true),
            ("phi3", true),
            ("mixtral", false),
            ("qwen2_moe", false),
            ("qwen3_moe", false),
            ("olmoe", false),
        ] {
            let mut config = llama(model_type);
            let fields = config.as_object_mut().unwrap();
            if foreign {
                fields.retain(|key, _| !key.contains("expert") && !key.contains("moe"));
            }
            if model_type == "mixtral" || model_type == "olmoe" {
                fields.retain(|key, _| !key.contains("moe_") && !key.contains("shared"));
            }
            if model_type != "mistral"
                && model_type != "mixtral"
                && !model_type.starts_with("qwen3")
                && model_type != "llama"
            {
                fields.remove("head_dim");
            }
            all.push(config);
        }
        all
    }

    #[test]
    fn handles_give_the_shape_that_the_formulas_of_known_families_do() {
        for config in known() {
            let expected = from_hugging_face(&config).unwrap();
            let parsed = ModelConfig::from_value(&config, WindowRule::default());
            let Ok(ModelConfig::Decoder(decoder)) = parsed else { panic!("{config}: {:?}", parsed.err()) };
            let mut found = shape_of(&decoder);
            // A formula counts the bias with its weight, and packed tensors by their halves.
            assert!(found.size.largest_layer_params <= 2 * expected.size.largest_layer_params);
            found.size.largest_layer_params = expected.size.largest_layer_params;
            assert_eq!(found, expected, "{config}");
        }
    }

    #[test]
    fn families_that_have_no_formula_are_counted_by_their_handles() {
        let folder = ferrospeed_testkit::golden::repository_root().join("crates/models/tests/families");
        let mut counted = 0;
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path().join("config.json");
            let config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
            let found = shape(&config).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
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
