//! OLMo, whose norms have no weights, and OLMo 3: OLMo 2 with windows in most layers, which turn by tables of their own.

use ferrospeed_nn::NormConfig;

use crate::config::WindowRule;
use crate::decoder::{DecoderConfig, Residual};
use crate::error::Result;
use crate::families::gemma::turning_locally;
use crate::families::llama::{Defaults, LLAMA, all_but_every, attention_bias, clip, common, normed};
use crate::fields::Fields;

/// Reads an `olmo` configuration.
pub fn olmo(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let defaults = Defaults {
        model_type: "olmo",
        vocab: 50_304,
        padding: Some(1),
        // What it is no file says.
        eps: 1e-5,
        eps_key: "layer_norm_eps",
        norm: |eps| NormConfig::Layer { eps, affine: false },
        ..LLAMA
    };
    fields.fixed("layer_norm_eps", 1e-5.into())?;
    let mut config = common(fields, &defaults)?;
    attention_bias(fields, &mut config)?;
    config.scores.clip = clip(fields)?;
    Ok(config)
}

/// Reads an `olmo3` configuration.
pub fn olmo3(fields: &Fields<'_>, rule: WindowRule) -> Result<DecoderConfig> {
    let defaults = Defaults {
        model_type: "olmo3",
        vocab: 50_304,
        padding: Some(1),
        eps: 1e-5,
        theta: 5e5,
        local_theta: Some(("rope_theta", 5e5)),
        ..LLAMA
    };
    let mut config = common(fields, &defaults)?;
    attention_bias(fields, &mut config)?;
    config.residual = Residual::BranchNorm;
    config.names.qkv = normed(false);
    config.names.norm1 = "post_attention_layernorm";
    config.names.norm2 = "post_feedforward_layernorm";
    let window = fields.size_or_null("sliding_window", Some(4096))?;
    config.windows = all_but_every(fields, config.layers, window, 4, rule)?;
    config.turns = turning_locally(&config);
    Ok(config)
}
