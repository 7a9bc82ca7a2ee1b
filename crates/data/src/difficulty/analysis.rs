//! Measures how hard every sequence is and writes indexes, in one or two passes over the data.
//!
//! What is held does not grow with the data: a sequence, a count for each token of the vocabulary, and of each metric as many
//! difficulties as are sorted at a time.

use std::path::{Path, PathBuf};

use super::IndexedData;
use super::file::{Header, Holds, IndexWriter};
use super::index::MetricIndex;
use super::sort::{HELD_PAIRS, Sorter};
use crate::error::{DataError, Result};
use crate::sequences::{Sequences, Split};

/// What makes a sequence hard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Metric {
    /// `seqlen`: the tokens of its longest document, which is how far back a token may have to look.
    SequenceLength,
    /// `vocabularyrarity`: how rare its tokens are in the data, as thousandths of a nat per token: the mean of −ln(share of the
    /// token among all), times 1000 (Platanios et al., "Competence-based curriculum learning", 2019).
    VocabularyRarity,
}

impl Metric {
    /// All there are.
    pub const ALL: [Metric; 2] = [Metric::SequenceLength, Metric::VocabularyRarity];

    /// As commands and files call it.
    pub fn name(self) -> &'static str {
        match self {
            Metric::SequenceLength => "seqlen",
            Metric::VocabularyRarity => "vocabularyrarity",
        }
    }
}

/// An index that was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Analysis {
    /// Of which metric.
    pub metric: Metric,
    /// Its files: of sequences, of difficulties.
    pub files: [PathBuf; 2],
    /// How many sequences it is of.
    pub samples: u64,
    /// How many different difficulties they have.
    pub distinct: u64,
    /// The least difficulty, those that a tenth, a half and nine tenths of the sequences do not exceed, and the greatest.
    pub quantiles: [u64; 5],
}

/// The parts of a hundred that [`Analysis::quantiles`] stand for.
const QUANTILES: [u64; 5] = [0, 10, 50, 90, 100];
/// More tokens than any vocabulary has: a count of each is held.
const MAX_VOCABULARY: usize = 1 << 24;

/// Writes an index of each metric into a folder. `tell` hears how many sequences of how many were read, now and then. Of
/// [`Metric::SequenceLength`] the sequences have to know their documents ([`Sequences::by_documents`]).
pub fn analyze(
    sequences: &Sequences,
    metrics: &[Metric],
    folder: &Path,
    tell: &mut dyn FnMut(u64, u64),
) -> Result<Vec<Analysis>> {
    let of = IndexedData::of(sequences)?;
    ferrospeed_files::create_folder(folder).map_err(DataError::io(folder))?;
    let counts_tokens = metrics.contains(&Metric::VocabularyRarity);
    let passes = 1 + u64::from(counts_tokens);
    let mut tell = |pass: u64, done: u64| tell(pass * of.samples + done, passes * of.samples);
    let costs = match counts_tokens {
        true => token_costs(sequences, &mut |done| tell(0, done))?,
        false => Vec::new(),
    };
    let mut measures: Vec<Measured> = metrics.iter().map(|&metric| Measured::new(metric, folder)).collect();
    each_sequence(sequences, &mut |done| tell(passes - 1, done), |sample, tokens| {
        measures.iter_mut().try_for_each(|measured| {
            let difficulty = match measured.metric {
                Metric::SequenceLength => longest_document(sequences, sample, tokens)?,
                Metric::VocabularyRarity => rarity(&costs, tokens),
            };
            measured.take(difficulty, sample)
        })
    })?;
    measures.into_iter().map(|measured| measured.write(of)).collect()
}

fn each_sequence(
    sequences: &Sequences,
    tell: &mut dyn FnMut(u64),
    mut take: impl FnMut(u64, &[i64]) -> Result<()>,
) -> Result<()> {
    const TELL_EVERY: u64 = 4096;
    let mut tokens = vec![0; sequences.length() as usize];
    for sample in 0..sequences.count(Split::Train) {
        sequences.read(Split::Train, sample, &mut tokens)?;
        take(sample, &tokens)?;
        if (sample + 1).is_multiple_of(TELL_EVERY) {
            tell(sample + 1);
        }
    }
    Ok(())
}

