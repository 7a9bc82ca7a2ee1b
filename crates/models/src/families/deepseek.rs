//! DeepSeek-V2 and V3 (R1, Kimi K2), whose attention goes by latents, and GLM-4.5, which has V3's mixture: experts that a token
//! chooses by groups, one that all tokens pass, and a few first layers without a mixture.

use ferrospeed_nn::moe::{ExpertGroups, GroupScore, RouterScores};
use ferrospeed_nn::{LatentHeads, RotaryScaling};

use crate::decoder::{DecoderConfig, FeedForward, LatentRanks, Positions, QkvNames};
use crate::error::Result;
use crate::families::llama::{Defaults, LLAMA, attention_bias, common, normed};
use crate::families::mixture::{ExpertKind, MixtureConfig, MixtureNames, RouterRules};
use crate::families::neighbours_turn;
use crate::fields::Fields;
use crate::rope::{self, RotaryDefaults};

/// What the families take for granted.
struct Usual {
    experts: usize,
    chosen: usize,
    inner_width: usize,
    shared: usize,
    first_dense: usize,
    factor: f64,
}

/// A mixture behind the first layers.
fn mixture(
    fields: &Fields<'_>,
    layers: usize,
    usual: &Usual,
    router: RouterRules,
    normalized: bool,
) -> Result<FeedForward> {
    let experts = match fields.optional_size("n_routed_experts")? {
        Some(experts) => experts,
        None => fields.size("num_local_experts", Some(usual.experts))?,
    };
    let chosen = fields.size_or_null("num_experts_per_tok", Some(usual.chosen))?.unwrap_or(usual.chosen);
    if chosen == 0 || chosen > experts {
        let why = format!("{chosen} of {experts} experts cannot be chosen");
        return Err(fields.error("num_experts_per_tok", why));
    }
    let inner_width = fields.size("moe_intermediate_size", Some(usual.inner_width))?;
    let shared = fields.size("n_shared_experts", Some(usual.shared))?;
    let first = fields.size("first_k_dense_replace", Some(usual.first_dense))?.min(layers);
    let factor = fields.number("routed_scaling_factor", Some(usual.factor))?;
    fields.fixed("moe_layer_freq", 1.into())?;
    fields.fixed("output_router_logits", false.into())?;
    fields.fixed("ep_size", 1.into())?;
    // Losses that the reference implementation does not take.
    fields.harmless(&["aux_loss_alpha", "seq_aux", "router_aux_loss_coef"]);
    // Blocks that predict tokens beyond the next one.
    fields.harmless(&["num_nextn_predict_layers", "num_mtp_layers"]);
    Ok(FeedForward::Mixture(MixtureConfig {
        experts,
        chosen,
        inner_width,
        normalized,
        balance_loss: 0.0,
        names: MixtureNames::DEEPSEEK,
        shared_width: (shared > 0).then_some(shared * inner_width),
        kind: ExpertKind::Gated,
        router: RouterRules { factor: factor as f32, ..router },
        dense: (0..layers).map(|layer| layer < first).collect(),
    }))
}

/// Groups of experts, where there are some to choose among.
fn groups(fields: &Fields<'_>, usual: [Option<usize>; 2], by: GroupScore) -> Result<Option<ExpertGroups>> {
    let groups = fields.size_or_null("n_group", usual[0])?;
    let chosen = fields.size_or_null("topk_group", usual[1])?;
    Ok(match (groups, chosen) {
        (Some(groups), Some(chosen)) if groups > 1 => Some(ExpertGroups { groups, chosen, by }),
        _ => None,
    })
}

/// V3's router.
fn by_sigmoid(groups: Option<ExpertGroups>) -> RouterRules {
    RouterRules {
        scores: RouterScores::Sigmoid,
        groups,
        choice_bias: Some("e_score_correction_bias"),
        ..RouterRules::default()
    }
}

