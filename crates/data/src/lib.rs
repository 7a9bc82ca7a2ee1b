//! Token streams, and the order in which ranks see them.
//!
//! A [`Source`] names data: text, JSON lines, Parquet, samples such as conversations, token files of nanoGPT and Megatron, or none at all. Opened, it
//! is a [`TokenStream`], a long row of token ids; text becomes one through a [`Codec`]. [`Sequences`] packs a stream
//! into equal sequences and keeps some for validation. [`Sampler`] says which sequence is the n-th of the run: a pure
//! function of the seed, so that the order is the same on any number of ranks and a position is one number. [`PoolSampler`] draws
//! from those that are easy enough for the step, by an index that [`analyze`] wrote.
//!
//! Data larger than memory is never held: text is read once, a piece at a time, into a token file, and token files
//! are read where the sequence lies.
//!
//! ```
//! use ferrospeed_data::{Codec, Position, Sampler, Sequences, Source, Split, unheard};
//!
//! let folder = tempfile::tempdir()?;
//! let file = folder.path().join("a.jsonl");
//! std::fs::write(&file, "{\"text\": \"to be or not\"}\n{\"text\": \"to be\"}\n")?;
//! let source = Source::JsonLines { paths: vec![file], field: "text".into() };
//! let stream = source.open(&Codec::Bytes, &folder.path().join("cache"), &mut unheard)?;
//! let sequences = Sequences::split(stream, 4, 0.25)?;
//!
//! let sampler = Sampler::new(sequences.count(Split::Train), 42);
//! let mut tokens = [0; 4];
//! for sequence in sampler.micro_batch(Position::default(), 0, 0, 1, 2) {
//!     sequences.read(Split::Train, sequence, &mut tokens)?;
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod cache;
mod difficulty;
mod documents;
mod ends;
mod error;
mod files;
mod fingerprint;
mod megatron;
mod new_file;
mod sampler;
mod samples;
mod sequences;
mod source;
mod stamp;
mod synthetic;
mod text;
mod token_file;

pub use cache::{Preparing, Tell, unheard};
pub use difficulty::{
    Admission, Analysis, IndexedData, Metric, MetricIndex, MetricSchedule, Pass, PoolSampler, Scale, analyze,
};
pub use error::{DataError, Result};
pub use ferrospeed_text::{Codec, FileTokenizer};
pub use fingerprint::Fingerprint;
pub use sampler::{Position, Sampler};
pub use samples::{Counted, Layout, Mark, Record, Rendering, SampleKind, TooLong, each_record};
pub use sequences::{Sequences, Split, counts};
pub use source::{SampleFiles, Source};
pub use synthetic::Synthetic;
pub use text::ByteText;
pub use token_file::{TokenFile, TokenType};

/// A row of token ids.
pub trait TokenStream: Send + Sync {
    /// How many tokens there are.
    fn len(&self) -> u64;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Ids are below this; `None` where only reading them tells.
    fn vocabulary(&self) -> Option<u64>;

    /// Fills `out` with the tokens from `start` on.
    fn read(&self, start: u64, out: &mut [i64]) -> Result<()>;

    /// Where token `token` lies, for messages.
    fn place(&self, token: u64) -> String;

    /// Where documents begin behind token `start` and before `start + count`; `None` where the stream does not know.
    fn beginnings(&self, _start: u64, _count: u64) -> Result<Option<Vec<u64>>> {
        Ok(None)
    }

    /// Of `count` tokens from `start` on, what each is to the objective, as [`Mark`] numbers it; `None` where all are learnt.
    fn marks(&self, _start: u64, _count: usize) -> Result<Option<Vec<u8>>> {
        Ok(None)
    }

    /// What became of the samples that it is made of, where it is.
    fn counted(&self) -> Option<Counted> {
        None
    }
}

#[cfg(test)]
extern crate self as ferrospeed_data;
#[cfg(test)]
#[path = "../tests/it/main.rs"]
mod it;
