//! MPT: ALiBi positions, norms without bias, no bias elsewhere, one layer for queries, keys and values, tied head.

use ferrospeed_nn::NormConfig;
use ferrospeed_tensor::Activation;
use ferrospeed_tensor::ops::PackedHeads;

use crate::decoder::{DecoderConfig, FeedForward, Positions, QkvNames};
use crate::error::Result;
use crate::families::gpt::{Sizes, plain};
use crate::families::llama::clip;
use crate::fields::Fields;

/// Reads an `mpt` configuration.
pub fn config(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let width = fields.size("d_model", Some(2048))?;
    let heads = fields.size("n_heads", Some(16))?;
    if !heads.is_power_of_two() {
        // Where heads are no power of two, its slopes are in another order than others'.
        return Err(fields.error("n_heads", format!("{heads} heads are not supported; a power of two is")));
    }
    fields.fixed("expansion_ratio", 4.into())?;
    let sizes = Sizes {
        width,
        layers: fields.size("n_layers", Some(24))?,
        heads,
        kv_heads: heads,
        inner_width: 4 * width,
        vocab: fields.size("vocab_size", Some(50_368))?,
        max_tokens: fields.size("max_seq_len", Some(2048))?,
    };
    let head_dim = sizes.head_dim("n_heads")?;
    let eps = fields.epsilon("layer_norm_epsilon", 1e-5)?;
    let std = fields.number("initializer_range", Some(0.02))? as f32;
    let mut config = plain("mpt", &sizes, head_dim, eps, std);
    config.norm = NormConfig::LayerWithoutBias { eps };
    config.positions = Positions::Alibi;
    config.activation = Activation::GeluErf;
    (config.qkv_bias, config.output_bias, config.mlp_bias) = (false, false, false);
    config.tied = fields.flag("tie_word_embeddings", true)?;
    config.feed_forward = FeedForward::Plain { names: ["ffn.up_proj", "ffn.down_proj"] };
    config.names.blocks = "transformer.blocks";
    config.names.norm1 = "norm_1";
    config.names.norm2 = "norm_2";
    config.names.positions = None;
    config.names.qkv = QkvNames::Packed("attn.Wqkv", PackedHeads::Thirds);
    config.names.output = "attn.out_proj";
    config.names.final_norm = Some("transformer.norm_f");
    fields.fixed("no_bias", true.into())?;
    fields.fixed("embedding_fraction", 1.0.into())?;
    fields.fixed("logit_scale", serde_json::Value::Null)?;
    // The reference implementation reads neither: it has one norm, ALiBi whatever is said of positions, and one dropout.
    fields.harmless(&["norm_type", "learned_pos_emb", "init_device", "init_config", "verbose"]);
    fields.harmless(&["emb_pdrop", "resid_pdrop", "tokenizer_name"]);
    if let Some(attention) = fields.object("attn_config")? {
        for key in ["qk_ln", "prefix_lm", "is_encoder_decoder"] {
            attention.fixed(key, false.into())?;
        }
        attention.fixed("attn_type", "multihead_attention".into())?;
        attention.fixed("alibi_bias_max", 8.into())?;
        attention.fixed("alibi", true.into())?;
        attention.harmless(&["attn_impl", "attn_uses_sequence_id", "model_type"]);
        let share = attention.dropout("attn_pdrop", 0.0)?;
        (config.attention_dropout, config.residual_dropout) = (share, share);
        config.scores.clip = clip(&attention)?;
        if let Some(scale) = attention.optional_number("softmax_scale")? {
            config.scales = vec![scale as f32; sizes.layers];
        }
        attention.harmless(crate::fields::HARMLESS);
        attention.finish()?;
    }
    Ok(config)
}
