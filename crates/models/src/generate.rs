//! Text generation with a key/value cache: greedy, temperature, top-k, top-p.

use ferrospeed_nn::Mode;
use ferrospeed_tensor::random::RandomKey;
use ferrospeed_tensor::{DType, Device, Tensor, TensorError, autograd, ops};

use crate::decoder::{Decoder, Tokens};
use crate::error::{ModelError, Result};
use crate::shortlist::{Shortlist, min_tokens};
use crate::stepper::{Outcome, Step, Stepper};

/// How the next token is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Sampling {
    /// The most likely one; the lowest id among equals.
    Greedy,
    /// Drawn from the distribution.
    Random {
        /// Divides the logits.
        temperature: f32,
        /// Only the `k` most likely.
        top_k: Option<usize>,
        /// Only the most likely that together reach this probability.
        top_p: Option<f32>,
        /// Makes the draw repeatable.
        seed: u64,
    },
}

/// What to generate.
#[derive(Debug, Clone)]
pub struct GenerateOptions {
    /// How many tokens at most.
    pub max_new_tokens: usize,
    /// How each is chosen.
    pub sampling: Sampling,
    /// A sequence ends with any of these tokens.
    pub end_tokens: Vec<i64>,
    /// Fills sequences that have ended.
    pub pad_token: i64,
}

/// Continues `prompts`, all of one length; `mask` is 0 where a prompt is padded on the left.
///
/// Calls `emit(step, tokens)` with each step's new tokens; returns prompts and continuations together.
pub fn generate(
    model: &Decoder,
    prompts: &[Vec<i64>],
    mask: Option<&[Vec<u8>]>,
    options: &GenerateOptions,
    device: &Device,
    emit: &mut dyn FnMut(usize, &[i64]),
) -> Result<Vec<Vec<i64>>> {
    let shortlist_from = Some(min_tokens(model.dtype()));
    generate_with(model, prompts, mask, options, device, shortlist_from, emit)
}

/// The same; where this many tokens are left after the first, most of the head is spared. No token depends on it.
pub(crate) fn generate_with(
    model: &Decoder,
    prompts: &[Vec<i64>],
    mask: Option<&[Vec<u8>]>,
    options: &GenerateOptions,
    device: &Device,
    shortlist_from: Option<usize>,
    emit: &mut dyn FnMut(usize, &[i64]),
) -> Result<Vec<Vec<i64>>> {
    let length = prompts.first().map_or(0, Vec::len);
    if length == 0 || prompts.iter().any(|prompt| prompt.len() != length) {
        return Err(ModelError::config(
            "prompt",
            "prompts must be non-empty and of one length; pad on the left",
        ));
    }
    autograd::no_grad(|| {
        let batch = prompts.len();
        let mut sequences = prompts.to_vec();
        // A mask that hides nothing is none.
        let padded = mask.filter(|mask| mask.iter().flatten().any(|&real| real == 0));
        let mut mask: Option<Vec<Vec<u8>>> = padded.map(<[_]>::to_vec);
        let mut ended = vec![false; batch];
        let capacity = length + options.max_new_tokens;
        let mut state = model.new_state(batch, capacity, device)?;
        let mut stepper = match mask {
            Some(_) => None,
            None => Stepper::new(model, batch, capacity, device)?,
        };
        let mut input: Vec<i64> = prompts.concat();
        for step in 0..options.max_new_tokens {
            input = match &mut stepper {
                Some(stepper) if step > 0 => match stepper.step(&input, &mut state)? {
                    Step::All(outcome) => next_tokens(outcome, options.sampling, step)?,
                    Step::Few(few) => vec![choose_of(&few, options.sampling, step as u64)],
                },
                stepper => {
                    let known = state.len();
                    if model.turns_anew(known, known + input.len() / batch) {
                        state = model.new_state(batch, capacity, device)?;
                        input = sequences.concat();
                    }
                    let width = input.len() / batch;
                    let ids = Tensor::from_slice(&input, [batch, width], device)?;
                    let positions = mask.as_ref().map(|mask| positions_of(mask, width));
                    let tokens = Tokens { mask: mask.clone(), positions, ..Tokens::new(ids) };
                    let hidden = model.hidden(&tokens, Some(&mut state), Mode::Evaluate)?;
                    if let Some(stepper) = stepper
                        && shortlist_from.is_some_and(|least| options.max_new_tokens > least)
                    {
                        let head = model.plain_head();
                        let shortlist = head.map(|head| Shortlist::new(head, &hidden, options.sampling));
                        stepper.set_shortlist(shortlist.transpose()?.flatten());
                    }
                    let last = ops::narrow(&hidden, 1, width - 1, 1)?;
                    let logits = model.logits(&last)?;
                    expect_numbers(&logits)?;
                    next_tokens(&Outcome::of(logits)?, options.sampling, step)?
                }
            };
            for (token, _) in input.iter_mut().zip(&ended).filter(|(_, ended)| **ended) {
                *token = options.pad_token;
            }
            for (row, &token) in input.iter().enumerate() {
                sequences[row].push(token);
                ended[row] |= options.end_tokens.contains(&token);
            }
            if let Some(mask) = &mut mask {
                mask.iter_mut().for_each(|row| row.push(1));
            }
            emit(step, &input);
            if ended.iter().all(|&ended| ended) {
                break;
            }
        }
        Ok(sequences)
    })
}

