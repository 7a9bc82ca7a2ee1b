//! Losses of a router beside the model's own.

use ferrospeed_tensor::{DType, Result, Tensor, ops};

/// The load-balancing loss: experts × Σ share of tokens × mean probability, of `probabilities [tokens, experts]` and `counts
/// [experts]` in any number type. Its gradient flows through the probabilities alone. (Fedus, Zoph, Shazeer: "Switch
/// transformers", 2022, eq. 4.)
pub fn balance_loss(probabilities: &Tensor, counts: &Tensor) -> Result<Tensor> {
    let (tokens, experts) = (probabilities.shape().rows(), probabilities.shape().last());
    let share = ops::affine(&ops::cast(counts, DType::F32)?, 1.0 / tokens.max(1) as f32, 0.0)?;
    let mean = ops::mean_dim(probabilities, 0)?;
    ops::affine(&ops::sum(&ops::mul(&mean, &share)?)?, experts as f32, 0.0)
}

/// The mean square of the logarithm of what `logits [tokens, experts]` are normalised by: keeps them small. (Zoph et al.:
/// "ST-MoE", 2022, eq. 5.)
pub fn z_loss(logits: &Tensor) -> Result<Tensor> {
    let logits = ops::cast(logits, DType::F32)?;
    let first = |x: &Tensor| ops::narrow(x, 1, 0, 1);
    let log_sum = ops::sub(&first(&logits)?, &first(&ops::log_softmax(&logits)?)?)?;
    ops::mean(&ops::square(&log_sum)?)
}
