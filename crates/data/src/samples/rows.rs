//! Two samples to a sequence: what is compared lies in one row, so that whoever has the one has the other.
//!
//! A row is twice as long as either may be: the first sample, the second, and what fills it, each a document of its own.

use ferrospeed_text::{Codec, Sample};
use serde_json::Value;

use super::kind::{Layout, SampleKind};
use super::pack::{Counted, TooLong};
use super::records::Record;
use super::render::Rendering;
use crate::error::{DataError, Result};

/// What a token is to the objective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Mark {
    /// It is only shown.
    Shown = 0,
    /// It is learnt, or preferred.
    Learnt = 1,
    /// It belongs to an answer that is not wanted.
    Rejected = 2,
    /// It belongs to another prompt's answer.
    Stranger = 3,
}

/// A document and what its learnt tokens are.
pub(crate) struct Marked {
    pub(crate) sample: Sample,
    pub(crate) mark: Mark,
}

/// Makes rows of records.
pub(crate) struct Rows<'a> {
    pub(crate) rendering: &'a Rendering,
    pub(crate) codec: &'a Codec,
    pub(crate) kind: SampleKind,
    /// Tokens of a row.
    pub(crate) length: u64,
    pub(crate) too_long: TooLong,
    /// The record before, of those whose completions are held against each other.
    before: Option<Value>,
    /// The first of them, which comes last: the record before it is the last.
    first: Option<(Value, std::path::PathBuf, String)>,
    pub(crate) counted: Counted,
}

impl<'a> Rows<'a> {
    pub(crate) fn new(
        rendering: &'a Rendering,
        codec: &'a Codec,
        kind: SampleKind,
        length: u64,
        too_long: TooLong,
    ) -> Rows<'a> {
        let (before, first, counted) = (None, None, Counted::default());
        Rows { rendering, codec, kind, length, too_long, before, first, counted }
    }

    /// The two samples of a record, or of those that it completes.
    pub(crate) fn add(&mut self, record: &Record<'_>) -> Result<Option<[Marked; 2]>> {
        let bad = |why: String| DataError::bad_place(record.path, record.place(), why);
        if self.kind.layout() == Layout::Pairs {
            let [chosen, rejected] = self.rendering.pair(&record.value, self.codec).map_err(bad)?;
            let marks = [(chosen, Mark::Learnt), (rejected, Mark::Rejected)];
            return Ok(Some(marks.map(|(sample, mark)| Marked { sample, mark })));
        }
        self.kind.expect(&record.value).map_err(bad)?;
        let Some(before) = self.before.replace(record.value.clone()) else {
            // Read now, so that what is wrong with it is told with its place.
            self.rendering.sample(self.kind, &record.value, self.codec).map_err(bad)?;
            self.first = Some((record.value.clone(), record.path.to_path_buf(), record.place()));
            return Ok(None);
        };
        self.judged(&record.value, &before).map(Some).map_err(bad)
    }

    /// The row that was kept for the end.
    pub(crate) fn last(&mut self) -> Result<Option<[Marked; 2]>> {
        let (Some((first, path, place)), Some(last)) = (self.first.take(), self.before.take()) else {
            return Ok(None);
        };
        if first == last {
            let why =
                "is the only record, and its completion is to be held against another's; give two or more";
            return Err(DataError::bad_place(&path, place, why));
        }
        self.judged(&first, &last).map(Some).map_err(|why| DataError::bad_place(&path, place, why))
    }

    fn judged(&self, record: &Value, before: &Value) -> Result<[Marked; 2], String> {
        let answer = self.rendering.sample(self.kind, record, self.codec)?;
        let stranger = self.rendering.crossed(record, before, self.codec)?;
        let mark = if record["label"] == true { Mark::Learnt } else { Mark::Rejected };
        Ok([Marked { sample: answer, mark }, Marked { sample: stranger, mark: Mark::Stranger }])
    }

    /// Fits two samples into a row: `None` where nothing is left to compare.
    pub(crate) fn fitted(&mut self, pair: [Marked; 2]) -> Option<[Marked; 2]> {
        let most = (self.length / 2) as usize;
        self.counted.samples += 1;
        let is_long = pair.iter().any(|marked| marked.sample.tokens.len() > most);
        self.counted.too_long += u64::from(is_long);
        let fits = !is_long || self.too_long != TooLong::Drop;
        let cut = |Marked { mut sample, mark }| {
            sample.tokens.truncate(most);
            sample.trained.truncate(most);
            Marked { sample, mark }
        };
        let pair = pair.map(cut);
        let [one, other] = &pair;
        let differ = one.sample != other.sample || self.kind.layout() == Layout::Judged;
        if !fits || !differ || pair.iter().any(|marked| !marked.sample.learns()) {
            self.counted.dropped += 1;
            return None;
        }
        for Marked { sample, .. } in &pair {
            self.counted.tokens += sample.tokens.len() as u64;
            self.counted.trained += sample.trained.iter().skip(1).filter(|&&trained| trained).count() as u64;
        }
        let taken: u64 = pair.iter().map(|marked| marked.sample.tokens.len() as u64).sum();
        self.counted.filling += self.length - taken;
        Some(pair)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrospeed_text::TrainOn;

    #[test]
    fn pairs_that_are_alike_or_lose_what_is_compared_are_left_out_and_counted() {
        let rendering = Rendering { template: None, train_on: TrainOn::Assistant };
        let mut rows = Rows::new(&rendering, &Codec::Bytes, SampleKind::Preference, 12, TooLong::Cut);
        let sample = |count: usize, from: usize, token: u32| Marked {
            sample: Sample { tokens: vec![token; count], trained: (0..count).map(|at| at >= from).collect() },
            mark: Mark::Learnt,
        };
        assert!(rows.fitted([sample(4, 2, 1), sample(4, 2, 2)]).is_some());
        assert!(rows.fitted([sample(4, 2, 1), sample(4, 2, 1)]).is_none(), "they are alike");
        assert!(rows.fitted([sample(9, 7, 1), sample(4, 2, 2)]).is_none(), "the answer was cut off");
        let cut = rows.fitted([sample(9, 2, 1), sample(4, 2, 2)]).unwrap();
        assert_eq!(cut[0].sample.tokens.len(), 6);
        let Counted { samples, too_long, dropped, filling, .. } = rows.counted;
        assert_eq!((samples, too_long, dropped, filling), (4, 2, 2, 4 + 2));
        rows.too_long = TooLong::Drop;
        assert!(rows.fitted([sample(9, 2, 1), sample(4, 2, 2)]).is_none());
    }
}