/// A damaged weight shows in the first logits; a device's own choice would not tell.
fn expect_numbers(logits: &Tensor) -> Result<()> {
    if ops::cast(logits, DType::F32)?.to_vec::<f32>()?.iter().any(|logit| logit.is_nan()) {
        let why = "the model's logits are no numbers: a weight is, or numbers grow beyond their type";
        return Err(TensorError::argument("generate", why).into());
    }
    Ok(())
}

/// The next token of every sequence.
fn next_tokens(outcome: &Outcome, sampling: Sampling, step: usize) -> Result<Vec<i64>> {
    // One number comes back from a device instead of a vocabulary.
    if let (Sampling::Greedy, Some(best)) = (sampling, &outcome.best) {
        return Ok(best.to_vec::<i64>()?);
    }
    let batch = outcome.logits.sizes()[0];
    let logits = ops::cast(&outcome.logits, DType::F32)?.to_vec::<f32>()?;
    let rows = logits.chunks(logits.len() / batch).enumerate();
    Ok(rows.map(|(row, logits)| choose(logits, sampling, (step * batch + row) as u64)).collect())
}

/// Positions of the last `count` tokens: real tokens are counted from 0, masked ones stand at 1.
fn positions_of(mask: &[Vec<u8>], count: usize) -> Vec<Vec<usize>> {
    mask.iter()
        .map(|row| {
            let mut seen = 0;
            let all = row.iter().map(|&real| {
                seen += usize::from(real != 0);
                if real != 0 { seen - 1 } else { 1 }
            });
            all.collect::<Vec<_>>().split_off(row.len() - count)
        })
        .collect()
}

/// As [`choose`], from the logits of the tokens that can be chosen.
fn choose_of(few: &[(usize, f32)], sampling: Sampling, position: u64) -> i64 {
    let logits: Vec<f32> = few.iter().map(|&(_, logit)| logit).collect();
    few[choose(&logits, sampling, position) as usize].0 as i64
}

fn choose(logits: &[f32], sampling: Sampling, position: u64) -> i64 {
    let Sampling::Random { temperature, top_k, top_p, seed } = sampling else {
        let best = logits
            .iter()
            .enumerate()
            .fold(0, |best, (index, &logit)| if logit > logits[best] { index } else { best });
        return best as i64;
    };
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    order.truncate(top_k.unwrap_or(usize::MAX).max(1));
    let largest = logits[order[0]];
    let scale = 1.0 / temperature.max(1e-6);
    let weights: Vec<f64> =
        order.iter().map(|&index| f64::from((logits[index] - largest) * scale).exp()).collect();
    let total: f64 = weights.iter().sum();
    let nucleus = f64::from(top_p.unwrap_or(1.0)) * total;
    let mut kept = 0.0;
    let count = weights.iter().take_while(|&&weight| {
        let before = kept;
        kept += weight;
        before < nucleus
    });
    let count = count.count().max(1);
    let kept: f64 = weights[..count].iter().sum();
    let mut remaining = f64::from(RandomKey::new(seed, 0).uniform(position)) * kept;
    for (index, weight) in order[..count].iter().zip(&weights) {
        remaining -= weight;
        if remaining < 0.0 {
            return *index as i64;
        }
    }
    order[count - 1] as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draw(top_k: Option<usize>, top_p: Option<f32>, position: u64) -> i64 {
        let logits = [0.0, 3.0, 1.0, 2.0];
        choose(&logits, Sampling::Random { temperature: 1.0, top_k, top_p, seed: 3 }, position)
    }

    #[test]
    fn top_k_and_top_p_leave_only_the_likely() {
        assert!((0..200).all(|position| draw(Some(1), None, position) == 1));
        assert!((0..200).all(|position| [1, 3].contains(&draw(Some(2), None, position))));
        assert!((0..200).all(|position| draw(None, Some(0.5), position) == 1));
        let seen: std::collections::BTreeSet<i64> =
            (0..500).map(|position| draw(None, None, position)).collect();
        assert_eq!(seen.len(), 4, "everything is possible without limits");
    }

    #[test]
    fn greedy_takes_the_lowest_id_among_equals() {
        assert_eq!(choose(&[1.0, 2.0, 2.0], Sampling::Greedy, 0), 1);
    }
}
