//! Gemma, Gemma 2 and Gemma 3 (text): scaled embeddings, norms whose weight is what the gain has beyond one, from 2 on norms on
//! both sides of each half, capped scores and logits, and windows in most layers, which from 3 on turn by tables of their own.

use ferrospeed_nn::{NormConfig, Turning};

use crate::config::WindowRule;
use crate::decoder::{DecoderConfig, EmbeddingFactor, Residual};
use crate::error::Result;
use crate::families::llama::{Defaults, LLAMA, all_but_every, attention_bias, common, normed};
use crate::fields::Fields;

const GEMMA: Defaults = Defaults {
    model_type: "gemma",
    sizes: [3072, 28, 16],
    kv_heads: Some(16),
    inner_width: 24_576,
    vocab: 256_000,
    padding: Some(0),
    max_tokens: 8192,
    norm: |eps| NormConfig::RmsBeyondOne { eps },
    activation: ("hidden_act", "gelu_pytorch_tanh"),
    head_dim: Some(256),
    tied: true,
    ..LLAMA
};

fn gemma_like(fields: &Fields<'_>, defaults: &Defaults) -> Result<DecoderConfig> {
    let mut config = common(fields, defaults)?;
    attention_bias(fields, &mut config)?;
    fields.fixed("use_bidirectional_attention", false.into())?;
    // How the reference implementation holds its cache.
    fields.harmless(&["cache_implementation"]);
    config.factors.embedding = EmbeddingFactor::Rounded((config.width as f32).sqrt());
    Ok(config)
}

/// Reads a `gemma` configuration.
pub fn gemma(fields: &Fields<'_>) -> Result<DecoderConfig> {
    // Its first files say "gelu" and mean the tanh form, as `hidden_activation` of later ones says, which nobody reads.
    fields.harmless(&["hidden_activation"]);
    let mut config = gemma_like(fields, &GEMMA)?;
    if fields.string("hidden_act", Some("gelu_pytorch_tanh"))? == "gelu" {
        config.activation = ferrospeed_tensor::Activation::GeluTanh;
    }
    Ok(config)
}

/// What Gemma 2 and 3 have in common.
fn later(fields: &Fields<'_>, defaults: &Defaults) -> Result<DecoderConfig> {
    // Only `hidden_activation` is read.
    fields.harmless(&["hidden_act"]);
    let mut config = gemma_like(fields, defaults)?;
    let scalar = fields.number("query_pre_attn_scalar", Some(256.0))?;
    if !(scalar.is_finite() && scalar > 0.0) {
        return Err(fields.error("query_pre_attn_scalar", format!("{scalar} is not a number above 0")));
    }
    config.scales = vec![scalar.powf(-0.5) as f32; config.layers];
    config.residual = Residual::Sandwich;
    config.names.norm2 = "pre_feedforward_layernorm";
    config.names.branch_norms = Some(["post_attention_layernorm", "post_feedforward_layernorm"]);
    Ok(config)
}

/// A soft cap: null says that there is none.
fn cap(fields: &Fields<'_>, key: &str, absent: Option<f64>) -> Result<Option<f32>> {
    let cap = if fields.is_said(key) { fields.optional_number(key)? } else { absent };
    match cap.filter(|cap| !(cap.is_finite() && *cap > 0.0)) {
        Some(cap) => Err(fields.error(key, format!("{cap} is no cap: a number above 0 is, or null"))),
        None => Ok(cap.map(|cap| cap as f32)),
    }
}

/// Reads a `gemma2` configuration.
pub fn gemma2(fields: &Fields<'_>, rule: WindowRule) -> Result<DecoderConfig> {
    let defaults = Defaults {
        model_type: "gemma2",
        sizes: [2304, 26, 8],
        kv_heads: Some(4),
        inner_width: 9216,
        activation: ("hidden_activation", "gelu_pytorch_tanh"),
        ..GEMMA
    };
    let mut config = later(fields, &defaults)?;
    config.scores.cap = cap(fields, "attn_logit_softcapping", Some(50.0))?;
    config.head.cap = cap(fields, "final_logit_softcapping", Some(30.0))?;
    let window = fields.size_or_null("sliding_window", Some(4096))?;
    config.windows = all_but_every(fields, config.layers, window, 2, rule)?;
    Ok(config)
}

/// Reads a `gemma3_text` configuration.
pub fn gemma3_text(fields: &Fields<'_>, rule: WindowRule) -> Result<DecoderConfig> {
    let defaults = Defaults {
        model_type: "gemma3_text",
        sizes: [2304, 26, 8],
        kv_heads: Some(4),
        inner_width: 9216,
        vocab: 262_208,
        max_tokens: 131_072,
        theta: 1e6,
        local_theta: Some(("rope_local_base_freq", 1e4)),
        activation: ("hidden_activation", "gelu_pytorch_tanh"),
        ..GEMMA
    };
    let mut config = later(fields, &defaults)?;
    config.scores.cap = cap(fields, "attn_logit_softcapping", None)?;
    config.head.cap = cap(fields, "final_logit_softcapping", None)?;
    let interval = match fields.optional_size("sliding_window_pattern")? {
        Some(interval) => interval,
        // As releases that read it write it again.
        None => fields.size("_sliding_window_pattern", Some(6))?,
    };
    let window = fields.size_or_null("sliding_window", Some(4096))?;
    config.windows = all_but_every(fields, config.layers, window, interval, rule)?;
    config.turns = turning_locally(&config);
    config.names.qkv = normed(true);
    Ok(config)
}

/// Layers that slide turn by tables of their own.
pub(super) fn turning_locally(config: &DecoderConfig) -> Vec<Turning> {
    let turning = |window: &Option<usize>| if window.is_some() { Turning::Locally } else { Turning::Usually };
    config.windows.iter().map(turning).collect()
}
