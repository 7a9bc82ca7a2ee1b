//! LLaMA's relatives whose every block is a mixture of experts: Qwen2-MoE, OLMoE and Qwen3-MoE. (Mixtral is in `llama.rs`.)

use crate::config::WindowRule;
use crate::decoder::{DecoderConfig, FeedForward};
use crate::error::Result;
use crate::families::llama::{Defaults, LLAMA, attention_bias, balancing, common, normed, sliding};
use crate::families::mixture::{DeclaredMixture, MixtureConfig, MixtureNames};
use crate::fields::Fields;

/// What the mixtures differ in before anything is read.
struct Usual {
    experts: usize,
    chosen: usize,
    balance: f64,
    declared: DeclaredMixture,
}

fn mixture(
    fields: &Fields<'_>,
    usual: &Usual,
    inner_width: usize,
    shared_width: Option<usize>,
) -> Result<FeedForward> {
    // Releases name it differently.
    let experts = match fields.optional_size("num_experts")? {
        Some(experts) => experts,
        None => fields.size("num_local_experts", Some(usual.experts))?,
    };
    let chosen = fields.size("num_experts_per_tok", Some(usual.chosen))?;
    Ok(FeedForward::Mixture(MixtureConfig {
        experts,
        chosen,
        inner_width,
        normalized: fields.flag("norm_topk_prob", false)?,
        balance_loss: balancing(fields, experts, chosen, usual.balance)?,
        names: MixtureNames::projections(usual.declared),
        shared_width,
    }))
}

/// Every block is a mixture: releases of both families say so.
fn all_sparse(fields: &Fields<'_>) -> Result<()> {
    fields.fixed("decoder_sparse_step", 1.into())?;
    fields.fixed("mlp_only_layers", serde_json::json!([]))
}

/// Reads a `qwen2_moe` configuration: biases on queries, keys and values; an expert that every token passes.
pub fn qwen2_moe(fields: &Fields<'_>, rule: WindowRule) -> Result<DecoderConfig> {
    let defaults = Defaults {
        model_type: "qwen2_moe",
        sizes: [2048, 24, 16],
        kv_heads: Some(16),
        inner_width: 5632,
        vocab: 151_936,
        max_tokens: 32_768,
        ..LLAMA
    };
    let usual = Usual { experts: 60, chosen: 4, balance: 0.001, declared: DeclaredMixture::RouterFirst };
    let mut config = common(fields, &defaults)?;
    all_sparse(fields)?;
    config.qkv_bias = fields.flag("qkv_bias", true)?;
    let first = fields.size("max_window_layers", Some(28))?;
    config.windows = sliding(fields, config.layers, Some(4096), |layer| layer >= first, rule)?;
    let inner = fields.size("moe_intermediate_size", Some(1408))?;
    let shared = fields.size("shared_expert_intermediate_size", Some(5632))?;
    config.feed_forward = mixture(fields, &usual, inner, Some(shared))?;
    Ok(config)
}

/// Reads an `olmoe` configuration: queries and keys are normalised over all heads.
pub fn olmoe(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let defaults = Defaults {
        model_type: "olmoe",
        padding: Some(1),
        sizes: [2048, 16, 16],
        inner_width: 2048,
        vocab: 50_304,
        max_tokens: 4096,
        eps: 1e-5,
        ..LLAMA
    };
    let usual = Usual { experts: 64, chosen: 8, balance: 0.01, declared: DeclaredMixture::RouterFirst };
    let mut config = common(fields, &defaults)?;
    attention_bias(fields, &mut config)?;
    fields.fixed("clip_qkv", serde_json::Value::Null)?;
    config.names.qkv = normed(false);
    config.feed_forward = mixture(fields, &usual, config.inner_width, None)?;
    Ok(config)
}

/// Reads a `qwen3_moe` configuration: queries and keys are normalised head by head.
pub fn qwen3_moe(fields: &Fields<'_>, rule: WindowRule) -> Result<DecoderConfig> {
    let defaults = Defaults {
        model_type: "qwen3_moe",
        sizes: [2048, 24, 32],
        kv_heads: Some(4),
        inner_width: 6144,
        vocab: 151_936,
        max_tokens: 32_768,
        ..LLAMA
    };
    let usual = Usual { experts: 128, chosen: 8, balance: 0.001, declared: DeclaredMixture::RouterLast };
    let mut config = common(fields, &defaults)?;
    all_sparse(fields)?;
    attention_bias(fields, &mut config)?;
    fields.harmless(&["max_window_layers"]);
    config.windows = sliding(fields, config.layers, Some(4096), |_| true, rule)?;
    config.names.qkv = normed(true);
    let inner = fields.size("moe_intermediate_size", Some(768))?;
    config.feed_forward = mixture(fields, &usual, inner, None)?;
    Ok(config)
}
