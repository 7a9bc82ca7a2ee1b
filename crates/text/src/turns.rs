//! Which part of what a template writes is learnt: what the assistant says, up to the mark that ends its turn.
//!
//! A template that marks it by `{% generation %}` is believed. Of all others the turns are cut out: what is written of the
//! messages before an answer, and asks for it, must be what the whole text begins with, and so must what is written of the
//! messages up to and with the answer. Where it is not, nobody can tell which tokens are whose, and that is an error.

use std::ops::Range;

use crate::conversation::Conversation;
use crate::error::{Result, TextError};
use crate::template::{ChatTemplate, Request, Written};

/// Which tokens of a conversation are learnt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TrainOn {
    /// What the assistant says.
    #[default]
    Assistant,
    /// Everything.
    All,
    /// What the assistant says last.
    Last,
}

impl TrainOn {
    /// As it is written in recipes.
    pub fn of_name(name: &str) -> Option<TrainOn> {
        Some(match name {
            "assistant" => TrainOn::Assistant,
            "all" => TrainOn::All,
            "last" => TrainOn::Last,
            _ => return None,
        })
    }

    /// The same word.
    pub fn name(self) -> &'static str {
        match self {
            TrainOn::Assistant => "assistant",
            TrainOn::All => "all",
            TrainOn::Last => "last",
        }
    }
}

/// A text of at most so many characters is shown of each side of a place.
const SHOWN: usize = 40;

/// The text of a conversation, and which bytes of it are learnt.
pub fn trained_text(
    template: &ChatTemplate,
    conversation: &Conversation,
    train_on: TrainOn,
) -> Result<(String, Vec<Range<usize>>)> {
    let whole = write(template, conversation, conversation.messages().len(), false)?;
    if train_on == TrainOn::All {
        let all = Range { start: 0, end: whole.text.len() };
        return Ok((whole.text, vec![all]));
    }
    let answers = conversation.answers();
    let mut spans = if template.marks_generation() {
        marked(&whole.generated, &answers)?
    } else {
        let mut learnt = answers.iter().filter(|(_, learnt)| *learnt).map(|(at, _)| *at);
        let learnt: Vec<usize> = match train_on {
            TrainOn::Last => learnt.next_back().into_iter().collect(),
            _ => learnt.collect(),
        };
        let cut = |at: usize| cut(template, conversation, &whole.text, at);
        learnt.into_iter().map(cut).collect::<Result<_>>()?
    };
    if train_on == TrainOn::Last {
        spans.drain(..spans.len().saturating_sub(1));
    }
    Ok((whole.text, spans))
}

/// What a template writes of a conversation that asks for an answer.
pub fn asked_text(template: &ChatTemplate, conversation: &Conversation) -> Result<String> {
    Ok(write(template, conversation, conversation.messages().len(), true)?.text)
}

/// What the template marked, of the answers that may be learnt.
fn marked(generated: &[Range<usize>], answers: &[(usize, bool)]) -> Result<Vec<Range<usize>>> {
    if answers.iter().all(|(_, learnt)| *learnt) {
        return Ok(generated.to_vec());
    }
    if generated.len() == answers.len() {
        let learnt = generated.iter().zip(answers).filter(|(_, (_, learnt))| *learnt);
        return Ok(learnt.map(|(span, _)| span.clone()).collect());
    }
    let message = answers.iter().find(|(_, learnt)| !learnt).map_or(0, |(at, _)| at + 1);
    let (marks, answers) = (generated.len(), answers.len());
    Err(TextError::Uncut {
        message,
        why: format!("it is not to be learnt, and the template marks {marks} texts of {answers} answers"),
    })
}

/// Where the answer `at` lies in the whole text.
fn cut(template: &ChatTemplate, conversation: &Conversation, whole: &str, at: usize) -> Result<Range<usize>> {
    let uncut = |why: String| TextError::Uncut { message: at + 1, why };
    if at == 0 {
        return Err(uncut("the conversation begins with it, and no question asks for it".into()));
    }
    let before = write(template, conversation, at, true)?.text;
    if !whole.starts_with(&before) {
        return Err(uncut(differ("the question that asks for it", &before, whole)));
    }
    let through = write(template, conversation, at + 1, false)?.text;
    let content = conversation.messages()[at]["content"].as_str().unwrap_or_default();
    let end = match without_last_token(template, &through, content) {
        Some(shorter) if whole.starts_with(shorter) && shorter.len() >= before.len() => shorter.len(),
        _ if whole.starts_with(&through) => through.len(),
        _ => return Err(uncut(differ("the conversation that ends with it", &through, whole))),
    };
    if end < before.len() {
        return Err(uncut("the text with it is shorter than the one that asks for it".into()));
    }
    Ok(before.len()..before.len() + without_blanks_behind(&whole[before.len()..end], content).len())
}

/// Some templates end the whole, and so any turn that is made the last, with one token more, behind the mark of the turn itself
/// and a blank.
fn without_last_token<'a>(template: &ChatTemplate, through: &'a str, content: &str) -> Option<&'a str> {
    let shorter = through.trim_end().strip_suffix(template.token("eos_token")?)?;
    let turn = shorter.trim_end();
    let is_marked = turn.len() < shorter.len() && !turn.ends_with(content.trim());
    is_marked.then_some(shorter)
}

/// A turn up to the mark that ends it. Blanks that a template writes behind that are the next turn's: nobody asks the model for
/// them. Where it writes nothing but blanks behind an answer, they are the mark.
fn without_blanks_behind<'a>(turn: &'a str, content: &str) -> &'a str {
    let (short, content) = (turn.trim_end(), content.trim());
    if !content.is_empty() && short.ends_with(content) { turn } else { short }
}

fn write(template: &ChatTemplate, conversation: &Conversation, count: usize, asks: bool) -> Result<Written> {
    let messages = &conversation.messages()[..count];
    let request = Request { messages, tools: conversation.tools(), asks, variables: &serde_json::Map::new() };
    template.write(&request).map_err(TextError::Rendering)
}

/// Where two texts of a template part.
fn differ(what: &str, text: &str, whole: &str) -> String {
    let same = text.chars().zip(whole.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum();
    let (behind, at) = (&text[..same], |text: &str| text[same..].chars().take(SHOWN).collect::<String>());
    let behind: Vec<char> = behind.chars().rev().take(SHOWN).collect();
    let behind: String = behind.into_iter().rev().collect();
    format!(
        "behind {behind:?} the template writes {:?} for {what}, and {:?} for the whole conversation",
        at(text),
        at(whole)
    )
}
