//! Models by name and a few numbers: what recipes call a preset.

use serde_json::{Value, json};

use crate::error::{ModelError, Result};

/// A family that needs no `config.json` to start from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Preset {
    /// GPT-2: learned positions, layer norm, GELU, tied head.
    Gpt2,
    /// LLaMA: rotary positions, RMS norm, SwiGLU, tied head.
    Llama,
}

/// The numbers of a preset; what is absent has its usual value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PresetSizes {
    /// Blocks; 4 when absent.
    pub layers: Option<u64>,
    /// Channels; 256 when absent.
    pub width: Option<u64>,
    /// Heads; one for each 64 channels when absent.
    pub heads: Option<u64>,
    /// Tokens.
    pub vocabulary: u64,
    /// The longest sequence.
    pub sequence: u64,
    /// Dropout everywhere the family has it.
    pub dropout: f64,
}

impl Preset {
    /// All of them.
    pub const ALL: [Preset; 2] = [Preset::Gpt2, Preset::Llama];

    /// The name in recipes and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Preset::Gpt2 => "gpt2",
            Preset::Llama => "llama",
        }
    }

    /// The preset of this name.
    pub fn of_name(name: &str) -> Result<Preset> {
        Preset::ALL
            .into_iter()
            .find(|preset| preset.name() == name)
            .ok_or_else(|| ModelError::config("preset", format!("'{name}' is not known; use gpt2 or llama")))
    }

    /// Its Hugging Face `config.json`. It says that no token begins or ends a text, which is so for bytes; whoever knows the
    /// tokenizer sets `bos_token_id` and `eos_token_id`.
    pub fn config(self, sizes: &PresetSizes) -> Value {
        let (layers, width) = (sizes.layers.unwrap_or(4), sizes.width.unwrap_or(256));
        let heads = sizes.heads.unwrap_or((width / 64).max(1));
        let PresetSizes { vocabulary, sequence, dropout, .. } = *sizes;
        match self {
            Preset::Gpt2 => json!({
                "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": vocabulary, "n_embd": width,
                "n_layer": layers, "n_head": heads, "n_positions": sequence, "activation_function": "gelu_new",
                "embd_pdrop": dropout, "attn_pdrop": dropout, "resid_pdrop": dropout, "layer_norm_epsilon": 1e-5,
                "initializer_range": 0.02, "bos_token_id": null, "eos_token_id": null,
            }),
            Preset::Llama => {
                // The usual width of a gated feed-forward: two thirds of four times, rounded up to 64.
                let inner = (width.saturating_mul(8) / 3).checked_next_multiple_of(64).unwrap_or(u64::MAX);
                json!({
                    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocabulary,
                    "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
                    "num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": sequence,
                    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "attention_dropout": dropout,
                    "tie_word_embeddings": true, "initializer_range": 0.02, "bos_token_id": null, "eos_token_id": null,
                })
            }
        }
    }
}
