//! The layer's configuration, and how DeepSpeed writes it.

use ferrospeed_tensor::{Activation, Result, TensorError};
use serde::Deserialize;

/// What a layer is made of.
#[derive(Debug, Clone, PartialEq)]
pub struct TransformerLayerConfig {
    /// Width of the layer.
    pub hidden_size: usize,
    /// Width between the two feed-forward projections.
    pub intermediate_size: usize,
    /// Attention heads; they divide the width.
    pub heads: usize,
    /// Dropout of attention probabilities.
    pub attn_dropout_ratio: f32,
    /// Dropout of the attention's output and of the layer's.
    pub hidden_dropout_ratio: f32,
    /// Layers of the model, by which output projections start smaller.
    pub num_hidden_layers: usize,
    /// Standard deviation that weights start with.
    pub initializer_range: f32,
    /// Added to the variance in both norms.
    pub layer_norm_eps: f32,
    /// Whether norms stand before the halves instead of after.
    pub pre_layer_norm: bool,
    /// Whether output projections start smaller, by √(2 · layers).
    pub adjust_init_range: bool,
    /// [`Activation::GeluTanh`] as in DeepSpeed's kernels, or [`Activation::GeluErf`] as in Hugging Face's BERT.
    pub activation: Activation,
}

/// DeepSpeed's keys. Negative numbers are its way to say "not given".
#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Keys {
    batch_size: i64,
    hidden_size: i64,
    intermediate_size: i64,
    heads: i64,
    attn_dropout_ratio: f64,
    hidden_dropout_ratio: f64,
    num_hidden_layers: i64,
    initializer_range: f64,
    layer_norm_eps: f64,
    local_rank: i64,
    seed: i64,
    fp16: bool,
    pre_layer_norm: bool,
    normalize_invertible: bool,
    gelu_checkpoint: bool,
    adjust_init_range: bool,
    attn_dropout_checkpoint: bool,
    stochastic_mode: bool,
    return_tuple: bool,
    training: bool,
}

impl Default for Keys {
    fn default() -> Keys {
        Keys {
            batch_size: -1,
            hidden_size: -1,
            intermediate_size: -1,
            heads: -1,
            attn_dropout_ratio: -1.0,
            hidden_dropout_ratio: -1.0,
            num_hidden_layers: -1,
            initializer_range: -1.0,
            layer_norm_eps: 1e-12,
            local_rank: -1,
            seed: -1,
            fp16: false,
            pre_layer_norm: true,
            normalize_invertible: false,
            gelu_checkpoint: false,
            adjust_init_range: true,
            attn_dropout_checkpoint: false,
            stochastic_mode: false,
            return_tuple: false,
            training: true,
        }
    }
}

impl TransformerLayerConfig {
    /// Reads DeepSpeed's JSON, in UTF-8 with or without a byte-order mark, and names the options that have no effect
    /// here. Refuses unknown keys and numbers that make no layer.
    pub fn from_json(text: &str) -> Result<(TransformerLayerConfig, Vec<&'static str>)> {
        let fault = |what: String| TensorError::argument("transformer layer", what);
        let keys: Keys = serde_json::from_str(text.trim_start_matches('\u{feff}'))
            .map_err(|error| fault(format!("cannot read its configuration: {error}")))?;
        let positive = |name: &str, value: i64| {
            usize::try_from(value)
                .ok()
                .filter(|&value| value > 0)
                .ok_or_else(|| fault(format!("{name} is {value}; it is required and at least 1")))
        };
        let hidden_size = positive("hidden_size", keys.hidden_size)?;
        let config = TransformerLayerConfig {
            hidden_size,
            intermediate_size: positive("intermediate_size", keys.intermediate_size)
                .unwrap_or(4 * hidden_size),
            heads: positive("heads", keys.heads)?,
            attn_dropout_ratio: keys.attn_dropout_ratio.max(0.0) as f32,
            hidden_dropout_ratio: keys.hidden_dropout_ratio.max(0.0) as f32,
            num_hidden_layers: positive("num_hidden_layers", keys.num_hidden_layers).unwrap_or(1),
            initializer_range: if keys.initializer_range < 0.0 {
                0.02
            } else {
                keys.initializer_range as f32
            },
            layer_norm_eps: keys.layer_norm_eps as f32,
            pre_layer_norm: keys.pre_layer_norm,
            adjust_init_range: keys.adjust_init_range,
            activation: Activation::GeluTanh,
        };
        config.check()?;
        let without_effect = [
            (keys.batch_size >= 0, "batch_size: memory grows with what is run"),
            (keys.local_rank >= 0, "local_rank: the device is that of the parameters"),
            (keys.seed >= 0, "seed: dropout follows the run's seed"),
            (keys.fp16, "fp16: the number format is that of the parameters"),
            (keys.normalize_invertible, "normalize_invertible: norms keep their input"),
            (keys.gelu_checkpoint, "gelu_checkpoint: the output of GELU is never kept"),
            (keys.attn_dropout_checkpoint, "attn_dropout_checkpoint: dropped probabilities are never kept"),
            (keys.stochastic_mode, "stochastic_mode: results never depend on timing"),
            (keys.return_tuple, "return_tuple: there is one output"),
            (!keys.training, "training: every forward pass is told"),
        ];
        let noted = without_effect.into_iter().filter(|(given, _)| *given).map(|(_, note)| note);
        Ok((config, noted.collect()))
    }

    pub(super) fn check(&self) -> Result<()> {
        let fault = |what: String| Err(TensorError::argument("transformer layer", what));
        if self.heads == 0 || !self.hidden_size.is_multiple_of(self.heads) {
            return fault(format!("{} heads do not divide hidden_size {}", self.heads, self.hidden_size));
        }
        for (name, ratio) in [
            ("attn_dropout_ratio", self.attn_dropout_ratio),
            ("hidden_dropout_ratio", self.hidden_dropout_ratio),
        ] {
            if !(0.0..1.0).contains(&ratio) {
                return fault(format!("{name} is {ratio}; it lies in 0..1"));
            }
        }
        Ok(())
    }
}
