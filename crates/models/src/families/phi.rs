//! Phi-1, 1.5 and 2: attention and feed-forward side by side behind one norm, a share of each head's channels turns, biases
//! everywhere, the head included.

use ferrospeed_nn::NormConfig;

use crate::decoder::{DecoderConfig, FeedForward, Residual};
use crate::error::Result;
use crate::families::llama::{Defaults, LLAMA, common};
use crate::fields::Fields;

/// Reads a `phi` configuration.
pub fn config(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let defaults = Defaults {
        model_type: "phi",
        sizes: [2048, 24, 32],
        inner_width: 8192,
        vocab: 51_200,
        eps: 1e-5,
        eps_key: "layer_norm_eps",
        norm: |eps| NormConfig::Layer { eps, affine: true },
        activation: ("hidden_act", "gelu_new"),
        rotary_share: Some(0.5),
        ..LLAMA
    };
    let mut config = common(fields, &defaults)?;
    fields.fixed("qk_layernorm", false.into())?;
    // How its first program ran.
    fields.harmless(&["flash_attn", "flash_rotary", "fused_dense"]);
    config.residual = Residual::ParallelOneNorm;
    config.feed_forward = FeedForward::Plain { names: ["mlp.fc1", "mlp.fc2"] };
    (config.qkv_bias, config.output_bias, config.mlp_bias) = (true, true, true);
    config.head.bias = true;
    config.embedding_dropout = fields.dropout("embd_pdrop", 0.0)?;
    config.residual_dropout = fields.dropout("resid_pdrop", 0.0)?;
    config.names.output = "self_attn.dense";
    config.names.final_norm = Some("model.final_layernorm");
    Ok(config)
}
