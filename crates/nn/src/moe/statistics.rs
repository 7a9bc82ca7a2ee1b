//! Routing made visible, for logs and monitors. Nothing is read from the device until somebody asks.

use ferrospeed_tensor::autograd::no_grad;
use ferrospeed_tensor::{Result, Tensor, ops};

/// Who was sent where in one forward.
#[derive(Debug, Clone)]
pub struct Routing {
    pub(super) chosen: Tensor,
    pub(super) kept: Tensor,
    pub(super) probabilities: Tensor,
    pub(super) capacity: Option<usize>,
}

/// The same in numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct RoutingStatistics {
    /// How many choices fell on each expert, before any was dropped.
    pub tokens_per_expert: Vec<u64>,
    /// The share of choices that was dropped.
    pub dropped_share: f64,
    /// The mean entropy of the router's probabilities, in nats: 0 where it is sure, ln(experts) where it knows nothing.
    pub entropy: f64,
    /// The busiest expert's tokens over the even share: 1 where all have the same.
    pub imbalance: f64,
}

impl Routing {
    /// How many choices fell on each expert, before any was dropped: `[experts]` in `I64`, on the device.
    pub fn chosen(&self) -> &Tensor {
        &self.chosen
    }

    /// The capacity that held, where there is one.
    pub fn capacity(&self) -> Option<usize> {
        self.capacity
    }

    /// Waits for the device and counts.
    pub fn statistics(&self) -> Result<RoutingStatistics> {
        let counts = |tensor: &Tensor| -> Result<Vec<u64>> {
            Ok(tensor.to_vec::<i64>()?.into_iter().map(|count| u64::try_from(count).unwrap_or(0)).collect())
        };
        let (chosen, kept) = (counts(&self.chosen)?, counts(&self.kept)?);
        let [all, stayed] = [&chosen, &kept].map(|counts| counts.iter().sum::<u64>() as f64);
        let of = |part: f64, whole: f64, empty: f64| if whole > 0.0 { part / whole } else { empty };
        // 0·ln 0 is 0: what is rounded to zero is lifted to where the logarithm is finite.
        let surprise = no_grad(|| -> Result<f32> {
            let tiny = Tensor::scalar(f32::MIN_POSITIVE, self.probabilities.device())?;
            let logs = ops::log(&ops::maximum(&self.probabilities, &tiny)?)?;
            ops::sum(&ops::mul(&self.probabilities, &logs)?)?.item()
        })?;
        let tokens = self.probabilities.shape().rows() as f64;
        let busiest = chosen.iter().copied().max().unwrap_or(0) as f64;
        Ok(RoutingStatistics {
            dropped_share: of(all - stayed, all, 0.0),
            entropy: of(-f64::from(surprise), tokens, 0.0),
            imbalance: of(busiest * chosen.len() as f64, all, 1.0),
            tokens_per_expert: chosen,
        })
    }
}
