//! How models write calls of tools, found in their chat templates, and read back from what they say.

use ferrospeed_text::ChatTemplate;
use serde_json::{Map, Value, json};

use super::tools::Tools;
use crate::constrain::{Forms, bounded};

/// A way of writing calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CallFormat {
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>`: Hermes', Qwen's and many others'.
    Hermes,
    /// `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: of later Qwens.
    Tagged,
    /// `{"name": …, "parameters": …}`, perhaps behind `<|python_tag|>`: Llama's.
    Llama,
    /// `[TOOL_CALLS][{"name": …, "arguments": …}]`: Mistral's.
    Mistral,
    /// `[TOOL_CALLS]name[ARGS]{…}`: Mistral's later one.
    MistralNamed,
    /// Messages of their own, with a channel and a recipient: gpt-oss'.
    Harmony,
}

/// A call of a tool.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Call {
    pub(super) name: String,
    /// An object, as JSON.
    pub(super) arguments: String,
}

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
const MISTRAL: &str = "[TOOL_CALLS]";
const MISTRAL_ARGUMENTS: &str = "[ARGS]";
const PYTHON: &str = "<|python_tag|>";

impl CallFormat {
    /// The one of a model's template; `None` where that has no place for tools.
    pub(super) fn of(template: &ChatTemplate) -> Option<CallFormat> {
        let source = template.source()?;
        let has = |text: &str| source.contains(text);
        match () {
            () if has("<|channel|>") => Some(CallFormat::Harmony),
            () if !has("tools") => None,
            () if has("<function=") => Some(CallFormat::Tagged),
            () if has(OPEN) => Some(CallFormat::Hermes),
            () if has(MISTRAL) && has(MISTRAL_ARGUMENTS) => Some(CallFormat::MistralNamed),
            () if has(MISTRAL) => Some(CallFormat::Mistral),
            () if has("parameters") => Some(CallFormat::Llama),
            () => None,
        }
    }

    /// What calls begin with. Nothing: an answer that begins with a brace is one.
    pub(super) fn mark(self) -> Option<&'static str> {
        match self {
            CallFormat::Hermes | CallFormat::Tagged => Some(OPEN),
            CallFormat::Mistral | CallFormat::MistralNamed => Some(MISTRAL),
            CallFormat::Llama | CallFormat::Harmony => None,
        }
    }

    /// The calls in a text from the first mark on, and what else it says; `None` where it is none.
    pub(super) fn read(self, text: &str, tools: &Tools) -> Option<(Vec<Call>, String)> {
        let (calls, rest) = match self {
            CallFormat::Hermes => between(text, |inner| object(inner, "arguments")),
            CallFormat::Tagged => between(text, |inner| tagged(inner, tools)),
            CallFormat::Llama => {
                (objects(text.trim().strip_prefix(PYTHON).unwrap_or(text.trim()))?, String::new())
            }
            CallFormat::Mistral => {
                let list: Vec<Value> =
                    serde_json::from_str(text.trim().strip_prefix(MISTRAL)?.trim()).ok()?;
                let calls =
                    list.iter().map(|call| of_value(call, "arguments")).collect::<Option<Vec<_>>>()?;
                (calls, String::new())
            }
            CallFormat::MistralNamed => {
                let calls = text.split(MISTRAL).skip(1).map(named).collect::<Option<Vec<_>>>()?;
                (calls, String::new())
            }
            CallFormat::Harmony => return None,
        };
        (!calls.is_empty()).then_some((calls, rest))
    }

    /// The grammar, in Lark's notation, of an answer that is a call of one of these functions, or of several.
    pub(super) fn grammar(self, functions: &[(&str, Value)], several: bool, forms: &Forms) -> Option<String> {
        let one_of = |key: &str| -> Value {
            let one = |(name, schema): &(&str, Value)| {
                json!({"type": "object", "properties": {"name": {"const": name}, key: schema},
                       "required": ["name", key], "additionalProperties": false})
            };
            json!({"anyOf": functions.iter().map(one).collect::<Vec<_>>()})
        };
        let named = |key: &str| bounded(one_of(key));
        let literal = |text: &str| forms.literal(text);
        Some(match self {
            CallFormat::Hermes => {
                let more = if several { " (\"\\n\" one)*" } else { "" };
                format!(
                    "start: one{more}\none: {} \"\\n\" body \"\\n\" {}\nbody: %json {}",
                    literal(OPEN),
                    literal(CLOSE),
                    named("arguments")
                )
            }
            CallFormat::Llama => format!("start: body\nbody: %json {}", named("parameters")),
            CallFormat::Mistral => {
                let most = if several { 16 } else { 1 };
                let list =
                    json!({"type": "array", "items": one_of("arguments"), "minItems": 1, "maxItems": most});
                let list = bounded(list);
                format!("start: {} body\nbody: %json {list}", literal(MISTRAL))
            }
            CallFormat::MistralNamed => {
                let rules = functions.iter().enumerate().map(|(index, (name, schema))| {
                    let (name, schema) = (Value::from(*name), bounded(schema.clone()));
                    let (open, arguments) = (literal(MISTRAL), literal(MISTRAL_ARGUMENTS));
                    format!(
                        "call{index}: {open} {name} {arguments} body{index}\nbody{index}: %json {schema}\n"
                    )
                });
                let rules: String = rules.collect();
                let names: Vec<String> = (0..functions.len()).map(|index| format!("call{index}")).collect();
                let more = if several { "+" } else { "" };
                format!("start: one{more}\none: {}\n{rules}", names.join(" | "))
            }
            CallFormat::Tagged | CallFormat::Harmony => return None,
        })
    }
}

