//! A stream cut into equal sequences, some of them kept for validation.

use std::sync::Arc;

use crate::TokenStream;
use crate::error::{DataError, Result};

/// Which part of the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// What is trained on.
    Train,
    /// What is only measured.
    Validation,
}

/// Sequences of one length. The last ones of the stream are the validation split.
#[derive(Clone)]
pub struct Sequences {
    stream: Arc<dyn TokenStream>,
    length: u64,
    train: u64,
    validation: u64,
}

impl Sequences {
    /// Cuts `stream` into sequences of `length` tokens and keeps the share `validation` of them.
    pub fn new(stream: Arc<dyn TokenStream>, length: u64, validation: f64) -> Result<Sequences> {
        let total = if length == 0 { 0 } else { stream.len() / length };
        let kept = if validation > 0.0 { ((total as f64 * validation).round() as u64).max(1) } else { 0 };
        let wanted = if validation > 0.0 { "a training and a validation sequence" } else { "a sequence" };
        if total <= kept {
            return Err(DataError::TooLittle { tokens: stream.len(), wanted, sequence: length });
        }
        Ok(Sequences { stream, length, train: total - kept, validation: kept })
    }

    /// How many sequences a split has.
    pub fn count(&self, split: Split) -> u64 {
        match split {
            Split::Train => self.train,
            Split::Validation => self.validation,
        }
    }

    /// Tokens per sequence.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Writes sequence `index` of a split to `out`.
    pub fn read(&self, split: Split, index: u64, out: &mut [i64]) -> Result<()> {
        let first = match split {
            Split::Train => 0,
            Split::Validation => self.train,
        };
        self.stream.read((first + index) * self.length, out)
    }
}
