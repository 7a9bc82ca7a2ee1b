//! gpt-oss: sinks beside the scores, windows in every other layer, and experts with biases whose gates stay within bounds.

use crate::config::WindowRule;
use crate::decoder::{DecoderConfig, FeedForward};
use crate::error::Result;
use crate::families::llama::{Defaults, LLAMA, all_but_every, balancing, common};
use crate::families::mixture::{DeclaredMixture, ExpertKind, MixtureConfig, MixtureNames, RouterRules};
use crate::fields::Fields;

/// Reads a `gpt_oss` configuration.
pub fn config(fields: &Fields<'_>, rule: WindowRule) -> Result<DecoderConfig> {
    let defaults = Defaults {
        model_type: "gpt_oss",
        sizes: [2880, 36, 64],
        kv_heads: Some(8),
        inner_width: 2880,
        vocab: 201_088,
        max_tokens: 131_072,
        theta: 150_000.0,
        eps: 1e-5,
        head_dim: Some(64),
        ..LLAMA
    };
    let mut config = common(fields, &defaults)?;
    let bias = fields.flag("attention_bias", true)?;
    (config.qkv_bias, config.output_bias) = (bias, bias);
    config.scores.sinks = Some("self_attn.sinks");
    // Said a second time, beside what its rotary positions are described by; and what two programs of its own read.
    fields.harmless(&["initial_context_length", "experts_per_token", "swiglu_limit"]);
    fields.fixed("swiglu_alpha", 1.702.into())?;
    // Which of its weights the files hold in MXFP4 shows in their names.
    if let Some(packed) = fields.object("quantization_config")? {
        packed.fixed("quant_method", "mxfp4".into())?;
        packed.harmless(&["modules_to_not_convert", "dequantize"]);
        packed.finish()?;
    }
    let window = fields.size_or_null("sliding_window", Some(128))?;
    config.windows = all_but_every(fields, config.layers, window, 2, rule)?;
    let experts = match fields.optional_size("num_local_experts")? {
        Some(experts) => experts,
        None => fields.size("num_experts", Some(128))?,
    };
    let chosen = fields.size("num_experts_per_tok", Some(4))?;
    let limit = fields.number("swiglu_limit", Some(7.0))?;
    if !(limit.is_finite() && limit > 0.0) {
        return Err(fields.error("swiglu_limit", format!("{limit} is no bound: a number above 0 is")));
    }
    config.feed_forward = FeedForward::Mixture(MixtureConfig {
        experts,
        chosen,
        inner_width: config.inner_width,
        normalized: true,
        balance_loss: balancing(fields, experts, chosen, 0.001)?,
        names: MixtureNames { router: "router", ..MixtureNames::projections(DeclaredMixture::RouterFirst) },
        shared_width: None,
        kind: ExpertKind::Clamped { limit: limit as f32 },
        router: RouterRules::default(),
        dense: Vec::new(),
    });
    Ok(config)
}