/// What `read` makes of the texts between marks, and what stands outside of them or is no call.
fn between(text: &str, read: impl Fn(&str) -> Option<Call>) -> (Vec<Call>, String) {
    let (mut calls, mut rest, mut left) = (Vec::new(), String::new(), text);
    while let Some((before, behind)) = left.split_once(OPEN) {
        rest.push_str(before);
        // An answer that ends in the middle of one may still be a whole call.
        let (inner, after) = behind.split_once(CLOSE).unwrap_or((behind, ""));
        match read(inner.trim()) {
            Some(call) => calls.push(call),
            None => rest.push_str(&left[before.len()..left.len() - after.len()]),
        }
        left = after;
    }
    rest.push_str(left);
    (calls, rest.trim().to_owned())
}

fn object(text: &str, key: &str) -> Option<Call> {
    of_value(&serde_json::from_str(text).ok()?, key)
}

fn of_value(call: &Value, key: &str) -> Option<Call> {
    let name = call["name"].as_str()?.to_owned();
    let arguments = match &call[key] {
        Value::Null => "{}".into(),
        Value::String(text) => text.clone(),
        arguments => arguments.to_string(),
    };
    Some(Call { name, arguments })
}

/// Objects behind each other, with or without semicolons.
fn objects(text: &str) -> Option<Vec<Call>> {
    let (mut calls, mut left) = (Vec::new(), text);
    while !left.is_empty() {
        let mut values = serde_json::Deserializer::from_str(left).into_iter::<Value>();
        let value = values.next()?.ok()?;
        let key = if value.get("parameters").is_some() { "parameters" } else { "arguments" };
        calls.push(of_value(&value, key)?);
        left = left[values.byte_offset()..].trim_start().trim_start_matches(';').trim_start();
    }
    Some(calls)
}

/// `name[ARGS]{…}`, or with the arguments right behind the name.
fn named(text: &str) -> Option<Call> {
    let text = text.trim();
    let (name, arguments) = match text.split_once(MISTRAL_ARGUMENTS) {
        Some(parts) => parts,
        None => text.split_at(text.find('{')?),
    };
    let arguments: Value = serde_json::from_str(arguments.trim()).ok()?;
    // A call may have an id behind its name.
    let name = name.split("[CALL_ID]").next()?.trim().to_owned();
    Some(Call { name, arguments: arguments.to_string() })
}

/// `<function=name><parameter=key>value</parameter></function>`. Values are texts but where the tool wants something else.
fn tagged(text: &str, tools: &Tools) -> Option<Call> {
    let (name, mut left) = text.strip_prefix("<function=")?.split_once('>')?;
    let mut arguments = Map::new();
    while let Some((_, behind)) = left.split_once("<parameter=") {
        let (key, behind) = behind.split_once('>')?;
        let (value, after) = behind.split_once("</parameter>")?;
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        let is_text = tools.parameter(name, key)["type"] == "string";
        let read = serde_json::from_str(value).ok().filter(|_| !is_text);
        arguments.insert(key.to_owned(), read.unwrap_or_else(|| value.into()));
        left = after;
    }
    Some(Call { name: name.to_owned(), arguments: Value::from(arguments).to_string() })
}
