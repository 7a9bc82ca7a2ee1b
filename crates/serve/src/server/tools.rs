//! The tools that a request brings, and which of them the model may or must call.

use serde_json::{Map, Value, json};

use super::calls::CallFormat;
use super::fault::Fault;
use super::fields::Fields;
use crate::constrain::{Form, Forms};

/// Tools of a request: OpenAI's number.
const MAX_TOOLS: usize = 128;
/// Bytes of a tool's name.
const MAX_NAME: usize = 64;

/// Whether tools are called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Choice {
    /// The model is not told of them.
    None,
    /// As it likes.
    Auto,
    /// At least one of them.
    Required,
    /// This one.
    Named(String),
}

/// What a request says of tools.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Tools {
    /// As the template is told of them.
    list: Vec<Value>,
    pub(super) choice: Choice,
    /// Whether an answer may have several calls.
    pub(super) several: bool,
}

impl Tools {
    /// Reads `tools`, `tool_choice` and `parallel_tool_calls`.
    pub(super) fn read(fields: &mut Fields) -> Result<Tools, Fault> {
        let list = list(fields.take("tools"))?;
        let several = match fields.take("parallel_tool_calls") {
            None | Some(Value::Bool(true)) => true,
            Some(Value::Bool(false)) => false,
            Some(_) => return Err(Fault::field("parallel_tool_calls", "must be true or false")),
        };
        let choice = choice(fields.take("tool_choice"), &list)?;
        Ok(Tools { list, choice, several })
    }

    /// What the template is told.
    pub(super) fn told(&self) -> Option<Value> {
        let is_told = !self.list.is_empty() && self.choice != Choice::None;
        is_told.then(|| self.list.clone().into())
    }

    /// The form of an answer that has to call one of them; `None` where it need not.
    pub(super) fn form(&self, format: Option<CallFormat>, forms: &Forms) -> Result<Option<Form>, Fault> {
        let allowed: Vec<(&str, Value)> = match &self.choice {
            Choice::None | Choice::Auto => return Ok(None),
            Choice::Required => self.functions().collect(),
            Choice::Named(name) => self.functions().filter(|(known, _)| known == name).collect(),
        };
        let several = self.several && self.choice == Choice::Required;
        let lark = format.and_then(|format| format.grammar(&allowed, several, forms));
        let why =
            "the way in which this model writes calls cannot be forced here; \"auto\" leaves it to the model";
        lark.map(|lark| Some(Form::Lark(lark))).ok_or_else(|| Fault::field("tool_choice", why))
    }

    /// Names and the schemas of what they are called with.
    fn functions(&self) -> impl Iterator<Item = (&str, Value)> {
        self.list.iter().map(|tool| {
            let function = &tool["function"];
            let schema = match &function["parameters"] {
                Value::Null => json!({"type": "object"}),
                schema => schema.clone(),
            };
            (function["name"].as_str().unwrap_or_default(), schema)
        })
    }

    /// The schema of a parameter of one of them.
    pub(super) fn parameter(&self, name: &str, parameter: &str) -> Value {
        let schema = self.functions().find(|(known, _)| *known == name).map(|(_, schema)| schema);
        schema.map(|schema| schema["properties"][parameter].clone()).unwrap_or_default()
    }
}

fn list(tools: Option<Value>) -> Result<Vec<Value>, Fault> {
    const NAME: &str = "tools";
    let list = match tools {
        None => return Ok(Vec::new()),
        Some(Value::Array(list)) if list.len() <= MAX_TOOLS => list,
        Some(_) => return Err(Fault::field(NAME, format!("must be a list of at most {MAX_TOOLS} tools"))),
    };
    for (index, tool) in list.iter().enumerate() {
        check(tool).map_err(|why| Fault::field(format!("{NAME}[{index}]"), why))?;
    }
    let names: Vec<&Value> = list.iter().map(|tool| &tool["function"]["name"]).collect();
    match names.iter().enumerate().find(|(index, name)| names[..*index].contains(name)) {
        Some((index, name)) => {
            Err(Fault::field(format!("{NAME}[{index}]"), format!("is another tool {name}")))
        }
        None => Ok(list),
    }
}

fn check(tool: &Value) -> Result<(), String> {
    if tool["type"] != "function" {
        return Err("its type must be function".into());
    }
    let named = tool["function"]["name"].as_str().unwrap_or_default();
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    if named.is_empty() || named.len() > MAX_NAME || !named.bytes().all(fits) {
        return Err(format!("function.name must be 1 to {MAX_NAME} letters, digits, _, - and ."));
    }
    match &tool["function"]["parameters"] {
        Value::Null | Value::Object(_) => Ok(()),
        _ => Err("function.parameters must be a JSON schema: an object".into()),
    }
}

fn choice(value: Option<Value>, list: &[Value]) -> Result<Choice, Fault> {
    const NAME: &str = "tool_choice";
    let choice = match value {
        None if list.is_empty() => return Ok(Choice::None),
        None => return Ok(Choice::Auto),
        Some(Value::String(word)) => match word.as_str() {
            "none" => return Ok(Choice::None),
            "auto" => return Ok(Choice::Auto),
            "required" => Choice::Required,
            _ => return Err(Fault::field(NAME, "must be none, auto, required, or name a function")),
        },
        Some(Value::Object(named)) => Choice::Named(function_of(&named).ok_or_else(|| {
            Fault::field(NAME, r#"must be like {"type": "function", "function": {"name": "..."}}"#)
        })?),
        Some(_) => return Err(Fault::field(NAME, "must be none, auto, required, or name a function")),
    };
    match &choice {
        _ if list.is_empty() => Err(Fault::field(NAME, "there are no tools to choose from")),
        Choice::Named(name) if list.iter().all(|tool| tool["function"]["name"] != name.as_str()) => {
            Err(Fault::field(NAME, format!("there is no tool {name:?}")))
        }
        _ => Ok(choice),
    }
}

fn function_of(named: &Map<String, Value>) -> Option<String> {
    (named.get("type")? == "function").then_some(())?;
    Some(named.get("function")?["name"].as_str()?.to_owned())
}
