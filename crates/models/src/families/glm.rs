//! GLM-4 and relatives in which pairs of channels that are neighbours turn: GLM-4 (`glm`, `glm4`), ERNIE 4.5 and Helium.

use crate::decoder::{DecoderConfig, FeedForward, Residual};
use crate::error::Result;
use crate::families::llama::{Defaults, LLAMA, common, no_biases};
use crate::families::neighbours_turn;
use crate::fields::Fields;

const GLM: Defaults = Defaults {
    model_type: "glm",
    sizes: [4096, 40, 32],
    kv_heads: Some(2),
    inner_width: 13_696,
    vocab: 151_552,
    padding: Some(151_329),
    max_tokens: 131_072,
    eps: 1.5625e-7,
    head_dim: Some(128),
    rotary_share: Some(0.5),
    ..LLAMA
};

fn glm_like(fields: &Fields<'_>, defaults: &Defaults) -> Result<DecoderConfig> {
    let mut config = common(fields, defaults)?;
    config.qkv_bias = fields.flag("attention_bias", true)?;
    neighbours_turn(&mut config);
    config.feed_forward = FeedForward::GatedPacked { names: ["mlp.gate_up_proj", "mlp.down_proj"] };
    Ok(config)
}

/// Reads a `glm` configuration.
pub fn glm(fields: &Fields<'_>) -> Result<DecoderConfig> {
    glm_like(fields, &GLM)
}

/// Reads a `glm4` configuration: norms stand on both sides of each half.
pub fn glm4(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let mut config = glm_like(fields, &Defaults { model_type: "glm4", ..GLM })?;
    config.residual = Residual::Sandwich;
    config.names.branch_norms = Some(["post_self_attn_layernorm", "post_mlp_layernorm"]);
    Ok(config)
}

/// Reads an `ernie4_5` configuration.
pub fn ernie4_5(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let defaults = Defaults {
        model_type: "ernie4_5",
        sizes: [1024, 18, 16],
        kv_heads: Some(2),
        inner_width: 3072,
        vocab: 103_424,
        padding: Some(0),
        max_tokens: 131_072,
        theta: 5e5,
        eps: 1e-5,
        head_dim: Some(128),
        tied: true,
        ..LLAMA
    };
    let mut config = common(fields, &defaults)?;
    let bias = fields.flag("use_bias", false)?;
    (config.qkv_bias, config.output_bias, config.mlp_bias) = (bias, bias, bias);
    neighbours_turn(&mut config);
    Ok(config)
}

/// Reads a `helium` configuration.
pub fn helium(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let defaults = Defaults {
        model_type: "helium",
        sizes: [2560, 24, 20],
        kv_heads: Some(20),
        inner_width: 7040,
        vocab: 48_000,
        padding: Some(3),
        max_tokens: 4096,
        theta: 1e5,
        eps: 1e-8,
        head_dim: Some(128),
        ..LLAMA
    };
    let mut config = common(fields, &defaults)?;
    no_biases(fields)?;
    neighbours_turn(&mut config);
    Ok(config)
}
