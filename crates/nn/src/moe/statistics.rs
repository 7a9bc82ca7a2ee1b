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
        Ok(RoutingTally::read(std::slice::from_ref(self))?.swap_remove(0).statistics())
    }

    /// Σ p·ln p over all tokens and experts, on the device.
    fn negative_surprise(&self) -> Result<Tensor> {
        // 0·ln 0 is 0: what is rounded to zero is lifted to where the logarithm is finite.
        let tiny = Tensor::scalar(f32::MIN_POSITIVE, self.probabilities.device())?;
        let logs = ops::log(&ops::maximum(&self.probabilities, &tiny)?)?;
        ops::reshape(&ops::sum(&ops::mul(&self.probabilities, &logs)?)?, [1])
    }
}

/// The sums behind [`RoutingStatistics`]: those of ranks and micro-batches add up.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RoutingTally {
    /// How many choices fell on each expert, before any was dropped.
    pub chosen: Vec<f64>,
    /// How many of all choices were kept.
    pub kept: f64,
    /// The entropies of all tokens, summed.
    pub entropy: f64,
    /// How many tokens there were.
    pub tokens: f64,
}

impl RoutingTally {
    /// Reads those of many layers together: the device is waited for twice, however many there are.
    pub fn read(layers: &[Routing]) -> Result<Vec<RoutingTally>> {
        if layers.is_empty() {
            return Ok(Vec::new());
        }
        no_grad(|| {
            let counts: Vec<Tensor> =
                layers.iter().flat_map(|layer| [layer.chosen.clone(), layer.kept.clone()]).collect();
            let surprises: Vec<Tensor> =
                layers.iter().map(Routing::negative_surprise).collect::<Result<_>>()?;
            let counts = ops::concat(&counts, 0)?.to_vec::<i64>()?;
            let surprises = ops::concat(&surprises, 0)?.to_vec::<f32>()?;
            let mut rest = counts.as_slice();
            let tally = |(layer, surprise): (&Routing, f32)| {
                let experts = layer.chosen.numel();
                let (own, later) = rest.split_at(2 * experts);
                rest = later;
                let number = |count: &i64| (*count).max(0) as f64;
                RoutingTally {
                    chosen: own[..experts].iter().map(number).collect(),
                    kept: own[experts..].iter().map(number).sum(),
                    entropy: -f64::from(surprise),
                    tokens: layer.probabilities.shape().rows() as f64,
                }
            };
            Ok(layers.iter().zip(surprises).map(tally).collect())
        })
    }

    /// The shares and means.
    pub fn statistics(&self) -> RoutingStatistics {
        let all: f64 = self.chosen.iter().sum();
        let of = |part: f64, whole: f64, empty: f64| if whole > 0.0 { part / whole } else { empty };
        let busiest = self.chosen.iter().copied().fold(0.0, f64::max);
        RoutingStatistics {
            tokens_per_expert: self.chosen.iter().map(|&tokens| tokens as u64).collect(),
            dropped_share: of(all - self.kept, all, 0.0),
            entropy: of(self.entropy, self.tokens, 0.0),
            imbalance: of(busiest * self.chosen.len() as f64, all, 1.0),
        }
    }
}
