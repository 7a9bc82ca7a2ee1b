//! What a model says, taken apart as it comes: what it thinks, what it says to its reader, and calls of tools.

use super::calls::{Call, CallFormat};
use super::tools::Tools;

/// A part of what was said.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Utterance {
    Thought(String),
    Content(String),
    Calls(Vec<Call>),
}

const THINK: &str = "<think>";
const THOUGHT: &str = "</think>";

/// How a model's answers are read.
#[derive(Debug, Clone)]
pub(super) struct Reading {
    /// Whether it writes what it thinks between marks.
    pub(super) thinks: bool,
    /// Whether the prompt has begun a thought already.
    pub(super) is_thinking: bool,
    pub(super) calls: Option<CallFormat>,
    pub(super) tools: Tools,
}

impl Reading {
    /// Takes an answer apart.
    pub(super) fn begin(&self) -> Spoken {
        let state = match self.calls {
            Some(CallFormat::Harmony) => State::Head,
            _ if self.is_thinking => State::Thinking,
            _ => State::Begin,
        };
        let is_fresh = state == State::Thinking;
        Spoken { reading: self.clone(), state, held: String::new(), is_fresh, has_called: false }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    /// Nothing was said but white space.
    Begin,
    Thinking,
    Speaking,
    /// Held until it is over: only then is it known to be a call.
    Calling,
    /// Harmony: before what a message says.
    Head,
    /// Harmony: in a message that somebody thinks (`false`) or says (`true`).
    Message(bool),
    /// Harmony: in a message to a tool.
    To(String),
}

/// An answer that is being taken apart.
#[derive(Debug, Clone)]
pub(super) struct Spoken {
    reading: Reading,
    state: State,
    held: String,
    /// Whether white space is left out until something else comes: behind a mark of thoughts.
    is_fresh: bool,
    has_called: bool,
}

impl Spoken {
    /// Takes more text; gives what is certain.
    pub(super) fn push(&mut self, text: &str) -> Vec<Utterance> {
        self.held.push_str(text);
        let mut said = Vec::new();
        while self.step(&mut said, false) {}
        self.tidy(said)
    }

    /// What is left when no text follows.
    pub(super) fn finish(&mut self) -> Vec<Utterance> {
        let mut said = Vec::new();
        while self.step(&mut said, true) {}
        let rest = std::mem::take(&mut self.held);
        match &self.state {
            State::Thinking | State::Message(false) => said.push(Utterance::Thought(rest)),
            State::Begin | State::Speaking | State::Message(true) => said.push(Utterance::Content(rest)),
            State::Calling => {
                match self.reading.calls.and_then(|calls| calls.read(&rest, &self.reading.tools)) {
                    Some((calls, content)) => {
                        said.extend([Utterance::Content(content), Utterance::Calls(calls)])
                    }
                    None => said.push(Utterance::Content(rest)),
                }
            }
            State::To(name) => {
                said.push(Utterance::Calls(vec![Call {
                    name: name.clone(),
                    arguments: rest.trim().to_owned(),
                }]));
            }
            // Half a head says nothing.
            State::Head => {}
        }
        self.tidy(said)
    }

    fn tidy(&mut self, mut said: Vec<Utterance>) -> Vec<Utterance> {
        said.retain(
            |one| !matches!(one, Utterance::Thought(text) | Utterance::Content(text) if text.is_empty()),
        );
        if !self.reading.tools.several {
            for one in &mut said {
                if let Utterance::Calls(calls) = one {
                    calls.truncate(usize::from(!self.has_called));
                }
            }
            said.retain(|one| !matches!(one, Utterance::Calls(calls) if calls.is_empty()));
        }
        self.has_called |= said.iter().any(|one| matches!(one, Utterance::Calls(_)));
        said
    }

