//! A transformer in slices: what one rank of a tensor-parallel group holds of it, and what the group exchanges.
//!
//! Heads, inner channels and tokens are cut; norms, biases behind sums and positions are not. Column biases, a thousandth of
//! their weights, are counted as whole, and routers as cut with their experts. Between layers every rank is taken to have all
//! tokens. `docs/tensor-parallel.md` has the formulas.

use crate::estimate::ModelSize;
use crate::model::Transformer;

impl Transformer {
    /// The transformer that one of `slices` ranks computes: its share of heads, inner channels and tokens.
    pub fn in_slices(self, slices: u64) -> Transformer {
        if slices <= 1 {
            return self;
        }
        let sliced = Transformer {
            slices,
            heads: self.heads.div_ceil(slices),
            kv_heads: (self.kv_heads / slices).max(1),
            intermediate: self.intermediate.div_ceil(slices),
            vocab: self.vocab.div_ceil(slices),
            expert_params: self.expert_params.div_ceil(slices),
            ..self
        };
        let attention = |shape: &Transformer| {
            (2 * (shape.heads + shape.kv_heads) * shape.head_dim).saturating_mul(shape.hidden)
        };
        // Experts are all that a layer has besides attention and two norms.
        let feed_forward = match self.experts_per_token {
            1 => ((2 + u64::from(self.gated)) * self.intermediate).saturating_mul(self.hidden),
            _ => self.layer_params.saturating_sub(attention(&self) + 2 * self.hidden),
        };
        let whole = self.layer_params.saturating_sub(attention(&self)).saturating_sub(feed_forward);
        let layer_params = whole + attention(&sliced) + feed_forward.div_ceil(slices);
        let in_layers = self.layers.saturating_mul(self.layer_params);
        let outside = self.size.total_params.saturating_sub(in_layers);
        // One table, or a head of its own beside it.
        let table = self.vocab.saturating_mul(self.hidden);
        let tables = (outside / table.max(1)).clamp(1, 2) * table.min(outside);
        let outside = outside - tables + tables.div_ceil(slices);
        let total_params = self.layers.saturating_mul(layer_params).saturating_add(outside);
        let largest_layer_params = self.size.largest_layer_params.div_ceil(slices);
        let frozen_params = self.frozen_params.min(total_params);
        let size = ModelSize { total_params, largest_layer_params };
        Transformer { layer_params, frozen_params, size, ..sliced }
    }

    /// The bytes of all sums over ranks of one micro-batch, forward and backward: two per layer each way, one for the
    /// embedding and one for the head. Without those of recomputed layers.
    pub fn summed_bytes(&self, tokens: u64, width: u64) -> u64 {
        (4 * self.layers + 2).saturating_mul(tokens).saturating_mul(self.hidden).saturating_mul(width)
    }
}
