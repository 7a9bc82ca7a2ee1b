//! Queries, keys and values through latents: all heads' keys and values are made of one small vector for each token, and so may
//! queries be; a few channels of a head turn, and of keys all heads have the same. (DeepSeek-AI: "DeepSeek-V2", 2024, section 2.1.)
//!
//! Heads come with the channels that turn in front, where kernels turn them, and values as wide as keys, with zeros behind. So what
//! follows is attention as any other; a cache holds whole heads.

use ferrospeed_tensor::ops;
use ferrospeed_tensor::{Result, Tensor};

use crate::linear::Linear;
use crate::norm::RmsNorm;

/// Channels of a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentHeads {
    /// Of queries and keys, that stay as they are.
    pub still: usize,
    /// Of queries and keys, that turn.
    pub turning: usize,
    /// Of values; at most as many as of keys.
    pub value: usize,
}

impl LatentHeads {
    /// Of queries and keys.
    pub fn width(&self) -> usize {
        self.still + self.turning
    }
}

/// How queries are made.
#[derive(Debug, Clone)]
pub enum LatentQuery {
    /// By one layer.
    Whole(Linear),
    /// By way of a latent, which is normalised.
    ByLatent {
        /// To the latent.
        inwards: Linear,
        /// Its norm.
        norm: RmsNorm,
        /// To the heads.
        outwards: Linear,
    },
}

/// The layers of latent attention.
#[derive(Debug, Clone)]
pub struct LatentProjections {
    /// Queries.
    pub query: LatentQuery,
    /// To the latent of keys and values, and behind it the channels of keys that turn.
    pub inwards: Linear,
    /// The latent's norm.
    pub norm: RmsNorm,
    /// To the heads' keys and values.
    pub outwards: Linear,
    /// Channels of a head.
    pub heads: LatentHeads,
}

impl LatentProjections {
    /// Queries, keys and values `[batch, tokens, heads, width]` of `x`, not yet turned.
    pub(super) fn project(&self, x: &Tensor, heads: usize) -> Result<[Tensor; 3]> {
        let (batch, tokens) = (x.sizes()[0], x.sizes()[1]);
        let LatentHeads { still, turning, value } = self.heads;
        let flat = match &self.query {
            LatentQuery::Whole(layer) => layer.forward(x)?,
            LatentQuery::ByLatent { inwards, norm, outwards } => {
                outwards.forward(&norm.forward(&inwards.forward(x)?)?)?
            }
        };
        let query = ops::reshape(&flat, [batch, tokens, heads, still + turning])?;
        let query = ops::split(&query, 3, &[still, turning])?;
        let query = ops::concat(&[query[1].clone(), query[0].clone()], 3)?;
        let latent = self.inwards.forward(x)?;
        let rank = latent.shape().last() - turning;
        let latent = ops::split(&latent, 2, &[rank, turning])?;
        let all = self.outwards.forward(&self.norm.forward(&latent[0])?)?;
        let all =
            ops::split(&ops::reshape(&all, [batch, tokens, heads, still + value])?, 3, &[still, value])?;
        let of_all_heads = ops::reshape(&latent[1], [batch, tokens, 1, turning])?;
        let none = Tensor::zeros([batch, tokens, heads, turning], x.dtype(), x.device())?;
        let key = ops::concat(&[ops::add(&none, &of_all_heads)?, all[0].clone()], 3)?;
        let beyond = still + turning - value;
        let value = match beyond {
            0 => all[1].clone(),
            _ => {
                let zeros = Tensor::zeros([batch, tokens, heads, beyond], x.dtype(), x.device())?;
                ops::concat(&[all[1].clone(), zeros], 3)?
            }
        };
        Ok([query, key, value])
    }
}
