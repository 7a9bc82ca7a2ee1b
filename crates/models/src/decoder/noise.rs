//! NEFTune (Jain et al., 2023, arXiv:2310.05914): noise on embeddings while a model is fine-tuned.
//!
//! Every number of an embedding of `tokens · width` gets one that is uniform in ±α / √(tokens · width). It is drawn by this thread's
//! next key, as dropout is: the same noise on any layout of ranks that see the same samples, and after a resume.

use ferrospeed_tensor::random::next_key;
use ferrospeed_tensor::{DType, Tensor, ops};

use crate::error::Result;

/// Adds noise to embeddings `[sequences, tokens, width]`.
pub(super) fn with_noise(embedded: &Tensor, alpha: f32) -> Result<Tensor> {
    let (sizes, count) = (embedded.sizes(), embedded.numel());
    let size: usize = sizes[1..].iter().product();
    let (key, most) = (next_key(), alpha / (size.max(1) as f32).sqrt());
    let uniform = |at: usize| (2.0 * key.uniform(at as u64) - 1.0) * most;
    let noise: Vec<f32> = (0..count).map(uniform).collect();
    let noise = Tensor::from_slice(&noise, *embedded.shape(), embedded.device())?;
    let noise = if embedded.dtype() == DType::F32 { noise } else { ops::cast(&noise, embedded.dtype())? };
    Ok(ops::add(embedded, &noise)?)
}
