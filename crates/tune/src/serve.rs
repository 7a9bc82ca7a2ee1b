//! What generating text needs: weights, the cache of keys and values, and what one forward pass has in hand.

use crate::model::Transformer;
use crate::plan::Operands;

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
/// The prompt is taken to be as long as it can be: all of `tokens`. `operands` says what products copy first.
pub fn serving(
    shape: &Transformer,
    element_bytes: u64,
    batch: u64,
    tokens: u64,
    operands: Operands,
) -> Serving {
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
    let prompt = match operands == Operands::Widened && element_bytes < 4 {
        true => prompt.max(widest_product(shape, element_bytes, product(&[batch, tokens]))),
        false => prompt,
    };
    Serving {
        weight_bytes: product(&[shape.size.total_params, element_bytes]),
        cache_bytes: product(&[2, shape.layers, key, batch, tokens, element_bytes]),
        working_bytes: prompt.max(head_copy).saturating_add(last_logits),
    }
}

/// The most that a product of a layer has in hand where both its operands are copied into f32: those copies, the residual
/// stream, and what goes in and comes out.
fn widest_product(shape: &Transformer, element_bytes: u64, rows: u64) -> u64 {
    let [query, key] = [shape.heads, shape.kv_heads].map(|heads| heads.saturating_mul(shape.head_dim));
    let gates = if shape.gated { 2 } else { 1 };
    let products = [
        (shape.hidden, query + 2 * key, 0),
        (shape.hidden, shape.intermediate, (gates - 1) * shape.intermediate),
        // What was gated and what gates it stay until the layer ends, and so does its input.
        (
            shape.intermediate,
            shape.hidden,
            if shape.gated { 2 * shape.intermediate } else { 0 } + shape.hidden,
        ),
    ];
    let bytes = products.map(|(inputs, outputs, beside)| {
        let copied = rows.saturating_mul(inputs).saturating_add(inputs.saturating_mul(outputs));
        let held = rows.saturating_mul(shape.hidden + inputs + outputs + beside);
        copied.saturating_mul(4).saturating_add(held.saturating_mul(element_bytes))
    });
    bytes.into_iter().max().unwrap_or(0)
}
