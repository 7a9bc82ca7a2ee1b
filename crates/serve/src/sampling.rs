//! The next token, from its logits and what one request asked for.
//!
//! In this order: what the form of the answer allows, penalties for what was said already, biases, temperature, then what is left of the distribution by top-k,
//! top-p and min-p. Log probabilities are those of the model itself, before all of it. A draw is a function of the seed and
//! of the place in the answer, so an answer that had to be computed again goes on as it would have.

use std::collections::HashMap;
use std::sync::Arc;

use ferrospeed_tensor::random::RandomKey;

use crate::constrain::Constraint;

/// Most alternatives whose log probabilities can be asked for.
pub const MAX_TOP_LOGPROBS: usize = 20;

/// How tokens are chosen.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingOptions {
    /// Divides the logits; 0 takes the likeliest token, the lowest number among equals.
    pub temperature: f32,
    /// Only the likeliest that together reach this probability.
    pub top_p: f32,
    /// Only so many of the likeliest.
    pub top_k: Option<usize>,
    /// Only those at least this share as likely as the likeliest.
    pub min_p: f32,
    /// Taken from the logit of every token that the answer has.
    pub presence_penalty: f32,
    /// The same, as often as the answer has it.
    pub frequency_penalty: f32,
    /// Divides positive logits of tokens that prompt or answer have, and multiplies negative ones.
    pub repetition_penalty: f32,
    /// Added to logits.
    pub bias: Vec<(i64, f32)>,
    /// Makes draws repeatable.
    pub seed: u64,
    /// Which of several answers to the same request this is.
    pub stream: u32,
    /// How many alternatives are reported with every token.
    pub logprobs: Option<usize>,
    /// Whether tokens may be guessed ahead, where the engine does so; they are the same either way.
    pub speculate: bool,
    /// The form that the answer keeps to, of which this is the beginning.
    pub constraint: Option<Arc<Constraint>>,
}

impl Default for SamplingOptions {
    fn default() -> Self {
        SamplingOptions {
            temperature: 0.0,
            top_p: 1.0,
            top_k: None,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            bias: Vec::new(),
            seed: 0,
            stream: 0,
            logprobs: None,
            speculate: true,
            constraint: None,
        }
    }
}

impl SamplingOptions {
    /// Whether all that is asked for is the token that the model holds for the likeliest.
    pub fn takes_the_likeliest(&self) -> bool {
        self.temperature == 0.0
            && self.presence_penalty == 0.0
            && self.frequency_penalty == 0.0
            && self.repetition_penalty == 1.0
            && self.bias.is_empty()
            && self.logprobs.is_none()
            && self.constraint.is_none()
    }
}

/// A token and how likely the model holds it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Likelihood {
    /// The token.
    pub token: i64,
    /// Its log probability.
    pub logprob: f32,
}

/// What was chosen.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// The token.
    pub token: i64,
    /// Where they were asked for: its own likelihood, and the likeliest alternatives.
    pub logprobs: Option<(Likelihood, Vec<Likelihood>)>,
}

/// Why no token can be chosen.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoChoice {
    /// The model gave no numbers.
    #[error("the model's logits are no numbers")]
    NoNumbers,
    /// The answer's form has no way on.
    #[error("the form that the answer has to keep to lets no token follow: {0}")]
    Form(String),
}

/// Chooses the token after `prompt` and `answer`.
pub fn choose(
    logits: &[f32],
    options: &SamplingOptions,
    prompt: &[i64],
    answer: &[i64],
) -> Result<Choice, NoChoice> {
    choose_from(logits, options, prompt, answer, |_| Ok(()))
}

/// The same of what `forbid` leaves of the logits; what is forbidden stays so whatever else is asked for.
pub(crate) fn choose_from(
    logits: &[f32],
    options: &SamplingOptions,
    prompt: &[i64],
    answer: &[i64],
    forbid: impl FnOnce(&mut [f32]) -> Result<(), String>,
) -> Result<Choice, NoChoice> {
    let mut adjusted: Vec<f32> =
        logits.iter().map(|&logit| if logit.is_nan() { f32::NEG_INFINITY } else { logit }).collect();
    if !adjusted.iter().any(|logit| logit.is_finite()) {
        return Err(NoChoice::NoNumbers);
    }
    let raw = options.logprobs.map(|_| adjusted.clone());
    forbid(&mut adjusted).map_err(NoChoice::Form)?;
    if adjusted.iter().all(|&logit| logit == f32::NEG_INFINITY) {
        return Err(NoChoice::Form("no token of this model writes what has to come next".into()));
    }
    penalise(&mut adjusted, options, prompt, answer);
    let token = if options.temperature == 0.0 {
        likeliest(&adjusted)
    } else {
        draw(&adjusted, options, answer.len() as u64)
    };
    let logprobs = options.logprobs.zip(raw).map(|(count, raw)| likelihoods(&raw, token, count));
    Ok(Choice { token: token as i64, logprobs })
}

/// The token with the largest logit, the lowest number among equals.
pub(crate) fn likeliest(logits: &[f32]) -> usize {
    logits.iter().enumerate().fold(0, |best, (id, &logit)| if logit > logits[best] { id } else { best })
}

