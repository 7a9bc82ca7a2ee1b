//! Sequences that several ranks share.
//!
//! Everything in a transformer but attention treats tokens one by one, so ranks can hold parts of a sequence and meet in
//! attention alone. There are two ways to meet there, [`SequenceMethod`]; which tokens a rank holds follows from the way
//! ([`SequencePart`]). A model is handed a [`SequenceParallel`], takes its part of the tokens, tells its attention layers
//! through [`crate::Visibility::sequence`], and averages its loss over the parts of all ranks.
//!
//! Refused: sequences with fewer tokens than there are parts, decoding from a cache, and dropout of attention weights.

mod part;
mod ring;
mod ulysses;

pub use part::{SequenceMethod, SequenceParallel, SequencePart};
