//! Sequences that several ranks share.
//!
//! Everything in a transformer but attention treats tokens one by one, so ranks can hold parts of a sequence and meet in
//! attention alone. There are two ways to meet there, [`SequenceMethod`]; which tokens a rank holds follows from the way
//! ([`SequencePart`]). A model is handed a [`SequenceParallel`], takes its part of the tokens, tells its attention layers
//! through [`crate::Visibility::sequence`], and averages its loss over the parts of all ranks.
//!
//! Dropout depends on where an element is in the whole, so parts lose what whole sequences would. For that, all ranks draw the
//! same keys: they start at the same [`ferrospeed_tensor::random::RandomState`].
//!
//! Refused: sequences with fewer tokens than there are parts, and decoding from a cache.

mod part;
mod ring;
mod ulysses;

pub use part::{SequenceMethod, SequenceParallel, SequencePart};
