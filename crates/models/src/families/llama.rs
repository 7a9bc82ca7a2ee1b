//! LLaMA and its relatives Mistral, Qwen2 and Mixtral: rotary positions, RMS norm, gated feed-forward, grouped heads.

use ferrospeed_nn::{NormConfig, OutputGate, Turning};
use ferrospeed_tensor::ops::WeightLayout;

use crate::config::WindowRule;
use crate::decoder::{
    Declared, DecoderConfig, Factors, FeedForward, HeadRules, Names, Positions, QkvNames, Residual,
    ScoreRules,
};
use crate::error::{ModelError, Result};
use crate::families::mixture::{ExpertKind, MixtureConfig, MixtureNames, RouterRules};
use crate::fields::Fields;
use crate::rope::{self, RotaryDefaults};

/// What the relatives differ in before anything is read.
pub(super) struct Defaults {
    pub(super) model_type: &'static str,
    /// Channels, layers and heads.
    pub(super) sizes: [usize; 3],
    /// As many as heads when absent.
    pub(super) kv_heads: Option<usize>,
    pub(super) theta: f64,
    pub(super) inner_width: usize,
    pub(super) vocab: usize,
    /// The token that pads, where nothing is said.
    pub(super) padding: Option<usize>,
    pub(super) max_tokens: usize,
    pub(super) eps: f64,
    /// The field that says so.
    pub(super) eps_key: &'static str,
    /// The norm with that.
    pub(super) norm: fn(f32) -> NormConfig,
    /// The field with the activation, and its default.
    pub(super) activation: (&'static str, &'static str),
    /// Channels of a head; the share of one head when absent.
    pub(super) head_dim: Option<usize>,
    /// Whether the head is the embedding.
    pub(super) tied: bool,
    /// The share of a head's channels that turn, in families where it may be less than all.
    pub(super) rotary_share: Option<f64>,
    /// The field with the base of the frequencies of layers that slide, and its default, in families where they turn otherwise.
    pub(super) local_theta: Option<(&'static str, f64)>,
    /// What the family reads itself of what its rotary positions are described by.
    pub(super) rotary_own: &'static [&'static str],
    /// Standard deviation of new weights.
    pub(super) std: f64,
    /// The length the model was first trained on; the longest that it takes when absent.
    pub(super) trained: Option<usize>,
}

/// The first LLaMA's.
pub(super) const LLAMA: Defaults = Defaults {
    model_type: "llama",
    sizes: [4096, 32, 32],
    kv_heads: None,
    theta: 10_000.0,
    inner_width: 11_008,
    vocab: 32_000,
    padding: None,
    max_tokens: 2048,
    eps: 1e-6,
    eps_key: "rms_norm_eps",
    norm: |eps| NormConfig::Rms { eps },
    activation: ("hidden_act", "silu"),
    head_dim: None,
    tied: false,
    rotary_share: None,
    local_theta: None,
    rotary_own: &[],
    std: 0.02,
    trained: None,
};

