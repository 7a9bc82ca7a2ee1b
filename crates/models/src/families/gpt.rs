//! GPT-2's relatives: GPT-Neo, GPT-J and GPT-BigCode (StarCoder).

use ferrospeed_nn::{NormConfig, Rotary, RotaryScaling, Turning};
use ferrospeed_tensor::ops::WeightLayout;

use crate::config::WindowRule;
use crate::decoder::{
    Declared, DecoderConfig, Factors, FeedForward, HeadRules, Names, Positions, QkvNames, Residual,
    ScoreRules,
};
use crate::error::{ModelError, Result};
use crate::fields::Fields;

/// The sizes of a model with layer norms and plain feed-forward layers.
pub(super) struct Sizes {
    pub(super) width: usize,
    pub(super) layers: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) inner_width: usize,
    pub(super) vocab: usize,
    pub(super) max_tokens: usize,
}

impl Sizes {
    /// Channels of a head.
    pub(super) fn head_dim(&self, key: &str) -> Result<usize> {
        if self.heads == 0 || !self.width.is_multiple_of(self.heads) {
            let why = format!("{} channels cannot be cut into {} heads", self.width, self.heads);
            return Err(ModelError::config(key, why));
        }
        Ok(self.width / self.heads)
    }
}

/// Such a model with all biases, as GPT-2 names its parts.
pub(super) fn plain(
    model_type: &'static str,
    sizes: &Sizes,
    head_dim: usize,
    eps: f32,
    std: f32,
) -> DecoderConfig {
    let layers = sizes.layers;
    DecoderConfig {
        model_type,
        vocab: sizes.vocab,
        padding: None,
        width: sizes.width,
        embedding_width: sizes.width,
        inner_width: sizes.inner_width,
        layers,
        heads: sizes.heads,
        kv_heads: sizes.kv_heads,
        head_dim,
        max_tokens: sizes.max_tokens,
        positions: Positions::Learned { offset: 0, from_mask: false },
        norm: NormConfig::Layer { eps, affine: true },
        residual: Residual::PreNorm,
        feed_forward: FeedForward::Plain { names: ["mlp.c_fc", "mlp.c_proj"] },
        activation: ferrospeed_tensor::Activation::GeluTanh,
        layout: WeightLayout::OutIn,
        qkv_bias: true,
        output_bias: true,
        mlp_bias: true,
        scales: vec![1.0 / (head_dim as f32).sqrt(); layers],
        linear: None,
        turns: vec![Turning::Usually; layers],
        local_rotary: None,
        windows: vec![None; layers],
        scores: ScoreRules::default(),
        factors: Factors::default(),
        tied: true,
        head: HeadRules::default(),
        init_std: std,
        output_init_std: std,
        embedding_dropout: 0.0,
        attention_dropout: 0.0,
        residual_dropout: 0.0,
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
            qkv: QkvNames::Separate(["attn.q_proj", "attn.k_proj", "attn.v_proj"]),
            output: "attn.out_proj",
            final_norm: Some("transformer.ln_f"),
            head: "lm_head",
        },
    }
}

/// A head of summaries, which this model does not have.
const SUMMARY: [&str; 6] = [
    "summary_type",
    "summary_use_proj",
    "summary_activation",
    "summary_proj_to_labels",
    "summary_first_dropout",
    "classifier_dropout",
];

fn numbers(fields: &Fields<'_>) -> Result<[f32; 2]> {
    fields.harmless(&SUMMARY);
    Ok([fields.epsilon("layer_norm_epsilon", 1e-5)?, fields.number("initializer_range", Some(0.02))? as f32])
}

/// The sizes as GPT-2 says them.
fn sizes(fields: &Fields<'_>, defaults: [usize; 5]) -> Result<Sizes> {
    let [vocab, positions, width, layers, heads] = defaults;
    let width = fields.size("n_embd", Some(width))?;
    let heads = fields.size("n_head", Some(heads))?;
    Ok(Sizes {
        width,
        layers: fields.size("n_layer", Some(layers))?,
        heads,
        kv_heads: heads,
        inner_width: fields.optional_size("n_inner")?.unwrap_or(4 * width),
        vocab: fields.size("vocab_size", Some(vocab))?,
        max_tokens: fields.size("n_positions", Some(positions))?,
    })
}

/// Reads a `gpt_neo` configuration: scores are not scaled, some layers see a window, only the output of attention has a bias.
pub fn neo(fields: &Fields<'_>, rule: WindowRule) -> Result<DecoderConfig> {
    let width = fields.size("hidden_size", Some(2048))?;
    let heads = fields.size("num_heads", Some(16))?;
    let sizes = Sizes {
        width,
        layers: fields.size("num_layers", Some(24))?,
        heads,
        kv_heads: heads,
        inner_width: fields.optional_size("intermediate_size")?.unwrap_or(4 * width),
        vocab: fields.size("vocab_size", Some(50_257))?,
        max_tokens: fields.size("max_position_embeddings", Some(2048))?,
    };
    let [eps, std] = numbers(fields)?;
    let mut config = plain("gpt_neo", &sizes, sizes.head_dim("num_heads")?, eps, std);
    config.activation = fields.activation("activation_function", "gelu_new")?;
    config.scales = vec![1.0; sizes.layers];
    config.qkv_bias = false;
    config.names.qkv =
        QkvNames::Separate(["attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"]);
    config.names.output = "attn.attention.out_proj";
    config.embedding_dropout = fields.dropout("embed_dropout", 0.0)?;
    config.attention_dropout = fields.dropout("attention_dropout", 0.0)?;
    config.residual_dropout = fields.dropout("resid_dropout", 0.0)?;
    config.tied = fields.flag("tie_word_embeddings", true)?;
    // As releases that read `attention_types` write it again.
    fields.harmless(&["attention_layers"]);
    let window = fields.size("window_size", Some(256))? + usize::from(rule == WindowRule::OneMore);
    let slides = local_layers(fields)?;
    if slides.len() != sizes.layers {
        let why = format!("is of {} layers, the model has {}", slides.len(), sizes.layers);
        return Err(fields.error("attention_types", why));
    }
    // A window was the last so many tokens in every release.
    let window = if rule == WindowRule::OneMore { window - 1 } else { window };
    config.windows = slides.into_iter().map(|slides| slides.then_some(window)).collect();
    Ok(config)
}

