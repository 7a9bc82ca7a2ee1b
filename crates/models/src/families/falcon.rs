//! Falcon: one layer makes queries, keys and values, of one key head (7B) or by key head (40B, 180B, Falcon 2); attention and
//! feed-forward side by side behind one norm or two. Its models with ALiBi are refused.

use crate::decoder::{DecoderConfig, FeedForward, Positions, QkvNames, Residual};
use crate::error::Result;
use crate::families::gpt::{Sizes, plain};
use crate::fields::Fields;
use crate::rope::{self, RotaryDefaults};

/// Reads a `falcon` configuration.
pub fn config(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let width = match fields.optional_size("n_embed")? {
        Some(width) => width,
        None => fields.size("hidden_size", Some(4544))?,
    };
    let heads = fields.size("num_attention_heads", Some(71))?;
    let by_key_head = fields.flag("new_decoder_architecture", false)?;
    let shares = fields.flag("multi_query", true)?;
    let said = fields.optional_size("num_kv_heads")?.unwrap_or(heads);
    let sizes = Sizes {
        width,
        layers: fields.size("num_hidden_layers", Some(32))?,
        heads,
        kv_heads: match (by_key_head, shares) {
            (true, _) => said,
            (false, true) => 1,
            (false, false) => heads,
        },
        inner_width: fields.optional_size("ffn_hidden_size")?.unwrap_or(4 * width),
        vocab: fields.size("vocab_size", Some(65_024))?,
        max_tokens: fields.size("max_position_embeddings", Some(2048))?,
    };
    let head_dim = sizes.head_dim("num_attention_heads")?;
    let eps = fields.epsilon("layer_norm_epsilon", 1e-5)?;
    let std = fields.number("initializer_range", Some(0.02))? as f32;
    let mut config = plain("falcon", &sizes, head_dim, eps, std);
    // Its ALiBi is rounded to bfloat16 and scaled with the scores.
    fields.fixed("alibi", false.into())?;
    // Without ALiBi no weight of attention is dropped; the other is of the stream.
    fields.harmless(&["attention_dropout"]);
    fields.fixed("hidden_dropout", 0.0.into())?;
    fields.fixed("apply_residual_connection_post_layernorm", false.into())?;
    let rotary =
        RotaryDefaults { theta_key: "rope_theta", theta: 10_000.0, share: None, trained: None, own: &[] };
    config.positions = Positions::Rotary(rope::rotary(fields, head_dim, &rotary)?);
    config.activation = fields.activation("activation", "gelu")?;
    let bias = fields.flag("bias", false)?;
    (config.qkv_bias, config.output_bias, config.mlp_bias) = (bias, bias, bias);
    config.tied = fields.flag("tie_word_embeddings", true)?;
    let beside = fields.flag("parallel_attn", true)?;
    let norms = fields.optional_size("num_ln_in_parallel_attn")?;
    (config.residual, config.names.norm1, config.names.norm2) = match (by_key_head, beside, norms) {
        (true, true, None | Some(2)) => (Residual::Parallel, "ln_attn", "ln_mlp"),
        (_, true, None | Some(1)) => (Residual::ParallelOneNorm, "input_layernorm", ""),
        (false, false, None) => (Residual::PreNorm, "input_layernorm", "post_attention_layernorm"),
        (_, _, norms) => {
            let why = format!(
                "{norms:?} norms do not go with new_decoder_architecture {by_key_head} and parallel_attn {beside}"
            );
            return Err(fields.error("num_ln_in_parallel_attn", why));
        }
    };
    config.feed_forward = FeedForward::Plain { names: ["mlp.dense_h_to_4h", "mlp.dense_4h_to_h"] };
    config.names.embedding = "transformer.word_embeddings";
    config.names.positions = None;
    config.names.qkv = match (by_key_head, shares) {
        (false, true) => QkvNames::Grouped("self_attention.query_key_value"),
        (true, _) | (false, false) => QkvNames::ByKeyHead("self_attention.query_key_value"),
    };
    config.names.output = "self_attention.dense";
    Ok(config)
}
