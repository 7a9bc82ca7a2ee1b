//! Samples laid into sequences of one length, so that none is cut: each goes into the fullest of some open sequences that has
//! room for it. What is left of a sequence is filled with tokens that are not learnt.
//!
//! The order is a function of the samples alone: what comes first is put away first, and of sequences with the same room the
//! oldest is taken.

use ferrospeed_text::Sample;
use serde::{Deserialize, Serialize};

use crate::error::Result;

/// What becomes of a sample that is longer than a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TooLong {
    /// Its end is left out.
    #[default]
    Cut,
    /// It is left out.
    Drop,
    /// It becomes several, each as long as a sequence.
    Split,
}

impl TooLong {
    /// As it is written in recipes.
    pub fn of_name(name: &str) -> Option<TooLong> {
        [TooLong::Cut, TooLong::Drop, TooLong::Split].into_iter().find(|way| way.name() == name)
    }

    /// The same word.
    pub fn name(self) -> &'static str {
        match self {
            TooLong::Cut => "cut",
            TooLong::Drop => "drop",
            TooLong::Split => "split",
        }
    }
}

/// What became of samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Counted {
    /// How many there were.
    pub samples: u64,
    /// Of those, longer than a sequence.
    pub too_long: u64,
    /// Left out: too long, or without a learnt token in what is left of them.
    pub dropped: u64,
    /// Tokens of samples that are trained on or shown.
    pub tokens: u64,
    /// Tokens that are learnt.
    pub trained: u64,
    /// Tokens that fill sequences.
    pub filling: u64,
}

/// Sequences that are open at a time.
const OPEN: usize = 256;

/// Takes finished sequences: their samples, all together and with what fills them one sequence long.
pub(crate) type Give<'a> = &'a mut dyn FnMut(&[Sample]) -> Result<()>;

/// Lays samples into sequences.
pub(crate) struct Packer {
    length: usize,
    too_long: TooLong,
    /// The token that fills.
    filling: u32,
    open: Vec<Open>,
    pub(crate) counted: Counted,
}

#[derive(Default)]
struct Open {
    samples: Vec<Sample>,
    tokens: usize,
}

impl Packer {
    pub(crate) fn new(length: u64, too_long: TooLong, filling: u32) -> Packer {
        Packer { length: length as usize, too_long, filling, open: Vec::new(), counted: Counted::default() }
    }

    pub(crate) fn add(&mut self, sample: Sample, give: Give<'_>) -> Result<()> {
        self.counted.samples += 1;
        if sample.tokens.len() <= self.length {
            return self.lay(sample, give);
        }
        self.counted.too_long += 1;
        let Sample { tokens, trained } = sample;
        let pieces = tokens.chunks(self.length).zip(trained.chunks(self.length));
        let piece =
            |(tokens, trained): (&[u32], &[bool])| Sample { tokens: tokens.into(), trained: trained.into() };
        let kept = match self.too_long {
            TooLong::Cut => 1,
            TooLong::Drop => 0,
            TooLong::Split => usize::MAX,
        };
        let pieces: Vec<Sample> = pieces.take(kept).map(piece).filter(Sample::learns).collect();
        if pieces.is_empty() {
            self.counted.dropped += 1;
        }
        pieces.into_iter().try_for_each(|piece| self.lay(piece, give))
    }

    fn lay(&mut self, sample: Sample, give: Give<'_>) -> Result<()> {
        if !sample.learns() {
            self.counted.dropped += 1;
            return Ok(());
        }
        self.counted.tokens += sample.tokens.len() as u64;
        // Nothing predicts the first one.
        self.counted.trained += sample.trained.iter().skip(1).filter(|&&trained| trained).count() as u64;
        let room = |open: &Open| (self.length - open.tokens).checked_sub(sample.tokens.len());
        let best = self.open.iter().enumerate().filter_map(|(at, open)| Some((room(open)?, at))).min();
        let at = best.map_or(self.open.len(), |(_, at)| at);
        if best.is_none() {
            self.open.push(Open::default());
        }
        self.open[at].tokens += sample.tokens.len();
        self.open[at].samples.push(sample);
        if self.open[at].tokens == self.length {
            let full = self.open.remove(at);
            self.close(full, give)?;
        } else if self.open.len() > OPEN {
            let fullest = (0..self.open.len()).max_by_key(|&at| (self.open[at].tokens, usize::MAX - at));
            let fullest = self.open.remove(fullest.unwrap_or(0));
            self.close(fullest, give)?;
        }
        Ok(())
    }

    fn close(&mut self, Open { mut samples, tokens }: Open, give: Give<'_>) -> Result<()> {
        let left = self.length - tokens;
        if left > 0 {
            samples.push(Sample { tokens: vec![self.filling; left], trained: vec![false; left] });
            self.counted.filling += left as u64;
        }
        give(&samples)
    }

    /// Gives what is open, and says what became of all.
    pub(crate) fn finish(&mut self, give: Give<'_>) -> Result<Counted> {
        for open in std::mem::take(&mut self.open) {
            self.close(open, give)?;
        }
        Ok(self.counted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(token: u32, count: usize, trained_from: usize) -> Sample {
        Sample { tokens: vec![token; count], trained: (0..count).map(|at| at >= trained_from).collect() }
    }

    fn packed(too_long: TooLong, samples: Vec<Sample>) -> (Vec<Vec<u32>>, Counted) {
        let (mut packer, mut out) = (Packer::new(6, too_long, 0), Vec::new());
        let mut give = |samples: &[Sample]| {
            out.push(samples.iter().flat_map(|sample| sample.tokens.clone()).collect());
            Ok(())
        };
        for sample in samples {
            packer.add(sample, &mut give).unwrap();
        }
        let counted = packer.finish(&mut give).unwrap();
        (out, counted)
    }

    #[test]
    fn samples_fill_sequences_and_none_is_cut_in_two() {
        let samples = [4, 3, 2, 3].iter().enumerate().map(|(at, &count)| sample(at as u32 + 1, count, 1));
        let (out, counted) = packed(TooLong::Cut, samples.collect());
        assert_eq!(out, [[1, 1, 1, 1, 3, 3], [2, 2, 2, 4, 4, 4]]);
        assert_eq!((counted.samples, counted.tokens, counted.trained, counted.filling), (4, 12, 8, 0));
    }

    #[test]
    fn what_is_too_long_is_cut_dropped_or_split_and_counted() {
        let samples = || vec![sample(1, 8, 5), sample(2, 9, 7), sample(3, 3, 1)];
        let (out, counted) = packed(TooLong::Cut, samples());
        assert_eq!(out, [[1; 6], [3, 3, 3, 0, 0, 0]]);
        // Of the second, what is learnt was cut off.
        assert_eq!((counted.too_long, counted.dropped, counted.filling), (2, 1, 3));
        let (out, counted) = packed(TooLong::Drop, samples());
        assert_eq!((out, counted.dropped), (vec![vec![3, 3, 3, 0, 0, 0]], 2));
        let (out, counted) = packed(TooLong::Split, samples());
        assert_eq!(out, [vec![1; 6], vec![1, 1, 2, 2, 2, 0], vec![3, 3, 3, 0, 0, 0]]);
        assert_eq!((counted.too_long, counted.dropped), (2, 0));
    }
}
