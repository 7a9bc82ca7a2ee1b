//! How many tokens the feed-forward layers of a decoder take at a time.

/// So many tokens at a time keep a device busy, and take little memory beside the rest of a long input.
const CHUNK_TOKENS: usize = 8192;
/// From so many tokens on, the inner values of a feed-forward layer are what a recomputed block mostly holds, while what it
/// costs to compute them once more is little beside attention.
const LONG_TOKENS: usize = 65_536;

/// What feed-forward layers take at a time. In chunks, their inner values are computed again in backward, and take memory for
/// one chunk instead of all tokens. Each token's values have the same bits either way, but for chunks of a single token, whose
/// products are another kernel's; gradients of weights are sums over tokens, which chunks add up in their order, in f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MlpChunks {
    /// Chunks of 8,192 tokens where blocks are computed again in backward anyway and the input has 65,536 tokens or more;
    /// else all tokens.
    #[default]
    Automatic,
    /// All tokens.
    Whole,
    /// At most so many tokens.
    Tokens(usize),
}

impl MlpChunks {
    /// Tokens of a chunk of an input, where it is cut.
    pub fn of(self, tokens: usize) -> Option<usize> {
        match self {
            MlpChunks::Tokens(most) if tokens > most => Some(most.max(1)),
            _ => None,
        }
    }

    /// The same where blocks are computed again in backward.
    pub fn of_checkpointed(self, tokens: usize) -> Option<usize> {
        match self {
            MlpChunks::Automatic if tokens >= LONG_TOKENS => Some(CHUNK_TOKENS),
            other => other.of(tokens),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::MlpChunks;

    #[test]
    fn long_inputs_of_recomputed_blocks_are_cut_by_themselves() {
        let automatic = MlpChunks::Automatic;
        assert_eq!(
            (automatic.of_checkpointed(65_535), automatic.of_checkpointed(65_536)),
            (None, Some(8192))
        );
        assert_eq!(automatic.of(1 << 20), None);
        assert_eq!(MlpChunks::Whole.of_checkpointed(1 << 20), None);
        assert_eq!((MlpChunks::Tokens(100).of(100), MlpChunks::Tokens(100).of(101)), (None, Some(100)));
        assert_eq!(MlpChunks::Tokens(100).of_checkpointed(101), Some(100));
    }
}
