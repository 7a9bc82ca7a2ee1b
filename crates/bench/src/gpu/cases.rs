//! The shapes that `bench gpu` trains; `benches/peers/gpu.py` has the same, and `benches/peers/moe.py` those with experts.

use ferrospeed_models::{Decoder, ModelError};
use serde_json::{Value, json};

use crate::measure::decoder;

/// What makes families cost different things.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Family {
    Gpt2,
    Llama,
    /// LLaMA's with biases on queries, keys and values.
    Qwen2,
    /// LLaMA's where a token sees the last 4,096 alone.
    Mistral,
    GptNeoX,
    /// LLaMA's with so many experts of the inner width, of which a token goes to so many.
    Mixtral {
        experts: u64,
        chosen: u64,
    },
}

const WINDOW: u64 = 4096;

/// A model's shape, and how it is trained unless the command says otherwise.
#[derive(Debug, Clone, Copy)]
pub(super) struct Case {
    pub(super) name: &'static str,
    family: Family,
    layers: u64,
    width: u64,
    heads: u64,
    kv_heads: u64,
    inner: u64,
    pub(super) vocabulary: u64,
    pub(super) batch: usize,
    pub(super) tokens: usize,
}

#[rustfmt::skip]
pub(super) const CASES: [Case; 13] = [
    Case { name: "124m", family: Family::Gpt2, layers: 12, width: 768, heads: 12, kv_heads: 12, inner: 3072, vocabulary: 50_304, batch: 32, tokens: 1024 },
    Case { name: "350m", family: Family::Gpt2, layers: 24, width: 1024, heads: 16, kv_heads: 16, inner: 4096, vocabulary: 50_304, batch: 16, tokens: 1024 },
    Case { name: "1.3b", family: Family::Gpt2, layers: 24, width: 2048, heads: 16, kv_heads: 16, inner: 8192, vocabulary: 50_304, batch: 8, tokens: 1024 },
    Case { name: "llama-350m", family: Family::Llama, layers: 24, width: 1024, heads: 16, kv_heads: 16, inner: 2752, vocabulary: 32_000, batch: 8, tokens: 2048 },
    Case { name: "llama-1.1b", family: Family::Llama, layers: 22, width: 2048, heads: 32, kv_heads: 4, inner: 5632, vocabulary: 32_000, batch: 4, tokens: 2048 },
    Case { name: "llama-3b", family: Family::Llama, layers: 28, width: 3072, heads: 24, kv_heads: 8, inner: 8192, vocabulary: 32_000, batch: 2, tokens: 2048 },
    Case { name: "llama-8b", family: Family::Llama, layers: 32, width: 4096, heads: 32, kv_heads: 8, inner: 14_336, vocabulary: 128_256, batch: 16, tokens: 2048 },
    Case { name: "llama-16b", family: Family::Llama, layers: 50, width: 5120, heads: 40, kv_heads: 40, inner: 13_824, vocabulary: 32_000, batch: 4, tokens: 2048 },
    Case { name: "qwen2-1.5b", family: Family::Qwen2, layers: 28, width: 1536, heads: 12, kv_heads: 2, inner: 8960, vocabulary: 32_000, batch: 4, tokens: 2048 },
    Case { name: "mistral-1.1b", family: Family::Mistral, layers: 22, width: 2048, heads: 32, kv_heads: 8, inner: 5632, vocabulary: 32_000, batch: 1, tokens: 8192 },
    Case { name: "neox-1.4b", family: Family::GptNeoX, layers: 24, width: 2048, heads: 16, kv_heads: 16, inner: 8192, vocabulary: 50_304, batch: 4, tokens: 2048 },
    Case { name: "mixtral-8x2", family: Family::Mixtral { experts: 8, chosen: 2 }, layers: 12, width: 1024, heads: 16, kv_heads: 16, inner: 2816, vocabulary: 32_000, batch: 4, tokens: 2048 },
    Case { name: "mixtral-64x8", family: Family::Mixtral { experts: 64, chosen: 8 }, layers: 12, width: 1024, heads: 16, kv_heads: 16, inner: 704, vocabulary: 32_000, batch: 4, tokens: 2048 },
];

