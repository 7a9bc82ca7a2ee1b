//! Qwen3-Next and Qwen3.5 (text): three of four layers are gated DeltaNet, the fourth is attention with a gate before its output;
//! norms whose weight is what the gain has beyond one, and in most models a mixture with a shared expert.

use ferrospeed_nn::{DeltaNetConfig, DeltaNetInputs, NormConfig, OutputGate};

use crate::config::WindowRule;
use crate::decoder::{DecoderConfig, FeedForward, LinearLayers, QkvNames};
use crate::error::Result;
use crate::families::llama::{Defaults, LLAMA, attention_bias, balancing, common, normed};
use crate::families::mixture::{DeclaredMixture, ExpertKind, MixtureConfig, MixtureNames, RouterRules};
use crate::families::sparse::dense_layers;
use crate::fields::Fields;

const NEXT: Defaults = Defaults {
    model_type: "qwen3_next",
    sizes: [2048, 48, 16],
    kv_heads: Some(2),
    inner_width: 5632,
    vocab: 151_936,
    max_tokens: 32_768,
    norm: |eps| NormConfig::RmsBeyondOne { eps },
    head_dim: Some(256),
    rotary_share: Some(0.25),
    // Where images stand; of text all three axes are one.
    rotary_own: &["mrope_section", "mrope_interleaved"],
    ..LLAMA
};

/// What all of them have.
fn gated(
    fields: &Fields<'_>,
    defaults: &Defaults,
    inputs: DeltaNetInputs,
    eps: f64,
) -> Result<DecoderConfig> {
    let mut config = common(fields, defaults)?;
    attention_bias(fields, &mut config)?;
    let QkvNames::Normed { heads, norms, per_head, .. } = normed(true) else { return Ok(config) };
    config.names.qkv = QkvNames::Normed { heads, norms, per_head, gate: OutputGate::BesideQueries };
    let size = |key: &str, usual| fields.size(key, Some(usual));
    let linear = DeltaNetConfig {
        width: config.width,
        key_heads: size("linear_num_key_heads", 16)?,
        value_heads: size("linear_num_value_heads", 32)?,
        key_dim: size("linear_key_head_dim", 128)?,
        value_dim: size("linear_value_head_dim", 128)?,
        kernel: size("linear_conv_kernel_dim", 4)?,
        inputs,
        eps: fields.epsilon("rms_norm_eps", eps)?,
        std: config.init_std,
    };
    let sizes = [linear.key_heads, linear.value_heads, linear.key_dim, linear.value_dim];
    if sizes.contains(&0) || linear.kernel < 2 || !linear.value_heads.is_multiple_of(linear.key_heads) {
        let why = format!(
            "{} value heads of {} key heads cannot be shared, or a size is 0",
            linear.value_heads, linear.key_heads
        );
        return Err(fields.error("linear_num_value_heads", why));
    }
    // Another activation would be that of the convolution too.
    fields.fixed("hidden_act", "silu".into())?;
    fields.fixed("attn_output_gate", true.into())?;
    // Published files say so although no layer slides.
    fields.fixed("use_sliding_window", false.into())?;
    fields.harmless(&["max_window_layers"]);
    // Numbers are f32 wherever the memory is.
    fields.harmless(&["mamba_ssm_dtype"]);
    // Modules that predict tokens beyond the next one.
    fields.harmless(&["mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"]);
    let layers = linear_layers(fields, config.layers)?;
    config.linear =
        layers.contains(&true).then_some(LinearLayers { layers, name: "linear_attn", config: linear });
    Ok(config)
}

/// Which layers are in linear time: all but every so many-th, unless `layer_types` lists them.
fn linear_layers(fields: &Fields<'_>, layers: usize) -> Result<Vec<bool>> {
    let interval = fields.size("full_attention_interval", Some(4))?;
    let Some(types) = fields.optional_strings("layer_types")? else {
        return match interval {
            0 => Err(fields.error("full_attention_interval", "0 is no number of layers")),
            interval => Ok((1..=layers).map(|layer| layer % interval != 0).collect()),
        };
    };
    if types.len() != layers {
        let why = format!("lists {} layers, the model has {layers}", types.len());
        return Err(fields.error("layer_types", why));
    }
    let of_type = |name: &String| match name.as_str() {
        "linear_attention" => Ok(true),
        "full_attention" => Ok(false),
        other => {
            let why = format!("'{other}' is not supported; full_attention and linear_attention are");
            Err(fields.error("layer_types", why))
        }
    };
    types.iter().map(of_type).collect()
}

/// A mixture with a shared expert that is weighed.
fn mixture(
    fields: &Fields<'_>,
    usual: [usize; 3],
    dense: Vec<bool>,
    normalized: bool,
) -> Result<FeedForward> {
    let [experts, chosen, inner_width] = usual;
    let experts = match fields.optional_size("num_experts")? {
        Some(experts) => experts,
        None => fields.size("num_local_experts", Some(experts))?,
    };
    let chosen = fields.size("num_experts_per_tok", Some(chosen))?;
    Ok(FeedForward::Mixture(MixtureConfig {
        experts,
        chosen,
        inner_width: fields.size("moe_intermediate_size", Some(inner_width))?,
        normalized,
        balance_loss: balancing(fields, experts, chosen, 0.001)?,
        names: MixtureNames::projections(DeclaredMixture::RouterFirst),
        shared_width: Some(fields.size("shared_expert_intermediate_size", Some(512))?),
        kind: ExpertKind::Gated,
        router: RouterRules::default(),
        dense,
    }))
}

/// Reads a `qwen3_next` configuration.
pub fn next(fields: &Fields<'_>, _: WindowRule) -> Result<DecoderConfig> {
    let mut config = gated(fields, &NEXT, DeltaNetInputs::ByKeyHead, 1e-6)?;
    let dense = dense_layers(fields, config.layers)?;
    let normalized = fields.flag("norm_topk_prob", true)?;
    config.feed_forward = mixture(fields, [512, 10, 512], dense, normalized)?;
    Ok(config)
}

/// Reads a `qwen3_5_text` configuration.
pub fn dense(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let defaults = Defaults {
        model_type: "qwen3_5_text",
        sizes: [4096, 32, 16],
        kv_heads: Some(4),
        inner_width: 12_288,
        vocab: 248_320,
        ..NEXT
    };
    gated(fields, &defaults, DeltaNetInputs::Apart, 1e-6)
}

/// Reads a `qwen3_5_moe_text` configuration.
pub fn sparse(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let defaults = Defaults {
        model_type: "qwen3_5_moe_text",
        sizes: [2048, 40, 16],
        inner_width: 5632,
        vocab: 248_320,
        ..NEXT
    };
    let mut config = gated(fields, &defaults, DeltaNetInputs::Apart, 1e-6)?;
    // This family's files say no width of layers without a mixture, as none has.
    config.feed_forward = mixture(fields, [256, 8, 512], Vec::new(), true)?;
    Ok(config)
}