/// Latent attention.
fn latent(fields: &Fields<'_>, config: &mut DecoderConfig, attention_bias: bool) -> Result<()> {
    let heads = LatentHeads {
        still: fields.size("qk_nope_head_dim", Some(128))?,
        turning: fields.size("qk_rope_head_dim", Some(64))?,
        value: fields.size("v_head_dim", Some(128))?,
    };
    let key_value = fields.size("kv_lora_rank", Some(512))?;
    let query = fields.size_or_null("q_lora_rank", Some(1536))?;
    let sizes = [key_value, heads.turning, heads.value, query.unwrap_or(1)];
    if sizes.contains(&0) || heads.value > heads.width() {
        let why = format!(
            "{heads:?} of latents of {key_value} and {query:?} make no heads; values are at most as wide as keys"
        );
        return Err(fields.error("v_head_dim", why));
    }
    fields.harmless(&["qk_head_dim"]);
    let rotary =
        RotaryDefaults { theta_key: "rope_theta", theta: 10_000.0, share: None, trained: None, own: &[] };
    let rotary = rope::rotary(fields, heads.turning, &rotary)?;
    // What YaRN multiplies scores by beside its amplitude.
    let mut scale = (heads.width() as f64).powf(-0.5);
    if let RotaryScaling::Yarn { factor, .. } = rotary.scaling {
        let said = fields.object("rope_parameters")?.or(fields.object("rope_scaling")?);
        let all = said.map_or(Ok(None), |said| said.optional_number("mscale_all_dim"))?.unwrap_or(0.0);
        let grown = if factor <= 1.0 || all == 0.0 { 1.0 } else { 0.1 * all * factor.ln() + 1.0 };
        scale *= grown * grown;
    }
    config.positions = Positions::Rotary(rotary);
    config.head_dim = heads.width();
    // All heads have keys and values of their own, whatever is said.
    config.kv_heads = config.heads;
    config.scales = vec![scale as f32; config.layers];
    config.output_bias = attention_bias;
    config.names.qkv = QkvNames::Latent(LatentRanks { query, key_value, heads, bias: attention_bias });
    Ok(())
}

/// What V2 and V3 read alike; heads are the latent's.
fn latent_like(fields: &Fields<'_>, defaults: &Defaults) -> Result<DecoderConfig> {
    let mut config = common(fields, &Defaults { rotary_share: Some(1.0), ..*defaults })?;
    let bias = fields.flag("attention_bias", false)?;
    latent(fields, &mut config, bias)?;
    Ok(config)
}

/// Reads a `deepseek_v2` configuration.
pub fn v2(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let defaults = Defaults { model_type: "deepseek_v2", vocab: 102_400, head_dim: Some(64), ..LLAMA };
    let mut config = latent_like(fields, &defaults)?;
    neighbours_turn(&mut config);
    config.mlp_bias = false;
    fields.fixed("mlp_bias", false.into())?;
    // The reference implementation does not read it.
    fields.fixed("norm_topk_prob", false.into())?;
    fields.fixed("scoring_func", "softmax".into())?;
    let method = fields.string("topk_method", Some("greedy"))?;
    let groups = match method.as_str() {
        "greedy" => {
            fields.harmless(&["n_group", "topk_group"]);
            None
        }
        "group_limited_greedy" => groups(fields, [None, None], GroupScore::Best)?,
        _ => {
            return Err(fields.error(
                "topk_method",
                format!("'{method}' is not known; greedy and group_limited_greedy are"),
            ));
        }
    };
    let usual = Usual { experts: 64, chosen: 6, inner_width: 1407, shared: 2, first_dense: 0, factor: 1.0 };
    let router = RouterRules { groups, ..RouterRules::default() };
    config.feed_forward = mixture(fields, config.layers, &usual, router, false)?;
    Ok(config)
}

/// Reads a `deepseek_v3` configuration.
pub fn v3(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let defaults = Defaults {
        model_type: "deepseek_v3",
        sizes: [7168, 61, 128],
        kv_heads: Some(128),
        inner_width: 18_432,
        vocab: 129_280,
        max_tokens: 4096,
        head_dim: Some(64),
        ..LLAMA
    };
    let mut config = latent_like(fields, &defaults)?;
    if fields.flag("rope_interleave", true)? {
        neighbours_turn(&mut config);
    }
    fields.fixed("scoring_func", "sigmoid".into())?;
    fields.fixed("topk_method", "noaux_tc".into())?;
    let normalized = fields.flag("norm_topk_prob", true)?;
    let groups = groups(fields, [Some(8), Some(4)], GroupScore::BestTwo)?;
    let usual = Usual { experts: 256, chosen: 8, inner_width: 2048, shared: 1, first_dense: 3, factor: 2.5 };
    config.feed_forward = mixture(fields, config.layers, &usual, by_sigmoid(groups), normalized)?;
    Ok(config)
}

/// Reads a `glm4_moe` configuration (GLM-4.5 and later).
pub fn glm4_moe(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let defaults = Defaults {
        model_type: "glm4_moe",
        sizes: [4096, 46, 96],
        kv_heads: Some(8),
        inner_width: 10_944,
        vocab: 151_552,
        max_tokens: 131_072,
        eps: 1e-5,
        rotary_share: Some(0.5),
        ..LLAMA
    };
    let mut config = common(fields, &defaults)?;
    attention_bias(fields, &mut config)?;
    config.output_bias = false;
    if fields.flag("use_qk_norm", false)? {
        config.names.qkv = normed(true);
    }
    let normalized = fields.flag("norm_topk_prob", true)?;
    let groups = groups(fields, [Some(1), Some(1)], GroupScore::BestTwo)?;
    let usual = Usual { experts: 128, chosen: 8, inner_width: 1408, shared: 1, first_dense: 1, factor: 1.0 };
    config.feed_forward = mixture(fields, config.layers, &usual, by_sigmoid(groups), normalized)?;
    Ok(config)
}