    /// One change of state, or what can be given in this one. Whether there may be more. `is_all`: no text follows.
    fn step(&mut self, said: &mut Vec<Utterance>, is_all: bool) -> bool {
        if self.is_fresh {
            self.held = self.held.trim_start().to_owned();
            self.is_fresh = self.held.is_empty();
        }
        match self.state.clone() {
            State::Begin => self.begin(is_all),
            State::Thinking => {
                let Some(text) = self.until(&[THOUGHT], said, Utterance::Thought) else { return false };
                said.push(Utterance::Thought(text.trim_end().to_owned()));
                self.is_fresh = true;
                self.state = State::Begin;
                // Its thoughts are over: another mark of them is text.
                self.reading.thinks = false;
                true
            }
            State::Speaking => {
                let Some(mark) = self.reading.calls.and_then(CallFormat::mark) else {
                    said.push(Utterance::Content(std::mem::take(&mut self.held)));
                    return false;
                };
                let Some(text) = self.until(&[mark], said, Utterance::Content) else { return false };
                said.push(Utterance::Content(text.trim_end().to_owned()));
                self.held.insert_str(0, mark);
                self.state = State::Calling;
                true
            }
            State::Calling => false,
            State::Head => self.head(),
            State::Message(is_said) => {
                let of = if is_said { Utterance::Content } else { Utterance::Thought };
                let Some(text) = self.until(&["<|end|>", "<|start|>", "<|return|>"], said, of) else {
                    return false;
                };
                said.push(of(text));
                self.state = State::Head;
                true
            }
            State::To(name) => {
                let Some(text) = self.until(&["<|call|>", "<|end|>", "<|start|>"], &mut Vec::new(), |_| {
                    Utterance::Content(String::new())
                }) else {
                    return false;
                };
                said.push(Utterance::Calls(vec![Call { name, arguments: text.trim().to_owned() }]));
                self.state = State::Head;
                true
            }
        }
    }

    /// Sees by its first word what an answer is.
    fn begin(&mut self, is_all: bool) -> bool {
        let text = self.held.trim_start();
        if self.reading.thinks {
            if let Some(thought) = text.strip_prefix(THINK) {
                self.held = thought.to_owned();
                self.is_fresh = true;
                self.state = State::Thinking;
                return true;
            }
            if THINK.starts_with(text) && !is_all {
                return false;
            }
        }
        let braces = self.reading.calls == Some(CallFormat::Llama) && self.reading.tools.told().is_some();
        if braces && (text.starts_with('{') || text.starts_with("<|python_tag|>")) {
            self.state = State::Calling;
            return true;
        }
        let may_be = braces && (text.is_empty() || "<|python_tag|>".starts_with(text));
        if !is_all && (text.is_empty() || may_be) {
            return false;
        }
        self.state = State::Speaking;
        true
    }

    /// Reads the head of one of Harmony's messages.
    fn head(&mut self) -> bool {
        let Some((head, rest)) = self.held.split_once("<|message|>") else { return false };
        let recipient = head.split("to=functions.").nth(1);
        let ends = |char: char| char.is_whitespace() || char == '<';
        self.state = match recipient.and_then(|rest| rest.split(ends).next()) {
            Some(name) if !name.is_empty() => State::To(name.to_owned()),
            _ => State::Message(!head.contains("<|channel|>analysis")),
        };
        self.held = rest.to_owned();
        true
    }

