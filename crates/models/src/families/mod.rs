//! One file per family or kind of family: its `config.json` and its tensor names.

pub mod bloom;
pub mod cohere;
pub mod deepseek;
pub mod dense;
pub mod falcon;
pub mod gemma;
pub mod glm;
pub mod gpt;
pub mod gpt2;
pub mod gpt_neox;
pub mod gpt_oss;
pub mod granite;
pub mod kin;
pub mod llama;
pub mod ministral;
pub mod mixture;
pub mod mpt;
pub mod olmo;
pub mod opt;
pub mod phi;
pub mod phi3;
pub mod qwen3_next;
pub mod sparse;

use std::borrow::Cow;

use serde_json::{Value, json};

use crate::config::WindowRule;
use crate::decoder::{DecoderConfig, Positions};
use crate::error::Result;
use crate::fields::Fields;

/// Reads the configuration of a decoder; `None` where its type is not known.
pub(crate) fn decoder(
    model_type: &str,
    fields: &Fields<'_>,
    rule: WindowRule,
) -> Result<Option<DecoderConfig>> {
    Ok(Some(match model_type {
        "bloom" => bloom::config(fields)?,
        "cohere" => cohere::cohere(fields)?,
        "cohere2" => cohere::cohere2(fields, rule)?,
        "cwm" => kin::cwm(fields, rule)?,
        "deepseek_v2" => deepseek::v2(fields)?,
        "deepseek_v3" => deepseek::v3(fields)?,
        "ernie4_5" => glm::ernie4_5(fields)?,
        "exaone4" => kin::exaone4(fields, rule)?,
        "falcon" => falcon::config(fields)?,
        "gemma" => gemma::gemma(fields)?,
        "gemma2" => gemma::gemma2(fields, rule)?,
        "gemma3_text" => gemma::gemma3_text(fields, rule)?,
        "glm" => glm::glm(fields)?,
        "glm4" => glm::glm4(fields)?,
        "glm4_moe" => deepseek::glm4_moe(fields)?,
        "gpt2" => gpt2::config(fields)?,
        "gpt_bigcode" => gpt::bigcode(fields)?,
        "gpt_neo" => gpt::neo(fields, rule)?,
        "gpt_neox" => gpt_neox::config(fields)?,
        "gpt_oss" => gpt_oss::config(fields, rule)?,
        "gptj" => gpt::j(fields)?,
        "granite" => granite::granite(fields)?,
        "helium" => glm::helium(fields)?,
        "internlm3" => kin::internlm3(fields)?,
        "llama" => llama::llama(fields)?,
        "ministral" => ministral::ministral(fields, rule)?,
        "ministral3" => ministral::ministral3(fields, rule)?,
        "mistral" => llama::mistral(fields, rule)?,
        "mixtral" => llama::mixtral(fields, rule)?,
        "mpt" => mpt::config(fields)?,
        "olmo" => olmo::olmo(fields)?,
        "olmo2" => dense::olmo2(fields)?,
        "olmo3" => olmo::olmo3(fields, rule)?,
        "olmoe" => sparse::olmoe(fields)?,
        "opt" => opt::config(fields)?,
        "phi" => phi::config(fields)?,
        "phi3" => phi3::config(fields, rule)?,
        "qwen2" => llama::qwen2(fields, rule)?,
        "qwen2_moe" => sparse::qwen2_moe(fields, rule)?,
        "qwen3" => dense::qwen3(fields, rule)?,
        "qwen3_5_moe_text" => qwen3_next::sparse(fields)?,
        "qwen3_5_text" => qwen3_next::dense(fields)?,
        "qwen3_next" => qwen3_next::next(fields, rule)?,
        "qwen3_moe" => sparse::qwen3_moe(fields, rule)?,
        "seed_oss" => kin::seed_oss(fields)?,
        "smollm3" => dense::smollm3(fields, rule)?,
        "stablelm" => kin::stablelm(fields)?,
        "starcoder2" => kin::starcoder2(fields, rule)?,
        _ => return Ok(None),
    }))
}

/// A configuration with what its family takes for granted of rotary positions, where that is more than a number.
pub(crate) fn with_usual_rotary(config: &Value) -> Cow<'_, Value> {
    let usual = match config["model_type"].as_str() {
        Some("ministral3") => json!({
            "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16_384,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        }),
        Some("gpt_oss") => json!({
            "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
            "original_max_position_embeddings": 4096,
        }),
        Some("cwm") => json!({
            "rope_type": "llama3", "rope_theta": 1_000_000.0, "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        }),
        _ => return Cow::Borrowed(config),
    };
    if !config["rope_parameters"].is_null() || !config["rope_scaling"].is_null() {
        return Cow::Borrowed(config);
    }
    let mut whole = config.clone();
    whole["rope_parameters"] = usual;
    Cow::Owned(whole)
}

/// Pairs of channels that turn are neighbours.
pub(crate) fn neighbours_turn(config: &mut DecoderConfig) {
    if let Positions::Rotary(rotary) = &mut config.positions {
        rotary.interleaved = true;
    }
}
