//! A conversation as files of examples have it: OpenAI's messages, checked and brought into the form that templates know.

use serde_json::{Map, Value};

use crate::error::{Result, TextError};

/// What somebody says to an assistant, and what it answers.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Conversation {
    messages: Vec<Value>,
    tools: Option<Value>,
    /// Of each message, whether it may be learnt.
    learnt: Vec<bool>,
}

/// Parts of messages that are no text.
const OTHER_MEDIA: [&str; 8] =
    ["image", "image_url", "input_image", "audio", "input_audio", "video", "video_url", "file"];

impl Conversation {
    /// Of messages as OpenAI writes them, and the tools that the assistant may call.
    pub fn new(messages: &Value, tools: Option<&Value>) -> Result<Conversation> {
        let Value::Array(list) = messages else { return refuse("is no list of messages") };
        if list.is_empty() {
            return refuse("has no message");
        }
        let told = list.iter().enumerate().map(|(index, message)| {
            readable(message).map_err(|why| TextError::Conversation(format!("message {}: {why}", index + 1)))
        });
        let messages = told.collect::<Result<Vec<_>>>()?;
        let learnt = list.iter().map(is_learnt).collect();
        let tools = tools.map(parsed).filter(|tools| !tools.is_null() && *tools != Value::Array(Vec::new()));
        Ok(Conversation { messages, tools, learnt })
    }

    /// Of turns as ShareGPT writes them: `from` and `value`.
    pub fn of_turns(turns: &Value, system: Option<&str>) -> Result<Conversation> {
        let Value::Array(list) = turns else { return refuse("is no list of turns") };
        let mut messages: Vec<Value> = system.into_iter().map(|text| message("system", text)).collect();
        for (index, turn) in list.iter().enumerate() {
            let (Some(from), Some(value)) = (turn["from"].as_str(), turn["value"].as_str()) else {
                return refuse(format!("turn {} has no texts in 'from' and 'value'", index + 1));
            };
            let Some(role) = role_of(from) else {
                return refuse(format!(
                    "turn {}: '{from}' is nobody that is known; known are human, gpt, system, and tool",
                    index + 1
                ));
            };
            messages.push(message(role, value));
        }
        Conversation::new(&messages.into(), None)
    }

    /// A question and its answer, as Alpaca has them.
    pub fn of_instruction(instruction: &str, input: &str, output: &str) -> Result<Conversation> {
        let question = match input.trim().is_empty() {
            true => instruction.to_owned(),
            false => format!("{instruction}\n\n{input}"),
        };
        Conversation::new(&Value::Array(vec![message("user", &question), message("assistant", output)]), None)
    }

    /// The same, of which the first `count` messages are not learnt.
    #[must_use]
    pub fn learnt_from(mut self, count: usize) -> Conversation {
        self.learnt.iter_mut().take(count).for_each(|learnt| *learnt = false);
        self
    }

    /// Its messages, in the form that templates know.
    pub fn messages(&self) -> &[Value] {
        &self.messages
    }

    /// The tools that the assistant may call.
    pub fn tools(&self) -> Option<&Value> {
        self.tools.as_ref()
    }

    /// Of each of the assistant's messages, which it is and whether it may be learnt.
    pub(crate) fn answers(&self) -> Vec<(usize, bool)> {
        let answers = self.messages.iter().zip(&self.learnt).enumerate();
        answers
            .filter(|(_, (message, _))| message["role"] == "assistant")
            .map(|(at, (_, &l))| (at, l))
            .collect()
    }
}

fn refuse<T>(why: impl Into<String>) -> Result<T> {
    Err(TextError::Conversation(why.into()))
}

fn message(role: &str, content: &str) -> Value {
    serde_json::json!({ "role": role, "content": content })
}

fn role_of(from: &str) -> Option<&'static str> {
    Some(match from {
        "human" | "user" => "user",
        "gpt" | "assistant" | "chatgpt" | "bard" | "model" => "assistant",
        "system" => "system",
        "tool" | "observation" | "function_response" => "tool",
        _ => return None,
    })
}

/// OpenAI's `weight`: an answer of weight 0 is only shown.
fn is_learnt(message: &Value) -> bool {
    message["weight"].as_f64() != Some(0.0)
}

/// A message with its content as one text and its calls of tools as objects.
fn readable(message: &Value) -> Result<Value, String> {
    let Value::Object(fields) = message else { return Err("is no object".into()) };
    let mut fields = fields.clone();
    fields.remove("weight");
    if !fields.get("role").is_some_and(Value::is_string) {
        let keys = fields.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
        return Err(format!("has no text in 'role', but {keys}"));
    }
    let calls = fields.get("tool_calls").is_some_and(|calls| calls.as_array().is_some_and(|c| !c.is_empty()));
    match fields.get("content") {
        Some(Value::String(_)) => {}
        None | Some(Value::Null) if calls => drop(fields.insert("content".into(), "".into())),
        None | Some(Value::Null) => return Err("says nothing: it has neither content nor tool_calls".into()),
        Some(Value::Array(parts)) => {
            let text = parts.iter().map(part).collect::<Result<String, _>>()?;
            fields.insert("content".into(), text.into());
        }
        Some(_) => return Err("its content is neither a text nor a list of parts".into()),
    }
    if let Some(Value::Array(calls)) = fields.get_mut("tool_calls") {
        calls.iter_mut().filter_map(Value::as_object_mut).for_each(readable_call);
    }
    Ok(fields.into())
}

/// One part of a content in parts.
fn part(part: &Value) -> Result<String, String> {
    let kind = part["type"].as_str().unwrap_or("text");
    if OTHER_MEDIA.contains(&kind) || OTHER_MEDIA.iter().any(|medium| part.get(medium).is_some()) {
        return Err(format!(
            "has a part of type '{kind}', and only text is learnt; take such conversations out"
        ));
    }
    part["text"]
        .as_str()
        .map(str::to_owned)
        .ok_or_else(|| format!("has a part of type '{kind}' without a text"))
}

/// OpenAI writes the arguments of a call as a text of JSON; templates write them themselves.
fn readable_call(call: &mut Map<String, Value>) {
    let function = match call.get_mut("function") {
        Some(Value::Object(function)) => function,
        _ => call,
    };
    if let Some(arguments) = function.get_mut("arguments") {
        *arguments = parsed(arguments);
    }
}

/// What a text of JSON says; anything else as it is.
fn parsed(value: &Value) -> Value {
    let found = value.as_str().and_then(|text| serde_json::from_str(text).ok());
    found.filter(|found: &Value| found.is_object() || found.is_array()).unwrap_or_else(|| value.clone())
}
