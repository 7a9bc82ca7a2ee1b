//! What a training step keeps between forward and backward, from what each operation saves on the tape.
//!
//! Legend, per token: `h` the residual stream, `q` all queries, `k` all keys (as many values), `i` the feed-forward
//! layer. One layer saves
//!
//! | what | elements | for |
//! | --- | --- | --- |
//! | the sums before the two norms, and the two normed values | 4h | norms, the projections behind them |
//! | queries, keys and values, rotated where they are | q + 2k | attention |
//! | the mix of values | q | attention, the output projection |
//! | the inner values: before the activation; gate and up | i; 2i | the feed-forward layer |
//! | of experts in slices or on other ranks, copies of the token and their results | 2h to 4h per expert | the weighted sum |
//!
//! plus, on a GPU, the inner values after the activation, or the product, where rows are short enough; less the two normed values where `h`
//! is wide enough that backward norms again; and in f32 a mean and a deviation per norm, and a log-sum per head. Dropout
//! saves nothing: its mask is drawn again. A feed-forward layer that takes its tokens in chunks saves none of its inner values;
//! backward makes those of one chunk again.
//! The loss never holds all logits: it works on chunks of rows, and leaves the gradient of its input. Backward frees
//! each operation's part as it passes, so the peak is reached either inside the loss or in the feed-forward half of the
//! last layer, whichever needs more beyond what all layers keep.

use crate::model::Transformer;
use crate::plan::{Operands, Processor};

/// Up to this width a GPU keeps the inner values after the activation too.
const KEPT_ACTIVATION_WIDTH: u64 = 3072;
/// From this width on, backward norms again.
const REBUILT_WIDTH: u64 = 2048;
/// Normed values of a layer.
const NORMS: u64 = 2;
/// The fused loss takes at least this many rows at once.
const LOSS_CHUNK_MIN_ROWS: u64 = 16;
/// Tiles hold blocks of so many lines.
const TILE_LINES: u64 = 32;
/// Where a product has more rows than this, its right operand is cut into tiles too.
const SHARED_ROWS: u64 = 1024;
/// f32 products of fewer rows, columns or depth do not go through tiles; others in parts of so much.
const SPLIT_LEAST: u64 = 128;
const SPLIT_DEPTH: u64 = 1024;
const SPLIT_ELEMENTS: u64 = 1 << 20;
const SPLIT_ROWS: u64 = 1024;
/// Where recomputed layers have so many tokens or more, feed-forward layers take them in chunks of so many.
const LONG_TOKENS: u64 = 65_536;
const CHUNK_TOKENS: u64 = 8192;
/// Means, deviations, log-sums, losses.
const F32_BYTES: u64 = 4;
/// Token ids and targets.
const ID_BYTES: u64 = 8;

/// Rows per token and expert, as wide as the stream, that a mixture keeps. Experts that a rank has to itself keep none. Where a
/// sum over ranks comes between, those in slices keep the copy of the token and the result; those on other ranks keep both, and
/// the result is kept where it comes back too.
fn expert_rows(shape: &Transformer) -> u64 {
    match (shape.slices > 1, shape.params_elsewhere > 0) {
        (false, false) => 0,
        (true, false) => 2,
        (in_slices, true) => 3 + u64::from(in_slices),
    }
}

/// Tokens that feed-forward layers take at a time, where that is not all; `asked` as [`crate::plan::Request::mlp_chunk`].
pub(crate) fn mlp_chunk(asked: Option<u64>, shape: &Transformer, tokens: u64, again: bool) -> Option<u64> {
    let chunk = match asked {
        None if again && tokens >= LONG_TOKENS => CHUNK_TOKENS,
        None | Some(0) => return None,
        Some(chunk) => chunk,
    };
    // Experts take all.
    (tokens > chunk && shape.experts_per_token == 1).then_some(chunk)
}

/// Activations of one micro-batch, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ActivationBytes {
    /// The input of one layer.
    pub(crate) layer_input: u64,
    /// Everything that one layer saves.
    pub(crate) layer: u64,
    /// The most that is held beyond that at the end of forward.
    pub(crate) loss: u64,
    /// The logits in that.
    pub(crate) logits: u64,
    /// The most that is held beyond that in backward of a layer.
    pub(crate) backward: u64,
    /// What one layer keeps for the gradients of its weights where those are put off: the inputs of its products, and the
    /// gradients of their results.
    pub(crate) put_off: u64,
}

