//! Block-sparse attention: layouts in which a block of queries sees few blocks of keys.
//!
//! A [`Sparsity`] says a kind of layout by the keys of a `sparse_attention` section; a [`SparseAttention`] is one that makes sense,
//! and gives the [`BlockLayout`] of any length, which attention takes in its options. Random blocks follow from seed, layer, head
//! and row alone, so that ranks need not tell each other.
//!
//! ```
//! use ferrospeed_nn::sparse_attention::{Direction, LocalSlidingWindow, SparseAttention, Sparsity};
//! use ferrospeed_tensor::ops::{self, AttentionOptions};
//! use ferrospeed_tensor::{DType, Tensor};
//!
//! # fn main() -> ferrospeed_tensor::Result<()> {
//! let said = LocalSlidingWindow { attention: Direction::Unidirectional, ..Default::default() };
//! let window = SparseAttention::new(&Sparsity::LocalSlidingWindow(said))?;
//! let layout = window.layout(0..2, 64)?;
//! assert_eq!((layout.blocks(), layout.active(0)), (4, 7));
//!
//! let q = Tensor::zeros([1, 64, 2, 8], DType::F32, &ferrospeed_cpu::device())?;
//! let options = AttentionOptions { blocks: Some(layout), causal: true, ..Default::default() };
//! assert_eq!(ops::attention(&q, &q, &q, &options)?.sizes(), q.sizes());
//! # Ok(())
//! # }
//! ```

mod of_layer;
mod pattern;
mod sparsity;

pub use of_layer::LayerLayouts;
pub use sparsity::{BigBird, BsLongformer, Dense, Direction, Fixed, LocalSlidingWindow, Sparsity, Variable};

use std::num::NonZeroUsize;
use std::ops::Range;

use ferrospeed_tensor::{BlockLayout, Result, Tensor, TensorError};
use serde_json::Value;

use pattern::{Draw, Pattern};

/// Where the section stands, as messages name it.
const SECTION: &str = "sparse_attention";
const RANDOM: &str = "num_random_blocks";

/// A kind of layout whose numbers fit each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SparseAttention {
    block: NonZeroUsize,
    pattern: Pattern,
    direction: Direction,
    per_head: bool,
    /// The blocks that a row asks for, by the key that says so.
    wanted: Vec<(&'static str, usize)>,
    draw: Draw,
}

impl SparseAttention {
    /// Refuses what contradicts itself.
    pub fn new(said: &Sparsity) -> Result<SparseAttention> {
        use Direction::Bidirectional;
        let window = "num_sliding_window_blocks";
        let (block, direction, per_head, wanted, pattern) = match said {
            Sparsity::Dense(said) => (said.block, Bidirectional, false, Vec::new(), Ok(Pattern::dense())),
            Sparsity::Fixed(said) => {
                let per_head = said.different_layout_per_head;
                (said.block, said.attention, per_head, Vec::new(), Pattern::fixed(said))
            }
            Sparsity::Variable(said) => {
                let wanted = vec![(RANDOM, said.num_random_blocks)];
                let per_head = said.different_layout_per_head;
                (said.block, said.attention, per_head, wanted, Pattern::variable(said))
            }
            Sparsity::BigBird(said) => {
                let wanted = vec![
                    (window, said.num_sliding_window_blocks),
                    (RANDOM, said.num_random_blocks),
                    ("num_global_blocks", said.num_global_blocks),
                ];
                let per_head = said.different_layout_per_head;
                (said.block, said.attention, per_head, wanted, Pattern::big_bird(said))
            }
            Sparsity::BsLongformer(said) => {
                let wanted = vec![(window, said.num_sliding_window_blocks)];
                (said.block, said.attention, false, wanted, Pattern::longformer(said))
            }
            Sparsity::LocalSlidingWindow(said) => {
                let wanted = vec![(window, said.num_sliding_window_blocks)];
                (said.block, said.attention, false, wanted, Pattern::sliding_window(said))
            }
        };
        let pattern = pattern.map_err(refused)?;
        let per_head = per_head && pattern.differs_by_head();
        Ok(SparseAttention { block, pattern, direction, per_head, wanted, draw: Draw::default() })
    }

    /// From the section of a configuration; without a mode it is fixed.
    pub fn from_section(section: &Value) -> Result<SparseAttention> {
        let mut section = section.clone();
        if let Some(keys) = section.as_object_mut() {
            keys.entry("mode").or_insert_with(|| "fixed".into());
        }
        SparseAttention::new(&serde_json::from_value(section).map_err(|error| refused(error.to_string()))?)
    }

    /// The same with random blocks that follow from this seed.
    pub fn with_seed(mut self, seed: u64) -> SparseAttention {
        self.draw.seed = seed;
        self
    }

    /// The same with random blocks of a layer of its own.
    pub fn of_layer(mut self, layer: usize) -> SparseAttention {
        self.draw.layer = layer;
        self
    }

    /// Tokens of a block.
    pub fn block(&self) -> usize {
        self.block.get()
    }

    /// Whether later blocks are seen. Within a block that is a matter of [`causal`](ferrospeed_tensor::ops::AttentionOptions::causal).
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// The layout of some heads over `tokens` tokens; or why there is none: of a length that is no whole number of blocks, or that has
    /// fewer than a row asks for.
    pub fn layout(&self, heads: Range<usize>, tokens: usize) -> Result<BlockLayout> {
        let block = self.block();
        if !tokens.is_multiple_of(block) {
            return Err(refused(format!(
                "a sequence of {tokens} tokens is no whole number of blocks of {block}; pad it to {}, or choose another block",
                tokens.next_multiple_of(block)
            )));
        }
        let blocks = tokens / block;
        for (key, wanted) in &self.wanted {
            if *wanted > blocks {
                return Err(refused(format!(
                    "{key} is {wanted}, and {tokens} tokens are {blocks} blocks of {block}; take no more, smaller blocks, or longer sequences"
                )));
            }
        }
        Ok(self.build(heads, blocks))
    }

    /// The layout of some heads over any number of tokens. The last block may be short; a row that asks for more blocks than there
    /// are sees all of them.
    pub fn layout_of_any(&self, heads: Range<usize>, tokens: usize) -> BlockLayout {
        self.build(heads, tokens.div_ceil(self.block()))
    }

    fn build(&self, heads: Range<usize>, blocks: usize) -> BlockLayout {
        let squares = if self.per_head { heads.len() } else { 1 };
        let first = if self.per_head { heads.start } else { 0 };
        BlockLayout::new(self.block, blocks, squares, |head, row, columns| {
            self.pattern.row(first + head, row, columns, &self.draw);
        })
    }
}

/// A mask that keeps where it is not zero, as a bias that attention adds: zero there, minus infinity elsewhere.
pub fn bias_of_kept(mask: &Tensor) -> Result<Tensor> {
    let bias: Vec<f32> =
        mask.to_vec_f32()?.iter().map(|kept| if *kept == 0.0 { f32::NEG_INFINITY } else { 0.0 }).collect();
    Tensor::from_slice(&bias, *mask.shape(), mask.device())
}

fn refused(why: String) -> TensorError {
    TensorError::argument(SECTION, why)
}
