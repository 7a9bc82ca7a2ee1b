//! Command R, R7B and A: attention and feed-forward side by side behind one norm without bias, pairs of channels that are
//! neighbours turn, and logits have a factor. From R7B on most layers see a window, and only those turn.

use ferrospeed_nn::{NormConfig, Turning};

use crate::config::WindowRule;
use crate::decoder::{DecoderConfig, Residual};
use crate::error::Result;
use crate::families::llama::{Defaults, LLAMA, all_but_every, attention_bias, common};
use crate::families::neighbours_turn;
use crate::fields::Fields;

fn cohere_like(fields: &Fields<'_>, defaults: &Defaults) -> Result<DecoderConfig> {
    let mut config = common(fields, defaults)?;
    attention_bias(fields, &mut config)?;
    config.residual = Residual::ParallelOneNorm;
    neighbours_turn(&mut config);
    // Names of what is so in every file, and what is the tokenizer's or a server's.
    fields.harmless(&[
        "cache_implementation",
        "order_of_interleaved_layers",
        "position_embedding_type",
        "rotary_pct",
    ]);
    fields.harmless(&["model_max_length", "use_parallel_embedding"]);
    fields.fixed("use_gated_activation", true.into())?;
    fields.fixed("use_parallel_block", true.into())?;
    fields.fixed("use_embedding_sharing", true.into())?;
    let factor = fields.number("logit_scale", Some(0.0625))?;
    if !(factor.is_finite() && factor > 0.0) {
        return Err(fields.error("logit_scale", format!("{factor} is not a number above 0")));
    }
    config.factors.logits = factor as f32;
    Ok(config)
}

const COHERE: Defaults = Defaults {
    model_type: "cohere",
    sizes: [8192, 40, 64],
    inner_width: 22_528,
    vocab: 256_000,
    padding: Some(0),
    max_tokens: 8192,
    theta: 5e5,
    eps: 1e-5,
    eps_key: "layer_norm_eps",
    norm: |eps| NormConfig::LayerWithoutBias { eps },
    tied: true,
    ..LLAMA
};

/// Reads a `cohere` configuration.
pub fn cohere(fields: &Fields<'_>) -> Result<DecoderConfig> {
    // Command R+ has norms with a mean on each head, and a weight for each channel of each head.
    fields.fixed("use_qk_norm", false.into())?;
    // Without a window it is nothing that layers take turns in.
    fields.harmless(&["layer_switch"]);
    cohere_like(fields, &COHERE)
}

/// Reads a `cohere2` configuration.
pub fn cohere2(fields: &Fields<'_>, rule: WindowRule) -> Result<DecoderConfig> {
    let mut config = cohere_like(fields, &Defaults { model_type: "cohere2", theta: 1e4, ..COHERE })?;
    let window = fields.size_or_null("sliding_window", Some(4096))?;
    let interval = match fields.optional_size("sliding_window_pattern")? {
        Some(interval) => interval,
        None => fields.size("_sliding_window_pattern", Some(4))?,
    };
    // What the interval was called first.
    fields.fixed("layer_switch", interval.into())?;
    config.windows = all_but_every(fields, config.layers, window, interval, rule)?;
    let turning = |window: &Option<usize>| if window.is_some() { Turning::Usually } else { Turning::Never };
    config.turns = config.windows.iter().map(turning).collect();
    Ok(config)
}
