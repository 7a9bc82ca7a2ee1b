//! A mixture whose experts are spread over ranks: what one rank holds of it, and what ranks send each other.
//!
//! A rank holds `experts / ranks` experts of each layer and all of the rest. ZeRO shares an expert out among the ranks that
//! hold the same one, so a rank's share of all state is what it is without: all parameters over all ranks. A balanced router
//! sends every rank as many tokens as it has itself, so activations are counted as they are without, too.

use crate::estimate::ModelSize;
use crate::model::Transformer;

impl Transformer {
    /// The transformer of which this rank holds one of `ranks` equal parts of the experts; `None` where experts do not divide
    /// so, or there are none.
    pub fn with_experts_over(self, ranks: u64) -> Option<Transformer> {
        if ranks <= 1 {
            return Some(self);
        }
        if self.experts == 0 || !self.experts.is_multiple_of(ranks) {
            return None;
        }
        let held = self.expert_params / ranks;
        let other = self.expert_params - held;
        let elsewhere = other.saturating_mul(self.layers);
        let total_params = self.size.total_params.saturating_sub(elsewhere);
        Some(Transformer {
            layer_params: self.layer_params.saturating_sub(other),
            expert_params: held,
            params_elsewhere: elsewhere,
            frozen_params: self.frozen_params.min(total_params),
            size: ModelSize { total_params, ..self.size },
            ..self
        })
    }

    /// The bytes that a rank sends to experts on other ranks in one micro-batch, and gets back, forward and backward, where
    /// the router is balanced.
    pub fn routed_bytes(&self, tokens: u64, width: u64, ranks: u64) -> u64 {
        let leaving = tokens.saturating_mul(self.experts_per_token).saturating_mul(ranks - 1) / ranks.max(1);
        (4 * self.layers).saturating_mul(leaving).saturating_mul(self.hidden).saturating_mul(width)
    }
}
