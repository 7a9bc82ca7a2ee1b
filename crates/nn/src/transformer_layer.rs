//! DeepSpeed's transformer layer: a BERT-style encoder layer with the norm before or after each half.
//!
//! Parameter names, shapes and formulas are DeepSpeed's, so its checkpoints load. What its memory options save is saved
//! here anyway: the tape keeps the value before GELU and not the one after, and draws dropout masks again in backward.

use ferrospeed_tensor::ops::{self, AttentionOptions, PackedHeads, WeightLayout};
use ferrospeed_tensor::{Activation, DType, Initializer, Operand, Param, Result, Tensor, TensorError};
use serde::Deserialize;

use crate::Mode;
use crate::init::Init;

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

    fn check(&self) -> Result<()> {
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

/// Which keys attention sees.
#[derive(Debug, Clone, Copy)]
pub enum KeyVisibility<'a> {
    /// All.
    All,
    /// `[batch, keys]`, nonzero where a key is a real token.
    Real(&'a Tensor),
    /// `[batch, 1, 1, keys]`, added to the scores: 0 to keep, −10000 to drop. Slower than the other two.
    Added(&'a Tensor),
}

/// Dropout masks given from outside, 1 where an element is kept, in place of random ones.
#[derive(Debug, Clone)]
pub struct DropoutMasks {
    /// `[batch, heads, tokens, tokens]`.
    pub attn_prob: Tensor,
    /// `[batch, tokens, hidden]`.
    pub attn_output: Tensor,
    /// `[batch, tokens, hidden]`.
    pub layer_output: Tensor,
}

type Affine = (Param, Param);

/// The layer.
#[derive(Debug, Clone)]
pub struct TransformerLayer {
    config: TransformerLayerConfig,
    qkv: Affine,
    attention_output: Affine,
    attention_norm: Affine,
    intermediate: Affine,
    output: Affine,
    norm: Affine,
}

fn operands((weight, bias): &Affine) -> (Operand, Option<Operand>) {
    (weight.into(), Some(bias.into()))
}

fn project(x: &Tensor, layer: &Affine) -> Result<Tensor> {
    let (weight, bias) = operands(layer);
    ops::linear(x, weight, bias, WeightLayout::OutIn)
}

impl TransformerLayer {
    /// A layer; its parameters have DeepSpeed's names below `init`.
    pub fn new(init: &Init, config: TransformerLayerConfig) -> Result<TransformerLayer> {
        config.check()?;
        let (hidden, wide) = (config.hidden_size, config.intermediate_size);
        let std = config.initializer_range;
        let scaled = (2.0 * config.num_hidden_layers.max(1) as f32).sqrt();
        let output_std = if config.adjust_init_range { std / scaled } else { std };
        let normal = |std| Initializer::Normal { mean: 0.0, std };
        let affine = |weight: &str, bias: &str, shape: [usize; 2], std| -> Affine {
            let outputs = shape[0];
            (init.param(weight, shape, normal(std)), init.param(bias, [outputs], Initializer::Constant(0.0)))
        };
        let norm = |weight: &str, bias: &str| -> Affine {
            let one = init.param(weight, [hidden], Initializer::Constant(1.0));
            (one, init.param(bias, [hidden], Initializer::Constant(0.0)))
        };
        Ok(TransformerLayer {
            qkv: affine("attn_qkvw", "attn_qkvb", [3 * hidden, hidden], std),
            attention_output: affine("attn_ow", "attn_ob", [hidden, hidden], output_std),
            attention_norm: norm("attn_nw", "attn_nb"),
            intermediate: affine("inter_w", "inter_b", [wide, hidden], std),
            output: affine("output_w", "output_b", [hidden, wide], output_std),
            norm: norm("norm_w", "norm_b"),
            config,
        })
    }

    /// What it is made of.
    pub fn config(&self) -> &TransformerLayerConfig {
        &self.config
    }

    /// The output for `x [batch, tokens, hidden]`.
    pub fn forward(&self, x: &Tensor, keys: KeyVisibility<'_>, mode: Mode) -> Result<Tensor> {
        self.run(x, keys, mode, None)
    }

    /// The output of a training pass with these dropout masks.
    pub fn forward_with_masks(
        &self,
        x: &Tensor,
        keys: KeyVisibility<'_>,
        masks: &DropoutMasks,
    ) -> Result<Tensor> {
        self.run(x, keys, Mode::Train, Some(masks))
    }

    fn run(
        &self,
        x: &Tensor,
        keys: KeyVisibility<'_>,
        mode: Mode,
        masks: Option<&DropoutMasks>,
    ) -> Result<Tensor> {
        let drop =
            |t: &Tensor, mask: Option<&Tensor>| dropout(t, self.config.hidden_dropout_ratio, mode, mask);
        let attention_mask = masks.map(|masks| &masks.attn_output);
        let layer_mask = masks.map(|masks| &masks.layer_output);
        if self.config.pre_layer_norm {
            let mixed = self.attend(&self.normalize(x, &self.norm)?, keys, mode, masks)?;
            let (sum, f) = self.add_normalize(&drop(&mixed, attention_mask)?, x, &self.attention_norm)?;
            return ops::add(&sum, &drop(&self.feed_forward(&f)?, layer_mask)?);
        }
        let mixed = self.attend(x, keys, mode, masks)?;
        let (_, f) = self.add_normalize(&drop(&mixed, attention_mask)?, x, &self.attention_norm)?;
        let (_, y) = self.add_normalize(&drop(&self.feed_forward(&f)?, layer_mask)?, &f, &self.norm)?;
        Ok(y)
    }

    fn normalize(&self, x: &Tensor, (weight, bias): &Affine) -> Result<Tensor> {
        ops::layer_norm(x, Some(weight.into()), Some(bias.into()), self.config.layer_norm_eps)
    }

    fn add_normalize(
        &self,
        x: &Tensor,
        residual: &Tensor,
        (weight, bias): &Affine,
    ) -> Result<(Tensor, Tensor)> {
        ops::add_layer_norm(x, residual, Some(weight.into()), Some(bias.into()), self.config.layer_norm_eps)
    }

    fn feed_forward(&self, x: &Tensor) -> Result<Tensor> {
        let (up, down) = (operands(&self.intermediate), operands(&self.output));
        ops::mlp(x, up, down, WeightLayout::OutIn, self.config.activation)
    }

    fn attend(
        &self,
        x: &Tensor,
        keys: KeyVisibility<'_>,
        mode: Mode,
        masks: Option<&DropoutMasks>,
    ) -> Result<Tensor> {
        let qkv = project(x, &self.qkv)?;
        let mask = masks.map(|masks| &masks.attn_prob);
        let mixed = match (keys, mask) {
            (KeyVisibility::All | KeyVisibility::Real(_), None) => {
                let key_mask = if let KeyVisibility::Real(real) = keys { Some(real.clone()) } else { None };
                let dropout = if mode == Mode::Train { self.config.attn_dropout_ratio } else { 0.0 };
                let options = AttentionOptions { key_mask, dropout, ..AttentionOptions::default() };
                ops::attention_packed(&qkv, self.config.heads, PackedHeads::Thirds, &options)?
            }
            (keys, mask) => self.attend_in_steps(&qkv, keys, mode, mask)?,
        };
        project(&mixed, &self.attention_output)
    }

    /// Attention with every probability in memory, for masks that the fused kernel does not take.
    fn attend_in_steps(
        &self,
        qkv: &Tensor,
        keys: KeyVisibility<'_>,
        mode: Mode,
        mask: Option<&Tensor>,
    ) -> Result<Tensor> {
        let [q_bthd, k_bthd, v_bthd] = ops::split_heads(qkv, self.config.heads, PackedHeads::Thirds)?;
        let &[batch, tokens, heads, dim] = q_bthd.sizes() else {
            return Err(TensorError::shape(
                "transformer layer",
                "the queries",
                *q_bthd.shape(),
                "four dimensions",
            ));
        };
        let q_bhtd = ops::permute(&q_bthd, &[0, 2, 1, 3])?;
        let k_bhdt = ops::permute(&k_bthd, &[0, 2, 3, 1])?;
        let v_bhtd = ops::permute(&v_bthd, &[0, 2, 1, 3])?;
        let scores = ops::affine(&ops::matmul(&q_bhtd, &k_bhdt)?, 1.0 / (dim as f32).sqrt(), 0.0)?;
        // Sums of probabilities want f32 whatever the weights are.
        let scores = ops::cast(&scores, DType::F32)?;
        let scores = match keys {
            KeyVisibility::All => scores,
            KeyVisibility::Added(added) => ops::add(&scores, &ops::cast(added, DType::F32)?)?,
            KeyVisibility::Real(real) => {
                let real = ops::reshape(real, [batch, 1, 1, tokens])?;
                let dropped = Tensor::full([1], -10_000.0, DType::F32, scores.device())?;
                ops::select(&real, &scores, &dropped)?
            }
        };
        let weights = dropout(&ops::softmax(&scores)?, self.config.attn_dropout_ratio, mode, mask)?;
        let mixed = ops::matmul(&ops::cast(&weights, qkv.dtype())?, &v_bhtd)?;
        ops::reshape(&ops::permute(&mixed, &[0, 2, 1, 3])?, [batch, tokens, heads * dim])
    }
}

fn dropout(x: &Tensor, p: f32, mode: Mode, mask: Option<&Tensor>) -> Result<Tensor> {
    match mask {
        Some(mask) => ops::mul(x, &ops::affine(&ops::cast(mask, x.dtype())?, 1.0 / (1.0 - p), 0.0)?),
        None => mode.dropout(x, p),
    }
}
