//! What generating text needs: weights, the cache of keys and values, and what one forward pass has in hand.

use crate::model::Transformer;

/// The bytes of one rank that generates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Serving {
    /// The weights.
    pub weight_bytes: u64,
    /// Keys and values of all tokens of all sequences.
    pub cache_bytes: u64,
    /// The intermediate results of the widest moment: the whole prompt inside one layer, or the copy of the head that one
    /// sequence alone is written with.
    pub working_bytes: u64,
}

impl Serving {
    /// All of it.
    pub fn total_bytes(&self) -> u64 {
        self.weight_bytes.saturating_add(self.cache_bytes).saturating_add(self.working_bytes)
    }
}

/// Generating `batch` sequences of `tokens` tokens, prompts included, with elements of `element_bytes`.
///
/// The prompt is taken to be as long as it can be: all of `tokens`.
pub fn serving(shape: &Transformer, element_bytes: u64, batch: u64, tokens: u64) -> Serving {
    let product =
        |factors: &[u64]| factors.iter().fold(1u64, |product, &factor| product.saturating_mul(factor));
    let [query, key] = [shape.heads, shape.kv_heads].map(|heads| heads.saturating_mul(shape.head_dim));
    // The residual stream and its normed copy stay; attention then holds its projections twice (as projected, and cut
    // into heads or rotated), its mix and its output; the feed-forward half its inner values and its output.
    let attention = 2 * (query + 2 * key) + query + shape.hidden;
    let feed_forward =
        shape.intermediate * if shape.gated { 3 } else { 1 } * shape.experts_per_token + shape.hidden;
    let in_hand = 2 * shape.hidden + attention.max(feed_forward);
    let last_logits = product(&[batch, shape.vocab, element_bytes + 4]);
    // While one text of some length is written on a CPU, a large head has a copy in 8 bits, with four numbers and two bounds for each row:
    // `crates/models/src/shortlist.rs`. The prompt's intermediate results are gone by then.
    let head_weights = shape.vocab.saturating_mul(shape.hidden);
    let head_copy = match batch == 1 && head_weights >= 1 << 21 {
        true => head_weights.saturating_add(shape.vocab.saturating_mul(24)),
        false => 0,
    };
    let prompt = product(&[in_hand, batch, tokens, element_bytes]);
    Serving {
        weight_bytes: product(&[shape.size.total_params, element_bytes]),
        cache_bytes: product(&[2, shape.layers, key, batch, tokens, element_bytes]),
        working_bytes: prompt.max(head_copy).saturating_add(last_logits),
    }
}
