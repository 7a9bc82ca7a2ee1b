//! GPT-2: learned positions, layer norm, weights stored `[in, out]`, tied head.

use ferrospeed_nn::{NormConfig, Turning};
use ferrospeed_tensor::ops::{PackedHeads, WeightLayout};

use crate::decoder::{
    Declared, DecoderConfig, Factors, FeedForward, HeadRules, Names, Positions, QkvNames, Residual,
    ScoreRules,
};
use crate::error::{ModelError, Result};
use crate::fields::Fields;

/// Reads a `gpt2` configuration.
pub fn config(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let width = fields.size("n_embd", Some(768))?;
    let heads = fields.size("n_head", Some(12))?;
    let layers = fields.size("n_layer", Some(12))?;
    if heads == 0 || !width.is_multiple_of(heads) {
        return Err(ModelError::config(
            "n_head",
            format!("{width} channels cannot be cut into {heads} heads"),
        ));
    }
    let head_dim = width / heads;
    let base = if fields.flag("scale_attn_weights", true)? { 1.0 / (head_dim as f32).sqrt() } else { 1.0 };
    let by_layer = fields.flag("scale_attn_by_inverse_layer_idx", false)?;
    let scales = (0..layers).map(|layer| if by_layer { base / (layer + 1) as f32 } else { base }).collect();
    let std = fields.number("initializer_range", Some(0.02))? as f32;
    // A head that this model does not have, a name that positions had, and how the scores are rounded.
    fields.harmless(&["summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"]);
    fields.harmless(&["summary_first_dropout", "n_ctx", "reorder_and_upcast_attn"]);
    Ok(DecoderConfig {
        model_type: "gpt2",
        vocab: fields.size("vocab_size", Some(50257))?,
        padding: None,
        width,
        embedding_width: width,
        inner_width: fields.optional_size("n_inner")?.unwrap_or(4 * width),
        layers,
        heads,
        kv_heads: heads,
        head_dim,
        max_tokens: fields.size("n_positions", Some(1024))?,
        positions: Positions::Learned { offset: 0, from_mask: false },
        norm: NormConfig::Layer { eps: fields.epsilon("layer_norm_epsilon", 1e-5)?, affine: true },
        residual: Residual::PreNorm,
        feed_forward: FeedForward::Plain { names: ["mlp.c_fc", "mlp.c_proj"] },
        activation: fields.activation("activation_function", "gelu_new")?,
        layout: WeightLayout::InOut,
        qkv_bias: true,
        output_bias: true,
        mlp_bias: true,
        scales,
        linear: None,
        turns: vec![Turning::Usually; layers],
        local_rotary: None,
        windows: vec![None; layers],
        scores: ScoreRules::default(),
        factors: Factors::default(),
        tied: fields.flag("tie_word_embeddings", true)?,
        head: HeadRules::default(),
        init_std: std,
        output_init_std: std / ((2 * layers.max(1)) as f32).sqrt(),
        embedding_dropout: fields.dropout("embd_pdrop", 0.1)?,
        attention_dropout: fields.dropout("attn_pdrop", 0.1)?,
        residual_dropout: fields.dropout("resid_pdrop", 0.1)?,
        names: Names {
            declared: Declared::AsComputed,
            prefix: "transformer.",
            embedding: "transformer.wte",
            embedding_norm: None,
            positions: Some("transformer.wpe"),
            projections: None,
            blocks: "transformer.h",
            norm1: "ln_1",
            norm2: "ln_2",
            branch_norms: None,
            qkv: QkvNames::Packed("attn.c_attn", PackedHeads::Thirds),
            output: "attn.c_proj",
            final_norm: Some("transformer.ln_f"),
            head: "lm_head",
        },
    })
}