impl ActivationBytes {
    /// `tokens` of sequences of `sequence_length`, elements of `width` bytes; feed-forward layers take `chunk` of the tokens
    /// at a time, or all.
    pub(crate) fn of(
        shape: &Transformer,
        width: u64,
        tokens: u64,
        sequence_length: u64,
        keeps_attention_matrix: bool,
        chunk: Option<u64>,
        processor: Processor,
    ) -> ActivationBytes {
        let [query, key] = [shape.heads, shape.kv_heads].map(|heads| heads.saturating_mul(shape.head_dim));
        let inner = shape.intermediate * shape.experts_per_token;
        let is_kept = processor == Processor::Gpu && shape.intermediate <= KEPT_ACTIVATION_WIDTH;
        let feed_forward = match (shape.gated, shape.experts_per_token) {
            _ if chunk.is_some() => 0,
            (false, _) => inner * if is_kept { 2 } else { 1 },
            (true, 1) => inner * if is_kept || shape.packed_gate { 3 } else { 2 },
            (true, experts) => 2 * inner + expert_rows(shape) * experts * shape.hidden,
        };
        let matrix = if keeps_attention_matrix { shape.heads.saturating_mul(sequence_length) } else { 0 };
        let is_rebuilt = shape.hidden >= REBUILT_WIDTH;
        let stream_copies = if is_rebuilt { shape.stream_copies - NORMS } else { shape.stream_copies };
        let elements =
            (stream_copies * shape.hidden + 2 * query + 2 * key + feed_forward).saturating_add(matrix);
        // Two norms with a mean and a deviation each.
        let statistics = F32_BYTES * (shape.heads + 4);
        let bytes = |elements: u64| elements.saturating_mul(width).saturating_mul(tokens);
        // The final norm's sum and result, and the gradient of that result; losses, statistics, ids and targets.
        let around_the_loss =
            bytes(3 * shape.hidden).saturating_add(tokens.saturating_mul(3 * F32_BYTES + 2 * ID_BYTES));
        let logits = logits(shape, width, tokens, processor);
        // The gradient of the stream, and its copy behind dropout; the inner gradient, which goes through the activation in
        // place, as those of gate and up take their places. Of experts, the gradients of their results, unless those are kept
        // and make way; when these are done with, the tokens that are copied to them again and the gradients of these. In
        // chunks, what is not saved comes to that.
        let backward = match chunk {
            None if shape.experts_per_token > 1 => {
                let copied = shape.experts_per_token * shape.hidden;
                let results = if expert_rows(shape) == 0 { copied } else { 0 };
                bytes(2 * shape.hidden + results + inner.max(copied))
            }
            None => bytes(2 * shape.hidden + inner),
            Some(chunk) => {
                let of_chunk = (inner * if shape.gated { 3 } else { 2 }).saturating_mul(width * chunk);
                // So little that the gradients of attention may be more, when those of the feed-forward half are done.
                let of_attention = bytes((2 * query + 2 * key).saturating_sub(shape.hidden));
                bytes(2 * shape.hidden).saturating_add(of_chunk).max(of_attention)
            }
        };
        ActivationBytes {
            layer_input: bytes(shape.hidden),
            layer: bytes(elements).saturating_add(statistics.saturating_mul(tokens)),
            loss: around_the_loss.saturating_add(logits),
            logits,
            backward,
            put_off: bytes(4 * shape.hidden + 2 * query + 2 * key + inner * if shape.gated { 3 } else { 2 }),
        }
    }

    /// All layers keep everything.
    pub(crate) fn kept(&self, layers: u64) -> u64 {
        self.layer.saturating_mul(layers).saturating_add(self.loss.max(self.backward))
    }

    /// Layers keep their inputs; one at a time is run again.
    pub(crate) fn checkpointed(&self, layers: u64) -> u64 {
        self.layer_input.saturating_mul(layers).saturating_add(self.recomputed())
    }

    /// What is held beyond the layers' inputs when they are all that layers keep.
    pub(crate) fn recomputed(&self) -> u64 {
        self.loss.max(self.layer.saturating_add(self.backward))
    }
}

