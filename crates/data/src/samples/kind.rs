//! What kind of samples a file holds: told by the fields of its first record, or by `data.kind`.

use std::fmt;

use ferrospeed_text::Conversation;
use serde_json::Value;

use super::pair;

/// How a record says what is to be learnt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SampleKind {
    /// OpenAI's `messages` (or `conversations` of the same form), and `tools`.
    Messages,
    /// ShareGPT's `conversations`: `from` and `value`.
    ShareGpt,
    /// Alpaca's `instruction`, `input` and `output`.
    Alpaca,
    /// `prompt` and `completion`: texts, or lists of messages.
    Completion,
    /// One `text`.
    Text,
    /// `chosen` and `rejected`, maybe with the `prompt` that both answer.
    Preference,
    /// `prompt`, `completion` and a `label`: whether the completion is wanted.
    Unpaired,
}

/// How records lie in sequences, which an objective decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Layout {
    /// As many samples as fit.
    #[default]
    Packed,
    /// Two answers to one prompt.
    Pairs,
    /// An answer that is wanted or not, and another prompt's answer to the same prompt.
    Judged,
}

/// What a record becomes before it is tokens.
pub(crate) enum Content {
    Conversation(Conversation),
    Completion { prompt: String, completion: String },
    Text(String),
}

const KINDS: [SampleKind; 7] = [
    SampleKind::Messages,
    SampleKind::ShareGpt,
    SampleKind::Alpaca,
    SampleKind::Unpaired,
    SampleKind::Completion,
    SampleKind::Preference,
    SampleKind::Text,
];

impl SampleKind {
    /// As it is written in recipes.
    pub fn of_name(name: &str) -> Option<SampleKind> {
        KINDS.into_iter().find(|kind| kind.name() == name)
    }

    /// The same word.
    pub fn name(self) -> &'static str {
        match self {
            SampleKind::Messages => "messages",
            SampleKind::ShareGpt => "sharegpt",
            SampleKind::Alpaca => "alpaca",
            SampleKind::Completion => "completion",
            SampleKind::Text => "text",
            SampleKind::Preference => "preference",
            SampleKind::Unpaired => "unpaired",
        }
    }

    /// How records of this kind lie in sequences.
    pub fn layout(self) -> Layout {
        match self {
            SampleKind::Preference => Layout::Pairs,
            SampleKind::Unpaired => Layout::Judged,
            _ => Layout::Packed,
        }
    }

    /// Its fields, for messages.
    fn fields(self) -> &'static str {
        match self {
            SampleKind::Messages => "'messages', a list of objects with 'role' and 'content'",
            SampleKind::ShareGpt => "'conversations', a list of objects with 'from' and 'value'",
            SampleKind::Alpaca => "'instruction' and 'output', and maybe 'input'",
            SampleKind::Completion => "'prompt' and 'completion'",
            SampleKind::Text => "'text'",
            SampleKind::Preference => "'chosen' and 'rejected', and maybe 'prompt'",
            SampleKind::Unpaired => "'prompt', 'completion' and 'label', which is true or false",
        }
    }

    /// The kind of a record, or why it is none. One that could be compared is never imitated because it fits another kind too, but where
    /// comparisons are wanted it is of the kind that allows them.
    pub(crate) fn of(record: &Value, wanted: Layout) -> Result<SampleKind, String> {
        let mut fitting = KINDS.into_iter().filter(|kind| kind.fits(record));
        let is_wanted = |kind: &SampleKind| wanted != Layout::Packed && kind.layout() == wanted;
        let first = fitting.clone().find(is_wanted).or_else(|| fitting.next());
        first.ok_or_else(|| {
            let known: Vec<String> = KINDS.iter().map(|kind| format!("{} ({kind})", kind.fields())).collect();
            format!("is no sample that is known: it has {}; known are {}", keys(record), known.join("; "))
        })
    }

    fn fits(self, record: &Value) -> bool {
        let has = |key: &str| record.get(key).is_some_and(|value| !value.is_null());
        match self {
            SampleKind::Messages => messages(record).is_some(),
            SampleKind::ShareGpt => turns(record).is_some(),
            SampleKind::Alpaca => has("instruction") && has("output"),
            SampleKind::Completion => has("prompt") && has("completion"),
            SampleKind::Text => record["text"].is_string(),
            SampleKind::Preference => has("chosen") && has("rejected"),
            SampleKind::Unpaired => has("prompt") && has("completion") && record["label"].is_boolean(),
        }
    }

    /// What a record of this kind says, of those that are one sample each.
    pub(crate) fn read(self, record: &Value) -> Result<Content, String> {
        let told = |error: ferrospeed_text::TextError| error.to_string();
        self.expect(record)?;
        let text = |key: &str| text(record, key);
        Ok(match self {
            SampleKind::Messages => {
                let messages = messages(record).unwrap_or(&Value::Null);
                let tools = record.get("tools");
                Content::Conversation(Conversation::new(messages, tools).map_err(told)?)
            }
            SampleKind::ShareGpt => {
                let turns = turns(record).unwrap_or(&Value::Null);
                let system = record["system"].as_str().filter(|system| !system.is_empty());
                Content::Conversation(Conversation::of_turns(turns, system).map_err(told)?)
            }
            SampleKind::Alpaca => {
                let [instruction, input, output] = [text("instruction")?, text("input")?, text("output")?];
                Content::Conversation(Conversation::of_instruction(instruction, input, output).map_err(told)?)
            }
            SampleKind::Completion | SampleKind::Unpaired => {
                completion(&record["prompt"], &record["completion"], record.get("tools"))?
            }
            SampleKind::Text => Content::Text(text("text")?.to_owned()),
            SampleKind::Preference => pair::of(record)?.0,
        })
    }

    /// Refuses a record of another kind.
    pub(crate) fn expect(self, record: &Value) -> Result<(), String> {
        if !self.fits(record) {
            let other = KINDS.into_iter().find(|kind| kind.fits(record)).map_or(String::new(), |other| {
                format!(
                    " ({other}); keep different kinds in files of different runs, or name one with data.kind"
                )
            });
            return Err(format!(
                "is not of the kind '{self}', as the first sample is: it has {}{other}",
                keys(record)
            ));
        }
        Ok(())
    }
}

