//! A model that several ranks hold, in slices or with experts apart: the first one serves, the others compute what it tells them.
//!
//! Before a pass the first rank tells the others its tokens, where they stand and whose logits are wanted; then all compute, and
//! their collectives meet. A rank that serves nobody for a while says so, so that waiting is not taken for a hang. Whoever is
//! lost ends the pass with an error that names it; the launcher ends the rest.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrospeed_comm::Group;
use ferrospeed_tensor::{PagedRows, PagedSequence};

use crate::error::{Result, ServeError};
use crate::runner::Runner;

/// How long the first rank is silent at most. Far below any deadline of a collective.
const LONGEST_SILENCE: Duration = Duration::from_secs(5);
/// What a message can be long: beyond it, it is none of ours.
const LONGEST_MESSAGE: i64 = 1 << 28;

/// One pass, as all ranks must know it.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Pass {
    pub(crate) ids: Vec<i64>,
    pub(crate) rows: Arc<PagedRows>,
    /// The rows whose logits are wanted.
    pub(crate) of_logits: Vec<i64>,
}

#[derive(Debug, PartialEq)]
enum Message {
    Nothing,
    Pass(Pass),
    End,
}

impl Message {
    fn words(&self) -> Vec<i64> {
        let Message::Pass(pass) = self else { return vec![i64::from(*self == Message::End)] };
        let list = |words: &mut Vec<i64>, values: &[i64]| {
            words.push(values.len() as i64);
            words.extend_from_slice(values);
        };
        let mut words = vec![2];
        list(&mut words, &pass.ids);
        list(&mut words, &pass.of_logits);
        words.push(pass.rows.sequences.len() as i64);
        for sequence in &pass.rows.sequences {
            words.extend([sequence.first as i64, sequence.count as i64]);
            list(&mut words, &sequence.blocks.iter().map(|&block| i64::from(block)).collect::<Vec<_>>());
        }
        words
    }

    fn read(words: &[i64]) -> Option<Message> {
        let mut words = Words(words);
        Some(match words.next()? {
            0 => Message::Nothing,
            1 => Message::End,
            2 => {
                let (ids, of_logits) = (words.list()?.to_vec(), words.list()?.to_vec());
                let mut sequences = Vec::new();
                for _ in 0..words.count()? {
                    let (first, count) = (words.count()?, words.count()?);
                    let blocks = words.list()?.iter().map(|&block| block.try_into().ok());
                    sequences.push(PagedSequence { first, count, blocks: blocks.collect::<Option<_>>()? });
                }
                Message::Pass(Pass { ids, rows: Arc::new(PagedRows { sequences }), of_logits })
            }
            _ => return None,
        })
    }
}

/// What is left of a message.
struct Words<'a>(&'a [i64]);

impl<'a> Words<'a> {
    fn next(&mut self) -> Option<i64> {
        let (&first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(first)
    }

    fn count(&mut self) -> Option<usize> {
        usize::try_from(self.next()?).ok()
    }

    fn list(&mut self) -> Option<&'a [i64]> {
        let count = self.count()?;
        let (list, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(list)
    }
}

/// The first rank's end: tells the others what to do. Dropping it lets them go.
#[derive(Debug)]
pub(crate) struct Lead {
    group: Group,
    told: Instant,
    is_lost: bool,
}

impl Lead {
    pub(crate) fn new(group: &Group) -> Lead {
        Lead { group: group.clone(), told: Instant::now(), is_lost: false }
    }

    pub(crate) fn pass(&mut self, pass: &Pass) -> Result<()> {
        self.tell(&Message::Pass(pass.clone()))
    }

    /// Speaks where it was silent for long.
    pub(crate) fn stay(&mut self) -> Result<()> {
        if self.told.elapsed() < LONGEST_SILENCE { Ok(()) } else { self.tell(&Message::Nothing) }
    }

    /// Notes that ranks have not all done the same: they cannot go on together.
    pub(crate) fn lose(&mut self) {
        self.is_lost = true;
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.is_lost
    }

    fn tell(&mut self, message: &Message) -> Result<()> {
        if self.is_lost {
            return Err(ServeError::Together("a rank was lost, and the model with it; start again".into()));
        }
        let mut words = message.words();
        let mut length = [words.len() as i64];
        let sent = self.group.broadcast(&mut length, 0).and_then(|()| self.group.broadcast(&mut words, 0));
        self.told = Instant::now();
        self.is_lost = sent.is_err();
        sent.map_err(|error| ServeError::Together(error.to_string()))
    }
}

impl Drop for Lead {
    fn drop(&mut self) {
        // Ranks that are gone need no word.
        let _ = self.tell(&Message::End);
    }
}

/// Computes what the first rank of the group tells, until it ends.
pub fn follow(group: &Group, mut runner: Runner) -> Result<()> {
    let failed = |error: ferrospeed_comm::Error| ServeError::Together(error.to_string());
    loop {
        let mut length = [0i64];
        group.broadcast(&mut length, 0).map_err(failed)?;
        if !(1..=LONGEST_MESSAGE).contains(&length[0]) {
            return Err(ServeError::Together(format!("the first rank announced {} words", length[0])));
        }
        let mut words = vec![0i64; length[0] as usize];
        group.broadcast(&mut words, 0).map_err(failed)?;
        match Message::read(&words) {
            Some(Message::Nothing) => {}
            Some(Message::Pass(pass)) => runner.compute(&pass, &mut |_, _| Ok(())).map(drop)?,
            Some(Message::End) => return Ok(()),
            None => return Err(ServeError::Together("the first rank sent what is no message".into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_read_back_what_was_written_and_nothing_else() {
        let sequence = |first, count, blocks: &[u32]| PagedSequence { first, count, blocks: blocks.to_vec() };
        let rows = PagedRows { sequences: vec![sequence(3, 2, &[7, 1]), sequence(0, 1, &[4])] };
        let pass = Pass { ids: vec![5, 6, 9], rows: Arc::new(rows), of_logits: vec![1, 2] };
        for message in [Message::Nothing, Message::End, Message::Pass(pass)] {
            let words = message.words();
            assert_eq!(Message::read(&words).as_ref(), Some(&message));
            for short in 0..words.len() {
                assert_ne!(Message::read(&words[..short]).as_ref(), Some(&message));
            }
        }
        assert!(Message::read(&[2, i64::MAX]).is_none() && Message::read(&[2, -1]).is_none());
        assert!(Message::read(&[3]).is_none() && Message::read(&[]).is_none());
    }
}
