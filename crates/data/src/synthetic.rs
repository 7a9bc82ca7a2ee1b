//! Tokens made up on the spot, for trying a configuration without data.
//!
//! The stream is made of short stretches that count up, each from a start and by a step of its own: what comes next
//! can be told from the last two tokens, so a model that learns shows it, and a model that does not has a bug.

use crate::TokenStream;
use crate::error::{DataError, Result};
use crate::sampler::mix;

/// Tokens of one stretch.
const STRETCH: u64 = 32;
/// Steps are below this: few enough to be learnt in a few hundred steps.
const STEPS: u64 = 7;

/// A made-up stream; every token is a pure function of the seed and its position.
#[derive(Debug, Clone, Copy)]
pub struct Synthetic {
    tokens: u64,
    vocabulary: u64,
    seed: u64,
}

impl Synthetic {
    /// `tokens` ids below `vocabulary`, which is at least 2.
    pub fn new(tokens: u64, vocabulary: u64, seed: u64) -> Synthetic {
        // Ids are i64 where they are read.
        Synthetic { tokens, vocabulary: vocabulary.clamp(2, 1 << 32), seed }
    }
}

impl TokenStream for Synthetic {
    fn len(&self) -> u64 {
        self.tokens
    }

    fn vocabulary(&self) -> Option<u64> {
        Some(self.vocabulary)
    }

    fn read(&self, start: u64, out: &mut [i64]) -> Result<()> {
        let end = start.saturating_add(out.len() as u64);
        if end > self.tokens {
            return Err(DataError::OutOfRange { start, end, len: self.tokens });
        }
        for (out, token) in out.iter_mut().zip(start..) {
            let (stretch, within) = (token / STRETCH, token % STRETCH);
            let drawn = mix(self.seed ^ mix(stretch));
            let (first, step) = (drawn % self.vocabulary, 1 + (drawn >> 33) % STEPS);
            *out = ((first + step * within) % self.vocabulary) as i64;
        }
        Ok(())
    }

    fn place(&self, token: u64) -> String {
        format!("synthetic data: token {token}")
    }

    /// A stretch is a document.
    fn beginnings(&self, start: u64, count: u64) -> Result<Option<Vec<u64>>> {
        let end = start.saturating_add(count).min(self.tokens);
        Ok(Some((start / STRETCH + 1..end.div_ceil(STRETCH)).map(|stretch| stretch * STRETCH).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stream_is_a_function_of_seed_and_position_and_can_be_predicted() {
        let stream = Synthetic::new(10_000, 50, 3);
        let mut all = vec![0; 10_000];
        stream.read(0, &mut all).unwrap();
        let mut some = [0; 100];
        stream.read(777, &mut some).unwrap();
        assert_eq!(some, all[777..877]);
        assert!(all.iter().all(|token| (0..50).contains(token)));
        for stretch in all.chunks(32).filter(|stretch| stretch.len() == 32) {
            let step = (stretch[1] - stretch[0]).rem_euclid(50);
            assert!((1..=7).contains(&step));
            assert!(stretch.windows(2).all(|pair| (pair[1] - pair[0]).rem_euclid(50) == step));
        }
        let mut other = vec![0; 10_000];
        Synthetic::new(10_000, 50, 4).read(0, &mut other).unwrap();
        assert_ne!(all, other);
    }
}
