//! What a `sparse_attention` section says, key by key: not yet checked. [`SparseAttention::new`](super::SparseAttention::new)
//! refuses what contradicts itself.

use std::num::NonZeroUsize;

use serde::Deserialize;

/// A kind of layout and its numbers, by the names that they have in a configuration. Numbers count blocks.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(tag = "mode", rename_all = "lowercase")]
pub enum Sparsity {
    /// Everybody sees everybody.
    Dense(Dense),
    /// Windows, and in each some blocks that all see (Child et al., "Generating Long Sequences with Sparse Transformers", 2019).
    Fixed(Fixed),
    /// Windows of several widths, blocks that all see, and random ones.
    Variable(Variable),
    /// A sliding window, the first blocks, and random ones (Zaheer et al., "Big Bird: Transformers for Longer Sequences", 2020).
    BigBird(BigBird),
    /// A sliding window and blocks that see and are seen by all (Beltagy, Peters, Cohan, "Longformer", 2020), in blocks.
    BsLongformer(BsLongformer),
    /// A sliding window alone.
    LocalSlidingWindow(LocalSlidingWindow),
}

/// Whether a token sees those after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// It sees both sides.
    Bidirectional,
    /// It sees itself and those before it.
    Unidirectional,
}

/// Tokens of a block where nothing else is said.
const BLOCK: NonZeroUsize = NonZeroUsize::new(16).unwrap();

/// A section with its defaults.
macro_rules! section {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $kind:ty = $default:expr,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $kind,)*
        }

        impl Default for $name {
            fn default() -> $name {
                $name { $($field: $default,)* }
            }
        }
    };
}

section! {
    /// See [`Sparsity::Dense`].
    Dense {
        /// Tokens of a block.
        block: NonZeroUsize = BLOCK,
    }
}

section! {
    /// See [`Sparsity::Fixed`].
    Fixed {
        /// Tokens of a block.
        block: NonZeroUsize = BLOCK,
        /// Whether heads have layouts of their own.
        different_layout_per_head: bool = false,
        /// The width of a window.
        num_local_blocks: usize = 4,
        /// How many blocks of each window all see.
        num_global_blocks: usize = 1,
        /// Whether later tokens are seen.
        attention: Direction = Direction::Bidirectional,
        /// Whether those blocks also see all.
        horizontal_global_attention: bool = false,
        /// How many heads in turn have other blocks of a window that all see.
        num_different_global_patterns: usize = 1,
    }
}

section! {
    /// See [`Sparsity::Variable`].
    Variable {
        /// Tokens of a block.
        block: NonZeroUsize = BLOCK,
        /// Whether heads have random blocks of their own.
        different_layout_per_head: bool = false,
        /// Random blocks of each row.
        num_random_blocks: usize = 0,
        /// The widths of the windows in turn; the last one holds for all that follow.
        local_window_blocks: Vec<usize> = vec![4],
        /// The blocks that all see, or where ranges of them begin.
        global_block_indices: Vec<usize> = vec![0],
        /// Where those ranges end.
        global_block_end_indices: Option<Vec<usize>> = None,
        /// Whether later tokens are seen.
        attention: Direction = Direction::Bidirectional,
        /// Whether those blocks also see all.
        horizontal_global_attention: bool = false,
    }
}

section! {
    /// See [`Sparsity::BigBird`].
    BigBird {
        /// Tokens of a block.
        block: NonZeroUsize = BLOCK,
        /// Whether heads have random blocks of their own.
        different_layout_per_head: bool = false,
        /// Random blocks of each row.
        num_random_blocks: usize = 0,
        /// The width of the sliding window; an even one is as wide as the next odd one.
        num_sliding_window_blocks: usize = 3,
        /// How many first blocks see and are seen by all.
        num_global_blocks: usize = 1,
        /// Whether later tokens are seen.
        attention: Direction = Direction::Bidirectional,
    }
}

section! {
    /// See [`Sparsity::BsLongformer`].
    BsLongformer {
        /// Tokens of a block.
        block: NonZeroUsize = BLOCK,
        /// Whether heads have layouts of their own; nothing here differs between them.
        different_layout_per_head: bool = false,
        /// The width of the sliding window; an even one is as wide as the next odd one.
        num_sliding_window_blocks: usize = 3,
        /// The blocks that see and are seen by all, or where ranges of them begin.
        global_block_indices: Vec<usize> = vec![0],
        /// Where those ranges end.
        global_block_end_indices: Option<Vec<usize>> = None,
        /// Whether later tokens are seen.
        attention: Direction = Direction::Bidirectional,
    }
}

section! {
    /// See [`Sparsity::LocalSlidingWindow`].
    LocalSlidingWindow {
        /// Tokens of a block.
        block: NonZeroUsize = BLOCK,
        /// The width of the window; an even one is as wide as the next odd one.
        num_sliding_window_blocks: usize = 3,
        /// Whether later tokens are seen.
        attention: Direction = Direction::Unidirectional,
    }
}
