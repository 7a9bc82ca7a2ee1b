//! LLaMA's relatives whose every block is a mixture of experts: Qwen2-MoE, OLMoE and Qwen3-MoE. (Mixtral is in `llama.rs`.)

use crate::config::WindowRule;
use crate::decoder::{DecoderConfig, FeedForward};
use crate::error::Result;
use crate::families::llama::{Defaults, LLAMA, attention_bias, balancing, clip, common, normed, sliding};
use crate::families::mixture::{DeclaredMixture, ExpertKind, MixtureConfig, MixtureNames, RouterRules};
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
        kind: ExpertKind::Gated,
        router: RouterRules::default(),
        dense: Vec::new(),
    }))
}

/// Which layers have no mixture: those that `mlp_only_layers` lists, and all but every `decoder_sparse_step`-th.
pub(super) fn dense_layers(fields: &Fields<'_>, layers: usize) -> Result<Vec<bool>> {
    let step = fields.size("decoder_sparse_step", Some(1))?;
    if step == 0 {
        return Err(fields.error("decoder_sparse_step", "0 is no number of layers"));
    }
    let listed = if fields.has("mlp_only_layers") { fields.numbers("mlp_only_layers")? } else { Vec::new() };
    if listed.len() > layers {
        let why = format!("lists {} layers, the model has {layers}", listed.len());
        return Err(fields.error("mlp_only_layers", why));
    }
    if let Some(other) = listed.iter().find(|layer| layer.fract() != 0.0 || **layer < 0.0) {
        return Err(fields.error("mlp_only_layers", format!("{other} is no number of a layer")));
    }
    let dense: Vec<bool> =
        (0..layers).map(|layer| listed.contains(&(layer as f64)) || (layer + 1) % step != 0).collect();
    if !dense.contains(&false) {
        return Err(fields.error(
            "mlp_only_layers",
            "leaves no layer with experts; such a model is of the family without",
        ));
    }
    Ok(if dense.contains(&true) { dense } else { Vec::new() })
}

/// The same mixture in some layers.
fn but_in(dense: Vec<bool>, feed_forward: FeedForward) -> FeedForward {
    match feed_forward {
        FeedForward::Mixture(mixture) => FeedForward::Mixture(MixtureConfig { dense, ..mixture }),
        other => other,
    }
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
    let dense = dense_layers(fields, config.layers)?;
    config.qkv_bias = fields.flag("qkv_bias", true)?;
    let first = fields.size("max_window_layers", Some(28))?;
    config.windows = sliding(fields, config.layers, Some(4096), |layer| layer >= first, rule)?;
    let inner = fields.size("moe_intermediate_size", Some(1408))?;
    let shared = fields.size("shared_expert_intermediate_size", Some(5632))?;
    config.feed_forward = but_in(dense, mixture(fields, &usual, inner, Some(shared))?);
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
    config.scores.clip = clip(fields)?;
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
    let dense = dense_layers(fields, config.layers)?;
    attention_bias(fields, &mut config)?;
    fields.harmless(&["max_window_layers"]);
    config.windows = sliding(fields, config.layers, Some(4096), |_| true, rule)?;
    config.names.qkv = normed(true);
    let inner = fields.size("moe_intermediate_size", Some(768))?;
    config.feed_forward = but_in(dense, mixture(fields, &usual, inner, None)?);
    Ok(config)
}
