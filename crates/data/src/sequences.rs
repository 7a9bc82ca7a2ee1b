//! A stream packed into equal sequences, some of them kept for validation.
//!
//! Documents follow one another without padding; a sequence may begin inside one. Where they are to be kept apart, a sequence
//! says which of its tokens are whose. What is kept is spread evenly over the stream, so that both splits hold a bit of
//! everything.

use std::sync::Arc;

use crate::TokenStream;
use crate::error::{DataError, Result};
use crate::fingerprint::Fingerprint;
use crate::samples::{Counted, Mark};

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
    /// A stream of its own for validation, where there is one.
    apart: Option<Arc<dyn TokenStream>>,
    length: u64,
    train: u64,
    validation: u64,
    /// Ids must be below this.
    vocabulary: u64,
    /// How documents are told apart, where they are.
    borders: Option<Borders>,
}

/// How documents are told apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Borders {
    /// The stream knows where each begins.
    Known,
    /// One ends with each such token.
    Behind(i64),
}

/// So many tokens of a stream are looked at by [`Sequences::check`], spread over it.
const CHECKED_TOKENS: u64 = 16 << 20;
/// Sequences of which documents are looked at.
const CHECKED_SEQUENCES: u64 = 64;
const CHECKED_BLOCK: u64 = 16 << 10;

/// How many sequences of `length` there are in so many tokens to train on, and to validate on where that is their share.
pub fn counts(tokens: u64, length: u64, share: f64) -> Result<(u64, u64)> {
    let total = tokens.checked_div(length).unwrap_or(0);
    let kept = if share > 0.0 { ((total as f64 * share).round() as u64).max(1) } else { 0 };
    let wanted = if share > 0.0 { "a training and a validation sequence" } else { "a sequence" };
    match total {
        0 => Err(DataError::TooLittle { tokens, wanted, sequence: length }),
        1 if kept > 0 => Err(DataError::TooLittle { tokens, wanted, sequence: length }),
        _ if total <= kept => Err(DataError::NothingToTrainOn { share, sequences: total, sequence: length }),
        _ => Ok((total - kept, kept)),
    }
}

impl Sequences {
    /// Cuts `stream` into sequences of `length` tokens and keeps the share `validation` of them.
    pub fn split(stream: Arc<dyn TokenStream>, length: u64, validation: f64) -> Result<Sequences> {
        let (train, validation) = counts(stream.len(), length, validation)?;
        let vocabulary = u64::MAX;
        Ok(Sequences { stream, apart: None, length, train, validation, vocabulary, borders: None })
    }

    /// Cuts two streams into sequences of `length` tokens: one to train on, one to validate on.
    pub fn apart(
        train: Arc<dyn TokenStream>,
        validation: Arc<dyn TokenStream>,
        length: u64,
    ) -> Result<Sequences> {
        let count = |stream: &Arc<dyn TokenStream>, wanted| match stream.len().checked_div(length) {
            None | Some(0) => Err(DataError::TooLittle { tokens: stream.len(), wanted, sequence: length }),
            Some(count) => Ok(count),
        };
        let trained = count(&train, "a training sequence")?;
        let validated = count(&validation, "a validation sequence")?;
        Ok(Sequences {
            stream: train,
            apart: Some(validation),
            length,
            train: trained,
            validation: validated,
            vocabulary: u64::MAX,
            borders: None,
        })
    }

    /// Tells documents apart from now on: where streams know their borders by those, else behind each `end_token`.
    pub fn by_documents(mut self, end_token: Option<i64>) -> Result<Sequences> {
        let knows =
            |stream: &Arc<dyn TokenStream>| -> Result<bool> { Ok(stream.beginnings(0, 0)?.is_some()) };
        let all_know = knows(&self.stream)? && self.apart.as_ref().map_or(Ok(true), knows)?;
        self.borders = match (all_know, end_token) {
            (true, _) => Some(Borders::Known),
            (false, Some(token)) => Some(Borders::Behind(token)),
            (false, None) => return Err(DataError::NoBorders),
        };
        Ok(self)
    }

    /// Refuses every token that is not below `vocabulary` from now on.
    pub fn within(mut self, vocabulary: u64) -> Sequences {
        self.vocabulary = vocabulary;
        self
    }

