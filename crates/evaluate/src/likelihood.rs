//! How likely a model holds texts: losses over the tokens that count.

use std::path::Path;
use std::sync::Arc;

use ferrospeed_data::{DataError, SampleFiles, Source, TokenStream, unheard};
use ferrospeed_text::{Codec, Sample};
use serde::Serialize;

use crate::ask::{InOrder, Model, Pending};
use crate::error::{EvaluateError, Result};
use crate::material::Reading;
use crate::report::{PairShares, Part};

/// Likelihoods, added up.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Totals {
    /// Texts, or sequences of them.
    pub texts: u64,
    /// Of these, cut because they were longer than a sequence.
    pub cut: u64,
    /// Tokens that count.
    pub tokens: u64,
    /// How unlikely they are: the sum of −ln p.
    pub nats: f64,
    /// Bytes of text that these tokens stand for; 0 where that is not known.
    pub bytes: u64,
}

impl Totals {
    /// The mean over tokens, in nats: what training minimises.
    pub fn loss(&self) -> f64 {
        self.nats / self.tokens as f64
    }

    /// Between how many tokens the model wavers.
    pub fn perplexity(&self) -> f64 {
        self.loss().exp()
    }

    /// The same whatever the tokenizer is; nothing where bytes are not known.
    pub fn bits_per_byte(&self) -> Option<f64> {
        (self.bytes > 0).then(|| self.nats / std::f64::consts::LN_2 / self.bytes as f64)
    }

    fn add(&mut self, text: &Text, logprobs: &[f32]) {
        self.texts += 1;
        self.cut += u64::from(text.is_cut);
        self.bytes += text.bytes;
        for (logprob, _) in logprobs.iter().zip(&text.counts).filter(|(_, counts)| **counts) {
            self.tokens += 1;
            self.nats -= f64::from(*logprob);
        }
    }
}

/// A text that is scored.
struct Text {
    /// Of each token but the first, whether it counts.
    counts: Vec<bool>,
    bytes: u64,
    is_cut: bool,
    place: String,
    file: std::path::PathBuf,
}

impl Text {
    /// Of the tokens that count, the bytes of text.
    fn bytes(codec: &Codec, tokens: &[i64], counts: &[bool]) -> Result<u64> {
        let pairs: Vec<(i64, bool)> = tokens.iter().skip(1).copied().zip(counts.iter().copied()).collect();
        let mut bytes = 0;
        for run in pairs.chunk_by(|one, next| one.1 == next.1).filter(|run| run[0].1) {
            bytes += match codec {
                Codec::Bytes => run.len(),
                codec => codec.decode(&run.iter().map(|(token, _)| *token).collect::<Vec<_>>())?.len(),
            };
        }
        Ok(bytes as u64)
    }
}

/// Asks for a text; one of which nothing counts is not asked for.
fn ask(model: &Model, text: &Text, tokens: Vec<i64>) -> Option<Pending> {
    text.counts.contains(&true).then(|| model.score(tokens, 1))
}

fn told(text: &Text, pending: Option<Pending>) -> Result<Vec<f32>> {
    let Some(pending) = pending else { return Ok(Vec::new()) };
    let unanswered =
        |why| EvaluateError::Unanswered { path: text.file.clone(), place: text.place.clone(), why };
    pending.scores().map_err(unanswered)
}

/// Refuses tokens that the model does not know.
fn readable(model: &Model, tokens: &[u32]) -> Result<Vec<i64>, String> {
    model.facts().readable(tokens.to_vec())
}

