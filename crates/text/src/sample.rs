//! One example to learn from: its tokens, and which of them are learnt.

use std::ops::Range;

use crate::codec::Codec;
use crate::conversation::Conversation;
use crate::error::{Result, TextError};
use crate::template::ChatTemplate;
use crate::turns::{TrainOn, trained_text};

/// Tokens, and of each whether the loss counts how it is predicted.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Sample {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// Of each, whether it is learnt.
    pub trained: Vec<bool>,
}

impl Sample {
    /// A conversation as a template writes it, and as it is served: the template brings all tokens around the text itself.
    pub fn of_conversation(
        conversation: &Conversation,
        template: &ChatTemplate,
        codec: &Codec,
        train_on: TrainOn,
    ) -> Result<Sample> {
        let (text, trained) = trained_text(template, conversation, train_on)?;
        let sample = Sample::of_text(codec, &text, &trained)?;
        match sample.learns() {
            true => Ok(sample),
            false => Err(TextError::Conversation(
                "has no message of the assistant that could be learnt; take it out".into(),
            )),
        }
    }

    /// A text to go on with and how it goes on, which alone is learnt, and the token that ends it.
    pub fn of_completion(codec: &Codec, prompt: &str, completion: &str, train_on: TrainOn) -> Result<Sample> {
        let text = format!("{prompt}{completion}");
        let begin = if train_on == TrainOn::All { 0 } else { prompt.len() };
        let placed = codec.encode_places(&text, true)?;
        let learnt = Range { start: begin, end: text.len() };
        let mut sample = Sample::of_places(&placed, &[learnt]);
        let end = codec.separator()?;
        match sample.tokens.ends_with(&end) {
            // A tokenizer that ends texts itself has done so.
            true => sample.trained.iter_mut().rev().take(end.len()).for_each(|trained| *trained = true),
            false => sample.push(&end),
        }
        Ok(sample)
    }

    /// A text that is learnt as a whole, and the token that ends it.
    pub fn of_plain(codec: &Codec, text: &str) -> Result<Sample> {
        let mut sample = Sample::default();
        sample.push(&codec.encode(text)?);
        sample.push(&codec.separator()?);
        Ok(sample)
    }

    /// Whether anything of it is learnt. Nothing predicts the first token.
    pub fn learns(&self) -> bool {
        self.trained.iter().skip(1).any(|&trained| trained)
    }

    fn of_text(codec: &Codec, text: &str, trained: &[Range<usize>]) -> Result<Sample> {
        Ok(Sample::of_places(&codec.encode_places(text, false)?, trained))
    }

    /// A token is learnt if any of its bytes is.
    fn of_places(placed: &[(u32, Range<usize>)], trained: &[Range<usize>]) -> Sample {
        let meets = |place: &Range<usize>| {
            trained.iter().any(|span| place.start < span.end && span.start < place.end)
        };
        let (tokens, trained) = placed.iter().map(|(token, place)| (*token, meets(place))).unzip();
        Sample { tokens, trained }
    }

    fn push(&mut self, tokens: &[u32]) {
        self.tokens.extend_from_slice(tokens);
        self.trained.resize(self.tokens.len(), true);
    }
}
