//! Reads configuration text: JSON, and the HJSON that DeepSpeed accepts.
//!
//! HJSON adds comments (`#`, `//`, `/* */`), trailing or missing commas, unquoted keys, unquoted strings that
//! run to the end of their line, `'''` strings over several lines, and a root without braces. Unlike a JSON
//! library this reader keeps the place of every key and value for the messages, refuses duplicate keys at any
//! depth, and bounds both depth and size, so that no input makes it panic, hang or eat memory.

mod cursor;
mod parser;
mod scalar;

use serde_json::{Map, Number, Value};

use crate::diagnostic::{Position, Report};

/// The longest text that is read.
pub const MAX_BYTES: u64 = 4 << 20;
/// How deep objects and lists may nest.
pub const MAX_DEPTH: usize = 64;

/// A value and the byte of the text at which it starts.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Node {
    pub(crate) offset: Option<usize>,
    pub(crate) content: Content,
}

/// What a value is.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Content {
    Null,
    Bool(bool),
    Number(Number),
    Text(String),
    List(Vec<Node>),
    Object(Vec<Member>),
}

/// A key and its value.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Member {
    pub(crate) key: String,
    pub(crate) offset: Option<usize>,
    pub(crate) value: Node,
}

/// A configuration as it was given: its name, its text where it had one, and its tree.
#[derive(Debug, Clone)]
pub(crate) struct Document {
    pub(crate) name: String,
    text: String,
    pub(crate) root: Node,
}

impl Document {
    /// Reads text. Duplicate keys and syntax errors are in the report; with a syntax error there is no document.
    pub(crate) fn from_text(name: &str, text: &str) -> Result<(Document, Report), Report> {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let (root, report) = parser::parse(name, text)?;
        Ok((Document { name: name.to_owned(), text: text.to_owned(), root }, report))
    }

    /// Takes a tree that never was text; `None` where it nests deeper than [`MAX_DEPTH`].
    pub(crate) fn from_value(name: &str, value: &Value) -> Option<Document> {
        Some(Document { name: name.to_owned(), text: String::new(), root: Node::from_value(value, 0)? })
    }

    /// The line and column of a byte of the text.
    pub(crate) fn position(&self, offset: Option<usize>) -> Option<Position> {
        offset.map(|offset| position_in(&self.text, offset))
    }
}

/// The line and column of a byte.
pub(crate) fn position_in(text: &str, offset: usize) -> Position {
    let mut offset = offset.min(text.len());
    while !text.is_char_boundary(offset) {
        offset -= 1;
    }
    let before = &text[..offset];
    let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
    Position { line: before.matches('\n').count() + 1, column: before[line_start..].chars().count() + 1 }
}

impl Node {
    /// A tree without places; `None` where it nests too deep below `depth`.
    pub(crate) fn from_value(value: &Value, depth: usize) -> Option<Node> {
        if depth > MAX_DEPTH {
            return None;
        }
        let content = match value {
            Value::Null => Content::Null,
            Value::Bool(value) => Content::Bool(*value),
            Value::Number(number) => Content::Number(number.clone()),
            Value::String(text) => Content::Text(text.clone()),
            Value::Array(items) => Content::List(
                items.iter().map(|item| Node::from_value(item, depth + 1)).collect::<Option<_>>()?,
            ),
            Value::Object(map) => {
                let member = |(key, value): (&String, &Value)| {
                    let value = Node::from_value(value, depth + 1)?;
                    Some(Member { key: key.clone(), offset: None, value })
                };
                Content::Object(map.iter().map(member).collect::<Option<_>>()?)
            }
        };
        Some(Node { offset: None, content })
    }

    /// The plain JSON of this node, comments (keys that start with `_`) left out.
    pub(crate) fn to_value(&self) -> Value {
        match &self.content {
            Content::Null => Value::Null,
            Content::Bool(value) => Value::Bool(*value),
            Content::Number(number) => Value::Number(number.clone()),
            Content::Text(text) => Value::String(text.clone()),
            Content::List(items) => Value::Array(items.iter().map(Node::to_value).collect()),
            Content::Object(members) => {
                let given = members.iter().filter(|member| !is_comment(&member.key));
                Value::Object(Map::from_iter(
                    given.map(|member| (member.key.clone(), member.value.to_value())),
                ))
            }
        }
    }

    /// The name of this node's type, as messages call it.
    pub(crate) fn type_name(&self) -> &'static str {
        match &self.content {
            Content::Null => "null",
            Content::Bool(_) => "a boolean",
            Content::Number(number) if number.is_f64() => "a number with a fraction or exponent",
            Content::Number(_) => "an integer",
            Content::Text(_) => "a string",
            Content::List(_) => "a list",
            Content::Object(_) => "an object",
        }
    }
}

/// Keys that start with an underscore are the user's comments.
pub(crate) fn is_comment(key: &str) -> bool {
    key.starts_with('_')
}

/// The start of a text that may be very long, for messages.
pub(crate) fn shorten(text: &str) -> String {
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