    /// What is held before the first of these marks, which is taken away. Without one, gives what can be none of them; white space
    /// at its end waits, for it goes with a mark.
    fn until(
        &mut self,
        marks: &[&str],
        said: &mut Vec<Utterance>,
        of: fn(String) -> Utterance,
    ) -> Option<String> {
        let found = marks.iter().filter_map(|mark| Some((self.held.find(mark)?, mark.len()))).min();
        if let Some((place, length)) = found {
            let rest = self.held.split_off(place + length);
            let mut text = std::mem::replace(&mut self.held, rest);
            text.truncate(place);
            return Some(text);
        }
        if self.state == State::Calling || matches!(self.state, State::To(_)) {
            return None;
        }
        let begins = |place: &usize| {
            self.held.is_char_boundary(*place)
                && marks.iter().any(|mark| mark.starts_with(&self.held[*place..]))
        };
        let certain = (0..self.held.len()).find(begins).unwrap_or(self.held.len());
        let certain = self.held[..certain].trim_end().len();
        let kept = self.held.split_off(certain);
        said.push(of(std::mem::replace(&mut self.held, kept)));
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::fields::Fields;

    fn tools(several: bool) -> Tools {
        let body = serde_json::json!({"parallel_tool_calls": several, "tools": [{"type": "function", "function": {
            "name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}}]});
        Tools::read(&mut Fields::parse(body.to_string().as_bytes()).unwrap()).unwrap()
    }

    /// What is read of an answer, joined, however it comes.
    fn read(reading: &Reading, text: &str) -> Vec<Utterance> {
        let mut all = Vec::new();
        for size in 1..=text.len() {
            let (mut spoken, mut said) = (reading.begin(), Vec::<Utterance>::new());
            let chars: Vec<char> = text.chars().collect();
            let mut parts: Vec<Utterance> =
                chars.chunks(size).flat_map(|part| spoken.push(&part.iter().collect::<String>())).collect();
            parts.extend(spoken.finish());
            for part in parts {
                match (said.last_mut(), part) {
                    (Some(Utterance::Thought(before)), Utterance::Thought(text))
                    | (Some(Utterance::Content(before)), Utterance::Content(text)) => before.push_str(&text),
                    (_, part) => said.push(part),
                }
            }
            all.push(said);
        }
        assert!(all.windows(2).all(|pair| pair[0] == pair[1]), "{text}: {all:#?}");
        all.pop().unwrap()
    }

    fn reading(calls: Option<CallFormat>, thinks: bool) -> Reading {
        Reading { thinks, is_thinking: false, calls, tools: tools(true) }
    }

    fn call(arguments: &str) -> Utterance {
        Utterance::Calls(vec![Call { name: "f".into(), arguments: arguments.into() }])
    }

    #[test]
    fn thoughts_words_and_calls_are_told_apart_however_the_text_comes() {
        use Utterance::{Content, Thought};
        let hermes = reading(Some(CallFormat::Hermes), true);
        for (text, said) in [
            ("<think>\nhm\n</think>\n\nYes.", vec![Thought("hm".into()), Content("Yes.".into())]),
            ("a < b <tool", vec![Content("a < b <tool".into())]),
            ("<think>never ends", vec![Thought("never ends".into())]),
            (
                "Look:\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"x\"}}\n</tool_call>",
                vec![Content("Look:".into()), call(r#"{"a":"x"}"#)],
            ),
            (
                "<tool_call>\nnonsense\n</tool_call>",
                vec![Content("<tool_call>\nnonsense\n</tool_call>".into())],
            ),
            ("é <think>", vec![Content("é <think>".into())]),
        ] {
            assert_eq!(read(&hermes, text), said, "{text}");
        }
        let open = Reading { is_thinking: true, ..hermes };
        assert_eq!(read(&open, "hm</think>\nYes"), [Thought("hm".into()), Content("Yes".into())]);
        let plain = reading(None, false);
        assert_eq!(read(&plain, "  <tool_call>\n"), [Content("  <tool_call>\n".into())]);
    }

    #[test]
    fn every_way_of_writing_calls_is_read() {
        for (format, text, arguments) in [
            (CallFormat::Llama, r#"{"name": "f", "parameters": {"a": "x"}}"#, r#"{"a":"x"}"#),
            (CallFormat::Llama, r#"<|python_tag|>{"name": "f", "parameters": {}}"#, "{}"),
            (CallFormat::Mistral, r#"[TOOL_CALLS][{"name": "f", "arguments": {"a": "x"}}]"#, r#"{"a":"x"}"#),
            (CallFormat::Mistral, r#"[TOOL_CALLS] [{"name": "f", "arguments": {}}]"#, "{}"),
            (CallFormat::MistralNamed, r#"[TOOL_CALLS]f[ARGS]{"a": "x"}"#, r#"{"a":"x"}"#),
            (CallFormat::MistralNamed, r#"[TOOL_CALLS]f{"a": 1}"#, r#"{"a":1}"#),
            (
                CallFormat::Tagged,
                "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>",
                r#"{"a":"1","b":2}"#,
            ),
            (
                CallFormat::Harmony,
                r#"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "x"}<|call|>"#,
                r#"{"a": "x"}"#,
            ),
        ] {
            assert_eq!(read(&reading(Some(format), false), text), [call(arguments)], "{text}");
        }
        let two = r#"{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}"#;
        let llama = reading(Some(CallFormat::Llama), false);
        assert!(matches!(&read(&llama, two)[..], [Utterance::Calls(calls)] if calls.len() == 2));
        let one = Reading { tools: tools(false), ..llama.clone() };
        assert_eq!(read(&one, two), [call("{}")], "parallel_tool_calls: false");
        let json = r#"{"colour": "red"}"#;
        assert_eq!(read(&llama, json), [Utterance::Content(json.into())], "no call");
    }

    #[test]
    fn harmonys_channels_are_thoughts_and_words() {
        let text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.";
        let said = read(&reading(Some(CallFormat::Harmony), false), text);
        assert_eq!(said, [Utterance::Thought("hm".into()), Utterance::Content("Yes.".into())]);
    }
}
