//! One answer in the making: chooses its tokens, turns them into text, sees when it is complete. Text is made apart from the
//! choice, while the next pass is under way ([`crate::untold`]).

use std::sync::Arc;
use std::time::Instant;

use ferrospeed_text::Codec;

use crate::constrain::Constraint;
use crate::detokenize::{Detokenizer, StopStrings};
use crate::metrics::Metrics;
use crate::paired::{Likelihoods, Paired};
use crate::request::{Event, Events, Finish, Request, Work};
use crate::runner::{Said, Wish};
use crate::sampling::{Choice, NoChoice, SamplingOptions, choose_from};

/// An answer, or an embedding, that the engine works on.
#[derive(Debug)]
pub(crate) struct Answer {
    index: usize,
    task: Task,
    prompt_tokens: usize,
    events: Events,
    deadline: Instant,
    arrived: Instant,
    last_token: Option<Instant>,
}

/// What is wanted.
#[derive(Debug)]
enum Task {
    Write(Box<Writing>),
    Embed,
    Score {
        from: usize,
        alternatives: usize,
        /// Of the tokens from `from` on, as far as they are known.
        told: Vec<Likelihoods>,
    },
}

#[derive(Debug)]
struct Writing {
    sampling: SamplingOptions,
    /// How far its form is, which `sampling` has from the beginning.
    constraint: Option<Constraint>,
    stop_tokens: Arc<[i64]>,
    detokenizer: Detokenizer,
    stops: StopStrings,
    paired: Paired,
}

/// A token that was chosen, of which its client has not been told.
#[derive(Debug)]
pub(crate) struct Chosen {
    pub(crate) token: i64,
    /// Whether it is a part of the answer: not so where it does nothing but end it.
    is_text: bool,
    /// Why it is the last, where the token itself or its number says so. A stop string shows in the text alone.
    pub(crate) finish: Option<Finish>,
    logprobs: Option<Likelihoods>,
    /// Tokens of the answer with this one.
    tokens: usize,
}

impl Answer {
    pub(crate) fn new(request: &Request, index: usize, events: Events, arrived: Instant) -> Answer {
        let task = match &request.work {
            Work::Generate { answers, stops, stop_tokens, special, .. } => Task::Write(Box::new(Writing {
                constraint: answers[index].constraint.as_deref().cloned(),
                sampling: answers[index].clone(),
                stop_tokens: stop_tokens.as_slice().into(),
                detokenizer: Detokenizer::after(&request.prompt, *special),
                stops: StopStrings::new(stops.clone()),
                paired: Paired::default(),
            })),
            Work::Embed => Task::Embed,
            &Work::Score { from, alternatives } => {
                Task::Score { from: from.max(1), alternatives, told: Vec::new() }
            }
        };
        let (prompt_tokens, deadline) = (request.prompt.len(), request.deadline);
        Answer {
            index: request.first_answer + index,
            task,
            prompt_tokens,
            events,
            deadline,
            arrived,
            last_token: None,
        }
    }

    /// What it wants of a pass.
    pub(crate) fn wish(&self) -> Wish {
        match &self.task {
            Task::Embed => Wish::Hidden,
            &Task::Score { from, alternatives, .. } => Wish::Known { from, alternatives },
            Task::Write(writing) if writing.constraint.is_some() => Wish::Logits,
            Task::Write(writing) if writing.sampling.takes_the_likeliest() => Wish::Likeliest,
            Task::Write(_) => Wish::Logits,
        }
    }

    /// Whether its next tokens may be guessed.
    pub(crate) fn may_guess(&self) -> bool {
        matches!(&self.task, Task::Write(writing) if writing.sampling.speculate)
    }

    /// Takes how likely known tokens are, of which the first is predicted by `row` of the text. A text that had to be computed again
    /// is told again from its beginning.
    pub(crate) fn learn(&mut self, row: usize, known: Vec<Likelihoods>) -> Result<(), String> {
        let Task::Score { from, told, .. } = &mut self.task else { return Ok(()) };
        if known.iter().any(|(own, _)| own.logprob.is_nan()) {
            return Err("the model's logits are no numbers".into());
        }
        told.truncate((row + 1).saturating_sub(*from));
        told.extend(known);
        Ok(())
    }

    /// Gives out how likely the text is.
    pub(crate) fn score(&mut self) {
        if let Task::Score { told, .. } = &mut self.task {
            let tokens = std::mem::take(told);
            self.tell(Event::Scored { answer: self.index, tokens });
        }
    }

