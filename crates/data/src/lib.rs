//! Token streams, and the order in which ranks see them.
//!
//! A [`TokenStream`] is a long row of token ids, wherever they come from. [`Sequences`] cuts it into equal sequences
//! and keeps some for validation. [`Sampler`] says which sequence is the n-th of the run: a pure function of the seed,
//! so that the order is the same on any number of ranks and a position is one number.

mod error;
mod sampler;
mod sequences;
mod text;

pub use error::{DataError, Result};
pub use sampler::{Position, Sampler};
pub use sequences::{Sequences, Split};
pub use text::ByteText;

/// A row of token ids.
pub trait TokenStream: Send + Sync {
    /// How many tokens there are.
    fn len(&self) -> u64;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Ids below this.
    fn vocabulary(&self) -> u64;

    /// Fills `out` with the tokens from `start` on.
    fn read(&self, start: u64, out: &mut [i64]) -> Result<()>;
}
