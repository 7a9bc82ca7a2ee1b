//! LLaMA's later dense relatives: Qwen3, SmolLM3 and OLMo 2.

use ferrospeed_nn::Turning;

use crate::config::WindowRule;
use crate::decoder::{DecoderConfig, Residual};
use crate::error::Result;
use crate::families::llama::{Defaults, LLAMA, attention_bias, common, normed, sliding};
use crate::fields::Fields;

/// Reads a `qwen3` configuration: queries and keys are normalised head by head; windows in the upper layers only.
pub fn qwen3(fields: &Fields<'_>, rule: WindowRule) -> Result<DecoderConfig> {
    let defaults = Defaults {
        model_type: "qwen3",
        kv_heads: Some(32),
        inner_width: 22_016,
        vocab: 151_936,
        max_tokens: 32_768,
        head_dim: Some(128),
        ..LLAMA
    };
    let mut config = common(fields, &defaults)?;
    attention_bias(fields, &mut config)?;
    let first = fields.size("max_window_layers", Some(28))?;
    config.windows = sliding(fields, config.layers, Some(4096), |layer| layer >= first, rule)?;
    config.names.qkv = normed(true);
    Ok(config)
}

/// Reads a `smollm3` configuration: some layers do not turn their queries and keys, and where there is a window, those slide.
pub fn smollm3(fields: &Fields<'_>, rule: WindowRule) -> Result<DecoderConfig> {
    let defaults = Defaults {
        model_type: "smollm3",
        padding: Some(128_004),
        sizes: [2048, 36, 16],
        kv_heads: Some(4),
        theta: 2e6,
        vocab: 128_256,
        max_tokens: 32_768,
        tied: true,
        ..LLAMA
    };
    let mut config = common(fields, &defaults)?;
    attention_bias(fields, &mut config)?;
    config.mlp_bias = fields.flag("mlp_bias", false)?;
    // Its files have it; nobody reads it.
    fields.harmless(&["max_window_layers"]);
    config.turns = turning_layers(fields, config.layers)?;
    config.windows =
        sliding(fields, config.layers, None, |layer| config.turns[layer] == Turning::Never, rule)?;
    Ok(config)
}

/// Which layers turn: 1 in `no_rope_layers`, and without that all but every so many-th.
fn turning_layers(fields: &Fields<'_>, layers: usize) -> Result<Vec<Turning>> {
    let turning = |turns: bool| if turns { Turning::Usually } else { Turning::Never };
    let interval = fields.size("no_rope_layer_interval", Some(4))?;
    let key = "no_rope_layers";
    if !fields.has(key) {
        return match interval {
            0 => Err(fields.error("no_rope_layer_interval", "0 is no number of layers")),
            interval => Ok((1..=layers).map(|layer| turning(layer % interval != 0)).collect()),
        };
    }
    let said = fields.numbers(key)?;
    if said.len() < layers {
        let why = format!("lists {} layers, the model has {layers}", said.len());
        return Err(fields.error(key, why));
    }
    if let Some(other) = said.iter().find(|&&turns| turns != 0.0 && turns != 1.0) {
        return Err(fields
            .error(key, format!("{other} is neither 0, a layer without, nor 1, one with rotary positions")));
    }
    Ok(said.into_iter().take(layers).map(|turns| turning(turns == 1.0)).collect())
}

/// Reads an `olmo2` configuration: norms stand behind attention and feed-forward; queries and keys are normalised over all heads.
pub fn olmo2(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let defaults = Defaults { model_type: "olmo2", vocab: 50_304, padding: Some(1), eps: 1e-5, ..LLAMA };
    let mut config = common(fields, &defaults)?;
    attention_bias(fields, &mut config)?;
    config.residual = Residual::BranchNorm;
    config.names.qkv = normed(false);
    config.names.norm1 = "post_attention_layernorm";
    config.names.norm2 = "post_feedforward_layernorm";
    Ok(config)
}