/// What comes and goes beside activations: gradients on their way, and operands that a host cuts into tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PassingBytes {
    /// While the loss is taken: the gradient of the head adds up in f32.
    pub(crate) at_loss: u64,
    /// When that becomes a gradient of the model's type.
    pub(crate) after_loss: u64,
    /// In backward of a layer: a weight's gradient, and operands in tiles.
    pub(crate) in_backward: u64,
    /// Of that, operands in tiles.
    layer_tiles: u64,
    /// The gradient of a table that its second use has still to add to.
    waiting: u64,
    /// The gradient of a table.
    pub(crate) table: u64,
}

impl PassingBytes {
    /// `operands` says what products copy first, `in_place` that gradients are made where they stay; feed-forward layers take
    /// `chunk` of the tokens at a time, or all.
    pub(crate) fn of(
        shape: &Transformer,
        width: u64,
        tokens: u64,
        chunk: Option<u64>,
        processor: Processor,
        operands: Operands,
        in_place: bool,
    ) -> PassingBytes {
        let table = shape.vocab.saturating_mul(shape.hidden);
        let (summed, given) = (table.saturating_mul(F32_BYTES), table.saturating_mul(width));
        let [query, key] = [shape.heads, shape.kv_heads].map(|heads| heads.saturating_mul(shape.head_dim));
        let widest = shape.intermediate.max(query + 2 * key).max(shape.hidden);
        let rows = loss_rows(shape, width, tokens, processor);
        let tiles = |lines: u64, other: u64, depth: u64| match (operands, width) {
            (Operands::InPlace, _) | (Operands::Widened, F32_BYTES) => 0,
            (Operands::Widened, _) => widened(lines, other, depth),
            (Operands::InTiles, F32_BYTES) => f32_tiles(lines, other, depth),
            (Operands::InTiles, _) => narrow_tiles(lines, other, depth),
        };
        let logits_tiles = tiles(shape.vocab, shape.hidden, rows);
        let attention = (query + 2 * key).max(shape.hidden);
        let layer_tiles = match chunk {
            None => tiles(widest, shape.hidden, tokens),
            Some(chunk) => {
                tiles(attention, shape.hidden, tokens).max(tiles(shape.intermediate, shape.hidden, chunk))
            }
        };
        // Chunks add to the gradients of all weights of a feed-forward layer, in f32.
        let weight_gradients = match chunk {
            // Those of a mixture's experts come together.
            None if !in_place && shape.experts > 0 => shape.expert_params.saturating_mul(width),
            None => shape.hidden.saturating_mul(widest * width),
            Some(_) => {
                let layers = if shape.gated { 3 } else { 2 };
                let rounded = if width == F32_BYTES { 0 } else { width };
                shape.hidden.saturating_mul(shape.intermediate).saturating_mul(layers * F32_BYTES + rounded)
            }
        };
        let waiting = if shape.tied_head { given } else { 0 };
        PassingBytes {
            at_loss: if shape.keeps_logits { layer_tiles } else { summed.saturating_add(logits_tiles) },
            after_loss: if width == F32_BYTES { summed } else { summed.saturating_add(given) },
            in_backward: weight_gradients.saturating_add(layer_tiles),
            layer_tiles,
            waiting,
            table: given,
        }
    }

    /// The most that activations and all this take together, where layers keep `held` bytes and one of them is run again in
    /// `again`.
    pub(crate) fn peak(&self, activations: &ActivationBytes, held: u64, again: u64) -> u64 {
        let at_loss = activations.loss.saturating_add(self.at_loss);
        let after_loss = (activations.loss - activations.logits).saturating_add(self.after_loss);
        let in_backward = again.saturating_add(activations.backward);
        let in_backward = in_backward.saturating_add(self.waiting).saturating_add(self.in_backward);
        held.saturating_add(at_loss.max(after_loss).max(in_backward))
    }

    /// The most that gradients take which stay where backward makes them, with the activations of the layer it comes to last.
    pub(crate) fn end(&self, activations: &ActivationBytes, gradients: u64, of_layer: u64) -> u64 {
        let layer = activations.layer.saturating_add(activations.backward).saturating_add(self.layer_tiles);
        gradients.saturating_sub(of_layer / 2).saturating_add(layer).max(gradients)
    }
}

/// Bytes of the left operand of a product in tiles: a gradient of `lines` × `other`, over so many tokens.
fn narrow_tiles(lines: u64, other: u64, depth: u64) -> u64 {
    let depth = depth.next_multiple_of(TILE_LINES);
    let right = if lines > SHARED_ROWS { other.next_multiple_of(TILE_LINES) } else { 0 };
    2 * (lines.next_multiple_of(TILE_LINES) + right).saturating_mul(depth)
}

