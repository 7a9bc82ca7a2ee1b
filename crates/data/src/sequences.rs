//! A stream cut into equal sequences, some of them kept for validation.
//!
//! What is kept is spread evenly over the stream, so that both splits hold a bit of everything.

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

/// Sequences of one length.
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
        let total = stream.len().checked_div(length).unwrap_or(0);
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
        let place = self.place(split, index);
        self.stream.read(place * self.length, out)
    }

    /// Where a sequence of a split lies among all. Every `stride`-th is kept, until all that are wanted are.
    fn place(&self, split: Split, index: u64) -> u64 {
        if self.validation == 0 {
            return index;
        }
        let stride = (self.train + self.validation) / self.validation;
        match split {
            Split::Validation => (index + 1) * stride - 1,
            // Each stretch of `stride` loses its last one; what follows the last stretch is all for training.
            Split::Train => {
                index + if stride > 1 { (index / (stride - 1)).min(self.validation) } else { self.validation }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ByteText;

    #[test]
    fn the_splits_share_the_stream_without_overlap() {
        for (tokens, share) in [(10, 0.1), (100, 0.07), (97, 0.5), (33, 0.9), (7, 0.0)] {
            let stream: Vec<u8> = (0..tokens).collect();
            let sequences = Sequences::new(Arc::new(ByteText::from_bytes(stream)), 1, share).unwrap();
            let mut seen = Vec::new();
            for split in [Split::Train, Split::Validation] {
                for index in 0..sequences.count(split) {
                    let mut token = [0];
                    sequences.read(split, index, &mut token).unwrap();
                    seen.push(token[0] as u8);
                }
            }
            seen.sort_unstable();
            assert_eq!(seen, (0..tokens).collect::<Vec<u8>>(), "{tokens} tokens, share {share}");
        }
    }

    #[test]
    fn too_little_data_is_refused() {
        let stream = Arc::new(ByteText::from_bytes(vec![0; 10]));
        let error = Sequences::new(stream, 8, 0.5).err().unwrap().to_string();
        assert!(error.contains("10 tokens do not make a training and a validation sequence of 8"), "{error}");
    }
}
