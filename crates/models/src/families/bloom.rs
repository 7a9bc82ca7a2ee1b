//! BLOOM: ALiBi positions, a norm after the embedding, packed heads, tied head.

use ferrospeed_nn::{NormConfig, Turning};
use ferrospeed_tensor::Activation;
use ferrospeed_tensor::ops::{PackedHeads, WeightLayout};

use crate::decoder::{
    Declared, DecoderConfig, Factors, FeedForward, HeadRules, Names, Positions, QkvNames, Residual,
    ScoreRules,
};
use crate::error::{ModelError, Result};
use crate::fields::Fields;

/// Reads a `bloom` configuration.
pub fn config(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let width = fields.size_either("hidden_size", "n_embed")?;
    let heads = fields.size_either("n_head", "num_attention_heads")?;
    let layers = fields.size_either("n_layer", "num_hidden_layers")?;
    if heads == 0 || !width.is_multiple_of(heads) {
        return Err(ModelError::config(
            "n_head",
            format!("{width} channels cannot be cut into {heads} heads"),
        ));
    }
    let std = fields.number("initializer_range", Some(0.02))? as f32;
    fields.fixed("n_inner", (4 * width).into())?;
    // Switches of the program it was trained with, and of how sums are rounded.
    fields.harmless(&["attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion"]);
    fields.harmless(&["offset_alibi", "skip_bias_add", "skip_bias_add_qkv", "slow_but_exact"]);
    let norm_residual = fields.flag("apply_residual_connection_post_layernorm", false)?;
    Ok(DecoderConfig {
        model_type: "bloom",
        vocab: fields.size("vocab_size", Some(250_880))?,
        padding: None,
        width,
        embedding_width: width,
        inner_width: 4 * width,
        layers,
        heads,
        kv_heads: heads,
        head_dim: width / heads,
        max_tokens: fields.size("seq_length", Some(2048))?,
        positions: Positions::Alibi,
        norm: NormConfig::Layer { eps: fields.epsilon("layer_norm_epsilon", 1e-5)?, affine: true },
        residual: if norm_residual { Residual::PreNormResidual } else { Residual::PreNorm },
        feed_forward: FeedForward::Plain { names: ["mlp.dense_h_to_4h", "mlp.dense_4h_to_h"] },
        // BLOOM's own formula is the tanh form.
        activation: Activation::GeluTanh,
        layout: WeightLayout::OutIn,
        qkv_bias: true,
        output_bias: true,
        mlp_bias: true,
        scales: vec![1.0 / ((width / heads) as f32).sqrt(); layers],
        linear: None,
        turns: vec![Turning::Usually; layers],
        local_rotary: None,
        windows: vec![None; layers],
        scores: ScoreRules::default(),
        factors: Factors::default(),
        tied: fields.flag("tie_word_embeddings", true)?,
        head: HeadRules::default(),
        init_std: std,
        output_init_std: std,
        embedding_dropout: 0.0,
        attention_dropout: fields.dropout("attention_dropout", 0.0)?,
        residual_dropout: fields.dropout("hidden_dropout", 0.0)?,
        names: Names {
            declared: Declared::AsComputed,
            prefix: "transformer.",
            embedding: "transformer.word_embeddings",
            embedding_norm: Some("transformer.word_embeddings_layernorm"),
            positions: None,
            projections: None,
            blocks: "transformer.h",
            norm1: "input_layernorm",
            norm2: "post_attention_layernorm",
            branch_norms: None,
            qkv: QkvNames::Packed("self_attention.query_key_value", PackedHeads::PerHead),
            output: "self_attention.dense",
            final_norm: Some("transformer.ln_f"),
            head: "lm_head",
        },
    })
}
