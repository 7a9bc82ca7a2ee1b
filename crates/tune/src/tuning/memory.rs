//! What a model needs before its first sample, by DeepSpeed's rule for autotuning.

/// Bytes per parameter of weights, gradients and optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// Four bytes, and two states of the optimizer.
    Full,
    /// Two bytes (fp16, bf16), and an optimizer in full precision.
    Half,
}

/// A count that may be a fraction once it is divided over ranks.
pub type Number = f64;

/// What is known of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ModelInfo {
    /// Its parameters.
    pub parameters: u64,
    /// What one sample keeps for backward.
    pub activation_bytes: u64,
    /// Its width, where it is known.
    pub hidden_size: Option<u64>,
}

/// The bytes a rank keeps for weights, gradients and optimizer in a stage.
pub fn instantiation_bytes(
    parameters: u64,
    precision: Precision,
    stage: u8,
    ranks: u64,
    model_parallel: u64,
) -> Number {
    let parameters = parameters as f64;
    let [mut weights, mut gradients, mut optimizer] = match precision {
        Precision::Half => [2.0, 2.0, 16.0],
        Precision::Full => [4.0, 4.0, 8.0],
    }
    .map(|bytes| bytes * parameters);
    let ranks = ranks.max(1) as f64;
    for (from, bytes) in [(1, &mut optimizer), (2, &mut gradients), (3, &mut weights)] {
        if stage >= from {
            *bytes /= ranks;
        }
    }
    (weights + gradients + optimizer) / model_parallel.max(1) as f64
}
