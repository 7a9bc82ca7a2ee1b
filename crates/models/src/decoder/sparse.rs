//! Block-sparse attention in a decoder.
//!
//! A layer attends over the active blocks of its layout, and of these only over tokens that are not later: the lower triangle is
//! taken whatever the layout says. Passes with a cache of keys and values attend over all that it holds.

use ferrospeed_nn::sparse_attention::SparseAttention;

use super::Decoder;
use super::block::Block;

impl Decoder {
    /// Lets all layers attend over the active blocks of a kind of layout, or over all tokens again. It refuses documents that share
    /// sequences, and ranks that do.
    pub fn set_sparse_attention(&mut self, kind: Option<&SparseAttention>) {
        for (layer, block) in self.blocks.iter_mut().enumerate() {
            if let Some(attention) = block.attention_mut() {
                attention.set_sparse_attention(kind.map(|kind| kind.clone().of_layer(layer)));
            }
        }
    }

    /// Draws random blocks from this seed from now on; without layouts nothing changes.
    pub fn seed_sparse_attention(&self, seed: u64) {
        self.blocks.iter().filter_map(Block::layouts).for_each(|layouts| layouts.set_seed(seed));
    }

    /// Whether its layers attend over the active blocks of layouts.
    pub fn attends_sparsely(&self) -> bool {
        self.blocks.iter().any(|block| block.layouts().is_some())
    }

    /// The share of the pairs of two tokens of a sequence that attention looks at, later ones included: 1 without layouts.
    pub fn attended_share(&self, tokens: usize) -> f64 {
        let share = |block: &Block| block.layouts().map_or(1.0, |layouts| layouts.of(tokens).share(tokens));
        self.blocks.iter().map(share).sum::<f64>() / self.blocks.len().max(1) as f64
    }
}