/// Which layers see a window: runs of `[[kinds of layers], times]`.
fn local_layers(fields: &Fields<'_>) -> Result<Vec<bool>> {
    const KEY: &str = "attention_types";
    let usual = serde_json::json!([[["global", "local"], 12]]);
    let said = fields.get(KEY).unwrap_or(&usual);
    let refuse = || fields.error(KEY, format!("{said} is no list of [[\"global\" or \"local\", …], times]"));
    let mut layers = Vec::new();
    for run in said.as_array().ok_or_else(refuse)? {
        let (kinds, times) = (run[0].as_array().ok_or_else(refuse)?, run[1].as_u64().ok_or_else(refuse)?);
        let most = crate::limits::MAX_LAYERS;
        if times > most as u64 || kinds.is_empty() || kinds.len() > most {
            return Err(refuse());
        }
        for _ in 0..times {
            for kind in kinds {
                match kind.as_str() {
                    Some("global") => layers.push(false),
                    Some("local") => layers.push(true),
                    _ => return Err(refuse()),
                }
            }
            if layers.len() > crate::limits::MAX_LAYERS {
                return Err(refuse());
            }
        }
    }
    Ok(layers)
}

/// Reads a `gptj` configuration: attention and feed-forward side by side behind one norm, neighbouring channels turn, and the head
/// has a bias.
pub fn j(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let sizes = sizes(fields, [50_400, 2048, 4096, 28, 16])?;
    let head_dim = sizes.head_dim("n_head")?;
    let [eps, std] = numbers(fields)?;
    let mut config = plain("gptj", &sizes, head_dim, eps, std);
    fields.harmless(&["n_ctx", "rotary", "gradient_checkpointing"]);
    fields.fixed("scale_attn_weights", true.into())?;
    let dims = fields.size("rotary_dim", Some(64))?;
    if dims == 0 || dims > head_dim || !dims.is_multiple_of(2) {
        let why = format!("{dims} rotary channels of {head_dim} cannot be paired");
        return Err(fields.error("rotary_dim", why));
    }
    config.positions =
        Positions::Rotary(Rotary { dims, theta: 10_000.0, scaling: RotaryScaling::None, interleaved: true });
    config.residual = Residual::ParallelOneNorm;
    config.activation = fields.activation("activation_function", "gelu_new")?;
    (config.qkv_bias, config.output_bias) = (false, false);
    config.tied = fields.flag("tie_word_embeddings", false)?;
    config.head.bias = true;
    config.embedding_dropout = fields.dropout("embd_pdrop", 0.0)?;
    config.attention_dropout = fields.dropout("attn_pdrop", 0.0)?;
    config.residual_dropout = fields.dropout("resid_pdrop", 0.0)?;
    config.feed_forward = FeedForward::Plain { names: ["mlp.fc_in", "mlp.fc_out"] };
    config.names.positions = None;
    Ok(config)
}

/// Reads a `gpt_bigcode` configuration: GPT-2 whose heads share one key, or not.
pub fn bigcode(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let mut sizes = sizes(fields, [50_257, 1024, 768, 12, 12])?;
    let head_dim = sizes.head_dim("n_head")?;
    let [eps, std] = numbers(fields)?;
    let shares = fields.flag("multi_query", true)?;
    // How the scores are rounded and computed.
    fields.harmless(&["attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "inference_runner"]);
    fields.harmless(&[
        "pre_allocate_kv_cache",
        "max_batch_size",
        "validate_runner_input",
        "pad_key_length",
        "n_ctx",
    ]);
    fields.harmless(&["num_key_value_heads", "runner_max_sequence_length", "max_sequence_length"]);
    if shares {
        sizes.kv_heads = 1;
    }
    let mut config = plain("gpt_bigcode", &sizes, head_dim, eps, std);
    if !fields.flag("scale_attn_weights", true)? {
        config.scales = vec![1.0; sizes.layers];
    }
    config.activation = fields.activation("activation_function", "gelu_pytorch_tanh")?;
    config.embedding_dropout = fields.dropout("embd_pdrop", 0.1)?;
    config.attention_dropout = fields.dropout("attn_pdrop", 0.1)?;
    config.residual_dropout = fields.dropout("resid_pdrop", 0.1)?;
    config.tied = fields.flag("tie_word_embeddings", true)?;
    // Where each head has a key of its own, they lie head by head.
    config.names.qkv =
        if shares { QkvNames::Grouped("attn.c_attn") } else { QkvNames::ByKeyHead("attn.c_attn") };
    config.names.output = "attn.c_proj";
    Ok(config)
}
