//! OPT: learned positions counted by the mask with two rows in front, ReLU, optional projections around the blocks.

use ferrospeed_nn::{NormConfig, Turning};
use ferrospeed_tensor::ops::WeightLayout;

use crate::decoder::{
    Declared, DecoderConfig, Factors, FeedForward, HeadRules, Names, Positions, QkvNames, Residual,
    ScoreRules,
};
use crate::error::{ModelError, Result};
use crate::fields::Fields;

/// Reads an `opt` configuration.
pub fn config(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let width = fields.size("hidden_size", Some(768))?;
    let heads = fields.size("num_attention_heads", Some(12))?;
    let layers = fields.size("num_hidden_layers", Some(12))?;
    if heads == 0 || !width.is_multiple_of(heads) {
        let why = format!("{width} channels cannot be cut into {heads} heads");
        return Err(ModelError::config("num_attention_heads", why));
    }
    let embedding_width = fields.size("word_embed_proj_dim", Some(width))?;
    let bias = fields.flag("enable_bias", true)?;
    let norm_first = fields.flag("do_layer_norm_before", true)?;
    let without_final_norm = fields.flag("_remove_final_layer_norm", false)?;
    let final_norm = norm_first && !without_final_norm;
    let std = fields.number("init_std", Some(0.02))? as f32;
    let dropout = fields.dropout("dropout", 0.1)?;
    fields.fixed("layerdrop", 0.0.into())?;
    fields.harmless(&["activation_dropout"]);
    let vocab = fields.size("vocab_size", Some(50272))?;
    Ok(DecoderConfig {
        model_type: "opt",
        vocab,
        padding: fields.padding_row(vocab, Some(1))?,
        width,
        embedding_width,
        inner_width: fields.size("ffn_dim", Some(3072))?,
        layers,
        heads,
        kv_heads: heads,
        head_dim: width / heads,
        max_tokens: fields.size("max_position_embeddings", Some(2048))?,
        positions: Positions::Learned { offset: 2, from_mask: true },
        norm: NormConfig::Layer { eps: 1e-5, affine: fields.flag("layer_norm_elementwise_affine", true)? },
        residual: if norm_first { Residual::PreNorm } else { Residual::PostNorm },
        feed_forward: FeedForward::Plain { names: ["fc1", "fc2"] },
        activation: fields.activation("activation_function", "relu")?,
        layout: WeightLayout::OutIn,
        qkv_bias: bias,
        output_bias: bias,
        mlp_bias: bias,
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
        residual_dropout: dropout,
        names: Names {
            declared: Declared::NormsBehind,
            prefix: "model.",
            embedding: "model.decoder.embed_tokens",
            embedding_norm: None,
            positions: Some("model.decoder.embed_positions"),
            projections: (embedding_width != width)
                .then_some(["model.decoder.project_in", "model.decoder.project_out"]),
            blocks: "model.decoder.layers",
            norm1: "self_attn_layer_norm",
            norm2: "final_layer_norm",
            branch_norms: None,
            qkv: QkvNames::Separate(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
            output: "self_attn.out_proj",
            final_norm: final_norm.then_some("model.decoder.final_layer_norm"),
            head: "lm_head",
        },
    })
}
