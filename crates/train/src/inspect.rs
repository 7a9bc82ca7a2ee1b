//! Samples as a model sees them, without training on them: what `ferrospeed data inspect` shows.

use std::path::Path;

use ferrospeed_data::{Codec, Counted, DataError, SampleKind, Source};

use crate::error::{Result, TrainError};
use crate::prepare::samples_of;
use crate::recipe::Recipe;

/// What the samples of a recipe are.
#[derive(Debug, Clone)]
pub struct Inspection {
    /// Their kind.
    pub kind: SampleKind,
    /// The first of them.
    pub shown: Vec<Shown>,
    /// How many tokens each has.
    pub lengths: Vec<u64>,
    /// What becomes of them in sequences of so many tokens.
    pub counted: Counted,
    /// Tokens of a sequence.
    pub sequence: u64,
    /// What becomes of those that are longer.
    pub too_long: &'static str,
}

/// A sample, in stretches that are learnt or not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shown {
    /// The text of each stretch, its special tokens included, and whether it is learnt.
    pub stretches: Vec<(String, bool)>,
    /// Its tokens, and how many of them are learnt.
    pub tokens: [usize; 2],
}

/// Looks at all samples of a recipe, and keeps the first `count` to be shown.
pub fn inspect(recipe: &Recipe, path: &Path, count: usize) -> Result<Inspection> {
    let refuse = |problem: String| TrainError::Recipe { path: path.to_path_buf(), problems: vec![problem] };
    let (source, codec) = samples_of(recipe).map_err(refuse)?;
    let Source::Samples(samples) = source else {
        return Err(refuse(
            "data: only samples (data.samples) are shown; all tokens of other data are learnt".into(),
        ));
    };
    let (mut shown, mut lengths, mut failed) = (Vec::new(), Vec::new(), None);
    let counted = samples.inspect(&codec, &mut |sample| {
        lengths.push(sample.tokens.len() as u64);
        if shown.len() < count && failed.is_none() {
            match stretches(&codec, &sample.tokens, &sample.trained) {
                Ok(stretches) => {
                    let learnt = sample.trained.iter().filter(|&&trained| trained).count();
                    shown.push(Shown { stretches, tokens: [sample.tokens.len(), learnt] });
                }
                Err(error) => failed = Some(error),
            }
        }
    })?;
    match failed {
        Some(error) => Err(error.into()),
        None => Ok(Inspection {
            kind: samples.kind()?,
            shown,
            lengths,
            counted,
            sequence: samples.length,
            too_long: samples.too_long.name(),
        }),
    }
}

fn stretches(codec: &Codec, tokens: &[u32], trained: &[bool]) -> Result<Vec<(String, bool)>, DataError> {
    let pairs: Vec<(i64, bool)> =
        tokens.iter().map(|&token| token.into()).zip(trained.iter().copied()).collect();
    let runs = pairs.chunk_by(|one, next| one.1 == next.1);
    runs.map(|run| {
        let ids: Vec<i64> = run.iter().map(|(id, _)| *id).collect();
        Ok((codec.decode_all(&ids)?, run[0].1))
    })
    .collect()
}
