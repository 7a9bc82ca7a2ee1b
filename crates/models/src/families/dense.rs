//! LLaMA's later dense relatives: Qwen3.

use crate::config::WindowRule;
use crate::decoder::DecoderConfig;
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
    config.windows = sliding(fields, config.layers, first, rule)?;
    config.names.qkv = normed(true);
    Ok(config)
}
