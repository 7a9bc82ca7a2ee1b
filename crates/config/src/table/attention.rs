//! `sparse_attention`: the keys depend on the mode.

use super::*;

const MODE: Key =
    key("mode", Kind::Text, "\"fixed\"", "The layout: dense, fixed, variable, bigbird or bslongformer.")
        .done();
const BLOCK: Key =
    key("block", POSITIVE_COUNT, "16", "Tokens of one block; the last of a sequence may be short.").done();
const PER_HEAD: Key = key(
    "different_layout_per_head",
    Kind::Bool,
    "false",
    "Give each head its own layout: other random blocks, or other global ones.",
)
.done();
const ATTENTION: Key = key(
    "attention",
    choice(&["bidirectional", "unidirectional"]),
    "\"bidirectional\"",
    "Whether a block sees later ones. Decoders never do: of a bidirectional layout they take the lower triangle.",
)
.done();
const HORIZONTAL: Key =
    key("horizontal_global_attention", Kind::Bool, "false", "Global blocks also see everything.").done();
const RANDOM: Key =
    key("num_random_blocks", COUNT, "0", "Random blocks per row, drawn from the run's seed for each layer.")
        .done();
const WINDOW: Key = key(
    "num_sliding_window_blocks",
    POSITIVE_COUNT,
    "3",
    "Width of the sliding window in blocks; an even one is as wide as the next odd one.",
)
.done();
const GLOBAL: Key = key(
    "num_global_blocks",
    COUNT,
    "1",
    "Global blocks: the first of the sequence, or the last of each window.",
)
.done();
const GLOBAL_INDICES: Key =
    key("global_block_indices", COUNT_LIST, "[0]", "Which blocks are global, or where each range starts.")
        .done();
const GLOBAL_ENDS: Key =
    key("global_block_end_indices", COUNT_LIST, "null", "Where each range of global blocks ends.").done();

const FIXED: &[Key] = &[
    MODE,
    BLOCK,
    PER_HEAD,
    key("num_local_blocks", POSITIVE_COUNT, "4", "Width of the local window in blocks.").done(),
    GLOBAL,
    ATTENTION,
    HORIZONTAL,
    key("num_different_global_patterns", POSITIVE_COUNT, "1", "Different global patterns over the heads.")
        .done(),
];
const VARIABLE: &[Key] = &[
    MODE,
    BLOCK,
    PER_HEAD,
    RANDOM,
    key(
        "local_window_blocks",
        Kind::List { item: &POSITIVE_COUNT, length: None },
        "[4]",
        "Widths of the local windows in turn; the last one again and again.",
    )
    .done(),
    GLOBAL_INDICES,
    GLOBAL_ENDS,
    ATTENTION,
    HORIZONTAL,
];
const BIGBIRD: &[Key] = &[MODE, BLOCK, PER_HEAD, RANDOM, WINDOW, GLOBAL, ATTENTION];
const LONGFORMER: &[Key] = &[MODE, BLOCK, PER_HEAD, WINDOW, GLOBAL_INDICES, GLOBAL_ENDS, ATTENTION];

const fn mode(tag: &'static str, keys: &'static [Key]) -> Variant {
    Variant { tag, keys: Some(keys), status: Status::Implemented }
}

/// `sparse_attention`.
pub(super) const SPARSE_ATTENTION: Kind = Kind::Variants {
    tag: Tag::Within("mode", "fixed"),
    variants: &[
        mode("fixed", FIXED),
        mode("dense", &[MODE, BLOCK]),
        mode("variable", VARIABLE),
        mode("bigbird", BIGBIRD),
        mode("bslongformer", LONGFORMER),
    ],
};