fn penalise(logits: &mut [f32], options: &SamplingOptions, prompt: &[i64], answer: &[i64]) {
    let known = |token: &i64| usize::try_from(*token).ok().filter(|&id| id < logits.len());
    let mut counts: HashMap<usize, u32> = HashMap::new();
    answer.iter().filter_map(known).for_each(|id| *counts.entry(id).or_default() += 1);
    let mut seen: Vec<usize> = Vec::new();
    if options.repetition_penalty != 1.0 {
        seen.extend(prompt.iter().chain(answer).filter_map(known));
        seen.sort_unstable();
        seen.dedup();
    }
    for id in seen {
        let logit = &mut logits[id];
        *logit = if *logit > 0.0 {
            *logit / options.repetition_penalty
        } else {
            *logit * options.repetition_penalty
        };
    }
    for (id, count) in counts {
        logits[id] -= options.presence_penalty + options.frequency_penalty * count as f32;
    }
    for (token, bias) in &options.bias {
        if let Some(logit) = usize::try_from(*token).ok().and_then(|id| logits.get_mut(id)) {
            *logit += bias;
        }
    }
}

/// The likeliest first, the lowest number first among equals.
fn order(logits: &[f32]) -> impl Fn(&usize, &usize) -> std::cmp::Ordering {
    |&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b))
}

/// The `count` likeliest tokens in order.
fn most_likely(logits: &[f32], count: usize) -> Vec<usize> {
    let mut ids: Vec<usize> = (0..logits.len()).collect();
    if count < ids.len() {
        ids.select_nth_unstable_by(count, order(logits));
        ids.truncate(count);
    }
    ids.sort_unstable_by(order(logits));
    ids
}

fn draw(logits: &[f32], options: &SamplingOptions, place: u64) -> usize {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |id: usize| {
        // A positive infinity outweighs everything; anything beside it weighs nothing.
        let distance = if logits[id] == largest { 0.0 } else { logits[id] - largest };
        f64::from(distance / options.temperature).exp()
    };
    let all: f64 = (0..logits.len()).map(weight).sum();
    let uniform = f64::from(RandomKey::new(options.seed, options.stream).uniform(place));
    let pick = |ids: &mut dyn Iterator<Item = usize>, total: f64| {
        let mut rest = uniform * total;
        let mut last = 0;
        for id in ids {
            let weight = weight(id);
            if weight > 0.0 {
                last = id;
            }
            rest -= weight;
            if rest < 0.0 {
                return id;
            }
        }
        last
    };
    let most = options.top_k.unwrap_or(logits.len()).clamp(1, logits.len());
    if most == logits.len() && options.top_p >= 1.0 && options.min_p <= 0.0 {
        return pick(&mut (0..logits.len()), all);
    }
    // Most nuclei are small: sorting a vocabulary for them would cost more than the rest of the choice.
    for size in [256, 8192, usize::MAX] {
        let ids = most_likely(logits, most.min(size));
        let whole: f64 = if most < logits.len() && ids.len() == most {
            ids.iter().map(|&id| weight(id)).sum()
        } else {
            all
        };
        if most < logits.len() && ids.len() < most {
            continue;
        }
        let nucleus = f64::from(options.top_p) * whole;
        let least = f64::from(options.min_p) * weight(ids[0]);
        let mut kept = 0.0;
        let count = ids.iter().take_while(|&&id| {
            let goes = kept < nucleus && weight(id) >= least;
            kept += if goes { weight(id) } else { 0.0 };
            goes
        });
        let count = count.count().max(1);
        if count < ids.len() || ids.len() == most {
            return pick(&mut ids[..count].iter().copied(), ids[..count].iter().map(|&id| weight(id)).sum());
        }
    }
    likeliest(logits)
}

/// What JSON can say: no infinity.
const LEAST_LOGPROB: f32 = -9999.0;

/// A log probability that can be said; what is no number stays so.
pub(crate) fn least_told(logprob: f32) -> f32 {
    if logprob < LEAST_LOGPROB { LEAST_LOGPROB } else { logprob }
}