/// What a token of each id costs, in millionths of a nat: −ln of its share.
fn token_costs(sequences: &Sequences, tell: &mut dyn FnMut(u64)) -> Result<Vec<u64>> {
    let mut counts: Vec<u64> = Vec::new();
    each_sequence(sequences, tell, |sample, tokens| {
        for &token in tokens {
            let id = usize::try_from(token).ok().filter(|&id| id < MAX_VOCABULARY);
            let id = id.ok_or_else(|| DataError::TokenTooLarge {
                place: format!("sequence {sample}"),
                token,
                vocabulary: MAX_VOCABULARY as u64,
            })?;
            if id >= counts.len() {
                counts.resize(id + 1, 0);
            }
            counts[id] += 1;
        }
        Ok(())
    })?;
    let all = counts.iter().sum::<u64>() as f64;
    let cost = |count: u64| (-(count as f64 / all).ln() * 1e6).round() as u64;
    // Nobody asks for the cost of a token that is not there.
    Ok(counts.into_iter().map(|count| if count > 0 { cost(count) } else { 0 }).collect())
}

fn rarity(costs: &[u64], tokens: &[i64]) -> u64 {
    let cost = |token: &i64| usize::try_from(*token).ok().and_then(|id| costs.get(id)).copied().unwrap_or(0);
    let sum: u64 = tokens.iter().map(cost).sum();
    sum / (1000 * tokens.len().max(1) as u64)
}

fn longest_document(sequences: &Sequences, sample: u64, tokens: &[i64]) -> Result<u64> {
    let ends = sequences.documents(Split::Train, sample, tokens)?.ok_or(DataError::NoBorders)?;
    Ok(ends.windows(2).map(|pair| (pair[1] - pair[0]) as u64).max().unwrap_or(0))
}

/// The difficulties of a metric, as they come.
struct Measured {
    metric: Metric,
    files: [PathBuf; 2],
    sorter: Sorter,
    sum: crc32fast::Hasher,
}

impl Measured {
    fn new(metric: Metric, folder: &Path) -> Measured {
        let files = MetricIndex::files(folder, metric.name());
        Measured { metric, files, sorter: Sorter::new(HELD_PAIRS), sum: crc32fast::Hasher::new() }
    }

    fn take(&mut self, difficulty: u64, sample: u64) -> Result<()> {
        self.sum.update(&difficulty.to_le_bytes());
        let number = u32::try_from(sample).map_err(|_| DataError::TooManySequences { sequences: sample })?;
        self.sorter.push((difficulty, number), &self.files[0])
    }

    fn write(self, of: IndexedData) -> Result<Analysis> {
        let Measured { metric, files, sorter, sum } = self;
        let values = sum.finalize();
        let writer = |holds: Holds, path: &Path| {
            IndexWriter::new(path, &Header { holds, metric: metric.name().to_owned(), values, of })
        };
        let mut samples = writer(Holds::Samples, &files[0])?;
        let mut difficulties = writer(Holds::Difficulties, &files[1])?;
        let mut row: Option<(u64, u64)> = None;
        let mut write_row = |(difficulty, end): (u64, u64)| {
            difficulties.write(&[difficulty.to_le_bytes(), end.to_le_bytes()].concat())
        };
        let (mut distinct, mut quantiles, mut place) = (0, [0; 5], 0);
        let marks = QUANTILES.map(|part| ((u128::from(of.samples) - 1) * u128::from(part) / 100) as u64);
        sorter.finish(|(difficulty, sample)| {
            samples.write(&sample.to_le_bytes())?;
            if row.is_none_or(|(same, _)| same != difficulty) {
                row.map_or(Ok(()), &mut write_row)?;
                distinct += 1;
            }
            let is_mark = |mark: &(&mut u64, u64)| mark.1 == place;
            quantiles.iter_mut().zip(marks).filter(is_mark).for_each(|(quantile, _)| *quantile = difficulty);
            place += 1;
            row = Some((difficulty, place));
            Ok(())
        })?;
        row.map_or(Ok(()), &mut write_row)?;
        samples.finish()?;
        difficulties.finish()?;
        Ok(Analysis { metric, files, samples: of.samples, distinct, quantiles })
    }
}
