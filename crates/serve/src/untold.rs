//! Tokens that are chosen and of which clients have not been told.
//!
//! What comes next needs a token's number alone. Its text, and what looks for stop strings in it, can wait until the device has work
//! again: it takes as long for many answers as some layers of a model. An answer that a stop string ends then has a token
//! too many under way, which nobody hears of.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering::Relaxed;

use ferrospeed_text::Codec;

use crate::answer::{Answer, Chosen};
use crate::core::schedule::SequenceId;
use crate::metrics::Metrics;
use crate::request::{Event, Trouble};

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Untold {
    /// In the order in which they were chosen.
    tokens: Vec<(SequenceId, Chosen)>,
    /// Answers of which no token will follow: nobody else has them any more.
    completed: BTreeMap<SequenceId, Answer>,
}

/// An answer that telling its text has ended.
pub(crate) struct Ended {
    pub(crate) id: SequenceId,
    /// Why it cannot go on; `None` where it is complete.
    pub(crate) failure: Option<String>,
}

impl Untold {
    /// `completed`: the answer, where no token will follow.
    pub(crate) fn add(&mut self, id: SequenceId, chosen: Chosen, completed: Option<Answer>) {
        self.tokens.push((id, chosen));
        self.completed.extend(completed.map(|answer| (id, answer)));
    }

    /// Tells all of them. Returns which of `answers` have ended with that.
    pub(crate) fn tell(
        &mut self,
        answers: &mut BTreeMap<SequenceId, Answer>,
        codec: &Codec,
        metrics: &Metrics,
    ) -> Vec<Ended> {
        let (mut ended, mut over) = (Vec::new(), BTreeSet::new());
        for (id, chosen) in self.tokens.drain(..) {
            // One whose client is gone has no answer any more.
            let answer = self.completed.get_mut(&id).or_else(|| answers.get_mut(&id));
            let Some(answer) = answer.filter(|_| !over.contains(&id)) else { continue };
            metrics.generated_tokens.fetch_add(1, Relaxed);
            let failure = match answer.write(chosen, codec) {
                Ok(false) => continue,
                Ok(true) => None,
                Err(failure) => Some(failure),
            };
            over.insert(id);
            match (self.completed.remove(&id), failure) {
                (None, failure) => ended.push(Ended { id, failure }),
                (Some(_), None) => drop(metrics.finished.fetch_add(1, Relaxed)),
                (Some(answer), Some(failure)) => {
                    metrics.failed.fetch_add(1, Relaxed);
                    answer.tell(Event::Trouble(Trouble::Failed(failure)));
                }
            }
        }
        ended
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

    use super::*;
    use crate::request::{Finish, Request, Special, Work};
    use crate::runner::Said;
    use crate::sampling::SamplingOptions;

    /// An answer of bytes that ends at `stop`, and what its client hears.
    fn answer(stop: &str) -> (Answer, UnboundedReceiver<Event>) {
        let (events, heard) = unbounded_channel();
        let request = Request {
            prompt: vec![1],
            first_answer: 0,
            work: Work::Generate {
                answers: vec![SamplingOptions::default()],
                max_tokens: None,
                stops: vec![stop.to_owned()],
                stop_tokens: Vec::new(),
                special: Special::Hidden,
            },
            deadline: Instant::now() + Duration::from_secs(600),
        };
        (Answer::new(&request, 0, events, Instant::now()), heard)
    }

    /// Has an answer choose these bytes, of which the last is the last that it may have.
    fn chosen(answer: &mut Answer, text: &str, most: usize) -> Vec<Chosen> {
        let mut tokens = vec![1i64];
        let one = |byte: u8| {
            let next = Said::Likeliest(i64::from(byte));
            let chosen = answer.choose(&next, &tokens, most, &Metrics::default()).unwrap();
            tokens.push(i64::from(byte));
            chosen
        };
        text.bytes().map(one).collect()
    }

    fn heard(client: &mut UnboundedReceiver<Event>) -> Vec<String> {
        let mut all = Vec::new();
        while let Ok(event) = client.try_recv() {
            all.push(match event {
                Event::Token { text, .. } => text,
                Event::Finished { text, finish, tokens, .. } => {
                    format!(
                        "{text}|{} after {tokens}",
                        if finish == Finish::Length { "full" } else { "stop" }
                    )
                }
                other => format!("{other:?}"),
            });
        }
        all
    }

    #[test]
    fn a_stop_string_ends_an_answer_and_what_was_chosen_behind_it_is_never_told() {
        let (mut answer, mut client) = answer("b");
        let mut untold = Untold::default();
        for chosen in chosen(&mut answer, "abcd", 100) {
            untold.add(SequenceId(7), chosen, None);
        }
        let (mut answers, metrics) = (BTreeMap::from([(SequenceId(7), answer)]), Metrics::default());
        let ended = untold.tell(&mut answers, &Codec::Bytes, &metrics);
        assert_eq!(ended.iter().map(|ended| ended.id).collect::<Vec<_>>(), [SequenceId(7)]);
        assert!(ended[0].failure.is_none());
        assert_eq!(heard(&mut client), ["a", "", "|stop after 2"]);
        assert_eq!(metrics.generated_tokens.load(Relaxed), 2);
    }

    #[test]
    fn a_complete_answer_is_told_to_its_end_though_nobody_works_on_it_any_more() {
        let (mut answer, mut client) = answer("never");
        let mut tokens = chosen(&mut answer, "xy", 3);
        let (mut untold, metrics) = (Untold::default(), Metrics::default());
        let last = tokens.pop().unwrap();
        assert_eq!(last.finish, Some(Finish::Length));
        let mut answers = BTreeMap::from([(SequenceId(1), answer)]);
        // Both were chosen in one pass.
        tokens.into_iter().for_each(|chosen| untold.add(SequenceId(1), chosen, None));
        untold.add(SequenceId(1), last, answers.remove(&SequenceId(1)));
        assert!(untold.tell(&mut answers, &Codec::Bytes, &metrics).is_empty());
        assert_eq!(heard(&mut client), ["x", "y", "|full after 2"]);
        assert_eq!(metrics.finished.load(Relaxed), 1);
    }

    #[test]
    fn nothing_is_told_of_an_answer_that_is_gone() {
        let (mut answer, mut client) = answer("never");
        let (mut untold, metrics) = (Untold::default(), Metrics::default());
        for chosen in chosen(&mut answer, "x", 100) {
            untold.add(SequenceId(1), chosen, None);
        }
        assert!(untold.tell(&mut BTreeMap::new(), &Codec::Bytes, &metrics).is_empty());
        assert!(heard(&mut client).is_empty() && metrics.generated_tokens.load(Relaxed) == 0);
    }
}