    /// Gives out the hidden state that was asked for.
    pub(crate) fn embed(&self, values: Vec<f32>) {
        self.tell(Event::Embedding { answer: self.index, values });
    }

    pub(crate) fn is_departed(&self) -> bool {
        self.events.is_closed()
    }

    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Tells the client; one that is gone is noticed before the next pass.
    pub(crate) fn tell(&self, event: Event) {
        let _ = self.events.send(event);
    }

    /// Chooses the token behind `tokens`, of which there may be `most`.
    pub(crate) fn choose(
        &mut self,
        next: &Said,
        tokens: &[i64],
        most: usize,
        metrics: &Metrics,
    ) -> Result<Chosen, String> {
        let (prompt, answer) = tokens.split_at(self.prompt_tokens);
        let Task::Write(writing) = &mut self.task else {
            return Err("only an answer has tokens to choose".into());
        };
        let choice = match next {
            Said::Likeliest(token) => Choice { token: *token, logprobs: None },
            Said::Logits(logits) => {
                writing.choose(logits, prompt, answer).map_err(|error| error.to_string())?
            }
        };
        let is_end = writing.stop_tokens.contains(&choice.token);
        let finish = match is_end || writing.ends_with(choice.token)? {
            true => Some(Finish::Stop),
            false => (tokens.len() + 1 >= most).then_some(Finish::Length),
        };
        let now = Instant::now();
        match self.last_token.replace(now) {
            Some(before) => metrics.between_tokens.observe(now - before),
            None => metrics.first_token.observe(now - self.arrived),
        }
        let (token, logprobs) = (choice.token, choice.logprobs);
        Ok(Chosen { token, is_text: !is_end, finish, logprobs, tokens: answer.len() + 1 })
    }

    /// Makes text of a token and tells the client. Returns whether the answer is complete.
    pub(crate) fn write(&mut self, chosen: Chosen, codec: &Codec) -> Result<bool, String> {
        let Task::Write(writing) = &mut self.task else { return Ok(true) };
        let Chosen { token, is_text, finish, logprobs, tokens } = chosen;
        let answer = self.index;
        let (mut text, mut stopped) = (String::new(), false);
        if is_text {
            let made = writing.detokenizer.push(codec, token).map_err(|error| error.to_string())?;
            (text, stopped) = writing.stops.push(&made);
            if let Some(likelihoods) = logprobs {
                writing.paired.push(made.len(), likelihoods);
            }
        }
        let mut rest = if finish.is_some() && !stopped { writing.rest(codec)? } else { String::new() };
        let mut pieces = match writing.sampling.logprobs {
            Some(_) => writing.paired.give(&(text + &std::mem::take(&mut rest)), stopped),
            // A token that ends texts has none.
            None if !is_text => Vec::new(),
            None => vec![(text, None)],
        };
        // What no token has made comes with the end.
        if writing.sampling.logprobs.is_some()
            && finish.is_some()
            && let Some((left, _)) = pieces.pop_if(|(_, likelihoods)| likelihoods.is_none())
        {
            rest = left;
        }
        let ended = writing.stops.ended_by().filter(|_| stopped).map(Finish::StopText);
        for (text, logprobs) in pieces {
            self.tell(Event::Token { answer, text, logprobs });
        }
        let Some(finish) = ended.or(finish) else { return Ok(false) };
        self.tell(Event::Finished { answer, text: rest, finish, tokens });
        Ok(true)
    }
}

impl Writing {
    /// The next token, of those that the answer's form allows.
    fn choose(&mut self, logits: &[f32], prompt: &[i64], answer: &[i64]) -> Result<Choice, NoChoice> {
        let (constraint, ends) = (&mut self.constraint, &self.stop_tokens);
        choose_from(logits, &self.sampling, prompt, answer, |logits| match constraint {
            Some(constraint) => constraint.forbid(logits, ends),
            None => Ok(()),
        })
    }

    /// Whether the answer's form is complete with this token.
    fn ends_with(&mut self, token: i64) -> Result<bool, String> {
        let Some(constraint) = &mut self.constraint else { return Ok(false) };
        constraint.take(token)?;
        Ok(constraint.is_over())
    }

    /// What was held back, now that no token follows.
    fn rest(&mut self, codec: &Codec) -> Result<String, String> {
        let text = self.detokenizer.finish(codec).map_err(|error| error.to_string())?;
        let (mut text, stopped) = self.stops.push(&text);
        if !stopped {
            text += &self.stops.finish();
        }
        Ok(text)
    }
}