fn likelihoods(logits: &[f32], token: usize, count: usize) -> (Likelihood, Vec<Likelihood>) {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = logits.iter().map(|&logit| f64::from(logit - largest).exp()).sum();
    let of = |id: usize| {
        let logprob = (f64::from(logits[id] - largest) - total.ln()) as f32;
        // One that is no number has nothing to say either.
        Likelihood { token: id as i64, logprob: logprob.max(LEAST_LOGPROB) }
    };
    (of(token), most_likely(logits, count.min(MAX_TOP_LOGPROBS)).into_iter().map(of).collect())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const LOGITS: [f32; 5] = [0.0, 3.0, 1.0, 2.0, 3.0];

    fn warm() -> SamplingOptions {
        SamplingOptions { temperature: 1.0, seed: 3, ..Default::default() }
    }

    /// What can come out, over many places.
    fn possible(options: &SamplingOptions) -> BTreeSet<i64> {
        let answers = (0..600).map(|length| vec![100; length]);
        answers.map(|answer| choose(&LOGITS, options, &[], &answer).unwrap().token).collect()
    }

    fn greedy(options: SamplingOptions, prompt: &[i64], answer: &[i64]) -> i64 {
        choose(&LOGITS, &options, prompt, answer).unwrap().token
    }

    #[test]
    fn each_limit_leaves_only_the_likely() {
        assert_eq!(possible(&warm()), BTreeSet::from([0, 1, 2, 3, 4]));
        assert_eq!(possible(&SamplingOptions { top_k: Some(1), ..warm() }), BTreeSet::from([1]));
        assert_eq!(possible(&SamplingOptions { top_k: Some(3), ..warm() }), BTreeSet::from([1, 3, 4]));
        assert_eq!(possible(&SamplingOptions { top_p: 0.5, ..warm() }), BTreeSet::from([1, 4]));
        assert_eq!(possible(&SamplingOptions { top_p: 0.0, ..warm() }), BTreeSet::from([1]));
        assert_eq!(possible(&SamplingOptions { min_p: 0.3, ..warm() }), BTreeSet::from([1, 3, 4]));
        let hot = SamplingOptions { temperature: 1e-3, ..warm() };
        assert_eq!(possible(&hot), BTreeSet::from([1, 4]), "a low temperature leaves the likeliest");
        // Within the three likeliest: their own probabilities count, not those of all.
        assert_eq!(possible(&SamplingOptions { top_k: Some(3), top_p: 0.4, ..warm() }), BTreeSet::from([1]));
    }

    #[test]
    fn penalties_and_biases_move_the_choice() {
        assert_eq!(greedy(SamplingOptions::default(), &[], &[]), 1, "the lowest number among equals");
        let presence = SamplingOptions { presence_penalty: 1.5, ..Default::default() };
        assert_eq!(greedy(presence.clone(), &[], &[1]), 4);
        assert_eq!(greedy(presence, &[1], &[]), 1, "what the prompt says is no matter to it");
        let frequency = SamplingOptions { frequency_penalty: 0.6, ..Default::default() };
        assert_eq!(greedy(frequency.clone(), &[], &[1, 4]), 1);
        assert_eq!(greedy(frequency, &[], &[1, 1, 4, 4]), 3);
        let repetition = SamplingOptions { repetition_penalty: 2.0, ..Default::default() };
        assert_eq!(greedy(repetition, &[1], &[4]), 3, "what prompt or answer said");
        let bias = SamplingOptions { bias: vec![(0, 10.0), (99, 5.0), (-1, 5.0)], ..Default::default() };
        assert_eq!(greedy(bias, &[], &[]), 0);
    }

    #[test]
    fn a_draw_is_decided_by_seed_stream_and_place() {
        let text = |options: &SamplingOptions| -> Vec<i64> {
            (0..50).map(|length| choose(&LOGITS, options, &[], &vec![100; length]).unwrap().token).collect()
        };
        assert_eq!(text(&warm()), text(&warm()));
        assert_ne!(text(&warm()), text(&SamplingOptions { seed: 4, ..warm() }));
        assert_ne!(text(&warm()), text(&SamplingOptions { stream: 1, ..warm() }));
    }

    #[test]
    fn a_large_nucleus_is_the_one_that_sorting_everything_gives() {
        let flat: Vec<f32> = (0..20_000).map(|id| (id % 97) as f32 * 1e-3).collect();
        let options = SamplingOptions { top_p: 0.9, ..warm() };
        let mut sorted: Vec<usize> = (0..flat.len()).collect();
        sorted.sort_by(order(&flat));
        let tail: BTreeSet<i64> = sorted[18_500..].iter().map(|&id| id as i64).collect();
        for length in 0..200 {
            let token = choose(&flat, &options, &[], &vec![-1; length]).unwrap().token;
            assert!(!tail.contains(&token), "{token} lies outside of nine tenths");
        }
    }

    #[test]
    fn log_probabilities_are_the_models_own() {
        let options = SamplingOptions { logprobs: Some(2), bias: vec![(0, 100.0)], ..Default::default() };
        let (own, top) = choose(&LOGITS, &options, &[], &[]).unwrap().logprobs.unwrap();
        let total: f32 = LOGITS.iter().map(|logit| logit.exp()).sum::<f32>().ln();
        assert_eq!(own.token, 0);
        assert!((own.logprob + total).abs() < 1e-5, "{own:?}");
        assert_eq!(top.iter().map(|one| one.token).collect::<Vec<_>>(), [1, 4]);
        assert!((top[0].logprob - (3.0 - total)).abs() < 1e-5);
    }

    #[test]
    fn what_is_no_number_is_not_chosen() {
        assert_eq!(choose(&[f32::NAN, 1.0], &SamplingOptions::default(), &[], &[]).unwrap().token, 1);
        assert_eq!(choose(&[f32::NAN, f32::NAN], &warm(), &[], &[]), Err(NoChoice::NoNumbers));
        assert_eq!(choose(&[], &warm(), &[], &[]), Err(NoChoice::NoNumbers));
    }
}