impl Case {
    /// The case of a name, or what to say.
    pub(super) fn of_name(name: &str) -> Result<&'static Case, String> {
        CASES
            .iter()
            .find(|case| case.name == name)
            .ok_or_else(|| format!("--model {name}: there are {}", CASES.map(|case| case.name).join(", ")))
    }

    pub(super) fn decoder(&self, tokens: usize) -> Result<Decoder, ModelError> {
        decoder(&self.config(tokens))
    }

    /// Its Hugging Face `config.json`.
    fn config(&self, tokens: usize) -> Value {
        let Case { layers, width, heads, kv_heads, inner, vocabulary, .. } = *self;
        let mut config = match self.family {
            Family::Gpt2 => {
                return json!({
                    "model_type": "gpt2", "vocab_size": vocabulary, "n_embd": width, "n_layer": layers,
                    "n_head": heads, "n_positions": tokens, "activation_function": "gelu_new", "embd_pdrop": 0.0,
                    "attn_pdrop": 0.0, "resid_pdrop": 0.0,
                });
            }
            Family::GptNeoX => {
                return json!({
                    "model_type": "gpt_neox", "vocab_size": vocabulary, "hidden_size": width,
                    "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": inner,
                    "max_position_embeddings": tokens, "hidden_act": "gelu", "rotary_pct": 0.25,
                    "attention_dropout": 0.0, "hidden_dropout": 0.0, "tie_word_embeddings": false,
                });
            }
            Family::Llama | Family::Qwen2 | Family::Mistral | Family::Mixtral { .. } => json!({
                "vocab_size": vocabulary, "hidden_size": width, "intermediate_size": inner,
                "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
                "max_position_embeddings": tokens, "hidden_act": "silu", "rms_norm_eps": 1e-5,
                "rope_theta": 10000.0, "tie_word_embeddings": false,
            }),
        };
        match self.family {
            Family::Qwen2 => config["model_type"] = "qwen2".into(),
            Family::Mistral => {
                config["model_type"] = "mistral".into();
                config["sliding_window"] = WINDOW.into();
            }
            Family::Mixtral { experts, chosen } => {
                config["model_type"] = "mixtral".into();
                config["num_local_experts"] = experts.into();
                config["num_experts_per_tok"] = chosen.into();
            }
            _ => config["model_type"] = "llama".into(),
        }
        config
    }

    /// Multiplications and additions of a step: forward once, backward twice; masked scores do not count, nor does what is
    /// computed again.
    pub(super) fn step_flops(&self, batch: usize, tokens: usize) -> f64 {
        let of = |size: u64| size as f64;
        let head_width = of(self.width) / of(self.heads);
        let attention = of(self.width) * (2.0 * of(self.width) + 2.0 * of(self.kv_heads) * head_width);
        let products = match self.family {
            Family::Gpt2 | Family::GptNeoX => 2.0,
            Family::Mixtral { chosen, .. } => 3.0 * of(chosen),
            Family::Llama | Family::Qwen2 | Family::Mistral => 3.0,
        };
        let weights = of(self.layers) * (attention + products * of(self.width) * of(self.inner))
            + of(self.vocabulary) * of(self.width);
        let tokens_seen = match self.family {
            Family::Mistral if tokens as u64 > WINDOW => {
                let (all, window) = (tokens as f64, of(WINDOW));
                (window * (window + 1.0) / 2.0 + (all - window) * window) / all
            }
            _ => (tokens as f64 + 1.0) / 2.0,
        };
        let scores = of(self.layers) * 2.0 * of(self.width) * tokens_seen;
        6.0 * (batch * tokens) as f64 * (weights + scores)
    }
}
