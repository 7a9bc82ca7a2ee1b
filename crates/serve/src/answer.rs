//! One answer in the making: chooses its tokens, turns them into text, sees when it is complete.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use ferrospeed_data::Codec;

use crate::detokenize::{Detokenizer, StopStrings};
use crate::metrics::Metrics;
use crate::request::{Event, Events, Finish, Request, Work};
use crate::runner::{Said, Wish};
use crate::sampling::{Choice, SamplingOptions, choose};

/// An answer, or an embedding, that the engine works on.
#[derive(Debug)]
pub(crate) struct Answer {
    index: usize,
    /// `None`: the hidden state is wanted.
    writing: Option<Writing>,
    prompt_tokens: usize,
    events: Events,
    deadline: Instant,
    arrived: Instant,
    last_token: Option<Instant>,
}

#[derive(Debug)]
struct Writing {
    sampling: SamplingOptions,
    stop_tokens: Arc<[i64]>,
    detokenizer: Detokenizer,
    stops: StopStrings,
}

/// What a choice has led to.
pub(crate) enum Progress {
    /// The answer goes on with this token.
    Token(i64),
    /// It is complete.
    Finished,
}

impl Answer {
    pub(crate) fn new(request: &Request, index: usize, events: Events, arrived: Instant) -> Answer {
        let writing = match &request.work {
            Work::Generate { answers, stops, stop_tokens, .. } => Some(Writing {
                sampling: answers[index].clone(),
                stop_tokens: stop_tokens.as_slice().into(),
                detokenizer: Detokenizer::default(),
                stops: StopStrings::new(stops.clone()),
            }),
            Work::Embed => None,
        };
        let (prompt_tokens, deadline) = (request.prompt.len(), request.deadline);
        Answer {
            index: request.first_answer + index,
            writing,
            prompt_tokens,
            events,
            deadline,
            arrived,
            last_token: None,
        }
    }

    /// What it wants of a pass.
    pub(crate) fn wish(&self) -> Wish {
        match &self.writing {
            None => Wish::Hidden,
            Some(writing) if writing.sampling.takes_the_likeliest() => Wish::Likeliest,
            Some(_) => Wish::Logits,
        }
    }

    /// Whether its next tokens may be guessed.
    pub(crate) fn may_guess(&self) -> bool {
        self.writing.as_ref().is_some_and(|writing| writing.sampling.speculate)
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
        codec: &Codec,
        metrics: &Metrics,
    ) -> Result<Progress, String> {
        let Some(writing) = &mut self.writing else { return Ok(Progress::Finished) };
        let (prompt, answer) = tokens.split_at(self.prompt_tokens);
        let chosen = match next {
            Said::Likeliest(token) => Choice { token: *token, logprobs: None },
            Said::Logits(logits) => choose(logits, &writing.sampling, prompt, answer)
                .ok_or("the model's logits are no numbers")?,
        };
        let now = Instant::now();
        metrics.generated_tokens.fetch_add(1, Relaxed);
        match self.last_token.replace(now) {
            Some(before) => metrics.between_tokens.observe(now - before),
            None => metrics.first_token.observe(now - self.arrived),
        }
        let computed = answer.len() + 1;
        let index = self.index;
        if writing.stop_tokens.contains(&chosen.token) {
            let text = writing.rest(codec)?;
            self.tell(Event::Finished { answer: index, text, finish: Finish::Stop, tokens: computed });
            return Ok(Progress::Finished);
        }
        let text = writing.detokenizer.push(codec, chosen.token).map_err(|error| error.to_string())?;
        let (text, stopped) = writing.stops.push(&text);
        let full = tokens.len() + 1 >= most;
        let rest = if full && !stopped { writing.rest(codec)? } else { String::new() };
        self.tell(Event::Token { answer: index, text, logprobs: chosen.logprobs });
        let finish = match (stopped, full) {
            (true, _) => Finish::Stop,
            (false, true) => Finish::Length,
            (false, false) => return Ok(Progress::Token(chosen.token)),
        };
        self.tell(Event::Finished { answer: index, text: rest, finish, tokens: computed });
        Ok(Progress::Finished)
    }
}

impl Writing {
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