    /// Looks for tokens outside the vocabulary before training starts: at all of a small stream, and at blocks spread
    /// evenly over a large one. Every token is looked at again when it is read. Says the largest that was seen; a stream whose
    /// vocabulary is known is not looked at.
    pub fn check(&self) -> Result<Option<i64>> {
        let mut largest = None;
        for stream in [Some(&self.stream), self.apart.as_ref()].into_iter().flatten() {
            if stream.vocabulary().is_some_and(|known| known <= self.vocabulary) {
                continue;
            }
            let blocks = stream.len().div_ceil(CHECKED_BLOCK);
            let stride = blocks.div_ceil(CHECKED_TOKENS / CHECKED_BLOCK).max(1);
            let mut block = vec![0; CHECKED_BLOCK as usize];
            for index in (0..blocks).step_by(stride as usize) {
                let start = index * CHECKED_BLOCK;
                let count = CHECKED_BLOCK.min(stream.len() - start) as usize;
                self.read_from(stream, start, &mut block[..count])?;
                largest = largest.max(block[..count].iter().max().copied());
            }
        }
        self.check_documents(Split::Train, "to train on")?;
        self.check_documents(Split::Validation, "to validate on")?;
        Ok(largest)
    }

    /// What tells the tokens to train on from others, and those to validate on where they are apart: of a small stream all of
    /// them count, of a large one those of blocks spread evenly over it.
    pub fn fingerprints(&self) -> Result<(Fingerprint, Option<Fingerprint>)> {
        let validation = self.apart.as_deref().map(Fingerprint::of).transpose()?;
        Ok((Fingerprint::of(&*self.stream)?, validation))
    }

    /// Refuses data whose documents, in some sequences spread evenly over a split, have a token each.
    fn check_documents(&self, split: Split, what: &'static str) -> Result<()> {
        if let Some(Borders::Behind(token)) = self.borders
            && !u64::try_from(token).is_ok_and(|token| token < self.vocabulary)
        {
            return Err(DataError::NoSuchEnd { token, vocabulary: self.vocabulary });
        }
        let count = self.count(split);
        if self.borders.is_none() || count == 0 {
            return Ok(());
        }
        let mut tokens = vec![0; self.length as usize];
        for index in (0..count).step_by(count.div_ceil(CHECKED_SEQUENCES) as usize) {
            self.read(split, index, &mut tokens)?;
            let ends = self.documents(split, index, &tokens)?.unwrap_or_default();
            if ends.windows(2).any(|pair| pair[1] - pair[0] > 1) {
                return Ok(());
            }
        }
        Err(DataError::NothingToPredict { what })
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
        let (stream, start) = self.find(split, index);
        self.read_from(stream, start, out)
    }

    /// The cumulative lengths of the documents in sequence `index` of a split, of which these are the first tokens: 0, and
    /// where each ends. One that begins before the sequence or ends behind it counts with what is here. `None` where
    /// documents are not told apart.
    pub fn documents(&self, split: Split, index: u64, tokens: &[i64]) -> Result<Option<Vec<usize>>> {
        let (stream, start) = self.find(split, index);
        let inner: Vec<usize> = match self.borders {
            None => return Ok(None),
            Some(Borders::Known) => {
                let known = stream.beginnings(start, tokens.len() as u64)?.ok_or(DataError::NoBorders)?;
                known.into_iter().map(|token| (token - start) as usize).collect()
            }
            Some(Borders::Behind(end)) => {
                let before_last = &tokens[..tokens.len().saturating_sub(1)];
                let ends = before_last.iter().enumerate().filter(|(_, token)| **token == end);
                ends.map(|(place, _)| place + 1).collect()
            }
        };
        Ok(Some([&[0], &inner[..], &[tokens.len()]].concat()))
    }

    /// Of the first `count` tokens of a sequence, which are learnt; `None` where all are.
    pub fn trained(&self, split: Split, index: u64, count: usize) -> Result<Option<Vec<bool>>> {
        let marks = self.marks(split, index, count)?;
        Ok(marks.map(|marks| marks.into_iter().map(|mark| mark != Mark::Shown as u8).collect()))
    }

    /// Of the first `count` tokens of a sequence, what each is to the objective, as [`Mark`] numbers it; `None` where all are
    /// learnt.
    pub fn marks(&self, split: Split, index: u64, count: usize) -> Result<Option<Vec<u8>>> {
        let (stream, start) = self.find(split, index);
        stream.marks(start, count)
    }

    /// What became of the samples of each part of the data, where it is samples.
    pub fn counted(&self) -> Vec<Counted> {
        [Some(&self.stream), self.apart.as_ref()].into_iter().flatten().filter_map(|s| s.counted()).collect()
    }

    /// Where a sequence begins.
    fn find(&self, split: Split, index: u64) -> (&Arc<dyn TokenStream>, u64) {
        match (&self.apart, split) {
            (Some(validation), Split::Validation) => (validation, index * self.length),
            (Some(_), Split::Train) => (&self.stream, index * self.length),
            (None, _) => (&self.stream, self.place(split, index) * self.length),
        }
    }

