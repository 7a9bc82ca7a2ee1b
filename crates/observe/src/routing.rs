//! Where a mixture's routers sent tokens in a step: by layer for the log, in three numbers for those who look on.

use serde::{Deserialize, Serialize};

use crate::record::null_as_nan;

/// What one layer's router did in the last micro-batch of a step, over all ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LayerRouting {
    /// Which layer, from 0.
    pub layer: u64,
    /// How many choices fell on each expert, before any was dropped.
    pub tokens_per_expert: Vec<u64>,
    /// The share of choices that was dropped.
    #[serde(deserialize_with = "null_as_nan")]
    pub dropped_share: f64,
    /// The mean entropy of the router's probabilities, in nats: 0 where it is sure, ln(experts) where it knows nothing.
    #[serde(deserialize_with = "null_as_nan")]
    pub entropy: f64,
}

impl LayerRouting {
    /// The busiest expert's tokens over the even share: 1 where all have the same.
    pub fn imbalance(&self) -> f64 {
        let all: u64 = self.tokens_per_expert.iter().fold(0, |sum, &tokens| sum.saturating_add(tokens));
        let busiest = self.tokens_per_expert.iter().copied().max().unwrap_or(0);
        if all == 0 { 1.0 } else { busiest as f64 * self.tokens_per_expert.len() as f64 / all as f64 }
    }

    /// How many experts got no token.
    pub fn idle_experts(&self) -> usize {
        self.tokens_per_expert.iter().filter(|&&tokens| tokens == 0).count()
    }
}

/// All layers of a step in a few numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RoutingSummary {
    /// The mean entropy of the layers' routers.
    pub entropy: f64,
    /// The mean share of choices that were dropped.
    pub dropped_share: f64,
    /// The largest imbalance of a layer.
    pub imbalance: f64,
    /// Experts of all layers that got no token.
    pub idle_experts: usize,
}

impl RoutingSummary {
    /// `None` of a model without mixtures.
    pub fn of(layers: &[LayerRouting]) -> Option<RoutingSummary> {
        let mean = |value: fn(&LayerRouting) -> f64| {
            layers.iter().map(value).sum::<f64>() / layers.len().max(1) as f64
        };
        (!layers.is_empty()).then(|| RoutingSummary {
            entropy: mean(|layer| layer.entropy),
            dropped_share: mean(|layer| layer.dropped_share),
            imbalance: layers.iter().map(LayerRouting::imbalance).fold(1.0, f64::max),
            idle_experts: layers.iter().map(LayerRouting::idle_experts).sum(),
        })
    }

    /// For people, in a line.
    pub fn describe(&self) -> String {
        let mut text = format!("busiest expert {:.2}×  router entropy {:.2}", self.imbalance, self.entropy);
        if self.dropped_share > 0.0 {
            text += &format!("  dropped {:.1} %", 100.0 * self.dropped_share);
        }
        if self.idle_experts > 0 {
            text += &format!("  {} without tokens", self.idle_experts);
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(tokens: &[u64], entropy: f64) -> LayerRouting {
        LayerRouting { layer: 0, tokens_per_expert: tokens.to_vec(), dropped_share: 0.25, entropy }
    }

    #[test]
    fn layers_become_a_few_numbers() {
        assert_eq!(RoutingSummary::of(&[]), None);
        let summary = RoutingSummary::of(&[layer(&[4, 4], 1.0), layer(&[6, 0], 0.5)]).unwrap();
        assert_eq!(
            summary,
            RoutingSummary { entropy: 0.75, dropped_share: 0.25, imbalance: 2.0, idle_experts: 1 }
        );
        let line = "busiest expert 2.00×  router entropy 0.75  dropped 25.0 %  1 without tokens";
        assert_eq!(summary.describe(), line);
        assert_eq!(layer(&[0, 0], 0.0).imbalance(), 1.0);
    }
}
