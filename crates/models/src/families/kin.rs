//! LLaMA's relatives of one thought each: StableLM, StarCoder 2, Seed-OSS, EXAONE 4, InternLM 3 and CWM.

use ferrospeed_nn::{NormConfig, Turning};

use crate::config::WindowRule;
use crate::decoder::{DecoderConfig, FeedForward, Residual};
use crate::error::Result;
use crate::families::llama::{Defaults, LLAMA, attention_bias, common, normed, windows};
use crate::fields::Fields;

/// Reads a `stablelm` configuration: layer norms, a share of each head's channels turns.
pub fn stablelm(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let defaults = Defaults {
        model_type: "stablelm",
        sizes: [2560, 32, 32],
        kv_heads: Some(32),
        inner_width: 6912,
        vocab: 50_304,
        max_tokens: 4096,
        eps: 1e-5,
        eps_key: "layer_norm_eps",
        norm: |eps| NormConfig::Layer { eps, affine: true },
        rotary_share: Some(0.25),
        ..LLAMA
    };
    let mut config = common(fields, &defaults)?;
    config.qkv_bias = fields.flag("use_qkv_bias", false)?;
    // StableLM 2 12B has a layer norm for each head.
    fields.fixed("qk_layernorm", false.into())?;
    fields.fixed("hidden_dropout", 0.0.into())?;
    if fields.flag("use_parallel_residual", false)? {
        config.residual = Residual::ParallelOneNorm;
    }
    Ok(config)
}

/// Reads a `starcoder2` configuration: layer norms, biases, and a feed-forward layer without a gate.
pub fn starcoder2(fields: &Fields<'_>, rule: WindowRule) -> Result<DecoderConfig> {
    let defaults = Defaults {
        model_type: "starcoder2",
        sizes: [3072, 30, 24],
        kv_heads: Some(2),
        inner_width: 12_288,
        vocab: 49_152,
        max_tokens: 4096,
        eps: 1e-5,
        eps_key: "norm_epsilon",
        norm: |eps| NormConfig::Layer { eps, affine: true },
        activation: ("hidden_act", "gelu_pytorch_tanh"),
        std: 0.018_042,
        tied: true,
        ..LLAMA
    };
    let mut config = common(fields, &defaults)?;
    let bias = fields.flag("use_bias", true)?;
    (config.qkv_bias, config.output_bias, config.mlp_bias) = (bias, bias, bias);
    config.feed_forward = FeedForward::Plain { names: ["mlp.c_fc", "mlp.c_proj"] };
    config.embedding_dropout = fields.dropout("embedding_dropout", 0.0)?;
    config.residual_dropout = fields.dropout("residual_dropout", 0.0)?;
    fields.fixed("mlp_type", "default".into())?;
    fields.fixed("norm_type", "layer_norm".into())?;
    let window = fields.optional_size("sliding_window")?;
    config.windows = windows(fields, config.layers, window, |_| true, rule)?;
    Ok(config)
}

/// Reads a `seed_oss` configuration: biases on queries, keys and values.
pub fn seed_oss(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let defaults = Defaults {
        model_type: "seed_oss",
        sizes: [4096, 64, 80],
        kv_heads: Some(8),
        inner_width: 27_648,
        vocab: 155_136,
        padding: Some(1),
        max_tokens: 524_288,
        head_dim: Some(128),
        ..LLAMA
    };
    let mut config = common(fields, &defaults)?;
    config.qkv_bias = fields.flag("attention_bias", true)?;
    config.output_bias = fields.flag("attention_out_bias", false)?;
    config.mlp_bias = fields.flag("mlp_bias", false)?;
    config.attention_dropout = fields.dropout("attention_dropout", 0.1)?;
    config.residual_dropout = fields.dropout("residual_dropout", 0.1)?;
    Ok(config)
}

/// Reads an `exaone4` configuration: norms behind both halves, on queries and keys too; where most layers slide, only those turn.
pub fn exaone4(fields: &Fields<'_>, rule: WindowRule) -> Result<DecoderConfig> {
    let defaults = Defaults {
        model_type: "exaone4",
        kv_heads: Some(32),
        inner_width: 16_384,
        vocab: 102_400,
        eps: 1e-5,
        ..LLAMA
    };
    let mut config = common(fields, &defaults)?;
    config.residual = Residual::BranchNorm;
    config.names.qkv = normed(true);
    config.names.norm1 = "post_attention_layernorm";
    config.names.norm2 = "post_feedforward_layernorm";
    let window = fields.size_or_null("sliding_window", Some(4096))?;
    let full = match fields.get("sliding_window_pattern") {
        // Letters by layer, `L` for those that slide.
        Some(value) if value.is_string() => {
            let pattern = fields.string("sliding_window_pattern", None)?;
            let letters: Vec<char> = pattern.chars().collect();
            if letters.is_empty() || letters.iter().any(|letter| !['L', 'G'].contains(letter)) {
                return Err(
                    fields.error("sliding_window_pattern", format!("'{pattern}' is no row of L and G"))
                );
            }
            (0..config.layers).map(|layer| letters[layer % letters.len()] == 'G').collect::<Vec<bool>>()
        }
        _ => {
            let interval = fields.size("sliding_window_pattern", Some(4))?;
            (0..config.layers).map(|layer| interval == 0 || (layer + 1) % interval == 0).collect()
        }
    };
    config.windows = windows(fields, config.layers, window, |layer| !full[layer], rule)?;
    if window.is_some() {
        let turning =
            |window: &Option<usize>| if window.is_some() { Turning::Usually } else { Turning::Never };
        config.turns = config.windows.iter().map(turning).collect();
    }
    Ok(config)
}

/// Reads an `internlm3` configuration.
pub fn internlm3(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let defaults = Defaults {
        model_type: "internlm3",
        sizes: [4096, 48, 32],
        kv_heads: Some(2),
        inner_width: 10_240,
        vocab: 128_512,
        padding: Some(2),
        max_tokens: 32_768,
        eps: 1e-5,
        head_dim: Some(128),
        ..LLAMA
    };
    let mut config = common(fields, &defaults)?;
    attention_bias(fields, &mut config)?;
    config.mlp_bias = fields.flag("mlp_bias", false)?;
    // What its own program called both biases.
    for key in ["qkv_bias", "bias"] {
        if fields.flag(key, config.mlp_bias)? != config.mlp_bias {
            return Err(
                fields.error(key, "differs from attention_bias and mlp_bias, which are one in this family")
            );
        }
    }
    Ok(config)
}

/// Reads a `cwm` configuration: all layers but every fourth, from the first on, slide.
pub fn cwm(fields: &Fields<'_>, rule: WindowRule) -> Result<DecoderConfig> {
    let defaults = Defaults {
        model_type: "cwm",
        sizes: [6144, 64, 48],
        kv_heads: Some(8),
        inner_width: 21_504,
        vocab: 128_256,
        max_tokens: 131_072,
        theta: 1e6,
        eps: 1e-5,
        head_dim: Some(128),
        ..LLAMA
    };
    let mut config = common(fields, &defaults)?;
    fields.fixed("mlp_bias", false.into())?;
    let window = fields.size_or_null("sliding_window", Some(8192))?;
    config.windows = windows(fields, config.layers, window, |layer| layer % 4 != 0, rule)?;
    Ok(config)
}
