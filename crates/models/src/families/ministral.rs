//! Mistral's younger relatives: Ministral, most of whose layers may slide, and Ministral 3, whose queries grow with their place.

use ferrospeed_nn::QueryGrowth;

use crate::config::WindowRule;
use crate::decoder::DecoderConfig;
use crate::error::Result;
use crate::families::llama::{Defaults, LLAMA, common, no_biases, windows};
use crate::fields::Fields;
use crate::rope;

/// Reads a `ministral` configuration.
pub fn ministral(fields: &Fields<'_>, rule: WindowRule) -> Result<DecoderConfig> {
    let defaults = Defaults {
        model_type: "ministral",
        kv_heads: Some(8),
        inner_width: 14_336,
        max_tokens: 131_072,
        ..LLAMA
    };
    let mut config = common(fields, &defaults)?;
    no_biases(fields)?;
    let window = fields.size_or_null("sliding_window", Some(4096))?;
    config.windows = windows(fields, config.layers, window, |_| true, rule)?;
    Ok(config)
}

/// Reads a `ministral3` configuration.
pub fn ministral3(fields: &Fields<'_>, rule: WindowRule) -> Result<DecoderConfig> {
    let defaults = Defaults {
        model_type: "ministral3",
        sizes: [4096, 34, 32],
        kv_heads: Some(8),
        inner_width: 14_336,
        vocab: 131_072,
        padding: Some(11),
        max_tokens: 262_144,
        eps: 1e-5,
        head_dim: Some(128),
        rotary_own: &[rope::QUERY_GROWTH, "max_position_embeddings"],
        ..LLAMA
    };
    let mut config = common(fields, &defaults)?;
    no_biases(fields)?;
    config.scores.growth = growth(fields)?;
    let window = fields.optional_size("sliding_window")?;
    config.windows = windows(fields, config.layers, window, |_| true, rule)?;
    Ok(config)
}

/// How queries grow, as it stands beside the rotary positions.
fn growth(fields: &Fields<'_>) -> Result<Option<QueryGrowth>> {
    let Some(said) = fields.object("rope_parameters")? else {
        let why = "is missing; this family's files say how they turn, and how queries grow, in it";
        return Err(fields.error("rope_parameters", why));
    };
    let Some(growth) = said.optional_number(rope::QUERY_GROWTH)? else { return Ok(None) };
    let trained = said.size("original_max_position_embeddings", None)?;
    match growth.is_finite() && growth >= 0.0 && trained > 0 {
        true => Ok(Some(QueryGrowth { growth, trained })),
        false => {
            let why = format!(
                "{growth} over {trained} tokens is no growth: a number from 0 over a length from 1 is"
            );
            Err(said.error(rope::QUERY_GROWTH, why))
        }
    }
}