/// A text of a record; one that is not there is empty.
fn text<'a>(record: &'a Value, key: &str) -> Result<&'a str, String> {
    match record.get(key) {
        None | Some(Value::Null) => Ok(""),
        Some(Value::String(text)) => Ok(text.as_str()),
        Some(_) => Err(format!("its '{key}' is no text")),
    }
}

impl fmt::Display for SampleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The fields of a record, for messages.
fn keys(record: &Value) -> String {
    match record {
        Value::Object(fields) if fields.is_empty() => "no fields".into(),
        Value::Object(fields) => fields.keys().map(String::as_str).collect::<Vec<_>>().join(", "),
        _ => "no fields, for it is no object".into(),
    }
}

fn listed<'a>(record: &'a Value, keys: &[&str], field: &str) -> Option<&'a Value> {
    let lists = keys.iter().filter_map(|key| record.get(key));
    lists.into_iter().find(|list| list.get(0).is_some_and(|first| first.get(field).is_some()))
}

fn messages(record: &Value) -> Option<&Value> {
    listed(record, &["messages", "conversations", "conversation"], "role").or_else(|| {
        record.get("messages").filter(|list| list.get(0).is_none_or(|first| first.get("from").is_none()))
    })
}

fn turns(record: &Value) -> Option<&Value> {
    listed(record, &["conversations", "conversation", "messages"], "from").or_else(|| {
        record.get("conversations").filter(|list| list.get(0).is_none_or(|first| first.get("role").is_none()))
    })
}

pub(super) fn completion(
    prompt: &Value,
    completion: &Value,
    tools: Option<&Value>,
) -> Result<Content, String> {
    match (prompt, completion) {
        (Value::String(prompt), Value::String(completion)) => {
            Ok(Content::Completion { prompt: prompt.clone(), completion: completion.clone() })
        }
        (Value::Array(prompt), Value::Array(completion)) => {
            let count = prompt.len();
            let all: Vec<Value> = prompt.iter().chain(completion).cloned().collect();
            let all = Conversation::new(&all.into(), tools).map_err(|error| error.to_string())?;
            Ok(Content::Conversation(all.learnt_from(count)))
        }
        _ => Err("its 'prompt' and 'completion' are neither both texts nor both lists of messages".into()),
    }
}
