//! GPT-NeoX: rotary on a share of the channels, attention and feed-forward side by side, packed heads.

use ferrospeed_nn::{NormConfig, Turning};
use ferrospeed_tensor::ops::{PackedHeads, WeightLayout};

use crate::decoder::{
    Declared, DecoderConfig, Factors, FeedForward, HeadRules, Names, Positions, QkvNames, Residual,
    ScoreRules,
};
use crate::error::{ModelError, Result};
use crate::fields::Fields;
use crate::rope::{self, RotaryDefaults};

/// Reads a `gpt_neox` configuration.
pub fn config(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let width = fields.size("hidden_size", Some(6144))?;
    let heads = fields.size("num_attention_heads", Some(64))?;
    let layers = fields.size("num_hidden_layers", Some(44))?;
    if heads == 0 || !width.is_multiple_of(heads) {
        let why = format!("{width} channels cannot be cut into {heads} heads");
        return Err(ModelError::config("num_attention_heads", why));
    }
    let head_dim = width / heads;
    let rotary = RotaryDefaults {
        theta_key: "rotary_emb_base",
        theta: 10_000.0,
        share: Some(("rotary_pct", 0.25)),
        trained: None,
        own: &[],
    };
    let bias = fields.flag("attention_bias", true)?;
    fields.harmless(&["classifier_dropout"]);
    // Early files call the dropouts so, and have none.
    fields.fixed("attention_probs_dropout_prob", 0.0.into())?;
    fields.fixed("hidden_dropout_prob", 0.0.into())?;
    let std = fields.number("initializer_range", Some(0.02))? as f32;
    let hidden_dropout = fields.dropout("hidden_dropout", 0.0)?;
    Ok(DecoderConfig {
        model_type: "gpt_neox",
        vocab: fields.size("vocab_size", Some(50432))?,
        padding: None,
        width,
        embedding_width: width,
        inner_width: fields.size("intermediate_size", Some(24576))?,
        layers,
        heads,
        kv_heads: heads,
        head_dim,
        max_tokens: fields.size("max_position_embeddings", Some(2048))?,
        positions: Positions::Rotary(rope::rotary(fields, head_dim, &rotary)?),
        norm: NormConfig::Layer { eps: fields.epsilon("layer_norm_eps", 1e-5)?, affine: true },
        residual: if fields.flag("use_parallel_residual", true)? {
            Residual::Parallel
        } else {
            Residual::PreNorm
        },
        feed_forward: FeedForward::Plain { names: ["mlp.dense_h_to_4h", "mlp.dense_4h_to_h"] },
        activation: fields.activation("hidden_act", "gelu")?,
        layout: WeightLayout::OutIn,
        qkv_bias: bias,
        output_bias: bias,
        mlp_bias: true,
        scales: vec![1.0 / (head_dim as f32).sqrt(); layers],
        linear: None,
        turns: vec![Turning::Usually; layers],
        local_rotary: None,
        windows: vec![None; layers],
        scores: ScoreRules::default(),
        factors: Factors::default(),
        tied: fields.flag("tie_word_embeddings", false)?,
        head: HeadRules::default(),
        init_std: std,
        output_init_std: std,
        embedding_dropout: hidden_dropout,
        attention_dropout: fields.dropout("attention_dropout", 0.0)?,
        residual_dropout: hidden_dropout,
        names: Names {
            declared: Declared::NormsFirst,
            prefix: "gpt_neox.",
            embedding: "gpt_neox.embed_in",
            embedding_norm: None,
            positions: None,
            projections: None,
            blocks: "gpt_neox.layers",
            norm1: "input_layernorm",
            norm2: "post_attention_layernorm",
            branch_norms: None,
            qkv: QkvNames::Packed("attention.query_key_value", PackedHeads::PerHead),
            output: "attention.dense",
            final_norm: Some("gpt_neox.final_layer_norm"),
            head: "embed_out",
        },
    })
}
