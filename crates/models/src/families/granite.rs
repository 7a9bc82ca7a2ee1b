//! Granite: LLaMA with four factors, of embeddings, of each half of a block, of scores and of logits.

use crate::decoder::{DecoderConfig, EmbeddingFactor};
use crate::error::Result;
use crate::families::llama::{Defaults, LLAMA, attention_bias, common};
use crate::fields::Fields;

/// Reads a `granite` configuration.
pub fn granite(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let mut config = common(fields, &Defaults { model_type: "granite", ..LLAMA })?;
    attention_bias(fields, &mut config)?;
    config.mlp_bias = fields.flag("mlp_bias", false)?;
    factors(fields, &mut config)?;
    Ok(config)
}

/// What multiplies what.
fn factors(fields: &Fields<'_>, config: &mut DecoderConfig) -> Result<()> {
    let above_zero = |key: &str| {
        let factor = fields.number(key, Some(1.0))?;
        match factor.is_finite() && factor > 0.0 {
            true => Ok(factor as f32),
            false => Err(fields.error(key, format!("{factor} is not a number above 0"))),
        }
    };
    config.factors.embedding = EmbeddingFactor::Exact(above_zero("embedding_multiplier")?);
    config.factors.branch = above_zero("residual_multiplier")?;
    config.factors.logits = 1.0 / above_zero("logits_scaling")?;
    config.scales = vec![above_zero("attention_multiplier")?; config.layers];
    Ok(())
}