    fn read_from(&self, stream: &Arc<dyn TokenStream>, start: u64, out: &mut [i64]) -> Result<()> {
        stream.read(start, out)?;
        let fits = |token: i64| u64::try_from(token).is_ok_and(|token| token < self.vocabulary);
        match out.iter().position(|&token| !fits(token)) {
            None => Ok(()),
            Some(index) => Err(DataError::TokenTooLarge {
                place: stream.place(start + index as u64),
                token: out[index],
                vocabulary: self.vocabulary,
            }),
        }
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
            let sequences = Sequences::split(Arc::new(ByteText::from_bytes(stream)), 1, share).unwrap();
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
        let error = Sequences::split(stream, 8, 0.5).err().unwrap().to_string();
        assert!(error.contains("10 tokens do not make a training and a validation sequence of 8"), "{error}");
        let stream = |count: usize| Arc::new(ByteText::from_bytes(vec![0; count]));
        let error = Sequences::apart(stream(10), stream(7), 8).err().unwrap().to_string();
        assert!(error.contains("7 tokens do not make a validation sequence of 8"), "{error}");
    }

    #[test]
    fn a_validation_stream_of_its_own_is_read_apart() {
        let stream = |range: std::ops::Range<u8>| Arc::new(ByteText::from_bytes(range.collect()));
        let sequences = Sequences::apart(stream(0..9), stream(100..105), 2).unwrap();
        assert_eq!((sequences.count(Split::Train), sequences.count(Split::Validation)), (4, 2));
        let mut out = [0; 2];
        sequences.read(Split::Train, 3, &mut out).unwrap();
        assert_eq!(out, [6, 7]);
        sequences.read(Split::Validation, 1, &mut out).unwrap();
        assert_eq!(out, [102, 103]);
    }

    #[test]
    fn documents_are_told_apart_by_their_stream_or_by_their_end_token() {
        let made_up = Arc::new(crate::Synthetic::new(1000, 50, 1));
        let sequences = Sequences::split(made_up, 50, 0.0).unwrap();
        assert_eq!(sequences.documents(Split::Train, 0, &[0; 50]).unwrap(), None);
        let sequences = sequences.by_documents(None).unwrap();
        let of =
            |index, count: usize| sequences.documents(Split::Train, index, &vec![0; count]).unwrap().unwrap();
        assert_eq!((of(0, 50), of(1, 50)), (vec![0, 32, 50], vec![0, 14, 46, 50]));
        assert_eq!((of(1, 20), of(0, 32)), (vec![0, 14, 20], vec![0, 32]));
        let text = || Arc::new(ByteText::from_bytes(b"ab.c.....def".to_vec()));
        let sequences = Sequences::split(text(), 6, 0.0).unwrap();
        let error = sequences.clone().by_documents(None).err().unwrap().to_string();
        assert!(error.contains("data.end_token"), "{error}");
        let sequences = sequences.by_documents(Some(i64::from(b'.'))).unwrap();
        let of = |index| {
            let mut tokens = [0; 6];
            sequences.read(Split::Train, index, &mut tokens).unwrap();
            sequences.documents(Split::Train, index, &tokens).unwrap().unwrap()
        };
        assert_eq!((of(0), of(1)), (vec![0, 3, 5, 6], vec![0, 1, 2, 3, 6]));
    }

    #[test]
    fn documents_of_which_nothing_can_be_learnt_are_refused() {
        let text = |bytes: &[u8]| Arc::new(ByteText::from_bytes(bytes.to_vec()));
        let ended =
            |sequences: Sequences, end: u8| sequences.by_documents(Some(i64::from(end))).unwrap().check();
        let sequences = |bytes| Sequences::split(text(bytes), 4, 0.0).unwrap();
        assert!(
            ended(sequences(b"aaaaaaaaaaab"), b'a')
                .is_err_and(|error| error.to_string().contains("to train on"))
        );
        assert!(ended(sequences(b"aaaaaaaaaaab"), b'.').is_ok());
        let apart = Sequences::apart(text(b"abcdefgh"), text(b"aaaa"), 4).unwrap();
        assert!(ended(apart, b'a').is_err_and(|error| error.to_string().contains("to validate on")));
        let narrow = sequences(b"abababababab").within(100);
        assert!(
            ended(narrow, 120)
                .is_err_and(|error| error.to_string().contains("no token of a vocabulary of 100"))
        );
    }

    #[test]
    fn a_token_outside_the_vocabulary_is_named_with_its_place() {
        let mut bytes = vec![1; 100];
        bytes[37] = 200;
        let sequences = Sequences::split(Arc::new(ByteText::from_bytes(bytes)), 10, 0.0).unwrap().within(200);
        let expected = "byte 37 of a text in memory: token 200 does not fit a vocabulary of 200";
        for error in [sequences.check().map(drop), sequences.read(Split::Train, 3, &mut [0; 10])] {
            let error = error.unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
        assert!(sequences.read(Split::Train, 2, &mut [0; 10]).is_ok());
        assert_eq!(sequences.within(201).check().unwrap(), Some(200));
    }
}