pub(super) fn common(fields: &Fields<'_>, defaults: &Defaults) -> Result<DecoderConfig> {
    let [width, layers, heads] = defaults.sizes;
    let width = fields.size("hidden_size", Some(width))?;
    let heads = fields.size("num_attention_heads", Some(heads))?;
    let layers = fields.size("num_hidden_layers", Some(layers))?;
    let head_dim = match fields.optional_size("head_dim")?.or(defaults.head_dim) {
        Some(head_dim) => head_dim,
        None if heads > 0 && width.is_multiple_of(heads) => width / heads,
        None => {
            let why = format!("{width} channels cannot be cut into {heads} heads");
            return Err(ModelError::config("num_attention_heads", why));
        }
    };
    let std = fields.number("initializer_range", Some(defaults.std))? as f32;
    let kv_heads = fields.size_or_null("num_key_value_heads", defaults.kv_heads)?.unwrap_or(heads);
    let rotary = RotaryDefaults {
        theta_key: "rope_theta",
        theta: defaults.theta,
        share: defaults.rotary_share.map(|share| ("partial_rotary_factor", share)),
        trained: defaults.trained,
        own: defaults.rotary_own,
    };
    let (rotary, local_rotary) = match defaults.local_theta {
        Some((theta_key, theta)) => {
            let local = RotaryDefaults { theta_key, theta, ..rotary };
            let [all, local] = rope::rotary_by_type(fields, head_dim, &rotary, &local)?;
            (all, Some(local))
        }
        None => (rope::rotary(fields, head_dim, &rotary)?, None),
    };
    let vocab = fields.size("vocab_size", Some(defaults.vocab))?;
    Ok(DecoderConfig {
        model_type: defaults.model_type,
        vocab,
        padding: fields.padding_row(vocab, defaults.padding)?,
        width,
        embedding_width: width,
        inner_width: fields.size("intermediate_size", Some(defaults.inner_width))?,
        layers,
        heads,
        kv_heads,
        head_dim,
        max_tokens: fields.size("max_position_embeddings", Some(defaults.max_tokens))?,
        positions: Positions::Rotary(rotary),
        norm: (defaults.norm)(fields.epsilon(defaults.eps_key, defaults.eps)?),
        residual: Residual::PreNorm,
        feed_forward: FeedForward::Gated { names: ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"] },
        activation: fields.activation(defaults.activation.0, defaults.activation.1)?,
        layout: WeightLayout::OutIn,
        qkv_bias: false,
        output_bias: false,
        mlp_bias: false,
        scales: vec![1.0 / (head_dim as f32).sqrt(); layers],
        linear: None,
        turns: vec![Turning::Usually; layers],
        local_rotary,
        windows: vec![None; layers],
        scores: ScoreRules::default(),
        factors: Factors::default(),
        tied: fields.flag("tie_word_embeddings", defaults.tied)?,
        head: HeadRules::default(),
        init_std: std,
        output_init_std: std,
        embedding_dropout: 0.0,
        attention_dropout: fields.dropout("attention_dropout", 0.0)?,
        residual_dropout: 0.0,
        names: Names {
            declared: Declared::NormsLast,
            prefix: "model.",
            embedding: "model.embed_tokens",
            embedding_norm: None,
            positions: None,
            projections: None,
            blocks: "model.layers",
            norm1: "input_layernorm",
            norm2: "post_attention_layernorm",
            branch_norms: None,
            qkv: QkvNames::Separate(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
            output: "self_attn.o_proj",
            final_norm: Some("model.norm"),
            head: "lm_head",
        },
    })
}

/// Queries and keys with norms.
pub(super) fn normed(per_head: bool) -> QkvNames {
    QkvNames::Normed {
        heads: ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        norms: ["self_attn.q_norm", "self_attn.k_norm"],
        per_head,
        gate: OutputGate::None,
    }
}

/// The window of each layer: where `slides` says so, unless `layer_types` lists the layers one by one.
pub(super) fn windows(
    fields: &Fields<'_>,
    layers: usize,
    window: Option<usize>,
    slides: impl Fn(usize) -> bool,
    rule: WindowRule,
) -> Result<Vec<Option<usize>>> {
    let more = usize::from(rule == WindowRule::OneMore);
    let window = window.map(|window| window + more);
    let Some(types) = fields.optional_strings("layer_types")? else {
        return Ok((0..layers).map(|layer| window.filter(|_| slides(layer))).collect());
    };
    if types.len() != layers {
        let why = format!("lists {} layers, the model has {layers}", types.len());
        return Err(fields.error("layer_types", why));
    }
    let of_type = |name: &String| match name.as_str() {
        "full_attention" => Ok(None),
        "sliding_attention" if window.is_some() => Ok(window),
        "sliding_attention" => {
            Err(fields.error("layer_types", "a layer slides, but there is no sliding_window"))
        }
        other => {
            let why = format!("'{other}' is not supported; full_attention and sliding_attention are");
            Err(fields.error("layer_types", why))
        }
    };
    types.iter().map(of_type).collect()
}

/// The windows of a family most of whose layers slide: all but every `interval`-th, unless `layer_types` lists them.
pub(super) fn all_but_every(
    fields: &Fields<'_>,
    layers: usize,
    window: Option<usize>,
    interval: usize,
    rule: WindowRule,
) -> Result<Vec<Option<usize>>> {
    if interval == 0 {
        return Err(fields.error("sliding_window_pattern", "0 is no number of layers"));
    }
    windows(fields, layers, window, |layer| (layer + 1) % interval != 0, rule)
}

/// Windows where the configuration turns them on, in the layers that `slides` says; of `usual` tokens where it gives no number.
pub(super) fn sliding(
    fields: &Fields<'_>,
    layers: usize,
    usual: Option<usize>,
    slides: impl Fn(usize) -> bool,
    rule: WindowRule,
) -> Result<Vec<Option<usize>>> {
    let window = match fields.flag("use_sliding_window", false)? {
        true => fields.size_or_null("sliding_window", usual)?,
        false => {
            fields.harmless(&["sliding_window"]);
            None
        }
    };
    windows(fields, layers, window, slides, rule)
}

/// Reads a `llama` configuration.
pub fn llama(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let mut config = common(fields, &LLAMA)?;
    attention_bias(fields, &mut config)?;
    config.mlp_bias = fields.flag("mlp_bias", false)?;
    if !fields.flag("use_sliding_window", true)? {
        fields.harmless(&["sliding_window", "max_window_layers"]);
    }
    config.windows = windows(fields, config.layers, None, |_| false, WindowRule::default())?;
    Ok(config)
}

/// Reads a `mistral` configuration.
pub fn mistral(fields: &Fields<'_>, rule: WindowRule) -> Result<DecoderConfig> {
    let defaults = Defaults {
        model_type: "mistral",
        kv_heads: Some(8),
        inner_width: 14_336,
        max_tokens: 131_072,
        ..LLAMA
    };
    let mut config = common(fields, &defaults)?;
    no_biases(fields)?;
    let window = fields.size_or_null("sliding_window", Some(4096))?;
    config.windows = windows(fields, config.layers, window, |_| true, rule)?;
    Ok(config)
}

/// Reads a `qwen2` configuration: biases on queries, keys and values; windows in the upper layers only.
pub fn qwen2(fields: &Fields<'_>, rule: WindowRule) -> Result<DecoderConfig> {
    let defaults = Defaults {
        model_type: "qwen2",
        kv_heads: Some(32),
        inner_width: 22_016,
        vocab: 151_936,
        max_tokens: 32_768,
        ..LLAMA
    };
    let mut config = common(fields, &defaults)?;
    // The family has its biases whatever this says.
    fields.harmless(&["attention_bias"]);
    fields.fixed("mlp_bias", false.into())?;
    fields.fixed("use_mrope", false.into())?;
    config.qkv_bias = true;
    let window = fields.size_or_null("sliding_window", Some(4096))?;
    let window = if fields.flag("use_sliding_window", false)? { window } else { None };
    let first = fields.size("max_window_layers", Some(28))?;
    config.windows = windows(fields, config.layers, window, |layer| layer >= first, rule)?;
    Ok(config)
}

/// Reads a `mixtral` configuration.
pub fn mixtral(fields: &Fields<'_>, rule: WindowRule) -> Result<DecoderConfig> {
    let defaults = Defaults {
        model_type: "mixtral",
        kv_heads: Some(8),
        theta: 1e6,
        inner_width: 14_336,
        max_tokens: 131_072,
        eps: 1e-5,
        ..LLAMA
    };
    let mut config = common(fields, &defaults)?;
    no_biases(fields)?;
    fields.fixed("router_jitter_noise", 0.0.into())?;
    let window = fields.optional_size("sliding_window")?;
    config.windows = windows(fields, config.layers, window, |_| true, rule)?;
    let (experts, chosen) =
        (fields.size("num_local_experts", Some(8))?, fields.size("num_experts_per_tok", Some(2))?);
    let balance_loss = balancing(fields, experts, chosen, 0.001)?;
    config.feed_forward = FeedForward::Mixture(MixtureConfig {
        experts,
        chosen,
        inner_width: config.inner_width,
        normalized: true,
        balance_loss,
        names: MixtureNames::MIXTRAL,
        shared_width: None,
        kind: ExpertKind::Gated,
        router: RouterRules::default(),
        dense: Vec::new(),
    });
    Ok(config)
}

/// The weight of a mixture's balancing loss; an error where so many experts cannot be chosen.
pub(super) fn balancing(fields: &Fields<'_>, experts: usize, chosen: usize, weight: f64) -> Result<f32> {
    if chosen == 0 || chosen > experts {
        let why = format!("{chosen} of {experts} experts cannot be chosen");
        return Err(ModelError::config("num_experts_per_tok", why));
    }
    let weight = fields.number("router_aux_loss_coef", Some(weight))? as f32;
    Ok(if fields.flag("output_router_logits", false)? { weight } else { 0.0 })
}

/// Biases on all four projections of attention, or on none.
pub(super) fn attention_bias(fields: &Fields<'_>, config: &mut DecoderConfig) -> Result<()> {
    let bias = fields.flag("attention_bias", false)?;
    (config.qkv_bias, config.output_bias) = (bias, bias);
    Ok(())
}

/// What queries, keys and values stay within.
pub(super) fn clip(fields: &Fields<'_>) -> Result<Option<f32>> {
    let limit = fields.optional_number("clip_qkv")?;
    match limit.filter(|limit| !(limit.is_finite() && *limit > 0.0)) {
        Some(limit) => Err(fields.error("clip_qkv", format!("{limit} is no bound: a number above 0 is"))),
        None => Ok(limit.map(|limit| limit as f32)),
    }
}

/// Families whose layers have none.
pub(super) fn no_biases(fields: &Fields<'_>) -> Result<()> {
    fields.fixed("attention_bias", false.into())?;
    fields.fixed("mlp_bias", false.into())
}