/// Samples, each by itself.
pub(crate) fn of_samples(model: &Model, path: &Path, samples: &SampleFiles) -> Result<Part> {
    let (codec, most) = (&model.facts().codec, samples.length as usize);
    let (mut totals, mut pairs) = (Totals::default(), PairShares::default());
    let mut failed = None;
    let mut asked = InOrder::new(|texts: Vec<(Text, Option<Pending>)>| {
        let mut sums = Vec::new();
        for (index, (text, pending)) in texts.into_iter().enumerate() {
            let logprobs = told(&text, pending)?;
            // Of a pair, it is the preferred answer whose likelihood is a loss.
            if index == 0 {
                totals.add(&text, &logprobs);
            }
            let own = logprobs.iter().zip(&text.counts).filter(|(_, counts)| **counts);
            let own = own.map(|(logprob, _)| f64::from(*logprob));
            sums.push((own.clone().sum::<f64>(), own.count()));
        }
        if let [chosen, rejected] = sums[..] {
            pairs.add(chosen, rejected);
        }
        Ok(())
    });
    let read = samples.each(codec, &mut |record, own| {
        let mut texts = Vec::new();
        for Sample { tokens, trained } in own {
            let kept = tokens.len().min(most);
            let bad = |why| DataError::bad_place(record.path, record.place(), why);
            let ids = readable(model, &tokens[..kept]).map_err(bad)?;
            let counts = trained[1.min(kept)..kept].to_vec();
            let bytes = Text::bytes(codec, &ids, &counts).map_err(|error| bad(error.to_string()))?;
            let (place, file) = (record.place(), record.path.to_path_buf());
            let text = Text { counts, bytes, is_cut: kept < tokens.len(), place, file };
            let pending = ask(model, &text, ids);
            texts.push((text, pending));
        }
        asked.add(texts).map_err(|error| {
            failed = Some(error);
            DataError::Stopped
        })
    });
    match (read, failed) {
        (_, Some(error)) => return Err(error),
        (read, None) => read?,
    }
    asked.finish()?;
    let kind = samples.kind()?.name();
    if totals.tokens == 0 {
        return Err(EvaluateError::nothing(
            path,
            format!(
                "has {} samples, of which no token counts; take a longer --sequence, or --train-on all",
                totals.texts
            ),
        ));
    }
    Ok(Part { path: path.to_path_buf(), kind, totals: Some(totals), pairs: pairs.given(), ..Part::default() })
}

/// Text or tokens in sequences, as training cuts them; what is left at the end counts too.
pub(crate) fn of_tokens(
    model: &Model,
    path: &Path,
    source: &Source,
    reading: &Reading,
    cache: &Path,
) -> Result<Part> {
    let codec = &model.facts().codec;
    let stream: Arc<dyn TokenStream> = source.open(codec, cache, &mut unheard)?;
    let (length, all) = (reading.sequence(model) as u64, stream.len());
    let mut totals = Totals::default();
    let mut asked = InOrder::new(|(text, pending): (Text, Option<Pending>)| {
        let logprobs = told(&text, pending)?;
        totals.add(&text, &logprobs);
        Ok(())
    });
    for start in (0..all).step_by(length.max(2) as usize) {
        let mut tokens = vec![0; length.max(2).min(all - start) as usize];
        stream.read(start, &mut tokens)?;
        let vocabulary = model.facts().vocabulary as u64;
        if let Some(at) =
            tokens.iter().position(|&token| !u64::try_from(token).is_ok_and(|id| id < vocabulary))
        {
            let place = stream.place(start + at as u64);
            return Err(DataError::TokenTooLarge { place, token: tokens[at], vocabulary }.into());
        }
        let counts = vec![true; tokens.len() - 1];
        let bytes = Text::bytes(codec, &tokens, &counts)?;
        let place = stream.place(start);
        let text = Text { counts, bytes, is_cut: false, place, file: path.to_path_buf() };
        let pending = ask(model, &text, tokens);
        asked.add((text, pending))?;
    }
    asked.finish()?;
    if totals.tokens == 0 {
        return Err(EvaluateError::nothing(
            path,
            "has no two tokens behind one another: nothing is predicted",
        ));
    }
    let kind = if source.is_text() { "text" } else { "tokens" };
    Ok(Part { path: path.to_path_buf(), kind, totals: Some(totals), ..Part::default() })
}
