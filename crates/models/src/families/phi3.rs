//! Phi-3 and Phi-4: LLaMA with one layer for queries, keys and values and one for gate and up, and LongRoPE.

use ferrospeed_nn::RotaryScaling;

use crate::config::WindowRule;
use crate::decoder::{Declared, DecoderConfig, FeedForward, Positions, QkvNames};
use crate::error::Result;
use crate::families::llama::{Defaults, LLAMA, common, windows};
use crate::fields::Fields;

/// Reads a `phi3` configuration.
pub fn config(fields: &Fields<'_>, rule: WindowRule) -> Result<DecoderConfig> {
    let defaults = Defaults {
        model_type: "phi3",
        padding: Some(32_000),
        sizes: [3072, 32, 32],
        inner_width: 8192,
        vocab: 32_064,
        max_tokens: 4096,
        eps: 1e-5,
        rotary_share: Some(1.0),
        trained: Some(4096),
        ..LLAMA
    };
    let mut config = common(fields, &defaults)?;
    if let Positions::Rotary(rotary) = &config.positions
        && !matches!(rotary.scaling, RotaryScaling::None | RotaryScaling::LongRope { .. })
    {
        let key = if fields.has("rope_parameters") { "rope_parameters" } else { "rope_scaling" };
        return Err(fields.error(key, "this family has no other scaling than longrope"));
    }
    for key in ["attention_bias", "mlp_bias", "lm_head_bias"] {
        fields.fixed(key, false.into())?;
    }
    fields.fixed("full_attn_mod", 1.into())?;
    fields.fixed("interpolate_factor", 1.into())?;
    // No release reads the dropout of embeddings; the length counts where LongRoPE does.
    fields.harmless(&["embd_pdrop", "original_max_position_embeddings"]);
    config.residual_dropout = fields.dropout("resid_pdrop", 0.0)?;
    let window = fields.optional_size("sliding_window")?;
    config.windows = windows(fields, config.layers, window, |_| true, rule)?;
    config.names.declared = Declared::OutputFirst;
    config.names.qkv = QkvNames::Grouped("self_attn.qkv_proj");
    config.feed_forward = FeedForward::GatedPacked { names: ["mlp.gate_up_proj", "mlp.down_proj"] };
    Ok(config)
}
