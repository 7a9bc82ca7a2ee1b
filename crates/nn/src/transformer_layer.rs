//! DeepSpeed's transformer layer: a BERT-style encoder layer with the norm before or after each half.
//!
//! Parameter names, shapes and formulas are DeepSpeed's, so its checkpoints load. What its memory options save is saved
//! here anyway: the tape keeps the value before GELU and not the one after, and draws dropout masks again in backward.

mod config;

pub use config::TransformerLayerConfig;

use ferrospeed_tensor::ops::{self, AttentionOptions, PackedHeads, WeightLayout};
use ferrospeed_tensor::{DType, Initializer, Operand, Param, Result, Tensor, TensorError};

use crate::Mode;
use crate::init::Init;

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
        ops::add_layer_norm(
            x,
            Some(residual.into()),
            Some(weight.into()),
            Some(bias.into()),
            self.config.layer_norm_eps,
        )
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