/// Bytes of both operands in f32, of a layer's gradient over so many tokens or of the product of those with the weights.
fn widened(lines: u64, other: u64, depth: u64) -> u64 {
    let weights = lines.saturating_mul(other).saturating_add(lines.max(other).saturating_mul(depth));
    weights.max((lines + other).saturating_mul(depth)).saturating_mul(F32_BYTES)
}

/// The left operand in tiles for f32, which is three numbers of two bytes each and goes on in parts; small products do without.
fn f32_tiles(lines: u64, other: u64, depth: u64) -> u64 {
    if lines.min(other).min(depth) < SPLIT_LEAST {
        return 0;
    }
    let depth = depth.div_ceil(depth.div_ceil(SPLIT_DEPTH)).max(1);
    let lines = (SPLIT_ELEMENTS / depth).next_multiple_of(SPLIT_ROWS).min(lines);
    6 * lines.next_multiple_of(TILE_LINES).saturating_mul(depth.next_multiple_of(TILE_LINES))
}

/// The logits that are held at once, and their gradient where it needs a copy in the training precision.
fn logits(shape: &Transformer, width: u64, tokens: u64, processor: Processor) -> u64 {
    if shape.keeps_logits {
        // In the training precision, in f32 for the loss, and their gradient.
        return tokens.saturating_mul(shape.vocab).saturating_mul(2 * width + F32_BYTES);
    }
    let held = held_logit_bytes(width, processor);
    let narrow = if width < held { width } else { 0 };
    loss_rows(shape, width, tokens, processor).saturating_mul(shape.vocab).saturating_mul(held + narrow)
}

/// A GPU holds them in the training precision.
fn held_logit_bytes(width: u64, processor: Processor) -> u64 {
    if processor == Processor::Gpu { width } else { F32_BYTES }
}

/// Rows of logits that a fused loss holds at once.
fn loss_rows(shape: &Transformer, width: u64, tokens: u64, processor: Processor) -> u64 {
    let held = held_logit_bytes(width, processor);
    let most =
        processor.loss_rows(shape.vocab * held).clamp(LOSS_CHUNK_MIN_ROWS, tokens.max(LOSS_CHUNK_MIN_ROWS));
    let rows = tokens.div_ceil(tokens.div_ceil(most).max(1)).next_multiple_of(LOSS_CHUNK_MIN_ROWS);
    rows.min(tokens)
}

#[cfg(test)]
mod tests {
    use ferrospeed_models::decoder::MlpChunks;

    #[test]
    fn chunks_are_those_of_the_models() {
        let config = serde_json::json!({
            "model_type": "llama", "vocab_size": 100, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 1, "max_position_embeddings": 64, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        });
        let shape = crate::model::from_hugging_face(&config).unwrap();
        for tokens in [1u64, 100, 101, 8192, 65_535, 65_536, 1 << 20] {
            for (asked, chunks) in [
                (None, MlpChunks::Automatic),
                (Some(0), MlpChunks::Whole),
                (Some(100), MlpChunks::Tokens(100)),
            ] {
                let count = tokens as usize;
                for (again, expected) in [(false, chunks.of(count)), (true, chunks.of_checkpointed(count))] {
                    let planned = super::mlp_chunk(asked, &shape, tokens, again);
                    assert_eq!(planned, expected.map(|chunk| chunk as u64), "{asked:?} {tokens} {again}");
                }
            }
        }
    }

    #[test]
    fn the_widths_are_the_tensor_cores() {
        assert_eq!(super::REBUILT_WIDTH as usize, ferrospeed_tensor::ops::REBUILT_WIDTH);
        assert_eq!(super::KEPT_ACTIVATION_WIDTH as usize, ferrospeed_cuda::KEPT_ACTIVATION_WIDTH);
    }

    #[test]
    fn the_loss_holds_as_many_rows_as_the_tensor_core_lets_it() {
        let device = ferrospeed_cpu::device();
        for row_bytes in [1, 1024, 4 * 8192, 4 * 50257, 4 * 262_144, 128 << 20] {
            let rows = device.backend().logits_rows(row_bytes);
            assert_eq!(
                super::Processor::Cpu.loss_rows(row_bytes as u64),
                rows as u64,
                "{row_bytes} bytes a row"
            );
        }
    }
}
